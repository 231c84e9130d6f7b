"""A backbone is thawed in mid-run: first a new head learns on frozen features, then all of it trains.

    interlock fit examples/thaw.py:task --checkpoints out/thaw
    interlock fit examples/thaw.py:task --checkpoints out/thaw --resume
    python examples/thaw.py

The backbone learns the digits 0 to 4 first, in a moment; the task is to tell 5 to 9 apart. What thaws when is
declared in the task, so it is part of each checkpoint: killed and resumed, the run ends with the same bits.
"""

import sys
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import interlock as il

# A net this small trains fastest on one core: threads would wait for each other most of the time.
torch.set_num_threads(1)


@cache
def images_of(first: int) -> TensorDataset:
    """Images of five digits from this one on, labelled from 0."""
    digits = load_digits()
    chosen = (digits.target >= first) & (digits.target < first + 5)
    images = torch.tensor(digits.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target[chosen] - first))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.late = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 4 * 4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.late(self.early(images)))


def loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def adam(net):
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 3e-3)


def pretrained() -> nn.Module:
    """A net that knows 0 to 4, with a new head; only that one trains."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
        first = il.Task(model=net, optimizer=adam, loss=loss, name="pretraining")
        il.Engine("cpu").fit(first, list(DataLoader(images_of(0), 32)))
        net.requires_grad_(False)
        net.head = nn.Linear(16 * 4 * 4, 5)
    return net


def thaw(layers, lr):
    """What an adoption does: these layers train from now on, in a group of their own."""

    def change(net, optimizer):
        part = getattr(net, layers).requires_grad_(True)
        optimizer.add_param_group({"params": list(part.parameters()), "lr": lr})

    return change


def data() -> il.Data:
    train, held_out = torch.utils.data.random_split(
        images_of(5), [0.8, 0.2], torch.Generator().manual_seed(0)
    )
    order = torch.Generator().manual_seed(0)
    return il.Data(
        train=DataLoader(train, 32, shuffle=True, generator=order), validate=DataLoader(held_out, 128)
    )


def accuracy(net, batch):
    return {"accuracy": (net(batch[0]).argmax(1) == batch[1]).float().mean()}


task = il.Task(
    name="thaw",
    model=pretrained,
    optimizer=adam,
    loss=loss,
    metrics=accuracy,
    adopt={2: thaw("late", 1e-3), 4: thaw("early", 3e-4)},
    data=data,
    epochs=6,
)


def main(folder: str | None = None) -> None:
    kept = None if folder is None else il.Checkpoints(Path(folder))
    outcome = il.Engine("auto").fit(task, checkpoints=kept, resume=kept is not None)
    groups = len(outcome.optimizer.param_groups)
    print(f"thawed in {groups - 1} steps: accuracy {outcome.metrics['val_accuracy']:.3f} on digits 5 to 9")


if __name__ == "__main__":
    main(*sys.argv[1:])
