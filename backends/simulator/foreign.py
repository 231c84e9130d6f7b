"""What foreign code hard-codes (`.cuda()`, `device="cuda"`, `torch.cuda.synchronize()`) on this device.

Either each place is refused, with file and line; or it is carried out on this device, and noted.
Never skipped, and never run on the CPU.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from interlock.backends.errors import ForeignDevice

from .kernels import state

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_KINDS = ("cuda",)
_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__
_QUERIES = frozenset(("is_available", "device_count", "is_initialized", "init", "_lazy_init"))
"""Asked by code that then does the right thing whatever the answer is: mapped, and not remembered."""


@dataclass(frozen=True)
class Found:
    """One place that names a device of its own.

    Attributes:
        what: Such as `Tensor.cuda` or `torch.cuda.synchronize`.
        where: `file:line`.
    """

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class _Foreign:
    def __init__(self, maps: bool) -> None:
        self.maps = maps
        self.found: list[Found] = []
        self._lock = threading.Lock()

    def meets(self, what: str) -> None:
        """Remember a place, or refuse it."""
        place = Found(what, _caller())
        with self._lock:
            if place not in self.found:
                self.found.append(place)
        if not self.maps:
            raise ForeignDevice(
                f"{place.where} names CUDA itself ({what}), and this runs on the simulated device. Take the "
                "device from the batch or the model (`x.to(model.weight.device)`), leave moving to the "
                "engine, or map such calls: simulator.foreign('map')"
            )


class _Mode(TorchFunctionMode):
    """Sees every call of a torch function on this thread."""

    def __init__(self, foreign: _Foreign) -> None:
        super().__init__()
        self._foreign = foreign

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.cuda:
            self._foreign.meets("Tensor.cuda")
            return args[0].to(state.device)
        if name == "__get__" and func == _IS_CUDA:
            return args[0].device.type == state.device.type
        if any(map(_names_cuda, args)) or any(map(_names_cuda, kwargs.values())):
            self._foreign.meets(f"device '{_first(args, kwargs)}' in {name}")
            args = tuple(map(_ours, args))
            kwargs = {key: _ours(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _names_cuda(value: Any) -> bool:
    if type(value) is str:
        return value.partition(":")[0] in _KINDS
    return type(value) is torch.device and value.type in _KINDS


def _first(args: Any, kwargs: Any) -> Any:
    return next(value for value in (*args, *kwargs.values()) if _names_cuda(value))


def _ours(value: Any) -> Any:
    return state.device if _names_cuda(value) else value


def _caller() -> str:
    """File and line of the innermost frame outside of torch and of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return (
        f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a place that is not known"
    )


@contextmanager
def foreign(how: str = "map") -> Iterator[list[Found]]:
    """Within the block, code that names CUDA itself is mapped to the simulated device, or refused.

    `Tensor.cuda`, devices named in calls of torch on the thread that enters the block; `Module.cuda`,
    `torch.cuda`, `torch.autocast` and `torch.amp.GradScaler` on all threads.

    Args:
        how: `map`, or `refuse`.

    Yields:
        The places that were met, each once; complete when the block ends.

    Raises:
        ForeignDevice: With file and line, where such code is refused.
        ValueError: Neither of them.
    """
    if how not in ("map", "refuse"):
        raise ValueError(f"code that names CUDA is mapped or refused: 'map' or 'refuse', and not {how!r}")
    seen = _Foreign(how == "map")
    with _mapped_names(seen), _Mode(seen):
        yield seen.found


@contextmanager
def _mapped_names(foreign: _Foreign) -> Iterator[None]:
    """Functions of `torch.cuda` that `torch.sim` has too, and classes that take a device type as text."""
    sim: Any = sys.modules["torch.sim"]
    undo: list[Callable[[], None]] = []

    def patch(owner: Any, name: str, new: Any) -> None:
        old = vars(owner)[name]
        setattr(owner, name, new)
        undo.append(functools.partial(setattr, owner, name, old))

    for name, ours in vars(sim).items():
        if not name.startswith("__") and name in vars(torch.cuda) and callable(ours):
            patch(torch.cuda, name, ours if name in _QUERIES else _told(foreign, f"torch.cuda.{name}", ours))
    for kind in (torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler):
        patch(kind, "__init__", _with_device_type(foreign, kind))
    try:
        yield
    finally:
        while undo:
            undo.pop()()


def _told(foreign: _Foreign, what: str, ours: Any) -> Any:
    if isinstance(ours, type):
        return type(ours.__name__, (ours,), {"__init__": _told(foreign, what, vars(ours)["__init__"])})

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch itself asks all devices for some things, as when the generators are seeded.
        if not sys._getframe(1).f_code.co_filename.startswith(_LIBRARIES):
            foreign.meets(what)
        return ours(*args, **kwargs)

    return call


def _with_device_type(foreign: _Foreign, kind: type) -> Any:
    before: Any = vars(kind)["__init__"]
    default = kind is torch.amp.grad_scaler.GradScaler

    @functools.wraps(before)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        words = list(args)
        name = "device" if default else "device_type"
        given = words[0] if words else kwargs.get(name, "cuda" if default else None)
        if _names_cuda(given):
            foreign.meets(f"{kind.__name__}('{given}')")
            if words:
                words[0] = state.device.type
            else:
                kwargs[name] = state.device.type
        before(self, *words, **kwargs)

    return init
