"""Training inside of a program that goes on living: start it, look at it, wait for it, use the model.

python examples/embed.py
"""

import logging

import torch
import torch.nn.functional as F
from torch import nn

import interlock as il

log = logging.getLogger("service")


def build_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points, and whether they lie inside a circle."""
    points = [torch.rand(64, 2) * 2 - 1 for _ in range(count)]
    return [(p, (p.square().sum(1) < 0.6).long()) for p in points]


def accuracy(net, batch):
    return {"accuracy": (net(batch[0]).argmax(1) == batch[1]).float().mean()}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    task = il.Task(
        model=build_net,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        metrics=accuracy,
    )

    # Proves the order of the run for this backend, then trains in a thread of its own.
    run = il.Engine("auto").start(task, batches(100), validate=batches(10), epochs=3)
    run.subscribe(lambda event: log.info("%s", event))
    log.info("meanwhile the program goes on; the run is in phase '%s'", run.phase)

    outcome = run.wait(timeout=600)  # never raises the run's own error
    if outcome.ok:
        # On the host, and still in train mode: dropout and the like are to be off from here on.
        serve(outcome.model.eval())
    assert outcome.residue.bytes == 0  # nothing of the run is left on the device


def serve(model: nn.Module) -> None:
    with torch.no_grad():
        inside = model(torch.tensor([[0.1, -0.2]])).argmax(1).item()
    log.info("serving: the point (0.1, -0.2) lies %s the circle", "inside" if inside else "outside")


if __name__ == "__main__":
    main()
