"""What becomes of each part of a module that is brought: the names, their columns, the table.

A name is used, emulated, or never called; no name is in two columns. The names are those of Lightning's
`LightningModule` (its API reference, "Methods", "Properties" and "Hooks", of 2.6), which is what such modules
are shaped like. Nothing here imports Lightning, or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from .errors import TaskError

Column = Literal["used", "emulated", "never called"]

USED = {
    "forward": "by your own step; the engine does not call it",
    "training_step": "each step: its loss is trained on",
    "validation_step": "each validation batch: what it logs is reported",
    "configure_optimizers": "once more on the placed model; here, to see what it returns",
    "automatic_optimization": "False: the step is yours, through checked optimizers",
    "train_dataloader": "training data, where `fit` is given none",
    "val_dataloader": "validation data, where `fit` is given no training data",
}
"""What stays as it is and is called, or read."""

CALLED = {
    "prepare_data": "called by bring, once",
    "setup": "called by bring, once, with 'fit'",
    "configure_model": "called by bring, once",
    "on_fit_start": "before the first step",
    "on_train_start": "before the first step",
    "on_train_epoch_start": "before the first step of an epoch",
    "on_after_batch_transfer": "on each batch that has come to the device",
    "on_train_batch_start": "before training_step",
    "on_train_batch_end": "after the update",
    "on_before_zero_grad": "before the gradients go",
    "on_before_backward": "before the backward pass",
    "on_after_backward": "after the backward pass",
    "on_before_optimizer_step": "before the update",
    "on_validation_batch_start": "before validation_step",
    "on_validation_batch_end": "after validation_step",
}
"""Hooks for which there is a place in a run: called there, as Lightning would."""

GIVEN = {
    "log": "into the engine's reports: means since the last one; in validation, over samples",
    "log_dict": "as log, for each",
    "print": "to the standard output",
    "device": "where the parameters are",
    "current_epoch": "from 0",
    "global_step": "steps taken before this one; with several optimizers too",
    "global_rank": "0",
    "local_rank": "0",
    "trainer": "current_epoch, global_step, is_global_zero, training, validating; the rest is refused",
    "optimizers": "checked handles: zero_grad, step, param_groups",
    "lr_schedulers": "checked handles: step, get_last_lr",
    "manual_backward": "through the checked handle",
    "toggle_optimizer": "put back at the end of each step, if you do not",
    "untoggle_optimizer": "as toggle_optimizer",
    "toggled_optimizer": "as toggle_optimizer",
    "clip_gradients": "by norm, through the checked handle",
}
"""What a module may ask of itself; it is there while the engine calls the module, and at no other time."""

NO_PLACE = {
    "on_fit_end": "nothing of a module is called once training is over",
    "on_train_end": "nothing of a module is called once training is over",
    "on_train_epoch_end": "an epoch ends in the engine: follow `Report` events instead",
    "on_validation_start": "a validation begins in the engine",
    "on_validation_end": "a validation ends in the engine: what validation_step logs is averaged by it",
    "on_validation_epoch_start": "a validation begins in the engine",
    "on_validation_epoch_end": "a validation ends in the engine: what validation_step logs is averaged by it",
    "on_validation_model_zero_grad": "gradients stay as they are in validation",
    "on_validation_model_eval": "the engine does it, and puts each flag back",
    "on_validation_model_train": "the engine does it, and puts each flag back",
    "on_before_batch_transfer": "the backend moves batches: change them in the data",
    "transfer_batch_to_device": "the backend moves batches",
    "configure_sharded_model": "the backend places the model; build layers in configure_model",
    "configure_callbacks": "the engine has observers: `Engine(observers=...)`",
    "backward": "the engine calls it on the loss; a step of your own needs manual optimization",
    "optimizer_step": "the update is the engine's; a step of your own needs manual optimization",
    "optimizer_zero_grad": "zeroing is the engine's; a step of your own needs manual optimization",
    "configure_gradient_clipping": "clip in manual optimization, by clip_gradients",
    "lr_scheduler_step": "the engine moves schedulers; in manual optimization, by lr_schedulers",
    "on_save_checkpoint": "the engine keeps no checkpoint of it",
    "on_load_checkpoint": "the engine keeps no checkpoint of it",
    "teardown": "nothing of a module is called once training is over",
}
"""Lightning's fit calls them, and the engine has no place for them: an error, unless waived."""

ELSEWHERE = dict.fromkeys(
    (
        *("test_step", "predict_step", "test_dataloader", "predict_dataloader"),
        *(f"on_{what}_{when}" for what in ("test", "predict") for when in ("start", "end")),
        *(f"on_{what}_epoch_{when}" for what in ("test", "predict") for when in ("start", "end")),
        *(f"on_{what}_batch_{when}" for what in ("test", "predict") for when in ("start", "end")),
        *("on_test_model_eval", "on_test_model_train", "on_predict_model_eval"),
    ),
    "no part of training, in Lightning neither",
)
"""Never called, and nothing to waive: `fit` calls none of them anywhere."""

_COLUMNS: dict[Column, tuple[dict[str, str], ...]] = {
    "used": (USED,),
    "emulated": (CALLED, GIVEN),
    "never called": (NO_PLACE, ELSEWHERE),
}
_BASES = (
    *("lightning.pytorch.core.", "lightning.fabric.", "pytorch_lightning.core.", "lightning_fabric."),
    *("torch.nn.modules.", "builtins"),
)
"""Where the classes are that define these names without anybody having overridden them."""


@dataclass(frozen=True)
class Row:
    """What becomes of one part of a module.

    Attributes:
        name: Of the method or attribute.
        column: "used", "emulated" or "never called".
        note: When, how, or why not.
    """

    name: str
    column: Column
    note: str


@dataclass(frozen=True)
class Table:
    """What becomes of each part of a module that was brought. As a string, aligned text.

    Attributes:
        module: The name of its class.
        rows: For what the module defines, and what its code mentions.
        waived: The names that were waived.
    """

    module: str
    rows: tuple[Row, ...]
    waived: tuple[str, ...] = ()

    def names(self, column: Column) -> tuple[str, ...]:
        """The names in one column.

        Args:
            column: "used", "emulated" or "never called".
        """
        return tuple(row.name for row in self.rows if row.column == column)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found: dict[str, Any] = {"module": self.module}
        for column in _COLUMNS:
            found[column] = {row.name: row.note for row in self.rows if row.column == column}
        return {**found, "waived": list(self.waived)}

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"brought: {self.module}"]
        for row in self.rows:
            note = f"waived: {row.note}" if row.name in self.waived else row.note
            lines.append(f"  {row.column:<12}  {row.name:<{width}}  {note}")
        return "\n".join(lines)


def columns_of(name: str) -> list[Column]:
    """The columns that a name stands in: one, for each name that Lightning calls or offers."""
    return [column for column, parts in _COLUMNS.items() for part in parts if name in part]


def table_of(module: Any, waive: Iterable[str]) -> Table:
    """The table of a module shaped like Lightning's.

    Args:
        module: Not called, only looked at.
        waive: Names that need not be called.

    Raises:
        TaskError: It overrides what would never be called and is not waived, or a waiver is for nothing.
    """
    waived = (waive,) if isinstance(waive, str) else tuple(waive)
    kind = type(module).__name__
    mentioned = _mentioned(module)
    rows = list(_rows(module, mentioned))
    found = {row.name for row in rows if row.column == "never called"}
    lost = [name for name in NO_PLACE if name in found and name not in waived]
    problems = [f"{name} would never be called: {NO_PLACE[name]}" for name in lost]
    problems += [f"'{name}' is waived and needs no waiver: drop it" for name in waived if name not in found]
    if problems:
        remedy = f". Move what they do, or pass `waive={lost!r}` if it may be left out" if lost else ""
        raise TaskError(
            f"{kind} cannot be brought as it is:\n" + "\n".join(f"  - {p}" for p in problems) + remedy
        )
    return Table(kind, tuple(rows), waived)


def _rows(module: Any, mentioned: frozenset[str]) -> Iterator[Row]:
    for column, parts in _COLUMNS.items():
        for part in parts:
            for name, note in part.items():
                manual = name == "automatic_optimization" and getattr(module, name, True) is False
                there = defines(module, name) if part is not GIVEN else name in mentioned
                if name == "automatic_optimization":
                    there = manual
                if there and not (part is GIVEN and defines(module, name)):
                    yield Row(name, column, note)


def defines(module: Any, name: str) -> bool:
    """Whether a module has something of this name that is its author's.

    Args:
        module: Anything.
        name: Of a method or an attribute.
    """
    if name in vars(module):
        return True
    owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), object)
    return not owner.__module__.startswith(_BASES)


def _mentioned(module: Any) -> frozenset[str]:
    """The names that the code of a module's own classes speaks of."""
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(_BASES)]
    codes = [
        code
        for kind in own
        for value in vars(kind).values()
        if isinstance(code := getattr(getattr(value, "fget", value), "__code__", None), CodeType)
    ]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(found)
