"""A simulated accelerator: a PyTorch device of its own, `sim:0`, in Python, over memory of the host.

It is registered by `install()`, for the rest of the process, and never by importing this. Its tensors are
plain `torch.Tensor`s, its results bit for bit those of the CPU; its memory is counted to the byte and can be
short; faults strike it by number or by seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from interlock.backends.errors import ForeignDevice, ForeignMisused, StrikeMisused

from .device import NAME, install, installed, parameters, taken_by, unavailable
from .faults import faults
from .foreign import Found, foreign
from .memory import Allocation, Block, Memory, memory
from .module import synchronize
from .strikes import HOWS, POINTS, SimulatedFault, SimulatedLoss, Strike, draw
from .tensors import Refusal

__all__ = [
    "HOWS",
    "NAME",
    "POINTS",
    "Block",
    "ForeignDevice",
    "ForeignMisused",
    "Found",
    "Memory",
    "Refusal",
    "SimulatedFault",
    "SimulatedLoss",
    "Strike",
    "StrikeMisused",
    "block_of",
    "capacity",
    "counted",
    "counts",
    "draw",
    "foreign",
    "install",
    "installed",
    "lost",
    "memory",
    "owner",
    "parameters",
    "poisoned",
    "replug",
    "stacks",
    "striking",
    "synchronize",
    "taken_by",
    "touched",
    "traced",
    "unavailable",
]

counted = faults.counted
striking = faults.striking
traced = faults.traced
owner = memory.owner


def counts() -> dict[str, int]:
    """How often each point has been passed since the process began."""
    return dict(faults.counts)


def lost() -> str:
    """Why the device is dead; empty while it lives."""
    return faults.lost


def touched() -> tuple[str, ...]:
    """What was asked of the device after it was lost: nothing, if whoever used it kept to the rules."""
    return tuple(faults.touched)


def replug() -> None:
    """Put a new device in the place of a lost one, which only a simulator can; adapters take it again."""
    from interlock.backends.device import forget_loss

    faults.replug()
    if installed():
        forget_loss(torch.device(NAME, 0))


def block_of(tensor: torch.Tensor) -> Block | None:
    """The allocation that a tensor of the device stands in; `None` for any other tensor."""
    if tensor.layout is not torch.strided:
        return None
    allocation = getattr(tensor.untyped_storage(), "_simulated", None)
    return memory.block(allocation.sequence) if type(allocation) is Allocation else None


def capacity(nbytes: int | None) -> AbstractContextManager[Memory]:
    """Within the block the device has so many bytes in all, those that are taken already among them."""
    return _within("capacity", nbytes)


def stacks() -> AbstractContextManager[Memory]:
    """Within the block each allocation remembers where it was made, which takes time."""
    return _within("stacks", True)


def poisoned() -> AbstractContextManager[Memory]:
    """Within the block memory that was not written yet reads as NaN."""
    return _within("poison", True)


@contextmanager
def _within(setting: str, value: int | None) -> Iterator[Memory]:
    before = getattr(memory, setting)
    setattr(memory, setting, value)
    try:
        yield memory
    finally:
        setattr(memory, setting, before)
