"""What to train: the model, how to build an optimizer from it, the loss of a batch, the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    Batch = Any
    ModelSource = nn.Module | Callable[[], nn.Module]
    OptimizerFactory = Callable[[nn.Module], Optimizer]
    SchedulerFactory = Callable[[Optimizer], LRScheduler]
    LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
    MetricFunction = Callable[[nn.Module, Batch], Mapping[str, torch.Tensor | float]]


class Data(NamedTuple):
    """What a task is trained and validated on.

    Attributes:
        train: Any iterable of batches that can be iterated once per epoch.
        validate: The same, or `None`.
    """

    train: Iterable[Any]
    validate: Iterable[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train. Building one touches no device and calls none of the functions.

    Args:
        model: An `nn.Module` on the host, or a function without arguments that builds one.
        optimizer: A *function* from the placed model to a `torch.optim.Optimizer`. It is called
            after placement, so that it sees the parameters that train; an optimizer that exists
            already is refused.
        loss: A function from model and batch to a scalar tensor. May be left out if the model
            called with the batch (as keyword arguments if it is a mapping) returns something
            with `.loss` or `["loss"]`.
        metrics: A function from model and batch to named scalars, for validation; averaged over
            samples.
        scheduler: A function from the optimizer to a learning-rate scheduler.
        scheduler_every: When the scheduler moves: after each `step` (an update) or `epoch`.
        data: A function without arguments that returns `Data` (or a pair, or just the training
            batches); called when none is passed to `fit`, as on the command line.
        epochs: How many epochs to train if `fit` is not told.
        batch_size: A function from a batch to its number of samples; by default the length of
            its first tensor's first dimension.
        name: For reports and journals.

    Raises:
        TaskError: Naming everything that is wrong.
    """

    model: ModelSource
    optimizer: OptimizerFactory
    loss: LossFunction | None = None
    metrics: MetricFunction | None = None
    scheduler: SchedulerFactory | None = None
    scheduler_every: Literal["step", "epoch"] = "step"
    data: Callable[[], Any] | None = None
    epochs: int = 1
    batch_size: Callable[[Any], int] | None = None
    name: str = "task"

    def __post_init__(self) -> None:
        problems = []
        if not callable(self.model):
            problems.append(f"model must be an nn.Module or build one, got {type(self.model).__name__}")
        if hasattr(self.optimizer, "param_groups"):
            problems.append(
                "optimizer is an optimizer already, built from parameters that placement may replace: pass "
                "a function that builds it, as in `optimizer=lambda m: torch.optim.AdamW(m.parameters())`"
            )
        for field in ("optimizer", "loss", "metrics", "scheduler", "data", "batch_size"):
            value = getattr(self, field)
            if not callable(value) and not (value is None and field != "optimizer"):
                if not (field == "optimizer" and hasattr(value, "param_groups")):
                    problems.append(f"{field} must be a function, got {type(value).__name__}")
        if self.scheduler_every not in ("step", "epoch"):
            problems.append(f"scheduler_every must be 'step' or 'epoch', got {self.scheduler_every!r}")
        if not isinstance(self.epochs, int) or isinstance(self.epochs, bool) or self.epochs < 1:
            problems.append(f"epochs must be a whole number of at least 1, got {self.epochs!r}")
        if problems:
            raise TaskError(f"task '{self.name}': " + "; ".join(problems))

    def load(self) -> Data:
        """Call `data` and give its result the shape of `Data`.

        Raises:
            TaskError: There is no `data`, or it returned nothing that can be iterated.
        """
        if self.data is None:
            raise TaskError(
                f"task '{self.name}' has no data: pass batches to `fit`, or give the task `data=`, a function "
                "that returns them"
            )
        loaded = self.data()
        if isinstance(loaded, Data):
            return loaded
        if isinstance(loaded, tuple) and len(loaded) == 2:
            return Data(*loaded)
        if not isinstance(loaded, Iterable):
            raise TaskError(f"data() of task '{self.name}' returned {type(loaded).__name__}, not batches")
        return Data(loaded)
