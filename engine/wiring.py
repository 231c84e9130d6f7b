"""What the task's optimizer and scheduler functions returned: taken apart, or refused with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from .errors import TaskError
from .task import parameters_of

ONLY = "optimizer"
"""The name of an optimizer that has none, being the only one."""


def as_optimizers(built: Any, *, by_hand: bool = False) -> dict[str, Optimizer]:
    """What an optimizer function returned, by name.

    Args:
        built: Anything.
        by_hand: The step is written by hand: then there may be several, and such as need a closure.

    Returns:
        Name -> optimizer, in order; those of a list are called "0", "1" and so on.

    Raises:
        TaskError: It is something else, or what the step cannot drive.
    """
    found = _named(built)
    bad = [one for one in found.values() if not isinstance(one, Optimizer)]
    if bad or not found:
        what = "None: is a `return` missing?" if built is None else _kinds(built)
        raise TaskError(
            f"the task's optimizer function must return a torch.optim.Optimizer, and returned {what}"
        )
    for one in found.values():
        _refuse_unfinished(one)
    if by_hand:
        return found
    if len(found) > 1:
        raise TaskError(
            f"the task's optimizer function returned {_kinds(built)}; the engine's own step drives one "
            "optimizer: put their parameters into groups of one, or write the step by hand, `Task(step=...)`"
        )
    (only,) = found.values()
    needed = required(only.step)
    if needed:
        raise TaskError(
            f"{type(only).__name__}.step() needs {', '.join(needed)}: it evaluates the loss several "
            "times for one update, and the engine's own step takes one forward and one backward pass: write "
            "the step by hand, `Task(step=...)` with `step.minimize(...)`, or use another optimizer"
        )
    return found


def _named(built: Any) -> dict[str, Any]:
    if isinstance(built, Mapping):
        return {str(name): one for name, one in built.items()}
    if isinstance(built, (list, tuple)) and len(built) != 1:
        return {str(number): one for number, one in enumerate(built)}
    return {ONLY: built[0] if isinstance(built, (list, tuple)) else built}


def _refuse_unfinished(optimizer: Optimizer) -> None:
    lacking = []
    for name in ("param_groups", "state"):
        # No comprehension: an error in it would keep the optimizer in a closure.
        if not hasattr(optimizer, name):
            lacking.append(name)  # noqa: PERF401
    if lacking:
        kind = type(optimizer).__name__
        raise TaskError(
            f"the task's optimizer function returned a {kind} without {' and '.join(lacking)}: its __init__ "
            "must call `super().__init__(params, defaults)`"
        )


def as_schedulers(built: Any, optimizers: Mapping[str, Optimizer], every: str) -> dict[str, Any]:
    """What a scheduler function returned, by the name of the optimizer.

    Args:
        built: Anything.
        optimizers: By name.
        every: When schedulers move: "step" or "epoch".

    Raises:
        TaskError: One is no scheduler, one of another optimizer, or one that cannot move then.
    """
    if len(optimizers) == 1 and not isinstance(built, Mapping):
        built = {next(iter(optimizers)): built}
    if not isinstance(built, Mapping):
        raise TaskError(
            f"the task's scheduler function must return a mapping with a scheduler for each of "
            f"{list(optimizers)} that has one, and returned {type(built).__name__}"
        )
    unknown = [name for name in built if name not in optimizers]
    if unknown:
        raise TaskError(
            f"the task's scheduler function returned schedulers for {unknown}, and the optimizers are called "
            f"{list(optimizers)}"
        )
    for name, scheduler in built.items():
        check_scheduler(scheduler, optimizers[name], every)
    return dict(built)


def check_scheduler(scheduler: Any, optimizer: Optimizer, every: str) -> None:
    """A scheduler moves the learning rate of this very optimizer, and can do so when it is to.

    Args:
        scheduler: What the task's scheduler function returned.
        optimizer: Its optimizer.
        every: When it is to move.

    Raises:
        TaskError: It is no scheduler, one of another optimizer, or needs a metric after each step.
    """
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, Optimizer):
        what = "None: is a `return` missing?" if scheduler is None else type(scheduler).__name__
        raise TaskError(
            f"the task's scheduler function must return a learning rate scheduler, and returned {what}"
        )
    theirs = getattr(scheduler, "optimizer", optimizer)
    if theirs is not optimizer:
        raise TaskError(
            "the scheduler moves the learning rate of another optimizer: build it from the one that the "
            "task's `scheduler` function is given"
        )
    needed = required(scheduler.step)
    if needed and every != "epoch":
        raise TaskError(
            f"{type(scheduler).__name__}.step() needs {', '.join(needed)}, which is not known after each "
            "step: let it move with `scheduler_every='epoch'`, by the metric that `scheduler_metric` names"
        )
    if len(needed) > 1:
        raise TaskError(
            f"{type(scheduler).__name__}.step() needs {', '.join(needed)}: a scheduler is given one metric "
            "at most"
        )


def required(function: Any) -> list[str]:
    """The names of the arguments without which a function cannot be called."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = parameters_of(function).values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def _kinds(built: Any) -> str:
    """The types of what was returned: `Adam`, `[Adam, SGD]`."""
    if isinstance(built, (list, tuple)):
        return f"[{', '.join(type(one).__name__ for one in built)}]"
    if isinstance(built, Mapping):
        return f"{{{', '.join(f'{name}: {type(one).__name__}' for name, one in built.items())}}}"
    return type(built).__name__
