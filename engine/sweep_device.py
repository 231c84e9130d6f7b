"""The seam between a sweep and the simulated device: its operations, its memory, its faults.

On any other device there are no operations to strike, and memory is what the adapter counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from interlock.backends.adapter import Adapter

SLOW = 0.05
"""Seconds that a slow operation takes: less than any deadline that makes sense."""


class Device:
    """The device of a sweep's backend.

    Args:
        adapter: Of that backend; the name tells whether it is the simulated one.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.simulator: Any = None
        if adapter.name == "sim":
            self.simulator = import_module("interlock.backends.simulator")
            self.simulator.install()

    def allocated(self, adapter: Any) -> int | None:
        """Bytes of device memory in use; `None` where nobody counts them."""
        if self.simulator is not None:
            return int(self.simulator.memory.allocated)
        counted = getattr(adapter, "allocated", None)
        return counted if isinstance(counted, int) else None

    def counts(self) -> dict[str, int]:
        """Operations so far, by kind."""
        return dict(self.simulator.counts()) if self.simulator is not None else {}

    def strike(
        self,
        name: str,
        nth: int,
        fault: str,
        make: Callable[[], BaseException],
        release: threading.Event,
    ) -> Any:
        """A fault at the nth operation of a kind.

        Args:
            name: Of the kind.
            nth: Counted from 1, from the beginning of the run.
            fault: A key of `FAULTS`.
            make: Makes the error.
            release: Lets go of what blocks.
        """
        how = "fails" if fault == "memory" else fault
        return self.simulator.Strike(name, nth, how, error=make, seconds=SLOW, release=release)

    def striking(self, strike: Any) -> AbstractContextManager[object]:
        """Within the block the strike is in force."""
        if strike is None:
            return nullcontext()
        found: AbstractContextManager[object] = self.simulator.striking(strike)
        return found

    def lost(self) -> bool:
        """Whether the simulated device is dead."""
        return self.simulator is not None and bool(self.simulator.lost())

    def touched(self) -> tuple[str, ...]:
        """What was asked of the simulated device since it died."""
        return tuple(self.simulator.touched()) if self.lost() else ()

    def replug(self) -> None:
        """A new device in place of a dead one."""
        if self.simulator is not None:
            self.simulator.replug()
