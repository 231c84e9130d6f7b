"""Wrong orders: phases whose methods do not exist yet, or do not exist any more."""

from __future__ import annotations

import torch
from torch import nn

import interlock as il

task = il.Task(model=nn.Linear(2, 1), optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
engine = il.Engine("cpu")
batch = torch.ones(2, 2)

with engine.open(task) as created:
    created.optimize()  # expect: error
    created.train()  # expect: error
    created.step(batch)  # expect: error
    created.finish()  # expect: error
    placed = created.place()
    placed.place()  # expect: error
    placed.train()  # expect: error
    placed.step(batch)  # expect: error
    ready = placed.optimize()
    ready.optimize()  # expect: error
    ready.place()  # expect: error
    ready.step(batch)  # expect: error
    training = ready.train()
    training.train()  # expect: error
    training.optimize()  # expect: error
    training.place()  # expect: error
    outcome = training.finish()
    outcome.step(batch)  # expect: error
    outcome.train()  # expect: error

engine.open(task).place().optimize().step(batch)  # expect: error
engine.open(task).place().train()  # expect: error
