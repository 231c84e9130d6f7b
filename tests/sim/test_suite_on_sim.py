"""The invariant suites on the simulated device: random runs in both of its ways to place, a lifecycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis.stateful import run_state_machine_as_test

from interlock.backends.sim import SimAdapter
from interlock.specs import INFERENCE, compose
from interlock.specs.errors import BrokenPromise
from interlock.specs.suite import SpecSuite, machine_for

FEW = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Part.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each new thread would else start OpenMP's pool anew, which takes ten times as long as the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def lost_runs_let_go() -> Iterator[None]:
    """What stood on a device that was lost goes with its run, and a run under test is in a cycle."""
    yield
    gc.collect()


@pytest.mark.parametrize("placing", ["replaced", "kept"])
def test_random_runs_keep_every_promise(placing: str) -> None:
    run_state_machine_as_test(machine_for(partial(SimAdapter, placing)), settings=FEW)


class Sticky(SimAdapter):
    """Keeps the last tensor that it has moved, also when it is freed."""

    kept: ClassVar[list[torch.Tensor]] = []

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept[:] = [super()._move(tensor)]
        return self.kept[0]


class Halving(SimAdapter):
    """What it fetches has gone through half precision."""

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        home = super()._fetch(tensor)
        return home.half().to(home.dtype) if home.is_floating_point() else home


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (Sticky, r"\d+ bytes are on the device"),
        (Halving, r"'first.weight' is .* away from an undisturbed run"),
    ],
)
def test_a_broken_adapter_is_found(broken: Any, says: str) -> None:
    with pytest.raises(BrokenPromise, match=says):
        run_state_machine_as_test(machine_for(broken), settings=FEW)
    Sticky.kept.clear()


class TestServing(SpecSuite):
    """Its lifecycle of prediction, on both machines; pairs and illegal events are left to longer suites."""

    spec = compose(INFERENCE, SimAdapter.monitor)
    test_pair = test_illegal = None  # type: ignore[assignment]
