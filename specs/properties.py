"""What must hold, as data: property patterns over the effects of transitions.

The patterns carry the names of Dwyer, Avrunin and Corbett ("Patterns in Property Specifications
for Finite-State Verification", ICSE 1999): absence, universality, existence, bounded existence,
precedence, response; read on finite traces. Properties speak of *effects* (`Atom`), so renaming
an event can not make one vacuous. `checker.py` decides them, `promela.py` translates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Pattern(StrEnum):
    """The kinds of property, and what each asks of every path of the composed machine."""

    DETERMINISTIC = "deterministic"
    """One destination for each (configuration, event)."""
    REACHABLE = "reachable"
    """Each phase is entered, each transition taken, each entry of the table chosen, on some path.

    An entry has to be chosen in runs that have its wish and no other; what leaves an exit phase, or
    has a wish, has to be an entry."""
    NO_DEAD_END = "no dead end"
    """Each configuration but the terminal one can be left without a fault."""
    CLOSABLE = "closable"
    """From each configuration the terminal phase can be reached without a fault."""
    TABLE_TOTAL = "table total"
    """In each configuration of a phase with a row, some event of the row may fire, whatever the wishes."""
    UNIVERSALITY = "universality"
    """An event of `what` is accepted in every configuration of the `scope`."""
    ABSENCE = "absence"
    """No transition does `what` (after one that does `after`, if given)."""
    PRECEDENCE = "precedence"
    """Each transition that does `what` comes after one that does `first`, since the last `since`."""
    BOUNDED_EXISTENCE = "bounded existence"
    """At most one transition on a path does `what`."""
    EXISTENCE = "existence"
    """After each acquisition each path to the end does `what`; a path on which `after` happens is excused."""
    RESPONSE = "response"
    """After `what`, the terminal phase is inevitable: no cycle, no dead end, no fairness assumed."""
    SOUND = "sound"
    """No transition does `what` to a resource in a status that does not allow it."""
    NESTED = "nested"
    """After a transition that does `what`, none of the resources `held` is held."""
    ONE_WAY = "one way"
    """Once an exit phase has been entered, no stable phase and no work is entered again."""
    ENDED = "ended"
    """In the terminal phase nothing is held."""


class Scope(StrEnum):
    """The configurations of which a universality speaks."""

    LIVE = "live"
    """All but those of exit phases and the terminal one."""
    ON_DEVICE = "on a device that answers"
    """Live, and the device is held and not lost."""
    RESTING = "resting"
    """In a stable phase, or one where work is done: nothing is in flight."""
    RUNNING = "running"
    """Live, and no exit phase has been entered yet."""
    LEAVING = "leaving"
    """Something is in flight, and an exit phase has been entered before."""


@dataclass(frozen=True, slots=True)
class Atom:
    """Matches transitions: by an effect (verb, resource), by a phase entered, or by an event's name.

    Event names are used for what has no effect on a resource: `fail`, `interrupt`, `peer_fail`.
    A resource of `*` matches any.
    """

    effects: tuple[tuple[str, str], ...] = ()
    events: tuple[str, ...] = ()
    enters: tuple[str, ...] = ()

    def __or__(self, other: Atom) -> Atom:
        return Atom(self.effects + other.effects, self.events + other.events, self.enters + other.enters)

    def __str__(self) -> str:
        parts = [f"{verb} {name}" for verb, name in self.effects]
        parts += [*self.events, *(f"enters {phase}" for phase in self.enters)]
        return " or ".join(parts) or "-"


def does(verb: str, resource: str = "*") -> Atom:
    """Transitions with this effect."""
    return Atom(effects=((verb, resource),))


def on(*events: str) -> Atom:
    """Transitions of these events."""
    return Atom(events=events)


def into(*phases: str) -> Atom:
    """Transitions that enter one of these phases."""
    return Atom(enters=phases)


NOTHING = Atom()


@dataclass(frozen=True, slots=True)
class Property:
    """One thing to prove.

    Attributes:
        name: Short, unique, used in reports and Promela.
        pattern: See `Pattern`.
        what: The transitions of which the pattern speaks.
        first: For precedence: what has to come before.
        since: For precedence: what begins a new residency epoch.
        after: For absence: only after this; for existence: what excuses a path.
        scope: For universality: see `Scope`.
        held: For nested: the resources that must be gone (`*`: all of them).
        about: Resources without which the property has no meaning; `compose` leaves it out there.
        doc: The promise in words.
    """

    name: str
    pattern: Pattern
    what: Atom = NOTHING
    first: Atom = NOTHING
    since: Atom = NOTHING
    after: Atom = NOTHING
    scope: Scope = Scope.LIVE
    held: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    doc: str = ""

    def as_data(self) -> dict[str, Any]:
        """JSON-ready."""
        fields = {k: str(getattr(self, k)) for k in ("what", "first", "since", "after")}
        fields |= {"scope": str(self.scope), "held": ", ".join(self.held)}
        return {"name": self.name, "pattern": str(self.pattern), **fields, "doc": self.doc}


_END = does("releases", "model") | does("transfers", "model") | does("abandons", "model")
_FAULT = on("fail", "interrupt", "lose", "peer_fail")

STRUCTURE = (
    Property("deterministic", Pattern.DETERMINISTIC, doc="what happens next never depends on chance"),
    Property("every-phase-reachable", Pattern.REACHABLE, doc="no phase is only drawn"),
    Property("no-dead-end", Pattern.NO_DEAD_END, doc="something can always be done next"),
    Property("closable", Pattern.CLOSABLE, doc="`closed` can be reached from everywhere, without a fault"),
    Property("no-way-back", Pattern.ONE_WAY, doc="whoever is on the way out does not go back to work"),
    Property("table-total", Pattern.TABLE_TOTAL, doc="the continuation table always has an answer"),
    Property(
        "fail-accepted", Pattern.UNIVERSALITY, on("fail"), doc="an error is accepted in every live phase"
    ),
    Property(
        "interrupt-accepted",
        Pattern.UNIVERSALITY,
        on("interrupt"),
        doc="Ctrl-C and cancellation are accepted in every live phase",
    ),
    Property(
        "lose-accepted",
        Pattern.UNIVERSALITY,
        on("lose"),
        scope=Scope.ON_DEVICE,
        doc="the death of the device is accepted wherever it is held and something is done",
    ),
    Property(
        "abandon-accepted",
        Pattern.UNIVERSALITY,
        on("abandon"),
        scope=Scope.LEAVING,
        doc="on the way out a deadline may pass, whatever is in flight",
    ),
    Property(
        "leaving-accepted",
        Pattern.UNIVERSALITY,
        on("stop", "offload"),
        scope=Scope.RESTING,
        doc="wherever a run rests or works it can be ended in good order",
    ),
    Property(
        "leaving-closes",
        Pattern.RESPONSE,
        on("finish", "stop", "offload"),
        doc="after the end of the work, `closed` is inevitable",
    ),
    Property("fail-closes", Pattern.RESPONSE, on("fail"), doc="after an error, `closed` is inevitable"),
    Property(
        "interrupt-closes",
        Pattern.RESPONSE,
        on("interrupt"),
        doc="after an interrupt, `closed` is inevitable",
    ),
    Property("lose-closes", Pattern.RESPONSE, on("lose"), doc="after a lost device, `closed` is inevitable"),
)


def _means(phase: str, *events: str, doc: str) -> Property:
    return Property(f"{phase}-means-{events[0]}", Pattern.PRECEDENCE, into(phase), first=on(*events), doc=doc)


OUTCOMES = (
    _means("finished", "finish", doc="what is called finished has finished its work"),
    _means("stopping", "stop", doc="what is called stopped was asked to stop: it did not fail"),
    _means("failed", "fail", "peer_fail", doc="what is called failed met an error, here or at a peer"),
    _means("interrupted", "interrupt", doc="what is called interrupted was interrupted or cancelled"),
    _means("device_lost", "lose", doc="a device is called lost only when it was"),
)

COMMON = (
    *STRUCTURE,
    *OUTCOMES,
    Property(
        "offloaded-on-teardown",
        Pattern.EXISTENCE,
        into("offloading"),
        after=does("loses", "device"),
        doc="whoever holds something on the device gets to `offloading` before the end, unless it died",
    ),
    Property(
        "device-goes-last",
        Pattern.NESTED,
        does("releases", "device") | does("abandons", "device"),
        held=("*",),
        doc="the device is given back when nothing else is held on it",
    ),
    Property("nothing-held-at-the-end", Pattern.ENDED, doc="in `closed` nothing is held"),
    Property("acquired-once", Pattern.SOUND, does("acquires"), doc="nothing is acquired that is held"),
    Property("released-once", Pattern.SOUND, does("releases"), doc="nothing is released that is not held"),
    Property("transferred-whole", Pattern.SOUND, does("transfers"), doc="only what is whole is handed over"),
    Property("spoiled-when-held", Pattern.SOUND, does("spoils"), doc="only a held resource can fail to go"),
    Property("completed-when-open", Pattern.SOUND, does("completes"), doc="completed means begun before"),
    Property("lost-when-held", Pattern.SOUND, does("loses"), doc="only a device that is held can be lost"),
    Property(
        "no-device-use-without-device",
        Pattern.SOUND,
        does("uses"),
        doc="no device call, not even a query, before acquisition, after release or after loss",
    ),
    Property("needs-met", Pattern.SOUND, does("needs"), doc="whatever a transition needs is wholly there"),
    Property(
        "placed-before-used",
        Pattern.PRECEDENCE,
        does("needs", "model"),
        first=does("completes", "model"),
        since=_END,
        doc="in each residency epoch the model is placed before anything needs it",
    ),
    Property(
        "nothing-begins-after-a-fault",
        Pattern.ABSENCE,
        does("acquires") | does("builds") | does("steps"),
        after=_FAULT,
        doc="after a fault nothing is acquired, built or trained any more",
    ),
)
"""Proved of every lifecycle."""

TRAINED = (
    Property(
        "placed-before-optimized",
        Pattern.PRECEDENCE,
        does("builds", "optimizer"),
        first=does("completes", "model"),
        since=_END,
        doc="the optimizer is built from placed parameters",
    ),
    Property(
        "optimized-before-trained",
        Pattern.PRECEDENCE,
        does("steps"),
        first=does("completes", "optimizer"),
        since=does("releases", "optimizer"),
        doc="in each residency epoch the optimizer is complete before a step",
    ),
    Property(
        "optimize-at-most-once",
        Pattern.BOUNDED_EXISTENCE,
        does("builds", "optimizer"),
        doc="one run builds one optimizer",
    ),
    Property(
        "optimizer-goes-first",
        Pattern.NESTED,
        does("releases", "model") | does("transfers", "model"),
        held=("optimizer",),
        doc="the model leaves the device when no optimizer holds its parameters there",
    ),
    Property(
        "restore-at-most-once", Pattern.BOUNDED_EXISTENCE, on("restore"), doc="one restore, at the start"
    ),
    Property(
        "compile-at-most-once", Pattern.BOUNDED_EXISTENCE, on("compile"), doc="one compilation, at the start"
    ),
    Property("changed-when-whole", Pattern.SOUND, does("opens"), doc="only what is whole may be changed"),
    Property(
        "trained-when-whole", Pattern.SOUND, does("steps"), doc="a step finds model and optimizer whole"
    ),
    Property(
        "no-save-inside-an-update",
        Pattern.SOUND,
        does("saves"),
        doc="nothing is saved while model or optimizer is half changed, nor when it is not there",
    ),
    Property(
        "nothing-completes-after-a-fault",
        Pattern.ABSENCE,
        does("completes"),
        after=_FAULT,
        doc="what a fault left half done is never taken for whole: the last checkpoint stands",
    ),
)
"""Proved of training as well."""
