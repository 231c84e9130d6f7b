"""Kernels of the simulated device for what is more than computing: making memory, copying, waiting, setting.

Also those for operators whose way through torch would differ from the CPU's, so that other kernels, and
other bits, came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import private
from .faults import faults
from .kernels import (
    HOST,
    Refusal,
    adopt,
    alias,
    finish_strike,
    host_of,
    kernel,
    marked,
    run,
    state,
    undo_half,
    wrap,
)
from .memory import memory

aten = torch.ops.aten


# Making


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """New memory; with unknown values, or NaN."""
    _check(device, layout)
    form = memory_format or torch.contiguous_format
    return _made(torch.empty(size, dtype=dtype, device=HOST, memory_format=form))


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """New memory with these strides, in elements."""
    _check(device, layout)
    return _made(torch.empty_strided(size, stride, dtype=dtype, device=HOST))


def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """A derivative that is known to be zero, which torch makes without memory where it can."""
    return wrap(torch.zeros(size, dtype=dtype, device=HOST), "aten::_efficientzerotensor")


def _made(host: torch.Tensor) -> torch.Tensor:
    if memory.poison and (host.is_floating_point() or host.is_complex()):
        host.fill_(float("nan"))
    return wrap(host, "aten::empty")


def _check(device: torch.device | None, layout: torch.layout | None) -> None:
    if device is not None and torch.device(device).index not in (None, 0):
        raise RuntimeError(
            f"SIM error: invalid device ordinal: there is one simulated device, sim:0, and no {device}"
        )
    if layout not in (None, torch.strided):
        raise Refusal(f"SIM error: a tensor of layout {layout} cannot stand on the simulated device")


# Copying


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy values between the device and the host, or on the device; dtypes may differ."""
    here, there = _on_device(source), _on_device(target)
    point = ("on_device" if here else "to_device") if there else "to_host"
    struck = faults.passes(point, "aten::_copy_from")
    before = alias(source) if here else source
    after = alias(target) if there else target
    if struck is not None and struck.how == "half":
        old = after.clone()
        after.copy_(before)
        undo_half([after], [old])
    else:
        after.copy_(before)
    if struck is not None:
        finish_strike(struck)
    return target


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == state.device.type


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same, to a tensor of the host that takes the source's size."""
    if not _on_device(target):
        target.resize_(source.size())
    return copy_from(source, target)


def to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """`Tensor.to` where something changes.

    Every copy waits: one that does not would ask for an allocator of pinned memory, which a device in Python
    cannot have.
    """
    made: torch.Tensor = aten._to_copy.default.redispatch(
        private.CPU_KEYS,
        self,
        dtype=dtype,
        layout=layout,
        device=device,
        pin_memory=pin_memory,
        non_blocking=False,
        memory_format=memory_format,
    )
    return made


def item(self: torch.Tensor) -> Any:
    """A Python number: the host waits for the device, and copies."""
    struck = faults.passes("to_host", "aten::_local_scalar_dense")
    value = aten._local_scalar_dense(alias(self))
    if struck is not None:
        finish_strike(struck)
    return value


# Pinned memory: on the host, and known by its storage.


def pin_memory(self: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy in memory that is marked as pinned; nothing is faster for it here."""
    pinned = self.clone()
    pinned.untyped_storage()._pinned_for_simulation = True  # type: ignore[attr-defined]
    return pinned


def is_pinned(self: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether `pin_memory` made it."""
    return hasattr(self.untyped_storage(), "_pinned_for_simulation")


# Changing what a tensor stands over


def as_strided(
    self: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """A view, which most others become: no tensor of the host has to be made for it."""
    struck = faults.passes("operator", "aten::as_strided")
    made = private.empty_of((0,), self.dtype)
    offset = self.storage_offset() if storage_offset is None else storage_offset
    private.put(made, self.untyped_storage(), offset, size, stride)
    if struck is not None:
        finish_strike(struck)
    return marked(made, self)


def resize(
    self: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """`Tensor.resize_`: new memory where the old is too small, with its values."""
    shape = torch.empty(size, dtype=self.dtype, device="meta")
    needed = (shape.numel() + self.storage_offset()) * self.element_size()
    storage = self.untyped_storage()
    if needed > storage.nbytes():
        larger = torch.empty(needed, dtype=torch.uint8, device=HOST)
        old = torch.empty(0, dtype=torch.uint8, device=HOST).set_(host_of(storage))
        larger[: storage.nbytes()].copy_(old)
        storage = adopt(larger.untyped_storage(), "aten::resize_")
    return private.put(self, storage, self.storage_offset(), shape.size(), shape.stride())


def on_host_keys(operator: Any) -> Callable[..., Any]:
    """The CPU's own kernel, on the tensors of the device as they are: it looks at sizes only."""

    def redispatch(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(private.CPU_KEYS, *args, **kwargs)

    return redispatch


def record_stream(self: torch.Tensor, stream: Any) -> None:
    """Nothing to do: there is one queue, and it is always empty."""


# Operators that torch would take apart otherwise than on the CPU


def convolution(*args: Any) -> Any:
    """Devices outside of torch have a convolution of their own to give."""
    return run(aten.convolution.default, *args)


def convolution_backward(grad: Any, input: Any, weight: Any, *rest: Any) -> Any:  # noqa: A002 - torch's name
    """Its gradients. torch does not tell such devices the bias's size: that of the output's channels."""
    transposed, groups = rest[3], rest[5]
    bias = [weight.size(1) * groups if transposed else weight.size(0)]
    return run(aten.convolution_backward.default, grad, input, weight, bias, *rest)


_FLASH = 1
"""What `_fused_sdp_choice` says for the kernel that the CPU has."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention by the kernel that the CPU would choose."""
    mask = attn_mask
    if query.dim() == 4 and not dropout_p and not enable_gqa:
        q, k, v = (alias(t.detach()).requires_grad_(t.requires_grad) for t in (query, key, value))
        given = None if mask is None else alias(mask.detach())
        if aten._fused_sdp_choice(q, k, v, given, dropout_p, is_causal, scale=scale) == _FLASH:
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
            flash = aten._scaled_dot_product_flash_attention_for_cpu
            out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
            return out
    math = aten._scaled_dot_product_attention_math
    plain: torch.Tensor = math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def lstm_cell(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    """The cell that torch takes for a fused one on every device but the CPU, from plain operators."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = (input_gates + input_bias) + (hidden_gates + hidden_bias)
    entry, forget, cell, out = gates.chunk(4, 1)
    state_ = forget.sigmoid() * cx + entry.sigmoid() * cell.tanh()
    return out.sigmoid() * state_.tanh(), state_, gates


def gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    """The same for a gated recurrent unit."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    reset_in, update_in, new_in = input_gates.chunk(3, 1)
    reset_h, update_h, new_h = hidden_gates.chunk(3, 1)
    update = (update_in + update_h).sigmoid()
    new = (new_in + (reset_in + reset_h).sigmoid() * new_h).tanh()
    return (hx - new) * update + new, new


def refuse(operator: Any, *_: Any, **__: Any) -> Any:
    """In place of all kernels for tensors that are not dense."""
    raise Refusal(
        f"SIM error: {operator} on a sparse or quantized tensor: such cannot stand on the simulated device. "
        "Use a dense one here (an embedding with sparse=False), or test this on another backend"
    )


_SET = ("source_Storage_storage_offset", "source_Storage", "source_Tensor", "source_Tensor_storage_offset")

SPECIAL: dict[str, Callable[..., Any]] = {
    "_to_copy": to_copy,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_efficientzerotensor": zeros,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "as_strided": as_strided,
    "resize_": resize,
    "_local_scalar_dense": item,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "record_stream": record_stream,
    **{f"set_.{overload}": on_host_keys(getattr(aten.set_, overload)) for overload in _SET},
}
"""Operator -> its kernel on the device."""
COMPOSED: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
    "scaled_dot_product_attention": attention,
}
"""Operator -> what it is composed of here, above autograd."""
ON_HOST: dict[str, Callable[..., Any]] = {"_pin_memory": pin_memory, "is_pinned": is_pinned}
"""Operator -> its kernel on the host while the device is registered."""


def pinned_to_host() -> list[tuple[str, Callable[..., Any]]]:
    """Operators that have a kernel for the CPU and a composition of others, too: the kernel is taken.

    For the same bits, and since one operator is faster than several.
    """
    explicit = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    composite = (*explicit, "CompositeImplicitAutograd")
    found = []
    for short, operator in private.operators():
        full = f"aten::{short}"
        packet = short.partition(".")[0]
        if short in SPECIAL or short in COMPOSED or "quantize" in short:
            continue
        if torch.Tag.inplace_view in operator.tags and packet.startswith("resize"):
            continue
        if not any(private.has_kernel(full, key) for key in composite):
            continue
        if private.has_kernel(full, "CPU") or short.startswith("_foreach_"):
            found.append((short, kernel(operator)))
    return found
