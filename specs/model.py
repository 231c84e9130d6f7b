"""What a spec *is*: frozen plain data, with no behaviour beyond checking that it can be built.

A `Spec` has phases, resources and transitions; a transition carries effects (what it does to
which resource) and guards (in which status of which resource it may fire). Everything else in
this package - machine, checker, drawings, Promela - is computed from this data.

Vocabulary: a *phase* is where a run is; an *event* takes it along a *transition* to another
phase; a *resource* is something held on the device, whose *status* the effects change; a
*guard* speaks of statuses only, so that the checker can decide it; a *wish* is an option of
the run, fixed at launch, which the checker treats as unknown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .errors import SpecError

if TYPE_CHECKING:
    from .properties import Property

FAULTS = ("fail", "interrupt", "lose", "peer_fail", "abandon")
"""The events by which a fault is told: the one place that knows their names."""
EVERY = "*"
"""In an effect or guard: every resource of the spec, whatever a backend adds to it."""


class Kind(StrEnum):
    """What a phase is for. Only `STABLE`, `WORK` and `FLIGHT` phases before the exit are *live*."""

    STABLE = "stable"
    """The run rests here; nothing is being done."""
    WORK = "work"
    """The engine's loop and the user's code run here; events leave it when the loop says so."""
    FLIGHT = "flight"
    """One operation is in flight; its resource may be half there. Left by `done` or by a fault."""
    EXIT = "exit"
    """A junction on the way out, where only the continuation table decides."""
    TERMINAL = "terminal"
    """The end."""


class Status(StrEnum):
    """How much of a resource is there."""

    ABSENT = "absent"
    PARTIAL = "partial"
    """Half there: being acquired, or being changed."""
    WHOLE = "whole"
    FAULTED = "faulted"
    """One attempt to release it has failed; a second one is due."""
    LOST = "lost"
    """Its device is gone; it can be written off, not touched."""


HELD = frozenset({Status.PARTIAL, Status.WHOLE, Status.FAULTED, Status.LOST})
REACHABLE = HELD - {Status.LOST}
"""Held on a device that still answers."""


class Verb(StrEnum):
    """What a transition does to a resource. See `interlock.specs.semantics` for the meaning."""

    ACQUIRES = "acquires"
    OPENS = "opens"
    COMPLETES = "completes"
    NEEDS = "needs"
    USES = "uses"
    BUILDS = "builds"
    STEPS = "steps"
    SAVES = "saves"
    RELEASES = "releases"
    TRANSFERS = "transfers"
    SPOILS = "spoils"
    ABANDONS = "abandons"
    LOSES = "loses"


@dataclass(frozen=True, slots=True)
class Effect:
    """One verb applied to one resource (or to `EVERY` one)."""

    verb: Verb
    resource: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


@dataclass(frozen=True, slots=True)
class Guard:
    """A transition may fire only while each of the resources has one of the statuses."""

    resource: str
    statuses: frozenset[Status]
    but: frozenset[str] = frozenset()
    """With `EVERY`: the resources that the guard does not speak of."""

    def __str__(self) -> str:
        but = f" but {', '.join(sorted(self.but))}" if self.but else ""
        return f"{self.resource}{but} is {' or '.join(sorted(self.statuses))}"


def whole(*resources: str) -> tuple[Guard, ...]:
    """Guards: each of the resources is completely there."""
    return tuple(Guard(name, frozenset({Status.WHOLE})) for name in resources)


def absent(*resources: str) -> tuple[Guard, ...]:
    """Guards: none of the resources is held."""
    return tuple(Guard(name, frozenset({Status.ABSENT})) for name in resources)


def held(*resources: str) -> tuple[Guard, ...]:
    """Guards: each of the resources is held, wholly or in part, on a device that answers."""
    return tuple(Guard(name, REACHABLE) for name in resources)


def only(*resources: str) -> tuple[Guard, ...]:
    """Guard: nothing is held, except possibly the named resources."""
    return (Guard(EVERY, frozenset({Status.ABSENT}), frozenset(resources)),)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase.

    Attributes:
        name: Unique within the spec.
        kind: See `Kind`.
        done: For `FLIGHT`: the event that ends the operation well.
        doc: One line for people.
    """

    name: str
    kind: Kind
    done: str = ""
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """One arrow: `event` leads from `source` to `dest`.

    Attributes:
        effects: What it does to resources. `None` means *not declared*, and counts as touching
            the device: a transition has to say that it is harmless, by `effects=()`.
        when: Guards; all must hold.
        wish: If set, the continuation table takes this transition only in runs with that wish.
        fast: Fired inside every step by generated code rather than through the machine (the
            update of the optimizer); the driver catches up when a fault strikes there.
    """

    event: str
    source: str
    dest: str
    effects: tuple[Effect, ...] | None = None
    when: tuple[Guard, ...] = ()
    wish: str = ""
    fast: bool = False

    @property
    def declared(self) -> tuple[Effect, ...]:
        """The effects, with the cautious reading of an undeclared transition."""
        return (Effect(Verb.USES, "device"),) if self.effects is None else self.effects

    def __str__(self) -> str:
        return f"{self.source} --{self.event}--> {self.dest}"


@dataclass(frozen=True)
class Automaton:
    """A small automaton over events that runs beside the phases and may refuse an event.

    An event of the `alphabet` for which the present state has no move is refused; events outside
    of the alphabet are none of its business.
    """

    name: str
    initial: str
    moves: Mapping[tuple[str, str], str]
    """(state, event) -> state."""
    doc: str = ""

    @cached_property
    def alphabet(self) -> frozenset[str]:
        """The events about which the automaton has a say."""
        return frozenset(event for _, event in self.moves)


@dataclass(frozen=True)
class Spec:
    """A lifecycle: phases, transitions with effects, the continuation table, properties.

    Attributes:
        name: For people, and part of the hash.
        phases: In the order in which they are drawn; the first is the initial one.
        resources: In the order in which they are acquired.
        transitions: At most one for each (phase, event).
        table: The continuation table. For each phase in which the machine and not the engine's
            loop decides: the events to try, in order; the first whose guards hold and whose wish
            the run has is fired. Its rows for exit phases are the *exit table*.
        automata: Run beside the phases (those of a backend's monitor among them).
        properties: What must be proved before a run may start.
        forbidden: Events a backend has taken out, with the reason.

    Raises:
        SpecError: Naming every mistake with its remedy.
    """

    name: str
    phases: tuple[Phase, ...]
    resources: tuple[str, ...]
    transitions: tuple[Transition, ...]
    table: Mapping[str, tuple[str, ...]]
    automata: tuple[Automaton, ...] = ()
    properties: tuple[Property, ...] = ()
    forbidden: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(f"spec '{self.name}'", problems)

    @property
    def initial(self) -> str:
        """The phase in which every run begins."""
        return self.phases[0].name

    @cached_property
    def phase(self) -> Mapping[str, Phase]:
        """Phases by name."""
        return {phase.name: phase for phase in self.phases}

    @cached_property
    def terminal(self) -> str:
        """The phase in which every run ends."""
        return next(phase.name for phase in self.phases if phase.kind is Kind.TERMINAL)

    @cached_property
    def events(self) -> tuple[str, ...]:
        """All events, in order of first appearance."""
        return tuple(dict.fromkeys(t.event for t in self.transitions))

    @cached_property
    def by_source(self) -> Mapping[str, Mapping[str, Transition]]:
        """phase -> event -> transition."""
        rows: dict[str, dict[str, Transition]] = {phase.name: {} for phase in self.phases}
        for transition in self.transitions:
            rows[transition.source][transition.event] = transition
        return rows

    def extend(
        self,
        *,
        name: str = "",
        phases: tuple[Phase, ...] = (),
        transitions: tuple[Transition, ...] = (),
        resources: tuple[str, ...] = (),
        table: Mapping[str, tuple[str, ...]] | None = None,
        automata: tuple[Automaton, ...] = (),
        properties: tuple[Property, ...] = (),
    ) -> Spec:
        """A new spec with more in it; rows of `table` replace rows, all else is added.

        Nothing is promised for the result: `check` it.
        """
        return replace(
            self,
            name=name or self.name,
            phases=self.phases[:-1] + phases + self.phases[-1:],
            transitions=self.transitions + transitions,
            resources=self.resources + resources,
            table={**self.table, **(table or {})},
            automata=self.automata + automata,
            properties=self.properties + properties,
        )

    def as_data(self) -> dict[str, Any]:
        """The spec as JSON-ready data, in a fixed order (this is what is hashed and exported)."""
        return {
            "name": self.name,
            "initial": self.initial,
            "resources": list(self.resources),
            "phases": [
                {"name": p.name, "kind": str(p.kind), "done": p.done, "doc": p.doc} for p in self.phases
            ],
            "transitions": [
                {
                    "event": t.event,
                    "source": t.source,
                    "dest": t.dest,
                    "effects": None if t.effects is None else [str(e) for e in t.effects],
                    "when": [str(g) for g in t.when],
                    "wish": t.wish,
                    "fast": t.fast,
                }
                for t in self.transitions
            ],
            "table": {phase: list(events) for phase, events in self.table.items()},
            "automata": [
                {
                    "name": a.name,
                    "initial": a.initial,
                    "moves": [[s, e, d] for (s, e), d in sorted(a.moves.items())],
                    "doc": a.doc,
                }
                for a in self.automata
            ],
            "properties": [p.as_data() for p in self.properties],
            "forbidden": dict(self.forbidden),
        }

    @cached_property
    def hash(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of `as_data`, written into journals."""
        text = json.dumps(self.as_data(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _problems(spec: Spec) -> list[str]:
    """Everything that stops a spec from being built, each with its remedy."""
    found: list[str] = []
    names = [phase.name for phase in spec.phases]
    known = set(names)
    if not names:
        return ["it has no phase: give it at least an initial and a terminal one"]
    found += [f"phase '{n}' is there twice: rename one of them" for n in sorted(_twice(names))]
    found += [f"resource '{n}' is there twice: name it once" for n in sorted(_twice(list(spec.resources)))]
    terminal = [phase.name for phase in spec.phases if phase.kind is Kind.TERMINAL]
    if len(terminal) != 1:
        found.append(f"it has {len(terminal)} terminal phases: exactly one must end every run")
    for phase in spec.phases:
        events = [t.event for t in spec.transitions if t.source == phase.name]
        if phase.kind is Kind.FLIGHT and phase.done not in events:
            found.append(
                f"in-flight phase '{phase.name}' has no transition for its done event '{phase.done}': add one"
            )
        if phase.kind is Kind.TERMINAL and events:
            found.append(f"terminal phase '{phase.name}' is left by '{events[0]}': remove that transition")
    for pair in sorted(_twice([(t.source, t.event) for t in spec.transitions])):
        found.append(f"event '{pair[1]}' leaves phase '{pair[0]}' twice: one destination per phase and event")
    for t in spec.transitions:
        for end in (t.source, t.dest):
            if end not in known:
                found.append(f"transition {t} names phase '{end}', which is not declared: add it to `phases`")
        for effect in t.declared:
            if effect.resource != EVERY and effect.resource not in spec.resources:
                found.append(f"transition {t} {effect}, a resource that is not declared: add it")
        for guard in t.when:
            for name in ({guard.resource} - {EVERY}) | guard.but:
                if name not in spec.resources:
                    found.append(f"a guard of {t} names resource '{name}', which is not declared: add it")
    for row, events_of_row in spec.table.items():
        if row not in known:
            found.append(f"the continuation table has a row for '{row}', which is no phase: remove it")
            continue
        legal = {t.event for t in spec.transitions if t.source == row}
        found += [
            f"the continuation table sends '{event}' in phase '{row}', where it is never legal: "
            f"use one of {', '.join(sorted(legal)) or 'none'}"
            for event in events_of_row
            if event not in legal
        ]
    for phase in spec.phases:
        if phase.kind is Kind.EXIT and not spec.table.get(phase.name):
            found.append(f"exit phase '{phase.name}' has no row in the continuation table: add one")
    for automaton in spec.automata:
        states = set(automaton.moves.values()) | {automaton.initial}
        lost = sorted({state for state, _ in automaton.moves} - states)
        found += [f"automaton '{automaton.name}' never enters its state '{state}'" for state in lost]
    found += [
        f"automaton '{n}' is there twice: rename one of them"
        for n in sorted(_twice([a.name for a in spec.automata]))
    ]
    return found


def _twice(items: list[Any]) -> set[Any]:
    return {item for item in items if items.count(item) > 1}
