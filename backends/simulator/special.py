"""Kernels of the simulated device for what is more than computing: making, copying, waiting, setting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import composed, private
from .faults import faults
from .kernels import kernel, mixed, undo_half
from .memory import memory
from .tensors import HOST, Refusal, alias, marked, newest, state, wrap

aten = torch.ops.aten
META = torch.device("meta")


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
    # torch gives an operator with any tensor on meta to a kernel for shapes only, which asks for a result
    # where the first one stands, and leaves it as it is.
    asker = sys._getframe(2).f_code
    if asker.co_filename == private.META_KERNELS:
        raise mixed(META, asker.co_name)
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
        faults.finish(struck)
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
        faults.finish(struck)
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
        faults.finish(struck)
    return marked(made, self)


def set_to(operator: Any) -> Callable[..., Any]:
    """`Tensor.set_`: the CPU's own kernel, on the tensors as they are: it looks at sizes only."""

    def redispatch(self: torch.Tensor, source: Any, *args: Any) -> Any:
        struck = faults.passes("operator", "aten::set_")
        if struck is not None and struck.how == "half":
            faults.finish(struck)
        if isinstance(source, torch.UntypedStorage):
            source = newest(source)
        made = operator.redispatch(private.CPU_KEYS, self, source, *args)
        if struck is not None:
            faults.finish(struck)
        return made

    return redispatch


def record_stream(self: torch.Tensor, stream: Any) -> None:
    """Nothing to do: there is one queue, and it is always empty."""
    faults.asked("record_stream")


# Refusing


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
    "resize_": kernel(aten.resize_.default),
    "_local_scalar_dense": item,
    "convolution_overrideable": composed.convolution,
    "convolution_backward_overrideable": composed.convolution_backward,
    "record_stream": record_stream,
    **{f"set_.{overload}": set_to(getattr(aten.set_, overload)) for overload in _SET},
}
"""Operator -> its kernel on the device."""
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
        if short in SPECIAL or short in composed.COMPOSED or "quantize" in short:
            continue
        if torch.Tag.inplace_view in operator.tags and packet.startswith("resize"):
            continue
        if not any(private.has_kernel(full, key) for key in composite):
            continue
        if private.has_kernel(full, "CPU") or short.startswith("_foreach_"):
            found.append((short, kernel(operator)))
    return found
