"""How long a run goes on: steps, time, batches of a pass, one batch again and again, rules that end it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.small import BACKENDS, batches, engine, finished, left_clean, loss_of, same, task

import interlock as il
from interlock.errors import TaskError

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
FEW = settings(max_examples=max(10, settings().max_examples // 3))
PATIENCE = 30.0


def fit(data: Any, **how: Any) -> il.Outcome:
    """A run to its end."""
    backend, what = how.pop("backend", "cpu"), how.pop("what", None)
    settings_ = {name: how.pop(name) for name in ("report_every",) if name in how}
    started = engine(backend, **settings_).start(what or task(), data, **how)
    return started.wait(PATIENCE)


def by_hand(stream: list[Any]) -> dict[str, torch.Tensor]:
    """The weights after one update for each of these batches."""
    what = task()
    model = what.model() if callable(what.model) else None
    optimizer: Any = what.optimizer(model)  # type: ignore[arg-type]
    for batch in stream:
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[arg-type]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def close(outcome: il.Outcome, stream: list[Any]) -> None:
    """Trained on exactly these batches, in this order (a fused update rounds otherwise)."""
    assert outcome.steps == len(stream)
    for name, p in by_hand(stream).items():
        torch.testing.assert_close(dict(finished(outcome).named_parameters())[name].detach(), p)


# Steps and batches


@FEW
@given(
    backend=st.sampled_from(BACKENDS),
    count=st.integers(1, 5),
    epochs=st.integers(1, 3),
    most=st.none() | st.integers(1, 12),
    limit=st.none() | st.integers(1, 6),
    overfit=st.none() | st.integers(1, 3),
    report_every=st.sampled_from([1, 2, 50]),
)
def test_exactly_the_batches_that_were_asked_for(
    backend: str,
    count: int,
    epochs: int,
    most: int | None,
    limit: int | None,
    overfit: int | None,
    report_every: int,
):
    data = batches(count)
    how = {"max_steps": most, "limit_batches": limit, "overfit": overfit, "report_every": report_every}
    outcome = fit(data, backend=backend, epochs=epochs, **how)
    of_epoch = data[:overfit] if overfit is not None else data[:limit]
    close(outcome, (of_epoch * epochs)[:most])


@on_each_backend
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_validations_come_after_so_many_steps_over_epochs(backend: str, every: int):
    outcome = fit(batches(4), backend=backend, validate=batches(2), epochs=3, validate_every=every)
    finished(outcome)
    at = [report.step for report in outcome.reports if "val_loss" in report.metrics]
    assert at == list(range(every, 13, every))


def test_a_validation_is_limited_too_and_changes_no_training():
    seen: list[int] = []

    def metrics(model: Any, batch: Any) -> dict[str, float]:
        seen.append(len(batch[0]))
        return {"one": 1.0}

    checked = batches(5, seed=3)
    outcome = fit(batches(4), what=task(metrics=metrics), validate=checked, limit_batches=2)
    assert len(seen) == 2
    assert same(finished(outcome).state_dict(), finished(fit(batches(4), limit_batches=2)).state_dict())


def test_a_stream_without_an_end_is_limited():
    def stream() -> Any:
        while True:
            yield batches(1)[0]

    class Endless:
        def __iter__(self) -> Any:
            return stream()

    close(fit(Endless(), limit_batches=3, epochs=2), batches(1) * 6)
    close(fit(Endless(), max_steps=4), batches(1) * 4)
    close(fit(stream(), overfit=1, epochs=5), batches(1) * 5)


def test_one_batch_can_be_learned():
    outcome = fit(batches(3), overfit=1, epochs=200, report_every=200)
    finished(outcome)
    assert outcome.metrics["loss"] < 0.1


# Time


@on_each_backend
def test_after_its_time_a_run_stops_and_no_thread_stays(backend: str):
    began = time.monotonic()
    outcome = fit(batches(), backend=backend, epochs=10**6, max_time=0.2)
    left_clean(outcome)
    assert outcome.status == "stopped"
    assert outcome.ok
    assert time.monotonic() - began < 10
    assert not [one for one in threading.enumerate() if "time limit" in one.name]


def test_a_run_that_ends_before_leaves_its_time():
    outcome = fit(batches(), max_time=1000.0)
    finished(outcome)
    assert not [one for one in threading.enumerate() if "time limit" in one.name]


def test_a_cancelled_run_is_no_stopped_one():
    run = engine("cpu").start(task(), batches(), epochs=10**6, max_time=1000.0)
    run.cancel()
    assert run.wait(PATIENCE).status == "cancelled"


# Rules


class After:
    """Ends a run after so many reports; each run has a count of its own."""

    def __init__(self, many: int) -> None:
        self.many = many

    def begin(self) -> Any:
        left = self.many

        def judge(report: Any) -> str | None:
            nonlocal left
            left -= 1
            return f"seen {self.many}" if left == 0 else None

        return judge


@pytest.mark.parametrize("many", [1, 3])
def test_a_rule_ends_a_run_and_is_told(many: int):
    rule = After(many)
    for _ in range(2):
        outcome = fit(batches(), epochs=50, stop_when=[rule, After(1000)], report_every=2)
        left_clean(outcome)
        assert outcome.status == "stopped"
        assert f"asked to stop: seen {many}" in outcome.notes
        assert len(outcome.reports) <= many + 1


def test_a_rule_that_raises_fails_the_run():
    class Wrong:
        def begin(self) -> Any:
            def judge(report: Any) -> str | None:
                raise ValueError("no such metric")

            return judge

    outcome = fit(batches(), stop_when=[Wrong()])
    left_clean(outcome)
    assert isinstance(outcome.error, ValueError)


# Refused


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"max_steps": 0}, "max_steps must be a whole number of at least 1"),
        ({"max_steps": True}, "max_steps"),
        ({"limit_batches": 1.5}, "limit_batches"),
        ({"overfit": -1}, "overfit"),
        ({"validate_every": 0}, "validate_every"),
        ({"validate_every": 3}, "there is no validation data"),
        ({"max_time": 0}, "max_time must be a number of seconds above 0"),
        ({"max_time": "1"}, "max_time"),
        ({"stop_when": After(1)}, "stop_when must be a list"),
        ({"checkpoints": "folder"}, "checkpoints must be a Checkpoints"),
        ({"resume": 3}, "resume must be True or the directory"),
        ({"epochs": 0}, "epochs"),
        ({"overfit": 1, "resume": True}, "leave out `overfit`, or `resume`"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(how: dict[str, Any], said: str):
    with pytest.raises(TaskError, match=said):
        engine("double").start(task(), batches(), **how)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(TaskError) as told:
        engine("cpu").start(task(), batches(), max_steps=0, overfit=0, max_time=-1)
    assert all(name in str(told.value) for name in ("max_steps", "overfit", "max_time"))
