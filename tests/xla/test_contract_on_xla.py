"""The contract of adapters, random runs and the fault sweep on a real XLA device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tools.small import batches, task

import interlock as il
from interlock import Outcome
from interlock.backends import xla_calls
from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract, require
from interlock.backends.xla import XlaAdapter
from interlock.specs.suite import machine_for
from interlock.sweep import sweep


class TestXla(AdapterContract):
    """With one promise more: torch_xla counts as many tensors after a run as before it."""

    def make_adapter(self) -> Adapter:
        return XlaAdapter()

    def initialised(self) -> object:
        return xla_calls.initialised()

    def run(self, adapter: Adapter, model: Any = None, **settings: Any) -> Outcome:
        calls = xla_calls.Calls(spmd=False)
        calls.begin()
        before = calls.counted().live
        outcome = super().run(adapter, model, **settings)
        if settings.get("exit") != "keep" and not outcome.abandoned:
            left = calls.counted().live - before
            require(not left, f"{left} tensors are on the device after a run that ended {outcome.status}")
        return outcome


def test_random_runs_keep_every_promise() -> None:
    few = settings(
        max_examples=40,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine_for(XlaAdapter, tolerance=1e-6), settings=few)


@pytest.mark.timeout(400)  # after each of some hundred runs every object of the process is looked at
def test_a_fault_at_each_point_ends_clean() -> None:
    what = task(data=lambda: il.Data(batches(2), batches(1)))
    report = sweep(what, backend=XlaAdapter, quick=True, progress=False, layers=("hook", "backend"))
    assert report.ok, str(report)
    assert {"cut", "move", "fetch", "sync"} <= {
        verdict.cell.partition("[")[0].removeprefix("backend.") for verdict in report.verdicts
    }
