"""The order of a run by handles: stale ones raise, a block ends its run in any case, one call at a time.

That type checkers reject wrong programs is tested in `test_typing.py`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.small import BACKENDS, NAMES, batches, left_clean, loss_of, net, same, sgd, task, values
from torch import nn

import interlock as il
from interlock import errors

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)

# Stale handles


@on_each_backend
def test_a_run_by_handles_trains_as_fit_does(backend: str) -> None:
    with il.Engine(backend).open(task(model=net())) as created:
        training = created.place().optimize().train()
        for batch in batches():
            training.step(batch)
        outcome = training.finish()
    fitted = il.Engine(backend).fit(task(model=net()), batches())
    left_clean(outcome)
    assert created.outcome is outcome
    assert outcome.status == "finished"
    assert outcome.path == fitted.path
    assert same(values(outcome.model), values(fitted.model))


@on_each_backend
def test_each_handle_raises_once_its_phase_is_over(backend: str) -> None:
    """Also by a method that was taken while the handle was good."""
    with il.Engine(backend).open(task()) as created:
        place = created.place
        placed = place()
        stale(place, "place", "created", "placed")
        stale(created.offload, "offload", "created", "placed")
        optimize, offload = placed.optimize, placed.offload
        ready = optimize()
        stale(optimize, "optimize", "placed", "ready")
        stale(offload, "offload", "placed", "ready")
        stale(lambda: placed.model, "model", "placed", "ready")
        train = ready.train
        training = train()
        stale(train, "train", "ready", "training")
        stale(ready.offload, "offload", "ready", "training")
        step, validate, finish, stop = training.step, training.validate, training.finish, training.stop
        step(batches()[0])
        before = created.phase, len(created._session.driver.slot.history)
        stale(place, "place", "created", "training")
        assert (created.phase, len(created._session.driver.slot.history)) == before  # nothing has changed
        outcome = finish()
    for late in (
        lambda: step(batches()[0]),
        lambda: validate(batches()),
        finish,
        stop,
        place,
        optimize,
        train,
    ):
        with pytest.raises(
            errors.StaleHandle, match=r"the run is closed\. A run is single-use; open another"
        ):
            late()
    assert outcome.steps == 1
    left_clean(outcome)
    with pytest.raises(errors.StaleHandle, match="the run is closed"), created:
        pass


def stale(call: Callable[[], Any], what: str, of: str, now: str) -> None:
    text = (
        f"'{what}' on the handle of phase '{of}', which is over: the run is in phase '{now}'. Use the handle"
    )
    with pytest.raises(errors.StaleHandle, match=re.escape(text)):
        call()


@on_each_backend
def test_all_handles_tell_the_phase_of_the_run(backend: str) -> None:
    with il.Engine(backend).open(task()) as created:
        assert created.phase == "created"
        assert created.outcome is None
        placed = created.place()
        ready = placed.optimize()
        assert [h.phase for h in (created, placed, ready)] == ["ready"] * 3
        training = ready.train()
    assert [h.phase for h in (created, placed, ready, training)] == ["closed"] * 4


@on_each_backend
def test_the_placed_model_is_the_one_that_trains(backend: str) -> None:
    model = net()
    held = model.body.weight
    with il.Engine(backend).open(task(model=model)) as created:
        placed = created.place()
        assert placed.model is model
        assert (model.body.weight is held) is (backend == "cpu")
        placed.offload()
    assert model.body.weight is held


# The `with` block


class Planted(Exception):
    """Raised inside a block."""


@on_each_backend
@pytest.mark.parametrize("where", ["created", "placed", "ready", "training", "stepped"])
@pytest.mark.parametrize("error", [Planted("inside"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_the_block_ends_the_run_and_is_the_same_object(
    backend: str, where: str, error: BaseException
) -> None:
    created = il.Engine(backend).open(task())

    def block() -> None:
        with created:
            reach(created, where)
            raise error

    with pytest.raises(type(error)) as caught:
        block()
    assert caught.value is error
    outcome = created.outcome
    assert outcome is not None
    left_clean(outcome)
    assert outcome.error is error
    assert outcome.status == ("failed" if isinstance(error, Exception) else "cancelled")
    assert outcome.errors == ()


def reach(created: il.Created, where: str) -> None:
    if where == "created":
        return
    placed = created.place()
    if where == "placed":
        return
    ready = placed.optimize()
    if where == "ready":
        return
    training = ready.train()
    if where == "stepped":
        training.step(batches()[0])


@on_each_backend
@pytest.mark.parametrize("where", ["created", "placed", "ready", "training", "stepped"])
def test_a_block_that_is_simply_left_ends_the_run(backend: str, where: str) -> None:
    model = net()
    before = values(model)
    with il.Engine(backend).open(task(model=model)) as created:
        reach(created, where)
    outcome = created.outcome
    assert outcome is not None
    left_clean(outcome)
    assert outcome.status == "stopped"
    assert outcome.ok
    assert outcome.steps == (where == "stepped")
    assert all(torch.equal(values(model)[n], before[n]) for n in NAMES) is (where != "stepped")
    if where in ("training", "stepped"):
        assert [e.event for e in outcome.history if e.source == "training"][-1] == "stop"


@on_each_backend
def test_a_block_left_after_the_end_changes_nothing(backend: str) -> None:
    with il.Engine(backend).open(task()) as created:
        outcome = created.place().offload()
    assert created.outcome is outcome
    assert outcome.status == "stopped"
    left_clean(outcome)


@on_each_backend
def test_an_error_after_the_end_passes_and_the_outcome_stays(backend: str) -> None:
    created = il.Engine(backend).open(task())

    def block() -> None:
        with created:
            created.place().optimize().train().finish()
            raise Planted

    with pytest.raises(Planted):
        block()
    assert created.outcome is not None
    assert created.outcome.status == "finished"
    assert created.outcome.error is None


@on_each_backend
@pytest.mark.parametrize("hook", ["model", "optimizer", "loss", "metrics"])
def test_an_error_in_a_hook_ends_the_run_where_it_is_called(backend: str, hook: str) -> None:
    error = Planted(hook)

    def fail(*_: Any) -> Any:
        raise error

    created = il.Engine(backend).open(task(**{hook: fail}))

    def block() -> None:
        with created:
            training = created.place().optimize().train()
            training.step(batches()[0])
            training.validate(batches())

    with pytest.raises(Planted) as caught:
        block()
    assert caught.value is error
    assert created.outcome is not None
    left_clean(created.outcome)
    assert created.outcome.error is error
    phase = {"model": "placing", "optimizer": "optimizing", "loss": "training", "metrics": "validating"}[hook]
    assert created.outcome.failure is not None
    assert created.outcome.failure.phase == phase


@on_each_backend
def test_an_error_in_a_step_that_is_caught_leaves_a_closed_run(backend: str) -> None:
    """The run does not go on behind one's back; what one catches does not bring it back."""
    with il.Engine(backend).open(task()) as created:
        training = created.place().optimize().train()
        with pytest.raises(TypeError):
            training.step(3)
        assert created.phase == "closed"
        with pytest.raises(errors.StaleHandle, match="the run is closed"):
            training.step(batches()[0])
    assert created.outcome is not None
    assert created.outcome.status == "failed"


@on_each_backend
def test_a_step_returns_the_loss_without_a_graph(backend: str) -> None:
    with il.Engine(backend).open(task()) as created:
        loss = created.place().optimize().train().step(batches()[0])
        assert loss.ndim == 0
        assert loss.grad_fn is None
        assert not loss.requires_grad
        del loss
    assert created.outcome is not None
    left_clean(created.outcome)


# From two places


@on_each_backend
@pytest.mark.parametrize("hook", ["model", "optimizer", "loss", "metrics"])
def test_a_call_from_inside_a_hook_is_refused_and_changes_nothing(backend: str, hook: str) -> None:
    seen: list[tuple[str, str, str]] = []  # texts: the errors would keep the frames that they passed
    handles: dict[str, Any] = {}

    def inside(*arguments: Any) -> Any:
        phase = handles["created"].phase
        for call in (
            lambda: handles["created"].place(),
            lambda: handles["placed"].optimize(),
            lambda: handles["training"].step(batches()[0]),
            lambda: handles["training"].finish(),
        ):
            try:
                call()
            except (errors.RunInUse, errors.StaleHandle) as error:
                seen.append((f"{type(error).__name__}: {error}", phase, handles["created"].phase))
            except KeyError:
                continue  # that handle does not exist yet
        return {"model": net, "optimizer": sgd, "loss": loss_of, "metrics": lambda *_: {}}[hook](*arguments)

    with il.Engine(backend).open(task(**{hook: inside})) as created:
        handles["created"] = created
        handles["placed"] = created.place()
        handles["training"] = handles["placed"].optimize().train()
        handles["training"].step(batches()[0])
        handles["training"].validate(batches(1))
        outcome = handles["training"].finish()
    assert outcome.status == "finished"
    left_clean(outcome)
    assert seen
    assert all(before == after for _, before, after in seen)
    texts = [text for text, _, _ in seen if text.startswith("RunInUse")]
    assert texts
    assert "by the call whose hook this is" in texts[0]
    assert "nothing has changed" in texts[0]


def test_a_call_from_another_thread_meanwhile_is_refused() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inside.set()
        assert go_on.wait(30)
        return loss_of(model, batch)

    refused: list[BaseException] = []

    def intrude() -> None:
        inside.wait(30)
        try:
            training.step(batches()[1])
        except BaseException as error:
            refused.append(error)
        go_on.set()

    with il.Engine("cpu").open(task(loss=loss)) as created:
        training = created.place().optimize().train()
        thread = threading.Thread(target=intrude)
        thread.start()
        training.step(batches()[0])
        thread.join()
        outcome = training.finish()
    (error,) = refused
    assert isinstance(error, errors.RunInUse)
    assert outcome.steps == 1


# Planted faults


@pytest.mark.parametrize(
    "check",
    [
        test_each_handle_raises_once_its_phase_is_over,
        test_an_error_in_a_step_that_is_caught_leaves_a_closed_run,
    ],
)
def test_handles_without_their_flag_are_found(
    check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from interlock import handles

    monkeypatch.setattr(handles._Handle, "_check", lambda self, what: None)
    with pytest.raises(BaseException) as caught:  # an IllegalTransition, or the test's own failure
        check("cpu")
    assert not isinstance(caught.value, errors.StaleHandle)


def test_a_block_that_does_not_end_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(il.Created, "__exit__", lambda self, *_: None)
    with pytest.raises(AssertionError):
        test_a_block_that_is_simply_left_ends_the_run("cpu", "ready")
