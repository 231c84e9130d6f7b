"""What a process has once, as runs see it: they share it, queue for it, or are refused with the reason."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from tools.small import BACKENDS, batches, engine, failed, finished, left_clean, loss_of, same, task
from torch import nn

import interlock as il
from interlock.errors import LeaseRefused, TaskError

PATIENCE = 20.0
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)

SETTINGS: dict[str, tuple[Any, Any]] = {
    "seed": (1, 2),
    "deterministic": (True, False),
    "dtype": (torch.float64, torch.float32),
    "threads": (1, 2),
}
"""Setting -> two values that no two runs can have at once."""


def of_process() -> dict[str, Any]:
    """The switches as they stand."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


class Held:
    """A task whose first step waits until it is let go, and says what the process has then."""

    def __init__(self, fails: bool = False) -> None:
        self.here, self.go_on = threading.Event(), threading.Event()
        self.seen: dict[str, Any] = {}

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            if not self.seen:
                self.seen = of_process()
            self.here.set()
            assert self.go_on.wait(PATIENCE)
            if fails:
                raise ValueError("struck")
            return loss_of(model, (batch[0].to(next(model.parameters()).dtype), batch[1]))

        self.task = task(loss=loss)


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@on_each_backend
def test_a_run_has_what_it_asked_for_and_the_process_is_as_it_was(backend: str, setting: str):
    before, held = of_process(), Held()
    run = engine(backend, **{setting: SETTINGS[setting][0]}).start(held.task, batches(2))
    assert held.here.wait(PATIENCE)
    held.go_on.set()
    finished(run.wait(PATIENCE))
    if setting == "seed":
        assert not torch.equal(held.seen["torch"], before["torch"])
    else:
        assert held.seen[setting] == SETTINGS[setting][0]
    assert same(before, of_process())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_one_that_wants_another_value_waits_for_its_turn(setting: str, fails: bool):
    before, (one, two) = of_process(), SETTINGS[setting]
    first, second = Held(fails), Held()
    second.go_on.set()
    running = engine("double", **{setting: one}).start(first.task, batches(2))
    assert first.here.wait(PATIENCE)
    waiting = engine("double", **{setting: two}).start(second.task, batches(2))
    time.sleep(0.1)
    assert not second.here.is_set()
    assert waiting.phase == "acquiring"
    assert "acquiring" in waiting.snapshot().doing
    first.go_on.set()
    left_clean(running.wait(PATIENCE))
    finished(waiting.wait(PATIENCE))
    if setting != "seed":
        assert (first.seen[setting], second.seen[setting]) == (one, two)
    assert same(before, of_process())


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_or_it_is_refused_with_the_reason(setting: str):
    before, (one, two) = of_process(), SETTINGS[setting]
    first = Held()
    running = engine("double", **{setting: one}).start(first.task, batches(2))
    assert first.here.wait(PATIENCE)
    refused = engine("double", when_taken="refuse", **{setting: two}).start(task(name="late"), batches(2))
    error = failed(refused.wait(PATIENCE), LeaseRefused, "acquiring")
    assert (error.setting, error.wanted, error.present) == (setting, two, one)
    assert all(text in str(error) for text in ("'late'", setting, "process of its own"))
    first.go_on.set()
    finished(running.wait(PATIENCE))
    assert same(before, of_process())


@pytest.mark.parametrize("setting", ["deterministic", "dtype", "threads"])
def test_who_wants_the_same_shares_it(setting: str):
    before, value = of_process(), SETTINGS[setting][0]
    both = [Held(), Held()]
    runs = [engine("double", **{setting: value}).start(held.task, batches(2)) for held in both]
    assert all(held.here.wait(PATIENCE) for held in both)  # at the same time
    for held in both:
        held.go_on.set()
    for run in runs:
        finished(run.wait(PATIENCE))
    assert [held.seen[setting] for held in both] == [value, value]
    assert same(before, of_process())


def test_one_that_waits_can_be_cancelled():
    before, first = of_process(), Held()
    running = engine("double", seed=1).start(first.task, batches(2))
    assert first.here.wait(PATIENCE)
    waiting = engine("double", seed=2).start(task(), batches(2))
    waiting.cancel()
    outcome = waiting.wait(PATIENCE)
    left_clean(outcome)
    assert outcome.status == "cancelled"
    first.go_on.set()
    finished(running.wait(PATIENCE))
    assert same(before, of_process())


def test_runs_with_seeds_in_many_threads_have_each_its_own_numbers():
    def draws(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    data = batches(8)  # made before: it takes the process's numbers for a moment

    def trained(seeds: list[int]) -> list[Any]:
        runs = [engine("cpu", seed=seed).start(task(loss=draws), data) for seed in seeds]
        return [finished(run.wait(PATIENCE)).state_dict() for run in runs]

    before = of_process()
    together = trained([1, 2, 3, 1])
    assert same(together, [trained([seed])[0] for seed in (1, 2, 3, 1)])
    assert same(together[0], together[3])
    assert not same(together[0], together[1])
    assert same(before, of_process())


@on_each_backend
def test_a_seed_is_for_evaluation_and_prediction_too(backend: str):
    def output(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]) + torch.rand(())

    before = of_process()
    one, same_again, other = (
        engine(backend, seed=seed).predict(task(), batches(2), output=output) for seed in (4, 4, 5)
    )
    assert same(one, same_again)
    assert not same(one, other)
    assert same(before, of_process())


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"threads": 0}, {"dtype": torch.int64}, {"deterministic": 1}]
)
def test_what_a_process_cannot_have_is_refused_at_once(wrong: dict[str, Any]):
    with pytest.raises(TaskError, match=next(iter(wrong))):
        il.Engine("cpu", **wrong)
    with pytest.raises(TaskError, match="when_taken"):
        il.Engine("cpu", when_taken="perhaps")  # type: ignore[arg-type]
