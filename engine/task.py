"""What to train: the model, how to build an optimizer from it, the loss of a batch, the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import DataError, TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from .hand import Stepper
    from .steps.option import Option

    Batch = Any
    ModelSource = nn.Module | Callable[[], nn.Module]
    OptimizerFactory = Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]]
    SchedulerFactory = Callable[[Any], LRScheduler | Mapping[str, LRScheduler]]
    LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
    StepFunction = Callable[[Stepper, Batch], torch.Tensor | Mapping[str, Any]]
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
        scheduler_metric: What a scheduler follows that needs a metric (`ReduceLROnPlateau`), such as
            "val_loss"; by default the loss in validation, or in training where there is no validation.
        options: What a step does besides the plain one: `Accumulate(4)`, `ClipNorm(1.0)`,
            `Precision("bf16")`, or options of your own.
        output: A function from model and batch to what `Engine.predict` is to return; by default the
            model is called with the batch.
        validates_loss: Whether the loss is averaged over validation data too, beside `metrics`.
        step: A function from a step handle and a batch to the loss (or a mapping with "loss" in it): a
            training step that is written by hand, each call checked. See `interlock.Stepper`. The
            optimizer function may return several optimizers then, by name.
        adopt: Epoch (from 0) -> a function from model and optimizer (a mapping, if there are several) that
            changes what trains, before that epoch: unfreezes layers, adds groups by
            `optimizer.add_param_group`. Any other change of what trains in mid-run is an error.
        compile: Let `torch.compile` make the model's forward pass faster: `True`, or its options, such as
            {"mode": "max-autotune"}. It is compiled when it is first called, and is afterwards as it was.
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
    scheduler_metric: str | None = None
    options: Sequence[Option] = ()
    output: Callable[[nn.Module, Batch], Any] | None = None
    validates_loss: bool = True
    step: StepFunction | None = None
    adopt: Mapping[int, Callable[[nn.Module, Any], object]] = field(default_factory=dict)
    compile: bool | Mapping[str, Any] = False
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
        elif not _is_a(self.model, "torch.nn.modules.module.Module") and not _takes(self.model):
            yield f"the model function {_signature(self.model)} is called as `model()`, without arguments"
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
        elif not _takes(optimizer, "model"):
            yield f"the optimizer function {_signature(optimizer)} is called as `optimizer(model)`"
        for part, (does, *arguments) in _FUNCTIONS.items():
            value = getattr(self, part)
            if value is None:
                continue
            if not callable(value):
                yield f"{part} is {_kind(value)}: pass a function from {does}, or leave it out"
            elif part == "loss" and _is_a(value, "torch.nn.modules.module.Module"):
                yield (
                    f"loss is {_kind(value)}, a criterion of outputs and targets, and is called with model "
                    "and batch: pass `loss=lambda m, b: criterion(m(b[0]), b[1])`"
                )
            elif not _takes(value, *arguments):
                call = f"{part}({', '.join(arguments)})"
                yield f"the {part} function {_signature(value)} is called as `{call}`"

    def _wrong_settings(self) -> Iterator[str]:
        epochs: Any = self.epochs
        name: Any = self.name
        metric: Any = self.scheduler_metric
        given: Any = self.options
        if not isinstance(given, (list, tuple)):
            yield f"options is {_kind(given)}: pass a list of step options, such as [ClipNorm(1.0)]"
            given = ()
        for option in given:
            if not _is_a(option, "interlock.steps.option.Option"):
                yield (
                    f"options has {_kind(option)} in it: pass objects such as `Accumulate(4)`, or of a class "
                    "of your own that derives from `interlock.Option`"
                )
        if self.step is not None and given:
            yield (
                "options are woven into the engine's own step, and the step is written by hand: do the same "
                "there (`step.clip(...)`), or leave `step` out"
            )
        yield from self._wrong_adoptions()
        compiles: Any = self.compile
        if not isinstance(compiles, (bool, Mapping)):
            yield f"compile is {_kind(compiles)}: pass True, or a mapping of options of torch.compile"
        if metric is not None and not isinstance(metric, str):
            yield f"scheduler_metric is {_kind(metric)}: pass the name of a metric, such as 'val_loss'"
        if self.scheduler_every not in ("step", "epoch"):
            yield f"scheduler_every is {self.scheduler_every!r}: pass 'step' or 'epoch'"
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
            yield f"epochs is {epochs!r}: pass a whole number of at least 1"
        if not isinstance(name, str):
            yield f"name is {_kind(name)}: pass a string"

    def _wrong_adoptions(self) -> Iterator[str]:
        adopt: Any = self.adopt
        if not isinstance(adopt, Mapping):
            yield f"adopt is {_kind(adopt)}: pass a mapping from epoch to function, such as {{2: unfreeze}}"
            return
        for epoch, change in adopt.items():
            if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
                yield f"adopt has the key {epoch!r}: pass epochs as whole numbers from 0"
            if not callable(change):
                yield f"adopt has {_kind(change)} for epoch {epoch!r}: pass a function of model and optimizer"
            elif not _takes(change, "model", "optimizer"):
                yield f"the adopt function {_signature(change)} is called as `function(model, optimizer)`"

    @property
    def window(self) -> int:
        """How many batches a step takes."""
        return max((option.window for option in self.options), default=1)

    @property
    def schedules_steps(self) -> bool:
        """Whether the engine's own step moves a scheduler."""
        return self.scheduler is not None and self.scheduler_every == "step" and self.step is None

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
            if pair and all(_is_a(one, "torch.Tensor") for one in loaded):
                raise TaskError(
                    f"data() of task '{self.name}' returned two tensors: a pair is taken for training and "
                    f"validation batches. {_LOADER}"
                )
            loaded = Data(*loaded) if pair else Data(loaded)
        for part, batches in zip(loaded._fields, loaded, strict=True):
            refuse_unbatched(f"the {part} part of what data() returned", batches)
            if not is_batches(batches) and not (part == "validate" and batches is None):
                hint = ": is a `return` missing?" if batches is None else ""
                raise TaskError(
                    f"data() of task '{self.name}' must return batches, or (training, validation) batches; "
                    f"its {part} part is {_kind(batches)}, which cannot be iterated{hint}"
                )
        return loaded


_FUNCTIONS = {
    "loss": ("model and batch to a scalar tensor", "model", "batch"),
    "metrics": ("model and batch to named scalars", "model", "batch"),
    "output": ("model and batch to an output", "model", "batch"),
    "scheduler": ("the optimizer to a learning rate scheduler", "optimizer"),
    "step": ("a step handle and a batch to the loss", "step", "batch"),
    "data": ("nothing to batches",),
    "batch_size": ("a batch to its number of samples", "batch"),
}
"""Field -> from what to what its function goes, and what it is called with."""

_LOADER = (
    "Make batches of it: `torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=32)`"
)


def _takes(function: Any, *arguments: str) -> bool:
    """Whether a function can be called with that many arguments; also if it does not say."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _signature(function: Any) -> str:
    """A function as it is defined: `loss_of(model)`."""
    name = getattr(function, "__name__", type(function).__name__)
    return f"`{name}{inspect.signature(function)}`"


def _is_a(value: Any, name: str) -> bool:
    """Whether one of a value's classes has this full name: so its module need not be imported."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(value).__mro__)


def refuse_unbatched(what: str, batches: Any) -> None:
    """Refuse what can be iterated, and gives no batches then.

    Args:
        what: Names it in messages.
        batches: As passed to `fit` or returned by `data`.

    Raises:
        TaskError: It is a tensor, or a data set of single samples.
    """
    if _is_a(batches, "torch.Tensor"):
        raise TaskError(f"{what} is a tensor, and must be batches to iterate over. {_LOADER}")
    data_set = _is_a(batches, "torch.utils.data.dataset.Dataset")
    if data_set and hasattr(batches, "__len__") and not hasattr(batches, "__iter__"):
        raise TaskError(
            f"{what} is {_kind(batches)}, a data set, which gives single samples: wrap it in a DataLoader, "
            "`torch.utils.data.DataLoader(dataset, batch_size=32)`; with `batch_size=None` if each of its "
            "items is a batch"
        )


def refuse_used_up(data: Data, epochs: int) -> None:
    """Refuse data that has nothing left after the first epoch, if there are to be more.

    An object whose `__iter__` returns itself, and may start anew there, is let pass.

    Args:
        data: As loaded.
        epochs: How often it is to be gone through.

    Raises:
        DataError: A part of it is an iterator.
    """
    for kind, batches in (("training", data.train), ("validation", data.validate)):
        if epochs > 1 and isinstance(batches, Iterator):
            code = getattr(getattr(type(batches), "__iter__", None), "__code__", None)
            if code is None or not code.co_names:  # it refers to nothing, so it can set nothing back
                raise DataError(
                    f"the {kind} data, a {type(batches).__name__}, would give no batch in epoch 2 of "
                    f"{epochs}: {USED_UP}"
                )


USED_UP = (
    "it is an iterator, which can be gone through once, and is used up. Pass something that starts anew for "
    "each epoch: a list, a DataLoader, or an object whose __iter__ is a generator"
)
"""What to say of an iterator that has nothing left, or will have."""


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
