"""`bring`: a task from what people have, which was written for something else.

That is a module shaped like Lightning's, a model that computes its own loss, or a module and a criterion.
What becomes of each part of a module is said before anything runs: used, emulated, or never called.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .bringing_emulation import own_class
from .bringing_module import GRADIENT_HOOKS, Bridge
from .bringing_optimizers import from_class
from .bringing_table import Row, Table, defines, table_of
from .errors import TaskError
from .messages import warn
from .residency import claim, unclaim
from .task import Data, Task, parameters_of

_LABELS = ("labels", "label", "start_positions", "next_sentence_label", "return_loss")
"""A `forward` that takes one of these computes the loss itself."""
_STEPS = ("training_step", "validation_step", "configure_optimizers")
_FIELDS = frozenset(field.name for field in dataclasses.fields(Task))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Brought(Task):
    """A task that was made of what somebody has.

    Attributes:
        table: What becomes of each part of it.
    """

    table: Table


def bring(
    module: Any,
    *,
    criterion: Any = None,
    optimizer: Any = None,
    waive: Iterable[str] = (),
    quiet: bool = False,
    **more: Any,
) -> Brought:
    """Make a task of a module that was written for something else.

    Three shapes are known. A module with `training_step` is shaped like Lightning's `LightningModule`: its
    steps, its `configure_optimizers` and what it asks of itself are used or emulated; Lightning need not be
    installed. A model whose `forward` takes `labels` computes its own loss, as those of transformers do. A
    pair of a module and a criterion is trained on batches `(inputs, targets)`.

    The module's code runs here as far as it must before placement: `prepare_data`, `setup('fit')`,
    `configure_model`, and `configure_optimizers` once, whose result is looked at and dropped.

    Args:
        module: The module itself, on the host, or the pair `(module, criterion)`.
        criterion: Of outputs and targets: an object, a function or a class; makes a pair with `module`.
        optimizer: A function from the placed model to the optimizer, or an optimizer's class with its
            options among `more`: `optimizer=torch.optim.SGD, lr=0.1`. Left out where the module has
            `configure_optimizers`.
        waive: Names of overridden hooks that may never be called.
        quiet: Do not write the table to the standard error stream.
        more: Fields of the task, as `epochs`, `data` or `options`; with an optimizer's class, its options.

    Returns:
        The task, with its `table`.

    Raises:
        TaskError: The shape is none of these, an overridden hook would never be called and is not waived,
            or something is asked for that the engine cannot honour.
        RunInUse: The module is in a run.
    """
    if isinstance(module, tuple) and len(module) == 2 and criterion is None:
        module, criterion = module
    if not isinstance(module, nn.Module):
        raise TaskError(
            f"bring takes a module, or a pair of a module and a criterion, and got {_named(module)}: build "
            "the module first, since it is looked at; for a function that builds one there is `Task`"
        )
    fields = {name: value for name, value in more.items() if name in _FIELDS}
    options = {name: value for name, value in more.items() if name not in _FIELDS}
    make = _optimizer(optimizer, options)
    lightning = callable(getattr(module, "training_step", None))
    if lightning and criterion is None:
        table, own = _of_lightning(module, make, waive, fields)
    else:
        _refuse_waivers(module, waive)
        table, own = _of_others(module, criterion, make)
    _refuse_taken(module, own, fields)
    name = {"name": type(module).__name__}
    brought = Brought(**{**name, **own, **fields}, table=table)
    if not quiet:
        warn(str(table))
    return brought


def _optimizer(given: Any, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """The optimizer function, also from a class and its options."""
    if isinstance(given, type) and issubclass(given, Optimizer):
        made: Callable[[Any], Any] = from_class(given, options)
        return made
    if options:
        raise TaskError(
            f"{sorted(options)} are no fields of a task, and options of an optimizer only where `optimizer` "
            "is its class, as in `bring(..., optimizer=torch.optim.SGD, lr=0.1)`"
        )
    if given is not None and (not callable(given) or isinstance(given, Optimizer)):
        raise TaskError(
            f"optimizer is {_named(given)}: pass its class, with its options as further keywords, or a "
            "function from the placed model to the optimizer"
        )
    function: Callable[[Any], Any] | None = given
    return function


def _refuse_waivers(module: nn.Module, waive: Iterable[str]) -> None:
    names = [waive] if isinstance(waive, str) else list(waive)
    if names:
        raise TaskError(
            f"{names} are waived, and {type(module).__name__} has no hooks: waivers are for modules with "
            "`training_step`"
        )


def _refuse_taken(module: nn.Module, own: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    taken = [name for name in fields if name in own and name != "data"]
    if "step" in own:  # what belongs to the optimizers of a module that has them, and to its step
        more = ("loss", "options", "scheduler", "scheduler_every", "scheduler_metric", "validates_loss")
        taken += [name for name in fields if name in more and name not in own]
    if taken:
        raise TaskError(
            f"{', '.join(taken)}: that is what {type(module).__name__} itself says; leave it out, or write a "
            "`Task` by hand"
        )


def _of_lightning(
    module: nn.Module, make: Callable[[Any], Any] | None, waive: Iterable[str], fields: Mapping[str, Any]
) -> tuple[Table, dict[str, Any]]:
    """Table and fields for a module with `training_step`."""
    token = object()
    claim(module, token)  # its class changes meanwhile, which a run of it would not survive
    try:
        object.__setattr__(module, "__class__", own_class(module))
        table = table_of(module, waive)
        _refuse_with_steps(module, make, fields)
        bridge = Bridge(module, make, fields.get("batch_size"))
        bridge.prepare(module)
        form = bridge.look(module)
    finally:
        unclaim(token)
    lost = [name for name in GRADIENT_HOOKS if defines(module, name)]
    if form.closure and lost:
        raise TaskError(
            f"{', '.join(lost)} of {type(module).__name__} would never be called: its optimizer evaluates "
            "the loss itself, and what is between is its own. Use another optimizer, or do without"
        )
    found: dict[str, Any] = {"model": module, "optimizer": bridge.build_optimizers, "step": bridge.step}
    if form.scheduled:
        found["scheduler"] = bridge.build_schedulers
        found["scheduler_every"] = form.every
        found["scheduler_metric"] = form.monitor
    if defines(module, "validation_step"):
        found |= {"metrics": bridge.validate, "validates_loss": False}
    elif "metrics" not in fields:
        found["loss"] = _no_validation
    if defines(module, "train_dataloader") and "data" not in fields:
        found["data"] = partial(_loaders, module)
    return table, found


def _refuse_with_steps(
    module: nn.Module, make: Callable[[Any], Any] | None, fields: Mapping[str, Any]
) -> None:
    """Refuse what does not go with a module that has its own step."""
    has = defines(module, "configure_optimizers")
    if has == (make is not None):
        what = "has configure_optimizers, and optimizer= is given" if has else "has no configure_optimizers"
        raise TaskError(f"{type(module).__name__} {what}: let one of the two say what the optimizer is")
    if fields.get("options"):
        raise TaskError(
            f"options are woven into the engine's own step, and the step of {type(module).__name__} is its "
            "own: leave them out, or write a `Task` by hand, whose loss calls the module"
        )


def _no_validation(model: nn.Module, batch: Any) -> torch.Tensor:  # noqa: ARG001 - called like that
    """Stands for the loss in validation, which nothing says."""
    raise TaskError(
        f"{type(model).__name__} has no validation_step, and there is validation data: write one, pass "
        "`metrics=`, or leave that data out"
    )


def _loaders(module: Any) -> Data:
    """The data that a module has itself."""
    found = [module.train_dataloader()]
    found += [module.val_dataloader()] if defines(module, "val_dataloader") else []
    for name, batches in zip(("train_dataloader", "val_dataloader"), found, strict=False):
        several = isinstance(batches, (list, tuple)) and any(isinstance(one, DataLoader) for one in batches)
        if several or isinstance(batches, Mapping):
            raise TaskError(f"{name} returned several loaders, and a run goes over one: return one")
    return Data(*found)


def _of_others(
    module: nn.Module, criterion: Any, make: Callable[[Any], Any] | None
) -> tuple[Table, dict[str, Any]]:
    """Table and fields for a model that computes its loss, or a pair."""
    kind = type(module).__name__
    takes = parameters_of(module.forward)
    if criterion is None and not any(name in takes for name in _LABELS):
        raise TaskError(
            f"{kind} is no shape that bring knows. Looked for: the methods {', '.join(_STEPS)} (a module "
            f"for Lightning); a `forward` that takes one of {', '.join(_LABELS)} and returns `.loss` (a "
            "model of transformers); `criterion=`, of outputs and targets. For anything else write a "
            "`Task(model=..., optimizer=..., loss=...)`"
        )
    if make is None:
        raise TaskError(
            f"{kind} does not say how it is optimized: pass `optimizer=torch.optim.AdamW, lr=...`"
        )
    found: dict[str, Any] = {"model": module, "optimizer": make}
    if criterion is None:
        row = Row("forward", "used", "with each batch as keywords; the `.loss` it returns is trained on")
        return Table(kind, (row,)), {**found, "loss": _own_loss}
    rows = (
        Row("forward", "used", "with the first part of each batch"),
        Row("criterion", "used", f"{_title(criterion)}, of the outputs and the second part of each batch"),
    )
    return Table(kind, rows), {**found, "loss": partial(_pair_loss, _criterion(criterion))}


def _criterion(given: Any) -> Any:
    """The criterion as something to call."""
    criterion = given() if isinstance(given, type) else given
    if not callable(criterion):
        raise TaskError(f"criterion is {_named(criterion)}: pass a function of outputs and targets")
    if isinstance(criterion, nn.Module):
        tensors = [name for name, _ in (*criterion.named_parameters(), *criterion.named_buffers())]
        if tensors:
            raise TaskError(
                f"{type(criterion).__name__} has tensors of its own ({', '.join(tensors)}), which would not "
                "be placed with the module: let the module have it, and return the loss with `.loss`"
            )
    return criterion


def _own_loss(model: nn.Module, batch: Any) -> Any:
    """The loss that a model computes from a batch of named inputs."""
    if not isinstance(batch, Mapping):
        raise TaskError(
            f"{type(model).__name__} is called with a batch's entries as keywords, and the batch is "
            f"{_named(batch)}: let the data give dictionaries"
        )
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise TaskError(
            f"{type(model).__name__} returned {type(output).__name__} without a loss: do the batches have "
            f"labels? This one has {', '.join(map(str, batch))}"
        )
    return loss


def _pair_loss(criterion: Any, model: nn.Module, batch: Any) -> Any:
    """The criterion of a batch: inputs that are a mapping or a sequence are taken apart."""
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise TaskError(
            f"a module and a criterion are trained on batches (inputs, targets), and the batch is "
            f"{_named(batch)}: let the data give pairs"
        )
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return criterion(model(**inputs), targets)
    return criterion(model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs), targets)


def _title(value: Any) -> str:
    if isinstance(value, type) or inspect.isfunction(value):
        return value.__name__
    return type(value).__name__


def _named(value: Any) -> str:
    """What something is, for a message."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
