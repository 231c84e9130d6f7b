"""Deliberately wrong variants of a spec: what a proof is worth is how many of them it refutes.

`mutants(spec)` takes away each transition, effect, guard, table entry, automaton and move, sends
transitions elsewhere, and adds the edges of `WRONG_EDGES`. `judge` checks one of them. A mutant
that no property refutes either breaks no promise, or shows a promise that no property states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .checker import Report, check
from .errors import SpecError
from .machine import Lifecycle, machine_for, read_back
from .model import EVERY, FAULTS, Automaton, Kind, Spec, Transition, Verb
from .wrong_edges import WRONG_EDGES, WrongEdge

_ENDINGS = (Verb.RELEASES, Verb.TRANSFERS, Verb.SPOILS, Verb.ABANDONS)


@dataclass(frozen=True)
class Mutant:
    """A variant of a spec.

    Attributes:
        name: What was changed, unique among the mutants of one spec.
        kind: `drop transition`, `drop fault edge`, ... : one of `KINDS`.
        spec: The variant, or `None` if it cannot even be built.
        note: Why it cannot be built, or why the change is wrong, where that is not plain.
    """

    name: str
    kind: str
    spec: Spec | None
    note: str = ""


KINDS = (
    "drop transition",
    "drop fault edge",
    "drop release",
    "drop effect",
    "undeclare effects",
    "drop guard",
    "drop table entry",
    "swap table order",
    "drop automaton",
    "drop move",
    "add move",
    "swap destination",
    "add wrong edge",
)
"""The kinds of mutant, in the order in which they come."""


def mutants(
    spec: Spec, base: Spec | None = None, edges: Iterable[WrongEdge] = WRONG_EDGES
) -> Iterator[Mutant]:
    """All mutants of a spec, in a fixed order.

    Args:
        spec: Usually a composed one.
        base: Leave out mutants that change only what `base` has too (what a backend does not add).
        edges: Wrong edges to add, one mutant each.
    """
    for name, kind, note, change in _changes(spec, base, tuple(edges)):
        try:
            yield Mutant(name, kind, replace(spec, name=f"{spec.name}: {kind}: {name}", **change), note)
        except SpecError as error:
            yield Mutant(name, kind, None, "; ".join(error.problems))


def judge(mutant: Mutant) -> Report:
    """Check a mutant on a machine of its own, which is not kept.

    Raises:
        ValueError: It could not be built.
    """
    if mutant.spec is None:
        raise ValueError(f"mutant '{mutant.name}' cannot be built: {mutant.note}")
    return check(mutant.spec, life=own_lifecycle(mutant.spec))


def own_lifecycle(spec: Spec) -> Lifecycle:
    """A lifecycle of a spec that nobody shares and that is freed with its last user."""
    machine = machine_for(spec)
    return Lifecycle(spec, machine, read_back(machine))


_Change = tuple[str, str, str, Mapping[str, Any]]
"""(name, kind, note, the fields of the spec that change)."""


def _changes(spec: Spec, base: Spec | None, edges: tuple[WrongEdge, ...]) -> Iterator[_Change]:
    old = frozenset(base.transitions) if base else frozenset()
    new = [(number, t) for number, t in enumerate(spec.transitions) if t not in old]
    for number, t in new:
        yield str(t), _dropped(t), "", _without(spec, number)
    for number, t in new:
        for name, kind, transition in _weaker(t):
            yield name, kind, "", _changed(spec, number, transition)
    rows = [(phase, row) for phase, row in spec.table.items() if not base or base.table.get(phase) != row]
    for phase, row in rows:
        yield from _table(spec, phase, row)
    for automaton in spec.automata:
        if not base or automaton not in base.automata:
            yield from _automaton(spec, automaton)
    for number, t in new:
        for dest in _elsewhere(spec, t):
            yield f"{t} goes to {dest}", "swap destination", "", _changed(spec, number, replace(t, dest=dest))
    for edge in edges:
        yield from _added(spec, base, edge)


def _dropped(t: Transition) -> str:
    return "drop fault edge" if t.event in FAULTS else "drop transition"


def _without(spec: Spec, number: int) -> dict[str, Any]:
    """Without one transition; the table no longer sends its event there."""
    t = spec.transitions[number]
    row = tuple(event for event in spec.table.get(t.source, ()) if event != t.event)
    table = {**spec.table, t.source: row} if t.source in spec.table else dict(spec.table)
    transitions = spec.transitions[:number] + spec.transitions[number + 1 :]
    return {"transitions": transitions, "table": {phase: events for phase, events in table.items() if events}}


def _changed(spec: Spec, number: int, t: Transition) -> dict[str, Any]:
    return {"transitions": (*spec.transitions[:number], t, *spec.transitions[number + 1 :])}


def _weaker(t: Transition) -> Iterator[tuple[str, str, Transition]]:
    """One effect or one guard fewer, or harmlessness not declared."""
    effects = t.effects or ()
    for n, effect in enumerate(effects):
        kind = "drop release" if effect.verb in _ENDINGS else "drop effect"
        yield f"{t} no longer {effect}", kind, replace(t, effects=effects[:n] + effects[n + 1 :])
    if t.effects == ():
        yield f"{t} declares nothing", "undeclare effects", replace(t, effects=None)
    for n, guard in enumerate(t.when):
        yield f"{t} whether or not {guard}", "drop guard", replace(t, when=t.when[:n] + t.when[n + 1 :])


def _table(spec: Spec, phase: str, row: tuple[str, ...]) -> Iterator[_Change]:
    for n, event in enumerate(row):
        shorter = {**spec.table, phase: row[:n] + row[n + 1 :]}
        yield f"{phase} no longer sends {event}", "drop table entry", "", {"table": shorter}
    for n, (first, second) in enumerate(pairwise(row)):
        swapped = {**spec.table, phase: (*row[:n], second, first, *row[n + 2 :])}
        yield f"{phase} sends {second} before {first}", "swap table order", "", {"table": swapped}


def _automaton(spec: Spec, automaton: Automaton) -> Iterator[_Change]:
    number = spec.automata.index(automaton)
    before, after = spec.automata[:number], spec.automata[number + 1 :]
    yield automaton.name, "drop automaton", "", {"automata": before + after}
    moves = dict(automaton.moves)
    states = dict.fromkeys((automaton.initial, *moves.values()))
    for state, event in sorted(moves):
        fewer = {pair: dest for pair, dest in moves.items() if pair != (state, event)}
        name = f"{automaton.name} in {state} refuses {event}"
        yield name, "drop move", "", {"automata": (*before, replace(automaton, moves=fewer), *after)}
    for state in states:
        for event in sorted(automaton.alphabet):
            if (state, event) not in moves:
                usual = next(dest for (_, e), dest in moves.items() if e == event)
                more = {**moves, (state, event): usual}
                name = f"{automaton.name} in {state} accepts {event}"
                yield name, "add move", "", {"automata": (*before, replace(automaton, moves=more), *after)}


def _elsewhere(spec: Spec, t: Transition) -> Iterator[str]:
    """Other destinations: back, the end, where the work is done, the next phase."""
    names = [phase.name for phase in spec.phases]
    work = next((phase.name for phase in spec.phases if phase.kind is Kind.WORK), spec.initial)
    following = names[(names.index(t.dest) + 1) % len(names)]
    chosen = dict.fromkeys((t.source, spec.terminal, work, following))
    yield from (name for name in chosen if name != t.dest)


def _added(spec: Spec, base: Spec | None, edge: WrongEdge) -> Iterator[_Change]:
    first = edge.transitions[0]
    if not _fits(spec, edge) or (base and _fits(base, edge)):
        return
    table = dict(spec.table)
    exits = {phase.name for phase in spec.phases if phase.kind is Kind.EXIT}
    new = [replace(t, wish="extra") if t.source in exits else t for t in edge.transitions]
    for t in new:
        if t.wish:  # only the table leads on from an exit phase
            table[t.source] = (t.event, *table[t.source])
    phases = (*spec.phases[:-1], *edge.phases, *spec.phases[-1:])
    change = {"phases": phases, "transitions": (*spec.transitions, *new), "table": table}
    yield f"{first}, {edge.why}", "add wrong edge", edge.why, change


def _fits(spec: Spec, edge: WrongEdge) -> bool:
    phases = {phase.name for phase in (*spec.phases, *edge.phases)}
    resources = {*spec.resources, EVERY}
    return all(
        {t.source, t.dest} <= phases
        and {e.resource for e in t.declared} <= resources
        and {g.resource for g in t.when} <= resources
        for t in edge.transitions
    )
