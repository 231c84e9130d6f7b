"""Right programs: both checkers must find nothing in here. Never run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import interlock as il
from interlock.errors import PlacementError

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Linear):
    """A model of one's own, as a class that builds it."""

    def __init__(self) -> None:
        super().__init__(4, 2)


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    output: torch.Tensor = model(batch[0])
    return nn.functional.cross_entropy(output, batch[1])


def metrics(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor | float]:
    return {"zero": 0.0, "loss": loss(model, batch)}


def data() -> il.Data:
    return il.Data([(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))])


def stream() -> Iterator[Batch]:
    yield torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)


task = il.Task(model=Net, optimizer=optimizer, loss=loss)
whole = il.Task(
    model=Net(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
    loss=loss,
    metrics=metrics,
    scheduler=lambda made: StepLR(made, 1),
    scheduler_every="epoch",
    data=data,
    epochs=3,
    batch_size=lambda batch: len(batch[0]),
    name="whole",
)


def fit() -> float:
    outcome = il.Engine("cpu", exit="keep", nonfinite="ignore", report_every=5).fit(
        task, data().train, validate=data().train, epochs=2
    )
    model: nn.Module | None = outcome.model
    if outcome.ok and model is not None and outcome.status == "finished":
        assert outcome.residue.bytes == 0
        return outcome.metrics["loss"]
    return outcome.seconds


def start() -> il.Outcome | None:
    run = il.Engine().start(task, list(stream()))

    def observe(event: object) -> None:
        if isinstance(event, il.PhaseChanged):
            print(event.source, event.phase)

    subscription: il.Subscription = run.subscribe(observe)
    print(run.phase, run.step, run.snapshot().doing, [entry.event for entry in run.history])
    run.stop()
    try:
        return run.wait(timeout=10)
    except TimeoutError:
        run.cancel()
        return None if run.cancelled() else run.result()
    finally:
        subscription.close()


async def later() -> str:
    outcome = await il.Engine().start(task, list(stream()))
    await asyncio.sleep(0)
    return outcome.status


def by_hand() -> torch.Tensor:
    with il.Engine("auto").open(task) as created:
        placed = created.place()
        print(sum(p.numel() for p in placed.model.parameters()), placed.phase)
        ready = placed.optimize()
        training = ready.train()
        value = training.step(next(stream()))
        scores: dict[str, float] = training.validate(stream())
        outcome: il.Outcome = training.finish() if scores["loss"] < 1 else training.stop()
        print(outcome.path)
    if created.outcome is not None and isinstance(created.outcome.error, PlacementError):
        print(created.outcome.error.parameters)
    return value


def early_end() -> il.Outcome:
    return il.Engine().open(task).place().optimize().offload()
