"""Decides the properties of a spec by exploring its machine, and returns shortest traces.

The graph explored is the product of phases, resource statuses and automata, computed by
`Rule.advance` over the rules that were read back from the `transitions` machine. Wishes are
unknown to the checker: a transition with a wish may or may not be taken, so a proof holds for
every choice. Each property is decided by a breadth-first search (safety), or by looking for a
cycle or a dead end (response), so a refutation comes with a shortest trace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .machine import Lifecycle, lifecycle
from .model import EVERY, REACHABLE, Kind, Spec, Status, Verb
from .properties import Atom, Pattern, Property, Scope, does
from .semantics import Config, Outcome, Rule, start


class Result(StrEnum):
    """What the checker says of a property. Only `PROVED` is a pass."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNDETERMINED = "undetermined"


class Edge(NamedTuple):
    """One transition between two configurations of the product."""

    source: Config
    rule: Rule
    outcome: Outcome

    @property
    def dest(self) -> Config:
        """Where it leads."""
        return self.outcome.config


@dataclass(frozen=True)
class Verdict:
    """What was found about one property.

    Attributes:
        prop: The property.
        result: Proved, refuted or undetermined.
        trace: For refuted: the edges of a shortest path that breaks it, from the start.
        note: Where it breaks, or why it is undetermined.
    """

    prop: Property
    result: Result
    trace: tuple[Edge, ...] = ()
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is proved."""
        return self.result is Result.PROVED

    @property
    def path(self) -> str:
        """The trace as text: `created --acquire--> acquiring --fail--> failed`."""
        return arrows(self.trace)

    @property
    def events(self) -> tuple[str, ...]:
        """The events of the trace."""
        return tuple(edge.rule.transition.event for edge in self.trace)

    def __str__(self) -> str:
        lines = [f"{self.result:>12}  {self.prop.name}: {self.prop.doc}"]
        if self.note:
            lines.append(f"{'':14}{self.note}")
        if self.trace:
            lines.append(f"{'':14}{self.path}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """The verdicts on all properties of one spec.

    Attributes:
        spec: What was checked.
        verdicts: One per property, in the order of the spec.
        configurations: Size of the explored product.
        transitions: Edges of the product.
        seconds: Wall time of build, exploration and decision.
    """

    spec: Spec
    verdicts: tuple[Verdict, ...]
    configurations: int
    transitions: int
    seconds: float

    @property
    def result(self) -> Result:
        """Refuted if any is, else undetermined if any is, else proved."""
        found = {v.result for v in self.verdicts} or {Result.UNDETERMINED}
        for result in (Result.REFUTED, Result.UNDETERMINED):
            if result in found:
                return result
        return Result.PROVED

    @property
    def proved(self) -> bool:
        """Whether every property is proved (and there is at least one)."""
        return self.result is Result.PROVED

    def __getitem__(self, name: str) -> Verdict:
        return next(v for v in self.verdicts if v.prop.name == name)


def arrows(trace: Sequence[Edge]) -> str:
    """A trace as text."""
    if not trace:
        return ""
    return trace[0].source.phase + "".join(f" --{e.rule.transition.event}--> {e.dest.phase}" for e in trace)


class Graph:
    """The reachable product of a lifecycle, with what the deciders need of it.

    Configurations and edges are numbered in the order in which they are found, so configuration 0
    is the start; `out[c]` lists the numbers of the edges that leave configuration `c`.
    """

    def __init__(self, life: Lifecycle, limit: int = 100_000) -> None:
        self.spec = life.spec
        self.rules = life.rules
        self.configs: list[Config] = [start(life.spec)]
        self.edges: list[Edge] = []
        self.source: list[int] = []
        self.dest: list[int] = []
        self.out: list[list[int]] = []
        self.complete = True
        number = {self.configs[0]: 0}
        rows = {phase: tuple(row.values()) for phase, row in life.rules.items()}
        for here, config in enumerate(self.configs):  # grows while it is walked: breadth first
            leaving: list[int] = []
            for rule in rows[config.phase]:
                if not rule.allowed(config):
                    continue
                outcome = rule.advance(config)
                there = number.get(outcome.config)
                if there is None:
                    if len(self.configs) >= limit:
                        self.complete = False
                        continue
                    there = number[outcome.config] = len(self.configs)
                    self.configs.append(outcome.config)
                leaving.append(len(self.edges))
                self.edges.append(Edge(config, rule, outcome))
                self.source.append(here)
                self.dest.append(there)
            self.out.append(leaving)
        self.end = [config.phase == self.spec.terminal for config in self.configs]
        self.holding = [any(s is not Status.ABSENT for s in config.statuses) for config in self.configs]
        # Many edges do the same thing in different configurations: match each kind of deed once.
        kinds: dict[tuple[int, tuple[tuple[Verb, str], ...]], int] = {}
        self._kind = [kinds.setdefault((id(e.rule), e.outcome.changes), len(kinds)) for e in self.edges]
        samples = dict(zip(reversed(self._kind), reversed(self.edges), strict=True))
        self._samples = [samples[kind] for kind in range(len(kinds))]
        self._index = _index(self._samples)
        self._marks: dict[tuple[Atom, bool], list[bool]] = {}
        self.unsound = [number for number, edge in enumerate(self.edges) if edge.outcome.unsound]

    def marks(self, atom: Atom, *, tried: bool = False) -> list[bool]:
        """For each edge whether it matches the atom.

        Args:
            atom: What to look for.
            tried: Whether an effect counts that met a status in which it does nothing: it does
                where a property forbids it, and not where a property waits for it.
        """
        found = self._marks.get((atom, tried))
        if found is None:
            keys = (
                *(("event", event) for event in atom.events),
                *(("enters", phase) for phase in atom.enters),
                *(("tried" if tried else "done", *effect) for effect in atom.effects),
            )
            kinds = frozenset().union(*(self._index.get(key, ()) for key in keys))
            found = self._marks[atom, tried] = [kind in kinds for kind in self._kind]
        return found

    def search(self, goal: Goal, observe: Observe | None = None) -> tuple[Edge, ...]:
        """A shortest path from the start to an edge that satisfies `goal`, or `()`.

        Args:
            goal: Asked of each edge number, with the observer's state before that edge.
            observe: The observer's state (0, 1 or 2; 0 at the start) after an edge.
        """
        came: dict[int, tuple[int, int]] = {0: (-1, -1)}  # 4 * configuration + observer -> (from, edge)
        todo = deque([0])
        while todo:
            node = todo.popleft()
            bits = node & 3
            for edge in self.out[node >> 2]:
                if goal(edge, bits):
                    return self._path(came, node, edge)
                after = (self.dest[edge] << 2) | (observe(edge, bits) if observe else bits)
                if after not in came:
                    came[after] = (node, edge)
                    todo.append(after)
        return ()

    def _path(self, came: dict[int, tuple[int, int]], node: int, edge: int) -> tuple[Edge, ...]:
        path = [self.edges[edge]]
        while node:
            node, edge = came[node]
            if edge >= 0:
                path.append(self.edges[edge])
        return tuple(reversed(path))

    def with_wish(self, wish: str) -> set[int]:
        """The configurations of runs that have one wish and no other."""
        kinds = [sample.rule.transition.wish in ("", wish) for sample in self._samples]
        return self.onward([0], [kinds[kind] for kind in self._kind])

    def onward(self, roots: Iterable[int], usable: Sequence[bool] = ()) -> set[int]:
        """The configurations reached from `roots` (themselves among them) by usable edges, or by any."""
        seen = set(roots)
        todo = list(seen)
        while todo:
            for edge in self.out[todo.pop()]:
                there = self.dest[edge]
                if there not in seen and (not usable or usable[edge]):
                    seen.add(there)
                    todo.append(there)
        return seen

    def path_to(self, config: int) -> tuple[Edge, ...]:
        """A shortest path to a configuration (`()` for the start itself)."""
        return self.search(lambda edge, _: self.dest[edge] == config) if config else ()


Goal = Callable[[int, int], bool]
Observe = Callable[[int, int], int]


def _index(samples: Sequence[Edge]) -> dict[tuple[str, ...], set[int]]:
    """What an atom may ask for -> the numbers of the samples that match."""
    found: dict[tuple[str, ...], set[int]] = {}
    for number, edge in enumerate(samples):
        t = edge.rule.transition
        tried = ((e.verb, e.resource) for _, e in edge.rule.effects)
        keys: list[tuple[str, ...]] = [("event", t.event), ("enters", t.dest)]
        for word, deeds in (("tried", tried), ("done", edge.outcome.changes)):
            for verb, resource in deeds:
                keys += [(word, verb, resource), (word, verb, EVERY)]
        for key in keys:
            found.setdefault(key, set()).add(number)
    return found


_FAULTS = frozenset({"fail", "interrupt", "lose", "peer_fail", "abandon"})


def check(spec: Spec, limit: int = 100_000, life: Lifecycle | None = None) -> Report:
    """Decide every property of a spec.

    Args:
        spec: Usually a composed one (`compose`).
        limit: Largest number of configurations to explore; beyond it, what cannot be refuted is
            undetermined.
        life: The machine to explore, if not the shared one of the spec.

    Returns:
        The report. It is proved only if each single property is.
    """
    begin = time.perf_counter()
    graph = Graph(life or lifecycle(spec), limit)
    verdicts = tuple(decide(graph, prop) for prop in spec.properties)
    return Report(spec, verdicts, len(graph.configs), len(graph.edges), time.perf_counter() - begin)


def decide(graph: Graph, prop: Property) -> Verdict:
    """Decide one property on an explored graph."""
    trace, note, vacuous = _DECIDERS[prop.pattern](graph, prop)
    if trace or note:
        return Verdict(prop, Result.REFUTED, trace, note)
    if not graph.complete:
        return Verdict(prop, Result.UNDETERMINED, note=f"more than {len(graph.configs)} configurations: raise the limit")
    if vacuous:
        return Verdict(prop, Result.UNDETERMINED, note=f"vacuous: {vacuous}")
    return Verdict(prop, Result.PROVED)


_Finding = tuple[tuple[Edge, ...], str, str]
"""(shortest trace, where it breaks, why it would be vacuous); all empty means proved."""


def _deterministic(graph: Graph, prop: Property) -> _Finding:
    seen: dict[tuple[str, str], str] = {}
    for t in graph.spec.transitions:
        if seen.setdefault((t.source, t.event), t.dest) != t.dest:
            return (), f"{t.source} --{t.event}--> {t.dest} and {seen[t.source, t.event]}", ""
    for phase, row in graph.rules.items():
        for event, rule in row.items():
            if (rule.transition.source, rule.transition.event) != (phase, event):
                return (), f"the machine fires {rule.transition} for '{event}' in '{phase}'", ""
    return (), "", ""


def _reachable(graph: Graph, prop: Property) -> _Finding:
    spec = graph.spec
    entered = {config.phase for config in graph.configs}
    used = {id(edge.rule) for edge in graph.edges}
    rules = [rule for row in graph.rules.values() for rule in row.values()]
    found = {
        "never entered": [phase.name for phase in spec.phases if phase.name not in entered],
        "never taken": [str(rule.transition) for rule in rules if id(rule) not in used],
        "missing in the continuation table": [
            str(t)
            for t in spec.transitions
            if (t.wish or spec.phase[t.source].kind is Kind.EXIT)
            and t.event not in (*spec.table.get(t.source, ()), *_FAULTS)
        ],
        "never chosen by the continuation table": _never_chosen(graph),
    }
    note = next((f"{what}: {'; '.join(names)}" for what, names in found.items() if names), "")
    return (), note, ""


def _never_chosen(graph: Graph) -> list[str]:
    """The entries of the table that no run chooses which has their wish and no other."""
    rows = {
        phase: [(event, graph.rules[phase][event]) for event in events]
        for phase, events in graph.spec.table.items()
    }
    due = {(phase, event) for phase, row in rows.items() for event, _ in row}
    for wish in dict.fromkeys(rule.transition.wish for row in rows.values() for _, rule in row):
        mine = {phase: [e for e in row if e[1].transition.wish in ("", wish)] for phase, row in rows.items()}
        for number in graph.with_wish(wish):
            config = graph.configs[number]
            chosen = next((e for e, rule in mine.get(config.phase, ()) if rule.allowed(config)), "")
            due.discard((config.phase, chosen))
    return [str(graph.rules[phase][event].transition) for phase, event in sorted(due)]


def _no_dead_end(graph: Graph, prop: Property) -> _Finding:
    def stuck(number: int) -> bool:
        return not graph.end[number] and all(
            graph.edges[e].rule.transition.event in _FAULTS for e in graph.out[number]
        )

    return _where(graph, stuck, "only faults lead on from")


def _closable(graph: Graph, prop: Property) -> _Finding:
    back: list[list[int]] = [[] for _ in graph.configs]
    for edge, there in enumerate(graph.dest):
        if graph.edges[edge].rule.transition.event not in _FAULTS:
            back[there].append(graph.source[edge])
    can = {number for number, end in enumerate(graph.end) if end}
    todo = list(can)
    while todo:
        for number in back[todo.pop()]:
            if number not in can:
                can.add(number)
                todo.append(number)
    return _where(graph, lambda number: number not in can, f"'{graph.spec.terminal}' cannot be reached without a fault from")


def _one_way(graph: Graph, prop: Property) -> _Finding:
    out, back = _kinds(graph, Kind.EXIT), _kinds(graph, Kind.STABLE, Kind.WORK)
    trace = graph.search(
        lambda edge, bits: bool(bits) and back(graph.dest[edge]),
        lambda edge, bits: bits or int(out(graph.dest[edge])),
    )
    return trace, f"back in '{trace[-1].dest.phase}' from the way out" if trace else "", ""


def _table_total(graph: Graph, prop: Property) -> _Finding:
    def unanswered(number: int) -> bool:
        config = graph.configs[number]
        events = graph.spec.table.get(config.phase)
        if not events:
            return False
        row = graph.rules[config.phase]
        return not any(not row[e].transition.wish and row[e].allowed(config) for e in events)

    return _where(graph, unanswered, "the continuation table has no answer in")


def _universality(graph: Graph, prop: Property) -> _Finding:
    marks = graph.marks(prop.what)
    scope = _SCOPES[prop.scope](graph)
    return _where(
        graph, lambda n: scope(n) and not any(marks[e] for e in graph.out[n]), f"{prop.what} is not accepted in"
    )


def _kinds(graph: Graph, *kinds: Kind) -> Callable[[int], bool]:
    phases = {phase.name for phase in graph.spec.phases if phase.kind in kinds}
    return lambda number: graph.configs[number].phase in phases


def _on_device(graph: Graph) -> Callable[[int], bool]:
    live, resources = _kinds(graph, *_LIVE), graph.spec.resources
    if "device" not in resources:
        return lambda _: False
    device = resources.index("device")
    return lambda number: live(number) and graph.configs[number].statuses[device] in REACHABLE


def _running(graph: Graph) -> Callable[[int], bool]:
    left = _kinds(graph, Kind.EXIT)
    before = graph.onward([0], [not left(there) for there in graph.dest])
    live = _kinds(graph, *_LIVE)
    return lambda number: number in before and live(number)


def _leaving(graph: Graph) -> Callable[[int], bool]:
    left, flying = _kinds(graph, Kind.EXIT), _kinds(graph, Kind.FLIGHT)
    after = graph.onward([number for number in range(len(graph.configs)) if left(number)])
    return lambda number: number in after and flying(number)


_LIVE = (Kind.STABLE, Kind.WORK, Kind.FLIGHT)
_SCOPES: dict[Scope, Callable[[Graph], Callable[[int], bool]]] = {
    Scope.LIVE: lambda graph: _kinds(graph, *_LIVE),
    Scope.ON_DEVICE: _on_device,
    Scope.RESTING: lambda graph: _kinds(graph, Kind.STABLE, Kind.WORK),
    Scope.RUNNING: _running,
    Scope.LEAVING: _leaving,
}


def _absence(graph: Graph, prop: Property) -> _Finding:
    what, after = graph.marks(prop.what, tried=True), graph.marks(prop.after)
    if prop.after == Atom():
        trace = graph.search(lambda edge, _: what[edge])
        return trace, f"{prop.what} happens" if trace else "", ""
    trace = graph.search(
        lambda edge, bits: bool(bits) and what[edge], lambda edge, bits: bits or int(after[edge])
    )
    return trace, f"{prop.what} after {prop.after}" if trace else "", _vacuous(after, prop.after)


def _precedence(graph: Graph, prop: Property) -> _Finding:
    what = graph.marks(prop.what, tried=True)
    first, since = graph.marks(prop.first), graph.marks(prop.since)
    trace = graph.search(
        lambda edge, bits: not bits and what[edge] and not first[edge],
        lambda edge, bits: 1 if first[edge] else 0 if since[edge] else bits,
    )
    note = f"{prop.what} without {prop.first} before it" if trace else ""
    return trace, note, _vacuous(what, prop.what)


def _bounded(graph: Graph, prop: Property) -> _Finding:
    what = graph.marks(prop.what, tried=True)
    trace = graph.search(
        lambda edge, bits: bool(bits) and what[edge], lambda edge, bits: bits or int(what[edge])
    )
    return trace, f"{prop.what} a second time" if trace else "", _vacuous(what, prop.what)


def _existence(graph: Graph, prop: Property) -> _Finding:
    """Post-dominance, as a search for a path around: 1 = `what` is due, 2 = the path is excused."""
    what, unless = graph.marks(prop.what), graph.marks(prop.after)
    begins = graph.marks(does("acquires"))

    def due(edge: int, bits: int) -> int:
        if unless[edge] or bits == 2:
            return 2
        return 0 if what[edge] else bits or int(begins[edge])

    trace = graph.search(lambda edge, bits: graph.end[graph.dest[edge]] and due(edge, bits) == 1, due)
    return trace, f"the end is reached around '{prop.what}'" if trace else "", _vacuous(what, prop.what)


def _response(graph: Graph, prop: Property) -> _Finding:
    """From the configurations after `what`, no cycle and no dead end: the rest is a finite descent."""
    what = graph.marks(prop.what)
    colour: dict[int, int] = {}
    for cause, there in enumerate(graph.dest):
        bad = _cycle_or_dead_end(graph, there, colour) if what[cause] else None
        if bad is not None:
            number, why = bad
            trace = graph.search(
                lambda edge, bits, n=number: bool(bits or what[edge]) and graph.dest[edge] == n,  # type: ignore[misc]
                lambda edge, bits: bits or int(what[edge]),
            )
            return trace, f"{why} '{graph.configs[number].phase}' after {prop.what}", ""
    return (), "", _vacuous(what, prop.what)


def _cycle_or_dead_end(graph: Graph, root: int, colour: dict[int, int]) -> tuple[int, str] | None:
    """Depth-first search; 1 = on the stack, 2 = finished (its descent is known to end)."""
    if colour.get(root):
        return None
    stack = [(root, iter(graph.out[root]))]
    colour[root] = 1
    while stack:
        number, edges = stack[-1]
        edge = next(edges, None)
        if edge is None:
            if not graph.out[number] and not graph.end[number]:
                return number, "dead end in"
            colour[number] = 2
            stack.pop()
            continue
        there = graph.dest[edge]
        if colour.get(there) == 1:
            return there, "a cycle through"
        if there not in colour:
            colour[there] = 1
            stack.append((there, iter(graph.out[there])))
    return None


def _sound(graph: Graph, prop: Property) -> _Finding:
    wanted = set(prop.what.effects)
    bad = {
        number
        for number in graph.unsound
        for e in graph.edges[number].outcome.unsound
        if (str(e.verb), e.resource) in wanted or (str(e.verb), EVERY) in wanted
    }
    if not bad:
        return (), "", _vacuous(graph.marks(prop.what), prop.what)
    trace = graph.search(lambda edge, _: edge in bad)
    effects = ", ".join(str(e) for e in trace[-1].outcome.unsound)
    statuses = zip(graph.spec.resources, trace[-1].source.statuses, strict=True)
    found = ", ".join(f"{name} is {status}" for name, status in statuses)
    return trace, f"'{trace[-1].rule.transition.event}' {effects}, while {found}", ""


def _nested(graph: Graph, prop: Property) -> _Finding:
    what, resources = graph.marks(prop.what), graph.spec.resources
    gone = [i for i, name in enumerate(resources) if name in prop.held or EVERY in prop.held]

    def broken(edge: int, _: int) -> bool:
        return what[edge] and any(graph.edges[edge].dest.statuses[i] is not Status.ABSENT for i in gone)

    trace = graph.search(broken)
    note = ""
    if trace:
        left = [resources[i] for i in gone if trace[-1].dest.statuses[i] is not Status.ABSENT]
        note = f"{prop.what}, while {' and '.join(left)} is held"
    return trace, note, _vacuous(what, prop.what)


def _ended(graph: Graph, prop: Property) -> _Finding:
    trace, note, vacuous = _where(
        graph, lambda number: graph.end[number] and graph.holding[number], "something is held in"
    )
    return trace, note, vacuous or ("" if any(graph.end) else "no run ends")


def _vacuous(marks: Sequence[bool], atom: Atom) -> str:
    return "" if any(marks) else f"no transition does {atom}"


def _where(graph: Graph, bad: Callable[[int], bool], what: str) -> _Finding:
    """The first bad configuration; numbers follow the distance from the start, so it is nearest."""
    number = next((n for n in range(len(graph.configs)) if bad(n)), None)
    if number is None:
        return (), "", ""
    return graph.path_to(number), f"{what} '{graph.configs[number].phase}'", ""


_DECIDERS: dict[Pattern, Callable[[Graph, Property], _Finding]] = {
    Pattern.DETERMINISTIC: _deterministic,
    Pattern.REACHABLE: _reachable,
    Pattern.NO_DEAD_END: _no_dead_end,
    Pattern.CLOSABLE: _closable,
    Pattern.ONE_WAY: _one_way,
    Pattern.TABLE_TOTAL: _table_total,
    Pattern.UNIVERSALITY: _universality,
    Pattern.ABSENCE: _absence,
    Pattern.PRECEDENCE: _precedence,
    Pattern.BOUNDED_EXISTENCE: _bounded,
    Pattern.EXISTENCE: _existence,
    Pattern.RESPONSE: _response,
    Pattern.SOUND: _sound,
    Pattern.NESTED: _nested,
    Pattern.ENDED: _ended,
}
