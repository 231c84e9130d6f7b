"""A training script as it is found in the wild, in plain PyTorch, that leaves three things on the device.

    python examples/leaky/train.py [DEVICE]

Its test, test_train.py, is run by pytest with the plug-in of Interlock and names each one:

    pytest examples/leaky --interlock-leaks
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

MEANS = {}
"""Means of batches, so that they are computed once: a cache that nobody empties."""


def build(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)


def make_logger() -> Callable[[torch.Tensor], None]:
    losses = []

    def log(loss):
        losses.append(loss.detach())  # still on the device: `.item()` was meant

    return log


log = make_logger()


def batches(device, count=4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    for _ in range(count):
        points = torch.randn(32, 8, generator=made).to(device)
        labels = points[:, :3].argmax(1)
        yield points, labels


def train(device, steps=3, log=None):
    """Leaves nothing, unless `log` keeps what it gets."""
    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for points, labels in batches(device, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        if log is not None:
            log(loss)
    return {name: value.to("cpu") for name, value in model.state_dict().items()}


def mean_of(step, points):
    if step not in MEANS:
        MEANS[step] = points.mean(0)
    return MEANS[step]


def normalized(device):
    for step, (points, _) in enumerate(batches(device, 2)):
        yield (points - mean_of(step, points)).to("cpu")


def peek(device):
    """The first batch, and the stream for the others: it waits, and its batch with it."""
    stream = batches(device)
    return next(stream)[0].sum().item(), stream


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(f"trained: {len(train(chosen, log=log))} tensors")
    print(f"normalized: {len(list(normalized(chosen)))} batches")
    print(f"first batch: {peek(chosen)[0]:.3f}")
