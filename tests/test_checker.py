"""The checker decides each pattern, gives a shortest trace, and never passes what it does not know."""

from __future__ import annotations

import networkx as nx
import pytest
from tools.tiny import CASES, CLOSED, LINE, NOTHING, edges, of, random_specs, tiny

from interlock.backends.monitors import CPU, MONITORS
from interlock.specs import (
    INFERENCE,
    TRAINING,
    Automaton,
    Kind,
    Pattern,
    Phase,
    Property,
    Result,
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
from interlock.specs.lifecycles import USES, acquires, fault_edges, flight, needs
from interlock.specs.machine import read_back
from interlock.specs.model import only, whole
from interlock.specs.mutants import own_lifecycle


def verdict(spec: Spec, limit: int = 100_000) -> Verdict:
    (found,) = check(spec, limit, own_lifecycle(spec)).verdicts
    return found


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
