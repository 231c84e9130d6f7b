"""Steps that are written by hand, checked call by call.

A task's `step` function gets a `Stepper` and a batch on the device. Each call through it fires the events
that it stands for on the step protocol of the backend, one state for each optimizer, and the first one
that is out of order is refused before anything happens: an update without gradients, a second one, a
forward without zeroing, clipping before unscaling. What goes past the handle is found too: an optimizer
whose `step` is called directly refuses it.

    def step(step, batch):
        step.zero()
        loss = F.cross_entropy(step.model(batch[0]), batch[1])
        step.backward(loss)
        step.clip(1.0)
        step.update()
        return loss

With a `torch.amp.GradScaler`: `step.backward(loss, scaler=scaler)`, then `if step.unscale(scaler):` clip and
update, `else: step.skip()`, and `scaler.update()` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from interlock.backends.adapter import read_together
from interlock.specs.protocol import Protocol

from . import facts
from .driver import Position
from .errors import LossError, StaleHandle, TaskError
from .turn import Turn, stale

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

__all__ = ["Hand", "StepFunction", "Stepper", "Turn"]

StepFunction = Callable[["Stepper", Any], Any]


@dataclass(frozen=True)
class OverEpoch:
    """A value of a hand-written step that is averaged over the whole epoch, and reported at its end.

    Attributes:
        name: In the report.
        value: A number or a scalar tensor.
    """

    name: str
    value: Any


@final
class Stepper:
    """What a task's `step` function works with.

    With one optimizer its methods are here: `zero`, `backward`, `unscale`, `clip`, `update`, `minimize`,
    `skip`, `schedule`. With several, `step["name"]` has them for each. Each of them raises
    `IllegalTransition` where it is out of order, before anything happened.

    Args:
        hand: The hand-written step of a run.
    """

    def __init__(self, hand: Hand) -> None:
        self._hand = hand

    @property
    def model(self) -> nn.Module:
        """The placed model."""
        return self._hand.model()

    @property
    def number(self) -> int:
        """The number of this step, from 1."""
        return self._hand.position.step + 1

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._hand.position.epoch

    def __getitem__(self, name: str) -> Turn:
        """The turn of one optimizer, by its name.

        Raises:
            TaskError: There is none of that name.
        """
        if not self._hand.active:
            raise stale(f"[{name!r}]")
        turn = self._hand.turns.get(name)
        if turn is None:
            raise TaskError(f"there is no optimizer '{name}'; there are {facts.some(self._hand.turns)}")
        return turn

    def __iter__(self) -> Iterator[str]:
        return iter(self._hand.turns)

    def _only(self, what: str) -> Turn:
        if not self._hand.active:
            raise stale(what)
        turns = list(self._hand.turns.values())
        if len(turns) != 1:
            raise TaskError(
                f"`step.{what}` of which optimizer? There are {facts.some(self._hand.turns)}: write "
                f"`step[{next(iter(self._hand.turns), '...')!r}].{what}`"
            )
        return turns[0]

    def zero(self) -> None:
        """Drop the gradients: a new window begins."""
        self._only("zero").zero()

    def backward(self, loss: torch.Tensor, *, scaler: GradScaler | None = None, **options: Any) -> None:
        """Compute the gradients of a loss, and add them to those of this window.

        Args:
            loss: A scalar tensor with a graph.
            scaler: Scales the loss first, so that small gradients do not vanish in half precision.
            options: As for `torch.Tensor.backward`.
        """
        self._only("backward").backward(loss, scaler=scaler, **options)

    def unscale(self, scaler: GradScaler) -> bool:
        """Make this window's scaled gradients true ones, once, before they are clipped and used.

        Args:
            scaler: The one that scaled the losses.

        Returns:
            Whether all of them are finite. If not, the scale was too large: `skip` this window.
        """
        return self._only("unscale").unscale(scaler)

    def clip(self, bound: float, norm: float = 2.0) -> torch.Tensor:
        """Bound the norm of this window's gradients, all taken together.

        Args:
            bound: The norm that is allowed.
            norm: Which norm.

        Returns:
            The norm as it was, a scalar on the device.
        """
        return self._only("clip").clip(bound, norm)

    def update(self) -> None:
        """Let the optimizer change its parameters."""
        self._only("update").update()

    def minimize(self, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One update of an optimizer that evaluates the loss several times for it (`torch.optim.LBFGS`).

        Args:
            loss_of: A function without arguments that computes the loss.

        Returns:
            The first loss, detached.
        """
        return self._only("minimize").minimize(loss_of)

    def skip(self) -> None:
        """Give this window's gradients up without an update; `zero` drops them."""
        self._only("skip").skip()

    def schedule(self) -> None:
        """Move the learning rate scheduler."""
        self._only("schedule").schedule()


class Hand:
    """The hand-written step of one run.

    Args:
        function: The task's.
        optimizers: By name.
        schedulers: By the name of their optimizer.
        protocol: The step protocol of the backend.
        position: Shared with loop and driver.
        model: Returns the placed model.
        move: Takes a batch to the device.
        cut: Ends a program, on a device that traces: a step need not know of it.
        read: Reads scalars from the device, in one go.
    """

    def __init__(
        self,
        function: StepFunction,
        optimizers: Mapping[str, Optimizer],
        schedulers: Mapping[str, Any],
        protocol: Protocol,
        position: Position,
        model: Callable[[], nn.Module],
        move: Callable[[Any], Any],
        cut: Callable[[], object] | None = None,
        read: Callable[[list[torch.Tensor]], list[float]] = read_together,
    ) -> None:
        self.position = position
        self.schedulers = dict(schedulers)
        self.active = False
        self.before_update: Callable[[str, Optimizer], None] | None = None
        """Called before the first update of each optimizer, with its name."""
        self.turns = {name: Turn(name, one, protocol, self) for name, one in optimizers.items()}
        self._function: StepFunction | None = function
        self._model: Callable[[], nn.Module] | None = model
        self._move: Callable[[Any], Any] | None = move
        self._handle: Stepper | None = Stepper(self)
        self._cut: Callable[[], object] | None = cut if "sync" in protocol.events else None
        self._read = read
        self._values: dict[str, list[Any]] = {}
        self._epochs: dict[str, list[Any]] = {}

    def model(self) -> nn.Module:
        """The placed model."""
        if self._model is None or not self.active:
            raise stale("model")
        # Who asks for the model is about to compute with it: the last moment to end the program before.
        if self._cut is not None and any(turn.owes_cut for turn in self.turns.values()):
            self.cut()
        return self._model()

    def step(self, batch: Any) -> torch.Tensor:
        """One call of the task's function: the detached loss.

        Raises:
            LossError: It returned none.
        """
        if self._function is None or self._handle is None or self._move is None:
            raise StaleHandle("the run of this step is closed, and has let go of it")
        self.active = True
        try:
            returned = self._function(self._handle, self._move(batch))
        finally:
            self.active = False
        self.cut()
        values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        loss = values.pop("loss", None)
        if not isinstance(loss, torch.Tensor):
            what = "a mapping without 'loss'" if isinstance(returned, Mapping) else type(returned).__name__
            raise LossError(
                "the task's step function must return the loss, or a mapping with 'loss' in it, and "
                f"returned {what}"
            )
        for name, value in values.items():
            if isinstance(value, OverEpoch):
                self._epochs.setdefault(value.name, []).append(_detached(value.value))
            else:
                self._values.setdefault(name, []).append(_detached(value))
        return loss.detach()

    def cut_within_update(self) -> None:
        """Where the backend wants it, end the program of one evaluation of many in an update."""
        if self._cut is not None:
            updating = self.position.updating
            self._cut()
            self.position.updating = updating

    def updated(self) -> None:
        """An update has ended; where programs are cut, the cut carries it out."""
        if self._cut is None:
            self.position.updating = False

    def cut(self) -> None:
        """Where the backend wants it, end the program of a micro-batch: once for all optimizers."""
        if self._cut is not None:
            self._cut()
            for turn in self.turns.values():
                turn.was_cut()

    @property
    def at_rest(self) -> bool:
        """Whether no gradients wait for an update."""
        return all(turn.at_rest for turn in self.turns.values())

    def read(self) -> None:
        """What the function returned beside the loss, as numbers: nothing of it stands on the device then."""
        for name, found in (*self._values.items(), *self._epochs.items()):
            found[:] = self._numbers(name, found)

    def metrics(self) -> dict[str, float]:
        """The means of what the function returned beside the loss, since the last report."""
        values, self._values = self._values, {}
        return self._means(values)

    def remarks(self) -> list[str]:
        """What is worth saying at the end of training about what was not used."""
        idle = [name for name, turn in self.turns.items() if not turn.updates]
        waiting = [name for name, turn in self.turns.items() if turn.updates and not turn.at_rest]
        found = [f"optimizer '{name}' made no update: the step never called its `update`" for name in idle]
        found += [
            f"gradients of optimizer '{name}' were left without their update at the end" for name in waiting
        ]
        return found

    def epoch_metrics(self) -> dict[str, float]:
        """The means over the epoch of what is to be averaged over it."""
        values, self._epochs = self._epochs, {}
        return self._means(values)

    def _means(self, values: Mapping[str, list[Any]]) -> dict[str, float]:
        return {name: sum(self._numbers(name, found)) / len(found) for name, found in values.items()}

    def _numbers(self, name: str, values: list[Any]) -> list[float]:
        """Values as numbers; those on the device are read in one go."""
        there = [one for one in values if isinstance(one, torch.Tensor) and not one.ndim]
        known = iter(self._read(there) if there else ())
        return [
            next(known) if isinstance(one, torch.Tensor) and not one.ndim else _number(name, one)
            for one in values
        ]

    def let_go(self) -> None:
        """Hold nothing any more."""
        for turn in self.turns.values():
            turn.let_go()
        self.turns = {}
        self.schedulers = {}
        self._function = self._model = self._move = self.before_update = self._handle = self._cut = None
        self._values, self._epochs = {}, {}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(
            f"'{name}', which the task's step function returned, must be a number or a scalar tensor"
        ) from error
