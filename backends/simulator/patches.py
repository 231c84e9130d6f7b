"""What stands in `torch.cuda`, and in some classes of torch, while a block of `foreign` is in force."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import private
from .foreign import from_torch, names_cuda, watching
from .tensors import state

_QUERIES = frozenset(("is_available", "device_count", "is_initialized", "init"))
"""Asked by code that then does the right thing whatever the answer is: mapped, and not remembered."""
_PARTS = ("memory", "random", "streams")
"""Modules of `torch.cuda` that its functions come from."""
_MARKS = ("range_push", "range_pop", "range_start", "range_end", "mark")
"""Of `torch.cuda.nvtx`: marks for a profiler of CUDA's, which have no effect on anything."""
_ABSENT = ("CUDAGraph", "MemPool", "ExternalStream")
"""Classes of `torch.cuda` that this device has nothing for."""

_undo: list[Callable[[], None]] = []


def put_in() -> None:
    """Put ours in place; where that fails, what was put is taken out again."""
    try:
        _functions()
        _classes()
    except BaseException:
        take_out()
        raise


def take_out() -> None:
    """Put back what stood there."""
    while _undo:
        _undo.pop()()


def _patch(owner: Any, name: str, new: Any) -> None:
    if name in vars(owner):
        _undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, new)


def _functions() -> None:
    sim: Any = sys.modules["torch.sim"]
    ours = {name: value for name, value in vars(sim).items() if not name.startswith("_") and callable(value)}
    owners: list[ModuleType] = [torch.cuda, *(sys.modules[f"torch.cuda.{part}"] for part in _PARTS)]
    for owner in owners:
        for name in ours.keys() & vars(owner).keys():
            if isinstance(ours[name], type) and issubclass(ours[name], BaseException):
                continue  # the same class there
            told = ours[name] if name in _QUERIES else _told(f"torch.cuda.{name}", ours[name])
            _patch(owner, name, told)
    for name in _MARKS:
        _patch(torch.cuda.nvtx, name, _told(f"torch.cuda.nvtx.{name}", _nothing))
    # Whatever else needs CUDA comes here first, also what was imported by name before the block.
    _patch(torch.cuda, private.LAZY_INIT, functools.partial(_cannot, "what only CUDA has"))
    _patch(torch.Tensor, "cuda", _cuda)
    _patch(torch.Tensor, "pin_memory", _pin_memory)


def _classes() -> None:
    for kind in (torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler):
        _patch(kind, "__init__", _with_device_type(kind))
    for name in _ABSENT:
        if name in vars(torch.cuda):
            _patch(torch.cuda, name, _Absent(name, (), {}))
    for name, legacy in list(vars(torch.cuda).items()):
        if name.endswith("Tensor") and isinstance(legacy, type) and name in vars(torch):
            _patch(torch.cuda, name, _Legacy(name, (), {}))
    _patch(torch, "Generator", _Generators("Generator", (), {}))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _cannot(what: str, *_: Any, **__: Any) -> None:
    watching.cannot(what)


def _told(what: str, ours: Any) -> Any:
    if isinstance(ours, type):
        return type(ours.__name__, (ours,), {"__init__": _told(what, vars(ours)["__init__"])})

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch itself asks all devices for some things, as when the generators are seeded.
        if not from_torch(sys._getframe(1)):
            watching.meets(what)
        return ours(*args, **kwargs)

    return call


def _cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    watching.meets("Tensor.cuda")
    return self.to(state.device, memory_format=memory_format)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    watching.meets("Tensor.pin_memory")
    return private.pinned(self)


class _Absent(type):
    """Of a class that cannot be made here."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        watching.cannot(f"torch.cuda.{cls.__name__}")


class _Legacy(type):
    """Of `torch.cuda.FloatTensor` and its like: makes a tensor, and knows one."""

    def __call__(cls, *args: Any, **_: Any) -> Any:
        watching.meets(f"torch.cuda.{cls.__name__}")
        return getattr(torch, cls.__name__)(*args).to(state.device)

    def __instancecheck__(cls, instance: Any) -> bool:
        dtype = getattr(torch, cls.__name__).dtype
        there = isinstance(instance, torch.Tensor) and instance.device.type == state.device.type
        return there and instance.dtype == dtype


_generator = torch.Generator


class _Generators(type):
    """Of `torch.Generator`: none can be made for CUDA, and all others are what they were."""

    def __call__(cls, device: Any = "cpu") -> Any:
        if names_cuda(device):
            watching.cannot(f"a generator on '{device}'")
        return _generator(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _generator)


def _with_device_type(kind: type) -> Any:
    before: Any = vars(kind)["__init__"]
    default = kind is torch.amp.grad_scaler.GradScaler

    @functools.wraps(before)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        words = list(args)
        name = "device" if default else "device_type"
        given = words[0] if words else kwargs.get(name, "cuda" if default else None)
        if names_cuda(given):
            watching.meets(f"{kind.__name__}('{given}')")
            if words:
                words[0] = state.device.type
            else:
                kwargs[name] = state.device.type
        before(self, *words, **kwargs)

    return init
