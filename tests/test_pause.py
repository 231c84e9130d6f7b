"""Pausing a run and lending its device: any number of times, at any step, and its bits stay what they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.small import (
    BACKENDS,
    WITH_KEEPING,
    Keeping,
    batches,
    engine,
    failed,
    finished,
    left_clean,
    loss_of,
    same,
    seeded,
    task,
)
from torch import nn

import interlock as il
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import Fault, inject
from interlock.errors import RunInUse

PATIENCE = 20.0
"""Seconds after which a wait has failed."""
ADAPTERS: dict[str, type[il.Adapter]] = {"cpu": CpuAdapter, "double": ReplacingDouble, "keeping": Keeping}
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
FEW = settings(max_examples=max(10, settings().max_examples // 4))


class Struck(Exception):
    """Raised on purpose."""


def comes_to(run: il.Run, *phases: str) -> None:
    """Wait until the run is in one of these phases."""
    end = time.monotonic() + PATIENCE
    while run.phase not in phases:
        assert time.monotonic() < end, run.snapshot()
        assert not run.done() or "closed" in phases, run.wait()
        time.sleep(0.001)


class Asking:
    """Batches of which some ask the run for something first, once each.

    Attributes:
        asks: How many batches were given -> what to ask for then.
        run: To be set; iteration waits for it.
    """

    def __init__(self, data: Any, asks: dict[int, Callable[[il.Run], None]]) -> None:
        self.data, self.asks, self.count = data, dict(asks), 0
        self.run: il.Run | None = None
        self.there = threading.Event()

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            self.count += 1
            ask = self.asks.pop(self.count, None)
            if ask is not None:
                assert self.there.wait(PATIENCE)
                assert self.run is not None
                ask(self.run)
            yield batch

    def begun(self, run: il.Run) -> il.Run:
        """It is this one that is asked."""
        self.run = run
        self.there.set()
        return run


def pausing(run: il.Run) -> None:
    run.pause()


def suspending(run: il.Run) -> None:
    run.pause(release=True)


WAITS = {"pause": pausing, "suspend": suspending}
STANDS = {"pause": "paused", "suspend": "suspended"}


# The same bits


class Net(nn.Module):
    """Tied weights, buffers, dropout, and a plain tensor that moves along."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 5)
        self.third = nn.Linear(5, 5)
        self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(5, 3)
        self.scale = torch.full((), 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.second(torch.tanh(self.first(x)))) * self.scale
        out: torch.Tensor = self.head(self.drop(self.third(hidden)))
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.02),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.Adam(p, 0.02, foreach=True, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.02), foreach=False),
}


def rich(optimizer: str, options: Any, scheduler: bool) -> il.Task:
    """Much of what a task can have at once."""
    return task(
        model=lambda: seeded(Net, 2),
        optimizer=lambda m: OPTIMIZERS[optimizer](m.parameters()),
        options=options,
        scheduler=(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)) if scheduler else None,
    )


def of_run(outcome: il.Outcome) -> Any:
    """What training has made."""
    assert outcome.model is not None
    assert outcome.optimizer is not None
    values = {name: tensor.clone() for name, tensor in outcome.model.state_dict().items()}
    # Not the training loss: before a run waits it reports, so that a mean is over other steps.
    return values, outcome.optimizer.state_dict(), outcome.metrics["val_loss"], outcome.steps


def options_of(names: set[str]) -> list[il.Option]:
    """Step options by short names."""
    made: dict[str, il.Option] = {
        "window": il.Accumulate(2),
        "clip": il.ClipNorm(0.2),
        "fp16": il.Precision("fp16", init_scale=2.0**18, growth_interval=2),
    }
    return [made[name] for name in sorted(names)]


@FEW
@given(
    backend=st.sampled_from(WITH_KEEPING),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    names=st.sets(st.sampled_from(["window", "clip", "fp16"])),
    scheduler=st.booleans(),
    seed=st.sampled_from([None, 5]),
    asks=st.dictionaries(st.integers(1, 14), st.sampled_from(sorted(WAITS)), min_size=1, max_size=4),
    lends=st.booleans(),
)
def test_a_run_that_was_paused_anywhere_has_the_bits_of_one_that_was_not(
    backend: str,
    optimizer: str,
    names: set[str],
    scheduler: bool,
    seed: int | None,
    asks: dict[int, str],
    lends: bool,
):
    what = rich(optimizer, options_of(names), scheduler)
    data, checked = batches(7), batches(2, seed=9)

    def engine_on(adapter: il.Adapter) -> il.Engine:
        return il.Engine(adapter, seed=seed, threads=1, report_every=3)

    state = torch.get_rng_state()
    plain = engine_on(ADAPTERS[backend]()).start(what, data, validate=checked, epochs=2).wait(PATIENCE)
    finished(plain)
    if seed is None:  # the two draw from the process's own generator
        torch.set_rng_state(state)
    adapter: Any = ADAPTERS[backend]()
    asking = Asking(data, {n: WAITS[name] for n, name in asks.items()})
    run = asking.begun(engine_on(adapter).start(what, asking, validate=checked, epochs=2))
    for _ in asks:
        comes_to(run, *STANDS.values(), "closed")
        if run.done():
            break
        if run.phase == "suspended":
            if isinstance(adapter, ReplacingDouble):
                assert adapter.allocated == 0
            if lends:
                before = torch.get_rng_state() if seed is None else None
                other = il.Engine(adapter, seed=77, threads=1).start(task(), batches(3)).wait(PATIENCE)
                finished(other)
                assert before is None or torch.equal(before, torch.get_rng_state())
        here = len(run.history)
        run.resume()
        end = time.monotonic() + PATIENCE
        while len(run.history) == here and not run.done():
            assert time.monotonic() < end
            time.sleep(0.0005)
    outcome = run.wait(PATIENCE)
    finished(outcome)
    assert same(of_run(plain), of_run(outcome))
    torch.set_rng_state(state)


def test_the_comparison_sees_state_that_does_not_follow(monkeypatch: pytest.MonkeyPatch):
    """The planted fault: an optimizer that begins anew after each suspension."""
    plain = finished(engine("double").start(rich("AdamW", [], False), batches(7)).wait(PATIENCE))
    spoilt = "interlock.phases.place_again"
    real = __import__("interlock.suspension", fromlist=["place_again"]).place_again

    def forgetful(registry: Any, adapter: Any, resting: Any) -> None:
        real(registry, adapter, resting)
        for optimizer in registry.family():
            optimizer.state.clear()

    monkeypatch.setattr(spoilt, forgetful)
    asking = Asking(batches(7), {3: suspending})
    run = asking.begun(engine("double").start(rich("AdamW", [], False), asking))
    comes_to(run, "suspended")
    run.resume()
    other = finished(run.wait(PATIENCE))
    assert not same(plain.state_dict(), other.state_dict())


# While it waits


@pytest.mark.parametrize("name", sorted(WAITS))
@on_each_backend
def test_what_a_waiting_run_says_of_itself(backend: str, name: str):
    asking = Asking(batches(5), {2: WAITS[name]})
    run = asking.begun(engine(backend).start(task(), asking))
    comes_to(run, STANDS[name])
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15  # it sleeps
    snapshot = run.snapshot()
    assert snapshot.phase == STANDS[name]
    assert snapshot.step == 2
    assert STANDS[name] in snapshot.doing
    assert "wait" in snapshot.stack
    assert not run.done()
    run.resume()
    run.resume()  # and nothing happens, whether it has heard of the first one or not
    assert finished(run.wait(PATIENCE)) is not None
    for late in (run.pause, run.resume):
        with pytest.raises(RunInUse, match="is closed"):
            late()


@on_each_backend
def test_paused_then_suspended_and_back(backend: str):
    """A run that waits can be asked to wait otherwise: the device is given back, or taken again."""
    asking = Asking(batches(5), {2: pausing})
    run = asking.begun(engine(backend).start(task(), asking))
    comes_to(run, "paused")
    run.pause(release=True)
    comes_to(run, "suspended")
    run.pause()
    time.sleep(0.05)
    assert not run.done(), run.wait()
    run.resume()
    finished(run.wait(PATIENCE))
    assert run.step == 5


@pytest.mark.parametrize("name", sorted(WAITS))
@pytest.mark.parametrize("end", ["stop", "cancel"])
@on_each_backend
def test_a_waiting_run_can_be_ended(backend: str, name: str, end: str):
    asking = Asking(batches(5), {2: WAITS[name]})
    run = asking.begun(engine(backend).start(task(), asking))
    comes_to(run, STANDS[name])
    getattr(run, end)()
    with pytest.raises(RunInUse, match=f"was asked to {end}|is closed"):
        run.resume()
    outcome = run.wait(PATIENCE)
    left_clean(outcome)
    assert outcome.status == {"stop": "stopped", "cancel": "cancelled"}[end]
    assert outcome.steps == 2
    events = [entry.event for entry in outcome.history]
    assert events.count("acquire") == 1
    assert "resume" not in events
    two = finished(engine(backend).start(task(), batches(5), max_steps=2).wait(PATIENCE))
    assert same(two.state_dict(), outcome.model.state_dict())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(WAITS))
@on_each_backend
def test_the_time_limit_goes_on_while_it_waits(backend: str, name: str):
    asking = Asking(batches(5), {1: WAITS[name]})
    run = asking.begun(engine(backend).start(task(), asking, epochs=100, max_time=0.3))
    comes_to(run, STANDS[name])
    outcome = run.wait(PATIENCE)
    left_clean(outcome)
    assert outcome.status == "stopped"
    assert outcome.steps == 1


@pytest.mark.parametrize("name", sorted(WAITS))
def test_at_the_last_step_there_is_nothing_to_wait_before(name: str):
    """Not one step more than `max_steps`, whatever was asked for."""
    asking = Asking(batches(5), {3: WAITS[name]})
    run = asking.begun(engine("double").start(task(), asking, max_steps=3))
    outcome = run.wait(PATIENCE)
    finished(outcome)
    assert outcome.steps == 3


@pytest.mark.parametrize("name", sorted(WAITS))
def test_in_the_middle_of_a_validation_it_waits_for_its_end(name: str):
    checked = Asking(batches(3), {2: WAITS[name]})
    run = checked.begun(engine("double").start(task(), batches(4), validate=checked, epochs=2))
    comes_to(run, STANDS[name])
    assert checked.count == 3
    run.resume()
    outcome = run.wait(PATIENCE)
    finished(outcome)
    plain = engine("double").start(task(), batches(4), validate=batches(3), epochs=2).wait(PATIENCE)
    assert same(plain.metrics, outcome.metrics)


def every_second(step: Any, batch: Any) -> torch.Tensor:
    """A hand-written step that updates after each second batch."""
    if step.number % 2:
        step.zero()
    loss = loss_of(step.model, batch)
    step.backward(loss)
    if not step.number % 2:
        step.update()
    return loss


@pytest.mark.parametrize(("asked", "waits"), [(1, 2), (2, 2), (3, 4)])
@on_each_backend
def test_open_gradients_wait_for_their_update_before_the_device_is_lent(backend: str, asked: int, waits: int):
    what = task(step=every_second, loss=None)
    plain = finished(engine(backend).start(what, batches(6)).wait(PATIENCE))
    asking = Asking(batches(6), {asked: suspending})
    run = asking.begun(engine(backend).start(what, asking))
    comes_to(run, "suspended")
    assert run.step == waits
    run.resume()
    assert same(plain.state_dict(), finished(run.wait(PATIENCE)).state_dict())


@on_each_backend
def test_a_pause_that_keeps_the_device_keeps_open_gradients_too(backend: str):
    what = task(step=every_second, loss=None)
    plain = finished(engine(backend).start(what, batches(6)).wait(PATIENCE))
    asking = Asking(batches(6), {3: pausing})
    run = asking.begun(engine(backend).start(what, asking))
    comes_to(run, "paused")
    assert run.step == 3
    run.resume()
    assert same(plain.state_dict(), finished(run.wait(PATIENCE)).state_dict())


@on_each_backend
def test_a_paused_run_is_not_suspended_before_its_open_gradients_are_used(backend: str):
    what = task(step=every_second, loss=None)
    plain = finished(engine(backend).start(what, batches(6)).wait(PATIENCE))
    asking = Asking(batches(6), {3: pausing})
    run = asking.begun(engine(backend).start(what, asking))
    comes_to(run, "paused")
    run.pause(release=True)
    comes_to(run, "suspended")
    assert run.step == 4
    run.resume()
    assert same(plain.state_dict(), finished(run.wait(PATIENCE)).state_dict())


@on_each_backend
def test_requests_in_quick_succession_are_no_fault(backend: str):
    """A run may be let go on before it has come to wait, or be asked otherwise on its way there."""
    run = engine(backend).start(task(), batches(20), epochs=10**6)
    comes_to(run, "training")
    for number in range(400):
        run.pause(release=number % 3 == 1)
        if number % 7 == 0:
            time.sleep(0.0005)
        if number % 5 == 2:
            run.pause(release=number % 2 == 0)
        run.resume()
    run.stop()
    outcome = run.wait(PATIENCE)
    left_clean(outcome)
    assert outcome.status == "stopped", outcome.failure and outcome.failure.traceback


def test_from_inside_its_own_hook():
    """It is a request like any other: the hook returns first."""
    box: list[il.Run] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if box and run_step() == 2:
            box[0].pause(release=True)
        return loss_of(model, batch)

    def run_step() -> int:
        return box[0].step

    asking = Asking(batches(6), {1: lambda run: box.append(run)})
    run = asking.begun(engine("double").start(task(loss=loss), asking))
    comes_to(run, "suspended")
    assert run.step == 3
    run.resume()
    finished(run.wait(PATIENCE))


# Faults on the way there and back

CALLS = ("acquire", "place", "move", "sync", "fetch", "leftovers", "free")


def suspended_once(adapter: Any, data: Any = None) -> tuple[il.Outcome, dict[str, int], dict[str, int]]:
    """A run that is suspended after its second step: with what the calls numbered before and afterwards."""
    counts: list[dict[str, int]] = []

    def ask(run: il.Run) -> None:
        counts.append(dict(adapter.counts))
        run.pause(release=True)

    asking = Asking(batches(4), {2: ask, 3: lambda _: counts.append(dict(adapter.counts))})
    what = rich("momentum", [], False)
    run = asking.begun(il.Engine(adapter, threads=1).start(what, asking))
    comes_to(run, "suspended", "closed")
    if not run.done():
        run.resume()
    outcome = run.wait(PATIENCE)
    return outcome, counts[0], counts[-1]


def made(backend: str, *faults: Fault) -> Any:
    """A fresh adapter with faults in it."""
    return inject(ADAPTERS[backend](), *faults)


def places(backend: str) -> list[tuple[str, int]]:
    """Every backend call between the request to suspend and the step after the return."""
    outcome, before, after = suspended_once(made(backend))
    finished(outcome)
    return [(call, nth) for call in CALLS for nth in range(before.get(call, 0) + 1, after.get(call, 0) + 1)]


@pytest.mark.parametrize("kind", [Struck, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["before", "after"])
@on_each_backend
def test_a_fault_at_each_backend_call_of_a_suspension_ends_clean(
    backend: str, moment: str, kind: type[BaseException]
):
    found = places(backend)
    assert {"acquire", "place", "leftovers", "free"} <= {call for call, _ in found}
    assert backend == "cpu" or {"move", "sync", "fetch"} <= {call for call, _ in found}
    wrong = []
    for call, nth in found:
        error = kind("here")
        adapter = made(backend, Fault(call, moment, nth, lambda error=error: error))
        outcome, _, _ = suspended_once(adapter)
        facts = {
            "struck": sum(fault.struck for fault in adapter.faults) == 1,
            "the first error": outcome.error is error,
            "closed": outcome.history[-1].phase == "closed",
            "clean": outcome.verdict == "clean" and not (outcome.residue.known and outcome.residue.bytes),
            "empty": not isinstance(adapter, ReplacingDouble) or not adapter.allocated,
            "status": outcome.status == ("failed" if kind is Struck else "cancelled"),
        }
        wrong += [f"{call} {nth}: not {name}: {outcome}" for name, right in facts.items() if not right]
    assert wrong == []


@pytest.mark.parametrize("lost", ["model", "optimizer"])
def test_a_fault_of_the_user_between_return_and_the_next_step(lost: str):
    asking = Asking(batches(4), {2: suspending, 3: _raise})
    run = asking.begun(engine("double").start(task(), asking))
    comes_to(run, "suspended")
    run.resume()
    failed(run.wait(PATIENCE), Struck, "training")


def _raise(_: il.Run) -> None:
    raise Struck("in the loader")


def test_handles_know_no_pause_and_their_block_ends_as_ever():
    with il.Engine("double").open(task()) as created:
        training = created.place().optimize().train()
        training.step(batches()[0])
        assert not hasattr(training, "pause")
    assert created.outcome is not None
    left_clean(created.outcome)
    assert created.outcome.status == "stopped"
