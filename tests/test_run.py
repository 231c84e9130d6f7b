"""The handle on a run in the background: requests, waiting, what it says meanwhile, and who is told."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from tools.small import BACKENDS, batches, loss_of, net, same, task, values

import interlock as il
from interlock.events import Closed, PhaseChanged, Report

both = pytest.mark.parametrize("backend", BACKENDS)


class Gate:
    """Batches, each of which waits until it is let through; says when one is asked for."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = list(data)
        self.asked = threading.Semaphore(0)
        self.through = threading.Semaphore(0)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            self.asked.release()
            assert self.through.acquire(timeout=30)
            yield batch

    def until(self, count: int) -> None:
        """Let batches through until the one after them is asked for."""
        for _ in range(count):
            assert self.asked.acquire(timeout=30)
            self.through.release()
        assert self.asked.acquire(timeout=30)

    def open(self) -> None:
        """Let everything through."""
        self.through.release(1000)


class Listener:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.ended = threading.Event()

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def on_end(self, lost: int) -> None:
        self.ended.set()


def start(backend: str, what: il.Task | None = None, data: Any = None, **more: Any) -> il.Run:
    engine = il.Engine(backend, **more.pop("engine", {}))
    return engine.start(what or task(), batches() if data is None else data, **more)


def boom(error: BaseException, hook: Callable[..., Any] = loss_of) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        raise error

    return fails


def rests_in(run: il.Run, phase: str) -> None:
    """Wait until the run is in a phase."""
    end = time.monotonic() + 30
    while run.phase != phase:
        assert time.monotonic() < end, run
        time.sleep(0.001)


# A run that ends well


@both
def test_a_finished_run(backend: str):
    run = start(backend, epochs=2)
    outcome = run.wait(30)
    assert outcome.status == "finished"
    assert outcome.ok
    assert run.done()
    assert not run.cancelled()
    assert run.wait() is run.result() is outcome
    assert run.exception() is None
    assert run.phase == "closed" == run.history[-1].phase
    assert run.history == outcome.history
    assert run.step == outcome.steps == 12
    assert (run.snapshot().doing, run.snapshot().stack) == ("closed", "")


def test_requests_after_the_end_change_nothing():
    run = start("cpu")
    outcome = run.wait(30)
    run.stop()
    run.cancel()
    assert run.wait() is outcome
    assert outcome.status == "finished"
    assert not run.cancelled()


@both
def test_it_trains_as_fit_does(backend: str):
    by_fit = il.Engine(backend).fit(task(), batches(), epochs=2)
    by_start = start(backend, epochs=2).result(30)
    assert same(values(by_fit.model), values(by_start.model))


# Errors


@both
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_the_error_is_the_same_object_everywhere(backend: str, error: BaseException):
    run = start(backend, task(loss=boom(error)))
    outcome = run.wait(30)
    assert outcome.error is error
    assert run.exception() is error
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            run.result()
        assert raised.value is error
    assert outcome.status == ("failed" if isinstance(error, Exception) else "cancelled")
    assert run.cancelled() == (outcome.status == "cancelled")
    assert not outcome.ok
    error.__traceback__ = None


def test_without_a_thread_it_closes_at_once(monkeypatch: pytest.MonkeyPatch):
    seen = Listener()
    engine = il.Engine("cpu", observers=[seen])
    plain = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("interlock run"):
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        engine.start(task(), batches())
    assert seen.ended.wait(10)
    assert isinstance(seen.events[-1], Closed)


# Waiting


def test_wait_says_what_it_is_doing_when_the_time_is_up():
    gate = Gate(batches())
    run = start("cpu", data=gate)
    gate.until(2)
    for waits in (run.wait, run.result, run.exception):
        with pytest.raises(il.errors.NotFinished, match=r"not finished after 0\.01 s: training.*in loader"):
            waits(0.01)
    with pytest.raises(TimeoutError):
        run.wait(0)
    assert not run.done()
    assert not run.cancelled()
    assert run.step == 2
    gate.open()
    assert run.wait(30).status == "finished"


def test_a_run_cannot_wait_for_itself():
    caught: list[BaseException] = []
    box: list[il.Run] = []
    ready = threading.Event()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        assert ready.wait(30)
        for waits in (box[0].wait, box[0].result, box[0].exception):
            try:
                waits()
            except il.errors.RunInUse as error:
                caught.append(error)
        return loss_of(model, batch)

    run = start("cpu", task(loss=loss), batches(1))
    box.append(run)
    ready.set()
    assert run.wait(30).status == "finished"
    assert len(caught) == 3
    box.clear()


@both
def test_await(backend: str):
    async def main() -> tuple[il.Outcome, il.Outcome]:
        run = start(backend)
        return await run, await run

    first, second = asyncio.run(main())
    assert first is second
    assert first.status == "finished"


def test_await_gives_the_outcome_of_a_failed_run():
    error = ValueError("boom")

    async def main() -> il.Outcome:
        return await start("cpu", task(loss=boom(error)))

    assert asyncio.run(main()).error is error


def test_giving_up_an_await_leaves_the_run_alone():
    gate = Gate(batches())
    run = start("cpu", data=gate)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_outcome(run)), 0.05)

    asyncio.run(main())
    assert not run.done()
    gate.open()
    assert run.wait(30).status == "finished"


async def _outcome(run: il.Run) -> il.Outcome:
    return await run


# Requests


@both
def test_stop_keeps_the_results(backend: str):
    gate = Gate(batches())
    run = start(backend, data=gate)
    gate.until(2)
    run.stop()
    assert run.snapshot().doing.startswith("stopping: in loader")
    gate.open()
    outcome = run.result(30)
    assert (outcome.status, outcome.ok, outcome.steps) == ("stopped", True, 3)
    assert not run.cancelled()
    assert "stopping" in [entry.phase for entry in run.history]
    as_far = il.Engine(backend).fit(task(), batches()[:3])
    assert same(values(outcome.model), values(as_far.model))
    assert outcome.metrics["loss"] == as_far.metrics["loss"]


@both
def test_cancel_in_mid_epoch(backend: str):
    gate = Gate(batches())
    run = start(backend, data=gate)
    gate.until(2)
    run.cancel()
    assert run.snapshot().doing.startswith("cancelling: in loader")
    assert not run.cancelled()
    gate.open()
    outcome = run.wait(30)
    assert (outcome.status, outcome.verdict, outcome.steps) == ("cancelled", "clean", 3)
    assert run.cancelled()
    with pytest.raises(il.errors.Cancelled, match="after step 3") as raised:
        run.result()
    assert raised.value is outcome.error
    assert outcome.residue.bytes == 0


@both
def test_cancel_in_mid_validation(backend: str):
    gate = Gate(batches())
    run = start(backend, validate=gate, epochs=3)
    gate.until(1)
    assert run.phase == "validating"
    run.cancel()
    assert run.snapshot().doing.startswith("cancelling: validating for")
    gate.open()
    outcome = run.wait(30)
    assert outcome.status == "cancelled"
    assert outcome.failure is not None
    assert outcome.failure.phase == "validating"
    assert outcome.steps == 6
    assert outcome.model.training


def test_cancel_before_the_first_step():
    held, go = threading.Event(), threading.Event()

    def build() -> Any:
        held.set()
        assert go.wait(30)
        return net()

    run = start("double", task(model=build))
    assert held.wait(30)
    assert run.phase == "placing"
    run.cancel()
    go.set()
    outcome = run.wait(30)
    assert (outcome.status, outcome.verdict, outcome.steps) == ("cancelled", "clean", 0)


@pytest.mark.parametrize(
    ("requests", "status"), [(("stop", "cancel"), "cancelled"), (("cancel", "stop"), "cancelled")]
)
def test_cancel_wins_over_stop(requests: tuple[str, str], status: str):
    gate = Gate(batches())
    run = start("cpu", data=gate)
    gate.until(1)
    for request in requests:
        getattr(run, request)()
    gate.open()
    assert run.wait(30).status == status


# What it says meanwhile


def test_snapshot():
    gate = Gate(batches())
    run = start("cpu", data=gate, epochs=2)
    gate.until(3)
    seen = run.snapshot()
    assert (seen.phase, seen.step, seen.epoch) == ("training", 3, 0)
    assert seen.doing.startswith("in loader, ")
    assert "in __iter__" in seen.stack
    assert "self.through.acquire" in seen.stack
    assert str(seen).startswith("training, epoch 1, after step 3: in loader")
    assert repr(run) == f"<Run {run.id} training, 3 steps>"
    gate.open()
    run.wait(30)


def test_the_phase_is_always_that_of_the_last_entry():
    run = start("double", validate=batches(1), epochs=150, data=batches(1))
    looks, wrong = 0, []
    previous = run.history
    while not run.done():
        before = run.history
        phase = run.phase
        after = run.history
        if phase not in [entry.phase for entry in after[len(before) - 1 :]]:
            wrong.append(phase)
        if before[: len(previous)] != previous or after[: len(before)] != before:
            wrong.append("the past has changed")
        looks, previous = looks + 1, after
    assert wrong == []
    assert looks > 10
    assert run.wait(30).status == "finished"
    assert run.phase == run.history[-1].phase == "closed"


def test_context_variables_are_copied():
    who = contextvars.ContextVar("who", default="nobody")
    seen: list[str] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.append(who.get())
        who.set("the run")
        return loss_of(model, batch)

    token = who.set("the caller")
    start("cpu", task(loss=loss), batches(2)).result(30)
    assert seen == ["the caller", "the run"]
    assert who.get() == "the caller"
    who.reset(token)


# Two at once


@both
def test_two_at_once_do_as_one_after_the_other(backend: str):
    def given(seed: int) -> il.Task:
        return task(
            model=copy.deepcopy(net(seed)),
            optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01),
        )

    data = [batches(30, seed=1), batches(30, seed=2)]
    apart = [il.Engine(backend).fit(given(seed), data[seed], epochs=2) for seed in (0, 1)]
    engine = il.Engine(backend)
    runs = [engine.start(given(seed), data[seed], epochs=2) for seed in (0, 1)]
    together = [run.result(60) for run in runs]
    for one, other in zip(apart, together, strict=True):
        assert same(values(one.model), values(other.model))
        assert one.metrics == other.metrics
        assert other.residue.bytes == 0
    assert not same(values(together[0].model), values(together[1].model))


def test_one_that_fails_does_not_disturb_the_other():
    engine = il.Engine("double")
    gate = Gate(batches())
    good = engine.start(task(), gate)
    gate.until(2)
    bad = engine.start(task(optimizer=boom(ValueError("boom"))), batches())
    assert bad.wait(30).status == "failed"
    gate.open()
    assert same(values(good.result(30).model), values(engine.fit(task(), batches()).model))


# Observers


@both
def test_whoever_comes_late_is_told_everything(backend: str):
    early, middle, late = Listener(), Listener(), Listener()
    gate = Gate(batches())
    run = start(backend, data=gate, engine={"observers": [early], "report_every": 2})
    gate.until(3)
    run.subscribe(middle)
    gate.open()
    outcome = run.wait(30)
    run.subscribe(late)
    for listener in (early, middle, late):
        assert listener.ended.wait(10)
        assert listener.events == early.events
    assert isinstance(late.events[-1], Closed)
    changes = [event for event in late.events if isinstance(event, PhaseChanged)]
    assert [change.phase for change in changes] == [entry.phase for entry in outcome.history[1:]]
    assert [event for event in late.events if isinstance(event, Report)] == list(outcome.reports)


def test_an_observer_that_raises_is_reported_and_no_more():
    seen: list[Any] = []

    def faulty(event: Any) -> None:
        seen.append(event)
        raise ValueError("not today")

    outcome = start("cpu", engine={"observers": [faulty]}).wait(30)
    assert outcome.status == "finished"
    assert f"observer faulty raised {len(seen)} time(s)" in outcome.notes
    assert isinstance(seen[-1], Closed)


def test_an_observer_that_blocks_loses_events_and_stalls_nobody():
    block, gone = threading.Event(), threading.Event()
    seen: list[Any] = []

    class Slow:
        def __call__(self, event: Any) -> None:
            seen.append(event)
            block.wait(60)

        def on_end(self, lost: int) -> None:
            seen.append(lost)
            gone.set()

    everything = Listener()
    gate = Gate(batches())
    run = start("cpu", data=gate, engine={"observers": [everything], "report_every": 1})
    gate.until(0)
    subscription = run.subscribe(Slow(), capacity=2)
    gate.open()
    outcome = run.wait(20)
    assert outcome.status == "finished"
    assert not block.is_set()
    assert "observer Slow is blocked; its thread was left behind" in outcome.notes
    assert f"observer Slow was too slow and lost {subscription.lost} event(s)" in outcome.notes
    block.set()
    assert gone.wait(10)
    assert subscription.lost > 0
    assert seen[-1] == subscription.lost
    assert len(seen) - 1 + subscription.lost == len(everything.events)
