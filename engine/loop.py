"""The loops over data: training steps, and evaluation. Hot code; every line here costs each step.

Between two reports a step adds to the user's own work: the loader mark, one append of the
detached loss, one counter, one look at the requests. Everything else happens at reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .batches import size
from .driver import Position
from .errors import Cancelled, DataError, NonFiniteLoss

Step = Callable[[Any], torch.Tensor]


def check_cancel(position: Position) -> None:
    """Raises `Cancelled` if another thread has asked for it."""
    if position.request == "cancel":
        raise Cancelled(f"the run was cancelled on request, after step {position.step}")


def train_epoch(
    batches: Iterable[Any],
    step: Step,
    first_step: Step | None,
    position: Position,
    report_every: int,
    report: Callable[[list[torch.Tensor]], None],
) -> bool:
    """One pass over the training batches.

    Args:
        batches: Iterated once.
        step: Takes a batch, returns its detached loss.
        first_step: Used in place of `step` for the first batch (the one that checks).
        position: Kept up to date.
        report_every: Steps between two calls of `report`.
        report: Gets the detached losses since the last report.

    Returns:
        Whether to go on: `False` if a stop was requested.

    Raises:
        DataError: There was no batch.
        Cancelled: On request, between two steps.
    """
    losses: list[torch.Tensor] = []
    count = begun = position.step
    due = count + report_every
    position.doing, position.since = "loader", time.monotonic()
    for batch in batches:
        position.doing = "step"
        if first_step is None:
            losses.append(step(batch))
        else:
            losses.append(first_step(batch))
            first_step = None
        del batch
        position.step = count = count + 1
        if count >= due:
            report(losses)
            losses = []
            due = count + report_every
            position.since = time.monotonic()
        if position.request:
            check_cancel(position)
            report(losses)
            return False
        position.doing = "loader"
    position.doing = ""
    if count == begun:
        raise DataError("the training data gave no batch: an empty loader, or an iterator used up before")
    if losses:
        report(losses)
    return True


def mean_loss(losses: list[torch.Tensor], first_step: int, check: bool = True) -> float:
    """The mean of detached losses: the one place where a training loss is read from the device.

    Args:
        losses: Zero-dimensional.
        first_step: The number, from 1, of the step of the first one.
        check: Whether a loss that is not finite is an error.

    Raises:
        NonFiniteLoss: Naming the first step whose loss is NaN or infinite.
    """
    values: list[float] = torch.stack(losses).tolist()
    for offset, value in enumerate(values):
        if check and not math.isfinite(value):
            raise NonFiniteLoss(first_step + offset, value)
    return sum(values) / len(values)


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any], torch.Tensor],
    metrics: Callable[[Any], Mapping[str, Any]] | None,
    move: Callable[[Any], Any],
    samples: Callable[[Any], int] | None,
    position: Position,
) -> dict[str, float]:
    """Loss and metrics over some batches, each weighted by its number of samples.

    The model is in evaluation mode meanwhile, without gradients; the `training` flag of every
    submodule is afterwards what it was, also after an error.

    Args:
        model: On the device.
        batches: Iterated once.
        loss: Of a batch that is on the device.
        metrics: Of a batch that is on the device, or `None`.
        move: Takes a batch to the device.
        samples: The size of a batch, or `None` for the length of its first tensor.
        position: Its requests are honoured between batches.

    Returns:
        Means by name, `loss` among them.

    Raises:
        DataError: There was no batch.
        Cancelled: On request.
    """
    totals: dict[str, Any] = {}
    count = 0
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                check_cancel(position)
                here = move(batch)
                weight = samples(batch) if samples else size(batch)
                values = {"loss": loss(here), **(metrics(here) if metrics else {})}
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + value * weight
                count += weight
                del batch, here, values
    finally:
        for module, training in flags:
            module.training = training
    if not count:
        raise DataError("the validation data gave no batch: an empty loader, or an iterator used up before")
    return {name: float(total) / count for name, total in totals.items()}
