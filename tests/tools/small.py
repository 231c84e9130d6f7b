"""Small models, data and tasks for tests of the engine, and a run of them to the end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

import interlock as il
from interlock.backends.double import ReplacingDouble

BACKENDS = ("cpu", "double")
WITH_KEEPING = (*BACKENDS, "keeping")
"""The third is the double, placing as CUDA does: with new memory under the same Parameters."""

T = TypeVar("T")
Batch = tuple[torch.Tensor, torch.Tensor]


class Keeping(ReplacingDouble):
    """A double on which placement keeps the Parameters, and makes new buffers, as on CUDA."""

    name: ClassVar[str] = "keeping"

    def _place(self, model: nn.Module) -> None:
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = self.move(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.move(buffer)


def engine(backend: str, **settings: Any) -> il.Engine:
    """An engine for a backend of `WITH_KEEPING`."""
    return il.Engine(Keeping() if backend == "keeping" else backend, **settings)


class Net(nn.Module):
    """Two layers with a buffer; parameters `body.weight`, `body.bias`, `head.weight`, `head.bias`."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")


def seeded(build: Callable[[], T], seed: int = 0) -> T:
    """What `build` makes from a generator that starts at `seed`; the process's own is left as it was."""
    # Two at a time, in runs of two threads, would put back each other's state.
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


_seeding = threading.RLock()


def net(seed: int = 0) -> Net:
    """A `Net`, the same for the same seed."""
    return seeded(Net, seed)


def batches(count: int = 6, size: int = 5, seed: int = 1) -> list[Batch]:
    """Random inputs and classes, the same for the same seed."""
    return seeded(lambda: [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for _ in range(count)], seed)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer function."""
    return torch.optim.SGD(model.parameters(), 0.1)


def task(**changes: Any) -> il.Task:
    """A task that trains a `Net`, with some of its parts exchanged."""
    return il.Task(**{"model": net, "optimizer": sgd, "loss": loss_of, **changes})


def run(
    backend: str, what: il.Task, data: Iterable[Any] | None = None, *, epochs: int = 1, **settings: Any
) -> il.Outcome:
    """The outcome of a run to its end; data and validation as for `Engine.start`."""
    validate = settings.pop("validate", None)
    started = engine(backend, **settings).start(
        what, batches() if data is None else data, validate=validate, epochs=epochs
    )
    return started.wait(60)


def left_clean(outcome: il.Outcome) -> None:
    """Asserts that a run is over and that nothing of it is left."""
    assert outcome.history[-1].phase == "closed"
    assert outcome.verdict == "clean"
    assert outcome.residue.known
    assert outcome.residue.bytes == 0, str(outcome.residue)


def failed(outcome: il.Outcome, kind: type[BaseException], phase: str = "") -> Any:
    """The error of a run that failed with exactly this kind (in this phase), and left nothing."""
    left_clean(outcome)
    assert type(outcome.error) is kind, outcome.failure and outcome.failure.traceback
    assert outcome.status == "failed"
    assert outcome.errors == ()
    if phase:
        assert outcome.failure is not None
        assert outcome.failure.phase == phase
    return outcome.error


def finished(outcome: il.Outcome) -> Any:
    """The model of a run that finished, and left nothing."""
    left_clean(outcome)
    assert outcome.status == "finished", outcome.failure and outcome.failure.traceback
    return outcome.model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the state of a model."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    """Whether two nestings are equal to the bit, containers by type, tensors by dtype and value."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)
