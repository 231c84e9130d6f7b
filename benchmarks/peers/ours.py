"""The probe's job on Interlock."""

from __future__ import annotations

from typing import Any

import torch

import interlock as il

from .library import LOOP, ORDERS, Library, own_step
from .probe import Probe


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
        if probe.mistake in ORDERS:  # only a step that is written by hand can have the wrong order
            return il.Task(
                model=probe.build,
                optimizer=lambda m: _kept(probe, m),
                step=lambda s, b: own_step(probe, s.model, b, s.zero, s.backward, s.update),
                loss=probe.loss,
            )
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
