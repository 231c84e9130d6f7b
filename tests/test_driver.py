"""The machine drives: a run goes where its spec leads, and its release stack holds what the spec says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.small import batches, left_clean, loss_of, task

import interlock as il
from interlock.backends.adapter import Adapter
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import inject
from interlock.backends.monitors import CPU
from interlock.checkpoint import Checkpoints, Saved
from interlock.events import Bus
from interlock.keeping import chosen
from interlock.options import Options
from interlock.plan import Plan
from interlock.program import step_program
from interlock.session import Session, carry_out
from interlock.specs import (
    TRAINING,
    IllegalTransition,
    Kind,
    Phase,
    Slot,
    Spec,
    Transition,
    check,
    compose,
    lifecycle,
)
from interlock.specs.lifecycles import HARMLESS, flight, quiet
from interlock.task import Data

CLASSES = {"cpu": CpuAdapter, "double": ReplacingDouble}
both = pytest.mark.parametrize("backend", ["cpu", "double"])


def session_on(
    spec: Spec,
    adapter: Adapter,
    what: il.Task | None = None,
    *,
    saved: Saved | None = None,
    checkpoints: Checkpoints | None = None,
    epochs: int = 1,
    **options: Any,
) -> Session:
    """A session on any spec, proved or not."""
    given = what or task()
    program = step_program(adapter.monitor)
    plan = Plan(Data(batches(2), batches(1)), epochs, checkpoints=checkpoints)
    settings = Options(deadline=10.0, **options)
    return Session(given, plan, adapter, lifecycle(spec), program, settings, Bus(), saved)


def fails(*_: Any) -> Any:
    raise ValueError("boom")


def route(outcome: il.Outcome) -> list[str]:
    """The phases from the first exit on."""
    phases = [entry.phase for entry in outcome.history]
    return phases[phases.index("failed") if "failed" in phases else phases.index("finished") :]


# An edited exit edge is followed


WAY_OUT = {
    "cpu": [
        "failed",
        "offloading",
        "dropping",
        "offloading",
        "homing",
        "offloading",
        "measuring",
        "offloaded",
    ],
    "double": [
        *("failed", "offloading", "syncing", "offloading", "dropping", "offloading", "homing", "offloading"),
        *("measuring", "offloaded"),
    ],
}


@both
def test_the_spec_as_it_stands(backend: str):
    adapter = CLASSES[backend]()
    outcome = carry_out(session_on(compose(TRAINING, adapter.monitor), adapter, task(loss=fails)))
    left_clean(outcome)
    assert route(outcome) == [*WAY_OUT[backend], "freeing", "offloaded", "closed"]


@both
def test_an_edge_that_leads_elsewhere(backend: str):
    adapter = CLASSES[backend]()
    spec = compose(TRAINING, adapter.monitor)
    edges = [
        replace(t, dest="stopping") if (t.event, t.source) == ("offload", "failed") else t
        for t in spec.transitions
    ]
    edited = replace(spec, name="edited", transitions=tuple(edges))
    outcome = carry_out(session_on(edited, adapter, task(loss=fails)))
    left_clean(outcome)
    assert route(outcome)[:3] == ["failed", "stopping", "offloading"]
    assert route(outcome)[2:] == [*WAY_OUT[backend][1:], "freeing", "offloaded", "closed"]


@both
def test_an_extra_phase_on_the_way_out(backend: str):
    done: list[str] = []

    class Mourning(CLASSES[backend]):  # type: ignore[name-defined]
        def actions(self) -> dict[str, Callable[..., None]]:
            return {**super().actions(), "mourning": lambda model: done.append(type(model).__name__)}

    adapter = Mourning()
    spec = compose(TRAINING, adapter.monitor)
    straight = spec.by_source["failed"]["offload"]
    edited = replace(
        spec,
        name="edited",
        phases=(*spec.phases[:-1], Phase("mourning", Kind.FLIGHT, "mourned"), spec.phases[-1]),
        transitions=(
            *(t for t in spec.transitions if t != straight),
            *flight("mourn", "failed", "mourning", "mourned", "offloading", begin=HARMLESS),
            *quiet("fail", "mourning", "offloading"),
            *quiet("interrupt", "mourning", "offloading"),
            *quiet("abandon", "mourning", "offloading"),
            replace(spec.by_source["freeing"]["lose"], source="mourning"),
        ),
        table={**spec.table, "failed": ("rescue", "mourn")},
    )
    assert [str(verdict) for verdict in check(edited).verdicts if not verdict.holds] == []
    outcome = carry_out(session_on(edited, adapter, task(loss=fails)))
    left_clean(outcome)
    assert done == ["Net"]
    assert route(outcome)[:3] == ["failed", "mourning", "offloading"]
    assert route(outcome)[2:] == [*WAY_OUT[backend][1:], "freeing", "offloaded", "closed"]


def test_a_row_in_another_order():
    spec = compose(TRAINING, CPU)
    row = ("drop", "discard", "keep", "home", "free", "measure", "close")
    edited = replace(spec, name="edited", table={**spec.table, "offloading": row})
    outcome = carry_out(session_on(edited, CpuAdapter(), task(loss=fails)))
    assert "measuring" not in route(outcome)
    assert route(outcome)[-3:] == ["freeing", "offloaded", "closed"]


def test_a_wish_that_the_spec_makes_the_rule():
    spec = compose(TRAINING, CPU)
    edges = [replace(t, wish="") if t.event == "discard" else t for t in spec.transitions]
    outcome = carry_out(session_on(replace(spec, name="edited", transitions=tuple(edges)), CpuAdapter()))
    assert "discarding" in route(outcome)
    assert "homing" not in route(outcome)


# A release that is missing is found by comparison, not by measuring


@both
def test_an_adapter_without_a_release(backend: str):
    class Releaseless(CLASSES[backend]):  # type: ignore[name-defined]
        def releases(self) -> dict[str, Any]:
            return {}

    adapter: Any = inject(Releaseless())
    outcome = il.Engine(adapter).start(task(), batches(2)).wait(30)
    error = outcome.error
    assert isinstance(error, il.errors.HeldSetMismatch)
    assert (error.held, error.stacked) == (("device",), ())
    assert adapter.counts.get("fetch", 0) == adapter.counts.get("leftovers", 0) == 0
    assert outcome.history[-1].phase == "closed"
    assert outcome.abandoned == ("device",)
    assert outcome.status == "failed"


@both
@pytest.mark.parametrize(("resource", "event"), [("model", "place"), ("optimizer", "optimize")])
def test_a_release_left_out_in_the_engine(backend: str, resource: str, event: str):
    adapter: Any = inject(CLASSES[backend]())
    session = session_on(compose(TRAINING, adapter.monitor), adapter)
    del session.driver._releases[resource]
    outcome = carry_out(session)
    assert isinstance(outcome.error, il.errors.HeldSetMismatch)
    assert f"'{event}'" in str(outcome.error)
    assert resource in outcome.error.held
    assert resource not in outcome.error.stacked
    assert outcome.history[-1].phase == "closed"
    assert outcome.abandoned == (resource,)


# What is illegal changes nothing


def configurations(spec: Spec) -> Iterator[Slot]:
    """A slot in each configuration that can be reached."""
    life = lifecycle(spec)
    seen, todo = {life.slot().config}, deque([()])
    while todo:
        path: tuple[str, ...] = todo.popleft()
        slot = life.slot()
        for event in path:
            slot.fire(event)
        yield slot
        for event in slot.legal:
            further = life.rules[slot.state][event].advance(slot.config).config
            if further not in seen:
                seen.add(further)
                todo.append((*path, event))


def test_every_illegal_event_in_every_configuration():
    spec = compose(TRAINING, CPU)
    slots = refused = 0
    phases = set()
    for slot in configurations(spec):
        slots += 1
        phases.add(slot.state)
        before, config, legal = list(slot.history), slot.config, slot.legal
        for event in (*spec.events, "no such event"):
            if event in legal:
                continue
            with pytest.raises(IllegalTransition) as caught:
                slot.fire(event)
            refused += 1
            assert caught.value.legal == tuple(sorted(legal))
            assert (caught.value.event, caught.value.phase) == (event, config.phase)
            assert slot.history == before
            assert slot.config == config
    assert phases == set(spec.phase)
    assert slots > 50
    assert refused > 2000


@both
@pytest.mark.parametrize("phase", ["created", "acquired", "placed", "ready", "training"])
def test_a_run_goes_on_after_an_illegal_event(backend: str, phase: str):
    adapter = CLASSES[backend]()
    session = session_on(compose(TRAINING, adapter.monitor), adapter)
    slot, stack = session.driver.slot, session.driver.stack
    session.driver.advance(phase)
    before, held = list(slot.history), stack.names
    for event in set(session.driver.spec.events) - set(slot.legal):
        with pytest.raises(IllegalTransition):
            session.driver.fire(event)
    assert slot.history == before
    assert stack.names == held
    assert session.run().status == "finished"


# Which transitions are driven


class Lost(RuntimeError):
    """What the device is lost by."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "fail": lambda: ValueError("boom"),
    "interrupt": KeyboardInterrupt,
    "abandon": lambda: il.errors.DeadlinePassed("it", 1.0, "nowhere"),
    "lose": Lost,
}


def losing(backend: str) -> Adapter:
    class Losing(CLASSES[backend]):  # type: ignore[name-defined]
        def is_loss_of_device(self, error: BaseException) -> bool:
            return isinstance(error, Lost)

    return Losing()


def once(action: Callable[[], None], error: BaseException) -> Callable[[], None]:
    """The action, but that it raises the first time."""
    left = [error]

    def act() -> None:
        if left:
            raise left.pop()
        action()

    return act


class Script:
    """In place of the event by which a waiting run hears of requests: what is asked for, one by one."""

    def __init__(self, session: Session, *then: Any) -> None:
        self.session, self.then = session, list(then)

    def clear(self) -> None:
        return

    def set(self) -> None:
        return

    def wait(self) -> None:
        following = self.then.pop(0)
        if isinstance(following, BaseException):
            raise following
        self.session.position.request = following


def waits(session: Session, *script: Any) -> Session:
    """A session that is paused or suspended in training, and goes on by a script."""
    first, *then = script
    with suppress(BaseException):
        session.perform(lambda: session.driver.advance("training"))
        session.position.changed = Script(session, *then)  # type: ignore[assignment]
        session.position.request = first
        go_on = session.perform(session.attend)
        session.perform(lambda: session.end("finish" if go_on else "stop"))
    session.conclude()
    return session


WAITING = ("flushing", "suspending", "returning", "reacquiring", "resuming")
SAVING = ("checkpointing", "restoring", "rescuing")


def unchanged(model: Any, optimizer: Any) -> None:
    """An adoption that changes nothing."""


def varied(backend: str, folder: Path) -> Iterator[Session]:
    """Sessions that are over: each error in each phase, and all the good ends."""
    spec = compose(TRAINING, CLASSES[backend].monitor)

    def new(what: il.Task | None = None, **options: Any) -> Session:
        return session_on(spec, losing(backend), what, **options)

    kept = Checkpoints(folder / backend, keep=100)
    il.Engine(losing(backend)).fit(task(), batches(2), checkpoints=kept)
    saved = chosen(True, kept)

    def saving(what: il.Task | None = None) -> Session:
        """One that resumes, saves, and saves once more when it fails."""
        return session_on(spec, losing(backend), what, checkpoints=kept, saved=saved, epochs=3)

    for policy in ("offload", "keep", "discard"):
        yield _over(new(exit=policy))
    yield _over(new(task(adopt={0: unchanged}, compile={"backend": "eager"})))
    yield _over(saving())
    for make in (ERRORS["fail"], ERRORS["interrupt"]):
        yield _over(saving(task(loss=later(make()))))
    stopped = new()
    stopped.position.request = "stop"
    yield _over(stopped)
    for script in (
        ["pause", ""],
        ["pause", "stop"],
        ["pause", "suspend", ""],
        ["suspend", ""],
        ["suspend", "stop"],
    ):
        yield waits(new(), *script)
    for make in ERRORS.values():
        yield waits(new(), "pause", make())
        yield waits(new(), "suspend", make())
    early = new()
    early.perform(lambda: (early.driver.advance("ready"), early.driver.fire("stop")))
    early.conclude()
    yield early
    for phase in ("created", "acquired", "placed", "ready", "training"):
        if phase != "training":
            ended = new()
            ended.perform(lambda s=ended, p=phase: (s.driver.advance(p), s.driver.fire("offload")))
            ended.conclude()
            yield ended
        for make in ERRORS.values():
            struck = new()
            struck.perform(lambda s=struck, p=phase: s.driver.advance(p))
            struck.conclude(make())
            yield struck
    for name in [name for name in new().driver._actions if name in spec.phase]:
        exits = {"keeping": "keep", "discarding": "discard"}
        for make in ERRORS.values():
            if name in SAVING:
                run = saving(task(loss=later(ValueError("boom"))) if name == "rescuing" else None)
            else:
                what = task(adopt={0: unchanged}, compile={"backend": "eager"})
                run = new(what, exit=exits.get(name, "offload"))
            if name == "writing_off":
                run.driver._actions["training"] = _nothing
                run.driver._actions["dropping"] = once(_nothing, Lost())
            run.driver._actions[name] = once(run.driver._actions[name], make())
            yield waits(run, "suspend", "") if name in WAITING else _over(run)
    for make in ERRORS.values():
        yield _over(new(task(optimizer=lambda model, make=make: Striking(model, make()))))


def later(error: BaseException) -> Callable[[Any, Any], torch.Tensor]:
    """A loss that fails at its second call."""
    calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        return loss_of(model, batch)

    return loss


def _nothing() -> None:
    return None


def _over(session: Session) -> Session:
    carry_out(session)
    return session


class Striking(torch.optim.SGD):
    """Fails in the middle of an update."""

    def __init__(self, model: Any, error: BaseException) -> None:
        super().__init__(model.parameters(), 0.1)
        self.error = error

    def step(self, closure: Any = None) -> Any:
        raise self.error


@both
def test_every_transition_is_driven(backend: str, tmp_path: Path):
    spec = compose(TRAINING, CLASSES[backend].monitor)
    driven: set[tuple[str, str]] = set()
    for session in varied(backend, tmp_path):
        assert session.driver.phase == "closed"
        assert session.driver.stack.names == ()
        driven |= {(entry.source, entry.event) for entry in session.driver.slot.history[1:]}
    assert driven == {(t.source, t.event) for t in spec.transitions}


def test_an_edge_is_data():
    """The edits above are of the kind that anybody can make."""
    edge = compose(TRAINING, CPU).by_source["failed"]["offload"]
    assert edge == Transition("offload", "failed", "offloading", HARMLESS)
