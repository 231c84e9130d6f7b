"""What effects and guards *mean*: one pure function that takes a configuration through a transition.

The running machine (`machine.py`) and the checker (`checker.py`) both call `Rule.advance`, so
there is no second reading of a spec. The meaning of a verb is a row of `MEANING`: from each
status to the next, and whether that is *sound*. An unsound application is what the checker
looks for; the function stays total, so that the search can go on and find the shortest one.

| verb | legal in | leads to | in words |
|---|---|---|---|
| acquires | absent | partial | its release has been registered, it may be half there |
| opens | whole | partial | it is being changed: an update, an adoption, a move |
| completes | partial | whole | it is there, and consistent |
| needs / uses / saves / steps | whole | - | is required / touched / written out / trained |
| builds | any | - | the object is made anew (counted, never twice) |
| releases | held | absent | given back, its content is safe |
| transfers | whole | absent | handed over to the caller, on the device |
| spoils | held | faulted, then absent | a release failed: try once more, then abandon |
| abandons | any | absent | given up, if held: the outcome says so |
| loses | held | lost | its device is gone |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .model import EVERY, Effect, Kind, Spec, Status, Transition, Verb

A, P, W, F, L = Status.ABSENT, Status.PARTIAL, Status.WHOLE, Status.FAULTED, Status.LOST

_ANY = dict.fromkeys(Status, None)


def _same(*sound: Status) -> dict[Status, tuple[Status, bool]]:
    return {status: (status, status in sound) for status in Status}


def _to(dest: Status, *sound: Status) -> dict[Status, tuple[Status, bool]]:
    return {status: (dest, status in sound) for status in Status}


MEANING: Mapping[Verb, Mapping[Status, tuple[Status, bool]]] = {
    Verb.ACQUIRES: _to(P, A),
    Verb.OPENS: {**_same(), W: (P, True)},
    Verb.COMPLETES: {**_same(), P: (W, True)},
    Verb.NEEDS: _same(W),
    Verb.USES: _same(W),
    Verb.SAVES: _same(W),
    Verb.STEPS: _same(W),
    Verb.BUILDS: _same(*Status),
    Verb.RELEASES: _to(A, P, W, F),
    Verb.TRANSFERS: _to(A, W),
    Verb.SPOILS: {A: (A, False), P: (F, True), W: (F, True), F: (A, True), L: (L, False)},
    Verb.ABANDONS: _to(A, *Status),
    Verb.LOSES: {A: (A, False), P: (L, True), W: (L, True), F: (L, True), L: (L, False)},
}

_ENDS: Mapping[Verb, str] = {
    Verb.RELEASES: "released",
    Verb.TRANSFERS: "transferred",
    Verb.SPOILS: "abandoned",
    Verb.ABANDONS: "abandoned",
}


class Config(NamedTuple):
    """Where a run is: its phase, the status of each resource, the state of each automaton."""

    phase: str
    statuses: tuple[Status, ...]
    automata: tuple[str, ...]


class Outcome(NamedTuple):
    """What one transition did.

    Attributes:
        config: The configuration afterwards.
        unsound: The effects that were not legal in the statuses they met.
        changes: (effect, resource, before, after) for each status that was touched.
        ended: (resource, how) for each resource that ended: released, transferred, abandoned.
    """

    config: Config
    unsound: tuple[Effect, ...]
    changes: tuple[tuple[Verb, str], ...]
    ended: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rule:
    """A transition, compiled against the order of the spec's resources and automata.

    This is the object that sits in the `transitions` machine as a condition; the checker reads
    it back from there.
    """

    transition: Transition
    effects: tuple[tuple[int, Effect], ...]
    guards: tuple[tuple[int, frozenset[Status]], ...]
    moves: tuple[tuple[int, Mapping[str, str], str], ...]

    @classmethod
    def of(cls, spec: Spec, transition: Transition) -> Rule:
        """Compile one transition of a spec."""
        index = {name: i for i, name in enumerate(spec.resources)}
        effects = tuple(
            (i, Effect(effect.verb, name))
            for effect in transition.declared
            for name, i in index.items()
            if effect.resource in (EVERY, name)
        )
        guards = tuple(
            (i, guard.statuses)
            for guard in transition.when
            for name, i in index.items()
            if guard.resource == name or (guard.resource == EVERY and name not in guard.but)
        )
        moves = tuple(
            (i, {s: d for (s, e), d in automaton.moves.items() if e == transition.event}, automaton.name)
            for i, automaton in enumerate(spec.automata)
            if transition.event in automaton.alphabet
        )
        return cls(transition, effects, guards, moves)

    def allowed(self, config: Config) -> bool:
        """Whether guards and automata let the transition fire (its source phase is not checked)."""
        statuses, automata = config.statuses, config.automata
        return all(statuses[i] in wanted for i, wanted in self.guards) and all(
            automata[i] in moves for i, moves, _ in self.moves
        )

    def advance(self, config: Config) -> Outcome:
        """The configuration after the transition. Total: unsound effects are listed, not refused."""
        statuses = list(config.statuses)
        unsound: list[Effect] = []
        changes: list[tuple[Verb, str]] = []
        ended: list[tuple[str, str]] = []
        for i, effect in self.effects:
            before = statuses[i]
            after, sound = MEANING[effect.verb][before]
            if not sound:
                unsound.append(effect)
            elif after is not before or effect.verb is not Verb.ABANDONS:
                changes.append((effect.verb, effect.resource))
            if after is A and before is not A and effect.verb in _ENDS:
                ended.append((effect.resource, _ENDS[effect.verb]))
            statuses[i] = after
        automata = config.automata
        if self.moves:
            states = list(automata)
            for i, moves, _ in self.moves:
                states[i] = moves[states[i]]
            automata = tuple(states)
        config = Config(self.transition.dest, tuple(statuses), automata)
        return Outcome(config, tuple(unsound), tuple(changes), tuple(ended))

    def obstacles(self, spec: Spec, config: Config) -> Iterator[str]:
        """Why the transition may not fire: one phrase per guard or automaton that refuses."""
        for i, wanted in self.guards:
            if config.statuses[i] not in wanted:
                options = " or ".join(sorted(wanted))
                yield f"{spec.resources[i]} is {config.statuses[i]}, must be {options}"
        for i, moves, name in self.moves:
            if config.automata[i] not in moves:
                yield f"{name} is in '{config.automata[i]}', must be in {' or '.join(sorted(moves))}"


def start(spec: Spec) -> Config:
    """The configuration in which every run begins: nothing is held."""
    return Config(spec.initial, (A,) * len(spec.resources), tuple(a.initial for a in spec.automata))


def endings(spec: Spec) -> dict[str, str]:
    """In-flight phase whose end is that of a resource -> the resource."""
    return {
        phase.name: effect.resource
        for phase in spec.phase.values()
        if phase.kind is Kind.FLIGHT
        for effect in spec.by_source[phase.name][phase.done].declared
        if effect.verb in (Verb.RELEASES, Verb.TRANSFERS)
    }
