"""How a backend refines a spec: its `Monitor`, and `compose`, which makes one spec of both.

A monitor is an automaton over events, plus the phases, events and resources that exist only on
this backend (joining a process group, sharding), plus the events it takes away, each with the
reason. Composition yields an ordinary `Spec`, so everything that can be done with a spec -
proof, machine, drawing - is done with the composed one: two correct parts can compose to
something with a dead end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .errors import SpecError
from .model import Automaton, Phase, Spec, Transition
from .properties import Property


@dataclass(frozen=True)
class Monitor:
    """What a backend adds to a lifecycle.

    Attributes:
        name: The backend's name.
        doc: One line for people.
        automata: Run beside the phases; moves on events which the spec does not have are dropped.
        phases: Added; drawn before the exit.
        transitions: Added; those from phases which the spec does not have are dropped.
        resources: Added.
        table: Rows that replace those of the spec; events which the spec does not have are dropped.
        forbids: event -> why this backend does not have it. Phases that only these events lead
            to are removed with them.
        everywhere: (event, dest): events added, harmless, wherever `fail` leads to `failed`.
        properties: Added, unless they are `about` a resource that the spec does not have.
        step: Automata over the events of the *step protocol*.
    """

    name: str
    doc: str = ""
    automata: tuple[Automaton, ...] = ()
    phases: tuple[Phase, ...] = ()
    transitions: tuple[Transition, ...] = ()
    resources: tuple[str, ...] = ()
    table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forbids: Mapping[str, str] = field(default_factory=dict)
    everywhere: tuple[tuple[str, str], ...] = ()
    properties: tuple[Property, ...] = ()
    step: tuple[Automaton, ...] = ()


def compose(spec: Spec, monitor: Monitor) -> Spec:
    """The lifecycle of `spec` on the backend of `monitor`.

    Raises:
        SpecError: The monitor adds what the spec already has, or forbids an event it needs.
    """
    clash = sorted({p.name for p in monitor.phases} & set(spec.phase))
    if clash:
        what = f"spec '{spec.name}' on backend '{monitor.name}'"
        raise SpecError(what, [f"phase '{name}' exists in both: rename the monitor's" for name in clash])
    names = {p.name for p in (*spec.phases, *monitor.phases)}
    transitions = [
        *spec.transitions,
        *(t for t in monitor.transitions if t.source in names and t.dest in names),
    ]
    live = [t.source for t in transitions if t.event == "fail" and t.dest == "failed"]
    transitions += [Transition(event, name, dest, ()) for event, dest in monitor.everywhere for name in live]
    transitions = [t for t in transitions if t.event not in monitor.forbids]
    reached = _reachable(spec.initial, transitions)
    phases = tuple(p for p in _before_exit(spec.phases, monitor.phases) if p.name in reached)
    transitions = [t for t in transitions if t.source in reached]
    legal: dict[str, set[str]] = {}
    for t in transitions:
        legal.setdefault(t.source, set()).add(t.event)
    table = {
        row: kept
        for row, events in {**spec.table, **monitor.table}.items()
        if row in reached and (kept := tuple(e for e in events if e in legal.get(row, ())))
    }
    resources = spec.resources + monitor.resources
    all_events = {t.event for t in transitions}
    automata = tuple(
        replace(a, moves={(s, e): d for (s, e), d in a.moves.items() if e in all_events})
        for a in (*spec.automata, *monitor.automata)
    )
    return Spec(
        name=f"{spec.name} on {monitor.name}",
        phases=phases,
        resources=resources,
        transitions=tuple(transitions),
        table=table,
        automata=tuple(a for a in automata if a.moves),
        properties=spec.properties + tuple(p for p in monitor.properties if set(p.about) <= set(resources)),
        forbidden=dict(monitor.forbids),
    )


def _before_exit(phases: tuple[Phase, ...], added: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """`added` put in front of the first exit phase, so that drawings read from top to bottom."""
    cut = next((i for i, phase in enumerate(phases) if phase.kind == "exit"), len(phases) - 1)
    return (*phases[:cut], *added, *phases[cut:])


def _reachable(initial: str, transitions: list[Transition]) -> set[str]:
    seen, todo = {initial}, [initial]
    while todo:
        phase = todo.pop()
        for t in transitions:
            if t.source == phase and t.dest not in seen:
                seen.add(t.dest)
                todo.append(t.dest)
    return seen
