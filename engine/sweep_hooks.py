"""The hooks of a task, wrapped so that each passage is counted and one of them can be struck.

What is wrapped: every function of the task, the model's forward pass, the optimizer's update, the moves of a
scheduler, and the iteration over the data. The wrapped task trains exactly as the task itself does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .batches import convert
from .task import Task

At = Callable[[str, str], None]

FUNCTIONS = ("loss", "metrics", "step", "output", "batch_size")
"""Functions of a task that are called while it trains, and need nothing beyond being wrapped."""


@dataclass
class HookStrike:
    """At which passage of which hook to raise.

    Attributes:
        name: Of the hook.
        moment: `before`, `during` or `after`.
        nth: Which passage, from 1.
        error: Makes the error.
        struck: How often it did.
    """

    name: str
    moment: str
    nth: int
    error: Callable[[], BaseException]
    struck: int = 0


class Passages:
    """Counts the passages of hooks.

    Args:
        strike: The one to strike; `None` to count only.
        note: Told of each passage: name, moment, number.
        updated: Given the model and the optimizer when that is built, and after each of its updates.
    """

    def __init__(
        self,
        strike: HookStrike | None = None,
        note: Callable[[str, str, int], None] | None = None,
        updated: Callable[[nn.Module, Optimizer], None] | None = None,
    ) -> None:
        self.strike = strike
        self.counts: Counter[tuple[str, str]] = Counter()
        self._note = note
        self._updated = updated
        self._handles: list[Any] = []

    def at(self, name: str, moment: str) -> None:
        """Pass a point; raises if it is the one that is struck."""
        self.counts[name, moment] += 1
        count = self.counts[name, moment]
        if self._note is not None:
            self._note(name, moment, count)
        strike = self.strike
        if strike is not None and (strike.name, strike.moment, strike.nth) == (name, moment, count):
            strike.struck += 1
            raise strike.error()

    def close(self) -> None:
        """Take off what was hung on models and optimizers."""
        while self._handles:
            self._handles.pop().remove()

    # -- what is wrapped ------------------------------------------------------------------------

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that passes a point before and after its work."""
        at = self.at

        def call(*args: Any, **kwargs: Any) -> Any:
            at(name, "before")
            result = function(*args, **kwargs)
            at(name, "after")
            return result

        # Its name and signature, not its attributes: a function may be an object that holds tensors.
        return functools.update_wrapper(call, function, updated=())

    def model(self, source: Callable[[], Any], forward: bool) -> Callable[[], Any]:
        """The model function; what it builds passes points in its forward pass, too, where that is wanted."""

        def build() -> Any:
            self.at("model", "before")
            model = source()
            if forward and isinstance(model, nn.Module):
                self._handles += [
                    model.register_forward_pre_hook(lambda *_: self.at("forward", "before")),
                    model.register_forward_hook(lambda *_: self.at("forward", "after")),
                ]
            self.at("model", "after")
            return model

        return build

    def optimizer(self, factory: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        """The optimizer function; what it builds passes points around each update."""

        def build(model: nn.Module) -> Any:
            self.at("optimizer", "before")
            built = factory(model)
            for one in _several(built):
                if isinstance(one, Optimizer) and hasattr(one, "state"):
                    self._handles += [
                        one.register_step_pre_hook(lambda *_: self.at("update", "before")),
                        one.register_step_post_hook(lambda *_: self.at("update", "after")),
                    ]
                    self._record(model, one)
            self.at("optimizer", "after")
            return built

        return build

    def _record(self, model: nn.Module, optimizer: Optimizer) -> None:
        record = self._updated
        if record is not None:
            record(model, optimizer)
            self._handles.append(optimizer.register_step_post_hook(lambda *_: record(model, optimizer)))

    def scheduler(self, factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The scheduler function; what it builds passes points around each move."""

        def build(optimizer: Any) -> Any:
            self.at("scheduler", "before")
            built = factory(optimizer)
            for one in _several(built):
                self._moves(one)
            self.at("scheduler", "after")
            return built

        return build

    def _moves(self, scheduler: Any) -> None:
        kind = type(scheduler)
        if not callable(getattr(kind, "step", None)):
            return
        # By its class: an attribute of its own would go into its state, and so into checkpoints.
        step = self.around("schedule", kind.step)
        try:
            scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
        except TypeError:  # its memory is laid out by hand: then its moves are no points of their own
            return


def _several(built: Any) -> list[Any]:
    if isinstance(built, Mapping):
        return list(built.values())
    return list(built) if isinstance(built, (list, tuple)) else [built]


class Batches:
    """Batches that exist before the run, in a copy of their own, passing points as they are gone through.

    Args:
        passages: Counts them.
        name: Of the hook: `data` or `validation`.
        batches: On the host.
    """

    def __init__(self, passages: Passages, name: str, batches: list[Any]) -> None:
        self._passages, self._name = passages, name
        # A task may change a batch in place, and the next run is to see what this one saw.
        self._batches = [convert(batch, torch.Tensor.clone) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._passages.at(self._name, "before")
        for batch in self._batches:
            self._passages.at(self._name, "during")
            yield batch
        self._passages.at(self._name, "after")


def wrapped(task: Task, passages: Passages, source: Callable[[], Any]) -> Task:
    """The task with points in every hook.

    Args:
        task: Any.
        passages: Counts them.
        source: Builds the model, in place of the task's own.
    """
    changes: dict[str, Any] = {
        # A compiled forward pass is traced, hooks and all: there its calls are no points of their own.
        "model": passages.model(source, forward=not task.compile),
        "optimizer": passages.optimizer(task.optimizer),
        "adopt": {epoch: passages.around("adopt", change) for epoch, change in task.adopt.items()},
    }
    if task.scheduler is not None:
        changes["scheduler"] = passages.scheduler(task.scheduler)
    for name in FUNCTIONS:
        function = getattr(task, name)
        if function is not None:
            changes[name] = passages.around(name, function)
    return replace(task, **changes)
