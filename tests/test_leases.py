"""Leases on the process's own settings: shared, refused, waited for, and all put back."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tools import interrupts, process_state

from interlock import leases
from interlock.errors import Cancelled, RunInUse, TaskError
from interlock.leases import (
    LeaseRefused,
    ProcessSettings,
    RandomSource,
    Suspended,
    give_back,
    resume,
    suspend,
    take,
)

ALL = ProcessSettings(seed=5, deterministic=True, dtype=torch.float64, threads=3)


def never() -> None:
    raise AssertionError("nothing stands in the way, and it waited")


def on_new_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def reading() -> dict[str, Any]:
    """All that a lease can change, beside what `process_state` reads."""
    from torch._inductor import config

    return {
        "torch": tuple(torch.get_rng_state().tolist()),
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state(legacy=False)),
        "threads of new ones": on_new_thread(torch.get_num_threads),
        "compiler": config.deterministic,
        **(process_state.snapshot().torch or {}),
        "variable": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def drawn() -> tuple[float, ...]:
    return (torch.rand(()).item(), random.random(), float(numpy.random.rand()))


def numbers(seed: int, count: int) -> list[tuple[float, ...]]:
    """What a run with a seed draws when it is alone in the process."""
    owner = object()
    take(
        ProcessSettings(seed=seed, dtype=torch.float32), owner, when_taken="refuse", check=never, name="alone"
    )
    try:
        return [drawn() for _ in range(count)]
    finally:
        give_back(owner)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: nobody has a lease or waits for one, and the process is as it was."""
    monkeypatch.setattr(leases, "PATIENCE", 0.001)
    before = reading()
    yield
    registry = leases._registry
    assert (registry.held, registry.queue, registry.before, registry.parked) == ([], [], {}, [])
    assert reading() == before


# What can be asked for


def test_all_problems_are_told_at_once() -> None:
    wrong: Any = {"seed": -1, "deterministic": 1, "dtype": torch.int64, "threads": 0}
    with pytest.raises(TaskError) as caught:
        ProcessSettings(**wrong)
    assert [word for word in wrong if word in str(caught.value)] == list(wrong)


@pytest.mark.parametrize("seed", [2**64, True, 1.0])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(TaskError, match="seed must be"):
        ProcessSettings(seed=seed)


def test_when_taken_is_one_of_two() -> None:
    with pytest.raises(TaskError, match="when_taken"):
        take(ALL, object(), when_taken="hope", check=never, name="a")  # type: ignore[arg-type]


@given(st.integers(0, 2**64 - 1))
@settings(max_examples=20)
def test_each_seed_can_be_had(seed: int) -> None:
    assert numbers(seed, 2) == numbers(seed, 2)


def test_a_seed_gives_the_numbers_that_users_know() -> None:
    generator, python, legacy = (
        torch.Generator().manual_seed(7),
        random.Random(7),
        numpy.random.RandomState(7),
    )
    known = (torch.rand((), generator=generator).item(), python.random(), float(legacy.rand()))
    assert numbers(7, 1) == [known]


# Against a model, on one thread

VALUES: dict[str, list[Any]] = {
    "seed": [None, 1, 2],
    "deterministic": [None, True, False],
    "dtype": [None, torch.float64, torch.bfloat16],
    "threads": [None, 3, 4],
}
SETTINGS = st.builds(ProcessSettings, **{name: st.sampled_from(values) for name, values in VALUES.items()})
OWNERS = [object() for _ in range(3)]
owners = st.integers(0, len(OWNERS) - 1)


def clash(one: ProcessSettings, other: ProcessSettings) -> bool:
    mine, theirs = one.wanted(), other.wanted()
    both = [name for name in mine if name in theirs]
    return any(name == "seed" or mine[name] != theirs[name] for name in both)


def fits(wanted: ProcessSettings) -> bool:
    """Whether the process has what a run wants of it, but for the seed."""
    present = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }
    new = on_new_thread(torch.get_num_threads)
    return all(
        present[name] == value and (name != "threads" or new == value)
        for name, value in wanted.wanted().items()
        if name != "seed"
    )


class AgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.before = reading()
        self.holds: dict[int, ProcessSettings] = {}
        self.parked: dict[int, tuple[Suspended, tuple[float, ...] | None]] = {}

    def attempt(self, owner: int, wanted: ProcessSettings, call: Callable[[], None]) -> bool:
        others = [held for other, held in self.holds.items() if other != owner]
        mine = self.holds.get(owner)
        before = reading()
        if mine is not None and mine != wanted:
            with pytest.raises(RunInUse, match="give it back"):
                call()
        elif mine is None and any(clash(wanted, held) for held in others):
            with pytest.raises(LeaseRefused):
                call()
        else:
            call()
            self.holds[owner] = wanted
            return mine is None
        assert reading() == before
        return False

    @rule(owner=owners, wanted=SETTINGS)
    def take(self, owner: int, wanted: ProcessSettings) -> None:
        self.attempt(
            owner,
            wanted,
            lambda: take(wanted, OWNERS[owner], when_taken="refuse", check=never, name=str(owner)),
        )
        if owner in self.holds:
            self.parked.pop(owner, None)

    @rule(owner=owners)
    def give_back(self, owner: int) -> None:
        give_back(OWNERS[owner])
        self.holds.pop(owner, None)
        self.parked.pop(owner, None)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.holds)))
        token = suspend(OWNERS[owner])
        assert suspend(OWNERS[owner]) is token
        following = None
        if self.holds.pop(owner).seed is not None:
            following = tuple(state_of(source, state) for source, state in token.states)
        self.parked[owner] = (token, following)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.parked)))
        token, following = self.parked[owner]
        if self.attempt(
            owner, token.settings, lambda: resume(OWNERS[owner], token, when_taken="refuse", check=never)
        ):
            del self.parked[owner]
            if following is not None:
                assert tuple(state_of(source, source.get()) for source, _ in token.states) == following

    @rule()
    def draw(self) -> None:
        if any(held.seed is not None for held in self.holds.values()):
            drawn()

    @invariant()
    def all_have_what_they_asked_for(self) -> None:
        assert all(fits(held) for held in self.holds.values())

    @invariant()
    def nobody_leaves_a_trace(self) -> None:
        if not self.holds:
            assert reading() == self.before

    def teardown(self) -> None:
        for owner in OWNERS:
            give_back(owner)
        assert reading() == self.before


def state_of(source: RandomSource, state: Any) -> Any:
    return tuple(state.tolist()) if isinstance(state, torch.Tensor) else repr(state)


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=40, stateful_step_count=20)


# In threads


@given(st.lists(st.tuples(SETTINGS, st.booleans(), st.integers(0, 2)), min_size=2, max_size=5))
@settings(max_examples=40)
def test_runs_in_threads_wait_for_what_they_want(plans: list[tuple[ProcessSettings, bool, int]]) -> None:
    """Who holds at the same time is never at odds, and each draws what it would draw alone."""
    before = reading()
    alone = [numbers(wanted.seed, 4) if wanted.seed is not None else [] for wanted, _, _ in plans]
    holding: dict[int, ProcessSettings] = {}
    guard = threading.Lock()
    broken: list[str] = []

    def enter(number: int, wanted: ProcessSettings) -> None:
        with guard:
            broken.extend(f"{wanted} beside {held}" for held in holding.values() if clash(wanted, held))
            holding[number] = wanted

    def leave(number: int) -> None:
        with guard:
            del holding[number]

    def work(number: int, wanted: ProcessSettings, pauses: bool, naps: int) -> None:
        owner, seen = object(), []
        mine = torch.get_num_threads()
        try:
            take(wanted, owner, when_taken="wait", check=lambda: None, name=str(number))
            enter(number, wanted)
            for turn in range(4):
                time.sleep(0.0005 * naps)
                # A new thread may see another count for a moment, while a run that shared it leaves.
                if not any(fits(wanted) or time.sleep(0.001) for _ in range(300)):
                    broken.append(f"{number} has something else than {wanted}")
                if wanted.seed is not None:
                    # Another's default dtype decides how many bits a number takes.
                    seen.append(
                        (torch.rand((), dtype=torch.float32).item(), random.random(), numpy.random.rand())
                    )
                if pauses and turn == 1:
                    leave(number)
                    token = suspend(owner)
                    resume(owner, token, when_taken="wait", check=lambda: None)
                    enter(number, wanted)
            leave(number)
        except BaseException as error:
            broken.append(f"{number}: {error!r}")
        finally:
            give_back(owner)
        if seen != alone[number]:
            broken.append(f"{number} drew {seen}, and alone {alone[number]}")
        if wanted.threads is not None and torch.get_num_threads() not in (
            mine,
            before["threads of new ones"],
        ):
            broken.append(f"{number} keeps {torch.get_num_threads()} threads")

    threads = [threading.Thread(target=work, args=(i, *plan)) for i, plan in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert broken == []
    assert reading() == before


def waiting(wanted: ProcessSettings, name: str, order: list[str]) -> threading.Thread:
    """A thread that waits for a lease, and is in the queue when this returns."""
    asked = threading.Event()

    def work() -> None:
        owner = object()
        take(wanted, owner, when_taken="wait", check=asked.set, name=name)
        order.append(name)
        give_back(owner)

    thread = threading.Thread(target=work)
    thread.start()
    assert asked.wait(10)
    return thread


def test_first_come_first_served() -> None:
    """Also for one that could share what is held: it would hold up who has waited for longer."""
    owner, order = object(), []
    take(ProcessSettings(dtype=torch.float64), owner, when_taken="wait", check=never, name="a")
    threads = [
        waiting(ProcessSettings(dtype=torch.bfloat16), "b", order),
        waiting(ProcessSettings(dtype=torch.float64, seed=1), "c", order),
        waiting(ProcessSettings(seed=2, dtype=torch.float64), "d", order),
    ]
    with pytest.raises(LeaseRefused, match="'b' waits for") as caught:
        take(ProcessSettings(dtype=torch.float64), "e", when_taken="refuse", check=never, name="e")
    assert caught.value.holder == "b"
    take(ProcessSettings(threads=3), "f", when_taken="wait", check=never, name="f")
    give_back("f")
    give_back(owner)
    for thread in threads:
        thread.join(10)
    assert order == ["b", "c", "d"]


def test_a_cancelled_run_waits_no_longer() -> None:
    take(ALL, "a", when_taken="wait", check=never, name="a")

    def check() -> None:
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        take(ProcessSettings(seed=1), "b", when_taken="wait", check=check, name="b")
    assert leases._registry.queue == []
    give_back("a")


def test_a_refusal_tells_the_reason() -> None:
    take(ALL, "a", when_taken="wait", check=never, name="first")
    before = reading()
    for name, value in {"seed": 5, "deterministic": False, "dtype": torch.float16, "threads": 4}.items():
        with pytest.raises(LeaseRefused, match=r"'second'.*'first' holds.*process of its own") as caught:
            take(ProcessSettings(**{name: value}), "b", when_taken="refuse", check=never, name="second")
        error = caught.value
        told = (error.setting, error.wanted, error.present, error.holder)
        assert told == (name, value, getattr(ALL, name), "first")
    assert reading() == before
    give_back("a")


def test_without_a_lease_there_is_nothing_to_suspend() -> None:
    with pytest.raises(RunInUse, match="take first"):
        suspend("a")


def test_a_variable_that_was_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    take(ProcessSettings(deterministic=True), "a", when_taken="wait", check=never, name="a")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    give_back("a")
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":16:8"


def test_flags_that_stood_otherwise_stand_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        take(ProcessSettings(deterministic=True), "a", when_taken="wait", check=never, name="a")
        assert not torch.backends.cudnn.benchmark
        give_back("a")
        assert torch.backends.cudnn.benchmark


def test_a_thread_that_is_new_in_a_lease_does_not_keep_its_count() -> None:
    before, wanted = torch.get_num_threads(), ProcessSettings(threads=3)
    take(wanted, "a", when_taken="wait", check=never, name="a")

    def work() -> int:
        take(wanted, "b", when_taken="wait", check=never, name="b")
        give_back("b")
        return torch.get_num_threads()

    found = on_new_thread(work)
    give_back("a")
    assert found == before


def test_no_device_is_touched() -> None:
    take(ALL, "a", when_taken="wait", check=never, name="a")
    give_back("a")
    assert not torch.cuda.is_initialized()
    assert torch.cuda.default_generators == ()


# Faults


class Device:
    """A generator of a device, of which each call can be made to raise after its work."""

    def __init__(self) -> None:
        self.state, self.faulty = 0, ""

    def done(self, what: str) -> None:
        if self.faulty == what:
            self.faulty = ""
            raise OSError(what)

    def get(self) -> int:
        self.done("get")
        return self.state

    def put(self, state: int) -> None:
        self.state = state
        self.done("put")

    def seed(self, seed: int) -> None:
        self.state = seed
        self.done("seed")

    def source(self) -> RandomSource:
        return RandomSource("device", self.get, self.put, self.seed)


@pytest.mark.parametrize("faulty", ["get", "seed"])
def test_a_fault_while_taking_leaves_all_as_it_was(faulty: str) -> None:
    device, before = Device(), reading()
    device.faulty = faulty
    with pytest.raises(OSError, match=faulty):
        take(ALL, "a", when_taken="wait", check=never, name="a", sources=[device.source()])
    assert device.state == 0
    assert reading() == before


@pytest.mark.parametrize("setter", ["set_default_dtype", "use_deterministic_algorithms", "set_num_threads"])
def test_a_setter_that_raises_leaves_all_as_it_was(setter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = getattr(torch, setter), reading()

    def faulty(value: Any) -> None:
        real(value)
        if value in (torch.float64, True, 3) and value is not before["default dtype"]:
            raise OSError(setter)

    monkeypatch.setattr(torch, setter, faulty)
    with pytest.raises(OSError, match=setter):
        take(ALL, "a", when_taken="wait", check=never, name="a")
    assert reading() == before


def test_a_fault_while_giving_back_can_be_tried_again() -> None:
    """All else is put back, nobody else gets what was not, and the second attempt ends it."""
    device, before = Device(), reading()
    take(ALL, "a", when_taken="wait", check=never, name="a", sources=[device.source()])
    device.faulty = "put"
    with pytest.raises(OSError, match="put"):
        give_back("a")
    assert reading() == before
    with pytest.raises(LeaseRefused, match="seed"):
        take(ProcessSettings(seed=1), "b", when_taken="refuse", check=never, name="b")
    take(ProcessSettings(dtype=torch.bfloat16), "b", when_taken="refuse", check=never, name="b")
    give_back("b")
    give_back("a")
    assert (device.state, reading()) == (0, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_leases() -> None:
    take(ProcessSettings(dtype=torch.float64), "a", when_taken="wait", check=never, name="a")
    child = os.fork()
    if child == 0:
        free = leases._registry.held == [] and leases._registry.before == {}
        os._exit(0 if free else 1)
    assert os.waitpid(child, 0)[1] == 0
    give_back("a")


# Interrupts


def life(device: Device, other: bool) -> None:
    """A run that takes, draws, pauses, goes on and gives back, as an engine would: whatever happens."""
    owner, token = object(), None
    wanted = ProcessSettings(deterministic=True, dtype=torch.float64, threads=3, seed=None if other else 5)
    try:
        take(wanted, owner, when_taken="refuse", check=never, name="a", sources=[device.source()])
        token = suspend(owner)
        resume(owner, token, when_taken="refuse", check=never)
        give_back(owner)
    finally:
        give_back(owner)


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another run"])
def test_an_interrupt_at_each_line(
    other: bool, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Wherever it lands, what follows it puts everything back."""
    monkeypatch.setattr(interrupts, "_is_part", lambda file: file == leases.__file__)
    if other:
        beside = ProcessSettings(deterministic=True, dtype=torch.float64, threads=3)
        take(beside, "beside", when_taken="refuse", check=never, name="b")
    before = reading()
    life(Device(), other)  # what is done once in a process is done by now
    with interrupts.AtLine() as counted:
        life(Device(), other)
    moments = [(line, visit) for line, count in counted.passed.items() for visit in sorted({1, 2, 3, count})]
    moments = [(line, visit) for line, visit in moments if visit <= counted.passed[line]]
    assert len(moments) > 150
    record_property("interrupts at a line of a lease", len(moments))
    broken = {}
    for line, visit in moments:
        device, at = Device(), interrupts.AtLine(line, visit)
        try:
            with at:
                life(device, other)
            found = ["no interrupt" if at.error is None else "swallowed"]
        except KeyboardInterrupt:
            found = []
        # A real program comes here from the release stack, which asks again for what was interrupted.
        for lease in [*leases._registry.held]:
            if lease.owner != "beside":
                give_back(lease.owner)
        now = reading()
        found += [name for name in before if now[name] != before[name]] + ["device"] * (device.state != 0)
        registry = leases._registry
        found += ["held"] * (len(registry.held) != other) + ["queue"] * bool(registry.queue)
        if found:
            broken[f"{line[1]}, visit {visit}"] = found
    give_back("beside")
    assert broken == {}


def test_a_fault_in_a_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that these tests rest on: a lease that puts nothing back differs in each setting."""
    before = reading()
    take(ALL, "a", when_taken="wait", check=never, name="a")
    now = reading()
    differ = {name for name in before if now[name] != before[name]}
    give_back("a")
    assert differ >= {
        *("torch", "python", "numpy", "threads", "threads of new ones", "default dtype", "compiler"),
        *("deterministic algorithms", "cudnn.deterministic", "variable"),
    }
    assert "numpy.random" in sys.modules
