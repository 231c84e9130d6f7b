"""The main example: a small convolutional network learns handwritten digits, in seconds, on a CPU.

    interlock fit examples/digits.py:task --journal out/digits.jsonl --drawing out/digits.svg
    python examples/digits.py

The images are the 1,797 that ship inside scikit-learn; a fifth of them is held out.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import interlock as il

# A net this small trains fastest on one core: threads would wait for each other most of the time.
torch.set_num_threads(1)


def build_net() -> nn.Module:
    # The same start in every run, and the program's own random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )


def load_data() -> il.Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    order = torch.Generator().manual_seed(0)
    return il.Data(
        train=DataLoader(TensorDataset(images[train], labels[train]), 32, shuffle=True, generator=order),
        validate=DataLoader(TensorDataset(images[held_out], labels[held_out]), 128),
    )


def accuracy(net, batch):
    images, labels = batch
    return {"accuracy": (net(images).argmax(1) == labels).float().mean()}


task = il.Task(
    name="digits",
    model=build_net,
    optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3),
    loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
    metrics=accuracy,
    data=load_data,
    epochs=15,
)


if __name__ == "__main__":
    outcome = il.Engine(progress=True).fit(task)
    print(f"accuracy {outcome.metrics['val_accuracy']:.4f} on the held-out fifth; residue {outcome.residue}")
