"""Notes the points that an undisturbed run passes, and where in the run each of them is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from interlock.specs import Entry, Kind, Lifecycle

from .sweep_device import Device
from .sweep_digests import Digests, built_of, trained_of
from .sweep_points import Point, Stage


class Watch:
    """Notes nothing; `Watching` does."""

    hook: Callable[[str, str, int], None] | None = None
    entered: Callable[[Entry], None] | None = None
    updated: Callable[[nn.Module, Optimizer], None] | None = None

    def on(self, adapter: Any) -> None:
        """Watch the calls of an adapter."""


class Recording(Watch):
    """Notes what each update of an undisturbed run leads to."""

    def __init__(self) -> None:
        self.updates: list[Digests] = []
        self.built: Digests = {}
        self.updated = self._update

    def _update(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.built = self.built or built_of(model)
        self.updates.append(trained_of(model, {"optimizer": optimizer}))


class Watching(Watch):
    """Notes each point that an undisturbed run passes, and where in the run that is.

    Args:
        layers: Of which.
        device: The seam to a simulated device.
        life: What the run goes by.
    """

    def __init__(self, layers: Sequence[str], device: Device, life: Lifecycle) -> None:
        self.points: list[Point] = []
        self._life = life
        self._layers = layers
        self._device = device
        self._stage: Stage = "in"
        self._bounded = False
        self._counts: dict[str, int] = {}
        self._nth: dict[str, int] = {}
        self.hook = partial(self._note, "hook")
        self.entered = self._entered

    def on(self, adapter: Any) -> None:
        """Note each call of an adapter that counts them."""
        note = partial(self._note, "backend")
        plain = adapter._strike

        def strike(call: str, moment: str, count: int) -> None:
            note(call, moment, count)
            plain(call, moment, count)

        adapter._strike = strike
        self._counts = dict(self._device.counts())

    def _note(self, layer: str, name: str, moment: str, nth: int) -> None:
        if layer in self._layers:
            self.points.append(Point(cast("Any", layer), name, moment, nth, self._stage, self._bounded))

    def _entered(self, entry: Entry) -> None:
        """A transition: what the device did since the last one belongs to the phase that it left."""
        self.operations()
        kind = self._life.spec.phase[entry.phase].kind
        if kind in (Kind.EXIT, Kind.TERMINAL):
            self._stage = "out"
        elif kind is Kind.WORK and self._stage == "in":
            self._stage = "during"
        # Where the engine gives a call up when its deadline passes, the spec has an edge for that.
        self._bounded = "abandon" in self._life.rules.get(entry.phase, {})

    def operations(self) -> None:
        """Note the device operations since they were last looked at."""
        if "device" not in self._layers:
            return
        counts = self._device.counts()
        for name, count in counts.items():
            for _ in range(count - self._counts.get(name, 0)):
                mine = self._nth[name] = self._nth.get(name, 0) + 1
                self._note("device", name, "during", mine)
            self._counts[name] = count
