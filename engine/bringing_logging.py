"""What a brought module logs with `self.log`: from one call of its step to the reports of the engine.

Values stay on the device until a report reads them. In training they go with the loss of their step; in
validation they are averaged over samples.
"""

# ruff: noqa: ARG001 - `log` takes what Lightning's takes
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from .errors import TaskError
from .evaluation import Means
from .hand import OverEpoch


class Gathered:
    """What is logged under one name in one validation.

    The engine takes it as it takes a metric object of torchmetrics, and alone keeps it alive: so it is gone
    when the validation is over, however that ended.

    Args:
        name: For messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._means = Means()
        self._metric: Any = None

    def add(self, value: Any, weight: int) -> None:
        """Count a value `weight` times; a metric object stands for itself."""
        self._metric = value if _is_metric(value) else None
        self._means.add(self._name, value, weight)

    def compute(self) -> float:
        """The mean."""
        return self._means.result()[self._name]

    def reset(self) -> None:
        """Begin anew."""
        if self._metric is not None:
            self._metric.reset()
        self._means = Means()


def _is_metric(value: Any) -> bool:
    """Whether something gathers by itself, as the objects of torchmetrics do."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


class Log:
    """What the present call of a module's step has logged.

    Args:
        training: Whether it is a training step.
        batch: Of the step.
        samples: The size of a batch, for values without a `batch_size`.
        gathered: What this validation has gathered, by name.
    """

    def __init__(
        self,
        training: bool,
        batch: Any,
        samples: Callable[[Any], int],
        gathered: weakref.WeakValueDictionary[str, Gathered],
    ) -> None:
        self.training = training
        self._batch = batch
        self._samples = samples
        self._gathered = gathered
        self._values: dict[str, Any] = {}

    def add(
        self,
        name: str,
        value: Any,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
    ) -> None:
        """Take a value.

        Raises:
            TaskError: It is no number, has a name that is taken, or is to be reduced otherwise.
        """
        if not isinstance(name, str):
            raise TaskError(f"self.log takes a name first, and got {type(name).__name__}")
        if reduce_fx not in ("mean", torch.mean):
            raise TaskError(
                f"self.log('{name}', reduce_fx={reduce_fx!r}): values are averaged, and nothing else; log a "
                "metric object that has `compute` and `reset`, in validation, for anything else"
            )
        weight: Any = batch_size
        if weight is not None and (not isinstance(weight, int) or weight < 0):
            raise TaskError(f"self.log('{name}', batch_size={weight!r}) must be a whole number from 0")
        key = name if self.training else name.removeprefix("val_")
        if key in self._values:
            raise TaskError(
                f"'{name}' was logged twice in one step, and in reports a name stands once"
                + ("" if self.training else "; 'x' and 'val_x' are one name in validation")
            )
        taken = self._accepted(name, key, value, batch_size)
        if self.training and on_epoch:
            # As Lightning names them: `name` alone, or `name_epoch` if it is logged at steps too.
            self._values[f"{key} over the epoch"] = OverEpoch(f"{key}_epoch" if on_step else key, taken)
        if not self.training or on_step or not on_epoch:
            self._values[key] = taken

    def _accepted(self, name: str, key: str, value: Any, batch_size: int | None) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
        elif not isinstance(value, Real) and (self.training or not _is_metric(value)):
            what = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            hint = ": log what it returns for this batch" if _is_metric(value) else ""
            raise TaskError(
                f"self.log('{name}', ...) takes a number or a scalar tensor, and got {what}{hint}"
            )
        if self.training:
            return value
        gathered = self._gathered.get(key)
        if gathered is None:
            gathered = self._gathered[key] = Gathered(name)
        gathered.add(value, self._samples(self._batch) if batch_size is None else batch_size)
        return gathered

    def clear(self) -> None:
        """Forget the values: the step is evaluated once more."""
        self._values = {}

    def beside(self, loss: torch.Tensor) -> dict[str, Any]:
        """What a training step adds to its loss in the reports.

        Args:
            loss: Which the engine reports itself, as "loss".

        Raises:
            TaskError: Something else was logged under that name.
        """
        found = dict(self._values)
        own = found.pop("loss", None)
        same = isinstance(own, torch.Tensor) and own.data_ptr() == loss.data_ptr()
        if own is not None and not same:
            raise TaskError(
                "self.log('loss', ...) got something else than what training_step returned, which the engine "
                "reports as 'loss': log it under another name"
            )
        return found

    def in_validation(self) -> Mapping[str, Any]:
        """What a validation step gives the engine to average.

        Raises:
            TaskError: It logged nothing.
        """
        if not self._values:
            raise TaskError(
                "validation_step logged nothing, so there is nothing to report: call "
                "`self.log('val_loss', ...)` in it, or pass no validation data"
            )
        return dict(self._values)


def log(
    self: Any,
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> None:
    """Stands for `self.log`: a mean since the last report in training, over samples in validation.

    Args:
        self: The module.
        name: In validation, `val_` is put before it in reports, unless it is there.
        value: A number or a scalar tensor, which is detached; in validation also a metric object.
        prog_bar: Reports have every value, and whoever shows them chooses.
        logger: As `prog_bar`.
        on_step: In training, the mean since the last report; how often there is one is the engine's
            `report_every`. That is the default.
        on_epoch: In training, the mean over the epoch, reported at its end: under this name, or as
            `name_epoch` if it is logged at steps as well.
        reduce_fx: "mean".
        enable_graph: Nothing that is logged keeps its graph.
        sync_dist: There is one process.
        sync_dist_group: As `sync_dist`.
        add_dataloader_idx: There is one loader.
        batch_size: How often the value counts in validation; the size of the batch if left out.
        metric_attribute: Not needed.
        rank_zero_only: There is one process.

    Raises:
        TaskError: The value is no number, or the name is taken.
    """
    self._interlock.call("log").log.add(name, value, reduce_fx, batch_size, on_step, on_epoch)


def log_dict(self: Any, dictionary: Mapping[str, Any], **options: Any) -> None:
    """Stands for `self.log_dict`: each of them by `log`.

    Args:
        self: The module.
        dictionary: Name -> value.
        options: As for `log`.
    """
    for name, value in dictionary.items():
        log(self, name, value, **options)
