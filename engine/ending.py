"""The state of one run, what is told of it, and how it ends: whatever happened becomes an `Outcome`.

The way to the end is the spec's, which the driver follows. An interrupt may land at any line here: so every
part of the way can be repeated, and is.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from interlock.specs import Entry, Lifecycle, Status

from .driver import PATIENCE, Driver, Position
from .errors import DeadlinePassed, NoWayOut
from .events import Bus, Closed, Note, PhaseChanged, Report
from .evidence import Errors, add_note, raise_again
from .keeping import Keeper, generators_of
from .loop import mean_loss
from .options import Options
from .outcome import UNKNOWN, Outcome, Residue, StatusName
from .plan import Judge, Plan
from .program import StepProgram
from .release import ReleaseStack
from .steps.precision import autocast_state, put_back
from .task import Task
from .work import Work

if TYPE_CHECKING:
    from interlock.backends.adapter import Adapter

    from .checkpoint import Saved

_CHECKED = ("training", "checkpointing")
"""Phases on whose entry the optimizer is looked at."""

AUTOCAST = ("cpu", "cuda", "mps", "xla")
"""The types of devices whose autocast is put back as it was; asking starts none of them."""

OBSERVERS_MAY_TAKE = 2.0
"""Seconds that the observers of a run get, together, to see its last events."""


class Ending:
    """One run, as far as its end is concerned.

    Args:
        task: What to train.
        plan: How long; `None` for a session that is driven by phase handles, or that only serves.
        adapter: Where.
        life: The lifecycle of that backend, proved.
        program: The step, proved for that backend; `None` where the task's is written by hand.
        options: How.
        bus: Whom to tell.
        resume: The checkpoint to go on from.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan | None,
        adapter: Adapter,
        life: Lifecycle,
        program: StepProgram | None,
        options: Options,
        bus: Bus,
        resume: Saved | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.task = task
        self.adapter = adapter
        self.options = options
        self.bus = bus
        self.position = Position()
        self.outcome: Outcome | None = None
        self._given_up: Outcome | None = None
        self.plan = plan
        self.served: Any = None
        """Of a session that only serves: (batches, what is done with them)."""
        self.before: Callable[[], None] | None = None
        """What is done first when the session is first driven."""
        self.judges: list[Judge] = []
        """They see each report, and may end the run."""
        self.verdict = ""
        """Why one of them did."""
        self.errors = Errors(options.keep_frames)
        self._reports: list[Report] = []
        self._metrics: dict[str, float] = {}
        self.notes: list[str] = []
        self._losses: list[torch.Tensor] = []
        """Of the steps that a phase handle has taken since the last report."""
        self._told = False
        self._gradients = torch.is_grad_enabled()
        """Whether torch records them where the run is driven from."""
        self._autocast = {kind: autocast_state(kind) for kind in AUTOCAST}
        self._busy = threading.Lock()
        self._driven_by = 0
        """The thread that has it."""
        self._outside: BaseException | None = None
        stack = ReleaseStack(options.deadline, adapter.copies)
        self.work = Work(task, adapter, program, options, self.position, stack, self.say)
        about = {"task": task.name, "backend": adapter.name, "spec": life.spec.hash}
        settings = plan.checkpoints if plan is not None else None
        if settings is not None or resume is not None:
            self.work.keeper = Keeper(settings, resume, about, self.say, self._tell)
            self.work.generators = generators_of(plan) if plan is not None else {}
        rescues = self.work.keeper is not None and self.work.keeper.rescues
        wished = {
            options.exit: options.exit != "offload",
            "restore": resume is not None,
            "rescue": rescues,
            "compile": bool(task.compile),
        }
        wishes = frozenset(wish for wish, wanted in wished.items() if wanted)
        self.driver = Driver(
            life,
            self.work.actions(life.spec),
            self.work.releases(),
            stack,
            self.position,
            wishes,
            self._announce,
        )
        self._begun = self.driver.slot.history[0].at

    # -- what is told -----------------------------------------------------------------------------

    def _announce(self, entry: Entry) -> None:
        """Tell of a transition; back in training, observe that the optimizer still holds what trains."""
        statuses = zip(self.driver.spec.resources, entry.config.statuses, strict=True)
        held = tuple(name for name, status in statuses if status is not Status.ABSENT)
        at = entry.at - self._begun
        number = self.driver.announced + 1
        self.bus.publish(PhaseChanged(number, entry.event, entry.source, entry.phase, held, entry.ended, at))
        # Last: a transition whose check fails was taken all the same, and is told of.
        # Not one that the history only catches up with, on the way out: there the error is known.
        if entry.phase in _CHECKED and entry.event != "train" and entry is self.driver.slot.history[-1]:
            self.work.check(f"after '{entry.event}'")

    def say(self, text: str) -> None:
        """Take an observation worth reading, for the outcome and whoever observes."""
        self.notes.append(text)
        self._tell(text)

    def _tell(self, text: str) -> None:
        self.bus.publish(Note(text))

    def report(self, losses: list[torch.Tensor]) -> None:
        """Look at the facts, read the losses since the last report, and tell of them.

        Args:
            losses: Detached, one for each step.

        Raises:
            PlacementError: The optimizer does not hold what trains any more.
            NonFiniteLoss: One is NaN or infinite.
        """
        self.work.check("at a report")
        if losses:
            first = self.position.step - len(losses) + 1
            check, read = self.options.nonfinite == "error", self.adapter.read
            self._publish_report(
                {"loss": mean_loss(losses, first, check, read), **self.work.stepping.metrics()}
            )

    def _publish_report(self, metrics: dict[str, float]) -> None:
        self._metrics.update(metrics)
        seconds = time.monotonic() - self._begun
        report = Report(self.position.step, self.position.epoch, metrics, seconds)
        self._reports.append(report)
        self.bus.publish(report)
        for judge in self.judges:
            why = judge(report)
            if why and self.position.propose("stop"):
                self.verdict = why
                self.say(f"asked to stop: {why}")

    # -- faults and the end -----------------------------------------------------------------------

    def conclude(self, error: BaseException | None = None) -> Outcome:
        """Go to `closed` by the exit table and draw up the outcome.

        Whatever is raised meanwhile, an interrupt at any line included, counts as one more error, and
        what was cut short is done again: every part of this can be repeated.

        Args:
            error: What ended the run, if anything did; or, once it has ended, a later one.
        """
        if self._given_up is not None:
            return self._given_up
        for _ in range(PATIENCE):
            try:
                self._leave(error)
                self.outcome = self._with_errors(self.outcome or self._draw_up())
                self._let_go()
                return self.outcome
            except BaseException as late:
                error = late
        stuck = NoWayOut(self.driver.phase, PATIENCE)
        stuck.__cause__ = error
        return self._give_up(stuck)

    def _give_up(self, stuck: NoWayOut) -> Outcome:
        """The last resort: let go of everything that can be, and say of the rest that it was abandoned."""
        with suppress(BaseException):
            self._note_error(stuck)
        model = None if self.options.exit == "discard" else self.work.model
        with suppress(BaseException):
            self._let_go()
        if self.outcome is None:
            slot = self.driver.slot
            gone = [name for name, how in slot.ended if how == "abandoned"]
            seconds = time.monotonic() - self._begun
            self.outcome = Outcome(
                status="failed",
                abandoned=tuple(dict.fromkeys([*gone, *slot.held])),
                model=model,
                error=stuck if self.errors.first is None else self.errors.first,
                residue=UNKNOWN,
                history=tuple(slot.history),
                metrics=dict(self._metrics),
                reports=tuple(self._reports),
                steps=self.position.step,
                seconds=seconds,
                notes=tuple(self.notes),
                spec_hash=slot.lifecycle.spec.hash,
            )
            verdict = self.outcome.verdict
            with suppress(BaseException):
                self._tell_the_end(verdict, UNKNOWN, seconds)
        with suppress(BaseException):
            self.outcome = self._with_errors(self.outcome)
        self._given_up = self.outcome
        return self.outcome

    def close(self) -> Outcome:
        """End the run from outside of the engine's loop.

        Raises:
            BaseException: Whatever went wrong on the way out, the same object.
        """
        outcome = self.conclude()
        if outcome.error is None:
            return outcome
        error = outcome.error
        del outcome, self
        try:
            raise_again(error)
        finally:
            del error

    def _leave(self, error: BaseException | None) -> None:
        self._losses = []  # they stand on the device
        if self.adapter.lazy:
            self.work.drop_gradients()
        # An interrupt may land in `torch.no_grad` itself, an optimizer's for instance, and leave them off.
        torch.set_grad_enabled(self._gradients)
        for kind, state in self._autocast.items():
            put_back(kind, state)
        if error is not None:
            self._note_error(error)
        try:
            with self.adapter.session():
                self._to_the_end(error)
        except Exception as refused:
            # A backend that cannot enter or leave its context any more holds up nothing.
            self._note_error(refused)
            self._to_the_end(error)

    def _to_the_end(self, error: BaseException | None) -> None:
        if error is not None:
            self.driver.fault(self._note_error(error))
        try:
            self.driver.unwind(self._note_error)
        except NoWayOut as stuck:
            self._note_error(stuck)

    def _note_error(self, error: BaseException) -> str:
        """Turn an error into evidence that pins nothing; the event to fire for it."""
        with suppress(Exception):  # a remark on an error, which must not become another one
            note = self.adapter.explain(error, self.work.parts())
            if note:
                add_note(error, note)
        self.errors.note(error, self.driver.phase, self.position.step, self._outside)
        # By the type itself: `isinstance` also asks the object, whose class is the user's.
        if issubclass(type(error), DeadlinePassed):
            return "abandon"
        if self.adapter.is_loss_of_device(error):
            return "lose"
        return "interrupt" if self._is_interruption(error) else "fail"

    def _is_interruption(self, error: BaseException) -> bool:
        """Ctrl-C, this run's own cancellation, a library that calls `sys.exit`: no failure of the work."""
        return error is self.position.cancellation or not issubclass(type(error), Exception)

    def _with_errors(self, outcome: Outcome) -> Outcome:
        failures = self.errors.failures()
        return replace(
            outcome,
            status=self._status(),
            error=self.errors.first,
            failure=failures[0] if failures else None,
            errors=failures[1:],
        )

    def _status(self) -> StatusName:
        error = self.errors.first
        if error is not None:
            return "cancelled" if self._is_interruption(error) else "failed"
        finished = any(entry.event == "finish" for entry in self.driver.slot.history)
        return "finished" if finished else "stopped"

    def _residue(self) -> Residue:
        """What was measured; without a measurement nothing is known, unless nothing was ever placed."""
        ended = [name for name, _ in self.driver.slot.ended]
        return self.work.residue or (UNKNOWN if "model" in (*ended, *self.driver.stack.names) else Residue())

    def _draw_up(self) -> Outcome:
        """The outcome, but for the errors; everybody is told that the run is closed."""
        slot, work = self.driver.slot, self.work
        gone = [name for name, how in slot.ended if how == "abandoned"]
        abandoned = tuple(dict.fromkeys([*gone, *self.driver.stack.names]))
        residue = self._residue()
        seconds = time.monotonic() - self._begun
        self._tell_the_end("abandoned" if abandoned else "clean", residue, seconds)
        discarded = self.options.exit == "discard"
        return Outcome(
            status=self._status(),
            abandoned=abandoned,
            model=None if discarded else work.model,
            # With `keep` its state came home, while the parameters stay: it could not go on.
            optimizers=dict(work.named) if self.options.exit == "offload" else {},
            residue=residue,
            history=tuple(slot.history),
            metrics=dict(self._metrics),
            reports=tuple(self._reports),
            steps=self.position.step,
            seconds=seconds,
            notes=(*self.notes, *work.remarks(), *self.bus.failed),
            spec_hash=slot.lifecycle.spec.hash,
            checkpoint=work.keeper.saved if work.keeper is not None else None,
            result=work.result,
        )

    def _tell_the_end(self, verdict: str, residue: Residue, seconds: float) -> None:
        if not self._told:
            failures = self.errors.failures()
            first = f"{failures[0].type}: {failures[0].message}" if failures else ""
            left = residue.bytes if residue.known else None
            self.bus.publish(Closed(self._status(), verdict, left, first, self.position.step, seconds))
            self._told = True
        self.bus.finish(OBSERVERS_MAY_TAKE)

    def _let_go(self) -> None:
        """Break the cycles through actions and bound functions: no garbage collector is needed."""
        self.driver.detach()
        self.work.let_go()
        self.plan = self.served = self.before = self._outside = None
        self.judges = []
        self._losses = []
