"""Wrong parts: what a task, an engine or a run is given, and what is expected back."""

from __future__ import annotations

import torch
from torch import nn

import interlock as il

model = nn.Linear(2, 1)
built = torch.optim.SGD(model.parameters(), 0.1)


def no_loss(model: nn.Module, batch: torch.Tensor) -> str:
    return "large"


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


il.Task(model=model, optimizer=built)  # expect: error
il.Task(model=model, optimizer=adam, loss=no_loss)  # expect: error
il.Task(model="linear", optimizer=adam)  # expect: error
il.Task(model, adam)  # expect: error
il.Task(model=model)  # expect: error
il.Engine("cpu", exit="leave")  # expect: error
il.Engine("cpu", nonfinite="warn")  # expect: error
il.Engine("cpu", observers=print)  # expect: error

task = il.Task(model=model, optimizer=adam)
engine = il.Engine("cpu")
engine.fit(task, [model], epochs="three")  # expect: error
engine.fit(model, [model])  # expect: error
run = engine.start(task, [model])
run.start()  # expect: error
outcome = run.wait()
outcome.status = "finished"  # expect: error
nothing = il.NoSuchName  # expect: error
