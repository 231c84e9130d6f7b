"""What to train: the model, how to build an optimizer from it, the loss of a batch, the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        problems = [*self._wrong_functions(), *self._wrong_settings()]
        if problems:
            raise TaskError(f"task '{self.name}' cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))

    def _wrong_functions(self) -> Iterator[str]:
        optimizer: Any = self.optimizer
        if not callable(self.model):
            yield f"model is {_kind(self.model)}: pass an nn.Module, or a function that builds one"
        if hasattr(optimizer, "param_groups"):
            yield (
                f"optimizer is {_kind(optimizer)}, built already, from parameters that placement may "
                "replace: pass a function that builds it, as `optimizer=lambda model: "
                "torch.optim.AdamW(model.parameters())`"
            )
        elif hasattr(optimizer, "add_param_group") and "params" in parameters_of(optimizer):
            yield (
                f"optimizer is the class {optimizer.__name__}, which takes parameters and not a model: "
                f"pass `optimizer=lambda model: {optimizer.__name__}(model.parameters())`"
            )
        elif not callable(optimizer):
            yield f"optimizer is {_kind(optimizer)}: pass a function from the placed model to an optimizer"
        for field, does in _FUNCTIONS.items():
            value = getattr(self, field)
            if value is not None and not callable(value):
                yield f"{field} is {_kind(value)}: pass a function from {does}, or leave it out"

    def _wrong_settings(self) -> Iterator[str]:
        epochs: Any = self.epochs
        name: Any = self.name
        if self.scheduler_every not in ("step", "epoch"):
            yield f"scheduler_every is {self.scheduler_every!r}: pass 'step' or 'epoch'"
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
            yield f"epochs is {epochs!r}: pass a whole number of at least 1"
        if not isinstance(name, str):
            yield f"name is {_kind(name)}: pass a string"

    def load(self) -> Data:
        """Call `data` and give its result the shape of `Data`.

        Returns:
            What `data` returned if it is a `Data`; of a pair, training and validation; anything else
            that can be iterated is training data.

        Raises:
            TaskError: There is no `data`, or it returned nothing that can be iterated.
        """
        if self.data is None:
            raise TaskError(
                f"task '{self.name}' has no data: pass batches to `fit`, or give the task `data=`, a "
                "function that returns them"
            )
        loaded = self.data()
        if not isinstance(loaded, Data):
            pair = isinstance(loaded, tuple) and len(loaded) == 2
            loaded = Data(*loaded) if pair else Data(loaded)
        for part, batches in zip(loaded._fields, loaded, strict=True):
            if not is_batches(batches) and not (part == "validate" and batches is None):
                hint = ": is a `return` missing?" if batches is None else ""
                raise TaskError(
                    f"data() of task '{self.name}' must return batches, or (training, validation) batches; "
                    f"its {part} part is {_kind(batches)}, which cannot be iterated{hint}"
                )
        return loaded


_FUNCTIONS = {
    "loss": "model and batch to a scalar tensor",
    "metrics": "model and batch to named scalars",
    "scheduler": "the optimizer to a learning rate scheduler",
    "data": "nothing to batches",
    "batch_size": "a batch to its number of samples",
}


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of anything that can be called, by name; none where they cannot be known."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def is_batches(value: Any) -> bool:
    """Whether something can be iterated: also what has only `__getitem__`, as sequences of old had."""
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _kind(value: Any) -> str:
    """What something is, for a message: `None`, `a Tensor`."""
    return "None" if value is None else f"a {type(value).__name__}"
