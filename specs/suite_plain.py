"""An ordinary `transitions` machine of a spec: the oracle that suites hold runs against.

`Plain` shares nothing with the machine that runs execute on but the spec's data: effects, guards and
automata are read once more here, in the plainest way. Where the two part, one of them is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .model import EVERY, Kind, Spec, Status, Transition, Verb

if TYPE_CHECKING:
    from transitions import Machine

    from .machine import Entry, Slot

_GONE = {Verb.RELEASES: "released", Verb.TRANSFERS: "transferred", Verb.ABANDONS: "abandoned"}
_CHANGES: dict[Verb, dict[Status, Status]] = {
    Verb.ACQUIRES: dict.fromkeys(Status, Status.PARTIAL),
    Verb.OPENS: {Status.WHOLE: Status.PARTIAL},
    Verb.COMPLETES: {Status.PARTIAL: Status.WHOLE},
    Verb.RELEASES: dict.fromkeys(Status, Status.ABSENT),
    Verb.TRANSFERS: dict.fromkeys(Status, Status.ABSENT),
    Verb.ABANDONS: dict.fromkeys(Status, Status.ABSENT),
    Verb.SPOILS: {
        Status.PARTIAL: Status.FAULTED,
        Status.WHOLE: Status.FAULTED,
        Status.FAULTED: Status.ABSENT,
    },
    Verb.LOSES: dict.fromkeys((Status.PARTIAL, Status.WHOLE, Status.FAULTED), Status.LOST),
}
"""What a verb makes of a status; a status that is not listed stays."""

_machines: dict[str, Machine] = {}


class Plain:
    """One run on an ordinary machine.

    Attributes:
        spec: The spec.
        state: The phase (named as `transitions` expects).
        statuses: Resource -> status.
        automata: Automaton -> its state.
        acquired: The resources acquired so far, in order, once for each time.
        ended: (resource, how) for each that ended.

    Args:
        spec: Any.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.state = spec.initial
        self.statuses = dict.fromkeys(spec.resources, Status.ABSENT)
        self.automata = {automaton.name: automaton.initial for automaton in spec.automata}
        self.acquired: list[str] = []
        self.ended: list[tuple[str, str]] = []

    @property
    def legal(self) -> tuple[str, ...]:
        """The events that may be fired now, sorted."""
        return tuple(sorted(event for event in self.spec.by_source[self.state] if self.may(event)))

    @property
    def held(self) -> tuple[str, ...]:
        """The resources held now."""
        return tuple(name for name, status in self.statuses.items() if status is not Status.ABSENT)

    @property
    def resting(self) -> bool:
        """Whether nothing is in flight: the phase is stable, or the engine's loop has it."""
        return self.spec.phase[self.state].kind in (Kind.STABLE, Kind.WORK)

    def may(self, event: str) -> bool:
        """Whether an event may be fired."""
        transition = self.spec.by_source[self.state].get(event)
        return transition is not None and _passes(transition, self)

    def fire(self, event: str) -> bool:
        """Fire an event on the machine; whether it was taken. If not, nothing has changed."""
        machine = _machine(self.spec)
        if event not in machine.events or self.state not in machine.events[event].transitions:
            return False
        return bool(machine.events[event].trigger(self))

    def ahead(self, *events: str) -> Plain:
        """Another one, some events further on; those that are refused are passed over."""
        other = copy.copy(self)
        other.statuses, other.automata = dict(self.statuses), dict(self.automata)
        other.acquired, other.ended = list(self.acquired), list(self.ended)
        for event in events:
            other.fire(event)
        return other

    def way(self, event: str, wishes: frozenset[str] = frozenset()) -> list[str]:
        """The events of an undisturbed operation, from its first on: to the next phase where a run rests.

        Args:
            event: Legal now.
            wishes: Of the run.
        """
        other, events = self.ahead(), []
        following: str | None = event
        while following is not None and other.fire(following):
            events.append(following)
            phase = other.spec.phase[other.state]
            if phase.kind is Kind.FLIGHT:
                following = phase.done
            elif phase.kind is Kind.EXIT:
                following = other._next(wishes)
            else:
                following = None
        return events

    def _next(self, wishes: frozenset[str]) -> str | None:
        for event in self.spec.table.get(self.state, ()):
            wish = self.spec.by_source[self.state][event].wish
            if (not wish or wish in wishes) and self.may(event):
                return event
        return None

    def differs(self, slot: Slot) -> Iterator[str]:
        """In what interlock's own slot is other than this one: one line each."""
        config = slot.config
        if config.phase != self.state:
            yield f"interlock is in phase '{config.phase}', the plain machine in '{self.state}'"
        statuses = dict(zip(self.spec.resources, config.statuses, strict=True))
        if statuses != self.statuses:
            yield f"interlock has {_said(statuses)}, the plain machine {_said(self.statuses)}"
        automata = dict(zip((a.name for a in self.spec.automata), config.automata, strict=True))
        if automata != self.automata:
            yield f"interlock's automata are in {automata}, the plain machine's in {self.automata}"
        if list(slot.ended) != self.ended:
            yield f"in interlock {list(slot.ended)} ended, on the plain machine {self.ended}"
        if config.phase == self.state and tuple(sorted(slot.legal)) != self.legal:
            yield f"interlock takes {sorted(slot.legal)} here, the plain machine {list(self.legal)}"

    def follow(self, entry: Entry) -> Iterator[str]:
        """Take one line of a run's history; what is wrong with it, in words."""
        if entry.source != self.state:
            yield f"'{entry.event}' is said to have left '{entry.source}', and the run was in '{self.state}'"
            return
        if not self.fire(entry.event):
            yield f"'{entry.event}' was taken in '{self.state}', where the plain machine refuses it"
            return
        if entry.phase != self.state:
            yield f"'{entry.event}' led to '{entry.phase}', by the plain machine to '{self.state}'"


def _passes(transition: Transition, plain: Plain) -> bool:
    for guard in transition.when:
        names = plain.spec.resources if guard.resource == EVERY else (guard.resource,)
        if any(plain.statuses[name] not in guard.statuses for name in names if name not in guard.but):
            return False
    for automaton in plain.spec.automata:
        here = plain.automata[automaton.name]
        if transition.event in automaton.alphabet and (here, transition.event) not in automaton.moves:
            return False
    return True


def _take(transition: Transition, plain: Plain) -> None:
    for effect in transition.declared:
        for name in plain.spec.resources if effect.resource == EVERY else (effect.resource,):
            before = plain.statuses[name]
            after = plain.statuses[name] = _CHANGES.get(effect.verb, {}).get(before, before)
            if effect.verb is Verb.ACQUIRES:
                plain.acquired.append(name)
            if after is Status.ABSENT and before is not Status.ABSENT:
                plain.ended.append((name, _GONE.get(effect.verb, "abandoned")))
    for automaton in plain.spec.automata:
        if transition.event in automaton.alphabet:
            plain.automata[automaton.name] = automaton.moves[plain.automata[automaton.name], transition.event]


def _machine(spec: Spec) -> Machine:
    found = _machines.get(spec.hash)
    if found is None:
        from transitions import Machine

        found = Machine(
            model=None,
            states=[phase.name for phase in spec.phases],
            initial=spec.initial,
            auto_transitions=False,
            send_event=True,
            name="interlock lifecycle, plain",  # so named, it logs as little as the one that runs execute on
        )
        for transition in spec.transitions:
            found.add_transition(
                transition.event,
                transition.source,
                transition.dest,
                conditions=[partial(_condition, transition)],
                before=[partial(_before, transition)],
            )
        _machines[spec.hash] = found
    return found


def _condition(transition: Transition, data: Any) -> bool:
    return _passes(transition, data.model)


def _before(transition: Transition, data: Any) -> None:
    _take(transition, data.model)


def _said(statuses: dict[str, Status]) -> str:
    return ", ".join(f"{name} {status}" for name, status in statuses.items())
