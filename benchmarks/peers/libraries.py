"""The probe's job in each library, written as that library's documentation writes it.

A library has a *handle* - what its user keeps between runs: the engine, the trainer, the accelerator - and
`run` carries the job out on it. Only what the documentation has the user keep in a variable is kept in
one: with a loop of one's own that is model and optimizer, with an engine nothing.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

import interlock as il

from .probe import Probe

LOOP = ("data", "forward", "backward", "update", "validation")


class Library(ABC):
    """One library.

    Attributes:
        name: For people.
        places: Where user code that it calls can fail.
    """

    name: ClassVar[str]
    places: ClassVar[tuple[str, ...]] = LOOP

    @abstractmethod
    def handle(self, probe: Probe) -> Any:
        """What the user keeps."""

    @abstractmethod
    def run(self, handle: Any, probe: Probe) -> None:
        """Train for an epoch, then validate."""


class ByHand(Library):
    """The loop without any library; its handle is nothing."""

    name = "by hand"

    def handle(self, probe: Probe) -> Any:
        """Nothing."""
        return None

    def run(self, handle: Any, probe: Probe) -> None:
        """Train, then validate."""
        model = probe.build()
        optimizer = probe.optimizer(model)
        model.to("cpu")
        probe.keep(model)
        for batch in probe.data():
            optimizer.zero_grad()
            loss = probe.loss(model, batch)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for batch in probe.data("validation"):
                probe.loss(model, batch)


class Accelerate(Library):
    """A loop of one's own around `prepare` and `backward`."""

    name = "Accelerate"

    def handle(self, probe: Probe) -> Any:
        """The accelerator."""
        from accelerate import Accelerator

        return Accelerator(cpu=True)

    def run(self, handle: Any, probe: Probe) -> None:
        """Train, then validate."""
        model = probe.build()
        model, optimizer = handle.prepare(model, probe.optimizer(model))
        probe.keep(model)
        for batch in probe.data():
            optimizer.zero_grad()
            loss = probe.loss(model, batch)
            handle.backward(loss)
            optimizer.step()
        with torch.no_grad():
            for batch in probe.data("validation"):
                probe.loss(model, batch)


class AccelerateFreed(Accelerate):
    """The same, and `free_memory` in a `finally`."""

    name = "Accelerate, free_memory in a finally"

    def run(self, handle: Any, probe: Probe) -> None:
        """Train, then validate, then free."""
        try:
            super().run(handle, probe)
        finally:
            handle.free_memory()


class Ignite(Library):
    """An engine over a step function; the function holds model and optimizer, and the engine the function."""

    name = "Ignite"
    places = (*LOOP, "callback")

    def handle(self, probe: Probe) -> Any:
        """The engine."""
        from ignite.engine import Engine, Events

        model = probe.build()
        optimizer = probe.optimizer(model)
        model.to("cpu")
        probe.keep(model)

        def step(_: Any, batch: Any) -> float:
            optimizer.zero_grad()
            loss = probe.loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss.item()

        def check(_: Any, batch: Any) -> float:
            with torch.no_grad():
                return probe.loss(model, batch).item()

        trainer, evaluator = Engine(step), Engine(check)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: probe.strike("callback"))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(probe.data("validation")))
        return trainer

    def run(self, handle: Any, probe: Probe) -> None:
        """Train; a handler validates."""
        handle.run(probe.data(), max_epochs=1)


class Lightning(Library):
    """A trainer with everything off that writes or draws."""

    name = "Lightning"
    places = (*LOOP, "callback", "optimizer")

    def handle(self, probe: Probe) -> Any:
        """The trainer."""
        from lightning.pytorch import Callback, Trainer

        class Strike(Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                probe.strike("callback")

        return Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[Strike()],
        )

    def run(self, handle: Any, probe: Probe) -> None:
        """Train and validate."""
        handle.fit(_lightning_module()(probe), probe.data(), probe.data("validation"))


@functools.cache
def _lightning_module() -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        """The job as a LightningModule."""

        def __init__(self, probe: Probe) -> None:
            super().__init__()
            self.probe = probe
            self.model = probe.build()
            if probe.mistake == "early":
                self.built = probe.optimizer(self.model)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.probe.keep(self.model)
            return self.probe.loss(self.model, batch)

        def validation_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.probe.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return self.built if self.probe.mistake == "early" else self.probe.optimizer(self.model)

    return Module


class Interlock(Library):
    """`Engine.fit`: the handle is the engine."""

    name = "Interlock, fit"
    places = (*LOOP, "optimizer")

    def handle(self, probe: Probe) -> Any:
        """The engine. On the double, placement replaces every Parameter."""
        return il.Engine("double" if probe.mistake == "early" else "cpu")

    def run(self, handle: Any, probe: Probe) -> None:
        """Train and validate."""
        handle.fit(self._task(probe), probe.data(), validate=probe.data("validation"))

    def _task(self, probe: Probe) -> il.Task:
        if probe.mistake != "early":
            return il.Task(model=probe.build, optimizer=lambda m: _kept(probe, m), loss=probe.loss)
        model = probe.build()
        built = probe.optimizer(model)
        return il.Task(model=model, optimizer=lambda _: built, loss=probe.loss)


def _kept(probe: Probe, model: torch.nn.Module) -> torch.optim.Optimizer:
    probe.keep(model)
    return probe.optimizer(model)


class InterlockRun(Interlock):
    """`Engine.start`: the handle is the run, whose outcome offers the model to the caller."""

    name = "Interlock, start"

    def handle(self, probe: Probe) -> Any:
        """The engine and the runs that were started on it, all of them kept."""
        return super().handle(probe), []

    def run(self, handle: Any, probe: Probe) -> None:
        """Train and validate."""
        engine, runs = handle
        runs.append(engine.start(self._task(probe), probe.data(), validate=probe.data("validation")))
        runs[-1].result()


LIBRARIES: dict[str, type[Library]] = {
    library.name: library
    for library in (ByHand, Ignite, Accelerate, AccelerateFreed, Lightning, Interlock, InterlockRun)
}
