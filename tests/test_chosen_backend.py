"""Contract and invariant suites on the backend of `--interlock-backend=NAME`; on `double` without it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract
from interlock.specs.suite import machine_for


class TestChosen(AdapterContract):
    @pytest.fixture(autouse=True)
    def _chosen(self, interlock_backend: type[Adapter]) -> None:
        self.kind = interlock_backend

    def make_adapter(self) -> Adapter:
        return self.kind()


def test_random_runs_keep_every_promise(interlock_backend: type[Adapter]) -> None:
    few = settings(
        max_examples=10,
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine_for(interlock_backend), settings=few)
