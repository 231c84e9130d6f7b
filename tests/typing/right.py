"""Right programs: both type checkers accept every line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

import interlock as il


def build() -> nn.Module:
    return nn.Linear(2, 1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def metrics(model: nn.Module, batch: torch.Tensor) -> Mapping[str, float]:
    return {"one": 1.0}


task = il.Task(model=build, optimizer=adam, loss=loss, metrics=metrics)
given = il.Task(model=nn.Linear(2, 1), optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
engine = il.Engine("cpu", exit="keep", report_every=10)
batches = [(torch.ones(2, 2), torch.ones(2, 1))]

outcome: il.Outcome = engine.fit(task, batches, epochs=2)
spent: dict[str, float] = outcome.phase_seconds
bytes_left: int | None = outcome.residue.bytes

run: il.Run = engine.start(task, batches, validate=batches)
run.subscribe(print)
finished: il.Outcome = run.wait(timeout=1.0)
error: BaseException | None = run.exception()

with engine.open(task) as created:
    placed = created.place()
    ready = placed.optimize()
    training = ready.train()
    for batch in batches:
        value: torch.Tensor = training.step(batch)
    scores: dict[str, float] = training.validate(batches)
    end: il.Outcome = training.finish()

with engine.open(task) as early:
    nothing: il.Outcome = early.place().offload()
