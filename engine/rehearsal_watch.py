"""What a rehearsal sees of the run that it watches: copies by place, memory at the peak by owner, parameters.

All of it by wrapping the task's functions and by the simulated device's own accounts: the run does what it
would do without.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.backends import simulator
from interlock.specs import Entry

from .batches import held
from .facts import check_finite
from .task import Task

_LIBRARY = ("contextlib", "copy", "functools", "threading", "typing")
"""Modules of Python's own that stand between a program and torch."""
_OURS = str(Path(__file__).parent)
_SIMULATOR = str(Path(simulator.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_PASSED_OVER = (str(Path(torch.__file__).parent), "<", *(f"{_STANDARD}/{part}" for part in _LIBRARY))
TRAINING = "training"
"""The phase in which steps are taken."""
ENGINE = "the engine"
ONCE = "the engine, once"
"""Its look at the first loss of a run, which no other step has."""
BACKWARD = "torch, on a thread of its own"
OWNERS = ("parameters", "buffers", "gradients", "optimizer state", "batch", "results")
"""Results are what the functions of the task return: the loss, metrics."""
REST = "activations and temporaries"


@dataclass(frozen=True)
class Transfer:
    """Copies between host and device that one place makes in training.

    Attributes:
        direction: `to_host` or `to_device`.
        place: `file:line in function`; or whose it is, if it is not the task's.
        count: How many there were.
        per_step: The same for each step.
    """

    direction: str
    place: str
    count: int
    per_step: float

    def __str__(self) -> str:
        return f"{self.per_step:g} a step {self.direction.replace('_', ' the ')}: {self.place}"


class Watch:
    """Watches one run of a task. Made for one, and read when it is over."""

    def __init__(self) -> None:
        self.training = False
        self.names: tuple[str, ...] = ()
        self.unused: set[str] | None = None
        self._without: set[str] = set()
        self._start: dict[str, torch.Tensor] = {}
        self._places: Counter[tuple[str, str]] = Counter()
        self._owned: dict[str, set[int]] = {owner: set() for owner in OWNERS}

    # What the simulated device tells of each passage.

    def append(self, passage: tuple[str, str]) -> None:
        """Take note of one passage, if it is a copy in training."""
        point, _ = passage
        if self.training and point in ("to_host", "to_device"):
            place = _place()
            if place != ONCE:
                self._places[point, place] += 1

    def follow(self, driver: Any) -> None:
        """Learn of each transition of a run's lifecycle, so that copies are those of training alone."""
        announce = driver._announce

        def both(entry: Entry) -> None:
            self.training = entry.phase == TRAINING
            announce(entry)

        driver._announce = both

    # The task, watched

    def task(self, task: Task) -> Task:
        """The task, with functions that tell this watch what they see."""
        changes: dict[str, Any] = {
            "model": fresh(task),
            "optimizer": self._optimizer(task.optimizer),
            "compile": False,
        }
        for part in ("loss", "step"):
            function = getattr(task, part)
            if function is not None:
                changes[part] = self._on_batch(function)
        if task.metrics is not None:
            changes["metrics"] = self._on_batch(task.metrics)
        return replace(task, **changes)

    def _optimizer(self, factory: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        def build(model: nn.Module) -> Any:
            built = factory(model)
            self._see_model(model)
            for optimizer in built.values() if hasattr(built, "values") else [built]:
                if isinstance(optimizer, Optimizer):
                    optimizer.register_step_pre_hook(lambda *_: self._before_update(model))
                    optimizer.register_step_post_hook(lambda one, *_: self._after_update(model, one))
            return built

        return build

    def _on_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, batch: Any) -> Any:
            self._own("batch", held(batch))
            result = function(first, batch)
            self._own("results", held(result))
            return result

        return call

    def _see_model(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.names = tuple(name for name, p in named.items() if p.requires_grad)
        self._start = {name: named[name].detach().cpu() for name in self.names}
        self._own("parameters", named.values())
        self._own("buffers", model.buffers())

    def _before_update(self, model: nn.Module) -> None:
        self._without = self._without_gradient(model)

    def _without_gradient(self, model: nn.Module) -> set[str]:
        named = list(model.named_parameters())
        self._own("gradients", (p.grad for _, p in named if p.grad is not None))
        return {name for name, p in named if p.requires_grad and p.grad is None}

    def _after_update(self, model: nn.Module, optimizer: Optimizer) -> None:
        # A closure, as that of LBFGS, makes them inside of the step only.
        without = self._without & self._without_gradient(model)
        self.unused = without if self.unused is None else self.unused & without
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        states = [tensor for state in optimizer.state.values() for tensor in held(state)]
        self._own("optimizer state", (tensor for tensor in states if id(tensor) not in mine))

    def _own(self, owner: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            block = simulator.block_of(tensor)
            if block is not None:
                self._owned[owner].add(block.sequence)

    # What came of it

    def transfers(self, steps: int) -> list[Transfer]:
        """The copies in training, those that are made most often first.

        Args:
            steps: That the run took.
        """
        steps = max(steps, 1)
        return [
            Transfer(direction, place, count, round(count / steps, 2))
            for (direction, place), count in self._places.most_common()
        ]

    def at_peak(self, blocks: Iterable[simulator.Block]) -> dict[str, int]:
        """Owner -> bytes, of the blocks that were alive at the peak."""
        found = dict.fromkeys((*OWNERS, REST), 0)
        for block in blocks:
            owners = (owner for owner in OWNERS if block.sequence in self._owned[owner])
            found[next(owners, REST)] += block.nbytes
        return {owner: nbytes for owner, nbytes in found.items() if nbytes}

    def untrained(self, model: nn.Module | None) -> list[str]:
        """The trainable parameters that had gradients, and are what they were before the first step."""
        if model is None:
            return []
        now = dict(model.named_parameters())
        still = [name for name in self.names if name in now and torch.equal(now[name], self._start[name])]
        return [name for name in still if name not in (self.unused or ())]


def fresh(task: Task) -> Callable[[], nn.Module]:
    """Builds the task's model anew for each run: one that was given is copied, and stays as it is."""
    source: Any = task.model
    return (lambda: copy.deepcopy(source)) if isinstance(source, nn.Module) else source


def mapped(task: Task) -> Task:
    """The task, with code that names CUDA itself carried out on the simulated device, on whichever thread."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with simulator.foreign("map"):
                return function(*args, **kwargs)

        return call

    changes: dict[str, Any] = {"model": around(fresh(task))}
    changes["adopt"] = {epoch: around(change) for epoch, change in task.adopt.items()}
    for part in ("optimizer", "loss", "metrics", "step", "scheduler", "output", "batch_size"):
        function = getattr(task, part)
        if function is not None:
            changes[part] = around(function)
    return replace(task, **changes)


def _place() -> str:
    """The innermost frame that is neither torch's nor Python's own."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and not file.startswith(_SIMULATOR):
            return ONCE if frame.f_code is check_finite.__code__ else ENGINE
        if not file.startswith((_OURS, *_PASSED_OVER)):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return BACKWARD
