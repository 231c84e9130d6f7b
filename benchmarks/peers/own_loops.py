"""The probe's job where the user writes the loop, or at least the step: by hand, Fabric, Accelerate, Ignite.

With a loop of one's own, the user keeps model and optimizer in variables of it; with Ignite's engine the step
function does.
"""

from __future__ import annotations

from typing import Any

import torch

from .library import LOOP, Library, own_step
from .probe import Probe


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
            own_step(probe, model, batch, optimizer.zero_grad, torch.Tensor.backward, optimizer.step)
        with torch.no_grad():
            for batch in probe.data("validation"):
                probe.loss(model, batch)


class Fabric(Library):
    """A loop of one's own around `setup` and `backward`."""

    name = "Fabric"

    def handle(self, probe: Probe) -> Any:
        """The fabric."""
        from lightning.fabric import Fabric

        return Fabric(accelerator="cpu", devices=1)

    def run(self, handle: Any, probe: Probe) -> None:
        """Train, then validate."""
        handle.launch()
        model = probe.build()
        probe.keep(model)
        model, optimizer = handle.setup(model, probe.optimizer(model))
        for batch in probe.data():
            own_step(probe, model, batch, optimizer.zero_grad, handle.backward, optimizer.step)
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
            own_step(probe, model, batch, optimizer.zero_grad, handle.backward, optimizer.step)
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
            zero, update = optimizer.zero_grad, optimizer.step
            return own_step(probe, model, batch, zero, torch.Tensor.backward, update).item()

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
