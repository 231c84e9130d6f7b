"""User code that raises where nobody expects it, and observers that misbehave: the end still comes."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tools.small import batches, failed, finished, left_clean, loss_of, net, run, same, task
from torch import nn

import interlock as il
from interlock import errors
from interlock.backends.double import ReplacingDouble
from interlock.evidence import graph
from interlock.session import Session

WAIT = 20.0


class Boom(Exception):
    """Unmistakable."""


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise error

    return hook


# -- what is suspended goes on ------------------------------------------------------------------


def plain_generator() -> Iterator[Any]:
    local = ["mine"]
    try:
        raise Boom("kept")
    except Boom as error:
        yield error
    yield local


def test_a_suspended_generator_of_the_caller_goes_on():
    generator = plain_generator()
    outcome = run("double", task(loss=raising(next(generator))))
    failed(outcome, Boom)
    assert next(generator) == ["mine"]


def test_a_generator_in_which_a_run_failed_goes_on_after_the_error_struck_another_run():
    def runs_inside() -> Iterator[Any]:
        try:
            il.Engine("double").fit(task(loss=raising(Boom("once"))), batches())
        except Boom as error:
            yield error
        yield "went on"

    generator = runs_inside()
    failed(run("double", task(loss=raising(next(generator)))), Boom)
    assert next(generator) == "went on"


def test_a_suspended_coroutine_of_the_caller_goes_on():
    async def main() -> str:
        kept: list[BaseException] = []
        go_on = asyncio.Event()

        async def handler() -> str:
            try:
                await asyncio.sleep(0)
                raise Boom("kept")
            except Boom as error:
                kept.append(error)
            await go_on.wait()
            return "went on"

        handling = asyncio.create_task(handler())
        while not kept:
            await asyncio.sleep(0)
        outcome = await il.Engine("cpu").start(task(loss=raising(kept[0])), batches())
        assert outcome.error is kept[0]
        go_on.set()
        return await asyncio.wait_for(handling, WAIT)

    assert asyncio.run(main()) == "went on"


def test_a_suspended_async_generator_of_the_caller_goes_on():
    async def main() -> str:
        async def source() -> Any:
            try:
                raise Boom("kept")
            except Boom as error:
                yield error
            yield "went on"

        values = source()
        error = await anext(values)
        await il.Engine("cpu").start(task(loss=raising(error)), batches())
        return await anext(values)

    assert asyncio.run(main()) == "went on"


@pytest.mark.parametrize("inner", [False, True], ids=["the loader itself", "a generator within it"])
def test_a_finished_generator_of_the_loader_keeps_nothing_on_the_device(inner: bool):
    double = ReplacingDouble()

    def broken() -> Iterator[Any]:
        placed = double.move(torch.zeros(7))
        yield batches()[0]
        raise Boom(str(placed.shape))

    def loader() -> Iterator[Any]:
        if inner:
            yield from broken()
        else:
            placed = double.move(torch.zeros(7))
            yield batches()[0]
            raise Boom(str(placed.shape))

    gc.collect()
    gc.disable()
    try:
        outcome = il.Engine(double).start(task(), loader()).wait(WAIT)
        failed(outcome, Boom)
    finally:
        gc.enable()


# -- exceptions whose class is hostile ------------------------------------------------------------


class ExitsInStr(Exception):
    def __str__(self) -> str:
        raise SystemExit("in str")


class ExitsInRepr(ExitsInStr):
    __repr__ = ExitsInStr.__str__


class HidesTraceback(Exception):
    @property
    def __traceback__(self) -> Any:
        raise RuntimeError("no traceback")


class HidesContext(Exception):
    @property
    def __context__(self) -> Any:
        raise RuntimeError("no context")

    __cause__ = __suppress_context__ = __context__


class HidesNotes(Exception):
    @property
    def __notes__(self) -> Any:
        raise RuntimeError("no notes")


class HidesClass(Exception):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class HidesMembers(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> Any:
        raise RuntimeError("no members")


class Untrue(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


HOSTILE: tuple[Callable[[], Exception], ...] = (
    ExitsInStr,
    ExitsInRepr,
    HidesTraceback,
    HidesContext,
    HidesNotes,
    HidesClass,
    lambda: HidesMembers("several", [Boom("one")]),
    Untrue,
)


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: getattr(make, "__name__", "HidesMembers"))
@pytest.mark.parametrize("drive", ["fit", "start"])
def test_a_hostile_exception_ends_the_run_like_any_other(make: Callable[[], Exception], drive: str):
    error, model = make(), net()
    # The loop looks at the class of what a step raises; outside of it nobody does.
    hostile = task(model=model, **{"optimizer" if make is HidesClass else "loss": raising(error)})
    if drive == "fit":
        with pytest.raises(BaseException) as caught:
            il.Engine("double").fit(hostile, batches())
        the_same = caught.value is error  # pytest would show its class
        assert the_same
    else:
        outcome = run("double", hostile)
        left_clean(outcome)
        the_same = outcome.error is error
        assert the_same
        assert outcome.status == "failed"
        # What exits while it is rendered is taken for an interrupt, once.
        assert [failure.type for failure in outcome.errors] in ([], ["SystemExit"])
        assert outcome.failure is not None
        assert "in hook" in outcome.failure.traceback
    finished(run("double", task(model=model)))


@pytest.mark.parametrize("make", [HidesTraceback, HidesContext, lambda: HidesMembers("several", [Boom("x")])])
def test_a_hostile_exception_pins_nothing(make: Callable[[], Exception]):
    error = make()

    def step(model: nn.Module, batch: Any) -> Any:
        kept = loss_of(model, batch) * 2
        try:
            raise Boom(str(kept.shape))
        except Boom:
            raise error  # noqa: B904

    gc.collect()
    gc.disable()
    try:
        outcome = run("double", task(loss=step))
        left_clean(outcome)
    finally:
        gc.enable()


def test_the_members_of_a_group_are_found_whatever_it_says():
    member = Boom("one")
    assert member in list(graph(HidesMembers("several", [member])))


@pytest.mark.parametrize("kind", [Untrue, type("Empty", (Exception,), {"__len__": lambda _: 0})])
def test_an_error_that_is_handled_outside_is_left_alone_though_it_is_not_true(kind: type[Exception]):
    def callers() -> None:
        secret = "the caller's"
        raise kind(secret)

    def inside() -> None:
        try:
            callers()
        except kind:
            il.Engine("cpu").fit(task(loss=raising(Boom("inside"))), batches())

    with pytest.raises(Boom) as caught:
        inside()
    outer = caught.value.__context__
    assert type(outer) is kind
    trace = outer.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_frame.f_locals["secret"] == "the caller's"


def test_an_error_is_rendered_once():
    asked = []

    class Counts(Exception):
        def __str__(self) -> str:
            asked.append(1)
            return "counted"

    outcome = run("cpu", task(loss=raising(Counts())))
    assert outcome.failure is not None
    assert outcome.failure.message == "counted"
    assert len(asked) == 2  # the message, and the last line of the traceback


@pytest.mark.parametrize("ends", [True, False], ids=["finished", "failed"])
def test_when_the_way_out_is_given_up_there_is_an_outcome_and_the_model_is_free(
    ends: bool, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault in Interlock")

    model = net()
    what = task(model=model) if ends else task(model=model, loss=raising(Boom("first")))
    seen: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(Session, "_residue", broken)
        outcome = run("double", what, observers=[seen.append])
    assert outcome.status == "failed"
    assert isinstance(outcome.error, RuntimeError if ends else Boom)
    assert outcome.errors[-1].type.endswith("NoWayOut")
    assert sum(failure.type.endswith("NoWayOut") for failure in outcome.errors) == 1
    assert not outcome.residue.known
    assert outcome.model is model
    assert isinstance(seen[-1], il.Closed)
    assert sum(isinstance(event, il.Closed) for event in seen) == 1
    finished(run("double", task(model=model)))


# -- observers ----------------------------------------------------------------------------------


class Failing:
    """Raises once, in whatever way, and then listens."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls = 0
        self.closed = False

    def __call__(self, event: il.events.Event) -> None:  # type: ignore[name-defined]
        self.calls += 1
        self.closed = isinstance(event, il.Closed)
        if self.calls == 1:
            raise self.error


@pytest.mark.filterwarnings("ignore::interlock.errors.ObserverWarning")
@pytest.mark.parametrize("kind", [Boom, ExitsInStr, HidesClass, SystemExit])
def test_an_observer_that_raised_something_hostile_sees_the_other_events(kind: type[BaseException]):
    observer, other = Failing(kind()), Failing(Boom("other"))
    finished(run("cpu", task(), observers=[observer, other]))
    assert observer.closed
    assert observer.calls == other.calls > 3


def test_a_closed_stderr_does_not_end_an_observer(monkeypatch: pytest.MonkeyPatch):
    import io
    import warnings

    closed = io.StringIO()
    closed.close()
    observer = Failing(Boom("once"))
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
        patched.setattr(sys, "stderr", closed)
        outcome = il.Engine("cpu", observers=[observer]).start(task(), batches()).wait(WAIT)
    finished(outcome)
    assert observer.closed


@pytest.mark.filterwarnings("ignore::interlock.errors.ObserverWarning")
@pytest.mark.parametrize("attribute", ["on_end", "__getattr__"])
def test_an_observer_whose_attributes_raise_is_isolated(attribute: str):
    seen: list[Any] = []

    def refuse(*_: Any) -> Any:
        raise KeyError("not here")

    members = {"__call__": lambda _, event: seen.append(event)}
    kind = type("Odd", (), {**members, attribute: property(refuse) if attribute == "on_end" else refuse})
    before = set(threading.enumerate())
    outcome = run("cpu", task(), observers=[kind()])
    finished(outcome)
    assert isinstance(seen[-1], il.Closed)
    assert "observer Odd raised 1 time(s)" in outcome.notes
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("capacity", [None, 0, -1, 1.5, "3", True], ids=repr)
def test_a_capacity_that_is_none_is_refused_before_anything_starts(capacity: Any):
    run_ = il.Engine("cpu").start(task(), batches())
    before = set(threading.enumerate())
    with pytest.raises(errors.TaskError, match="whole number of at least 1"):
        run_.subscribe(print, capacity=capacity)
    assert set(threading.enumerate()) <= before
    finished(run_.wait(WAIT))


def test_what_an_observer_does_to_a_report_nobody_else_sees():
    def spoils(event: Any) -> None:
        if isinstance(event, il.Report):
            event.metrics.clear()  # type: ignore[attr-defined]

    seen: list[Any] = []
    started = il.Engine("cpu", observers=[spoils, seen.append], report_every=1).start(task(), batches())
    outcome = started.wait(WAIT)
    finished(outcome)
    assert all(report.metrics for report in outcome.reports)
    assert tuple(event for event in seen if isinstance(event, il.Report)) == outcome.reports
    outcome.reports[0].metrics.clear()  # type: ignore[attr-defined]
    late: list[Any] = []
    started.subscribe(late.append).close()
    assert all(event.metrics for event in late if isinstance(event, il.Report))
    assert outcome.metrics


def test_an_outcome_can_be_sent_and_copied_and_a_run_cannot():
    started = il.Engine("cpu").start(task(), batches())
    outcome = started.wait(WAIT)
    for sent in (pickle.loads(pickle.dumps(outcome)), copy.deepcopy(outcome)):
        assert sent.reports == outcome.reports
        assert sent.history == outcome.history
        assert same(sent.model.state_dict(), outcome.model.state_dict())  # type: ignore[union-attr]
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Wait for its outcome, and send that"):
            send(started)


@pytest.mark.parametrize("how", ["wait", "result", "exception", "await"])
def test_an_observer_cannot_wait_for_its_run(how: str):
    ways: dict[str, Callable[[il.Run], object]] = {
        "wait": lambda run_: run_.wait(),
        "result": lambda run_: run_.result(),
        "exception": lambda run_: run_.exception(),
        "await": lambda run_: asyncio.run(_awaited(run_)),
    }
    subscribed, raised, started = threading.Event(), [], []

    def observer(event: Any) -> None:
        if isinstance(event, il.Closed):
            subscribed.wait(WAIT)
            try:
                ways[how](started[0])
            except errors.RunInUse as error:
                raised.append(str(error))

    started.append(il.Engine("cpu", observers=[observer]).start(task(), batches()))
    subscribed.set()
    outcome = started[0].wait(WAIT)
    finished(outcome)
    assert len(raised) == 1
    assert "one of its observers" in raised[0]
    assert not any("blocked" in note for note in outcome.notes)


async def _awaited(run_: il.Run) -> il.Outcome:
    return await run_


def test_an_awaited_run_is_refused_inside_its_own_hook():
    started: list[il.Run] = []
    ready = threading.Event()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ready.wait(WAIT)
        asyncio.run(_awaited(started[0]))
        return loss_of(model, batch)

    started.append(il.Engine("cpu").start(task(loss=loss), batches()))
    ready.set()
    failed(started[0].wait(WAIT), errors.RunInUse)


@pytest.mark.parametrize("capacity", [1, 2])
def test_an_observer_that_is_too_slow_still_sees_the_end(capacity: int):
    let, ended = threading.Event(), threading.Event()
    seen: list[Any] = []
    everything: list[Any] = []

    class Slow:
        def __call__(self, event: Any) -> None:
            let.wait(WAIT)
            seen.append(event)

        def on_end(self, lost: int) -> None:
            self.lost = lost
            ended.set()

    hold = threading.Event()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hold.wait(WAIT)
        return loss_of(model, batch)

    what = task(loss=loss)
    started = il.Engine("cpu", report_every=1, observers=[everything.append]).start(what, batches())
    slow = Slow()
    started.subscribe(slow, capacity=capacity)
    hold.set()
    finished(started.wait(WAIT))
    let.set()
    assert ended.wait(WAIT)
    assert isinstance(seen[-1], il.Closed)
    assert slow.lost > 0
    assert len(seen) + slow.lost == len(everything)


# -- the rest -------------------------------------------------------------------------------------


def test_only_what_is_public_is_listed():
    listed = dir(il)
    assert set(il.__all__) <= set(listed)
    assert [name for name in listed if name not in il.__all__ and not name.startswith("__")] == []
    assert not any(inspect.ismodule(getattr(il, name)) for name in listed if name != "errors")


class Replaces(torch.optim.lr_scheduler.LambdaLR):
    """Replaces a parameter when it has stepped, after the last report of an epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, stop: Callable[[], None]) -> None:
        self.model: nn.Module | None = None
        super().__init__(optimizer, lambda _: 1.0)
        self.model, self.stop = model, stop

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.model is not None:
            self.stop()
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())


@pytest.mark.parametrize("backend", ["cpu", "double"])
@pytest.mark.parametrize("stops", [False, True], ids=["finish", "stop"])
def test_a_parameter_replaced_after_the_last_report_is_found(backend: str, stops: bool):
    model, started = net(), []
    ready = threading.Event()

    def stop() -> None:
        ready.wait(WAIT)
        if stops:
            started[0].stop()

    what = task(
        model=model,
        scheduler=lambda optimizer: Replaces(optimizer, model, stop),
        scheduler_every="epoch",
    )
    started.append(il.Engine(backend).start(what, batches(), epochs=2 if stops else 1))
    ready.set()
    error = failed(started[0].wait(WAIT), errors.ReplacedParameter, "training")
    assert "before the end" in str(error)
    assert error.parameters == ("head.weight",)
