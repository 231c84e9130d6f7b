"""The fault sweep: clean where nothing is wrong; a planted fault is reported in the cell that it spoils."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch
from tools.small import batches, task
from torch import nn

import interlock as il
from interlock import sweep as module
from interlock import sweep_cell, sweep_run
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.evidence import Errors
from interlock.sweep import SweepError, SweepReport, Verdict, enumerate_points, sweep
from interlock.sweep_points import FAULTS, Cell, Point, cells_at, faults_at, quick_cells


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def accuracy(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def small(**changes: Any) -> il.Task:
    parts: dict[str, Any] = {
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.9),
        "metrics": accuracy,
        "data": lambda: il.Data(batches(3), batches(1)),
        "name": "small",
    }
    return task(**{**parts, **changes})


def swept(what: il.Task | None = None, **settings: Any) -> SweepReport:
    """A sweep of few cells."""
    given: dict[str, Any] = {
        "backend": "double",
        "batches": 1,
        "quick": True,
        "deadline": 0.2,
        "progress": False,
    }
    return sweep(small() if what is None else what, **{**given, **settings})


def promises(verdict: Verdict) -> set[str]:
    """The names of the promises that were broken."""
    return {line.partition(":")[0] for line in verdict.lines}


# Nothing is wrong


@pytest.mark.parametrize("backend", ["cpu", "double"])
def test_a_task_that_keeps_every_promise_is_clean(backend: str) -> None:
    report = swept(backend=backend, batches=2)
    assert report.ok, str(report)
    assert {v.group.partition(".")[0] for v in report.verdicts} == {"run, undisturbed", "hook", "backend"}
    assert {v.fault for v in report.verdicts} >= {"nothing", "error", "memory", "interrupt"}
    assert any("way out" in v.group for v in report.verdicts)


@pytest.mark.parametrize("policy", ["keep", "discard"])
def test_each_exit_policy_is_clean(policy: str) -> None:
    report = swept(exit=policy, layers=("backend",))
    assert report.ok, str(report)
    assert {"twice", "blocks"} <= {v.fault for v in report.verdicts}


def test_runs_that_save_and_rescue_are_clean() -> None:
    report = swept(backend="cpu", checkpoints=True, layers=("backend",), patience=3.0)
    assert report.ok, str(report)


def test_a_rescue_that_blocks_is_given_up() -> None:
    cell = "backend.fetch[1] before of a failed run: blocks"
    report = swept(checkpoints=True, layers=("backend",), patience=3.0, only=cell)
    assert report.ok, str(report)


def test_a_module_that_was_given_is_not_touched() -> None:
    model = nn.Linear(4, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = swept(small(model=model), layers=("hook",))
    assert report.ok, str(report)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_the_generators_of_the_process_go_on_as_if_nothing_had_been() -> None:
    before = torch.get_rng_state()
    swept(layers=("backend",), backend="cpu")
    assert torch.equal(torch.get_rng_state(), before)


# The points


def test_every_hook_and_call_is_enumerated_in_order() -> None:
    points = enumerate_points(small(), backend="double", batches=2)
    hooks = {point.name for point in points if point.layer == "hook"}
    assert hooks == {
        *("model", "forward", "optimizer", "update", "scheduler", "schedule"),
        *("loss", "metrics", "data", "validation"),
    }
    calls = {point.name for point in points if point.layer == "backend"}
    assert calls == {"acquire", "place", "move", "sync", "fetch", "leftovers", "free"}
    stages = [point.stage for point in points if not point.failed]
    assert stages == sorted(stages, key=["in", "during", "out"].index)
    assert len(set(map(str, points))) == len(points)
    assert points == enumerate_points(small(), backend="double", batches=2)


def test_a_quick_choice_has_each_kind_of_point_and_each_fault_of_it() -> None:
    points = enumerate_points(small(), backend="double", batches=3)
    chosen = quick_cells(points, seed=3)
    everything = cells_at(points)
    assert set(chosen) < set(everything)
    kinds = {(cell.point.group, cell.fault) for cell in everything}
    assert {(cell.point.group, cell.fault) for cell in chosen} == kinds
    assert chosen == quick_cells(points, seed=3)
    groups = {point.group for point in points}
    assert {cell.point.group for cell in quick_cells(points, 3, limit=5)} == groups
    for group in groups:
        members = [point for point in points if point.group == group]
        met = {cell.point for cell in chosen if cell.point.group == group}
        assert {members[0], members[-1]} <= met


@pytest.mark.parametrize(
    ("point", "faults"),
    [
        (Point("hook", "loss", "before", 1, "during"), ("error", "memory", "interrupt")),
        (Point("backend", "move", "before", 1, "during"), ("error",)),
        (Point("backend", "free", "before", 1, "out", bounded=True), ("error", "twice", "blocks")),
        (Point("backend", "free", "after", 1, "out", bounded=True), ("error", "twice")),
        (Point("device", "allocation", "during", 1, "during"), ("memory", "loses")),
        (Point("device", "to_host", "during", 1, "during"), ("fails", "half", "loses")),
        (Point("device", "operator", "during", 1, "out"), ("fails", "half", "loses")),
        (Point("device", "sync", "during", 1, "out", bounded=True), ("fails", "loses", "blocks", "slow")),
    ],
    ids=str,
)
def test_faults_are_those_that_mean_something_at_a_point(point: Point, faults: tuple[str, ...]) -> None:
    assert faults_at(point) == faults
    assert set(faults) <= set(FAULTS)


# Planted faults


class Forgetful(CpuAdapter):
    """Gives its variable back, but not where placement was cut short."""

    half = False

    def _acquire(self) -> Any:
        os.environ["PLANTED_BY_SWEEP"] = "1"
        return super()._acquire()

    def _place(self, model: nn.Module) -> None:
        self.half = True
        super()._place(model)
        self.half = False

    def _free(self) -> None:
        if not self.half:
            os.environ.pop("PLANTED_BY_SWEEP", None)


def test_a_free_that_forgets_something_is_found_where_it_does() -> None:
    report = swept(backend=Forgetful, layers=("backend",))
    os.environ.pop("PLANTED_BY_SWEEP", None)
    spoilt = {v.group for v in report.broken}
    assert spoilt == {"backend.move before, on the way in", "backend.move after, on the way in"}
    for verdict in report.broken:
        # The next run gives it back, and so is another one than it would have been.
        assert promises(verdict) == {"the process is as it was", "the next run is as good"}
        assert "PLANTED_BY_SWEEP" in verdict.lines[0]


class Sick(CpuAdapter):
    """Does not recover from a placement that was cut short."""

    half = False

    def _acquire(self) -> Any:
        if self.half:
            raise RuntimeError("still sick")
        return super()._acquire()

    def _place(self, model: nn.Module) -> None:
        self.half = True
        super()._place(model)
        self.half = False


def test_an_adapter_that_stays_broken_is_found_by_the_next_run() -> None:
    report = swept(backend=Sick, layers=("backend",))
    assert {v.group.partition(" ")[0] for v in report.broken} == {"backend.move"}
    for verdict in report.broken:
        assert promises(verdict) == {"the next run is as good"}
        assert "still sick" in verdict.lines[0]


def test_a_batch_that_stays_on_the_device_is_found_with_its_owner() -> None:
    kept: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        kept[:] = [batch[0]]
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    (verdict,) = swept(small(loss=loss), only="undisturbed").verdicts
    assert promises(verdict) == {"the device is empty", "the next run is as good"}
    assert "bytes made by move" in verdict.lines[0]
    # A run that failed before its first batch keeps none; the one after it does.
    (early,) = swept(small(loss=loss), only="hook.optimizer[1] before: error").verdicts
    assert promises(early) == {"the next run is as good"}


def test_an_engine_that_swallows_the_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Errors, "first", property(lambda self: None))
    report = swept(backend="cpu", layers=("hook",))
    clean = [v.cell for v in report.verdicts if v.status == "clean"]
    assert clean == ["undisturbed"]
    assert all("the first error is kept" in promises(v) for v in report.broken)


def test_a_task_whose_undisturbed_run_fails_is_not_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuAdapter, "releases", lambda self: {})
    with pytest.raises(SweepError, match="does not finish, so there is nothing to strike"):
        swept(backend="cpu", only="undisturbed")


def test_other_weights_in_the_next_run_are_found() -> None:
    drift = iter(range(1, 1000))

    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 3)
            self.register_buffer("drift", torch.tensor(float(next(drift))))

        def forward(self, x: torch.Tensor) -> Any:
            return self.line(x)

    (verdict,) = swept(small(model=Drifting), only="undisturbed").verdicts
    assert promises(verdict) == {"the weights are whole", "the next run is as good"}
    assert "drift" in verdict.lines[0]


# What is no pass


def test_a_point_that_is_not_passed_again_is_no_pass() -> None:
    runs: list[int] = []

    def build() -> nn.Module:
        runs.append(0)
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(runs) <= 2:  # in the runs that enumerate the points
            model(batch[0])
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    what = small(model=build, loss=loss, metrics=None, validates_loss=False, data=lambda: batches(1))
    report = swept(what, backend="cpu", layers=("hook",))
    missed = [v.cell for v in report.verdicts if v.status == "never struck"]
    assert missed
    assert all(cell.startswith("hook.forward[2]") for cell in missed)
    assert report.counts["broken"] == 0
    assert not report.ok


def test_a_run_that_hangs_is_undetermined_and_so_is_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "RELEASED", 0.1)
    gate, calls = threading.Event(), []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        calls.append(0)
        if len(calls) == 4:  # two runs enumerate, then come the undisturbed one and the one after it
            gate.wait(30)
        return torch.optim.SGD(model.parameters(), 0.1)

    report = swept(small(optimizer=optimizer), backend="cpu", layers=("hook",), patience=1.0)
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("interlock"):
            thread.join(10)
    first, *others = report.verdicts
    assert first.cell == "undisturbed"
    assert first.status == "undetermined"
    assert "the next run hangs" in first.lines[0]
    assert "gate.wait(30)" in first.lines[0]
    assert others
    assert {v.status for v in others} == {"undetermined"}
    assert not report.ok


def test_a_judge_that_fails_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Any) -> list[str]:
        raise ZeroDivisionError("the judge")

    monkeypatch.setattr(sweep_cell, "judged", fails)
    (verdict,) = swept(only="undisturbed").verdicts
    assert verdict.status == "undetermined"
    assert "ZeroDivisionError: the judge" in verdict.lines[-1]


def test_a_sweep_of_nothing_is_no_pass() -> None:
    report = swept(only="undisturbed")
    assert report.ok
    assert not SweepReport("t", report.settings, "", 0, ()).ok


# Going on, and again


class Killed(BaseException):
    pass


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "deep" / "state.jsonl"
    tried: list[str] = []
    plain = sweep_cell.tried

    def counting(bench: Any, cell: Cell, *rest: Any) -> Any:
        tried.append(cell.id)
        return plain(bench, cell, *rest)

    monkeypatch.setattr(module, "tried", counting)

    def kill(verdict: Verdict, number: int, total: int) -> None:
        if number == 5:
            raise Killed

    with pytest.raises(Killed):
        swept(backend="cpu", layers=("backend",), state=state, on_cell=kill)
    assert len(tried) == 5
    assert len(state.read_text().splitlines()) == 6
    with state.open("a") as file:
        file.write('{"cell": "backend.acq')  # killed in the middle of a line
    whole = swept(backend="cpu", layers=("backend",), state=state)
    assert len(tried) == len(set(tried)) == len(whole.verdicts)
    assert whole == swept(backend="cpu", layers=("backend",))
    monkeypatch.undo()
    assert swept(backend="cpu", layers=("backend",), state=state) == whole


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 1}, "seed=0, not 1"),
        ({"exit": "keep"}, "exit='offload', not 'keep'"),
        ({"what": small(name="other")}, "of task 'small', not 'other'"),
        ({"what": small(metrics=None)}, "passes other points"),
    ],
    ids=str,
)
def test_the_state_of_another_sweep_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    state = tmp_path / "state.jsonl"

    def kill(*_: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        swept(backend="cpu", layers=("hook",), state=state, on_cell=kill)
    with pytest.raises(SweepError, match=why):
        swept(**{"backend": "cpu", "layers": ("hook",), "state": state, **change})


def test_a_file_that_is_no_state_is_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "thesis.txt"
    state.write_text("important\n")
    with pytest.raises(SweepError, match="not the state of a sweep"):
        swept(backend="cpu", layers=("hook",), state=state)
    assert state.read_text() == "important\n"


def test_a_broken_cell_can_be_tried_alone() -> None:
    report = swept(backend=Sick, layers=("backend",))
    broken = report.broken[0]
    assert broken.cell in broken.repeat
    again = swept(backend=Sick, only=broken.cell)
    assert again.verdicts == (broken,)
    assert again.broken
    own = swept(
        backend=Sick, only=broken.cell, repeat=lambda cell: f"interlock rehearse t.py:t --only {cell!r}"
    )
    assert own.verdicts[0].repeat.startswith("interlock rehearse")


# Reports


@pytest.fixture(scope="module")
def mixed() -> SweepReport:
    """A report with broken cells."""
    return swept(backend=Sick, layers=("backend",))


def test_junit_has_a_test_case_for_each_cell(mixed: SweepReport, tmp_path: Path) -> None:
    root = ElementTree.parse(mixed.write(tmp_path / "out" / "report.xml")).getroot()
    (suite,) = root
    cases = list(suite)
    assert [case.get("name") for case in cases] == [v.cell for v in mixed.verdicts]
    assert suite.get("tests") == str(len(mixed.verdicts))
    assert suite.get("failures") == str(len(mixed.broken))
    failed = [case for case in cases if case.find("failure") is not None]
    assert [case.get("name") for case in failed] == [v.cell for v in mixed.broken]
    text = failed[0].findtext("failure", "")
    assert "still sick" in text
    assert "again: print(interlock.sweep.sweep(" in text


def test_junit_can_hold_any_text(mixed: SweepReport) -> None:
    verdict = Verdict("a <cell> & more", "g", "error", "undetermined", ("bell \x07, half \ud800",))
    report = SweepReport("t", mixed.settings, "", 1, (verdict,))
    case = ElementTree.fromstring(report.as_junit())[0][0]
    assert case.get("name") == "a <cell> & more"
    assert [part.get("type") for part in case] == ["undetermined"]


def test_json_has_everything(mixed: SweepReport, tmp_path: Path) -> None:
    data = json.loads(mixed.write(tmp_path / "report.json").read_text())
    assert data["ok"] is False
    assert data["counts"] == mixed.counts
    assert [v["cell"] for v in data["verdicts"]] == [v.cell for v in mixed.verdicts]


def test_another_suffix_is_refused(mixed: SweepReport, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"something\.xml or something\.json"):
        mixed.write(tmp_path / "report.txt")


def test_the_table_has_a_row_for_each_kind_of_point(mixed: SweepReport) -> None:
    groups = list(dict.fromkeys(v.group for v in mixed.verdicts))
    assert mixed.table().row_count == len(groups)
    text = str(mixed)
    assert all(group in text for group in groups)
    assert "still sick" in text


def test_progress_is_shown_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    swept(only="undisturbed", progress=None)
    assert capsys.readouterr().err == ""
    swept(only="undisturbed", progress=True)
    assert "small on double" in capsys.readouterr().err


# What is refused


class Unwilling(CpuAdapter):
    name: ClassVar[str] = "unwilling"

    def _acquire(self) -> Any:
        raise RuntimeError("no device today")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"backend": ReplacingDouble()}, "an adapter of its own"),
        ({"backend": Unwilling}, "no device today"),
        ({"exit": "burn"}, "exit must be one of"),
        ({"layers": ("hooks",)}, "layers must be some of"),
        ({"batches": 0}, "batches must be a whole number"),
        ({"deadline": 0}, "deadline must lie between"),
        ({"data": []}, "gave no batch"),
        ({"only": "hook.loss[99] before: error"}, "no cell .*such as 'hook.loss"),
    ],
    ids=str,
)
def test_what_cannot_be_swept_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SweepError, match=why):
        swept(**settings)
