"""What is trained: three small models, and the loop that one would write by hand to train them.

The models are small on purpose: on a large one any engine's overhead disappears.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

REPORT_EVERY = 50
"""Steps between two readings of the loss, everywhere."""

CLOSE = 5e-5
"""How far apart rounding may take two trainings, as root mean square over all weights.

It is 4e-6 at most; a last step left out makes at least 2e-4. Not weight by weight: an attention's key bias
has a gradient of zero but for rounding, and Adam makes whole steps of that.
"""


class UnequalWeightsError(AssertionError):
    """Two variants of one benchmark did not train the same thing: their times say nothing."""


@dataclass(frozen=True)
class Workload:
    """Something to train.

    Attributes:
        name: Short.
        build: The model, with the same weights each time.
        samples: Inputs and targets of one batch.
        loss: Of model and batch.
        batch: Samples in a batch.
        steps: How many steps are timed, after the first 50: a multiple of `REPORT_EVERY`, so that a whole
            number of reports is among them.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: int
    steps: int

    def batches(self, steps: int, kind: str) -> Iterable[Any]:
        """So many batches, as a `list` or from a `loader`."""
        inputs, targets = self.samples(steps * self.batch)
        dataset = TensorDataset(inputs, targets)
        if kind == "loader":
            return DataLoader(dataset, batch_size=self.batch)
        return list(zip(inputs.split(self.batch), targets.split(self.batch), strict=True))


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a model."""


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same one everywhere, and in the same form: the fused one's last bits are other ones."""
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=False)


def wordless(model: nn.Module) -> torch.optim.Optimizer:
    """The same as people write it: not a word on its form, which is left to torch, or to the engine."""
    return torch.optim.AdamW(model.parameters(), 1e-3)


def by_hand(work: Workload, batches: Iterable[Any], make: MakeOptimizer = optimizer) -> nn.Module:
    """The hand-written loop, with the accounting that an engine does too.

    Detached losses are kept, and every 50 steps, and at the end, they are read, checked for NaN and
    averaged.

    Args:
        work: What is trained.
        batches: On what.
        make: The optimizer function.

    Returns:
        The trained model.
    """
    model = work.build()
    update = make(model)
    losses: list[torch.Tensor] = []
    for batch in batches:
        update.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        update.step()
        losses.append(loss.detach())
        if len(losses) == REPORT_EVERY:
            mean_of(losses)
            losses = []
    if losses:
        mean_of(losses)
    return model


def by_hand_logged(work: Workload, folder: Path, batches: Iterable[Any]) -> nn.Module:
    """The hand-written loop with what people add to it: a bar, and a log that a kill leaves readable.

    Bar and log hear of the loss when it is read, every 50 steps. The bar is redrawn as often as Interlock's.
    """
    from rich.console import Console
    from rich.progress import Progress

    model = work.build()
    update = optimizer(model)
    losses: list[torch.Tensor] = []
    step = 0
    bar = Progress(console=Console(stderr=True), refresh_per_second=2.5)
    with bar, (folder / "by-hand.jsonl").open("w") as log:
        task = bar.add_task("training", total=len(batches) if isinstance(batches, Sized) else None)
        for batch in batches:
            update.zero_grad()
            loss = work.loss(model, batch)
            loss.backward()
            update.step()
            step += 1
            losses.append(loss.detach())
            if len(losses) == REPORT_EVERY:
                _tell(mean_of(losses), step, bar, task, log)
                losses = []
        if losses:
            _tell(mean_of(losses), step, bar, task, log)
    return model


def _tell(loss: float, step: int, bar: Any, task: Any, log: TextIO) -> None:
    log.write(json.dumps({"step": step, "loss": loss, "seconds": time.monotonic()}) + "\n")
    log.flush()
    bar.update(task, completed=step, description=f"loss {loss:.3g}")


def mean_of(losses: Sequence[torch.Tensor]) -> float:
    """The mean of losses, of which none may be NaN or infinite."""
    values: list[float] = torch.stack(list(losses)).tolist()
    for value in values:
        if not math.isfinite(value):
            raise FloatingPointError(f"a loss is {value}")
    return sum(values) / len(values)


def require_equal_weights(name: str, model: nn.Module, reference: nn.Module, close: bool = False) -> None:
    """Hold trained weights against those of the hand-written loop, bit by bit.

    Args:
        name: Of the variant, for the message.
        model: What it trained.
        reference: What the hand-written loop trained.
        close: Up to rounding only (`CLOSE`), which is all that another form of an optimizer can promise.

    Raises:
        UnequalWeightsError: Naming the first parameter that differs.
    """
    mine, theirs = model.state_dict(), reference.state_dict()
    if mine.keys() != theirs.keys():
        raise UnequalWeightsError(f"{name}: other parameters than the hand-written loop's: {sorted(mine)}")
    if close:
        apart = torch.cat([(value - theirs[key]).flatten() for key, value in mine.items()])
        off = apart.square().mean().sqrt().item()
        if not off <= CLOSE:
            raise UnequalWeightsError(f"{name}: not what the hand-written loop made (off by {off:.3g})")
        return
    for key, value in mine.items():
        if not torch.equal(value, theirs[key]):
            off = (value - theirs[key]).abs().max().item()
            raise UnequalWeightsError(
                f"{name}: '{key}' is not what the hand-written loop made (off by {off:.3g})"
            )


def seed() -> None:
    """Seed the host's generator; `torch.manual_seed` also formats a stack trace for each absent device."""
    torch.default_generator.manual_seed(0)


def _cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _mlp() -> nn.Module:
    seed()
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed()
    return torch.randn(count, 64), torch.randint(0, 10, (count,))


def _cnn() -> nn.Module:
    seed()
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def _digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = torch.arange(count) % len(data.images)
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[rows], torch.tensor(data.target, dtype=torch.int64)[rows]


class Transformer(nn.Module):
    """Two layers of width 64 that predict the next of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return out.transpose(1, 2)


def _transformer() -> nn.Module:
    seed()
    return Transformer()


def _tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed()
    text = torch.randint(0, 64, (count, 17))
    return text[:, :-1], text[:, 1:]


WORKLOADS = {
    work.name: work
    for work in (
        Workload("tiny", _mlp, _points, _cross_entropy, batch=32, steps=300),
        Workload("digits", _cnn, _digits, _cross_entropy, batch=32, steps=100),
        Workload("transformer", _transformer, _tokens, _cross_entropy, batch=16, steps=50),
    )
}
"""tiny: an MLP 64-64-10; digits: a small convolutional network on scikit-learn's digits; transformer."""
