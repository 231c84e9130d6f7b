"""One kernel for every operator: it is computed on host tensors over the same bytes.

A tensor of the device is a plain `torch.Tensor` whose storage says `sim:0`, over memory of the host that its
`Allocation` keeps. So there is nothing to copy, and a result is bit for bit that of the CPU. What is new in
a result becomes memory of the device, and is counted; what it shares with an argument stays shared.

This is run below autograd, for every operator, tens of thousands of times a second: what can be known of an
operator beforehand stands in its `Plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import private
from .faults import faults
from .memory import Allocation
from .plans import INDICES, Plan
from .strikes import Strike
from .tensors import (
    ATTRIBUTE,
    HOST,
    SPARSE,
    Refusal,
    alias,
    check_within,
    nbytes_of,
    newest,
    remember,
    resize_memory,
    state,
    wrap,
)

_Generator = torch.Generator
_GENERATOR = (
    "Expected a 'sim' device type for generator but found 'cpu': an accelerator does not draw from a "
    "generator of the host. Draw on the host and move the result, or leave `generator` out: the simulated "
    "device draws from the host's default one"
)


_plans: dict[Any, Plan] = {}


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out an operator; what torch calls for every one that has no kernel of its own here.

    Raises:
        RuntimeError: Tensors of two devices are mixed.
        Refusal: The result cannot stand on the device.
    """
    plan = _plans.get(operator)
    if plan is None:
        plan = _plans[operator] = Plan(operator)
    struck = faults.passes("operator", plan.name)
    if plan.indexing:
        args = _indexed(args)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hosts = list(args)
    given = len(hosts)
    call = plan.call
    for position in plan.converts:
        if position < given and hosts[position] is not None:
            if _plain(hosts[position]):
                # A number that torch had made a tensor of comes as a number again.
                call = plan.anyhow
            else:
                hosts[position] = _convert(hosts[position], plan, seen, position)
    named = {key: _convert(value, plan, seen, key) for key, value in kwargs.items()} if kwargs else kwargs
    if struck is not None:
        return _struck(struck, plan, args, kwargs, hosts, named, seen)
    out = call(*hosts, **named)
    return _results(plan, out, args, kwargs, seen)


def kernel(operator: Any) -> Callable[..., Any]:
    """`run`, bound to one operator."""

    def run_it(*args: Any, **kwargs: Any) -> Any:
        return run(operator, *args, **kwargs)

    return run_it


def _indexed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator that indexes; a value for one mask is a number, also in brackets."""
    if not hasattr(args[0].untyped_storage(), ATTRIBUTE):
        text = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        raise RuntimeError(text)
    value = args[INDICES + 1] if len(args) > INDICES + 1 else None
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        indices = [index for index in args[INDICES] if index is not None]
        masked = len(indices) == 1 and indices[0].dtype in (torch.bool, torch.uint8)
        if masked and value.numel() == 1:
            return (*args[: INDICES + 1], value.reshape(()), *args[INDICES + 2 :])
    return args


def _results(plan: Plan, out: Any, args: Any, kwargs: Any, seen: Any) -> Any:
    if plan.bumps:
        # Else a gradient would be computed from what a list operator has changed since.
        for key in plan.bumps:
            torch.autograd.graph.increment_version(args[key])
    if plan.reshapes:
        for tensor, host in seen:
            _follow(tensor, host, plan.name)
    if plan.returns:
        given = [args[key] if type(key) is int else kwargs[key] for key in plan.returns]
        return given[0] if len(given) == 1 else tuple(given)
    return _back(out, plan.name, seen)


def _convert(value: Any, plan: Plan, seen: list[tuple[torch.Tensor, torch.Tensor]], key: int | str) -> Any:
    if isinstance(value, torch.Tensor):
        return _host_tensor(value, plan, seen, key)
    if isinstance(value, (list, tuple)):
        plain = not value or _plain(value[0])
        return value if plain else [_convert(item, plan, seen, key) for item in value]
    if isinstance(value, torch.device):
        return HOST if value.type == state.device.type else value
    if isinstance(value, _Generator):
        raise RuntimeError(_GENERATOR)
    return value


def _plain(value: Any) -> bool:
    return type(value) in (int, bool, float, complex)


def _host_tensor(tensor: torch.Tensor, plan: Plan, seen: Any, key: int | str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise Refusal(SPARSE.format(plan.name))
    storage: Any = tensor.untyped_storage()
    found = getattr(storage, ATTRIBUTE, None)
    if type(found) is not Allocation:
        if tensor.device.type != state.device.type:
            if plan.takes_from_host(key, tensor):
                return tensor
            raise mixed(tensor.device, plan.name)
        zero = tensor._is_zerotensor()  # a derivative that is known to be zero has no memory at all
        host = torch.zeros(tensor.size(), dtype=tensor.dtype, device=HOST) if zero else alias(tensor)
    elif plan.reshapes or tensor.is_conj() or tensor.is_neg():
        host = alias(tensor)
    else:
        view = found.view
        if (
            view is not None
            and found.shape == tensor.shape
            and found.strides == tensor.stride()
            and found.dtype is tensor.dtype
            and not tensor.storage_offset()
        ):
            host = view
        else:
            if found.resized:
                check_within(tensor, found)
            host = torch.empty(0, dtype=tensor.dtype, device=HOST)
            offset = tensor.storage_offset()
            host.set_(found.host, offset, tensor.size(), tensor.stride())
            if not offset and not torch.is_inference_mode_enabled():
                remember(found, host)
    seen.append((tensor, host))
    return host


def mixed(other: torch.device, name: str) -> RuntimeError:
    """In the words of CUDA.

    Args:
        other: The device that is not ours.
        name: Of the operator.
    """
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{state.device} and {other}! (when checking argument in method {name})"
    )


def _back(out: Any, name: str, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(out, torch.Tensor):
        # Some return an argument without saying so in their schema.
        for tensor, host in seen:
            if host is out:
                return tensor
        return wrap(out, name)
    if isinstance(out, (list, tuple)):
        return type(out)(_back(item, name, seen) for item in out)
    return out


def _follow(tensor: torch.Tensor, host: torch.Tensor, name: str) -> None:
    """Let a tensor have the size, strides and memory that its host tensor was given."""
    same = host.size() == tensor.size() and host.stride() == tensor.stride()
    if same and host.storage_offset() == tensor.storage_offset():
        return
    storage: Any = tensor.untyped_storage()
    needed = nbytes_of(host.untyped_storage())
    if needed > storage.nbytes():
        # The host has enlarged it for its values: that is memory which is counted.
        try:
            storage = resize_memory(storage, needed, name)
        except BaseException:
            _shrink(seen=((tensor, host),))
            raise
    private.put(tensor, newest(storage), host.storage_offset(), host.size(), host.stride())


def _shrink(seen: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Take back what the host has enlarged, and nobody has counted."""
    for tensor, host in seen:
        counted = tensor.untyped_storage().nbytes()
        if nbytes_of(host.untyped_storage()) > counted:
            host.untyped_storage().resize_(counted)


# Faults


def _struck(
    strike: Strike, plan: Plan, args: Any, kwargs: Any, hosts: list[Any], named: Any, seen: Any
) -> Any:
    """Carry out an operator that a fault has struck: wholly, if it comes out later; or half."""
    if strike.how == "late":
        faults.later(strike)
        return _results(plan, plan.call(*hosts, **named), args, kwargs, seen)
    keys = plan.writes
    written = [hosts[key] if type(key) is int else named[key] for key in keys]
    tensors = [t for value in written for t in (value if isinstance(value, list) else [value])]
    before = [t.clone() for t in tensors]
    plan.call(*hosts, **named)
    undo_half(tensors, before)
    if plan.reshapes:
        _shrink(seen)
    raise strike.error()


def undo_half(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Take back the second half of what was written: of several tensors the later ones, else elements."""
    if len(tensors) > 1:
        for tensor, old in list(zip(tensors, before, strict=True))[(len(tensors) + 1) // 2 :]:
            tensor.copy_(old)
        return
    for tensor, old in zip(tensors, before, strict=True):
        if tensor.shape == old.shape:
            kept = (torch.arange(tensor.numel()) < (tensor.numel() + 1) // 2).view(tensor.shape)
            tensor.copy_(torch.where(kept, tensor, old))
