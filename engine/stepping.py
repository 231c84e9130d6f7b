"""The step of one run: made from the program or written by hand, and what its options hold.

The first steps are the same program with checks bound into it, until there has been an update; from then
on the plain one runs. Nothing here asks in which phase the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from . import facts
from .driver import Position
from .errors import TaskError
from .fused import settle
from .hand import Hand
from .options import Nonfinite
from .program import StepProgram
from .steps.option import Option, Parts, Running, Stateful

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Step = Callable[[Any], torch.Tensor]
Call = Callable[..., Any]


class Observer(Protocol):
    """What a step needs of the run around it."""

    def check(self, when: str) -> None:
        """Observe the facts; raises what is wrong with them."""

    def say(self, text: str) -> None:
        """Take an observation worth reading."""

    def placed_model(self) -> nn.Module:
        """The model, on its device."""

    def look(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device where it can be computed with without disturbing the step."""

    def cut(self) -> None:
        """A micro-batch's program ends."""

    def run_what_was_traced(self) -> None:
        """What was computed between two steps is no part of the next one's program."""


class Stepping:
    """The step of one run, once its optimizer is built.

    Args:
        run: Of which it is the step.
        program: Proved; `None` for a step that is written by hand.
        position: Shared with loop and driver.
        nonfinite: What a loss is that is NaN or infinite.
    """

    def __init__(
        self, run: Observer, program: StepProgram | None, position: Position, nonfinite: Nonfinite
    ) -> None:
        self._run: Observer | None = run
        self._program = program
        self._position = position
        self._nonfinite = nonfinite
        self._lazy = False
        self._options: tuple[Option, ...] = ()
        self._device = "cpu"
        self._optimizers: tuple[Optimizer, ...] = ()
        self._parts: Parts | None = None
        self._running: list[Running] = []
        self._hand: Hand | None = None
        self._plain: Step | None = None
        self._checked: Step | None = None
        self._generated: list[Any] = []
        self._updated = False

    # -- what the loop asks for -----------------------------------------------------------------

    def step(self) -> Step:
        """The step that trains.

        Raises:
            TaskError: There is none before the optimizer is built.
        """
        if self._plain is None:
            raise TaskError("there is no step before the optimizer is built")
        return self._plain

    def first(self) -> Step | None:
        """The step that also checks, as long as there was no update."""
        return None if self._updated or self._checked is None else self._first

    def metrics(self) -> dict[str, float]:
        """What options and a hand-written step add to a report."""
        found: dict[str, float] = {}
        for running in self._running:
            if running.metrics is not None:
                found.update(running.metrics())
        return found

    @property
    def skipped(self) -> int:
        """How many steps ended without their update, since gradients overflowed."""
        return sum(getattr(part, "skipped", 0) for part in self.state().values())

    def remarks(self) -> list[str]:
        """What is worth saying at the end of training."""
        return self._hand.remarks() if self._hand is not None else []

    def epoch_metrics(self) -> dict[str, float]:
        """What a hand-written step adds to the report at the end of an epoch."""
        return self._hand.epoch_metrics() if self._hand is not None else {}

    def state(self) -> dict[str, Stateful]:
        """Name -> what a checkpoint takes along."""
        return {name: part for running in self._running for name, part in running.state.items()}

    def in_evaluation(self, call: Call) -> Call:
        """A function of a batch as it is called in evaluation: under autocast, for instance."""
        for option in self._options:
            call = option.in_evaluation(call, self._device)
        return call

    # -- making it ------------------------------------------------------------------------------

    def begin_serving(self, options: tuple[Option, ...], device: str) -> None:
        """Without a step: batches are evaluated only, or predicted on.

        Args:
            options: Those of the task.
            device: The type of the device that the model stands on, as torch calls it.
        """
        self._options, self._device = options, device

    def begin(
        self, parts: Parts, options: tuple[Option, ...], forward: Call, more: Mapping[str, Any]
    ) -> None:
        """Make the step from the proved program.

        Args:
            parts: Of the run; kept here, and emptied at the end.
            options: Those of the program.
            forward: Takes a batch of the host to the loss.
            more: Values for names of the program that are the run's own, such as `schedule`.

        Raises:
            TaskError: An option does not give the names that it declared.
        """
        if self._program is None:
            raise TaskError("there is no step program: the step is written by hand")
        self._parts = parts
        self._options, self._device = options, parts.device
        self._optimizers = (parts.optimizer,)
        if "sync" in self._program.bindings:
            self._lazy, more = True, {**more, "sync": self._observed().cut}
        at = _UntilCut(self._position) if self._lazy else self._position
        bindings: dict[str, Any] = {
            "zero": parts.optimizer.zero_grad,
            "backward": cast("Callable[[torch.Tensor], None]", torch.Tensor.backward),
            "apply": parts.optimizer.step,
            "at": at,
            "detach": torch.Tensor.detach,
            **more,
        }
        for option in options:
            running = option.begin(parts)
            self._running.append(running)
            bindings.update(running.bindings)
            forward = running.forward(forward) if running.forward is not None else forward
        bindings["forward"] = forward
        self._plain = self._program.bind(**bindings)
        checks = {"forward": self._with_checks(forward), "at": _Checkpoint(self, at)}
        self._checked = self._program.bind(**{**bindings, **checks})
        self._generated = [self._plain, self._checked]

    def begin_by_hand(self, hand: Hand, optimizers: tuple[Optimizer, ...]) -> None:
        """Take a step that is written by hand."""
        self._hand = hand
        self._optimizers = optimizers
        self._running.append(Running(metrics=hand.metrics, suspend=hand.read))
        self._plain = hand.step
        self._checked = hand.step
        hand.before_update = self._before_first_of

    def _with_checks(self, forward: Call) -> Call:
        def checked_forward(batch: Any) -> torch.Tensor:
            loss: torch.Tensor = forward(batch)
            facts.check_loss(loss)
            if self._nonfinite == "error" and not self._lazy:
                facts.check_finite(loss, self._position.step + 1)
            return loss

        return checked_forward

    def _before_update(self) -> None:
        """Once, before the first update: of a replaced parameter there is no gradient."""
        run = self._observed()
        run.check("in the first step")
        got, trainable = facts.check_gradients(run.placed_model(), self._optimizers)
        for optimizer in self._optimizers:
            settle(optimizer)
        run.say(f"{got} of {trainable} parameters received a gradient in the first step")
        self._updated = True

    def _before_first_of(self, name: str, optimizer: Optimizer) -> None:
        """The same for one of several optimizers: another one's parameters may have no gradient yet."""
        run = self._observed()
        run.check("in the first step")
        got, trainable = facts.check_gradients(run.placed_model(), (optimizer,))
        settle(optimizer)
        whose = f" of optimizer '{name}'" if len(self._optimizers) > 1 else ""
        run.say(f"{got} of {trainable} parameters{whose} received a gradient in the first step")
        self._updated = True

    def _first(self, batch: Any) -> torch.Tensor:
        run, checked = self._observed(), self._checked
        if checked is None:
            raise TaskError("there is no step before the optimizer is built")
        run.check("before the first step")
        model = run.placed_model()
        facts.check_mode(model)
        if self._lazy:
            run.run_what_was_traced()  # by the optimizer function, for instance
        before = facts.fingerprints(model, run.look)
        loss: torch.Tensor = checked(batch)
        if self._nonfinite == "error" and self._lazy:
            # Not in between: to read a value there would be a program of its own, to be compiled. By now the
            # update is done, and the parameters are nothing to be saved.
            self._position.updating = True
            facts.check_finite(run.look(loss), self._position.step + 1)
            self._position.updating = False
        if self._updated:
            did, looked_at = facts.changed(before, model, run.look)
            run.say(f"{did} of {looked_at} parameters changed in the first update")
        return loss

    def _observed(self) -> Observer:
        if self._run is None:
            raise TaskError("the run is closed, and has let go of its step")
        return self._run

    @property
    def at_rest(self) -> bool:
        """Whether no gradients wait for an update: those of a hand-written step may, between two calls."""
        return self._hand is None or self._hand.at_rest

    def suspend(self) -> None:
        """Leave nothing on the device."""
        for running in self._running:
            if running.suspend is not None:
                running.suspend()

    # -- the end --------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Hold nothing any more: frames of the step may stand in an error's traceback, with all they hold."""
        self._plain = self._checked = self._run = None
        self._running = []
        self._options = ()
        self._optimizers = ()
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.__dict__.clear()
        hand, self._hand = self._hand, None
        if hand is not None:
            hand.let_go()
        while self._generated:
            self._generated.pop().__globals__.clear()


class _Checkpoint:
    """Stands for the position in the checked program: looks at the gradients before the first update."""

    def __init__(self, stepping: Stepping, at: Any) -> None:
        self._stepping, self._at = stepping, at

    @property
    def updating(self) -> bool:
        """Whether an update is going on."""
        return bool(self._at.updating)

    @updating.setter
    def updating(self, value: bool) -> None:
        if value:
            self._stepping._before_update()
        self._at.updating = value


class _UntilCut:
    """Stands for the position where a device is lazy: an update goes on until the cut that carries it out."""

    def __init__(self, position: Position) -> None:
        self._position = position

    @property
    def updating(self) -> bool:
        """Whether an update is going on."""
        return self._position.updating

    @updating.setter
    def updating(self, value: bool) -> None:
        if value:
            self._position.updating = True
