"""Stop rules: each against a plain reference, in a run, over a resume, and with what is wrong named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from interlock import Checkpoints, Engine, Outcome, Task
from interlock.errors import CheckpointError, TaskError
from interlock.events import Report
from interlock.stopping import EarlyStopping, StopAt

VALUES = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.sampled_from([math.nan, math.inf, -math.inf, 0.5])),
    max_size=12,
)
RULES = st.builds(
    EarlyStopping,
    st.just("val_score"),
    patience=st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.5, 1.0]),
    lower_is_better=st.booleans(),
    after=st.integers(0, 4),
)


def report(step: int, **metrics: float) -> Report:
    return Report(step, step // 10, metrics, 0.0)


def first_stop(judge: Any, values: list[float], name: str = "val_score") -> int | None:
    """The index of the value at which it asks to stop."""
    for index, value in enumerate(values):
        if judge(report(index, **{name: value})):
            return index
    return None


def reference(rule: EarlyStopping, values: list[float]) -> int | None:
    """Looks at the whole list for each prefix: when was the last improvement, and what came since?"""
    sign = 1 if rule.lower_is_better else -1
    worths = [math.inf if math.isnan(value) else sign * value for value in values]
    for end in range(len(worths)):
        last, best = -1, math.inf
        for index, worth in enumerate(worths[: end + 1]):
            if best - worth > rule.min_delta or (best == math.inf and worth < math.inf):
                last, best = index, worth
        counted = [index for index in range(last + 1, end + 1) if index >= rule.after]
        if len(counted) >= rule.patience:
            return end
    return None


@given(RULES, VALUES)
def test_it_stops_where_the_reference_does(rule: EarlyStopping, values: list[float]):
    assert first_stop(rule.begin(), values) == reference(rule, values)


@given(RULES, VALUES, st.integers(0, 12))
def test_saved_and_restored_anywhere_it_stops_at_the_same_value(
    rule: EarlyStopping, values: list[float], cut: int
):
    judge, stop = rule.begin(), reference(rule, values)
    found = first_stop(judge, values[:cut])
    if found is None:
        again = rule.begin()
        again.load_state_dict(judge.state_dict())
        later = first_stop(again, values[cut:])
        found = None if later is None else later + len(values[:cut])
    assert found == stop


def test_the_reference_is_told_apart_from_a_wrong_judge():
    """The planted fault: one that counts NaN as an improvement."""
    rule = EarlyStopping("val_loss", patience=2)
    values = [1.0, math.nan, math.nan, math.nan]
    assert reference(EarlyStopping("val_loss", patience=2, lower_is_better=True), values) == 2
    assert first_stop(rule.begin(), values, "val_loss") == 2
    assert first_stop(rule.begin(), [v if v == v else -i for i, v in enumerate(values)], "val_loss") is None


@given(st.sampled_from([True, False]), VALUES, st.integers(-3, 3))
def test_good_enough_is_the_first_value_that_reaches_it(lower: bool, values: list[float], goal: int):
    rule = StopAt("val_score", goal, lower_is_better=lower)
    reached = [i for i, value in enumerate(values) if (value <= goal if lower else value >= goal)]
    assert first_stop(rule.begin(), values) == (reached[0] if reached else None)


def test_two_runs_of_one_rule_share_nothing():
    rule = EarlyStopping("loss", patience=1)
    one, other = rule.begin(), rule.begin()
    assert one(report(1, loss=1.0)) is None
    assert one(report(2, loss=2.0)) == "'loss' was not better than 1 1 time(s) in a row, now 2"
    assert other(report(1, loss=3.0)) is None
    assert other(report(2, loss=2.0)) is None


def test_without_any_number_it_says_so():
    judge = EarlyStopping("loss", patience=1).begin()
    assert judge(report(1, loss=math.nan)) == (
        "'loss' was not better than any number yet 1 time(s) in a row, now nan"
    )


# -- what is wrong is named ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"metric": ""}, "metric is ''"),
        ({"metric": 3}, "metric is 3"),
        ({"metric": "accuracy"}, "which way is better"),
        ({"metric": "loss", "lower_is_better": 1}, "lower_is_better is 1"),
        ({"metric": "loss", "patience": 0}, "patience is 0"),
        ({"metric": "loss", "patience": True}, "patience is True"),
        ({"metric": "loss", "min_delta": -0.1}, "min_delta is -0.1"),
        ({"metric": "loss", "min_delta": math.nan}, "min_delta is nan"),
        ({"metric": "loss", "min_delta": "a"}, "min_delta is 'a'"),
        ({"metric": "loss", "after": -1}, "after is -1"),
        ({"metric": "loss", "after": False}, "after is False"),
    ],
)
def test_a_wrong_setting_is_refused_and_named(settings: dict[str, Any], says: str):
    with pytest.raises(TaskError, match="EarlyStopping cannot judge like that") as caught:
        EarlyStopping(**settings)
    assert says in str(caught.value)


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(TaskError) as caught:
        EarlyStopping("accuracy", patience=0, after=-1)
    assert str(caught.value).count("\n  - ") == 3
    with pytest.raises(TaskError, match="value is nan"):
        StopAt("val_loss", math.nan)


@given(st.text(max_size=8) | st.sampled_from(["val_loss", "my_Error", "Lossless", "accuracy"]))
def test_the_direction_is_guessed_as_checkpoints_guess_it(name: str):
    def refused(make: Any) -> bool:
        try:
            make()
        except (TaskError, CheckpointError):
            return True
        return False

    assert refused(lambda: EarlyStopping(name)) == refused(lambda: Checkpoints("folder", best=name))


def test_a_validation_without_the_metric_is_an_error_that_names_what_came():
    judge = EarlyStopping("val_acc", lower_is_better=False).begin()
    assert judge(report(1, loss=1.0)) is None
    with pytest.raises(TaskError, match=r"up to step 2 only 'loss', 'val_loss', 'val_accuracy' came: name"):
        judge(report(2, val_loss=1.0, val_accuracy=0.5))


def test_a_training_metric_has_an_epoch_to_come():
    judge = StopAt("accuracy", 1.0, lower_is_better=False).begin()
    assert judge(report(1, loss=1.0)) is None
    assert judge(report(9, loss=1.0, val_accuracy=1.0)) is None
    with pytest.raises(TaskError, match="did you mean 'val_accuracy', which is its value in validation"):
        judge(report(10, loss=1.0))


def test_a_metric_that_came_once_may_be_missing_later():
    judge = EarlyStopping("val_loss").begin()
    assert judge(report(1, val_loss=1.0)) is None
    assert judge(report(30, val_other=1.0)) is None


# -- in runs ------------------------------------------------------------------------------------


def fitted(rate: float = 0.0, epochs: int = 6, **settings: Any) -> Outcome:
    torch.manual_seed(0)
    task = Task(
        model=lambda: nn.Linear(2, 1),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), rate),
        loss=lambda m, b: m(b).square().mean(),
    )
    data = [torch.ones(2, 2)] * 2
    return Engine("cpu").start(task, data, validate=data, epochs=epochs, **settings).wait(60)


def test_a_run_that_learns_nothing_is_stopped_and_says_why():
    outcome = fitted(stop_when=[EarlyStopping("val_loss", patience=2)])
    assert (outcome.status, outcome.steps) == ("stopped", 6)
    assert any("asked to stop: 'val_loss' was not better than" in note for note in outcome.notes)


def test_a_run_that_learns_goes_on_and_stops_when_good_enough():
    assert fitted(0.1, stop_when=[EarlyStopping("val_loss", patience=1)]).status == "finished"
    outcome = fitted(0.1, stop_when=[StopAt("val_loss", math.inf)])
    assert (outcome.status, outcome.steps) == ("stopped", 2)


def test_a_misspelt_metric_fails_the_run_at_the_first_validation():
    outcome = fitted(stop_when=[EarlyStopping("val_lossy")])
    assert (outcome.status, outcome.steps) == ("failed", 2)
    assert "'val_loss'" in str(outcome.failure)


def test_a_resumed_run_remembers_how_long_it_waited(tmp_path: Path):
    settings: dict[str, Any] = {"checkpoints": Checkpoints(tmp_path)}
    rule = EarlyStopping("val_loss", patience=3)
    assert fitted(epochs=2, stop_when=[rule], **settings).status == "finished"
    outcome = fitted(stop_when=[rule], resume=True, **settings)
    assert (outcome.status, outcome.steps) == ("stopped", 8)
    other = EarlyStopping("val_loss", lower_is_better=False)
    refused = fitted(stop_when=[other], resume=True, **settings)
    assert refused.status == "failed"
    assert "lower_is_better=False now" in str(refused.failure)
