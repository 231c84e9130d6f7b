"""The contract of adapters, on the simulated device in both of its ways to place."""

from __future__ import annotations

from interlock.backends import simulator
from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract
from interlock.backends.sim import SimAdapter


class TestReplacing(AdapterContract):
    """As on XLA."""

    tolerance = 0.0

    def make_adapter(self) -> Adapter:
        return SimAdapter("replaced")

    def initialised(self) -> object:
        return simulator.installed(), simulator.counts()


class TestKeeping(AdapterContract):
    """As on CUDA."""

    tolerance = 0.0

    def make_adapter(self) -> Adapter:
        return SimAdapter("kept")

    def initialised(self) -> object:
        return simulator.installed(), simulator.counts()
