"""Tasks that are only evaluated or predicted with: what such a task is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from .errors import TaskError
from .task import Task

if TYPE_CHECKING:
    from .task import LossFunction, MetricFunction

OutputFunction = Callable[[nn.Module, Any], Any]


def as_served(
    task: Any,
    *,
    loss: LossFunction | None = None,
    metrics: MetricFunction | None = None,
    output: OutputFunction | None = None,
) -> Task:
    """A task as it is served.

    Args:
        task: A task, or a model.
        loss: Instead of the task's.
        metrics: Instead of the task's.
        output: Instead of the task's.

    Returns:
        A task whose optimizer function is never called.

    Raises:
        TaskError: It is neither a task nor a model.
    """
    if isinstance(task, nn.Module):
        task = Task(model=task, optimizer=_none, name=type(task).__name__, validates_loss=metrics is None)
    if not isinstance(task, Task):
        raise TaskError(f"expected an interlock.Task or a model, got {type(task).__name__}")
    changes = {"loss": loss, "metrics": metrics, "output": output}
    given = {name: value for name, value in changes.items() if value is not None}
    if "loss" in given:
        given["validates_loss"] = True  # type: ignore[assignment]
    return replace(task, **given)  # type: ignore[arg-type]


def output_of(model: nn.Module, batch: Any) -> Any:
    """What the model itself makes of a batch.

    Raises:
        TaskError: The batch is a list or a tuple, of which nobody knows what the model takes.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        return model(batch[0])  # of a data set that has inputs only
    if isinstance(batch, (list, tuple)):
        raise TaskError(
            f"a batch is a {type(batch).__name__} of {len(batch)}, and nobody knows which of them the model "
            "takes: pass `output=lambda model, batch: model(batch[0])`"
        )
    return model(batch)


def _none(_: nn.Module) -> NoReturn:
    raise TaskError("a model that is only served has no optimizer")
