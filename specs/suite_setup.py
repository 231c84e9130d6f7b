"""What the runs of one machine have in common: the task, its data, what an undisturbed run makes of it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from interlock import Engine, Task
from interlock.backends.adapter import Adapter

from .model import Spec


@dataclass(frozen=True)
class Setup:
    """What all runs of one machine have in common.

    Attributes:
        make: Makes an adapter.
        task: What is trained.
        batches: On the host; those of a step are taken in turn.
        spec: The lifecycle of the backend.
        tolerance: By how much weights may differ from those of an undisturbed run.
        deadline: Seconds for each backend call on the way out.
        added: Events that the backend's monitor adds before the exit; most have none.
        weights: Steps (and what was on lease) -> the state of the model after an undisturbed run of so many.
    """

    make: Callable[[], Adapter]
    task: Task
    batches: Sequence[Any]
    spec: Spec
    tolerance: float = 0.0
    deadline: float = 30.0
    added: tuple[str, ...] = ()
    weights: dict[tuple[Any, ...], dict[str, torch.Tensor]] = field(default_factory=dict)

    def batch(self, step: int) -> Any:
        """What the step after so many others takes."""
        window, count = self.task.window, len(self.batches)
        taken = [self.batches[(step * window + i) % count] for i in range(window)]
        return taken if window > 1 else taken[0]

    def build(self) -> nn.Module:
        """A new model, always the same."""
        torch.manual_seed(0)
        source: Any = self.task.model
        made: nn.Module = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
        return made

    def expected(self, steps: int, **lease: Any) -> dict[str, torch.Tensor]:
        """The state of the model after an undisturbed run of so many steps, on an adapter of its own.

        Args:
            steps: How many.
            lease: What it has on lease of the process: another number of threads rounds otherwise.
        """
        key = steps, *lease.items()
        if key not in self.weights:
            state = torch.get_rng_state()
            try:
                with Engine(self.make(), deadline=self.deadline, **lease).open(
                    replace(self.task, model=self.build, compile=False)
                ) as created:
                    training = created.place().optimize().train()
                    for step in range(steps):
                        training.step(self.batch(step))
                    model = training.finish().model
            finally:
                torch.set_rng_state(state)
            self.weights[key] = {} if model is None else {k: v.clone() for k, v in _state(model).items()}
        return self.weights[key]


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter or buffer; what is tied once for each name."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module has: parameters, buffers, and those in plain attributes."""
    for prefix, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute != "_modules":
                for tensor in tensors_in(value):
                    yield f"{prefix}.{attribute}".strip("."), tensor


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors of a nesting of plain containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and type(value) in (list, tuple, set, dict):
        for one in value.values() if type(value) is dict else value:
            yield from tensors_in(one, depth - 1)


def empty(model: nn.Module, adapter: Adapter) -> None:
    """Let go of what a module has on the device: it is of no use afterwards."""
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            here = [tensor for tensor in tensors_in(value) if adapter.resident(tensor)]
            if attribute == "_modules" or not here:
                continue
            for tensor in here:
                # Where no tensor changes its kind in place, it goes with the module's.
                with suppress(RuntimeError):
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
            vars(module)[attribute] = {} if isinstance(value, dict) else None


def preamble(name: str, module: str, backend: object, task: object, data: object, tolerance: float) -> str:
    """The lines before `state = NAME()` that make a printed example run when it is pasted."""
    lines = ["from interlock.specs.suite import machine_for"]
    words = []
    for label, value in (("backend", backend), ("task", task), ("data", data)):
        if value is None:
            continue
        if isinstance(value, str):
            words.append(repr(value))
            continue
        found = _found(value, module)
        if found is None:
            lines.append(f"# {label} = the one that machine_for was given in {module}")
            words.append(f"{label}={label}")
        else:
            lines.append(f"from {found[0]} import {found[1]}")
            words.append(f"{label}={found[1]}")
    if tolerance:
        words.append(f"tolerance={tolerance!r}")
    return "\n".join([*lines, f"{name} = machine_for({', '.join(words)})"])


def _found(value: object, module: str) -> tuple[str, str] | None:
    """The module, and the name in it, by which a value can be imported."""
    own = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    for place in (module, own[0]):
        for name, one in vars(sys.modules.get(place, object)).items():
            if one is value and name.isidentifier():
                return place, name
    return None


# The built-in task


class _Net(nn.Module):
    """Two layers with one weight, a buffer that counts, and tensors that are neither."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        self.scale = torch.full((), 0.5)
        self.outputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Also counts the rows that it has seen, and remembers what it made of the last ones."""
        if self.training:
            self.seen += len(x)
        y: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        self.outputs[:] = [y.detach()]
        return y


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = (model(batch) - 1.0).square().mean()
    return value


def built_in() -> Task:
    """The task that is trained where none is given."""
    return Task(
        model=_Net,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.05),
        loss=_loss,
        name="the built-in task",
    )


def built_in_batches() -> list[torch.Tensor]:
    """Its data."""
    return [torch.linspace(-1.0, 1.0, 12).view(4, 3) * scale for scale in (1.0, 0.5, 2.0)]
