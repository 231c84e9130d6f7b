"""How each library trains, as its own documentation shows it, with the same accounting.

Each function takes a workload and its batches and returns the trained model. Detached losses are kept, and
every 50 steps they are read, checked and averaged; with Lightning's defaults `self.log` stands for that.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.steps import BASE, LOGGED, Train, variants
from bench.workloads import REPORT_EVERY, Workload, mean_of, optimizer
from torch import nn

from .trainers import BARE


def trains(work: Workload, folder: Path) -> dict[str, Train]:
    """Name -> how it trains; the hand-written loop comes first, Interlock last."""
    ours = variants(work, folder)
    quieten()
    peers: dict[str, Callable[[Workload, Iterable[Any]], nn.Module]] = {
        "Ignite": ignite,
        "Fabric": fabric,
        "Accelerate": accelerate,
        "Lightning, everything off": lightning_off,
        "Lightning, defaults": lightning_defaults,
        "transformers' Trainer, everything off": transformers_off,
    }
    by_hand = ours.pop(BASE)
    ours.pop(LOGGED)  # the others do no such accounting here
    theirs = {name: functools.partial(train, work) for name, train in peers.items()}
    return {BASE: by_hand, **theirs, **ours}


def quieten() -> None:
    """No warnings and no log lines: printing is not what is measured. Progress bars stay."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "ignite", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Losses:
    """The accounting: what the hand-written loop does with its losses."""

    def __init__(self) -> None:
        self.waiting: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Keep one; read them when there are enough."""
        self.waiting.append(loss.detach())
        if len(self.waiting) == REPORT_EVERY:
            self.read()

    def read(self) -> None:
        """Read what waits."""
        if self.waiting:
            mean_of(self.waiting)
            self.waiting = []


class Batches:
    """A list of batches as a loader."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def ignite(work: Workload, batches: Iterable[Any]) -> nn.Module:
    """An `Engine` over a step function of one's own: the leanest way."""
    from ignite.engine import Engine, Events

    model = work.build()
    update = optimizer(model)
    losses = Losses()

    def step(_: Engine, batch: Any) -> torch.Tensor:
        update.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        update.step()
        losses.waiting.append(loss.detach())
        return losses.waiting[-1]

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=REPORT_EVERY), losses.read)
    trainer.add_event_handler(Events.COMPLETED, losses.read)
    trainer.run(batches, max_epochs=1)
    return model


def fabric(work: Workload, batches: Iterable[Any]) -> nn.Module:
    """A loop of one's own around `setup` and `backward`."""
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = work.build()
    model, update = fabric.setup(model, optimizer(model))
    if isinstance(batches, DataLoader):  # a list cannot be set up, and need not be on the CPU
        batches = fabric.setup_dataloaders(batches)
    losses = Losses()
    for batch in batches:
        update.zero_grad()
        loss = work.loss(model, batch)
        fabric.backward(loss)
        update.step()
        losses.add(loss)
    losses.read()
    return model.module


def accelerate(work: Workload, batches: Iterable[Any]) -> nn.Module:
    """A loop of one's own around `prepare` and `backward`."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = work.build()
    model, update = accelerator.prepare(model, optimizer(model))
    if isinstance(batches, DataLoader):  # a list cannot be prepared, and need not be on the CPU
        batches = accelerator.prepare(batches)
    losses = Losses()
    for batch in batches:
        update.zero_grad()
        loss = work.loss(model, batch)
        accelerator.backward(loss)
        update.step()
        losses.add(loss)
    losses.read()
    return accelerator.unwrap_model(model)


def lightning_off(work: Workload, batches: Iterable[Any]) -> nn.Module:
    """A `Trainer` without logger, checkpoints, progress bar and summary."""
    return _lightning(
        work,
        batches,
        False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning_defaults(work: Workload, batches: Iterable[Any]) -> nn.Module:
    """A `Trainer` as it comes, and `self.log`."""
    return _lightning(work, batches, True)


def _lightning(work: Workload, batches: Iterable[Any], log: bool, **settings: Any) -> nn.Module:
    from lightning.pytorch import Trainer

    module = _lightning_module()(work, log)
    # A list would be taken for a collection of loaders.
    data = Batches(batches) if isinstance(batches, list) else batches
    Trainer(max_epochs=1, accelerator="cpu", devices=1, **settings).fit(module, data)
    module.losses.read()
    return module.model


@functools.cache
def _lightning_module() -> Any:
    """The class, made when Lightning is first needed."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        """The workload as a LightningModule."""

        def __init__(self, work: Workload, log: bool) -> None:
            super().__init__()
            self.work, self.logs = work, log
            self.model = work.build()
            self.losses = Losses()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = self.work.loss(self.model, batch)
            if self.logs:
                self.log("loss", loss)
            else:
                self.losses.add(loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.model)

    return Module


def transformers_off(work: Workload, batches: Iterable[Any]) -> nn.Module:
    """A `transformers.Trainer` without logs, checkpoints, progress bar, clipping and reports."""
    from transformers import PrinterCallback, TrainingArguments

    trainer = _trainer()(work, batches, args=TrainingArguments(**BARE))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.losses.read()
    return trainer.model


@functools.cache
def _trainer() -> Any:
    """The class, made when transformers is first needed."""
    from torch.utils.data import DataLoader
    from transformers import Trainer

    class Working(Trainer):
        """Data, loss and optimizer are the workload's: the methods that one overrides for that."""

        def __init__(self, work: Workload, batches: Iterable[Any], **settings: Any) -> None:
            self.work, self.batches = work, batches
            self.losses = Losses()
            super().__init__(model=work.build(), **settings)

        def get_train_dataloader(self) -> Any:
            if isinstance(self.batches, DataLoader):
                return self.accelerator.prepare(self.batches)
            return self.batches

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            loss = self.work.loss(model, inputs)
            self.losses.add(loss)
            return loss

        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                self.optimizer = optimizer(self.model)
            return self.optimizer

    return Working
