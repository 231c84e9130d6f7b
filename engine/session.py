"""One run, from `created` to `closed`, on the thread that calls it.

A session turns whatever happens into an `Outcome`. Which phase follows which is decided by the
spec, which the driver follows; what is done in each is in `work.py`.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from interlock.specs import Entry, Kind, Lifecycle, Status

from .driver import PATIENCE, WAITS, Driver, Position
from .errors import DeadlinePassed, NoWayOut, RunInUse, TaskError
from .events import Bus, Closed, Note, PhaseChanged, Report
from .evidence import Errors, add_note, raise_again
from .keeping import Boundary, Keeper, generators_of
from .loop import check_cancel, explain, mean_loss
from .options import Options
from .outcome import UNKNOWN, Outcome, Residue, StatusName
from .plan import Judge, Plan
from .program import StepProgram
from .release import ReleaseStack
from .residency import standing_on
from .routine import NEVER, Fit, Serve
from .steps.precision import autocast_state, put_back
from .task import Task
from .work import Work

if TYPE_CHECKING:
    from torch import nn

    from interlock.backends.adapter import Adapter

    from .checkpoint import Saved
    from .stepping import Stepping

T = TypeVar("T")

_CHECKED = ("training", "checkpointing")
"""Phases on whose entry the optimizer is looked at."""

_AUTOCAST = ("cpu", "cuda", "mps", "xla")
"""The types of devices whose autocast is put back as it was; asking starts none of them."""

_WAITING = {"pause": "paused", "suspend": "suspended"}
"""Request -> the phase in which the run waits."""

OBSERVERS_MAY_TAKE = 2.0
"""Seconds that the observers of a run get, together, to see its last events."""


class Session:
    """The state of one run. Made by the engine, used once.

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
        self.judges: list[Judge] = []
        """They see each report, and may end the run."""
        self.errors = Errors(options.keep_frames, standing_on(adapter))
        self._reports: list[Report] = []
        self._metrics: dict[str, float] = {}
        self._notes: list[str] = []
        self._losses: list[torch.Tensor] = []
        """Of the steps that a phase handle has taken since the last report."""
        self._told = False
        self._gradients = torch.is_grad_enabled()
        """Whether torch records them where the run is driven from."""
        self._autocast = {kind: autocast_state(kind) for kind in _AUTOCAST}
        self._busy = threading.Lock()
        self._driven_by = 0
        """The thread that has it."""
        self._outside: BaseException | None = None
        stack = ReleaseStack(options.deadline, adapter.copies)
        self.work = Work(task, adapter, program, options, self.position, stack, self._say)
        about = {"task": task.name, "backend": adapter.name, "spec": life.spec.hash}
        settings = plan.checkpoints if plan is not None else None
        if settings is not None or resume is not None:
            self.work.keeper = Keeper(settings, resume, about, self._say, self._tell)
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

    # -- a whole run ----------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Carry the run out, to the end, whatever happens. Never raises the run's own error."""
        try:
            self.perform(self._body)
            return self.conclude()
        except BaseException as error:
            return self.conclude(error)

    def _body(self) -> None:
        if self.plan is not None:
            Fit(self, self.plan, self.task).run()
        elif self.served is not None:
            Serve(self).run()
        else:
            raise TaskError("this run has no data: drive it by its phase handles, or pass batches to `fit`")

    @property
    def stepping(self) -> Stepping:
        """The step of this run."""
        return self.work.stepping

    def begin_epoch(self) -> None:
        """What is due before the first step of the present epoch."""
        change = self.task.adopt.get(self.position.epoch)
        if change is not None:
            self.adopt(change)

    def adopt(self, change: Callable[[nn.Module, Any], object]) -> None:
        """Let what trains be changed, by declaration."""
        if self._losses:
            self._report_losses()
        self.work.adoption = change
        self.driver.reach("adopt")

    def end_epoch(self, batches: Any) -> None:
        """What is due after the last step of the present epoch.

        Args:
            batches: To validate on, or `None`.
        """
        if batches is not None:
            self.validate(batches)
        self.work.end_of_epoch(self._metrics)
        keeper = self.work.keeper
        if keeper is not None and keeper.due_after(self.position.epoch + 1):
            self.save("epoch")

    def claim(self) -> None:
        """Have what the run writes for itself alone, before anything is taken."""
        if self.work.keeper is not None:
            self.work.keeper.claim()
            judges = {
                f"stop rule {i}": one for i, one in enumerate(self.judges) if hasattr(one, "state_dict")
            }
            self.work.rules = judges

    def began(self, step: int) -> None:
        """Training begins, at this step."""
        keeper = self.work.keeper
        if keeper is not None:
            keeper.begin(step)
            if keeper.resume is not None:  # a scheduler may follow one that is not reported in each epoch
                self._metrics.update(keeper.resume.metrics)

    def save_when_due(self, step: int) -> int:
        """Save a checkpoint if one is due after this step; the step at which the next one is."""
        keeper = self.work.keeper
        if keeper is None:
            return NEVER
        now, following = keeper.due(step)
        if now:
            self.save("step")
        return NEVER if following is None else following

    def save(self, boundary: Boundary) -> None:
        """Save a checkpoint now.

        Args:
            boundary: Between two epochs, or between two steps of one.
        """
        if self.work.keeper is not None:
            if boundary == "epoch" and not self.stepping.at_rest:
                boundary = "step"
                self._say(
                    f"after epoch {self.position.epoch + 1} gradients wait for an update of the next one: "
                    "they are not saved, so no run can go on from there"
                )
            self.work.keeper.boundary = boundary
            self.work.keeper.metrics = dict(self._metrics)
            self.driver.reach("checkpoint")
            self.work.keeper.boundary = "step"

    def attend(self) -> bool:
        """Honour what was asked for, between two steps; whether to go on."""
        position = self.position
        while (request := position.request) in WAITS:
            if request == "suspend" and not self.stepping.at_rest:
                return True  # gradients wait for their update: at the next boundary, then
            self._wait()
        check_cancel(position)
        return not position.request

    def _wait(self) -> None:
        """Paused or suspended, until something else is asked for; then in training again, unless to stop."""
        position = self.position
        position.doing, position.since = "", time.monotonic()
        while (request := position.request) in WAITS:
            # Cleared before the look, or a request between the look and the wait would be slept over.
            position.changed.clear()
            if request == "suspend" and not self.stepping.at_rest:
                break  # it was paused while gradients waited: they get their update first
            if self.driver.phase != _WAITING[request]:
                if self.driver.phase == "suspended":
                    self.driver.do("resume")  # paused, a run has its device
                self.driver.reach(request)
            if position.request in WAITS:
                position.changed.wait()
        check_cancel(position)
        # It may have been let go on before it came to wait.
        if position.request != "stop" and self.driver.phase in _WAITING.values():
            self.driver.do("resume")

    def serve(self) -> None:
        """Go over the batches of a session that only serves."""
        self.work.batches, self.work.serving = self.served
        self.driver.do("predict")

    # -- pieces of a run, for phase handles -----------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The placed model."""
        return self.work.placed()[0]

    def perform(self, work: Callable[[], T]) -> T:
        """Do a piece of the run. An error in it ends the run, and is raised again, the same object.

        Raises:
            RunInUse: The run is being driven already: from another thread, or by this very call's
                caller, from inside a hook.
        """
        if not self._busy.acquire(blocking=False):
            raise RunInUse(
                "this run is being driven already, by another thread or by the call whose hook this is: a "
                "run goes one way, and nothing has changed. Return from the hook first, or start another "
                "run"
            )
        self._driven_by = threading.get_ident()
        self._outside = sys.exc_info()[1]
        self._gradients = torch.is_grad_enabled()
        self._autocast = {kind: autocast_state(kind) for kind in _AUTOCAST}
        try:
            with self.adapter.session():
                result = work()
        except BaseException as error:
            self.conclude(error)
            self._driven_by = 0
            self._busy.release()
            # This frame stays in the error's traceback, for as long as anybody keeps the error.
            del self, work
            raise
        self._driven_by = 0
        self._busy.release()
        return result

    def leave(self, error: BaseException | None) -> None:
        """End the run where its `with` block ends: whatever phase it is in, whoever is driving it.

        A call that is in progress on another thread is asked to end, and waited for.

        Args:
            error: What the block raised, if anything.

        Raises:
            RunInUse: From inside one of the run's own hooks, which would wait for itself.
            BaseException: Whatever went wrong on the way out of a block that raised nothing.
        """
        if self._driven_by == threading.get_ident():
            raise RunInUse("the run's `with` block was left from inside one of its own hooks")
        if not self._busy.acquire(blocking=False):
            self.position.ask("cancel")
            self._busy.acquire()
        self._busy.release()
        if self.outcome is not None:
            return
        if error is not None:
            self.conclude(error)
            return
        if self.driver.spec.phase[self.driver.phase].kind is Kind.WORK:
            self.perform(lambda: self.end("stop"))
        elif "offload" in self.driver.slot.legal:
            self.perform(lambda: self.driver.fire("offload"))
        self.close()

    def step_once(self, batch: Any) -> torch.Tensor:
        """One step outside of the engine's loop: the detached loss."""
        step = self.work.stepping.first() or self.work.stepping.step()
        try:
            loss = step(batch)
        except Exception as error:
            of_loss = explain(error, self.position.step + 1, batch)
            if of_loss is not None:
                raise of_loss from error
            raise
        self.position.step += 1
        self._losses.append(loss)
        if len(self._losses) >= self.options.report_every:
            self._report_losses()
        check_cancel(self.position)
        return loss

    def end(self, event: Literal["finish", "stop"]) -> None:
        """End training, after a last look at what was trained."""
        if self._losses:
            self._report_losses()
        if "model" in self.driver.slot.held:
            self.work.check("before the end")
        self.driver.fire(event)

    def _report_losses(self) -> None:
        losses, self._losses = self._losses, []
        self.report(losses)

    def validate(self, batches: Any) -> dict[str, float]:
        """Evaluate in mid-run; the metrics are reported with the prefix `val_`."""
        if self._losses:
            self._report_losses()
        self.work.batches = batches
        self.driver.do("validate")
        metrics = self.work.validation
        self._publish_report({f"val_{name}": value for name, value in metrics.items()})
        return metrics

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
                notes=tuple(self._notes),
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
            notes=(*self._notes, *work.remarks(), *self.bus.failed),
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
        self.plan = self.served = self._outside = None
        self.judges = []
        self._losses = []

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

    def _say(self, text: str) -> None:
        self._notes.append(text)
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
            check = self.options.nonfinite == "error"
            self._publish_report({"loss": mean_loss(losses, first, check), **self.work.stepping.metrics()})

    def _publish_report(self, metrics: dict[str, float]) -> None:
        self._metrics.update(metrics)
        seconds = time.monotonic() - self._begun
        report = Report(self.position.step, self.position.epoch, metrics, seconds)
        self._reports.append(report)
        self.bus.publish(report)
        for judge in self.judges:
            why = judge(report)
            if why and not self.position.request:
                self._say(f"asked to stop: {why}")
                self.position.ask("stop")


def carry_out(session: Session) -> Outcome:
    """Carry a session out, and then clear its own frames too from the traceback of its error.

    While the session ran they were executing, and could not be cleared; they would keep the whole
    session for as long as anybody keeps the error. The error keeps this frame as well, as the caller
    of those: so nothing may be left in it.
    """
    outcome = session.run()
    try:
        session.errors.unpin()
        return outcome
    except BaseException as interrupt:
        return session.conclude(interrupt)
    finally:
        del outcome, session
