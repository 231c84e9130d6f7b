"""The handle on a run that goes on in a thread of its own."""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from interlock.specs import Entry

from .deadline import stack_of
from .driver import WAITS
from .errors import NotFinished, RunInUse
from .events import Observer, Subscription
from .evidence import raise_again
from .outcome import Outcome
from .session import Session, carry_out

EXIT_PATIENCE = 5.0
"""Seconds that a program which ends while runs are going on waits for their clean end."""


_ASKED = {
    "stop": "stopping: ",
    "cancel": "cancelling: ",
    "pause": "pausing: ",
    "suspend": "suspending: ",
}


@dataclass(frozen=True)
class Snapshot:
    """What a run is doing now.

    Attributes:
        phase: The last phase of its history.
        step: Steps complete.
        epoch: From 0.
        doing: In plain words: "in loader, 12.0 s since the last report", "cancelling: in step, ...",
            "validating for 3.1 s".
        stack: The stack of the run's thread, as text; empty once it is closed.
    """

    phase: str
    step: int
    epoch: int
    doing: str
    stack: str

    def __str__(self) -> str:
        return f"{self.phase}, epoch {self.epoch + 1}, after step {self.step}: {self.doing}"


_live: weakref.WeakSet[Run] = weakref.WeakSet()
_live_lock = threading.Lock()
_hooked = False


class Run:
    """A run in the background: single-use, and like a future, but that it never hides its phase.

    Made by `Engine.start`. All methods may be called from any thread; `stop` and `cancel` are
    requests that are honoured at the next step boundary, or between two batches of a validation.
    """

    def __init__(self, session: Session) -> None:
        self.id = session.id
        self._session: Session | None = session
        self._position = session.position
        self._slot = session.driver.slot
        self._bus = session.bus
        self._outcome: Outcome | None = None
        self._closed = threading.Event()
        self._waiting: list[Callable[[], object]] = []
        self._worker: int | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work,), name=f"interlock run {self.id}", daemon=True
        )

    def _begin(self) -> Run:
        """Start the thread; called once, by the engine."""
        global _hooked
        if not _hooked:
            _hooked = True
            atexit.register(_end_all)
            # The threads of its runs do not exist in a forked child: it must not wait for them.
            os.register_at_fork(after_in_child=_forget_all)
        with _live_lock:
            _live.add(self)
        try:
            self._thread.start()
        except BaseException as error:
            # There is no thread to be had: the run closes here, before anything was taken.
            with _live_lock:
                _live.discard(self)
            if self._session is not None:
                self._session.conclude(error)
            raise
        return self

    def _work(self) -> None:
        self._worker = threading.get_ident()
        session, self._session = self._session, None
        try:
            if session is not None:
                self._outcome = carry_out(session)
        finally:
            del session
            with _live_lock:
                _live.discard(self)
            self._closed.set()
            while self._waiting:
                self._waiting.pop()()
            # The run's error, which the outcome holds, keeps this frame.
            del self

    # -- what it is doing ---------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The present phase: always that of the last entry of `history`."""
        return self._slot.state

    @property
    def history(self) -> tuple[Entry, ...]:
        """All transitions so far; the first entry is the start."""
        return tuple(self._slot.history)

    @property
    def step(self) -> int:
        """Steps complete so far."""
        return self._position.step

    def snapshot(self) -> Snapshot:
        """What it is doing now, with the stack of its thread."""
        position = self._position
        asked = _ASKED.get(position.request, "")
        if self._closed.is_set():
            doing = "closed"
        elif position.cutting:
            seconds = time.monotonic() - position.cutting
            doing = f"{asked}compiling, or beginning a program, for {seconds:.1f} s"
        elif position.doing and self.phase == "training":
            seconds = time.monotonic() - position.since
            doing = f"{asked}in {position.doing}, {seconds:.1f} s since the last report"
        else:
            doing = f"{asked}{self.phase} for {time.monotonic() - self._slot.history[-1].at:.1f} s"
        stack = "" if self._closed.is_set() else stack_of(self._worker)
        return Snapshot(self.phase, position.step, position.epoch, doing, stack)

    def subscribe(self, observer: Observer, capacity: int = 1024) -> Subscription:
        """Let an observer see every event of the run, from the first one on.

        Args:
            observer: Called with each event, on a thread of its own. If it raises, that is
                reported and the run goes on; if it is too slow, it loses events.
            capacity: How many events may wait for it.

        Returns:
            The subscription: closing it ends the observer's thread, as the end of the run does.

        Raises:
            TaskError: The capacity is not a whole number of at least 1.
        """
        return self._bus.subscribe(observer, capacity)

    # -- requests -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask it to end well: the update in progress is finished, the results are kept."""
        self._position.propose("stop")

    def cancel(self) -> None:
        """Ask it to end now: at the next step boundary, as an interruption. Overrides `stop`."""
        self._position.ask("cancel")

    def pause(self, *, release: bool = False) -> None:
        """Ask it to wait, at the next step boundary, until `resume`, `stop` or `cancel`.

        Args:
            release: Give the device back meanwhile: model and optimizer state come home, another run can
                have it, and `resume` places everything again. The run goes on to the bit as if it had
                not been suspended.

        Raises:
            RunInUse: It is closed, or has been asked to end.
        """
        with self._position.asking:
            self._refuse_ending("pause")
            self._position.ask("suspend" if release else "pause")

    def resume(self) -> None:
        """Let it go on after `pause`; nothing happens if it was not asked to wait.

        Raises:
            RunInUse: It is closed, or has been asked to end.
        """
        with self._position.asking:
            self._refuse_ending("resume")
            if self._position.request in WAITS:
                self._position.ask("")

    def _refuse_ending(self, what: str) -> None:
        ending = self._position.request not in ("", *WAITS)
        if ending or self._closed.is_set():
            state = "is closed" if self._closed.is_set() else f"was asked to {self._position.request}"
            raise RunInUse(f"'{what}' of a run that {state}: it goes on no more. Start another run")

    # -- the end ------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it is closed."""
        return self._closed.is_set()

    def cancelled(self) -> bool:
        """Whether it is closed because it was cancelled (not: whether that was asked for)."""
        return self._outcome is not None and self._outcome.status == "cancelled"

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for the end.

        Args:
            timeout: Seconds; `None` waits for ever.

        Returns:
            The outcome; the run's own error is in it and is never raised here.

        Raises:
            NotFinished: The time passed; the message says what the run is doing.
            RunInUse: Called from within the run or by one of its observers: it would wait for itself.
        """
        self._refuse_to_wait_for_itself()
        if not self._closed.wait(timeout):
            raise NotFinished(f"not finished after {timeout:g} s: {self.snapshot()}")
        self._thread.join()
        if self._outcome is None:
            raise NotFinished("the run ended without an outcome, a fault in Interlock: please report it")
        return self._outcome

    def _refuse_to_wait_for_itself(self) -> None:
        if self._closed.is_set():
            return
        if threading.get_ident() == self._worker:
            raise RunInUse("a run cannot wait for itself: `wait` was called from inside one of its hooks")
        if self._bus.is_observing():
            raise RunInUse(
                "a run cannot wait for itself: `wait` was called by one of its observers, which it waits for "
                "before it is closed. Its last event, `Closed`, says how it ended; or wait on another thread"
            )

    def result(self, timeout: float | None = None) -> Outcome:
        """The outcome of a run that finished or was stopped.

        Args:
            timeout: As for `wait`.

        Raises:
            BaseException: The error that ended it, the same object, if it failed or was cancelled.
            NotFinished: The time passed.
        """
        outcome = self.wait(timeout)
        if outcome.error is None:
            return outcome
        error = outcome.error
        # The caller may keep the error, and with it this frame: it must not hold the run.
        del outcome, self
        try:
            raise_again(error)
        finally:
            del error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that ended it, or `None`. Waits as `wait` does, and no longer than `timeout` seconds."""
        return self.wait(timeout).error

    def __await__(self) -> Generator[object, None, Outcome]:
        import asyncio

        self._refuse_to_wait_for_itself()
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def wake() -> None:
            # The loop may be closed by now: then nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(closed.set)

        self._waiting.append(wake)
        if self._closed.is_set():
            closed.set()
        # No thread waits: whoever gives up waiting, or ends the loop, is not held up by the run.
        yield from closed.wait().__await__()
        return self.wait()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a run cannot be pickled or copied: it goes on in a thread of this process. Wait for its "
            "outcome, and send that"
        )

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.phase}, {self.step} steps>"


def _forget_all() -> None:
    global _live_lock
    _live_lock = threading.Lock()  # the parent's may have been held at that moment
    _live.clear()


def _end_all() -> None:
    """At the end of the program: ask every run to end, and give them a moment to do so."""
    with _live_lock:
        runs = list(_live)
    for run in runs:
        run.cancel()
    end = time.monotonic() + EXIT_PATIENCE
    for run in runs:
        if not run._closed.wait(max(0.0, end - time.monotonic())):
            told = f"interlock: the program ended while {run!r} was still {run.snapshot().doing}\n"
            sys.stderr.write(told)
