"""Offloaded on teardown: a fault at every point of a run, and a second one on the way out.

`tools.lives` carries runs out and strikes them, `tools.aftermath` says which promises were broken. The
garbage collector is off meanwhile, and the caller keeps the error, as a job record does.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from tools.aftermath import aftermath, the_first_error_reaches_the_caller
from tools.lives import (
    BACKENDS,
    ERRORS,
    OPTIMIZERS,
    Ended,
    Life,
    Strike,
    live,
    points_of,
    reference,
    state_of,
    without_collector,
)
from tools.runs import environment
from tools.small import batches, net, task
from torch import nn

import interlock as il
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import Fault, faulty
from interlock.evidence import graph

KINDS = tuple(ERRORS)
WAY_OUT = ("sync", "fetch", "leftovers", "free")
"""The backend's calls on the way out; each of them also occurs nowhere else, but in a validation's report."""

LIVES = (
    Life(),
    Life(backend="double"),
    Life(drive="start", observed=True, validate=False),
    Life(backend="double", drive="start", exit="keep", optimizer="tensor lr", validate=False),
    Life(drive="handles", exit="keep", scheduler="epoch", optimizer="momentum"),
    Life(backend="double", drive="handles", given=True, scheduler="epoch", optimizer="Adagrad"),
    Life(backend="double", given=True, remembers=True, observed=True, optimizer="foreach"),
    Life(backend="double", exit="discard", remembers=True, scheduler="", epochs=1),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from several threads, which make each run ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def broken(life: Life, *strikes: Strike) -> list[str]:
    """The promises that were broken by a struck life, and by the same life once more, undisturbed."""
    with without_collector():
        ended = live(life, *strikes)
        lines = aftermath(life, ended, given_up(ended))
        if strikes and not ended.struck:
            lines.append("the fault never struck")
        if life.exit == "offload" and not life.request[0]:
            lines += [f"in a second run: {line}" for line in aftermath(life, live(life))]
        return lines


def given_up(ended: Ended) -> tuple[str, ...]:
    """The resources of which two releases failed: these, and no others, are to be abandoned."""
    of = {"dropping": "optimizer", "homing": "model", "keeping": "model", "discarding": "model"}
    of["freeing"] = "device"
    history = ended.slot.history if ended.slot else []
    failed = [
        of[entry.source] for entry in history if entry.source in of and entry.event in ("fail", "interrupt")
    ]
    return tuple(name for name in dict.fromkeys(failed) if failed.count(name) == 2)


# Every point, one fault


@pytest.mark.parametrize("life", LIVES, ids=str)
def test_an_undisturbed_run_keeps_every_promise(life: Life) -> None:
    assert broken(life) == []


@pytest.mark.parametrize("life", LIVES, ids=str)
def test_a_fault_at_every_point(life: Life, record_property: Any) -> None:
    """Before, half done inside and after each hook and each backend call; the kinds of error take turns."""
    points = points_of(life)
    record_property(f"points struck ({life})", len(points))
    assert len(points) > 90
    strikes = [replace(point, error=KINDS[i % len(KINDS)]) for i, point in enumerate(points)]
    assert {str(strike): lines for strike in strikes if (lines := broken(life, strike))} == {}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("error", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_kind_of_error_at_every_point(backend: str, error: str, record_property: Any) -> None:
    life = Life(backend=backend)
    strikes = [replace(point, error=error) for point in points_of(life)]
    record_property(f"points struck by {error} on {backend}", len(strikes))
    assert {str(strike): lines for strike in strikes if (lines := broken(life, strike))} == {}


# A second fault, on the way out


def on_the_way_out(life: Life, *first: Strike) -> list[Strike]:
    """Every backend call on the way out of a life, struck before and after."""
    counts = live(life, *first).adapter.counts
    calls = [(call, nth) for call in WAY_OUT for nth in range(1, counts.get(call, 0) + 1)]
    return [Strike(f"backend.{call}", moment, nth) for call, nth in calls for moment in ("before", "after")]


FIRSTS = (Strike("loss", "half", 2), Strike("step", "half", 2, "OutOfMemoryError"), Strike("data", "half", 3))


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("first", FIRSTS, ids=str)
@pytest.mark.parametrize("drive", ["fit", "start"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_fault_on_the_way_out(backend: str, drive: str, first: Strike, times: int) -> None:
    """The first error stays the error, the second is attached; what fails twice is abandoned, visibly."""
    life = Life(backend=backend, drive=drive, given=True, validate=False)
    seconds = [
        replace(strike, error=KINDS[i % len(KINDS)], times=times)
        for i, strike in enumerate(on_the_way_out(life, first))
    ]
    assert len(seconds) >= 4
    assert {str(strike): lines for strike in seconds if (lines := broken(life, first, strike))} == {}


@pytest.mark.parametrize(
    ("strike", "abandoned"),
    [
        (Strike("backend.free", times=2), ("device",)),
        (Strike("backend.fetch", times=2), ("optimizer",)),
        (Strike("backend.fetch", times=4, error="KeyboardInterrupt"), ("optimizer", "model")),
        (Strike("backend.fetch", times=99), ("optimizer", "model")),
        (Strike("backend.sync", times=99), ()),
        (Strike("backend.leftovers", times=99), ()),
    ],
    ids=str,
)
def test_what_fails_twice_is_abandoned(strike: Strike, abandoned: tuple[str, ...]) -> None:
    life = Life(backend="double", drive="start", given=True, validate=False)
    ended = live(life, strike)
    assert ended.outcome is not None
    assert ended.outcome.abandoned == abandoned
    assert ended.outcome.verdict == ("abandoned" if abandoned else "clean")
    assert aftermath(life, ended, abandoned) == []


# Random lives


def lives() -> st.SearchStrategy[Life]:
    """Random legal lifecycles. What a model remembers stays with it when it is kept: not together."""
    drawn = st.builds(
        Life,
        backend=st.sampled_from(sorted(BACKENDS)),
        drive=st.sampled_from(["fit", "start", "handles"]),
        exit=st.sampled_from(["offload", "offload", "keep", "discard"]),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        tied=st.booleans(),
        buffers=st.booleans(),
        plain=st.booleans(),
        remembers=st.booleans(),
        given=st.booleans(),
        scheduler=st.sampled_from(["", "step", "epoch"]),
        validate=st.booleans(),
        epochs=st.integers(1, 2),
        batches=st.integers(1, 3),
        report_every=st.integers(1, 3),
        observed=st.booleans(),
    )
    return drawn.map(lambda life: replace(life, remembers=life.remembers and life.exit != "keep"))


def test_of_a_run_that_placed_nothing_nothing_is_left_also_if_the_device_is_abandoned() -> None:
    """Found by the property below."""
    life = Life(backend="cpu", drive="start", optimizer="Adagrad", epochs=2, batches=1)
    taking = Strike("backend.acquire", "before", 1, "RuntimeError")
    giving = Strike("backend.free", "before", 1, "RuntimeError", times=2)
    assert broken(life, taking, giving) == []


@given(data=st.data())
def test_random_lives_struck_once_or_twice(data: st.DataObject) -> None:
    life = data.draw(lives())
    first = replace(data.draw(st.sampled_from(points_of(life))), error=data.draw(st.sampled_from(KINDS)))
    strikes = [first]
    if data.draw(st.booleans()):
        second = data.draw(st.sampled_from(on_the_way_out(life, first) or [first]))
        if second.where != first.where:
            error, times = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 2))
            strikes.append(replace(second, error=error, times=times))
    target(float(len(strikes)))
    assert broken(life, *strikes) == []


@given(life=lives(), what=st.sampled_from(["stop", "cancel"]), nth=st.integers(1, 6), strike=st.booleans())
def test_random_lives_asked_to_end(life: Life, what: str, nth: int, strike: bool) -> None:
    """Stopped or cancelled at a random step; perhaps with a fault on the way out as well."""
    nth = min(nth, life.epochs * life.batches)
    life = replace(life, drive="start", request=(what, nth))
    with without_collector():
        ended = live(life, *([Strike("backend.free", "before")] if strike else []))
        assert ended.outcome is not None
        if what == "stop":
            assert ended.outcome.status == ("failed" if strike else "stopped")
            assert aftermath(life, ended) == []
        else:
            assert ended.outcome.status == "cancelled"
            assert isinstance(ended.error, il.errors.Cancelled)
            # The cancellation is the first error: the one that struck later is attached to it.
            assert aftermath(life, ended, but=(the_first_error_reaches_the_caller,)) == []
            assert len(ended.outcome.errors) == len(ended.struck)
        assert ended.outcome.steps == nth
        if ended.model is not None and life.exit == "offload" and nth == life.epochs * life.batches:
            assert state_of(ended.model).keys() == reference(life).final.keys()


# Faults that were found, each as small as it gets


class Kept(Exception):
    """An error of a test's own."""


def test_an_error_stored_by_a_retry_does_not_pin_its_callers() -> None:
    """Frames that called the one that failed, and returned since, hang on its traceback by `f_back`."""
    adapter = ReplacingDouble()

    def attempt(out: torch.Tensor) -> Kept:
        try:
            raise Kept(f"no use for {list(out.shape)}")
        except Kept as error:
            return error

    def twice(model: nn.Module, batch: Any) -> torch.Tensor:
        def caller() -> Kept:
            held = model(batch[0])
            return attempt(held)

        raise RuntimeError("both failed") from caller()

    with without_collector(), pytest.raises(RuntimeError) as caught:
        il.Engine(adapter).fit(task(loss=twice), batches(1))
    assert caught.value.__cause__ is not None
    assert adapter.allocated == 0


def test_a_closure_over_a_tensor_on_the_device_does_not_pin_it() -> None:
    """A cleared frame keeps its function, and the function its cells."""
    adapter = ReplacingDouble()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model(batch[0])
        pair = [hidden * 2, {"deep": hidden + 1}]

        def late() -> torch.Tensor:
            raise Kept(str([hidden.shape for _ in pair]))

        return late()

    with without_collector(), pytest.raises(Kept):
        il.Engine(adapter).fit(task(loss=loss), batches(1))
    assert adapter.allocated == 0


def test_a_batch_that_was_half_moved_is_let_go() -> None:
    adapter: Any = faulty(ReplacingDouble, Fault("move", "before", nth=6))
    with without_collector(), pytest.raises(RuntimeError, match="injected") as caught:
        il.Engine(adapter).fit(task(), [{"x": part, "y": part} for part, _ in batches(1)])
    assert caught.value.__traceback__ is not None
    assert adapter.allocated == 0


def test_the_first_run_of_a_process_is_freed_like_any_other() -> None:
    """The first optimizer makes torch import its compiler, which keeps the frames it was imported from."""
    code = (
        "import gc, weakref, torch, interlock as il\n"
        "from tools.small import batches, net, sgd, loss_of\n"
        "gc.disable(); built = []\n"
        "def build():\n    model = net(); built.append(weakref.ref(model)); return model\n"
        "il.Engine('double').fit(il.Task(model=build, optimizer=sgd, loss=loss_of), batches())\n"
        "assert built[0]() is None, 'the model of the first run is alive'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=100)


@pytest.mark.parametrize("drive", ["finish", "stop", "offload", "with"])
def test_an_error_on_the_way_out_is_raised_by_the_handles_too(drive: str) -> None:
    """Not only noted in an outcome that nobody may look at."""
    adapter = faulty(ReplacingDouble, Fault("free", error=Kept))
    created = il.Engine(adapter).open(task())

    def drive_it() -> None:
        with created:
            ready = created.place().optimize()
            if drive == "offload":
                ready.offload()
            training = ready.train()
            training.step(batches(1)[0])
            if drive != "with":
                getattr(training, drive)()

    with pytest.raises(Kept) as caught:
        drive_it()
    assert created.outcome is not None
    assert created.outcome.error is caught.value
    assert created.outcome.verdict == "clean"


def test_the_context_of_an_error_is_left_as_it_is() -> None:
    """Also where `fit` is called while another error is being handled: that one comes last in the chain."""
    raised: list[BaseException] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            raise Kept("inner")
        except Kept as inner:
            raised.append(inner)
            raise RuntimeError("outer")  # noqa: B904 - the context is the point

    outside = ValueError("handled by the caller")
    try:
        raise outside
    except ValueError:
        with pytest.raises(RuntimeError, match="outer") as caught:
            il.Engine("double").fit(task(loss=loss), batches(1))
    assert list(graph(caught.value)) == [caught.value, raised[0], outside]


def test_the_errors_of_the_caller_keep_their_frames() -> None:
    """What was being handled when the engine was entered is not the run's to clear."""

    def mine() -> None:
        precious = [1, 2, 3]
        raise ValueError(f"handled by the caller, who wants to see {precious}")

    frames = []
    try:
        mine()
    except ValueError as outside:
        with pytest.raises(Kept):
            il.Engine("cpu").fit(task(model=lambda: _raise(Kept())), batches(1))
        frames = [frame for frame, _ in traceback.walk_tb(outside.__traceback__)]
    assert frames[-1].f_locals["precious"] == [1, 2, 3]


def _raise(error: BaseException) -> Any:
    raise error


def test_a_suspended_generator_of_the_user_goes_on() -> None:
    """It caught the error that the run ends with as a cause: its frame is not the run's to end."""
    stored: list[BaseException] = []

    def source() -> Iterator[int]:
        try:
            raise Kept("stored")
        except Kept as error:
            stored.append(error)
        yield 1
        yield 2

    numbers = source()
    assert next(numbers) == 1

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("because of what was stored") from stored[0]

    with pytest.raises(RuntimeError):
        il.Engine("cpu").fit(task(loss=loss), batches(1))
    assert next(numbers) == 2


@pytest.mark.parametrize("call", ["acquire", "place", "leftovers"])
def test_residue_is_claimed_only_where_it_was_looked_at(call: str) -> None:
    """Unknown, unless nothing was ever placed."""
    run = il.Engine(faulty(ReplacingDouble, Fault(call))).start(task(), batches(1))
    assert run.wait(30).residue.known == (call != "leftovers")


def test_an_error_with_a_cause_of_the_family_is_like_any_other() -> None:
    error = il.errors.TaskError("with a cause")
    error.__cause__ = ValueError("the cause")
    adapter = faulty(ReplacingDouble, Fault("fetch", error=lambda: error))
    outcome = il.Engine(adapter).start(task(), batches(1)).wait(30)
    assert outcome.error is error
    assert outcome.verdict == "clean"
    assert [entry.phase for entry in outcome.history][-1] == "closed"


def test_a_failed_fit_keeps_neither_task_nor_data_alive() -> None:
    """The caller keeps the error; the error keeps frames; these keep nothing."""

    class Data(list[Any]):
        """Can be referred to weakly."""

    def once() -> tuple[BaseException, list[weakref.ref[Any]]]:
        model, data = net(), Data(batches(1))
        given = task(model=model, loss=lambda model, batch: _raise(Kept()))
        references = [weakref.ref(thing) for thing in (model, data)]
        try:
            il.Engine("double").fit(given, data)
        except Kept as error:
            kept = error
        del model, data, given
        return kept, references

    with without_collector():
        error, references = once()
        # The frame of `once` itself stands in the traceback, and is the caller's.
        assert error.__traceback__ is not None
        assert [reference() for reference in references] == [None, None]
