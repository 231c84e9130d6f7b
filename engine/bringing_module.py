"""A module shaped like Lightning's as the engine calls it: the functions of its task."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .batches import size
from .bringing_emulation import Call, Context, derived, emulating
from .bringing_logging import Gathered, Log
from .bringing_manual import Manual
from .bringing_optimizers import Configured, Form, attach, configured, detached
from .bringing_table import defines
from .errors import TaskError
from .task import parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .hand import Stepper


GRADIENT_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Those within a step, which an optimizer that evaluates the loss itself leaves no place for."""


class Bridge:
    """The functions of a task, by what a module shaped like Lightning's has.

    Args:
        module: On the host; it is not kept.
        configure: Stands for its `configure_optimizers`: a function from the module; `None` if it has that.
        samples: The size of a batch, or `None` for the length of its first tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        configure: Callable[[Any], Any] | None,
        samples: Callable[[Any], int] | None,
    ) -> None:
        self._configure = configure
        self.by_hand = getattr(module, "automatic_optimization", True) is False
        self._samples = samples or size
        self._context = Context()
        self._kind = derived(module, self._context)
        self._form: Form | None = None
        self._optimizers: weakref.WeakValueDictionary[str, Optimizer] = weakref.WeakValueDictionary()
        self._schedulers: dict[str, Any] = {}
        self._gathered: weakref.WeakValueDictionary[str, Gathered] = weakref.WeakValueDictionary()
        self._batch = self._validated = 0
        self._begun = False

    # -- before the run -------------------------------------------------------------------------

    def prepare(self, module: nn.Module) -> None:
        """Call what Lightning calls on the host: to load data and to build layers."""
        with emulating(module, self._kind):
            for name, arguments in (("prepare_data", ()), ("setup", ("fit",)), ("configure_model", ())):
                _hook(module, name, *arguments)

    def look(self, module: nn.Module) -> Form:
        """Call `configure_optimizers` on the host, to see what it returns, and drop that again.

        Raises:
            TaskError: It returns what the engine cannot honour.
        """
        before = dict(vars(module))
        try:
            with torch.random.fork_rng(devices=[]):
                self._form = self._configured(module).form
        finally:
            # An optimizer over parameters before placement must not stay on the module.
            for name in vars(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        return self._form

    def _configured(self, module: nn.Module) -> Configured:
        with emulating(module, self._kind):
            own: Any = getattr(module, "configure_optimizers", None)
            return configured(self._configure(module) if self._configure else own(), manual=self.by_hand)

    # -- the functions of the task --------------------------------------------------------------

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        """The task's `optimizer`: `configure_optimizers` on the placed model.

        Raises:
            TaskError: It returned another form than before placement.
        """
        self._context.epoch = self._context.step = self._batch = self._validated = 0
        self._begun = False
        found = self._configured(model)
        if found.form != self._form:
            raise TaskError(
                f"configure_optimizers returned {found.form} on the placed model, and {self._form} before: "
                "it must return the same kind of thing each time"
            )
        self._optimizers = weakref.WeakValueDictionary(found.optimizers)
        self._schedulers = {name: detached(one) for name, one in found.schedulers.items()}
        return dict(found.optimizers)

    def build_schedulers(self, optimizers: Any) -> dict[str, Any]:
        """The task's `scheduler`: what `configure_optimizers` returned beside the optimizers."""
        found, self._schedulers = self._schedulers, {}
        return {name: attach(one, self._optimizers[name]) for name, one in found.items()}

    def step(self, step: Stepper, batch: Any) -> dict[str, Any]:
        """The task's `step`: `training_step`, with the hooks around it.

        Returns:
            The loss, and what was logged.
        """
        module, context = step.model, self._context
        begun, self._begun = not self._begun, True
        new_epoch = begun or step.epoch != context.epoch
        context.epoch, context.step = step.epoch, step.number - 1
        self._batch = 0 if new_epoch else self._batch + 1
        scheduled = self._form.scheduled if self._form is not None else ()
        manual = Manual(step, self._optimizers, scheduled, partial(_hook, module)) if self.by_hand else None
        call = Call(Log(True, batch, self._samples, self._gathered), manual)
        with emulating(module, self._kind, call):
            for name in ("on_fit_start", "on_train_start") if begun else ():
                _hook(module, name)
            if new_epoch:
                _hook(module, "on_train_epoch_start")
            if defines(module, "on_after_batch_transfer"):
                batch = module.on_after_batch_transfer(batch, 0)  # type: ignore[operator]
            if _hook(module, "on_train_batch_start", batch, self._batch) == -1:
                raise TaskError(
                    "on_train_batch_start returned -1, to leave out the rest of the epoch, which the engine "
                    "does not: end the data there"
                )
            returned, loss = self._trained(module, step, batch, call)
            _hook(module, "on_train_batch_end", returned, batch, self._batch)
            return {"loss": loss, **call.log.beside(loss)}

    def _trained(self, module: nn.Module, step: Stepper, batch: Any, call: Call) -> tuple[Any, torch.Tensor]:
        """What `training_step` returned, and the loss; the update is done."""
        arguments = _arguments(module, "training_step", batch, self._batch)
        if call.manual is not None:
            returned = module.training_step(*arguments)  # type: ignore[operator]
            loss = _loss(returned) if returned is not None else call.manual.loss
            if loss is None:
                raise TaskError("training_step neither returned a loss nor called manual_backward: do one")
            return returned, loss
        (optimizer,) = self._optimizers.values()
        if self._form is not None and self._form.closure:
            loss = step.minimize(partial(self._evaluated, module, arguments, call))
            returned = loss
        else:
            returned = module.training_step(*arguments)  # type: ignore[operator]
            loss = _loss(returned)
            _hook(module, "on_before_zero_grad", optimizer)
            step.zero()
            _hook(module, "on_before_backward", loss)
            step.backward(loss)
            _hook(module, "on_after_backward")
            _hook(module, "on_before_optimizer_step", optimizer)
            step.update()
        if self._form is not None and self._form.scheduled and self._form.every == "step":
            step.schedule()
        return returned, loss

    def _evaluated(self, module: nn.Module, arguments: tuple[Any, ...], call: Call) -> torch.Tensor:
        """The loss, once more: what the last evaluation logs is what counts."""
        call.log.clear()
        return _loss(module.training_step(*arguments))  # type: ignore[operator]

    def validate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """The task's `metrics`: what `validation_step` logs."""
        number = self._validated if self._gathered else 0  # nothing is left of an earlier validation
        self._validated = number + 1
        call = Call(Log(False, batch, self._samples, self._gathered))
        with emulating(model, self._kind, call):
            if defines(model, "on_after_batch_transfer"):
                batch = model.on_after_batch_transfer(batch, 0)  # type: ignore[operator]
            _hook(model, "on_validation_batch_start", batch, number)
            returned = model.validation_step(*_arguments(model, "validation_step", batch, number))  # type: ignore[operator]
            _hook(model, "on_validation_batch_end", returned, batch, number)
        return call.log.in_validation()


def _hook(module: nn.Module, name: str, *arguments: Any) -> Any:
    """Call a hook that the module's author has written, with as many of the arguments as it takes."""
    if not defines(module, name):
        return None
    return getattr(module, name)(*_taken(getattr(module, name), arguments))


def _arguments(module: nn.Module, name: str, batch: Any, number: int) -> tuple[Any, ...]:
    """What a step is called with: the batch, and its number if it takes that."""
    return _taken(getattr(module, name), (batch, number))


def _taken(method: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    parameters = parameters_of(method).values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return arguments
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return arguments[:places]


def _loss(returned: Any) -> torch.Tensor:
    """The loss that `training_step` returned, alone or under "loss".

    Raises:
        TaskError: It returned none.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if isinstance(loss, torch.Tensor):
        return loss
    if returned is None:
        raise TaskError(
            "training_step returned None, to leave the batch out, which the engine does not: return a loss "
            "(a `return` may be missing), or leave the batch out of the data"
        )
    what = "a mapping without 'loss'" if isinstance(returned, Mapping) else type(returned).__name__
    raise TaskError(f"training_step must return the loss, or a mapping with 'loss' in it; it returned {what}")
