"""What `configure_optimizers` returned, in any of its documented forms: taken apart, or refused.

Everything that the engine cannot honour is refused here, with what to do instead, before placement.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .errors import TaskError
from .wiring import ONLY, required

Every = Literal["step", "epoch"]
_KEYS = frozenset({"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"})
_FORMS = (
    "return an optimizer, a list of them, ([optimizers], [schedulers]), a dictionary with 'optimizer' and "
    "perhaps 'lr_scheduler', or a tuple of such dictionaries"
)


@dataclass(frozen=True)
class Form:
    """The form of what was returned, without what was returned: it holds nothing.

    Attributes:
        names: Of the optimizers.
        scheduled: The names of those that have a scheduler.
        every: When schedulers move.
        monitor: The metric that one follows, or `None`.
        closure: Whether the optimizer evaluates the loss itself (LBFGS).
    """

    names: tuple[str, ...]
    scheduled: tuple[str, ...]
    every: Every
    monitor: str | None
    closure: bool


@dataclass(frozen=True)
class Configured:
    """What was returned, taken apart.

    Attributes:
        optimizers: By name.
        schedulers: By the name of their optimizer.
        form: Its form.
    """

    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any]
    form: Form


def configured(returned: Any, *, manual: bool) -> Configured:
    """Take apart what `configure_optimizers` returned.

    Args:
        returned: Anything.
        manual: Whether the module optimizes by hand: then there may be several optimizers, and
            schedulers move when the module moves them.

    Raises:
        TaskError: It is something else, or something that the engine cannot honour.
    """
    found, settings = _pairs(returned)
    _refuse_foreign(returned, found)
    names = [ONLY] if len(found) == 1 else [str(number) for number in range(len(found))]
    optimizers = dict(zip(names, found, strict=True))
    # Of the class: a scheduler has put another `step` on its optimizer, which says less.
    closures = [type(one).__name__ for one in found if set(required(type(one).step)) - {"self"}]
    if not manual and len(found) > 1:
        raise TaskError(
            f"configure_optimizers returned {len(found)} optimizers, and nothing says which is to move when: "
            "set `self.automatic_optimization = False` and step them in training_step, or put their "
            "parameters into groups of one"
        )
    if manual and closures:
        raise TaskError(
            f"configure_optimizers returned {closures[0]}, which evaluates the loss itself, and in manual "
            "optimization that cannot be checked: leave `automatic_optimization` on, or use another optimizer"
        )
    schedulers: dict[str, Any] = {}
    for setting in settings:
        scheduler = setting["scheduler"]
        owner = next((n for n, one in optimizers.items() if one is getattr(scheduler, "optimizer", one)), "")
        if not owner or owner in schedulers:
            why = "of none of its optimizers" if not owner else "of an optimizer that has one already"
            raise TaskError(
                f"configure_optimizers returned a {type(scheduler).__name__} {why}: return at most one for "
                "each; `ChainedScheduler` and `SequentialLR` make one of several"
            )
        schedulers[owner] = scheduler
        _refuse_setting(setting, manual)
    every: Every = "step" if manual or any(_interval(one) == "step" for one in settings) else "epoch"
    monitors = [one["monitor"] for one in settings if _follows(one) and not manual]
    form = Form(tuple(names), tuple(schedulers), every, next(iter(monitors), None), bool(closures))
    return Configured(optimizers, schedulers, form)


def _refuse_foreign(returned: Any, found: list[Any]) -> None:
    if returned is None:
        raise TaskError(
            "configure_optimizers returned None, so nothing would train: is a `return` missing? "
            f"If not, {_FORMS}"
        )
    bad = [type(one).__name__ for one in found if not isinstance(one, Optimizer)]
    if bad or not found:
        raise TaskError(
            f"configure_optimizers returned {type(returned).__name__} with {', '.join(bad) or 'nothing'} "
            f"where a torch.optim.Optimizer is due: {_FORMS}"
        )


def _pairs(returned: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """The optimizers, and the settings of the schedulers."""
    if isinstance(returned, Mapping):
        return _of_mapping(returned)
    if not isinstance(returned, (list, tuple)):
        return [returned], []
    if len(returned) == 2 and all(isinstance(part, (list, tuple)) for part in returned):
        return list(returned[0]), [_setting(one) for one in returned[1]]
    if returned and all(isinstance(part, Mapping) for part in returned):
        parts = [_of_mapping(part) for part in returned]
        return [one for found, _ in parts for one in found], [one for _, found in parts for one in found]
    return list(returned), []


def _of_mapping(returned: Mapping[str, Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    foreign = sorted(map(str, returned.keys() - {"optimizer", "lr_scheduler", "monitor"}))
    if "optimizer" not in returned or foreign:
        what = f"also has {foreign}" if foreign else "has no 'optimizer'"
        raise TaskError(f"the dictionary that configure_optimizers returned {what}: {_FORMS}")
    given = returned.get("lr_scheduler")
    settings = [] if given is None else [_setting(given, returned.get("monitor"))]
    return [returned["optimizer"]], settings


def _setting(given: Any, monitor: str | None = None) -> dict[str, Any]:
    """The configuration of a scheduler, with what was left out."""
    setting = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    foreign = sorted(map(str, setting.keys() - _KEYS))
    if "scheduler" not in setting or foreign:
        what = f"has {foreign}, which mean nothing" if foreign else "has no 'scheduler'"
        raise TaskError(f"the lr_scheduler configuration of configure_optimizers {what}: mend it")
    return {"interval": "epoch", "frequency": 1, "monitor": monitor, **setting}


def _interval(setting: Mapping[str, Any]) -> Any:
    return setting["interval"]


def _follows(setting: Mapping[str, Any]) -> bool:
    """Whether a scheduler moves by a metric."""
    scheduler = setting["scheduler"]
    return isinstance(scheduler, ReduceLROnPlateau) or bool(required(scheduler.step))


def _refuse_setting(setting: Mapping[str, Any], manual: bool) -> None:
    scheduler, interval, frequency = setting["scheduler"], setting["interval"], setting["frequency"]
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"configure_optimizers returned {name} as a scheduler, which has no `step`: mend it")
    if manual and _follows(setting):
        raise TaskError(
            f"{name} follows a metric, which is not known within a step, and in manual optimization only "
            "training_step moves schedulers: use one that follows the number of steps"
        )
    if manual:
        return
    if interval not in ("step", "epoch"):
        raise TaskError(f"the 'interval' of {name} is {interval!r}: it must be 'step' or 'epoch'")
    if type(frequency) is not int or frequency != 1:
        raise TaskError(
            f"the 'frequency' of {name} is {frequency!r}, and the engine moves a scheduler each time: let it "
            "count itself, as `LambdaLR(optimizer, lambda n: ... n // frequency ...)`"
        )
    if _follows(setting) and not isinstance(setting["monitor"], str):
        raise TaskError(f"{name} follows a metric: say which by 'monitor', such as 'val_loss'")
    if _follows(setting) and interval == "step":
        raise TaskError(f"{name} follows a metric, which is not known after each step: use interval 'epoch'")


def detached(scheduler: Any) -> Any:
    """A scheduler that no longer keeps its optimizer alive; `attach` mends it.

    Between the two an error may end the run, and whatever keeps the optimizer then keeps the device's memory.
    """
    for one in _tree(scheduler):
        vars(one).pop("optimizer", None)
    return scheduler


def attach(scheduler: Any, optimizer: Optimizer) -> Any:
    """Give a scheduler its optimizer back."""
    for one in _tree(scheduler):
        one.optimizer = optimizer
    return scheduler


def _tree(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it is made of."""
    inner = [one for part in getattr(scheduler, "_schedulers", ()) for one in _tree(part)]
    return [scheduler, *inner]


def from_class(kind: type[Optimizer], options: Mapping[str, Any]) -> Any:
    """An optimizer function from an optimizer's class and its options.

    Args:
        kind: Such as `torch.optim.SGD`.
        options: Its keyword arguments, but for the parameters.

    Returns:
        A function from the placed model to the optimizer, over all parameters that train.

    Raises:
        TaskError: The class takes no such options.
    """
    try:
        inspect.signature(kind).bind([], **options)
    except TypeError as error:
        raise TaskError(f"{kind.__name__} cannot be built with {sorted(options)}: {error}") from error

    def optimizer(model: Any) -> Optimizer:
        return kind([p for p in model.parameters() if p.requires_grad], **options)

    return optimizer
