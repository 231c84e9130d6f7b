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
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch

from interlock.specs.errors import IllegalTransition
from interlock.specs.protocol import Checker, Protocol, Row

from . import facts
from .driver import Position
from .errors import DirectUpdate, LossError, StaleHandle, TaskError
from .evidence import add_note
from .steps.precision import finite

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

StepFunction = Callable[["Stepper", Any], Any]

_PLAIN = ("forward", "backward")
_SCALED = ("forward", "scale", "backward")
CALLS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "zero": (("zero",),),
    "backward": (_PLAIN, _SCALED),
    "unscale": (("unscale",),),
    "clip": (("clip",),),
    "update": (("update",),),
    "minimize": (("zero", *_PLAIN, "update"),),
    "skip": (("skip",),),
    "schedule": (("schedule",),),
}
"""Call of the handle -> the step events that it stands for, in each of its forms; of an update, its begin."""


class Turn:
    """One optimizer in a hand-written step.

    Attributes:
        name: As the task's optimizer function named it; "optimizer" if there is one only.
    """

    def __init__(self, name: str, optimizer: Optimizer, protocol: Protocol, hand: Hand) -> None:
        self.name = name
        self._optimizer: Optimizer | None = optimizer
        self._checker: Checker = protocol.checker()
        self._hand: Hand | None = hand
        self._applying = False
        self._checked = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_direct)

    # -- what a step is made of -----------------------------------------------------------------

    def zero(self) -> None:
        """Drop the gradients of this optimizer's parameters: a new window begins.

        Raises:
            IllegalTransition: There are gradients that no update has used; `skip` gives them up.
        """
        optimizer, _ = self._present("zero")
        self._fire("zero", "zero")
        optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *, scaler: GradScaler | None = None, **options: Any) -> None:
        """Compute the gradients of a loss, and add them to those of this window.

        Args:
            loss: A scalar tensor with a graph.
            scaler: Scales the loss first, so that small gradients do not vanish in half precision.
            options: As for `torch.Tensor.backward`: `retain_graph`, for instance.

        Raises:
            LossError: It is something else.
            IllegalTransition: The last update's gradients have not been dropped (`zero`).
        """
        self._present("backward")
        facts.check_loss(loss)
        self._fire("backward", *(_PLAIN if scaler is None else _SCALED))
        (loss if scaler is None else scaler.scale(loss)).backward(**options)

    def unscale(self, scaler: GradScaler) -> bool:
        """Make this window's scaled gradients true ones, once, before they are clipped and used.

        Args:
            scaler: The one that scaled the losses.

        Returns:
            Whether all of them are finite. If not, the scale was too large: `skip` this window.

        Raises:
            IllegalTransition: They are not scaled, or not any more.
        """
        optimizer, _ = self._present("unscale")
        self._fire("unscale", "unscale")
        scaler.unscale_(optimizer)
        return finite(scaler, optimizer)

    def clip(self, bound: float, norm: float = 2.0) -> torch.Tensor:
        """Bound the norm of this window's gradients, all taken together.

        Args:
            bound: The norm that is allowed.
            norm: Which norm.

        Returns:
            The norm as it was, a scalar on the device.

        Raises:
            IllegalTransition: There are no gradients of this window.
        """
        optimizer, _ = self._present("clip")
        self._fire("clip", "clip")
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, bound, norm)

    def update(self) -> None:
        """Let the optimizer change its parameters.

        Raises:
            IllegalTransition: There are no gradients of this window, or they were used already.
        """
        optimizer, hand = self._present("update")
        self._fire("update", "update")
        self._begin_update(optimizer, hand)
        self._apply(optimizer.step)
        self._fire("update", "apply", "updated")
        hand.position.updating = False

    def minimize(self, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One update of an optimizer that evaluates the loss several times for it (`torch.optim.LBFGS`).

        Args:
            loss_of: A function without arguments that computes the loss; it is called as often as the
                optimizer likes, each time with fresh gradients.

        Returns:
            The first loss, detached.

        Raises:
            LossError: It returned no scalar tensor with a graph.
            IllegalTransition: There is an open window of gradients that no update has used.
        """
        optimizer, hand = self._present("minimize")
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            self._applying = False  # what is called from here is not the optimizer
            if not losses:
                hand.position.updating = False  # it asks before it changes anything
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = loss_of()
            facts.check_loss(loss)
            loss.backward()
            if not losses:
                losses.append(loss.detach())
                self._begin_update(optimizer, hand)
            self._applying = True
            return loss

        self._fire("minimize", *CALLS["minimize"][0])
        hand.position.updating = True  # one that never asks may have changed anything
        self._apply(optimizer.step, closure)
        if not losses:
            raise LossError(
                f"{type(optimizer).__name__} changed its parameters without asking for the loss: use "
                "`backward` and `update` with it"
            )
        self._fire("minimize", "apply", "updated")
        hand.position.updating = False
        return losses[0]

    def skip(self) -> None:
        """Give this window's gradients up without an update; `zero` drops them.

        Raises:
            IllegalTransition: There is no open window.
        """
        self._present("skip")
        self._fire("skip", "skip")

    def schedule(self) -> None:
        """Move this optimizer's learning rate scheduler.

        Raises:
            IllegalTransition: There was no update since it moved last.
            TaskError: The task has no scheduler for it.
        """
        _, hand = self._present("schedule")
        scheduler = hand.schedulers.get(self.name)
        if scheduler is None:
            raise TaskError(
                f"optimizer '{self.name}' has no scheduler: let the task's `scheduler` function return one"
            )
        self._fire("schedule", "schedule")
        scheduler.step()

    # -- how it is checked ----------------------------------------------------------------------

    def _present(self, what: str) -> tuple[Optimizer, Hand]:
        if self._optimizer is None or self._hand is None or not self._hand.active:
            raise _stale(what)
        return self._optimizer, self._hand

    def _fire(self, call: str, *events: str) -> None:
        row = self._checker.row
        for event in events:
            if event not in row:
                raise self._refusal(call, row, event)
            row = row[event]
        self._checker.row = row

    def _refusal(self, call: str, row: Row, event: str) -> IllegalTransition:
        """Says of a call what the protocol says of its events: people write calls."""
        here = self._checker.row
        why = "; ".join(row.protocol.obstacles(row.state, event))
        legal = [name for name, forms in CALLS.items() if any(_leads_on(here, form) for form in forms)]
        error = IllegalTransition(call, self._checker.phase, legal, why=why)
        add_note(error, f"interlock: in the hand-written step, on optimizer '{self.name}'")
        return error

    def _begin_update(self, optimizer: Optimizer, hand: Hand) -> None:
        """An update begins: from here on a fault leaves parameters half changed."""
        if not self._checked:
            if hand.before_update is not None:
                hand.before_update(self.name, optimizer)
            self._checked = True
        hand.position.updating = True

    @property
    def at_rest(self) -> bool:
        """Whether no gradients of it wait for an update."""
        return self._checker.may_end

    def _apply(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._applying = True
        try:
            call(*arguments)
        finally:
            self._applying = False

    def _refuse_direct(self, *_: Any) -> None:
        if not self._applying:
            raise DirectUpdate(
                f"`step()` of optimizer '{self.name}' was called past the step handle, so nobody could know "
                f"of the update: call `update()` of the handle instead"
            )

    def let_go(self) -> None:
        """The optimizer is the caller's again, as it was."""
        with suppress(Exception):
            self._hook.remove()
        self._optimizer = self._hand = None


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
            raise _stale(f"[{name!r}]")
        turn = self._hand.turns.get(name)
        if turn is None:
            raise TaskError(f"there is no optimizer '{name}'; there are {facts.some(self._hand.turns)}")
        return turn

    def __iter__(self) -> Iterator[str]:
        return iter(self._hand.turns)

    def _only(self, what: str) -> Turn:
        if not self._hand.active:
            raise _stale(what)
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
    ) -> None:
        self.position = position
        self.schedulers = dict(schedulers)
        self.active = False
        self.before_update: Callable[[str, Optimizer], None] | None = None
        """Called before the first update of each optimizer, with its name."""
        self.turns = {name: Turn(name, one, protocol, self) for name, one in optimizers.items()}
        self._function: StepFunction | None = function
        self._model: Callable[[], nn.Module] | None = model
        self._move = move
        self._handle: Stepper | None = Stepper(self)
        self._values: dict[str, list[Any]] = {}

    def model(self) -> nn.Module:
        """The placed model."""
        if self._model is None or not self.active:
            raise _stale("model")
        return self._model()

    def step(self, batch: Any) -> torch.Tensor:
        """One call of the task's function: the detached loss.

        Raises:
            LossError: It returned none.
        """
        if self._function is None or self._handle is None:
            raise StaleHandle("the run of this step is closed, and has let go of it")
        self.active = True
        try:
            returned = self._function(self._handle, self._move(batch))
        finally:
            self.active = False
        values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        loss = values.pop("loss", None)
        if not isinstance(loss, torch.Tensor):
            what = "a mapping without 'loss'" if isinstance(returned, Mapping) else type(returned).__name__
            raise LossError(
                "the task's step function must return the loss, or a mapping with 'loss' in it, and "
                f"returned {what}"
            )
        for name, value in values.items():
            kept = value.detach() if isinstance(value, torch.Tensor) else value
            self._values.setdefault(name, []).append(kept)
        return loss.detach()

    @property
    def at_rest(self) -> bool:
        """Whether no gradients wait for an update."""
        return all(turn.at_rest for turn in self.turns.values())

    def read(self) -> None:
        """What the function returned beside the loss, as numbers: nothing of it stands on the device then."""
        for name, found in self._values.items():
            found[:] = [_number(name, value) for value in found]

    def metrics(self) -> dict[str, float]:
        """The means of what the function returned beside the loss, since the last report."""
        values, self._values = self._values, {}
        return {name: sum(_number(name, one) for one in all_) / len(all_) for name, all_ in values.items()}

    def let_go(self) -> None:
        """Hold nothing any more."""
        for turn in self.turns.values():
            turn.let_go()
        self.turns = {}
        self.schedulers = {}
        self._function = self._model = self.before_update = self._handle = None
        self._values = {}


def _stale(what: str) -> StaleHandle:
    return StaleHandle(
        f"'{what}' of a step handle that is over: it may be used within the task's `step` function, while it "
        "runs, and nowhere else"
    )


def _leads_on(row: Row, events: tuple[str, ...]) -> bool:
    """Whether all of these events are legal, one after the other."""
    for event in events:
        if event not in row:
            return False
        row = row[event]
    return True


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(
            f"'{name}', which the task's step function returned, must be a number or a scalar tensor"
        ) from error
