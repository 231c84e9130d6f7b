"""Each promise of the sweep's judge catches the fault that is planted for it, and no other promise does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tools.small import batches, task
from torch import nn

import interlock as il
from interlock.keeping import Keeper
from interlock.run import Run
from interlock.sweep import SweepReport, sweep
from interlock.sweep_judge import AGAIN

END = "backend.leftovers[1] before: error"
"""A fault on the way out, with everything home already."""
FAILS = "hook.loss[2] before: error"
"""A fault in the second step."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**changes: Any) -> il.Task:
    parts: dict[str, Any] = {
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
        "data": lambda: il.Data(batches(3), batches(1)),
        "name": "small",
    }
    return task(**{**parts, **changes})


def swept(what: il.Task | None = None, only: str = "undisturbed", **settings: Any) -> SweepReport:
    given: dict[str, Any] = {"backend": "double", "deadline": 0.2, "progress": False, "only": only}
    return sweep(small() if what is None else what, **{**given, **settings})


def promises(report: SweepReport) -> set[str]:
    """The promises that were broken in the one cell of a report, but for that on the next run."""
    (verdict,) = report.verdicts
    assert verdict.status in ("clean", "broken"), str(verdict)
    return {line.partition(":")[0] for line in verdict.lines} - {AGAIN}


@pytest.fixture
def tampering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[il.Outcome], Any]], None]:
    """Makes every run give what a function makes of its outcome, or what that changes in it."""
    plain = Run.wait

    def plant(change: Callable[[il.Outcome], Any]) -> None:
        def wait(self: Run, timeout: float | None = None) -> il.Outcome:
            outcome = plain(self, timeout)
            changed: il.Outcome = change(outcome) or outcome
            return changed

        monkeypatch.setattr(Run, "wait", wait)

    return plant


Plant = Callable[[Callable[[il.Outcome], Any]], None]


def _zero(outcome: il.Outcome) -> None:
    if outcome.model is not None:
        for parameter in outcome.model.parameters():
            parameter.data.zero_()


def _zero_failed(outcome: il.Outcome) -> None:
    if outcome.status == "failed":
        _zero(outcome)


def _forget(outcome: il.Outcome) -> None:
    for optimizer in outcome.optimizers.values():
        optimizer.state.clear()


def _slow_down(outcome: il.Outcome) -> None:
    if outcome.status == "failed":
        for optimizer in outcome.optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.0


def _freeze(outcome: il.Outcome) -> None:
    if outcome.model is not None:
        outcome.model.requires_grad_(requires_grad=False)


def _add(outcome: il.Outcome) -> None:
    if outcome.model is not None:
        outcome.model.add_module("added", nn.Identity())


def _in_eval(outcome: il.Outcome) -> None:
    if outcome.status == "failed" and outcome.model is not None:
        outcome.model.eval()


def _unrecorded(outcome: il.Outcome) -> il.Outcome:
    return dataclasses.replace(outcome, failure=None)


def _boast(outcome: il.Outcome) -> il.Outcome:
    return dataclasses.replace(outcome, steps=outcome.steps + (outcome.status == "failed") * 7)


@pytest.mark.parametrize(
    ("change", "cell", "promise"),
    [
        (_zero, "undisturbed", "the weights are whole"),
        (_zero_failed, END, "the weights are whole"),
        (_zero_failed, FAILS, "the weights are whole"),
        (_boast, FAILS, "the weights are whole"),
        (_forget, "undisturbed", "the optimizer is whole"),
        (_forget, END, "the optimizer is whole"),
        (_forget, FAILS, "the optimizer is whole"),
        (_slow_down, END, "the optimizer is whole"),
        (_freeze, "undisturbed", "the model is as built"),
        (_add, "undisturbed", "the model is as built"),
        (_in_eval, END, "the model is as built"),
        (_unrecorded, FAILS, "the first error is kept"),
    ],
)
def test_what_is_lost_of_the_results_is_found(
    tampering: Plant, change: Callable[[il.Outcome], Any], cell: str, promise: str
) -> None:
    assert promises(swept(only=cell)) == set()
    tampering(change)
    assert promises(swept(only=cell)) == {promise}


def test_weights_that_are_kept_on_the_device_are_looked_at(tampering: Plant) -> None:
    def spoil(outcome: il.Outcome) -> None:
        # Its history tells that it was kept; a run that brings it home is left alone.
        if any(entry.phase == "keeping" or entry.event == "keep" for entry in outcome.history):
            _zero(outcome)

    assert promises(swept(exit="keep")) == set()
    tampering(spoil)
    assert promises(swept(exit="keep")) == {"the weights are whole"}


# The rescue


def rescues(monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Any]) -> None:
    """Has something else done than to save where a run rescues: only then the copies have a deadline."""
    plain = Keeper.save

    def save(self: Keeper, parts: Any, position: Any, adapter: Any, fetch: Any = None) -> None:
        if fetch is None:
            plain(self, parts, position, adapter)
        else:
            instead(partial_save(plain, self, parts, position, adapter), position)

    monkeypatch.setattr(Keeper, "save", save)


def partial_save(plain: Any, *given: Any) -> Callable[[Any], None]:
    def save(fetch: Any) -> None:
        plain(*given, fetch)

    return save


def _nothing(save: Any, position: Any) -> None:
    pass


def _zeros(save: Any, position: Any) -> None:
    save(lambda tensor: torch.zeros_like(tensor, device="cpu"))


def _other_step(save: Any, position: Any) -> None:
    position.step += 1
    save(lambda tensor: tensor.detach().clone())
    position.step -= 1


def _breaks(save: Any, position: Any) -> None:
    raise OSError("no space")


@pytest.mark.parametrize("instead", [_nothing, _zeros, _other_step, _breaks])
@pytest.mark.parametrize("cell", [FAILS, "hook.data[1] after: error"])
def test_a_rescue_that_saves_nothing_or_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Any], cell: str
) -> None:
    assert promises(swept(checkpoints=True, only=cell)) == set()
    rescues(monkeypatch, instead)
    assert promises(swept(checkpoints=True, only=cell)) == {"the rescue is whole"}


def test_a_run_that_does_not_rescue_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "backend.leftovers[1] before of a failed run: error"
    assert promises(swept(checkpoints=True, only=cell)) == set()
    monkeypatch.setattr(Keeper, "rescues", False)
    assert promises(swept(checkpoints=True, only=cell)) == {"the rescue is whole"}


# The process


def test_what_only_the_first_run_changes_is_found() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        os.environ["PLANTED_ONCE"] = "1"
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    report = swept(small(loss=loss))
    del os.environ["PLANTED_ONCE"]
    assert promises(report) == {"the process is as it was"}
    (line,) = report.verdicts[0].lines
    assert "PLANTED_ONCE" in line
    assert "by the first run of all" in line


# What follows from a fault


class Keeps(nn.Module):
    """Keeps its last output, and so what the graph of that holds."""

    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.line(x)
        return self.last


@pytest.mark.parametrize("fault", ["twice", "blocks"])
def test_what_an_abandoned_model_holds_by_a_graph_is_no_leak_of_its_own(fault: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Keeps()

    seen: list[str] = []
    cell = f"backend.fetch[7] before of a failed run: {fault}"  # the copy of `last`, which comes last of all
    report = swept(small(model=build), only=cell, batches=1, on_cell=lambda v, *_: seen.append(v.cell))
    assert promises(report) == set()
    assert report.ok, str(report)
    assert seen == [cell]
