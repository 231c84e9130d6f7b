"""The fault sweep on the simulated device, where each of its operations can be struck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.small import batches, task

import interlock as il
from interlock import sweep_cell
from interlock.backends import simulator
from interlock.backends.sim import SimAdapter
from interlock.sweep import SweepReport, Verdict, enumerate_points, sweep


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**changes: Any) -> il.Task:
    parts: dict[str, Any] = {
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
        "data": lambda: il.Data(batches(2), batches(1)),
        "name": "small",
    }
    return task(**{**parts, **changes})


def swept(what: il.Task | None = None, **settings: Any) -> SweepReport:
    given: dict[str, Any] = {"backend": "sim", "quick": True, "layers": ("device",), "progress": False}
    given |= {"deadline": 0.2, "patience": 20.0, **settings}
    return sweep(small() if what is None else what, **given)


def promises(verdict: Verdict) -> set[str]:
    return {line.partition(":")[0] for line in verdict.lines}


@pytest.mark.parametrize("policy", ["offload", "keep", "discard"])
def test_faults_of_the_device_are_clean(policy: str) -> None:
    report = swept(exit=policy)
    assert report.ok, str(report)
    assert {v.fault for v in report.verdicts} >= {
        "fails",
        "half",
        "late",
        "loses",
        "memory",
        "blocks",
        "slow",
    }


def test_a_judge_that_breaks_off_leaves_no_dead_device_to_later_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(case: Any) -> list[str]:
        raise AttributeError("the judge's own")

    monkeypatch.setattr(sweep_cell, "judged", breaks)
    report = swept(only="device.to_device[1] during: loses")
    assert "could not be judged" in str(report)
    assert not simulator.lost()


def test_what_a_judge_that_breaks_off_leaves_on_the_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def breaks(case: Any) -> list[str]:
        kept.append(torch.ones(3, device="sim"))
        raise AttributeError("the judge's own")

    monkeypatch.setattr(sweep_cell, "judged", breaks)
    (verdict,) = swept(only="undisturbed").verdicts
    kept.clear()
    assert verdict.status == "undetermined"
    assert verdict.lines[-1] == "12 bytes are left on the device, which later cells begin with"


def test_faults_of_hooks_and_calls_are_clean_too() -> None:
    report = swept(layers=("hook", "backend"))
    assert report.ok, str(report)


def test_placement_that_keeps_the_parameters_is_clean() -> None:
    report = swept(backend=lambda: SimAdapter("kept"))
    assert report.ok, str(report)


def test_every_kind_of_operation_is_enumerated() -> None:
    points = enumerate_points(small(), backend="sim", layers=("device",))
    assert {point.name for point in points} == set(simulator.POINTS)
    assert {point.stage for point in points} == {"in", "during", "out"}
    with simulator.counted() as counts:
        il.Engine("sim", seed=0).fit(small(), batches(2), validate=batches(1))
    assert len(points) == sum(counts.values())


def test_a_device_that_is_touched_after_it_died_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimAdapter._free

    def free(self: SimAdapter) -> None:
        if simulator.lost():
            simulator.faults.touched.append("memory query")
        plain(self)

    monkeypatch.setattr(SimAdapter, "_free", free)
    monkeypatch.setattr(SimAdapter, "is_loss_of_device", lambda self, error: False)
    report = swept(small(metrics=None), only="device.operator[30] during: loses")
    assert "a dead device is left alone" in promises(report.verdicts[0])
