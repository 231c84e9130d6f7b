"""One function for each property pattern, which decides it on an explored graph.

Each is a breadth-first search (safety), or looks for a cycle or a dead end (response), so that
what it finds is a shortest trace. `FAULTS` strike from outside: no run can count on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .graph import Edge, Graph
from .model import EVERY, FAULTS, REACHABLE, Kind, Status
from .properties import Atom, Pattern, Property, Scope, does

Finding = tuple[tuple[Edge, ...], str, str]
"""(shortest trace, where it breaks, why it would be vacuous); all empty means proved."""


def _deterministic(graph: Graph, _: Property) -> Finding:
    seen: dict[tuple[str, str], str] = {}
    for t in graph.spec.transitions:
        if seen.setdefault((t.source, t.event), t.dest) != t.dest:
            return (), f"{t.source} --{t.event}--> {t.dest} and {seen[t.source, t.event]}", ""
    for phase, row in graph.rules.items():
        for event, rule in row.items():
            if (rule.transition.source, rule.transition.event) != (phase, event):
                return (), f"the machine fires {rule.transition} for '{event}' in '{phase}'", ""
    return (), "", ""


def _reachable(graph: Graph, _: Property) -> Finding:
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
            and t.event not in (*spec.table.get(t.source, ()), *FAULTS)
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


def _no_dead_end(graph: Graph, _: Property) -> Finding:
    def stuck(number: int) -> bool:
        return not graph.end[number] and all(
            graph.edges[e].rule.transition.event in FAULTS for e in graph.out[number]
        )

    return _where(graph, stuck, "only faults lead on from")


def _closable(graph: Graph, _: Property) -> Finding:
    back: list[list[int]] = [[] for _ in graph.configs]
    for edge, there in enumerate(graph.dest):
        if graph.edges[edge].rule.transition.event not in FAULTS:
            back[there].append(graph.source[edge])
    can = {number for number, end in enumerate(graph.end) if end}
    todo = list(can)
    while todo:
        for number in back[todo.pop()]:
            if number not in can:
                can.add(number)
                todo.append(number)
    return _where(
        graph,
        lambda number: number not in can,
        f"'{graph.spec.terminal}' cannot be reached without a fault from",
    )


def _one_way(graph: Graph, _: Property) -> Finding:
    out, back = _kinds(graph, Kind.EXIT), _kinds(graph, Kind.STABLE, Kind.WORK)
    trace = graph.search(
        lambda edge, bits: bool(bits) and back(graph.dest[edge]),
        lambda edge, bits: bits or int(out(graph.dest[edge])),
    )
    return trace, f"back in '{trace[-1].dest.phase}' from the way out" if trace else "", ""


def _table_total(graph: Graph, _: Property) -> Finding:
    def unanswered(number: int) -> bool:
        config = graph.configs[number]
        events = graph.spec.table.get(config.phase)
        if not events:
            return False
        row = graph.rules[config.phase]
        return not any(not row[e].transition.wish and row[e].allowed(config) for e in events)

    return _where(graph, unanswered, "the continuation table has no answer in")


def _universality(graph: Graph, prop: Property) -> Finding:
    marks = graph.marks(prop.what)
    scope = _SCOPES[prop.scope](graph)
    return _where(
        graph,
        lambda n: scope(n) and not any(marks[e] for e in graph.out[n]),
        f"{prop.what} is not accepted in",
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


def _absence(graph: Graph, prop: Property) -> Finding:
    what, after = graph.marks(prop.what, tried=True), graph.marks(prop.after)
    if prop.after == Atom():
        trace = graph.search(lambda edge, _: what[edge])
        return trace, f"{prop.what} happens" if trace else "", ""
    trace = graph.search(
        lambda edge, bits: bool(bits) and what[edge], lambda edge, bits: bits or int(after[edge])
    )
    return trace, f"{prop.what} after {prop.after}" if trace else "", _vacuous(after, prop.after)


def _precedence(graph: Graph, prop: Property) -> Finding:
    what = graph.marks(prop.what, tried=True)
    first, since = graph.marks(prop.first), graph.marks(prop.since)
    trace = graph.search(
        lambda edge, bits: not bits and what[edge] and not first[edge],
        lambda edge, bits: 1 if first[edge] else 0 if since[edge] else bits,
    )
    note = f"{prop.what} without {prop.first} before it" if trace else ""
    return trace, note, _vacuous(what, prop.what)


def _bounded(graph: Graph, prop: Property) -> Finding:
    what = graph.marks(prop.what, tried=True)
    trace = graph.search(
        lambda edge, bits: bool(bits) and what[edge], lambda edge, bits: bits or int(what[edge])
    )
    return trace, f"{prop.what} a second time" if trace else "", _vacuous(what, prop.what)


def _existence(graph: Graph, prop: Property) -> Finding:
    """Post-dominance, as a search for a path around: 1 = `what` is due, 2 = the path is excused."""
    what, unless = graph.marks(prop.what), graph.marks(prop.after)
    begins = graph.marks(does("acquires"))

    def due(edge: int, bits: int) -> int:
        if unless[edge] or bits == 2:
            return 2
        return 0 if what[edge] else bits or int(begins[edge])

    trace = graph.search(lambda edge, bits: graph.end[graph.dest[edge]] and due(edge, bits) == 1, due)
    return trace, f"the end is reached around '{prop.what}'" if trace else "", _vacuous(what, prop.what)


def _response(graph: Graph, prop: Property) -> Finding:
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


def _sound(graph: Graph, prop: Property) -> Finding:
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


def _nested(graph: Graph, prop: Property) -> Finding:
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


def _ended(graph: Graph, _: Property) -> Finding:
    trace, note, vacuous = _where(
        graph, lambda number: graph.end[number] and graph.holding[number], "something is held in"
    )
    return trace, note, vacuous or ("" if any(graph.end) else "no run ends")


def _vacuous(marks: Sequence[bool], atom: Atom) -> str:
    return "" if any(marks) else f"no transition does {atom}"


def _where(graph: Graph, bad: Callable[[int], bool], what: str) -> Finding:
    """The first bad configuration; numbers follow the distance from the start, so it is nearest."""
    number = next((n for n in range(len(graph.configs)) if bad(n)), None)
    if number is None:
        return (), "", ""
    return graph.path_to(number), f"{what} '{graph.configs[number].phase}'", ""


DECIDERS: dict[Pattern, Callable[[Graph, Property], Finding]] = {
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
"""Pattern -> what decides it."""
