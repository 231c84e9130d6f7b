"""The checker decides each pattern, gives a shortest trace, and never passes what it does not know."""

from __future__ import annotations

import random
from collections.abc import Iterator

import networkx as nx
import pytest

from interlock.backends.monitors import CPU, MONITORS
from interlock.specs import (
    INFERENCE,
    TRAINING,
    Atom,
    Automaton,
    Effect,
    Kind,
    Pattern,
    Phase,
    Property,
    Result,
    Scope,
    Spec,
    SpecError,
    Status,
    Transition,
    Verb,
    Verdict,
    check,
    compose,
    does,
    into,
    lifecycle,
    on,
)
from interlock.specs.graph import Graph
from interlock.specs.lifecycles import USES, acquires, completes, fault_edges, flight, needs, releases
from interlock.specs.machine import read_back
from interlock.specs.model import only, whole
from interlock.specs.mutants import own_lifecycle

NOTHING: tuple[Effect, ...] = ()


def edges(*lines: str) -> tuple[Transition, ...]:
    """Transitions from `source event dest`, which touch nothing."""
    return tuple(Transition(event, source, dest, NOTHING) for source, event, dest in map(str.split, lines))


def tiny(
    *transitions: Transition,
    prop: Property,
    table: dict[str, tuple[str, ...]] | None = None,
    resources: tuple[str, ...] = ("device",),
    exits: str = "",
    automata: tuple[Automaton, ...] = (),
) -> Spec:
    """A spec whose phases are those of its transitions: `a` first, `end` last, `exits` on the way out."""
    names = dict.fromkeys(name for t in transitions for name in (t.source, t.dest))
    names = dict.fromkeys(["a", *names])
    names.pop("end", None)
    kinds = {name: Kind.EXIT if name in exits.split() else Kind.STABLE for name in names}
    phases = (*(Phase(name, kind) for name, kind in kinds.items()), Phase("end", Kind.TERMINAL))
    rows = {name: tuple(t.event for t in transitions if t.source == name) for name in exits.split()}
    return Spec("tiny", phases, resources, transitions, {**rows, **(table or {})}, automata, (prop,))


def verdict(spec: Spec, limit: int = 100_000) -> Verdict:
    (found,) = check(spec, limit, own_lifecycle(spec)).verdicts
    return found


LINE = edges("a go b", "b go c", "c stop end")
BACK = (*LINE, *edges("c back b"))
TAKE = Transition("take", "a", "b", acquires("device"))
TAKEN = Transition("taken", "b", "c", completes("device"))
GIVE = Transition("give", "c", "d", releases("device"))
TAKE_GIVE = (TAKE, TAKEN, GIVE, *edges("d stop end"))


def refuted(name: str, prop: Property, path: str, *transitions: Transition, **more: object) -> object:
    return pytest.param(tiny(*transitions, prop=prop, **more), Result.REFUTED, path, id=name)


def passes(name: str, prop: Property, *transitions: Transition, **more: object) -> object:
    return pytest.param(tiny(*transitions, prop=prop, **more), Result.PROVED, "", id=name)


def of(pattern: Pattern, *args: Atom, **more: object) -> Property:
    return Property("p", pattern, *args, **more)


CLOSED = of(Pattern.CLOSABLE)
CASES = [
    passes("deterministic", of(Pattern.DETERMINISTIC), *LINE),
    passes("all reached", of(Pattern.REACHABLE), *LINE),
    refuted("a phase is not reached", of(Pattern.REACHABLE), "", *LINE, *edges("x go end")),
    refuted(
        "a guard never holds",
        of(Pattern.REACHABLE),
        "",
        *LINE,
        Transition("jump", "a", "c", NOTHING, whole("device")),
    ),
    refuted(
        "an entry of the table is never chosen",
        of(Pattern.REACHABLE),
        "",
        *LINE,
        *edges("a jump c"),
        table={"a": ("go", "jump")},
    ),
    passes(
        "an entry of the table is chosen by those who wish it",
        of(Pattern.REACHABLE),
        *LINE,
        Transition("jump", "a", "c", NOTHING, wish="jump"),
        table={"a": ("jump", "go")},
    ),
    refuted(
        "a wish that no table knows",
        of(Pattern.REACHABLE),
        "",
        *LINE,
        Transition("jump", "a", "c", NOTHING, wish="jump"),
    ),
    passes("no dead end", of(Pattern.NO_DEAD_END), *LINE),
    refuted("a dead end", of(Pattern.NO_DEAD_END), "a --hop--> d", *LINE, *edges("a hop d")),
    refuted(
        "only a fault leads on",
        of(Pattern.NO_DEAD_END),
        "a --hop--> d",
        *LINE,
        *edges("a hop d", "d fail end"),
    ),
    passes("closable", CLOSED, *BACK),
    refuted("a trap", CLOSED, "a --hop--> d", *LINE, *edges("a hop d", "d on e", "e on d")),
    refuted(
        "a trap but for faults", CLOSED, "a --hop--> d", *LINE, *edges("a hop d", "d on d", "d fail end")
    ),
    refuted(
        "a way back",
        of(Pattern.ONE_WAY),
        "a --go--> b --go--> c --back--> b",
        *BACK,
        exits="c",
    ),
    passes("the way out", of(Pattern.ONE_WAY), *LINE, exits="b c"),
    passes("the table answers", of(Pattern.TABLE_TOTAL), *LINE, table={"b": ("go",)}),
    refuted(
        "the table answers only those who wish it",
        of(Pattern.TABLE_TOTAL),
        "a --go--> b",
        *edges("a go b"),
        Transition("go", "b", "end", NOTHING, wish="far"),
        table={"b": ("go",)},
    ),
    passes(
        "accepted",
        of(Pattern.UNIVERSALITY, on("fail")),
        *LINE,
        *edges("a fail end", "b fail end", "c fail end"),
    ),
    refuted(
        "not accepted",
        of(Pattern.UNIVERSALITY, on("fail")),
        "a --go--> b --go--> c",
        *LINE,
        *edges("a fail end", "b fail end"),
    ),
    passes(
        "accepted before the way out",
        of(Pattern.UNIVERSALITY, on("fail"), scope=Scope.RUNNING),
        *LINE,
        *edges("a fail end"),
        exits="b",
    ),
    passes(
        "accepted while the device is held",
        of(Pattern.UNIVERSALITY, on("lose"), scope=Scope.ON_DEVICE),
        *TAKE_GIVE,
        *edges("b lose end", "c lose end"),
    ),
    refuted(
        "not accepted while the device is held",
        of(Pattern.UNIVERSALITY, on("lose"), scope=Scope.ON_DEVICE),
        "a --take--> b --taken--> c",
        *TAKE_GIVE,
        *edges("b lose end"),
    ),
    passes("absence", of(Pattern.ABSENCE, on("jump")), *LINE),
    refuted("presence", of(Pattern.ABSENCE, into("c")), "a --go--> b --go--> c", *LINE),
    passes("absence after", of(Pattern.ABSENCE, on("go"), after=on("stop")), *LINE),
    refuted(
        "presence after",
        of(Pattern.ABSENCE, on("back"), after=on("back")),
        "a --go--> b --go--> c --back--> b --go--> c --back--> b",
        *BACK,
    ),
    passes("precedence", of(Pattern.PRECEDENCE, on("stop"), first=into("b")), *BACK),
    passes("precedence on one edge", of(Pattern.PRECEDENCE, into("b"), first=on("go")), *LINE),
    refuted(
        "no precedence",
        of(Pattern.PRECEDENCE, on("stop"), first=into("b")),
        "a --jump--> c --stop--> end",
        *LINE,
        *edges("a jump c"),
    ),
    refuted(
        "no precedence in the second epoch",
        of(Pattern.PRECEDENCE, on("stop"), first=on("go"), since=on("renew")),
        "a --go--> b --go--> c --renew--> c --stop--> end",
        *LINE,
        *edges("c renew c"),
    ),
    refuted(
        "an attempt counts where it must not come first",
        of(Pattern.PRECEDENCE, does("needs", "device"), first=does("completes", "device")),
        "a --peek--> a",
        Transition("peek", "a", "a", needs("device")),
        *TAKE_GIVE,
    ),
    passes("at most once", of(Pattern.BOUNDED_EXISTENCE, on("stop")), *BACK),
    refuted("twice", of(Pattern.BOUNDED_EXISTENCE, on("go")), "a --go--> b --go--> c", *LINE),
    passes("existence", of(Pattern.EXISTENCE, into("d")), *TAKE_GIVE),
    refuted(
        "a way around",
        of(Pattern.EXISTENCE, into("d")),
        "a --take--> b --taken--> c --skip--> end",
        *TAKE_GIVE,
        *edges("c skip end"),
    ),
    passes("nothing was held", of(Pattern.EXISTENCE, into("d")), *TAKE_GIVE, *edges("a quit end")),
    passes(
        "an excused way around",
        of(Pattern.EXISTENCE, into("d"), after=on("skip")),
        *TAKE_GIVE,
        *edges("c skip end"),
    ),
    refuted(
        "what was held again after it",
        of(Pattern.EXISTENCE, into("d")),
        "a --take--> b --taken--> c --give--> d --again--> e --quit--> end",
        *TAKE_GIVE,
        Transition("again", "d", "e", acquires("device")),
        *edges("e quit end"),
    ),
    passes("response", of(Pattern.RESPONSE, on("go")), *LINE),
    refuted("a cycle", of(Pattern.RESPONSE, on("go")), "a --go--> b", *BACK),
    refuted("no answer", of(Pattern.RESPONSE, on("hop")), "a --hop--> d", *LINE, *edges("a hop d")),
    passes("a cycle before", of(Pattern.RESPONSE, on("stop")), *BACK),
    passes("sound", of(Pattern.SOUND, does("releases")), *TAKE_GIVE),
    refuted(
        "released twice",
        of(Pattern.SOUND, does("releases")),
        "a --take--> b --taken--> c --give--> d --give--> e",
        *TAKE_GIVE,
        Transition("give", "d", "e", releases("device")),
        *edges("e stop end"),
    ),
    refuted(
        "a hook that declares nothing",
        of(Pattern.SOUND, does("uses")),
        "a --log--> a",
        Transition("log", "a", "a"),
        Transition("look", "c", "c", USES),
        *TAKE_GIVE,
    ),
    passes("nested", of(Pattern.NESTED, does("releases", "device"), held=("*",)), *TAKE_GIVE),
    refuted(
        "the outer one first",
        of(Pattern.NESTED, does("releases", "device"), held=("*",)),
        "a --take--> b --taken--> c --load--> e --give--> d",
        *TAKE_GIVE,
        Transition("load", "c", "e", acquires("model")),
        Transition("give", "e", "d", releases("device")),
        resources=("device", "model"),
    ),
    passes("ended", of(Pattern.ENDED), *TAKE_GIVE),
    refuted(
        "held at the end", of(Pattern.ENDED), "a --take--> b --quit--> end", *TAKE_GIVE, *edges("b quit end")
    ),
]


@pytest.mark.parametrize(("spec", "result", "path"), CASES)
def test_decides_a_tiny_spec(spec: Spec, result: Result, path: str) -> None:
    found = verdict(spec)
    assert (found.result, found.path) == (result, path)
    assert bool(found.note) is (result is Result.REFUTED)
    slot = lifecycle(spec).slot()
    for edge in found.trace:
        assert slot.fire(edge.rule.transition.event).config == edge.dest


def test_each_pattern_is_decided_both_ways() -> None:
    seen = {(c.values[0].properties[0].pattern, c.values[1]) for c in CASES}
    both = {(pattern, result) for pattern in Pattern for result in (Result.PROVED, Result.REFUTED)}
    assert both - seen == {(Pattern.DETERMINISTIC, Result.REFUTED)}  # such a spec cannot be built


def test_a_machine_that_was_tampered_with_is_not_deterministic() -> None:
    spec = tiny(*LINE, *edges("a hop c"), prop=of(Pattern.DETERMINISTIC))
    life = own_lifecycle(spec)
    going, hopping = (life.machine.events[name].transitions["a"][0] for name in ("go", "hop"))
    hopping.conditions, hopping.before = going.conditions, going.before
    tampered = type(life)(spec, life.machine, read_back(life.machine))
    (found,) = check(spec, life=tampered).verdicts
    assert (found.result, found.note) == (
        Result.REFUTED,
        "the machine fires a --go--> b for 'hop' in 'a'",
    )


# What is not known is never a pass


@pytest.mark.parametrize(
    "prop",
    [
        of(Pattern.ABSENCE, on("go"), after=on("never")),
        of(Pattern.PRECEDENCE, on("never"), first=on("go")),
        of(Pattern.BOUNDED_EXISTENCE, on("never")),
        of(Pattern.EXISTENCE, on("never")),
        of(Pattern.RESPONSE, on("never")),
        of(Pattern.SOUND, does("steps")),
        of(Pattern.NESTED, does("releases"), held=("*",)),
    ],
    ids=lambda prop: prop.pattern,
)
def test_what_never_happens_is_undetermined(prop: Property) -> None:
    found = verdict(tiny(*LINE, prop=prop))
    assert found.result is Result.UNDETERMINED
    assert found.note.startswith("vacuous: ")


def test_a_search_that_is_cut_short_is_undetermined_unless_it_refutes() -> None:
    spec = tiny(*LINE, prop=of(Pattern.ABSENCE, on("never")))
    assert verdict(spec).result is Result.PROVED
    assert verdict(spec, limit=2).result is Result.UNDETERMINED
    assert "raise the limit" in verdict(spec, limit=2).note
    assert verdict(tiny(*LINE, prop=of(Pattern.ABSENCE, on("go"))), limit=2).result is Result.REFUTED


def test_a_report_without_properties_is_no_proof() -> None:
    spec = Spec("bare", tiny(*LINE, prop=CLOSED).phases, (), LINE, {})
    assert check(spec).result is Result.UNDETERMINED


# Oracles: networkx's dominators and cycles, on random specs


def random_specs(count: int, prop: Property) -> Iterator[Spec]:
    """Small specs; the device is taken with the first step and kept."""
    source = random.Random(7)
    for _ in range(count):
        size = source.randint(3, 8)
        names = [f"n{number}" for number in range(size)]
        found = {("a", "begin"): Transition("begin", "a", "n0", acquires("device"))}
        for _ in range(source.randint(size, 2 * size)):
            here, there = source.choice(names), source.choice([*names, "end"])
            event = source.choice(("x", "y", "z", "go", "on"))
            found.setdefault((here, event), Transition(event, here, there, NOTHING))
        yield tiny(*found.values(), prop=prop)


def phase_graph(spec: Spec) -> nx.DiGraph:
    graph = nx.DiGraph((t.source, t.dest) for t in spec.transitions)
    return graph.subgraph({"a"} | nx.descendants(graph, "a"))


def dominated_by(graph: nx.DiGraph, root: object, node: object) -> set[object]:
    above = nx.immediate_dominators(graph, root)
    found = {node}
    while node != root:
        node = above[node]
        found.add(node)
    return found


def test_existence_is_post_dominance() -> None:
    seen = set()
    for spec in random_specs(300, of(Pattern.EXISTENCE, into("n1"))):
        graph = phase_graph(spec)
        expected = Result.PROVED
        if "n1" not in graph:
            expected = Result.UNDETERMINED
        if "end" in nx.descendants(graph, "n0") and "n1" not in dominated_by(graph.reverse(), "end", "n0"):
            expected = Result.REFUTED
        assert verdict(spec).result is expected, spec.transitions
        seen.add(expected)
    assert seen == set(Result)


def test_precedence_is_dominance_of_transitions() -> None:
    seen = set()
    for spec in random_specs(300, of(Pattern.PRECEDENCE, on("x"), first=on("y"))):
        phases = phase_graph(spec)
        taken = [t for t in spec.transitions if t.source in phases]
        name = {t: "first" if t.event == "y" else t for t in taken}
        lines = nx.DiGraph(("start", name[t]) for t in taken if t.source == "a")
        lines.add_edges_from((name[t], name[u]) for t in taken for u in taken if t.dest == u.source)
        what = [t for t in taken if t.event == "x"]
        expected = Result.PROVED if what else Result.UNDETERMINED
        if any("first" not in dominated_by(lines, "start", t) for t in what):
            expected = Result.REFUTED
        found = verdict(spec)
        assert found.result is expected, spec.transitions
        if expected is Result.REFUTED:
            free = nx.DiGraph((t.source, t.dest) for t in spec.transitions if t.event != "y")
            away = nx.single_source_shortest_path_length(free, "a")
            assert len(found.trace) == 1 + min(away[t.source] for t in what if t.source in away)
        seen.add(expected)
    assert seen == set(Result)


def test_response_is_the_absence_of_cycles_and_dead_ends() -> None:
    seen = set()
    for spec in random_specs(300, of(Pattern.RESPONSE, on("x"))):
        graph = phase_graph(spec)
        causes = {t.dest for t in spec.transitions if t.event == "x" and t.source in graph}
        after = graph.subgraph(causes.union(*(nx.descendants(graph, node) for node in causes)))
        stuck = [node for node in after if node != "end" and not graph.out_degree(node)]
        expected = Result.PROVED if causes else Result.UNDETERMINED
        if stuck or not nx.is_directed_acyclic_graph(after):
            expected = Result.REFUTED
        assert verdict(spec).result is expected, spec.transitions
        seen.add(expected)
    assert seen == set(Result)


@pytest.mark.parametrize("name", MONITORS)
def test_the_end_can_be_reached_from_every_configuration_by_networkx_too(name: str) -> None:
    graph = Graph(own_lifecycle(compose(TRAINING, MONITORS[name])))
    reverse = nx.DiGraph((edge.dest, edge.source) for edge in graph.edges)
    ends = [config for config in graph.configs if config.phase == "closed"]
    assert set(ends).union(*(nx.descendants(reverse, end) for end in ends)) == set(graph.configs)


# The specs themselves, and those of users


@pytest.mark.parametrize("monitor", MONITORS)
@pytest.mark.parametrize("spec", [TRAINING, INFERENCE], ids=lambda spec: spec.name)
def test_everything_is_proved_on_every_backend(spec: Spec, monitor: str) -> None:
    report = check(compose(spec, MONITORS[monitor]))
    assert [str(v) for v in report.verdicts if not v.holds] == []
    assert report.proved
    assert len(report.verdicts) >= 30


def extended(*transitions: Transition, phase: str = "", **more: object) -> Spec:
    """The training spec with a user's own transitions, and perhaps a phase of theirs."""
    phases = (Phase(phase, Kind.FLIGHT, f"{phase}_done"),) if phase else ()
    faults = fault_edges(phases)
    return compose(TRAINING.extend(phases=phases, transitions=(*transitions, *faults), **more), CPU)


EVALUATE = flight(
    "benchmark", "training", "benchmarking", "benchmarking_done", "training", begin=(*needs("model"), *USES)
)


def test_a_users_phase_that_keeps_the_promises_is_proved() -> None:
    assert check(extended(*EVALUATE, phase="benchmarking")).proved


def test_a_users_phase_without_fault_edges_is_refuted() -> None:
    phase = Phase("benchmarking", Kind.FLIGHT, "benchmarking_done")
    report = check(compose(TRAINING.extend(phases=(phase,), transitions=EVALUATE), CPU))
    found = report["fail-accepted"]
    assert found.result is Result.REFUTED
    assert found.note == "fail is not accepted in 'benchmarking'"
    assert found.events == (
        "acquire",
        "acquired",
        "place",
        "placed",
        "optimize",
        "optimized",
        "train",
        "benchmark",
    )


def test_a_users_hook_that_declares_nothing_counts_as_touching_the_device() -> None:
    hook = Transition("log", "suspended", "suspended")
    found = check(extended(hook))["no-device-use-without-device"]
    assert found.result is Result.REFUTED
    assert found.events[-2:] == ("returned", "log")
    assert "device is absent" in found.note
    assert check(extended(Transition("log", "suspended", "suspended", NOTHING))).proved


def test_a_users_way_around_offloading_is_refuted_by_name() -> None:
    report = check(extended(Transition("quit", "created", "closed", NOTHING, only())))
    assert report.proved  # nothing is held yet
    report = check(extended(Transition("quit", "training", "closed", NOTHING)))
    assert {v.prop.name for v in report.verdicts if v.result is Result.REFUTED} == {
        "offloaded-on-teardown",
        "nothing-held-at-the-end",
    }


def test_all_mistakes_of_a_spec_are_named_at_once_with_their_remedies() -> None:
    with pytest.raises(SpecError) as caught:
        Spec(
            "wrong",
            (
                Phase("a", Kind.STABLE),
                Phase("a", Kind.STABLE),
                Phase("f", Kind.FLIGHT, "done"),
                Phase("x", Kind.EXIT),
                Phase("end", Kind.TERMINAL),
            ),
            ("device", "device"),
            (
                Transition("go", "a", "end", NOTHING),
                Transition("go", "a", "f", NOTHING),
                Transition("on", "a", "nowhere", acquires("ghost"), whole("phantom")),
                Transition("back", "end", "a", NOTHING),
            ),
            {"a": ("fly",), "b": ("go",)},
            (Automaton("m", "s", {("t", "go"): "s"}), Automaton("m", "s", {("s", "go"): "s"})),
        )
    text = str(caught.value)
    for part in (
        "phase 'a' is there twice: rename",
        "resource 'device' is there twice: name it once",
        "in-flight phase 'f' has no transition for its done event 'done': add one",
        "event 'go' leaves phase 'a' twice: one destination",
        "names phase 'nowhere', which is not declared: add it",
        "acquires ghost, a resource that is not declared: add it",
        "names resource 'phantom', which is not declared: add it",
        "terminal phase 'end' is left by 'back': remove",
        "sends 'fly' in phase 'a', where it is never legal: use one of go, on",
        "has a row for 'b', which is no phase: remove it",
        "exit phase 'x' has no row in the continuation table: add one",
        "automaton 'm' never enters its state 't'",
        "automaton 'm' is there twice: rename",
    ):
        assert part in text
    assert len(caught.value.problems) == 13


def test_a_verdict_prints_its_property_its_reason_and_its_path() -> None:
    found = verdict(tiny(*LINE, prop=of(Pattern.ABSENCE, into("c"), doc="never to c")))
    assert str(found) == "\n".join(
        ("     refuted  p: never to c", f"{'':14}enters c happens", f"{'':14}a --go--> b --go--> c")
    )


def test_statuses_and_verbs_are_all_spoken_of() -> None:
    graph = Graph(own_lifecycle(compose(TRAINING, CPU)))
    assert {status for config in graph.configs for status in config.statuses} == set(Status)
    assert {verb for edge in graph.edges for verb, _ in edge.outcome.changes} == set(Verb)
