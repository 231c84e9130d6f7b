"""The turn of one optimizer in a hand-written step: each call fires the step events that it stands for.

A call that is out of order is refused before anything happens, in the words of the handle: people write
calls, and not events. What is called past the handle is refused by the optimizer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from interlock.specs.errors import IllegalTransition
from interlock.specs.protocol import Checker, Protocol, Row

from . import facts
from .errors import DirectUpdate, LossError, StaleHandle, TaskError
from .evidence import add_note
from .steps.precision import finite

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from .hand import Hand

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
        applying: Whether the optimizer's own step is what runs.
    """

    def __init__(self, name: str, optimizer: Optimizer, protocol: Protocol, hand: Hand) -> None:
        self.name = name
        self._optimizer: Optimizer | None = optimizer
        self._checker: Checker = protocol.checker()
        self._hand: Hand | None = hand
        self.applying = False
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

        With several optimizers, only this one's parameters get any: what another one's turn computes, as that
        of a generator through its discriminator, does not mix in.

        Args:
            loss: A scalar tensor with a graph.
            scaler: Scales the loss first, so that small gradients do not vanish in half precision.
            options: As for `torch.Tensor.backward`: `retain_graph`, for instance.

        Raises:
            LossError: It is something else.
            IllegalTransition: The last update's gradients have not been dropped (`zero`).
        """
        optimizer, hand = self._present("backward")
        facts.check_loss(loss)
        self._fire("backward", *(_PLAIN if scaler is None else _SCALED))
        if len(hand.turns) > 1:
            options.setdefault("inputs", _trained(optimizer))
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
        self.begin_update(optimizer, hand)
        self._apply(optimizer.step)
        self._fire("update", "apply", "updated")
        hand.updated()

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
        self._fire("minimize", *CALLS["minimize"][0])
        hand.position.updating = True  # one that never asks may have changed anything
        asked = _Asked(self, optimizer, hand, loss_of)
        try:
            self._apply(optimizer.step, asked)
        finally:
            first = asked.let_go()
        if first is None:
            raise LossError(
                f"{type(optimizer).__name__} changed its parameters without asking for the loss: use "
                "`backward` and `update` with it"
            )
        self._fire("minimize", "apply", "updated")
        hand.updated()
        return first

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
            raise stale(what)
        return self._optimizer, self._hand

    @property
    def owes_cut(self) -> bool:
        """Whether the next forward pass has to wait for the end of the present program."""
        row = self._checker.row
        return "forward" not in row and "sync" in row and "forward" in row["sync"]

    def was_cut(self) -> None:
        """The program of a micro-batch has ended, which this optimizer's protocol may have to know."""
        row = self._checker.row
        self._checker.row = row.get("sync", row)

    def _fire(self, call: str, *events: str) -> None:
        if "forward" in events and self.owes_cut and self._hand is not None:
            self._hand.cut()
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

    @property
    def updates(self) -> bool:
        """Whether it has made an update in this run."""
        return self._checked

    def begin_update(self, optimizer: Optimizer, hand: Hand) -> None:
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
        self.applying = True
        try:
            call(*arguments)
        finally:
            self.applying = False

    def _refuse_direct(self, *_: Any) -> None:
        if not self.applying:
            raise DirectUpdate(
                f"`step()` of optimizer '{self.name}' was called past the step handle, so nobody could know "
                f"of the update: call `update()` of the handle instead"
            )

    def let_go(self) -> None:
        """The optimizer is the caller's again, as it was."""
        with suppress(Exception):
            self._hook.remove()
        self._optimizer = self._hand = None


class _Asked:
    """What an optimizer calls for the loss, again and again.

    No function: it would close over the task's, which closes over the batch, and optimizers wrap it in
    functions of their own. In an error's traceback frames keep their functions, with all of this. And
    with slots: a wrapper gets a copy of what is in `__dict__`.
    """

    __slots__ = ("first", "hand", "loss_of", "optimizer", "turn")

    def __init__(
        self, turn: Turn, optimizer: Optimizer, hand: Hand, loss_of: Callable[[], torch.Tensor]
    ) -> None:
        self.turn, self.optimizer, self.hand = turn, optimizer, hand
        self.loss_of: Callable[[], torch.Tensor] | None = loss_of
        self.first: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self.loss_of is None:
            raise stale("minimize")
        self.turn.applying = False  # what is called from here is not the optimizer
        if self.first is None:
            self.hand.position.updating = False  # it asks before it changes anything
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.loss_of()
        facts.check_loss(loss)
        loss.backward()
        self.hand.cut_within_update()  # the optimizer reads the loss next, of a program without an end
        if self.first is None:
            self.first = loss.detach()
            self.turn.begin_update(self.optimizer, self.hand)
        self.turn.applying = True
        return loss

    def let_go(self) -> torch.Tensor | None:
        """The first loss; nothing is held any more."""
        first, self.first, self.loss_of = self.first, None, None
        return first


def stale(what: str) -> StaleHandle:
    """The error for a call of a handle that is over."""
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


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that get gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
