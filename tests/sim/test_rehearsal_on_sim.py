"""What a rehearsal finds, part by part, on the simulated device of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.small import batches, task
from torch import nn

import interlock as il
from interlock.backends.sim import SimAdapter
from interlock.errors import UnusedParameterWarning
from interlock.rehearsal import rehearse
from interlock.rehearsal_parts import Parts
from interlock.rehearsal_report import Finding


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**changes: Any) -> il.Task:
    parts: dict[str, Any] = {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), 1e-2), "name": "small"}
    return task(**{**parts, **changes})


def parts(what: il.Task, train: list[Any], validate: list[Any] | None = None) -> Parts:
    return Parts(what, il.Data(train, validate), partial(SimAdapter, "replaced"), 0, lambda _: None)


def kinds(findings: Any) -> list[str]:
    return [finding.kind for finding in findings]


def reads(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.item()
    return loss


@pytest.mark.parametrize("validate", [None, batches(1)], ids=["trained", "validated"])
def test_copies_are_those_of_training_whatever_number_of_steps_is_watched(validate: Any) -> None:
    def copies(steps: int) -> dict[tuple[str, str], float]:
        found = parts(small(loss=reads), batches(steps), validate).watched()
        assert found.steps == steps
        return {(one.direction, one.place.rpartition("/")[2]): one.per_step for one in found.transfers}

    line = reads.__code__.co_firstlineno + 2
    mine = f"test_rehearsal_on_sim.py:{line} in reads"
    expected = {("to_device", "the engine"): 2, ("to_host", "the engine"): 1, ("to_host", mine): 1}
    assert copies(1) == copies(3) == copies(5) == expected


def test_memory_at_the_peak_is_told_apart_by_owner() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        temporary = x.repeat(1000, 1)  # the peak is here, in the second step, whose batch is larger
        del temporary
        return nn.functional.cross_entropy(model(x), y)

    what = small(
        model=lambda: nn.Linear(4, 3),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
        loss=loss,
    )
    found = parts(what, [*batches(1, size=8), *batches(1, size=32)]).watched()
    trained = 4 * (4 * 3 + 3)
    assert found.peak_by_owner == {
        "parameters": trained,
        "optimizer state": trained,
        "batch": 32 * 4 * 4 + 32 * 8,
        "activations and temporaries": 1000 * 32 * 4 * 4,
    }
    assert sum(found.peak_by_owner.values()) == found.peak


def test_what_the_loss_returns_is_an_owner_of_its_own() -> None:
    # Here the peak is in the backward pass, which begins with the loss.
    found = parts(small(), batches(2)).watched()
    assert found.peak_by_owner["results"] == 4


class Idle(nn.Module):
    """One layer that trains, one that is never called, one whose rate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.unused, self.still = nn.Linear(4, 4), nn.Linear(2, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.still(self.trained(x))


def test_parameters_without_a_gradient_and_those_that_stay_are_named() -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        idle = {"params": model.still.parameters(), "lr": 0.0}
        rest = {"params": [*model.trained.parameters(), *model.unused.parameters()]}
        return torch.optim.SGD([rest, idle], 0.1)

    with pytest.warns(UnusedParameterWarning):
        found = parts(small(model=Idle, optimizer=optimizer), batches(2)).watched()
    assert [finding.text for finding in found.findings if finding.kind == "parameters"] == [
        "2 never had a gradient: unused.bias, unused.weight",
        "2 of 6 had gradients and did not change: still.weight, still.bias",
    ]
    assert found.problems == ()


# Problems


def test_what_the_first_run_changes_in_the_process_is_a_problem() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        os.environ["PLANTED_ONCE"] = "1"
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    found = rehearse(small(loss=loss), batches(2), progress=False)
    del os.environ["PLANTED_ONCE"]
    assert kinds(found.problems) == ["process", "faults"]
    assert "PLANTED_ONCE" in found.problems[0].text
    assert not found.ok


def broken(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    if torch.is_grad_enabled():
        return {}
    raise ZeroDivisionError("my bug")


def test_an_error_of_the_task_begins_with_its_message_and_has_no_frames_of_the_engine() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("my bug")

    (problem,) = parts(small(loss=loss), batches(2)).watched().problems
    assert problem.kind == "error"
    assert problem.text.startswith("the run ended as 'failed': ZeroDivisionError: my bug\n")
    assert f"line {loss.__code__.co_firstlineno + 1}, in loss" in problem.text
    engine = Path(il.__file__).parent
    assert f"{engine}/" not in problem.text
    assert str(engine.resolve() / "session.py") not in problem.text


def test_an_error_in_an_evaluation_is_told_in_the_same_way() -> None:
    what = small(metrics=broken)
    (problem,) = parts(what, batches(2), batches(1)).evaluation()
    assert problem.kind == "evaluation"
    assert problem.text.startswith("the evaluation fails: ZeroDivisionError: my bug\n")
    assert "in broken" in problem.text


def test_code_that_names_cuda_is_found_wherever_it_is_first_reached() -> None:
    lines: list[int] = []

    def adopt(model: nn.Module, optimizer: Any) -> None:
        torch.zeros(1, device="cuda")
        lines.append(adopt.__code__.co_firstlineno + 1)

    rehearsed = parts(small(adopt={7: adopt}), batches(2))
    assert rehearsed.watched().findings == ()
    assert rehearsed.foreign() == []
    assert rehearsed.restore() == []
    (finding,) = rehearsed.foreign()
    assert f"test_rehearsal_on_sim.py:{lines[0]}" in finding.text
    assert not finding.problem


# The faults


class Killed(BaseException):
    pass


def test_a_rehearsal_that_was_interrupted_goes_on_from_its_state(tmp_path: Path) -> None:
    told: list[str] = []
    met: list[tuple[str, int, int]] = []
    settings: dict[str, Any] = {"progress": False, "state": tmp_path / "st", "checkpoints": False}
    what = small(model=lambda: nn.Linear(4, 3), optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1))

    def kill(*now: Any) -> None:
        met.append(now)
        if now[1] == 3:
            raise Killed

    with pytest.raises(Killed):
        rehearse(what, batches(2), on_cell=kill, **settings)
    kept = (tmp_path / "st" / "offload.jsonl").read_text()
    assert len(kept.splitlines()) == 4
    found = rehearse(what, batches(3), tell=told.append, **settings)
    assert (tmp_path / "st" / "offload.jsonl").read_text().startswith(kept)
    (report,) = found.sweeps
    assert met[-1] == ("offload", 3, len(report.verdicts))
    (estimate,) = [text for text in told if "to try" in text]
    assert f"{len(report.verdicts) - 3} faults to try, about " in estimate
    assert found.ok, found.verdict
    assert found.notes == ()


def test_a_full_rehearsal_strikes_every_passage() -> None:
    what = small(model=lambda: nn.Linear(4, 3), optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1))
    full = rehearse(
        what, batches(1), steps=1, quick=False, exits=["discard"], checkpoints=False, progress=False
    )
    (report,) = full.sweeps
    assert full.ok, full.verdict
    assert {verdict.cell.partition(":")[0] for verdict in report.verdicts} >= {
        f"hook.loss[1] {moment}" for moment in ("before", "after")
    }
    struck = {verdict.cell.rpartition(":")[0] for verdict in report.verdicts} - {""}
    assert len(struck) == report.points


def test_what_a_quick_rehearsal_leaves_out_is_said() -> None:
    found = rehearse(small(), batches(2), only="undisturbed", progress=False)
    assert found.notes == ()
    assert found.verdict.startswith("pass: small: 1 fault, all clean; ")
    assert ", one fault\n" in str(found.sweeps[0])
    finding = Finding("copy", False, "a look")
    assert finding.part == "a watched run"
