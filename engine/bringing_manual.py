"""Manual optimization of a brought module, through the checked handle of a hand-written step.

What a module calls on its optimizers here, it calls on `interlock.hand.Turn`: an order that is wrong is the
typed error of the step protocol. The handles are made for one step and refuse to work after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .errors import StaleHandle, TaskError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .hand import Stepper, Turn


class HandOptimizer:
    """What `self.optimizers()` gives: an optimizer whose calls are checked.

    Args:
        name: Of the optimizer.
        manual: The step that it belongs to.
    """

    def __init__(self, name: str, manual: Manual) -> None:
        self._name = name
        self._manual = manual

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself. Its `step` called directly is refused."""
        return self._manual.optimizer(self._name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters: a new window begins.

        Raises:
            IllegalTransition: There are gradients that no update has used.
        """
        self._manual.zero(self._name)

    def step(self, closure: Any = None) -> None:
        """Let the optimizer change its parameters.

        Raises:
            IllegalTransition: There are no gradients of this window, or they were used already.
            TaskError: There is a closure.
        """
        if closure is not None:
            raise TaskError(
                "step(closure) cannot be checked, since the closure does what it likes: call zero_grad, "
                "manual_backward and step one after the other"
            )
        self._manual.update(self._name)


class HandScheduler:
    """What `self.lr_schedulers()` gives: a scheduler whose `step` is checked.

    Args:
        name: Of its optimizer.
        manual: The step that it belongs to.
    """

    def __init__(self, name: str, manual: Manual) -> None:
        self._name = name
        self._manual = manual

    def step(self) -> None:
        """Move the learning rate.

        Raises:
            IllegalTransition: There was no update since it moved last.
        """
        self._manual.turn(self._name).schedule()

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the groups."""
        return [group["lr"] for group in self._manual.optimizer(self._name).param_groups]


class Manual:
    """One step of a module that optimizes by hand.

    Attributes:
        loss: The last one that `manual_backward` was called on, detached.

    Args:
        stepper: The checked handle.
        optimizers: By name.
        scheduled: The names of those that have a scheduler.
        hook: Calls a hook of the module, by its name.
    """

    def __init__(
        self,
        stepper: Stepper,
        optimizers: Mapping[str, Optimizer],
        scheduled: tuple[str, ...],
        hook: Callable[..., Any],
    ) -> None:
        self.optimizers = optimizers
        self.loss: torch.Tensor | None = None
        self._stepper: Stepper | None = stepper
        self._scheduled = scheduled
        self._hook: Callable[..., Any] | None = hook
        self._open: list[str] = []
        """Names of the optimizers that were zeroed and not stepped since, the latest last."""
        self._toggled = ""
        self._flags: list[tuple[torch.Tensor, bool]] = []

    def turn(self, name: str) -> Turn:
        """The turn of one optimizer."""
        return self._present()[0][name]

    def optimizer(self, name: str) -> Optimizer:
        """One optimizer, by its name."""
        self._present()
        return self.optimizers[name]

    def _present(self) -> tuple[Stepper, Callable[..., Any]]:
        if self._stepper is None or self._hook is None:
            raise StaleHandle(
                "an optimizer's handle is of one step, and that is over: call `self.optimizers()` and "
                "`self.lr_schedulers()` anew in each training_step"
            )
        return self._stepper, self._hook

    def _call(self, hook: str, *arguments: Any) -> None:
        self._present()[1](hook, *arguments)

    def close(self) -> None:
        """The step is over: put back what was toggled, and hold nothing any more."""
        self.untoggle()
        self._stepper = self._hook = self.loss = None
        self.optimizers = {}

    def handles(self) -> HandOptimizer | list[HandOptimizer]:
        """What `self.optimizers()` returns: one, or a list of several."""
        made = [HandOptimizer(name, self) for name in self._present()[0]]
        return made[0] if len(made) == 1 else made

    def schedulers(self) -> HandScheduler | list[HandScheduler] | None:
        """What `self.lr_schedulers()` returns: one, a list of several, or `None`."""
        made = [HandScheduler(name, self) for name in self._scheduled]
        return (made[0] if len(made) == 1 else made) if made else None

    def zero(self, name: str) -> None:
        """`zero_grad` of one optimizer."""
        self._call("on_before_zero_grad", self.optimizer(name))
        self.turn(name).zero()
        self._open = [*(one for one in self._open if one != name), name]

    def update(self, name: str) -> None:
        """`step` of one optimizer. The engine looks at what trains, so nothing is toggled meanwhile."""
        self._call("on_before_optimizer_step", self.optimizer(name))
        toggled = self._toggled
        self.untoggle()
        self.turn(name).update()
        if toggled:
            self._toggle(toggled)
        self._open = [one for one in self._open if one != name]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`manual_backward`, for the optimizer that is toggled, or was zeroed last and not stepped since.

        Raises:
            TaskError: There are several, and it is neither.
        """
        names = list(self._present()[0])
        latest = self._open[-1] if self._open else ""
        name = self._toggled or latest or (names[0] if len(names) == 1 else "")
        if not name:
            raise TaskError(
                "manual_backward: for which optimizer? Call its `zero_grad` before, or "
                "`self.toggle_optimizer(optimizer)`"
            )
        self._call("on_before_backward", loss)
        self.turn(name).backward(loss, **options)
        self._call("on_after_backward")
        self.loss = loss.detach()

    def clip(self, given: Any, value: float | None, algorithm: str | None) -> None:
        """`clip_gradients` of one optimizer.

        Raises:
            TaskError: It is to be clipped by value.
        """
        if value is None:
            return
        if algorithm not in (None, "norm"):
            raise TaskError(f"clip_gradients by {algorithm!r}: the checked handle clips by 'norm'")
        self.turn(self.name_of(given)).clip(float(value))

    def toggle(self, given: Any) -> None:
        """Let only one optimizer's parameters gather gradients."""
        self.untoggle()
        self._toggle(self.name_of(given))

    def _toggle(self, name: str) -> None:
        mine = {id(p) for group in self.optimizer(name).param_groups for p in group["params"]}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in mine:
                        self._flags.append((parameter, parameter.requires_grad))
                        parameter.requires_grad_(False)
        self._toggled = name

    def untoggle(self) -> None:
        """Put back what `toggle` changed."""
        while self._flags:
            parameter, flag = self._flags[-1]
            parameter.requires_grad_(flag)
            self._flags.pop()
        self._toggled = ""

    @contextmanager
    def toggled(self, given: Any) -> Iterator[None]:
        """`toggle` within a block."""
        self.toggle(given)
        try:
            yield
        finally:
            self.untoggle()

    def name_of(self, given: Any) -> str:
        """The name of an optimizer, or of its handle.

        Raises:
            TaskError: It is no optimizer of this module.
        """
        one = given.optimizer if isinstance(given, HandOptimizer) else given
        for name, optimizer in self.optimizers.items():
            if optimizer is one:
                return name
        raise TaskError(f"{type(given).__name__} is no optimizer of this module: take it from optimizers()")
