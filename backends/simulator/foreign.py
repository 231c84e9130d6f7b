"""What foreign code hard-codes (`.cuda()`, `device="cuda"`, `torch.cuda.synchronize()`) on this device.

Either each place is refused, with file and line; or it is carried out on this device, and noted.
Never skipped, and never run on the CPU.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from interlock.backends.errors import DeviceInUse, ForeignDevice, ForeignMisused

from . import private
from .tensors import state

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_WRAPPERS = frozenset(("typing_extensions",))
"""Modules outside of Python's own library whose functions only stand around others, such as `deprecated`."""
_KINDS = ("cuda",)


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


class Block:
    """One block of `foreign`: what it has found, and whether it maps."""

    def __init__(self, maps: bool) -> None:
        self.maps = maps
        self.found: list[Found] = []


class Watching:
    """The blocks that are in force, on whichever threads; what is found is told to each."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: tuple[Block, ...] = ()

    def begins(self, block: Block) -> bool:
        """A block begins.

        Returns:
            Whether it is the first.

        Raises:
            DeviceInUse: Others in force want it the other way.
        """
        with self.lock:
            if any(other.maps != block.maps for other in self.blocks):
                raise DeviceInUse(
                    "code that names CUDA is mapped by one block and refused by another, in force at the "
                    "same time: torch.cuda is one for the whole process. End the other one first, or let "
                    "both do the same"
                )
            self.blocks = (*self.blocks, block)
            return len(self.blocks) == 1

    def ends(self, block: Block) -> bool:
        """A block ends.

        Returns:
            Whether it was the last.
        """
        with self.lock:
            self.blocks = tuple(other for other in self.blocks if other is not block)
            return not self.blocks

    def meets(self, what: str) -> None:
        """Remember a place, or refuse it.

        Raises:
            ForeignDevice: It is refused.
        """
        place = self._place(what)
        if not all(block.maps for block in self.blocks):
            raise ForeignDevice(
                f"{place.where} names CUDA itself ({what}), and this runs on the simulated device. Take the "
                "device from the batch or the model (`x.to(model.weight.device)`), leave moving to the "
                "engine, or map such calls: simulator.foreign('map')"
            )

    def cannot(self, what: str) -> None:
        """Remember a place that asks CUDA for what the simulated device does not have; refused either way.

        Raises:
            ForeignDevice: Always.
        """
        place = self._place(what)
        raise ForeignDevice(
            f"{place.where} asks CUDA itself for {what}, and the simulated device has nothing to map it to: "
            "leave it out here, or do it only where `torch.device(...).type == 'cuda'`"
        )

    def _place(self, what: str) -> Found:
        place = Found(what, _caller())
        with self.lock:
            for block in self.blocks:
                if place not in block.found:
                    block.found.append(place)
        return place


watching = Watching()


class _Mode(TorchFunctionMode):
    """Sees every call of a torch function on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and func == private.IS_CUDA:
            return args[0].device.type == state.device.type
        if name == "type" and len(args) > 1 and "cuda" in str(args[1]):
            return _typed(args[0], args[1])
        if any(map(names_cuda, args)) or any(map(names_cuda, kwargs.values())):
            watching.meets(f"device '{_first(args, kwargs)}' in {name}")
            args = tuple(map(_ours, args))
            kwargs = {key: _ours(value) for key, value in kwargs.items()}
        elif _numbered(name, args, kwargs):
            watching.meets(f"a device by its number in {name}")
        if kwargs.get("pin_memory") is True:
            watching.meets(f"pin_memory=True in {name}")
            # Of a tensor that is made on the host; torch would ask for an allocator of pinned memory.
            made: torch.Tensor = func(*args, **{**kwargs, "pin_memory": False})
            return private.pinned(made)
        return func(*args, **kwargs)


def _typed(tensor: torch.Tensor, kind: Any) -> torch.Tensor:
    name = str(kind) if isinstance(kind, str) else f"torch.cuda.{kind.__name__}"
    watching.meets(f"Tensor.type('{name}')")
    plain: Any = getattr(torch, name.rpartition(".")[2])
    return tensor.to(state.device, plain.dtype)


def names_cuda(value: Any) -> bool:
    """Whether something is CUDA, or one of its devices, as text or as a device."""
    if type(value) is str:
        return value.partition(":")[0] in _KINDS
    return type(value) is torch.device and value.type in _KINDS


def _first(args: Any, kwargs: Any) -> Any:
    return next(value for value in (*args, *kwargs.values()) if names_cuda(value))


def _numbered(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a device is named by a number: torch takes it for one of the accelerator, as this is."""
    positional = name == "to" and len(args) > 1 and type(args[1]) is int
    return positional or type(kwargs.get("device")) is int


def _ours(value: Any) -> Any:
    return state.device if names_cuda(value) else value


def from_torch(frame: Any) -> bool:
    """Whether a frame is of torch, or of this package."""
    file: str = frame.f_code.co_filename
    return file.startswith((_TORCH, _OURS))


def _from_library(frame: Any) -> bool:
    """The same, or of Python itself: it says nothing of who asks."""
    file = frame.f_code.co_filename
    if from_torch(frame) or file.startswith("<") or frame.f_globals.get("__name__") in _WRAPPERS:
        return True
    return file.startswith(_PYTHON) and not file.startswith(_PACKAGES)


def _caller() -> str:
    """File and line of the innermost frame that is of none of these libraries."""
    frame: Any = sys._getframe(1)
    while frame is not None and _from_library(frame):
        frame = frame.f_back
    return (
        f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a place that is not known"
    )


@contextmanager
def foreign(how: str = "map") -> Iterator[list[Found]]:
    """Within the block, code that names CUDA itself is mapped to the simulated device, or refused.

    `Tensor.cuda`, `Module.cuda`, `Tensor.pin_memory`, `torch.cuda`, `torch.autocast` and
    `torch.amp.GradScaler` on all threads. Devices named in calls of torch, also by number, and
    `pin_memory=True` on threads that are within a block; a device named on another one is refused with file
    and line, and so is everywhere what this device does not have (a generator, a graph). Pinned memory and
    devices by number are at work on this device as they are, and are told.

    Blocks may be nested and stand on several threads; each is told of what any thread does meanwhile.

    Args:
        how: `map`, or `refuse`.

    Yields:
        The places that were met, each once; complete when the block ends.

    Raises:
        ForeignDevice: With file and line, where such code is refused.
        DeviceInUse: A block in force, here or on another thread, wants it the other way.
        ForeignMisused: Neither of them.
    """
    from . import patches

    if how not in ("map", "refuse"):
        raise ForeignMisused(f"code that names CUDA is mapped or refused: 'map' or 'refuse', and not {how!r}")
    block = Block(how == "map")
    with watching.lock:
        if watching.begins(block):
            try:
                patches.put_in()
            except BaseException:
                watching.ends(block)
                raise
    try:
        with _Mode():
            yield block.found
    finally:
        with watching.lock:
            if watching.ends(block):
                patches.take_out()
