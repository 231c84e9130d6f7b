"""SIGINT and SIGTERM while the command line carries a run out: the first one ends it, in order.

The library installs no handler. The command line does, for as long as a run goes on: a signal
raises in the main thread, wherever the run is, and the run ends as interrupted. Once it is on its
way out, further signals are noted and raise nothing: the teardown is what they ask for, and a
second exception in it could cost a resource.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from interlock.specs import Kind, Spec

from .events import Closed, Event, PhaseChanged

PATIENCE = 1.0
"""Seconds after a signal in which the run has to be seen on its way out; if it is not, somebody has
swallowed the exception, and the next signal raises again."""

_WAY_OUT = frozenset({Kind.EXIT, Kind.TERMINAL})


class Terminated(BaseException):
    """SIGTERM arrived. Not an `Exception`, so that code which handles errors lets it pass."""


class Signals:
    """Handles both signals within a `with` block, and observes the run to know when it is leaving.

    Attributes:
        received: The first signal that arrived, or `None`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._leaving = False
        self._spec: Spec | None = None
        self._raised = -PATIENCE
        self._before: dict[signal.Signals, Any] = {}
        self._owner = os.getpid()

    def watch(self, spec: Spec) -> Signals:
        """Learn which phases are on the way out; returns itself, an observer of the run."""
        self._spec = spec
        return self

    def __call__(self, event: Event) -> None:
        """Take note of a phase on the way out."""
        if isinstance(event, Closed):
            self._leaving = True
        elif isinstance(event, PhaseChanged) and self._spec is not None:
            self._leaving = self._leaving or self._spec.phase[event.phase].kind in _WAY_OUT

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a loader's worker, forked with this handler
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number)
        if self._leaving or time.monotonic() - self._raised < PATIENCE:
            # Not through a stream: the signal may have come in the middle of a write to it.
            name = signal.Signals(number).name
            os.write(2, f"interlock: {name}: the run is ending already; what it holds comes home\n".encode())
            return
        self._raised = time.monotonic()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(signal.Signals(number).name)
