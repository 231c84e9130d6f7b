"""Carries out the runs of a sweep: undisturbed ones that enumerate the points, and those that are struck.

Nothing here judges; `sweep_judge` does.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from interlock.backends.adapter import Adapter
from interlock.backends.faults import inject
from interlock.specs import Entry, Slot

from .checkpoint import Checkpoints
from .engine import Engine
from .errors import NotFinished, SweepError
from .options import ExitPolicy
from .outcome import Outcome
from .proof import proved
from .sweep_arm import Armed
from .sweep_device import Device
from .sweep_digests import Digests, saved_in
from .sweep_hooks import Batches, Passages, wrapped
from .sweep_points import Settings
from .sweep_process import reading, seeded, settled
from .sweep_watch import Watch
from .task import Task

RELEASED = 10.0
"""Seconds that a blocked thread gets to end once it is let go."""

KEPT = "kept"
"""The folder of a run's checkpoints."""


@dataclass
class Seen:
    """What can be seen once a run is over.

    Attributes:
        outcome: `None` if the run never ended.
        slot: Of the run; `None` if there never was one.
        stacked: What its release stack still has.
        raised: The injected errors, in the order in which they were made.
        struck: How often the fault of the cell struck.
        hung: What it was doing when the patience was over, with the stack of its thread; empty if it ended.
        ended: Whether it ended after all, once what blocked it was let go.
        process: In what the process is other than before.
        before: Bytes on the device before the run; `None` if nobody counts them.
        after: Bytes there once the run is over, while its errors are kept.
        adapter: As used.
        copies: Whether there is a device beside the host (the fault injector lets all backends say so).
        touched: What was asked of a simulated device after it was dead.
        error: What kept it from beginning at all.
        updates: How many updates of an optimizer began, and how many of them were made.
        saved: The last checkpoint, as `saved_in` reads it back; `None` if the run did not rescue.
    """

    outcome: Outcome | None = None
    slot: Slot | None = None
    stacked: tuple[str, ...] = ()
    raised: list[BaseException] = field(default_factory=list)
    struck: int = 0
    hung: str = ""
    ended: bool = True
    process: list[str] = field(default_factory=list)
    before: int | None = None
    after: int | None = None
    adapter: Any = None
    copies: bool = False
    touched: tuple[str, ...] = ()
    error: BaseException | None = None
    updates: tuple[int, int] = (0, 0)
    saved: tuple[int, Digests] | str | None = None


class _Watched(Engine):
    """An engine of one run, that lets its lifecycle be looked at while it runs and afterwards."""

    slot: Slot | None = None
    stack: Any = None
    entered: Callable[[Entry], None] | None = None

    def _session(self, *args: Any, **kwargs: Any) -> Any:
        session = super()._session(*args, **kwargs)
        self.slot, self.stack = session.driver.slot, session.driver.stack
        entered, announce = self.entered, session.driver._announce
        if entered is not None:

            def both(entry: Entry) -> None:
                entered(entry)
                announce(entry)

            session.driver._announce = both
        return session


class Bench:
    """What all runs of a sweep have in common.

    Args:
        task: The user's.
        train: Its batches, on the host.
        validate: The same; `None` for none.
        make_adapter: Makes an adapter, on each call.
        settings: Of the sweep.
    """

    def __init__(
        self,
        task: Task,
        train: list[Any],
        validate: list[Any] | None,
        make_adapter: Callable[[], Adapter],
        settings: Settings,
    ) -> None:
        self.task, self.train, self.validate = task, train, validate
        self.make_adapter, self.settings = make_adapter, settings
        one = make_adapter()
        self.device = Device(one)
        self.copies = one.copies
        self.life = proved(one.monitor)
        self._pristine = _pristine(task)

    def run(
        self,
        armed: Armed | None = None,
        *,
        adapter: Any = None,
        exit: ExitPolicy | None = None,  # noqa: A002 - the engine's word
        deadline: float | None = None,
        watch: Watch | None = None,
    ) -> Seen:
        """Carry one run out, to its end.

        Args:
            armed: What strikes; nothing if left out.
            adapter: One that was made for an earlier run, and made ready for another one.
            exit: Another exit policy than the sweep's.
            deadline: Of each backend call on the way out; by default so long that none is ever missed.
            watch: Notes each point that is passed.
        """
        settings, armed = self.settings, armed or Armed()
        watch = watch or Watch()
        if adapter is None:
            adapter = inject(self.make_adapter(), *armed.backend)
            watch.on(adapter)
        passages = Passages(armed.hook, watch.hook, watch.updated)
        source = _source(self.task, self._pristine)
        seen = Seen(adapter=adapter, raised=armed.raised, copies=self.copies)
        seen.before = self.device.allocated(adapter)
        engine = _Watched(
            adapter,
            exit=exit or cast("ExitPolicy", settings.exit),
            deadline=settings.patience if deadline is None else deadline,
            seed=settings.seed,
        )
        engine.entered = watch.entered
        with seeded(settings.seed), without_collector(), tempfile.TemporaryDirectory() as folder:
            before = reading()
            with self.device.striking(armed.device):
                self._carry_out(seen, engine, wrapped(self.task, passages, source), passages, armed, folder)
            passages.close()
            seen.process = settled(before)
            seen.after = self.device.allocated(adapter)
            seen.touched = self.device.touched()
            seen.updates = passages.counts["update", "before"], passages.counts["update", "after"]
            if seen.outcome is not None and any(e.event == "rescued" for e in seen.outcome.history):
                seen.saved = saved_in(Path(folder) / KEPT)
        seen.slot = engine.slot
        seen.stacked = engine.stack.names if engine.stack is not None else ()
        return seen

    def _carry_out(
        self,
        seen: Seen,
        engine: Engine,
        task: Task,
        passages: Passages,
        armed: Armed,
        folder: str,
    ) -> None:
        before = _threads()
        train = Batches(passages, "data", self.train)
        validate = None if self.validate is None else Batches(passages, "validation", self.validate)
        keep = Checkpoints(Path(folder) / KEPT) if self.settings.checkpoints else None
        try:
            run = engine.start(task, train, validate=validate, epochs=self.settings.epochs, checkpoints=keep)
        except Exception as error:
            seen.error = error
            return
        try:
            seen.outcome = run.wait(self.settings.patience)
        except NotFinished:
            now = run.snapshot()
            seen.hung = f"{now}\n{now.stack}"
        finally:
            # Also for a Ctrl-C of whoever waits here: what was begun must not go on alone.
            armed.release.set()
            run.cancel()
        if seen.hung:
            seen.ended = _ended(run.done, RELEASED)
        _join(before)


def _ended(done: Callable[[], bool], seconds: float) -> bool:
    wait = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if done():
            return True
        wait.wait(0.02)
    return done()


def _threads() -> set[int]:
    return {id(thread) for thread in threading.enumerate()}


def _join(before: set[int]) -> None:
    """Wait for the threads that were blocked, and now may end."""
    for thread in threading.enumerate():
        if id(thread) not in before and thread.name.startswith("interlock"):
            thread.join(RELEASED)


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection within: what is freed is freed by reference counts, the same in each run."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _pristine(task: Task) -> nn.Module | None:
    """A copy of the module that a task was given, from which each run gets one; `None` if it builds one."""
    if not isinstance(task.model, nn.Module):
        return None
    try:
        return copy.deepcopy(task.model)
    except Exception as error:
        raise SweepError(
            f"the model of task '{task.name}' cannot be copied, and each run of a sweep begins with it as it "
            f"is now ({type(error).__name__}: {error}). Give the task a function that builds the model"
        ) from error


def _source(task: Task, pristine: nn.Module | None) -> Callable[[], Any]:
    return cast("Callable[[], Any]", task.model) if pristine is None else partial(copy.deepcopy, pristine)
