"""The fault of a cell, made ready to strike one run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from interlock.backends.faults import Fault

from .sweep_device import Device
from .sweep_hooks import HookStrike
from .sweep_points import Cell, InjectedFault

FIRST = ("data", "after")
"""The hook that fails first where a second fault is to strike the way out: all is whole, so it can rescue."""


@dataclass
class Armed:
    """The fault of one cell, ready to strike.

    Attributes:
        hook: Where a hook is struck.
        backend: Where calls of the backend are.
        device: Where an operation of the simulated device is.
        raised: Gets every injected error.
        release: Lets go of what blocks.
    """

    hook: HookStrike | None = None
    backend: tuple[Fault, ...] = ()
    device: Any = None
    raised: list[BaseException] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def make(self, kind: str, where: str) -> BaseException:
        """An error of a kind, which is remembered."""
        made: BaseException
        if kind == "memory":
            made = torch.OutOfMemoryError(f"injected: out of memory at {where}")
        elif kind == "interrupt":
            made = KeyboardInterrupt()
        else:
            made = InjectedFault(f"injected at {where}")
        self.raised.append(made)
        return made

    def struck(self, layer: str) -> int:
        """How often the fault struck: of two, the one on the way out."""
        if layer == "hook":
            return self.hook.struck if self.hook is not None else 0
        if layer == "backend":
            return sum(fault.struck for fault in self.backend)
        return int(self.device.struck) if self.device is not None else 0


def arm(cell: Cell, device: Device) -> Armed:
    """The fault of a cell."""
    point, armed = cell.point, Armed()
    make = partial(armed.make, cell.fault, str(point))
    if point.failed:
        armed.hook = HookStrike(*FIRST, 1, partial(armed.make, "error", "the end of the data"))
    if point.layer == "hook":
        armed.hook = HookStrike(point.name, point.moment, point.nth, make)
    elif point.layer == "backend":
        times = 2 if cell.fault == "twice" else 1
        block = armed.release if cell.fault == "blocks" else None
        armed.backend = (Fault(point.name, point.moment, point.nth, make, times, block),)
    elif point.layer == "device":
        armed.device = device.strike(point.name, point.nth, cell.fault, make, armed.release)
    return armed
