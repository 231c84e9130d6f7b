"""The loops over data: training steps, and evaluation. Hot code; every line here costs each step.

Between two reports a step adds to the user's own work: the loader mark, one append of the
detached loss, one counter, one look at the requests. Everything else happens at reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn

from . import facts
from .batches import describe, size
from .driver import Position
from .errors import Cancelled, DataError, LossError, NonFiniteLoss, PlacementError, TaskError
from .evidence import add_note, traceback_of
from .owners import locals_of
from .task import USED_UP

Step = Callable[[Any], torch.Tensor]


def check_cancel(position: Position) -> None:
    """Raises `Cancelled` if another thread has asked for it."""
    if position.request == "cancel":
        position.cancellation = Cancelled(f"the run was cancelled on request, after step {position.step}")
        raise position.cancellation


def train_epoch(
    batches: Iterable[Any],
    step: Step,
    first_step: Callable[[], Step | None],
    position: Position,
    report_every: int,
    report: Callable[[list[torch.Tensor]], None],
) -> bool:
    """One pass over the training batches.

    Args:
        batches: Iterated once.
        step: Takes a batch, returns its detached loss.
        first_step: The step to take instead, which also checks, as long as it returns one.
        position: Kept up to date.
        report_every: Steps between two calls of `report`.
        report: Gets the detached losses since the last report.

    Returns:
        Whether to go on: `False` if a stop was requested.

    Raises:
        DataError: There was no batch.
        Cancelled: On request, between two steps.
        LossError: The loss cannot be trained on any more.
        Exception: Whatever the step raised, with a note that describes the batch.
    """
    losses: list[torch.Tensor] = []
    first = first_step()
    count = begun = position.step
    due = count + report_every
    position.doing, position.since = "loader", time.monotonic()
    for batch in batches:
        position.doing = "step"
        try:  # costs nothing while nothing is raised
            if first is None:
                losses.append(step(batch))
            else:
                losses.append(first(batch))
                first = first_step()
        except Exception as error:
            of_loss = explain(error, count + 1, batch)
            if of_loss is not None:
                raise of_loss from error
            raise
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
        raise _no_batch("training", batches, position.epoch)
    if losses:
        report(losses)
    return True


def windows(batches: Iterable[Any], window: int) -> Iterable[Any]:
    """The batches as a step takes them: themselves, or lists of `window`; the last list has what is left."""
    if window == 1:
        return batches
    return _Windows(batches, window)


class _Windows:
    """Lists of batches. It keeps the type's name of what it goes over in messages: see `_no_batch`."""

    def __init__(self, batches: Iterable[Any], window: int) -> None:
        self.batches, self.window = batches, window

    def __iter__(self) -> Iterator[list[Any]]:
        found: list[Any] = []
        for batch in self.batches:
            found.append(batch)
            if len(found) == self.window:
                yield found
                found = []
        if found:
            yield found


def explain(error: Exception, step: int, batch: Any) -> LossError | None:
    """Note on the error of a step on which batch it struck; or what to raise in its place.

    Args:
        error: What the step raised.
        step: Its number, from 1.
        batch: What it was given.

    Returns:
        The error that says what is wrong with the loss, if that is what made torch fail.
    """
    of_loss = _of_loss(error, step)
    note_batch(of_loss or error, f"in step {step}", batch)
    return of_loss


def _of_loss(error: Exception, step: int) -> LossError | None:
    """What to say instead of torch's own error where a step failed because of what its loss was.

    The plain step checks no loss, which would cost each step something. So it is looked for here, in the
    frame of the step, as the error's traceback has it.
    """
    trace = traceback_of(error)
    try:
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<interlock"):
            trace = trace.tb_next
        found = dict(locals_of(trace.tb_frame)) if trace is not None else {}
        if "loss" in found and not isinstance(error, LossError):
            facts.check_loss(found["loss"])
        return None
    except LossError as told:
        return LossError(f"in step {step}: {told}")
    finally:
        found = {}
        del trace


def note_batch(error: Exception, where: str, batch: Any) -> None:
    """Note on an error on which batch it struck: its shapes and types, never its values.

    Args:
        error: Raised by the user's functions, torch or a check.
        where: Such as "in step 7".
        batch: As the loader gave it.
    """
    if issubclass(type(error), PlacementError):
        return  # found at a step, but no matter of its batch
    try:
        text = f"interlock: {where}, on a batch of {describe(batch)}"
    except Exception as second:
        text = f"interlock: {where} (the batch cannot be described: {type(second).__name__})"
    add_note(error, text)


def _no_batch(kind: str, batches: Any, epoch: int) -> DataError:
    """The error for data that gave no batch, saying why as far as that can be seen."""
    batches = batches.batches if isinstance(batches, _Windows) else batches
    told = f"the {kind} data, a {type(batches).__name__}, gave no batch in epoch {epoch + 1}"
    if isinstance(batches, Iterator):
        return DataError(f"{told}: {USED_UP}")
    return DataError(f"{told}: it is empty. Look at the data set's length, `drop_last` and the sampler")


def mean_loss(losses: list[torch.Tensor], first_step: int, check: bool = True) -> float:
    """The mean of detached losses: the one place where a training loss is read from the device.

    Args:
        losses: Zero-dimensional.
        first_step: The number, from 1, of the step of the first one.
        check: Whether a loss that is not finite is an error.

    Raises:
        NonFiniteLoss: Naming the first step whose loss is NaN or infinite.
        LossError: Naming the first step whose loss is no scalar.
    """
    for offset, loss in enumerate(losses):
        if loss.ndim:
            raise LossError(
                f"the loss of step {first_step + offset} is no scalar, as those before were: it has shape "
                f"{list(loss.shape)}; reduce it, by `.mean()` for instance"
            )
    values: list[float] = torch.stack(losses).tolist()
    for offset, value in enumerate(values):
        if check and not math.isfinite(value):
            raise NonFiniteLoss(first_step + offset, value)
    return sum(values) / len(values)


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any], torch.Tensor] | None,
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
        loss: Of a batch that is on the device, or `None`.
        metrics: Of a batch that is on the device, or `None`.
        move: Takes a batch to the device.
        samples: The size of a batch, or `None` for the length of its first tensor.
        position: Its requests are honoured between batches.

    Returns:
        Means by name, `loss` among them.

    Raises:
        DataError: There was no batch, or none with a sample in it.
        TaskError: A metric is no number, or the size of a batch no count.
        Cancelled: On request.
        Exception: Whatever the task's functions raised, with a note that describes the batch.
    """
    means = Means()
    number = 0
    flags = [(module, module.training) for module in model.modules()]
    gradients = torch.is_grad_enabled()
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                check_cancel(position)
                number += 1
                try:
                    here = move(batch)
                    weight = _weight(samples(batch) if samples else size(batch))
                    if loss is not None:
                        means.add("loss", loss(here), weight)
                    for name, value in _named(metrics(here) if metrics else {}):
                        means.add(name, value, weight)
                except Exception as error:
                    note_batch(error, f"in validation batch {number}", batch)
                    raise
                del batch, here
    finally:
        try:
            _put_back(flags, gradients)
        except BaseException:
            # An interrupt: what it cut short is done again.
            _put_back(flags, gradients)
            raise
    if not number:
        raise _no_batch("validation", batches, position.epoch)
    return means.result()


def _put_back(flags: Iterable[tuple[nn.Module, bool]], gradients: bool) -> None:
    # `no_grad` sees to gradients too, unless an interrupt lands in it.
    torch.set_grad_enabled(gradients)
    for module, training in flags:
        module.training = training


def _named(values: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise TaskError(
            f"metrics must return a dictionary of named scalars, and returned {type(values).__name__}"
        )
    if "loss" in values:
        raise TaskError(
            "metrics must not return 'loss': under this name the task's own loss is averaged over the "
            "validation data. Give the metric another name"
        )
    return values.items()


def _weight(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise TaskError(f"the number of samples of a batch must be a whole number from 0, and is {number!r}")
    return number


class Means:
    """Weighted means by name. Values stay on the device, as scalars, until the result is asked for."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._weights: dict[str, list[int]] = {}

    def add(self, name: str, value: Any, weight: int) -> None:
        """Count a value `weight` times.

        Args:
            name: Of the mean that it belongs to.
            value: A number, or a tensor of one element.
            weight: A value of weight 0 is not looked at: the loss of an empty batch is NaN.

        Raises:
            TaskError: The value is something else.
        """
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
        elif isinstance(value, Real):
            value = float(value)  # also a scalar of numpy
        else:
            what = (
                f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise TaskError(f"'{name}' must be a number or a scalar tensor in validation, and is {what}")
        if weight:
            self._values.setdefault(name, []).append(value)
            self._weights.setdefault(name, []).append(weight)

    def result(self) -> dict[str, float]:
        """The means, summed in double precision on the host.

        Raises:
            DataError: There is none: all batches were without samples.
        """
        if not self._values:
            raise DataError(
                "no batch of the validation data has any sample, by `batch_size` or its first tensor"
            )
        found = {}
        for name, values in self._values.items():
            weights = self._weights[name]
            products = (float(value) * weight for value, weight in zip(_read(values), weights, strict=True))
            found[name] = sum_of(products) / sum(weights)
        return found


def _read(values: list[Any]) -> list[Any]:
    """Scalars as numbers; those on a device are read in one go."""
    if all(isinstance(value, torch.Tensor) for value in values):
        values = torch.stack(values).tolist()
    return values


def sum_of(numbers: Iterable[float]) -> float:
    """Their sum, rounded once; NaN and infinities as in plain addition."""
    listed = list(numbers)
    try:
        return math.fsum(listed)
    except (ValueError, OverflowError):  # infinities of both signs; a sum that is too large
        return sum(listed)
