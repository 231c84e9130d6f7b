"""The engine: says where and how; `fit`, `start` and `open` carry tasks out.

An engine holds settings and no state of any run, so one may serve many runs and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from interlock.backends.adapter import Adapter
from interlock.backends.registry import adapter_class
from interlock.specs import INFERENCE, TRAINING, Monitor, Spec

from .checkpoint import Checkpoints
from .errors import TaskError
from .events import Bus, Observer
from .evidence import raise_again
from .handles import Created
from .keeping import chosen
from .leases import ProcessSettings, WhenTaken
from .options import ExitPolicy, Nonfinite, Options
from .outcome import Outcome
from .plan import Plan, StopRule
from .program import StepProgram, step_program
from .proof import proved
from .run import Run
from .serving import OutputFunction, as_served
from .session import Session, carry_out
from .task import Data, Task, is_batches, refuse_unbatched, refuse_used_up
from .work import Work

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .task import LossFunction, MetricFunction

T = TypeVar("T")


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
        seed: Seeds the random generators for each run, and makes them that run's alone; afterwards they
            are what they were.
        deterministic: Whether torch may use deterministic algorithms only.
        dtype: What floating-point tensors are made of when nobody says.
        threads: How many threads an operator may use.
        when_taken: These four belong to the process: a run that wants another value than one that is
            going on in another thread waits for it (`wait`), or is refused (`refuse`).
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
        seed: int | None = None,
        deterministic: bool | None = None,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
        when_taken: WhenTaken = "wait",
        debug: Literal["", "keep_frames"] = "",
    ) -> None:
        _one_of("exit", exit, get_args(ExitPolicy))
        _one_of("nonfinite", nonfinite, get_args(Nonfinite))
        _one_of("debug", debug, ("", "keep_frames"))
        _one_of("when_taken", when_taken, get_args(WhenTaken))
        _check_numbers(report_every, deadline)
        process = ProcessSettings(seed, deterministic, dtype, threads)
        self._adapter: Adapter | None = backend if isinstance(backend, Adapter) else None
        self._class = type(backend) if isinstance(backend, Adapter) else adapter_class(backend)
        self.backend = self._class.name
        self.life = proved(self._class.monitor)
        self._options = Options(
            exit, deadline, report_every, nonfinite, debug == "keep_frames", process, when_taken
        )
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
        max_steps: int | None = None,
        max_time: float | None = None,
        limit_batches: int | None = None,
        overfit: int | None = None,
        validate_every: int | None = None,
        stop_when: Sequence[StopRule] = (),
        checkpoints: Checkpoints | None = None,
        resume: bool | str | Path | None = None,
    ) -> Outcome:
        """Train, and wait for the end, on the calling thread.

        Args:
            task: What to train.
            train: Batches, or `Data` with both; the task's own data if left out.
            validate: Batches to evaluate on after each epoch.
            epochs: How often to go through `train`; the task's own number if left out.
            max_steps: Steps after which the run ends, as finished.
            max_time: Seconds after which it is asked to stop, at the next step boundary.
            limit_batches: Batches of each pass, in training and in validation, that are used.
            overfit: Train on so many batches only, the first ones, again and again: can it learn them?
            validate_every: Steps between two validations, instead of one after each epoch.
            stop_when: Rules that may end it, as stopped: `EarlyStopping("val_loss")`.
            checkpoints: Where and how often the run is saved: `Checkpoints("runs/a", keep=3)`.
            resume: `True` to go on from the newest checkpoint there that was saved between two epochs (from
                the beginning if there is none yet), or the directory of one.

        Returns:
            The outcome of a run that finished or was stopped.

        Raises:
            BaseException: Whatever ended the run, the same object, after everything was released.
        """
        plan = self._plan(
            task,
            train,
            validate,
            epochs,
            max_steps=max_steps,
            max_time=max_time,
            limit_batches=limit_batches,
            overfit=overfit,
            validate_every=validate_every,
            stop_when=stop_when,
            checkpoints=checkpoints,
            resume=resume,
        )
        # In one go: from the moment that there is a session, whoever ends it has it.
        outcome = carry_out(self._session(task, plan))
        if outcome.error is None:
            return outcome
        error = outcome.error
        # The caller may keep the error, and with it this frame: it must not hold anything.
        del outcome, plan, task, train, validate, stop_when, self
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
        max_steps: int | None = None,
        max_time: float | None = None,
        limit_batches: int | None = None,
        overfit: int | None = None,
        validate_every: int | None = None,
        stop_when: Sequence[StopRule] = (),
        checkpoints: Checkpoints | None = None,
        resume: bool | str | Path | None = None,
    ) -> Run:
        """Train in a thread of its own; arguments as for `fit`.

        Returns:
            The handle, at once. The caller's context variables are seen in the run.
        """
        plan = self._plan(
            task,
            train,
            validate,
            epochs,
            max_steps=max_steps,
            max_time=max_time,
            limit_batches=limit_batches,
            overfit=overfit,
            validate_every=validate_every,
            stop_when=stop_when,
            checkpoints=checkpoints,
            resume=resume,
        )
        session = self._session(task, plan)
        try:
            run = Run(session)
        except BaseException as error:
            session.conclude(error)
            raise
        return run._begin()

    def evaluate(
        self,
        task: Task | nn.Module,
        batches: Iterable[Any] | None = None,
        *,
        loss: LossFunction | None = None,
        metrics: MetricFunction | None = None,
    ) -> dict[str, float]:
        """Loss and metrics of a model over some batches, on the inference lifecycle: no optimizer anywhere.

        The model is in evaluation mode meanwhile, and comes home as by the engine's exit policy. Grad mode
        and the `training` flag of each submodule are afterwards as they were.

        Args:
            task: What to evaluate, or just the model.
            batches: On what; the validation part of the task's own data if left out.
            loss: From model and batch to a scalar; the task's own if left out.
            metrics: From model and batch to named scalars; the task's own if left out.

        Returns:
            Means over samples by name, "loss" among them unless there is no loss function.

        Raises:
            TaskError: There is nothing to compute.
            BaseException: Whatever went wrong, the same object, after everything was released.
        """
        served = as_served(task, loss=loss, metrics=metrics)
        if batches is None:
            batches = served.load().validate
            if batches is None:
                raise TaskError(f"task '{served.name}' has no validation data: pass batches to `evaluate`")
        return self._serve(served, batches, Work.evaluate)

    def predict(
        self,
        task: Task | nn.Module,
        batches: Iterable[Any],
        *,
        output: OutputFunction | None = None,
    ) -> list[Any]:
        """What a model makes of some batches, on the inference lifecycle.

        Args:
            task: With what to predict, or just the model.
            batches: On the host; each output comes home before the next batch is begun.
            output: From model and batch to whatever is wanted, in any nesting; by default the model is
                called with the batch, as keyword arguments if it is a mapping.

        Returns:
            The output of each batch, on the host.

        Raises:
            BaseException: Whatever went wrong, the same object, after everything was released.
        """
        return self._serve(as_served(task, output=output), batches, Work.predict)

    def _serve(self, task: Task, batches: Any, what: Callable[[Work], T]) -> T:
        """Carry out an evaluation or a prediction, and raise its error where it had one."""
        refuse_unbatched("batches", batches)
        if not is_batches(batches):
            raise TaskError(f"batches must be something to iterate over, got {type(batches).__name__}")
        outcome = carry_out(self._session(task, None, INFERENCE), (batches, what))
        if outcome.error is None:
            return cast("T", outcome.result)
        error = outcome.error
        del outcome, task, what, batches, self
        try:
            raise_again(error)
        finally:
            del error

    def open(self, task: Task) -> Created:
        """A run that you drive yourself, phase by phase, in a `with` block that ends it in any case.

        Args:
            task: What to train; its data is not used.

        Returns:
            The handle of the first phase.

        Raises:
            TaskError: It is no task.
        """
        if not isinstance(task, Task):
            raise TaskError(f"expected an interlock.Task, got {type(task).__name__}")
        session = self._session(task, None, observed=False)
        # A handle that is dropped unused must leave no thread and no file behind.
        session.before = partial(self._observe, session, 1)
        return Created(session)

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

    def _plan(self, task: Task, train: Any, validate: Any, epochs: Any, **more: Any) -> Plan:
        return Plan(self._data(task, train, validate), _rounds(task, epochs), **more)

    def _session(
        self, task: Task, plan: Plan | None, spec: Spec = TRAINING, *, observed: bool = True
    ) -> Session:
        if plan is not None and plan.overfit is None:
            refuse_used_up(plan.data, plan.epochs)
        adapter = self._class() if self._adapter is None else self._adapter
        life = self.life if spec is TRAINING else proved(self._class.monitor, spec)
        program = self._program(task) if spec is TRAINING else None
        resumed = chosen(plan.resume, plan.checkpoints) if plan is not None else None
        bus = Bus()
        session = Session(task, plan, adapter, life, program, self._options, bus, resumed)
        if observed:
            self._observe(session, plan.epochs if plan else 1)
        if task.metrics is not None and plan is not None and plan.data.validate is None:
            session.notes.append("metrics were never computed: no validation data")
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


def _rounds(task: Task, epochs: Any) -> int:
    rounds: Any = task.epochs if epochs is None else epochs  # it comes from anywhere
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise TaskError(f"epochs must be a whole number of at least 1, got {rounds!r}")
    return rounds


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
