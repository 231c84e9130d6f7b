"""What a session does between its beginning and its end: training by a plan, evaluation, prediction.

A routine fires what the spec offers - an epoch's steps, a validation, a checkpoint - at the times that the
plan names. What may follow what is not decided here: the driver refuses what the spec does not allow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from .driver import Position
from .loop import train_epoch, windows
from .plan import Plan
from .task import Task

if TYPE_CHECKING:
    from .session import Session

NEVER = 1 << 62
"""A step that no run comes to."""


class Fit:
    """Trains by a plan.

    Args:
        session: The run.
        plan: How long, and what when.
        task: What to train.
    """

    def __init__(self, session: Session, plan: Plan, task: Task) -> None:
        self._session = session
        self._plan = plan
        self._task = task
        self._position: Position = session.position
        self._report_due = 0
        self._validated = 0

    def run(self) -> None:
        """From `created` to `finished` or `stopping`."""
        plan, session = self._plan, self._session
        if plan.overfit is not None:
            batches: Iterable[Any] = list(islice(iter(plan.data.train), plan.overfit))
        else:
            batches = plan.training()
        late = sorted(epoch for epoch in self._task.adopt if epoch >= plan.epochs)
        if late:
            session.say(f"nothing is adopted before epoch {late}: there are {plan.epochs}, counted from 0")
        session.judges = [rule.begin() for rule in plan.stop_when]
        session.claim()
        session.driver.advance("training")
        session.began(self._position.step)
        # As in a run that was never interrupted, which counts from its first step.
        self._validated = self._position.step - self._position.step % (plan.validate_every or 1)
        limit = _TimeLimit(plan.max_time, self._position)
        try:
            limit.begin()
            session.end("finish" if self._epochs(batches) else "stop")
        finally:
            limit.end()

    def _epochs(self, batches: Iterable[Any]) -> bool:
        """Whether all was done; otherwise it was asked to stop."""
        plan, session, position = self._plan, self._session, self._position
        for epoch in range(position.epoch, plan.epochs):
            if plan.max_steps is not None and position.step >= plan.max_steps:
                return True  # resumed there: one more would be one too many
            if position.request and not session.attend():
                return position.request != "stop"
            position.epoch = epoch
            session.begin_epoch()
            stepping = session.stepping
            go_on = train_epoch(
                windows(batches, self._task.window),
                stepping.step(),
                stepping.first,
                position,
                self._pulse,
                session.attend,
            )
            if not go_on:
                last = plan.validation() if position.request == "finish" else None
                if last is not None and position.step != self._validated:
                    session.validate(last)  # of what the run ends with
                return position.request != "stop"
            session.end_epoch(plan.validation() if plan.validate_every is None else None)
            if position.request and epoch + 1 < plan.epochs and not session.attend():
                return position.request != "stop"
        return True

    def _pulse(self, losses: list[torch.Tensor]) -> int:
        """What is due after a step; the step at which something is due again."""
        plan, session, step = self._plan, self._session, self._position.step
        if losses:
            session.report(losses)
        self._report_due = step + session.options.report_every
        due = [self._report_due]
        batches = plan.validation()
        if plan.validate_every is not None and batches is not None:
            if step >= self._validated + plan.validate_every:
                self._validated = step
                session.validate(batches)
            due.append(self._validated + plan.validate_every)
        due.append(session.save_when_due(step))
        if plan.max_steps is not None:
            if step >= plan.max_steps:
                self._position.propose("finish")  # there is no step left to wait before
            due.append(plan.max_steps)
        return min(due)


class _TimeLimit:
    """Asks a run to stop once its time is over, from a thread of its own: a step costs nothing for it."""

    def __init__(self, seconds: float | None, position: Position) -> None:
        self._timer = None if seconds is None else threading.Timer(seconds, _ask, (position,))

    def begin(self) -> None:
        """From here on the time runs."""
        if self._timer is not None:
            self._timer.name = "interlock time limit"
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """No request any more; the thread is gone."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            if timer.ident is not None:
                timer.join()


def _ask(position: Position) -> None:
    position.propose("stop")


class Serve:
    """Evaluates a model, or predicts with it, on the inference lifecycle.

    Args:
        session: The run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(self) -> None:
        """From `created` to `finished`."""
        session = self._session
        session.driver.advance("serving")
        session.serve()
        session.driver.fire("finish")
