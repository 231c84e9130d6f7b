"""The engine: says where and how; `fit`, `start` and `open` carry tasks out.

An engine holds settings and no state of any run, so one may serve many runs and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from interlock.backends.adapter import Adapter
from interlock.backends.registry import adapter_class
from interlock.specs import Monitor

from .errors import TaskError
from .events import Bus, Observer
from .evidence import raise_again
from .handles import Created
from .options import ExitPolicy, Nonfinite, Options
from .outcome import Outcome
from .program import StepProgram, step_program
from .proof import proved
from .run import Run
from .session import Session, carry_out
from .task import Data, Task, refuse_unbatched, refuse_used_up

if TYPE_CHECKING:
    pass


class Engine:
    """Where and how runs are carried out.

    Args:
        backend: A name (`auto` takes the best that is there), or an adapter of your own.
        exit: What becomes of the model at the end, on success and failure alike: `offload` brings
            it home, `keep` leaves it on the device (if it is whole), `discard` drops it.
        deadline: Seconds that each backend call on the way out may take before its resource is
            abandoned.
        report_every: Steps between two reports. It is also the bound within which a replaced
            parameter or a NaN loss is found.
        nonfinite: `error` ends the run at a NaN or infinite loss, `ignore` does not.
        observers: Called with each event of each run, on threads of their own.
        progress: Show progress on the terminal.
        journal: Write each run's journal to this file (JSON lines); it is started anew, so it
            serves one run at a time.
        debug: `keep_frames` leaves the local variables of a failed run's traceback in place.

    Raises:
        UnknownName: No such backend.
        TaskError: A setting that does not exist.
        NotProved: The backend's lifecycle is not proved.
    """

    def __init__(
        self,
        backend: str | Adapter = "auto",
        *,
        exit: ExitPolicy = "offload",  # noqa: A002 - `exit=` is what reads best, and nothing here exits
        deadline: float = 30.0,
        report_every: int = 50,
        nonfinite: Nonfinite = "error",
        observers: Sequence[Observer] = (),
        progress: bool = False,
        journal: str | Path | None = None,
        debug: Literal["", "keep_frames"] = "",
    ) -> None:
        _one_of("exit", exit, get_args(ExitPolicy))
        _one_of("nonfinite", nonfinite, get_args(Nonfinite))
        _one_of("debug", debug, ("", "keep_frames"))
        _check_numbers(report_every, deadline)
        self._adapter: Adapter | None = backend if isinstance(backend, Adapter) else None
        self._class = type(backend) if isinstance(backend, Adapter) else adapter_class(backend)
        self.backend = self._class.name
        self.life = proved(self._class.monitor)
        self._options = Options(exit, deadline, report_every, nonfinite, debug == "keep_frames")
        self._observers = tuple(observers)
        self._progress = progress
        self._journal = journal

    def fit(
        self,
        task: Task,
        train: Iterable[Any] | None = None,
        *,
        validate: Iterable[Any] | None = None,
        epochs: int | None = None,
    ) -> Outcome:
        """Train, and wait for the end, on the calling thread.

        Args:
            task: What to train.
            train: Batches, or `Data` with both; the task's own data if left out.
            validate: Batches to evaluate on after each epoch.
            epochs: How often to go through `train`; the task's own number if left out.

        Returns:
            The outcome of a run that finished or was stopped.

        Raises:
            BaseException: Whatever ended the run, the same object, after everything was released.
        """
        session = self._session(task, self._data(task, train, validate), epochs)
        outcome = carry_out(session)
        if outcome.error is None:
            return outcome
        error = outcome.error
        # The caller may keep the error, and with it this frame: it must not hold anything.
        del outcome, session, task, train, validate, self
        try:
            raise_again(error)
        finally:
            del error

    def start(
        self,
        task: Task,
        train: Iterable[Any] | None = None,
        *,
        validate: Iterable[Any] | None = None,
        epochs: int | None = None,
    ) -> Run:
        """Train in a thread of its own; arguments as for `fit`.

        Returns:
            The handle, at once. The caller's context variables are seen in the run.
        """
        return Run(self._session(task, self._data(task, train, validate), epochs))._begin()

    def open(self, task: Task) -> Created:
        """A run that you drive yourself, phase by phase, in a `with` block that ends it in any case.

        Args:
            task: What to train; its data is not used.

        Returns:
            The handle of the first phase.
        """
        return Created(self._session(task, None, None))

    def _data(self, task: Task, train: Any, validate: Any) -> Data:
        if not isinstance(task, Task):
            raise TaskError(f"expected an interlock.Task, got {type(task).__name__}")
        if train is None:
            loaded = task.load()
            train, validate = loaded.train, loaded.validate if validate is None else validate
        elif isinstance(train, Data):
            train, validate = train.train, train.validate if validate is None else validate
        for name, batches in (("train", train), ("validate", validate)):
            iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
            if batches is not None and not iterable:
                raise TaskError(f"{name} must be batches to iterate over, got {type(batches).__name__}")
            refuse_unbatched(name, batches)
        return Data(train, validate)

    def _session(self, task: Task, data: Data | None, epochs: int | None) -> Session:
        rounds: Any = task.epochs if epochs is None else epochs  # `epochs` comes from anywhere
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise TaskError(f"epochs must be a whole number of at least 1, got {rounds!r}")
        if data is not None:
            refuse_used_up(data, rounds)
        adapter = self._class() if self._adapter is None else self._adapter
        program = self._program(task)
        bus = Bus()
        session = Session(task, data, rounds, adapter, self.life, program, self._options, bus)
        self._observe(session, rounds)
        if task.metrics is not None and data is not None and data.validate is None:
            session._notes.append("metrics were never computed: no validation data")
        return session

    def _program(self, task: Task) -> StepProgram | None:
        """The step program of a task, proved; `None` where its step is written by hand."""
        if task.step is not None:
            return None
        monitor = self._class.monitor
        if task.options:
            return step_program(monitor, schedule=task.schedules_steps, options=task.options)
        return _plain_program(monitor, task.schedules_steps)

    def _observe(self, session: Session, epochs: int) -> None:
        """Subscribe the engine's own observers, then the user's; if one cannot be made, none stays."""
        bus = session.bus
        try:
            if self._journal is not None:
                from .journal import JournalWriter

                bus.subscribe(JournalWriter(self._journal, session, self.backend), capacity=100_000)
            if self._progress:
                from .progress import Progress

                bus.subscribe(Progress(session, epochs), capacity=10_000)
            for observer in self._observers:
                bus.subscribe(observer)
        except BaseException:
            bus.finish(1.0)
            raise


_plain: dict[tuple[int, bool], tuple[Monitor, StepProgram]] = {}
"""Programs without options; each keeps its monitor alive, and so its id."""


def _plain_program(monitor: Monitor, schedule: bool) -> StepProgram:
    """The program without options, proved once per process."""
    key = id(monitor), schedule
    if key not in _plain:
        _plain[key] = monitor, step_program(monitor, schedule=schedule)
    return _plain[key][1]


def _check_numbers(every: Any, deadline: Any) -> None:
    """Refuse what would fail later: a deadline that cannot be waited for fails on the way out."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise TaskError(f"report_every must be a whole number of at least 1, got {every!r}")
    number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
    if not number or not 0 < deadline <= threading.TIMEOUT_MAX:
        raise TaskError(
            f"deadline must be more than 0 seconds, and at most {threading.TIMEOUT_MAX:.0f}, got {deadline!r}"
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise TaskError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
