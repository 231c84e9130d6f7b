"""The invariant suites: what they cover, that the engine passes them, and which planted faults they find."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.errors import InvalidArgument
from tools.planted import EXPECTED, PLANTED, planted
from tools.runs import environment
from torch import nn

import interlock as il
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.backends.registry import monitor
from interlock.specs import (
    INFERENCE,
    TRAINING,
    Effect,
    Kind,
    Spec,
    SpecError,
    Status,
    Verb,
    compose,
    lifecycle,
    semantics,
)
from interlock.specs import Phase as SpecPhase
from interlock.specs import Transition as T
from interlock.specs import machine as machine_module
from interlock.specs.suite import (
    BrokenPromise,
    Case,
    Plain,
    RunMachine,
    SpecSuite,
    covering_paths,
    illegal_pairs_of,
    machine_for,
    pairs_of,
    register_profiles,
    transitions_of,
)

register_profiles("suite-")
CI = settings.get_profile("suite-ci")
QUICK = settings(CI, database=None, phases=[Phase.generate], report_multiple_bugs=False)
"""As `ci`, but that what is found is not made smaller."""
SHRINKING = settings(CI, database=None, phases=[Phase.generate, Phase.shrink], stateful_step_count=8)


class Mine(nn.Module):
    """A model of a user's: dropout, and a buffer that batches change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


DATA = [(torch.linspace(-1, 1, 12).view(4, 3) * s, torch.tensor([0, 1, 0, 1])) for s in (1.0, 2.0, 0.5)]
TASK = il.Task(model=Mine, optimizer=optimizer, loss=loss)


def run(machine: type[RunMachine], how: settings = QUICK) -> None:
    """Run the machine's test case."""
    case: Any = machine.TestCase
    case.settings = how
    case("runTest").debug()


def failure(machine: type[RunMachine], how: settings = QUICK) -> BaseException:
    """The error by which the machine's test case fails."""
    with pytest.raises(BaseException) as caught:
        run(machine, how)
    assert not isinstance(caught.value, (pytest.fail.Exception, KeyboardInterrupt))
    return caught.value


# The engine passes


@pytest.mark.parametrize("backend", ["cpu", "double"])
def test_the_engine_passes(backend: str) -> None:
    run(machine_for(backend))


@pytest.mark.parametrize("backend", [CpuAdapter, ReplacingDouble])
@pytest.mark.filterwarnings("ignore::interlock.errors.FrozenParameterWarning")
def test_a_task_of_ones_own_on_an_adapter_of_ones_own(backend: Any) -> None:
    run(machine_for(backend, TASK, data=DATA), settings(QUICK, max_examples=10))


def test_the_simplest_run_goes_everywhere() -> None:
    """So whatever any profile misses, it is not what an ordinary run gets wrong."""
    made = machine_for("double")
    runs: list[tuple[list[str], Counter[str]]] = []

    class Noting(made):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            runs.append((self.optional, self.fired))
            super().teardown()

    run(Noting, settings(QUICK, max_examples=1))
    optional, fired = runs[0]
    assert optional == ["validate", "adopt", "sync", "pause", "suspend"]
    assert set(fired) >= {"acquire", "place", "optimize", "train", "update", "resume", *optional}
    assert min(fired[event] for event in ("update", *optional)) > 1


# Planted faults are found


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.filterwarnings("ignore::interlock.errors.FrozenParameterWarning")
def test_a_planted_fault_is_found_within_the_ci_profile(name: str) -> None:
    with planted(name):
        error = failure(machine_for("double"))
    assert isinstance(error, il.errors.InterlockError)  # a broken promise, or the engine's own word
    assert re.search(EXPECTED[name], str(error)), str(error)


def test_what_was_planted_is_gone_afterwards() -> None:
    def seen(name: str) -> list[Any]:
        return [vars(owner)[attribute] for owner, attribute, _ in PLANTED[name]()]

    for name in PLANTED:
        before = seen(name)
        with planted(name):
            assert all(now is not was for now, was in zip(seen(name), before, strict=True))
        assert seen(name) == before


# What is printed can be pasted


def pasted(error: BaseException) -> str:
    """The program in a report, up to where it is torn down."""
    lines = "\n".join(error.__notes__).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("from "))
    end = lines.index("state.teardown()")
    return "\n".join(lines[begin:end])


@pytest.mark.parametrize("own", [False, True], ids=["built in", "own"])
@pytest.mark.filterwarnings("ignore::interlock.errors.FrozenParameterWarning")
def test_the_report_prints_the_shrunk_run_as_a_program_that_fails_the_same_way(own: bool) -> None:
    made = machine_for(ReplacingDouble, TASK, data=DATA) if own else machine_for("double")
    with planted("ties not tied again" if not own else "residue not measured"):
        error = failure(
            made, settings(CI, database=None, phases=[Phase.generate, Phase.shrink], stateful_step_count=8)
        )
        program = pasted(error)
        with pytest.raises(BrokenPromise) as again:
            exec(f"{program}\nstate.teardown()", {})
    assert isinstance(error, BrokenPromise)
    assert again.value.broken == error.broken
    # Nothing less fails: it is shrunk.
    assert [line for line in program.splitlines() if line.startswith("state.fire")] == (
        ["state.fire(event='acquire')"]
        if own
        else ["state.fire(event='acquire')", "state.fire(event='place')"]
    )
    exec(f"{program}\nstate.teardown()", {})  # and it passes once that is mended


def test_a_run_can_be_driven_by_hand() -> None:
    state = machine_for("double")()
    state.begin(exit="keep", fault=("fetch", "before", 1, "RuntimeError", 1))
    for event in ("acquire", "place", "train", "optimize", "train", "update", "suspend"):
        state.fire(event)
    life = state.running()
    assert life.closed
    assert life.outcome is not None
    assert life.outcome.error is life.struck[0]
    state.restart()
    for event in ("acquire", "place", "optimize", "train", "update", "sync", "suspend", "resume", "finish"):
        state.fire(event)
    assert state.running().closed
    state.teardown()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_of_the_users_is_not_swallowed_while_a_failed_run_is_cleared_away(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process is put back in any case."""
    state = machine_for("double")()
    state.begin()
    life = state.running()
    exit_ = life.created.__exit__
    threads = torch.get_num_threads()

    def struck(*error: Any) -> None:
        exit_(*error)
        raise raised("pressed")

    monkeypatch.setattr(type(life.created), "__exit__", lambda self, *error: struck(*error))
    torch.set_num_threads(threads + 1)
    if raised is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt, match="pressed"):
            life.abort()
    else:
        life.abort()
    assert torch.get_num_threads() == threads


def test_an_interrupt_that_was_drawn_is_no_interrupt_of_the_users() -> None:
    state = machine_for("double")()
    state.begin(fault=("free", "before", 1, "KeyboardInterrupt", 9))
    for event in ("acquire", "place"):
        state.fire(event)
    life = state.running()
    life.abort()
    assert {type(error) for error in life.struck} == {KeyboardInterrupt}
    life.drop()


def test_the_device_of_a_run_ends_once_for_each_time_it_is_taken() -> None:
    """Given back when the run was suspended, and abandoned at its end: that is no broken promise."""
    state = machine_for("double")()
    state.begin(exit="discard", fault=("free", "before", 2, "RuntimeError", 2))
    for event in ("acquire", "place", "optimize", "train", "update", "suspend", "resume", "finish"):
        state.fire(event)
    outcome = state.running().outcome
    assert outcome is not None
    assert outcome.abandoned == ("device",)
    state.teardown()


def test_a_machine_says_what_it_lacks() -> None:
    with pytest.raises(SpecError, match="call `begin` first"):
        machine_for("cpu")().running()
    with pytest.raises(SpecError, match="no batches"):
        machine_for("cpu", TASK, data=[])
    with pytest.raises(il.errors.TaskError, match="has no data"):
        machine_for("cpu", TASK)
    with pytest.raises(il.errors.UnknownName):
        machine_for("no such backend")


# Every transition of a spec


SPECS = [
    compose(base, monitor(name)) for name in ("cpu", "cuda", "xla", "ddp") for base in (TRAINING, INFERENCE)
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_both_machines_agree_on_all_of_it(spec: Spec) -> None:
    cases = transitions_of(spec)
    assert {(case.phase, case.event) for case in cases} == {(t.source, t.event) for t in spec.transitions}
    for case in (*cases, *pairs_of(spec), *illegal_pairs_of(spec)):
        case.check(spec)
    taken = set()
    for whole in covering_paths(spec):
        slot = whole.check(spec)
        assert (slot.state, slot.held) == (spec.terminal, ())
        taken |= {(entry.source, entry.event) for entry in slot.history[1:]}
    assert taken == {(t.source, t.event) for t in spec.transitions}


def test_pairs_follow_each_other_and_illegal_events_are_those_that_no_transition_takes() -> None:
    spec = SPECS[0]
    follows = {
        (t.event, u.event, t.source) for t in spec.transitions for u in spec.transitions if t.dest == u.source
    }
    pairs = {(case.path[-1], case.event) for case in pairs_of(spec)}
    assert pairs <= {(one, other) for one, other, _ in follows}
    refused = {(case.phase, case.event) for case in illegal_pairs_of(spec)}
    legal = {(t.source, t.event) for t in spec.transitions}
    assert {(p, e) for p in spec.phase for e in spec.events} - legal <= refused
    assert ("ready", "compile") in refused & legal  # by its automaton, once it was compiled


def effect(verb: Verb) -> tuple[Effect, ...]:
    return (Effect(verb, "device"),)


SMALL = Spec(
    name="small",
    phases=(
        SpecPhase("idle", Kind.STABLE),
        SpecPhase("taking", Kind.FLIGHT, "taken"),
        SpecPhase("busy", Kind.STABLE),
        SpecPhase("over", Kind.TERMINAL),
    ),
    resources=("device",),
    transitions=(
        T("take", "idle", "taking", effect(Verb.ACQUIRES)),
        T("taken", "taking", "busy", effect(Verb.COMPLETES)),
        T("give", "busy", "over", effect(Verb.RELEASES)),
        T("fail", "taking", "over", effect(Verb.ABANDONS)),
    ),
    table={},
)


class TestSmall(SpecSuite):
    """Collected as anybody's would be."""

    spec = SMALL


def test_what_the_cases_of_a_small_spec_are() -> None:
    assert [str(case) for case in transitions_of(SMALL)] == [
        "idle --take--> taking",
        "taking --taken--> busy",
        "taking --fail--> over",
        "busy --give--> over",
    ]
    assert [str(case) for case in pairs_of(SMALL)] == [
        "idle --take--> taking --taken--> busy",
        "idle --take--> taking --fail--> over",
        "taking --taken--> busy --give--> over",
    ]
    assert (
        len(illegal_pairs_of(SMALL)) == 4 * 5 - 4
    )  # phases, events and one that there is not, less the legal
    assert [(*case.path, case.event) for case in covering_paths(SMALL)] == [
        ("take", "taken", "give"),
        ("take", "fail"),
    ]


def test_a_transition_that_can_never_be_taken_is_named() -> None:
    idle = T("again", "over2", "idle", ())
    phases = (*SMALL.phases[:-1], SpecPhase("over2", Kind.STABLE), SMALL.phases[-1])
    spec = Spec("small", phases, SMALL.resources, (*SMALL.transitions, idle), {})
    with pytest.raises(SpecError, match="over2 --again--> idle can never be taken"):
        transitions_of(spec)
    with pytest.raises(SpecError, match="set `spec` or `backend`"):
        SpecSuite.composed()


def test_a_machine_that_lets_everything_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[0]
    cases = illegal_pairs_of(spec)
    fire = machine_module.Slot.fire

    def passing(self: Any, event: str) -> Any:
        try:
            return fire(self, event)
        except il.errors.IllegalTransition:
            return self.history[-1]

    monkeypatch.setattr(machine_module.Slot, "fire", passing)
    for case in cases[:20]:
        with pytest.raises(BrokenPromise, match="was taken in"):
            case.check(spec)


@pytest.mark.parametrize("verb", [Verb.RELEASES, Verb.COMPLETES, Verb.LOSES])
def test_another_reading_of_a_verb_is_found(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[0]
    cases = transitions_of(spec)
    unchanged = {status: (status, True) for status in Status}
    monkeypatch.setattr(semantics, "MEANING", {**semantics.MEANING, verb: unchanged})
    found = 0
    for case in cases:
        try:
            case.check(spec)
        except (BrokenPromise, il.errors.IllegalTransition):
            found += 1
    assert found


def test_a_wrong_error_is_found() -> None:
    life = lifecycle(SMALL)
    case = Case("idle refuses give", (), "give", "idle", legal=False)
    case.check(SMALL)
    plain = Plain(SMALL)
    assert plain.legal == ("take",)
    assert not plain.fire("give")
    assert list(plain.differs(life.slot())) == []
    assert plain.fire("take")
    assert any("interlock is in phase 'idle'" in line for line in plain.differs(life.slot()))


# Profiles and generators


def test_profiles_are_registered_when_asked_for() -> None:
    with pytest.raises(InvalidArgument):
        settings.get_profile("other-ci")
    register_profiles("other-")
    dev, ci, nightly = (settings.get_profile(f"other-{name}") for name in ("dev", "ci", "nightly"))
    assert dev.max_examples < ci.max_examples == 100 < 1000 <= nightly.max_examples
    assert (dev.derandomize, ci.derandomize, nightly.derandomize) == (False, True, False)
    assert all(one.deadline is None and one.print_blob for one in (dev, ci, nightly))


def child(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=60)


def test_generators_are_registered_when_asked_for() -> None:
    """In a process of its own: it cannot be undone."""
    assert hypothesis is not None
    child(
        "import torch\n"
        "from hypothesis import given, settings, strategies as st\n"
        "from interlock.specs.suite import register_generators\n"
        "drawn = []\n"
        "@settings(max_examples=3, database=None)\n"
        "@given(st.integers())\n"
        "def draw(_): drawn.append(torch.rand(()).item())\n"
        "draw(); assert len(set(drawn)) > 1, 'seeded without having been asked'\n"
        "register_generators(); register_generators(); drawn.clear()\n"
        "before = torch.get_rng_state(); draw()\n"
        "assert len(set(drawn)) == 1, drawn\n"
        "assert torch.equal(torch.get_rng_state(), before)\n"
    )


def test_without_hypothesis_it_says_what_to_install() -> None:
    child(
        "import sys; sys.modules['hypothesis'] = None\n"
        "import interlock\n"
        "from interlock.specs.errors import MissingExtra\n"
        "try:\n    import interlock.specs.suite\n"
        "except MissingExtra as error:\n    assert 'interlock[test]' in str(error), error\n"
        "else:\n    raise SystemExit('it was imported')\n"
    )
