"""The loop of training steps over data. Hot code; every line here costs each step.

Between two reports a step adds to the user's own work: the loader mark, one append of the
detached loss, one counter, one look at the requests. Everything else happens at reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from interlock.backends.adapter import read_together

from . import facts
from .batches import describe
from .driver import Position
from .errors import Cancelled, DataError, LossError, NonFiniteLoss, PlacementError
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
    pulse: Callable[[list[torch.Tensor]], int],
    attend: Callable[[], bool],
) -> bool:
    """One pass over the training batches.

    Args:
        batches: Iterated once.
        step: Takes a batch, returns its detached loss.
        first_step: The step to take instead, which also checks, as long as it returns one.
        position: Kept up to date.
        pulse: Gets the detached losses since it was called last; returns the step at which it is due again.
            First called at the start, with none.
        attend: Called between two steps if there is a request; returns whether to go on.

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
    due = pulse(losses)
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
            done, losses = losses, []
            due = pulse(done)
            del done
            position.since = time.monotonic()
        if position.request:
            check_cancel(position)
            if losses:
                done, losses = losses, []
                due = pulse(done)
                del done  # suspended, the run has nothing on the device
            if not attend():
                return False
            position.since = time.monotonic()
        position.doing = "loader"
    position.doing = ""
    if count == begun:
        raise no_batch("training", batches, position.epoch)
    if losses:
        pulse(losses)
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


def no_batch(kind: str, batches: Any, epoch: int) -> DataError:
    """The error for data that gave no batch, saying why as far as that can be seen.

    Args:
        kind: "training" or "validation".
        batches: What was gone over.
        epoch: The present one, from 0.
    """
    batches = batches.batches if isinstance(batches, _Windows) else batches
    told = f"the {kind} data, a {type(batches).__name__}, gave no batch in epoch {epoch + 1}"
    if isinstance(batches, Iterator):
        return DataError(f"{told}: {USED_UP}")
    return DataError(f"{told}: it is empty. Look at the data set's length, `drop_last` and the sampler")


def mean_loss(
    losses: list[torch.Tensor],
    first_step: int,
    check: bool = True,
    read: Callable[[list[torch.Tensor]], list[float]] = read_together,
) -> float:
    """The mean of detached losses: the one place where a training loss is read from the device.

    Args:
        losses: Zero-dimensional.
        first_step: The number, from 1, of the step of the first one.
        check: Whether a loss that is not finite is an error.
        read: Reads them from the device, in one go.

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
    values = read(losses)
    for offset, value in enumerate(values):
        if check and not math.isfinite(value):
            raise NonFiniteLoss(first_step + offset, value)
    return sum(values) / len(values)
