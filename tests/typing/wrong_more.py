"""Wrong programs: both checkers must reject each marked line, and no other. Never run."""

from __future__ import annotations

import torch
from torch import nn

import interlock as il

Batch = tuple[torch.Tensor, torch.Tensor]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    output: torch.Tensor = model(batch[0])
    return output.sum()


def number(model: nn.Module, batch: Batch) -> float:
    return float(loss(model, batch))


batch = (torch.zeros(1, 4), torch.zeros(1))
model = nn.Linear(4, 2)
task = il.Task(model=model, optimizer=optimizer, loss=loss)
engine = il.Engine("cpu")

# The order of a run

with engine.open(task) as created:
    created.optimize()  # expect: error
    created.train()  # expect: error
    created.step(batch)  # expect: error
    print(created.model)  # expect: error
    placed = created.place()
    placed.place()  # expect: error
    placed.train()  # expect: error
    placed.step(batch)  # expect: error
    placed.finish()  # expect: error
    ready = placed.optimize()
    ready.optimize()  # expect: error
    ready.step(batch)  # expect: error
    ready.validate([batch])  # expect: error
    print(ready.model)  # expect: error
    training = ready.train()
    training.train()  # expect: error
    training.place()  # expect: error
    training.offload()  # expect: error
    training.step()  # expect: error
    training.validate()  # expect: error
    print(training.validate([batch])["loss"].mean())  # expect: error
    training.finish().step(batch)  # expect: error
    training.finish().finish()  # expect: error

engine.open(task).place().optimize().train().place()  # expect: error
engine.place()  # expect: error

# The task

il.Task(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=loss)  # expect: error
il.Task(model=model, optimizer=lambda m: [optimizer(m)], loss=loss)  # expect: error
il.Task(model=model, optimizer=lambda m: None, loss=loss)  # expect: error
il.Task(model=3, optimizer=optimizer, loss=loss)  # expect: error
il.Task(model=model, loss=loss)  # expect: error
il.Task(model=model, optimizer=optimizer, loss=number)  # expect: error
il.Task(model=model, optimizer=optimizer, loss=lambda m: m(batch))  # expect: error
il.Task(model, optimizer, loss)  # expect: error
il.Task(model=model, optimizer=optimizer, metrics=loss)  # expect: error
il.Task(model=model, optimizer=optimizer, scheduler_every="batch")  # expect: error
il.Task(model=model, optimizer=optimizer, scheduler=optimizer)  # expect: error
il.Task(model=model, optimizer=optimizer, epochs="3")  # expect: error
il.Task(model=model, optimizer=optimizer, losses=loss)  # expect: error
task.epochs = 3  # expect: error

# The engine, the run and its outcome

il.Engine("cpu", exit="throw")  # expect: error
il.Engine("cpu", nonfinite="maybe")  # expect: error
il.Engine("cpu", debug=True)  # expect: error
il.Engine("cpu", report_every="often")  # expect: error
il.Engine("cpu", "keep")  # expect: error
engine.fit(model, [batch])  # expect: error
engine.fit(task, 3)  # expect: error
engine.fit(task, [batch], epochs=1.5)  # expect: error
engine.fit(task, [batch]).wait()  # expect: error
run = engine.start(task, [batch])
print(run.model)  # expect: error
run.phase = "closed"  # expect: error
run.wait("long")  # expect: error
run.subscribe(lambda: None)  # expect: error
outcome = run.result()
outcome.status = "finished"  # expect: error
outcome.model.eval()  # expect: error
print(outcome.failure.traceback)  # expect: error
il.Created()  # expect: error
il.Enigne("cpu")  # expect: error


class MyTraining(il.Training):  # expect: error
    """Handles are final."""
