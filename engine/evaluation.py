"""Evaluation and prediction: passes over data without gradients, which leave no trace in the model.

The model is in evaluation mode meanwhile. Grad mode, the `training` flag of every submodule and the random
generators are afterwards what they were, on every exit: so a validation in mid-run changes nothing of
the training around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from types import TracebackType
from typing import Any

import torch
from torch import nn

from interlock.backends.adapter import read_together

from .batches import size
from .driver import Position
from .errors import DataError, TaskError
from .loop import check_cancel, no_batch, note_batch
from .switches import host_sources


def _nothing() -> None:
    return


class undisturbed:  # noqa: N801 - used as a function is
    """Within the block: evaluation mode and no gradients; afterwards all is as it was.

    Not by `contextlib`, whose managers set attributes on the exception that passes: some refuse that.

    Args:
        model: On the device.
        generators: Getters and setters of further random generators than torch's own, such as the device's.
    """

    def __init__(
        self,
        model: nn.Module,
        generators: Iterable[tuple[Callable[[], Any], Callable[[Any], object]]] = (),
    ) -> None:
        self._model = model
        self._flags = [(module, module.training) for module in model.modules()]
        self._gradients = torch.is_grad_enabled()
        own = ((source.get, source.put) for source in host_sources())
        self._states = [(put, get()) for get, put in (*own, *generators)]

    def __enter__(self) -> None:
        try:
            self._model.eval()
            torch.set_grad_enabled(False)
        except BaseException as error:
            # A block that is not entered is not left either.
            self.__exit__(type(error), error, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._put_back()
        except BaseException:
            # An interrupt: what it cut short is done again.
            self._put_back()
            raise

    def _put_back(self) -> None:
        torch.set_grad_enabled(self._gradients)
        for module, training in self._flags:
            module.training = training
        for put, state in self._states:
            put(state)


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any], torch.Tensor] | None,
    metrics: Callable[[Any], Mapping[str, Any]] | None,
    move: Callable[[Any], Any],
    samples: Callable[[Any], int] | None,
    position: Position,
    generators: Iterable[tuple[Callable[[], Any], Callable[[Any], object]]] = (),
    cut: Callable[[], object] = _nothing,
    read: Callable[[list[torch.Tensor]], list[float]] = read_together,
) -> dict[str, float]:
    """Loss and metrics over some batches, each weighted by its number of samples.

    Args:
        model: On the device.
        batches: Iterated once.
        loss: Of a batch that is on the device, or `None`.
        metrics: Of a batch that is on the device, or `None`.
        move: Takes a batch to the device.
        samples: The size of a batch, or `None` for the length of its first tensor.
        position: Its requests are honoured between batches.
        generators: As for `undisturbed`.
        cut: Called after each batch, for devices that trace until then.
        read: Reads scalars from the device, in one go.

    Returns:
        Means by name, `loss` among them.

    Raises:
        DataError: There was no batch, or none with a sample in it.
        TaskError: A metric is no number, or the size of a batch no count.
        Cancelled: On request.
        Exception: Whatever the task's functions raised, with a note that describes the batch.
    """
    means = Means(read)
    number = 0
    with undisturbed(model, generators), _Reset(means):
        for batch in batches:
            check_cancel(position)
            number += 1
            try:
                here = move(batch)
                weight = _weight(samples(batch) if samples else size(batch))
                if loss is not None:
                    means.add("loss", loss(here), weight)
                for name, value in _named(metrics(here) if metrics else {}, loss is not None):
                    means.add(name, value, weight)
                cut()
            except Exception as error:
                note_batch(error, f"in validation batch {number}", batch)
                raise
            del batch, here
        if not number:
            raise no_batch("validation", batches, position.epoch)
        return means.result()


class _Reset:
    """Resets what gathered, on every exit: the next evaluation must not count this one's samples."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._means.reset()


def predict(
    model: nn.Module,
    batches: Iterable[Any],
    output: Callable[[Any], Any],
    move: Callable[[Any], Any],
    fetch: Callable[[Any], Any],
    position: Position,
    generators: Iterable[tuple[Callable[[], Any], Callable[[Any], object]]] = (),
    cut: Callable[[], object] = _nothing,
) -> list[Any]:
    """What a model makes of some batches, each brought home before the next one is begun.

    Args:
        model: On the device.
        batches: Iterated once.
        output: Of a batch that is on the device.
        move: Takes a batch to the device.
        fetch: Takes an output home.
        position: Its requests are honoured between batches.
        generators: As for `undisturbed`.
        cut: Called once a batch is computed, for devices that trace until then.

    Returns:
        The output of each batch, on the host.

    Raises:
        Cancelled: On request.
        Exception: Whatever the output function raised, with a note that describes the batch.
    """
    found: list[Any] = []
    with undisturbed(model, generators):
        for batch in batches:
            check_cancel(position)
            try:
                here = output(move(batch))
                cut()
                found.append(fetch(here))
                del here
            except Exception as error:
                note_batch(error, f"in batch {len(found) + 1} of the prediction", batch)
                raise
            position.step += 1
            del batch
    return found


def _named(values: Any, own_loss: bool) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise TaskError(
            f"metrics must return a dictionary of named scalars, and returned {type(values).__name__}"
        )
    if own_loss and "loss" in values:
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
    """Weighted means by name. Values stay on the device, as scalars, until the result is asked for.

    A value may also be an object that gathers by itself and has `compute` and `reset`, as those of
    torchmetrics: its result is asked for at the end, and it is reset then.

    Args:
        read: Reads scalars from the device, in one go.
    """

    def __init__(self, read: Callable[[list[torch.Tensor]], list[float]] = read_together) -> None:
        self._read = read
        self._gathered: dict[str, Any] = {}
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
        if callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None)):
            self._gathered[name] = value
            return
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
        if not self._values and not self._gathered:
            raise DataError(
                "no batch of the validation data has any sample, by `batch_size` or its first tensor"
            )
        found = {}
        for name, values in self._values.items():
            weights = self._weights[name]
            products = (
                float(value) * weight for value, weight in zip(self._numbers(values), weights, strict=True)
            )
            found[name] = sum_of(products) / sum(weights)
        for name, gathered in self._gathered.items():
            found[name] = _scalar(name, gathered.compute())
        return found

    def _numbers(self, values: list[Any]) -> list[Any]:
        """Scalars as numbers; those on a device are read in one go."""
        there = [value for value in values if isinstance(value, torch.Tensor)]
        known = iter(self._read(there) if there else ())
        return [next(known) if isinstance(value, torch.Tensor) else value for value in values]

    def reset(self) -> None:
        """Let what gathers by itself begin anew."""
        for gathered in self._gathered.values():
            gathered.reset()


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TaskError(f"compute() of '{name}' must return a scalar, and returned shape {list(value.shape)}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"compute() of '{name}' must return a number, and returned {type(value).__name__}"
        ) from error


def sum_of(numbers: Iterable[float]) -> float:
    """Their sum, rounded once; NaN and infinities as in plain addition."""
    listed = list(numbers)
    try:
        return math.fsum(listed)
    except (ValueError, OverflowError):  # infinities of both signs; a sum that is too large
        return sum(listed)
