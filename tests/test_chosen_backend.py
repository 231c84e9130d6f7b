"""Contract and invariant suites on the backend of `--interlock-backend=NAME`; on `double` without it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract
from interlock.specs import INFERENCE, TRAINING, Spec, compose
from interlock.specs.suite import covering_paths, machine_for


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


@pytest.mark.parametrize("spec", [TRAINING, INFERENCE], ids=lambda spec: spec.name)
def test_both_machines_take_every_transition_of_its_lifecycles(
    spec: Spec, interlock_backend: type[Adapter]
) -> None:
    composed = compose(spec, interlock_backend.monitor)
    taken = set()
    for case in covering_paths(composed):
        taken |= {(entry.source, entry.event) for entry in case.check(composed).history[1:]}
    assert taken == {(t.source, t.event) for t in composed.transitions}
