"""The backend of examples/backend.py keeps every promise; docs/backends.md shows parts of that very file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tools.small import batches, loss_of, task

import interlock as il
from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract
from interlock.specs import TRAINING, compose
from interlock.specs.suite import covering_paths, machine_for
from interlock.specs.suite_operations import added
from interlock.sweep import sweep

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "backend.py"
_spec = importlib.util.spec_from_file_location("example_backend", EXAMPLE)
assert _spec is not None
assert _spec.loader is not None
example: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


class TestShelf(AdapterContract):
    def make_adapter(self) -> Adapter:
        return example.Shelf()  # type: ignore[no-any-return]


def test_both_machines_take_every_transition() -> None:
    spec = compose(TRAINING, example.MONITOR)
    for case in covering_paths(spec):
        case.check(spec)


def test_random_runs_fire_what_the_monitor_adds() -> None:
    assert added(compose(TRAINING, example.MONITOR), example.MONITOR) == ("take_key",)


def test_random_runs_keep_every_promise() -> None:
    few = settings(
        max_examples=15,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine_for(example.Shelf), settings=few)


def test_a_fault_at_each_point_ends_clean() -> None:
    report = sweep(example.TASK, example.DATA, backend=example.Shelf, quick=True, progress=False)
    assert report.ok, str(report)


# Resources and phases that a monitor adds


def test_the_release_of_a_backends_own_resource_is_carried_out_where_the_spec_says_so() -> None:
    adapter = example.Shelf()
    assert il.Engine(adapter).fit(task(), batches(2)).ok
    assert not adapter._lock_file.exists()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_key_that_was_half_taken_is_given_back(moment: str) -> None:
    class Slips(example.Shelf):  # type: ignore[misc, name-defined]
        def _take_key(self, model: Any) -> None:
            if moment == "after":
                super()._take_key(model)
            raise ValueError("it slipped")

    adapter = Slips()
    outcome = il.Engine(adapter).start(task(), batches(2)).wait(60)
    assert outcome.status == "failed"
    assert not outcome.abandoned
    assert not adapter._lock_file.exists()


def test_a_release_that_fails_twice_is_abandoned_by_its_name() -> None:
    class Rusty(example.Shelf):  # type: ignore[misc, name-defined]
        def _return_key(self) -> None:
            super()._return_key()
            raise OSError("it broke off")

    outcome = il.Engine(Rusty()).start(task(), batches(2)).wait(60)
    assert outcome.abandoned == ("key",)
    assert isinstance(outcome.error, OSError)


def test_tensors_that_the_adapter_cannot_be_asked_about_are_none_of_its_own() -> None:
    """They are somebody else's, and have no storage: a report on what is left must not fail for them."""
    theirs = torch.eye(3).to_sparse()
    with pytest.raises(NotImplementedError):
        example.Shelf().resident(theirs)
    held: list[torch.Tensor] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        held[:] = [batch[0]]
        return loss_of(model, batch)

    outcome = il.Engine(example.Shelf()).fit(task(loss=loss), batches(2))
    assert outcome.residue.bytes == held[0].nbytes
    assert theirs.is_sparse


def test_an_action_is_how_the_resource_ends_in_that_phase() -> None:
    said: list[str] = []

    class Polite(example.Shelf):  # type: ignore[misc, name-defined]
        def actions(self) -> Any:
            return {**super().actions(), "returning_key": self._leave}

        def _leave(self, model: torch.nn.Module | None) -> None:
            said.append("thank you")
            self._return_key()

    assert il.Engine(Polite()).fit(task(), batches(2)).ok
    assert said == ["thank you"]


def test_a_phase_of_the_monitor_without_an_action_is_named_before_anything_is_taken() -> None:
    class Silent(example.Shelf):  # type: ignore[misc, name-defined]
        def actions(self) -> Any:
            return {}

    with pytest.raises(il.errors.TaskError, match="says nothing of 'taking_key', which its monitor adds"):
        il.Engine(Silent()).fit(task(), batches(2))


def test_a_shelf_that_collapsed_is_left_alone() -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise example.ShelfCollapsed

    adapter = example.Shelf()
    outcome = il.Engine(adapter).start(task(loss=loss), batches(2)).wait(60)
    assert "device_lost" in [entry.phase for entry in outcome.history]
    assert not outcome.residue.known
    if adapter._lock_file.exists():
        adapter._lock_file.unlink()


# The page


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    shown = re.findall(
        r"<!-- not run: a part of examples/backend\.py.*?-->\n```python\n(.*?)```", page, re.DOTALL
    )
    assert len(shown) >= 2
    text = EXAMPLE.read_text()
    assert [part for part in shown if part not in text] == []


def test_the_page_prints_what_the_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "backends.md").read_text()
    (shown,) = re.findall(r"```text\n(without the automaton.*?)```", page, re.DOTALL)
    assert shown in printed
