"""Tasks: what is wrong with one is said at once; data, validation and the settings of an engine."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.small import BACKENDS, Net, batches, failed, finished, loss_of, net, run, sgd, task
from torch import nn

import interlock as il
from interlock import errors
from interlock.evaluation import Means

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)

# Arguments

BAD = {
    "model": (3, "model is a int: pass an nn.Module, or a function that builds one"),
    "optimizer": (3, "optimizer is a int: pass a function from the placed model"),
    "loss": (3, "loss is a int: pass a function from model and batch to a scalar tensor, or leave it out"),
    "metrics": ([], "metrics is a list: pass a function"),
    "scheduler": ("cosine", "scheduler is a str: pass a function from the optimizer"),
    "scheduler_every": ("week", "scheduler_every is 'week': pass 'step' or 'epoch'"),
    "data": ([1], "data is a list: pass a function from nothing to batches"),
    "epochs": (0, "epochs is 0: pass a whole number of at least 1"),
    "batch_size": (32, "batch_size is a int: pass a function from a batch"),
    "name": (None, "name is None: pass a string"),
}
"""Argument -> a wrong value, and what must be said."""


@given(st.sets(st.sampled_from(sorted(BAD)), min_size=1))
def test_all_that_is_wrong_is_said_at_once(wrong: set[str]) -> None:
    with pytest.raises(errors.TaskError) as caught:
        task(**{name: BAD[name][0] for name in wrong})
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(wrong)
    assert all(any(BAD[name][1] in line for line in lines) for name in wrong)


def test_a_problem_that_nobody_looks_for_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without its check, a wrong argument passes."""
    monkeypatch.setattr(il.Task, "_wrong_settings", lambda _: iter(()))
    assert task(epochs=0).epochs == 0


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "2", None])
def test_bad_epochs(epochs: Any) -> None:
    with pytest.raises(errors.TaskError, match=r"epochs is .*: pass a whole number of at least 1"):
        task(epochs=epochs)
    if epochs is not None:
        with pytest.raises(errors.TaskError, match="epochs must be a whole number of at least 1"):
            il.Engine("cpu").fit(task(), batches(), epochs=epochs)


@pytest.mark.parametrize(
    "setting",
    [
        {"report_every": 0},
        {"report_every": -1},
        {"report_every": 1.5},
        {"report_every": True},
        {"report_every": "1"},
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": float("nan")},
        {"deadline": float("inf")},
        {"deadline": True},
        {"deadline": "soon"},
        {"deadline": None},
        {"exit": "stay"},
        {"nonfinite": "warn"},
    ],
    ids=str,
)
def test_bad_settings(setting: dict[str, Any]) -> None:
    with pytest.raises(errors.TaskError, match=next(iter(setting))):
        il.Engine("cpu", **setting)


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(il.errors.InterlockError) as caught:
        il.Engine("abacus")
    assert all(name in str(caught.value) for name in ("abacus", "cpu"))


# Data


def test_shapes_of_data() -> None:
    one, two = batches(1), batches(2)
    assert task(data=lambda: il.Data(one, two)).load() == (one, two)
    assert task(data=lambda: (one, two)).load() == (one, two)
    assert task(data=lambda: (one, None)).load() == (one, None)
    assert task(data=lambda: one).load() == (one, None)
    assert task(data=lambda: tuple(batches(3))).load().validate is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "train part is None.*is a `return` missing"),
        (3, "train part is a int"),
        (([], 3), "validate part is a int"),
    ],
)
def test_data_that_is_none(made: Any, says: str) -> None:
    with pytest.raises(errors.TaskError, match=says):
        task(data=lambda: made).load()


def test_no_data_at_all() -> None:
    with pytest.raises(errors.TaskError, match="has no data: pass batches to `fit`"):
        il.Engine("cpu").fit(task())


@on_each_backend
def test_empty_loaders(backend: str) -> None:
    error = failed(run(backend, task(), []), errors.DataError, "training")
    assert "the training data, a list, gave no batch in epoch 1: it is empty" in str(error)
    error = failed(run(backend, task(), validate=[]), errors.DataError, "validating")
    assert "the validation data, a list, gave no batch in epoch 1" in str(error)


@on_each_backend
def test_an_iterator_is_used_up(backend: str) -> None:
    class Stream:
        """Might start anew when asked for its iterator, and does not."""

        def __init__(self) -> None:
            self.left = iter(batches(3))

        def __iter__(self) -> Iterator[Any]:
            return iter(self.left)

        def __next__(self) -> Any:
            return next(self.left)

    outcome = run(backend, task(), Stream(), epochs=2)
    error = failed(outcome, errors.DataError, "training")
    assert "gave no batch in epoch 2: it is an iterator" in str(error)
    assert "Pass something that starts anew for each epoch" in str(error)
    assert outcome.steps == 3


@on_each_backend
def test_a_batch_that_does_not_fit(backend: str) -> None:
    raised: list[Exception] = []

    def loss(model: Net, batch: Any) -> torch.Tensor:
        try:
            return loss_of(model, batch)
        except RuntimeError as error:
            raised.append(error)
            raise

    bad = (torch.ones(2, 9), torch.zeros(2, dtype=torch.long))
    for where, data, checked in (
        ("step 3", [*batches(2), bad], None),
        ("validation batch 2", batches(2), [*batches(1), bad]),
    ):
        error = failed(run(backend, task(loss=loss), data, validate=checked), RuntimeError)
        assert error is raised[-1]
        assert error.__notes__ == [f"interlock: in {where}, on a batch of (float32[2, 9], int64[2])"]


# The model's own loss


class Own(Net):
    """Computes its loss; `shape` gives it the form in which it is returned."""

    shape: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.shape(nn.functional.cross_entropy(super().forward(x), y))


@on_each_backend
@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("shape", [lambda loss: SimpleNamespace(loss=loss), lambda loss: {"loss": loss}])
def test_the_loss_of_the_output(backend: str, kind: Any, shape: Any) -> None:
    def build() -> Own:
        model = Own()
        model.load_state_dict(net().state_dict())
        model.shape = shape
        return model

    data = [kind(x=x, y=y) for x, y in batches()]
    mine = finished(run(backend, task(model=build, loss=None), data))
    plain = finished(run(backend, task()))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in mine.state_dict().items())


@on_each_backend
def test_an_output_without_loss(backend: str) -> None:
    outcome = run(backend, task(model=lambda: nn.Linear(4, 3), loss=None), [torch.ones(2, 4)])
    assert "the model returned Tensor without `.loss`" in str(failed(outcome, errors.TaskError, "training"))


# Validation

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)


def reference(data: list[torch.Tensor]) -> float:
    """The exact mean over samples of the batches' own means, as the device computes these."""
    total = sum(Fraction(float(x.mean())) * len(x) for x in data if len(x))
    return float(total / sum(map(len, data)))


def validated(data: list[torch.Tensor]) -> dict[str, float]:
    """What a validation over `data` gives, by an engine that took one step."""
    mine = task(
        loss=lambda model, batch: loss_of(model, batch) if isinstance(batch, tuple) else batch.mean(),
        metrics=lambda model, batch: {"mean": batch.mean(), "number": float(len(batch))},
    )
    outcome = run("cpu", mine, batches(1), validate=data)
    finished(outcome)
    return dict(outcome.metrics)


@settings(max_examples=15)
@given(SIZES, st.integers(0, 1000))
def test_metrics_are_weighted_by_samples(sizes: list[int], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    data = [torch.randn(size, 2, generator=made) for size in sizes]
    found = validated(data)
    assert found["val_mean"] == found["val_loss"] == pytest.approx(reference(data), rel=1e-14, abs=1e-15)
    assert found["val_number"] == sum(size * size for size in sizes) / sum(sizes)


def test_a_mean_over_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each batch counts once, whatever its size."""
    add = Means.add
    monkeypatch.setattr(
        Means, "add", lambda self, name, value, weight: add(self, name, value, min(weight, 1))
    )
    data = [torch.zeros(1, 2), torch.ones(3, 2)]
    assert validated(data)["val_mean"] == 0.5 != reference(data) == 0.75


def test_a_batch_size_of_ones_own() -> None:
    data = [torch.zeros(1, 2), torch.ones(1, 2)]
    sized = task(
        loss=lambda model, batch: loss_of(model, batch) if isinstance(batch, tuple) else batch.mean(),
        batch_size=lambda batch: 3 if batch.any() else 1,
    )
    assert run("cpu", sized, batches(1), validate=data).metrics["val_loss"] == 0.75
    wrong = run("cpu", task(batch_size=lambda batch: 1.5), validate=batches(1))
    assert "must be a whole number" in str(failed(wrong, errors.TaskError, "validating"))


@on_each_backend
@pytest.mark.parametrize("strike", [None, RuntimeError("struck"), KeyboardInterrupt()], ids=repr)
def test_flags_and_gradient_mode_are_restored(backend: str, strike: BaseException | None) -> None:
    model = net()
    model.body.eval()  # frozen in evaluation mode by the user
    seen = []

    def metrics(model: Net, batch: Any) -> dict[str, float]:
        seen.append((model.training, model.head.training, torch.is_grad_enabled()))
        if strike is not None:
            raise strike
        return {}

    engine = il.Engine(backend)
    assert torch.is_grad_enabled()
    if strike is None:
        engine.fit(task(model=model, metrics=metrics), batches(2), validate=batches(1), epochs=2)
    else:
        with pytest.raises(type(strike)) as caught:
            engine.fit(task(model=model, metrics=metrics), batches(2), validate=batches(1))
        assert caught.value is strike
    assert set(seen) == {(False, False, False)}
    assert (model.training, model.head.training, model.body.training) == (True, True, False)
    assert torch.is_grad_enabled()


@on_each_backend
def test_metrics_that_are_none(backend: str) -> None:
    for made, says in ((None, "returned NoneType"), ({"m": torch.ones(2)}, re.escape("of shape [2]"))):
        outcome = run(backend, task(metrics=lambda *_, made=made: made), validate=batches(1))
        assert re.search(says, str(failed(outcome, errors.TaskError, "validating")))


def test_tasks_cannot_be_changed() -> None:
    made = task(optimizer=sgd)
    with pytest.raises(AttributeError):
        made.epochs = 3  # type: ignore[misc]
