"""One run, from `created` to `closed`, on the thread that calls it.

A session is driven as a whole, by a routine, or piece by piece, by phase handles. Which phase follows
which is decided by the spec, which the driver follows; what is done in each is in `phases.py`, how it
ends in `ending.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from interlock.specs import Kind

from .driver import WAITS
from .ending import AUTOCAST, Ending
from .errors import RunInUse, TaskError
from .keeping import Boundary
from .loop import check_cancel, explain
from .outcome import Outcome
from .routine import NEVER, Fit, Serve
from .steps.precision import autocast_state

if TYPE_CHECKING:
    from torch import nn

    from .stepping import Stepping

T = TypeVar("T")

_WAITING = {"pause": "paused", "suspend": "suspended"}
"""Request -> the phase in which the run waits."""


class Session(Ending):
    """The state of one run. Made by the engine, used once. Arguments as for `Ending`."""

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
        means = self.stepping.epoch_metrics()
        if means:
            self._publish_report(means)
        if batches is not None:
            self.validate(batches)
        self.work.end_of_epoch(self._metrics)
        keeper = self.work.keeper
        if keeper is not None and keeper.due_after(self.position.epoch + 1):
            self.save("epoch")

    def next_epoch(self, batches: Any) -> dict[str, float] | None:
        """From one epoch to the next, outside of the engine's loop; the metrics of its validation."""
        if self._losses:
            self._report_losses()
        self.end_epoch(batches)
        self.position.epoch += 1
        self.begin_epoch()
        return self.work.validation if batches is not None else None

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
                why = keeper.resume.about.get("stopped", "")
                if why and self.judges and self.position.propose("stop"):
                    self.verdict = why  # the same command again trains nothing more
                    self.say(f"was stopped before, and stays so: {why}")

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
                self.say(
                    f"after epoch {self.position.epoch + 1} gradients wait for an update of the next one: "
                    "they are not saved, so no run can go on from there"
                )
            self.work.keeper.boundary = boundary
            self.work.keeper.metrics = dict(self._metrics)
            self.work.keeper.verdict = self.verdict
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
        self._autocast = {kind: autocast_state(kind) for kind in AUTOCAST}
        try:
            before, self.before = self.before, None
            if before is not None:
                before()
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
        for remark in self.stepping.remarks():
            self.say(remark)
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


def carry_out(session: Session, served: Any = None) -> Outcome:
    """Carry a session out, and then clear its own frames too from the traceback of its error.

    While the session ran they were executing, and could not be cleared; they would keep the whole
    session for as long as anybody keeps the error. The error keeps this frame as well, as the caller
    of those: so nothing may be left in it.

    Args:
        session: Not begun yet.
        served: Of one that only serves: (batches, what is done with them).
    """
    outcome: Outcome | None = None
    try:
        session.served = served
        outcome = session.run()
        session.errors.unpin()
        return outcome
    except BaseException as interrupt:
        return session.conclude(interrupt)
    finally:
        del outcome, session, served
