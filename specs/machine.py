"""The `transitions` machine on which runs execute, and the graph that is read back from it.

`machine_for(spec)` builds one `transitions.Machine` per spec, shared by all runs. Each transition
carries its compiled `Rule` as condition and as before-callback. `read_back` takes states, events
and rules out of that machine again, and the checker works on what it gets there: what is proved
is what runs.

Runs are not registered as models (a registered model is freed only by the garbage collector, and
a trigger named like one of its methods is skipped): a `Slot` is fired on through
`machine.events[name].trigger(slot)`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .errors import IllegalTransition, InterlockError, UnknownName
from .model import Kind, Spec, Status
from .semantics import Config, Rule, start

if TYPE_CHECKING:
    from transitions import Machine
    from transitions.core import EventData


class Entry(NamedTuple):
    """One line of a run's history.

    Attributes:
        event: The event that was fired.
        source: The phase it left.
        config: Where it led.
        ended: (resource, how) for each resource that ended with it.
        at: `time.monotonic()`, seconds.
    """

    event: str
    source: str
    config: Config
    ended: tuple[tuple[str, str], ...]
    at: float

    @property
    def phase(self) -> str:
        """The phase it led to."""
        return self.config.phase


class Gate:
    """The condition on one transition: the rule's guards and automata, asked of the slot."""

    __slots__ = ("rule",)

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, data: EventData) -> bool:
        """Asked by `transitions` with the slot as model."""
        slot = cast("Slot", data.model)
        return self.rule.allowed(slot.history[-1].config)


class Commit:
    """The before-callback of one transition: computes the entry that the change of state appends."""

    __slots__ = ("rule",)

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, data: EventData) -> None:
        """Called by `transitions` when the gate let the event pass."""
        slot = cast("Slot", data.model)
        last = slot.history[-1]
        outcome = self.rule.advance(last.config)
        slot.pending = Entry(
            self.rule.transition.event, last.phase, outcome.config, outcome.ended, time.monotonic()
        )


class Slot:
    """One run's place in the machine: a history, from which everything else is derived.

    A change of phase is one append to `history`, so a reader on another thread sees either the
    old phase or the new one, with its resources, and never something between.

    Attributes:
        lifecycle: What the slot runs on.
        history: Entries, the first being the start.
    """

    __slots__ = ("history", "lifecycle", "pending")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        config = start(lifecycle.spec)
        self.history = [Entry("", "", config, (), time.monotonic())]
        self.pending = self.history[0]

    @property
    def state(self) -> str:
        """The phase (named as `transitions` expects)."""
        return self.history[-1].config.phase

    @state.setter
    def state(self, value: str) -> None:
        self.history.append(self.pending)

    @property
    def config(self) -> Config:
        """Phase, statuses and automata now."""
        return self.history[-1].config

    @property
    def held(self) -> tuple[str, ...]:
        """The resources held now, in the order of the spec."""
        statuses = self.config.statuses
        return tuple(
            name
            for name, status in zip(self.lifecycle.spec.resources, statuses, strict=True)
            if status is not Status.ABSENT
        )

    def status(self, resource: str) -> Status:
        """The status of one resource now."""
        return self.config.statuses[self.lifecycle.spec.resources.index(resource)]

    @property
    def legal(self) -> tuple[str, ...]:
        """The events that may be fired now, in the order of the spec."""
        return self.lifecycle.legal(self.config)

    def fire(self, event: str) -> Entry:
        """Take the transition of `event`.

        Returns:
            The new last entry of the history.

        Raises:
            IllegalTransition: The event is not legal now; nothing has changed.
        """
        before = self.history[-1]
        rule = self.lifecycle.rules.get(before.phase, {}).get(event)
        if rule is None or not rule.allowed(before.config):
            recent = [entry.event for entry in self.history[-5:] if entry.event]
            raise self.lifecycle.refusal(event, before.config, recent)
        self.lifecycle.machine.events[event].trigger(self)
        entry = self.history[-1]
        if entry is before or entry.event != event:
            raise InterlockError(f"the machine did not take '{event}' from '{before.phase}', which is legal")
        return entry

    def next(self, wishes: frozenset[str]) -> str | None:
        """The event that the continuation table asks for here, or `None` where it has no say."""
        return self.lifecycle.next(self.config, wishes)

    @property
    def ended(self) -> tuple[tuple[str, str], ...]:
        """(resource, how) of each ending so far."""
        return tuple(end for entry in self.history for end in entry.ended)


@dataclass(frozen=True)
class Lifecycle:
    """A spec together with the machine built from it and the rules read back from that machine.

    Made by `lifecycle`, once per spec.
    """

    spec: Spec
    machine: Machine
    rules: Mapping[str, Mapping[str, Rule]]

    def slot(self) -> Slot:
        """A new run's place, in the initial phase."""
        return Slot(self)

    def legal(self, config: Config) -> tuple[str, ...]:
        """The events that may be fired in `config`."""
        return tuple(event for event, rule in self.rules[config.phase].items() if rule.allowed(config))

    def next(self, config: Config, wishes: frozenset[str]) -> str | None:
        """The event of the continuation table in `config` for a run with these wishes."""
        row = self.rules[config.phase]
        for event in self.spec.table.get(config.phase, ()):
            rule = row[event]
            wish = rule.transition.wish
            if (not wish or wish in wishes) and rule.allowed(config):
                return event
        return None

    def detour(self, config: Config, event: str) -> str | None:
        """An operation that can be carried out first, after which `event` is legal in the same phase.

        Where a backend refines the spec - queued work is waited for before a run is suspended - what has to
        come first is found in its rules, and nobody has to know it by name.

        Args:
            config: Where the run is.
            event: Not legal there.

        Returns:
            The event that begins the operation; `None` if there is none.
        """
        for first in self.legal(config):
            flight = self.rules[config.phase][first].advance(config).config
            done = self.spec.phase[flight.phase].done
            rule = self.rules[flight.phase].get(done)
            if rule is None or not rule.allowed(flight):
                continue
            after = rule.advance(flight).config
            if after.phase == config.phase and event in self.legal(after):
                return first
        return None

    def refusal(self, event: str, config: Config, recent: list[str]) -> IllegalTransition:
        """The error for an event that is not legal in `config`, saying why."""
        rule = self.rules[config.phase].get(event)
        if rule is not None:
            why = "; ".join(rule.obstacles(self.spec, config))
        elif event in self.spec.forbidden:
            why = f"'{self.spec.name}' does not have it: {self.spec.forbidden[event]}"
        elif event not in self.spec.events:
            why = "no such event in this spec"
        else:
            sources = sorted({t.source for t in self.spec.transitions if t.event == event})
            why = f"it leaves {', '.join(sources)}" if len(sources) < 6 else ""
        return IllegalTransition(event, config.phase, self.legal(config), why=why, recent=recent)


_lifecycles: dict[str, Lifecycle] = {}


def lifecycle(spec: Spec) -> Lifecycle:
    """The shared lifecycle of a spec: the machine is built at the first call.

    Specs with the same content share one, whatever object they are.
    """
    found = _lifecycles.get(spec.hash)
    if found is None:
        machine = machine_for(spec)
        found = _lifecycles.setdefault(spec.hash, Lifecycle(spec, machine, read_back(machine)))
    return found


_NAME = "interlock lifecycle"


class _Quiet(logging.Filter):
    """Drops what `transitions` says of each call in our machines; of anybody else's machine all is heard."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is somebody else's."""
        args = record.args
        return not (isinstance(args, tuple) and args and str(args[0]).startswith(_NAME))


_quiet = _Quiet()


def _quieten() -> None:
    """A service that logs at level INFO would hear of every transition, dozens of lines for each run."""
    logging.getLogger("transitions.core").addFilter(_quiet)


def machine_for(spec: Spec, model: Any = None, **options: Any) -> Machine:
    """A `transitions.Machine` of a spec.

    Args:
        spec: Any spec.
        model: Registered with the machine if given (the engine never registers one).
        options: Passed on to `transitions.Machine`.

    Returns:
        The machine; without automatic transitions, refusing unknown events.
    """
    from transitions import Machine, State

    _quieten()
    machine = Machine(
        model=model,
        states=[State(p.name, final=p.kind is Kind.TERMINAL) for p in spec.phases],
        initial=spec.initial,
        auto_transitions=False,
        send_event=True,
        **{"name": _NAME, **options},
    )
    for transition in spec.transitions:
        rule = Rule.of(spec, transition)
        machine.add_transition(
            transition.event,
            transition.source,
            transition.dest,
            conditions=[Gate(rule)],
            before=[Commit(rule)],
        )
    return machine


def read_back(machine: Machine) -> dict[str, dict[str, Rule]]:
    """phase -> event -> rule, as found in a machine (not in the spec it was built from).

    Raises:
        UnknownName: A transition of the machine carries no rule: it was not built by `machine_for`.
    """
    rows: dict[str, dict[str, Rule]] = {name: {} for name in machine.states}
    for event, transition in _transitions_of(machine):
        gates = [c.func for c in transition.conditions if isinstance(c.func, Gate)]
        commits = [b for b in transition.before if isinstance(b, Commit)]
        if len(gates) != 1 or len(commits) != 1 or gates[0].rule is not commits[0].rule:
            raise UnknownName("rule of transition", f"{transition.source} --{event}-->", ())
        rows[transition.source][event] = gates[0].rule
    return rows


def _transitions_of(machine: Machine) -> Iterator[tuple[str, Any]]:
    for name, event in machine.events.items():
        for transitions in event.transitions.values():
            for transition in transitions:
                yield name, transition
