"""What a drawing of a spec shows, before it is written in some notation: `picture(spec, path)`.

A spec has about 150 transitions, most of which say that a fault may strike anywhere. Drawn one by
one they hide the run. So a picture folds them, and loses none:

- Transitions between the same two phases share one arrow, with one line of label for each event.
- An event that leaves many phases for the same one is drawn once, from a *note* that names those
  phases ("any live phase"): every fault, and other events from three live phases on.
- A fault that leads where the ordinary arrow leads anyway (a release that fails goes back to
  `offloading` as one that succeeds does) is a *star* on that arrow; the legend says which faults.
- A phase that is only ever entered from one other phase and left to it again is a *round trip* of
  that phase, its *hub*; notations that can do so draw it inside of the hub.

Ids are stable: they depend on the names of phases and events, not on order or number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import UnknownName
from .model import FAULTS, Kind, Spec, Transition

Step = tuple[str, str, str]
"""(source, event, dest): a transition that a run has taken."""


_MANY = 3
_NAMED = 4


@dataclass(frozen=True)
class Line:
    """One line of an arrow's label.

    Attributes:
        event: What it shows.
        transitions: The transitions of that event that the arrow stands for.
        starred: The transitions of faults that share the line, behind the star.
        taken: How often the run took one of `transitions`.
    """

    event: str
    transitions: tuple[Transition, ...]
    starred: tuple[Transition, ...] = ()
    taken: int = 0

    @property
    def all(self) -> tuple[Transition, ...]:
        """Everything that the line stands for, the starred last."""
        return (*self.transitions, *self.starred)

    @property
    def text(self) -> str:
        """The event, a star if faults lead there too, the count if it is more than one."""
        star = " *" if self.starred else ""
        count = f" \N{MULTIPLICATION SIGN}{self.taken}" if self.taken > 1 else ""
        return f"{printable(self.event)}{star}{count}"


@dataclass(frozen=True)
class Arrow:
    """One arrow.

    Attributes:
        id: `arrow-SOURCE-DEST`, or `arrow-any-EVENT-DEST` if it leaves a note.
        source: Name of the phase, or id of the note, where it begins.
        dest: Name of the phase where it ends.
        lines: Its label.
        from_note: Whether `source` is a note.
    """

    id: str
    source: str
    dest: str
    lines: tuple[Line, ...]
    from_note: bool = False

    @property
    def taken(self) -> bool:
        """Whether the run went along it."""
        return any(line.taken for line in self.lines)


@dataclass(frozen=True)
class Note:
    """A box that stands for several phases, for the arrows that leave all of them alike.

    Attributes:
        id: `note-EVENT-DEST`, of its first arrow.
        text: Which phases, in words that are exact: "any live phase".
        sources: Their names, in the order of the spec.
    """

    id: str
    text: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """Everything that a drawing shows, with what a run has taken of it.

    Attributes:
        spec: What is drawn.
        notes: See `Note`.
        arrows: Those between phases first, then those from notes.
        star: The faults that a star stands for.
        hubs: round-trip phase -> the phase that it belongs to.
        taken: (source, event, dest) -> how often the run took it.
        visited: The phases that the run has been in.
        now: The phase that it is in, or the empty string.
    """

    spec: Spec
    notes: tuple[Note, ...]
    arrows: tuple[Arrow, ...]
    star: tuple[str, ...]
    hubs: Mapping[str, str]
    taken: Mapping[Step, int]
    visited: frozenset[str]
    now: str

    @cached_property
    def between(self) -> Mapping[tuple[str, str], Arrow]:
        """(source, dest) -> arrow."""
        return {(arrow.source, arrow.dest): arrow for arrow in self.arrows if not arrow.from_note}

    @property
    def outside(self) -> tuple[Arrow, ...]:
        """The arrows that are not part of a round trip."""
        inside = {*self.hubs.items(), *((hub, phase) for phase, hub in self.hubs.items())}
        return tuple(a for a in self.arrows if a.from_note or (a.source, a.dest) not in inside)

    @property
    def starred(self) -> bool:
        """Whether any arrow has a star, which then has to be explained."""
        return any(line.starred for arrow in self.arrows for line in arrow.lines)

    def round_trips(self, hub: str) -> tuple[tuple[Arrow, str, Arrow], ...]:
        """(arrow out, phase, arrow back) for each round trip of a hub, in the order of the spec."""
        spokes = [p.name for p in self.spec.phases if self.hubs.get(p.name) == hub]
        return tuple((self.between[hub, name], name, self.between[name, hub]) for name in spokes)

    def classes(self, phase: str) -> str:
        """The CSS classes of a phase: `phase`, its kind, `taken` and `now` if they apply."""
        taken = " taken" if phase in self.visited else ""
        now = " now" if phase == self.now else ""
        return f"phase {self.spec.phase[phase].kind}{taken}{now}"


def picture(spec: Spec, path: Iterable[Step] = ()) -> Picture:
    """Fold the transitions of a spec into what a person can look at.

    Args:
        spec: Any spec.
        path: The transitions that a run has taken, in order; empty for none.

    Returns:
        The picture; each transition of the spec is in exactly one line of exactly one arrow.

    Raises:
        UnknownName: The path has a transition that the spec has not.
    """
    steps = tuple(path)
    known = {(t.source, t.event, t.dest) for t in spec.transitions}
    for source, event, dest in steps:
        if (source, event, dest) not in known:
            here = [f"{s} --{e}--> {d}" for s, e, d in known if s == source]
            raise UnknownName("transition", f"{source} --{event}--> {dest}", here)
    taken = Counter(steps)
    folded, plain = _fold(spec)
    star = _star(plain)
    arrows = [_plain_arrow(ends, ts, star, taken) for ends, ts in plain.items()]
    notes: list[Note] = []
    for sources, by_dest in folded.items():
        events = {dest: list(dict.fromkeys(t.event for t in ts)) for dest, ts in by_dest.items()}
        first = next(iter(events))
        note = Note(f"note-{slug(events[first][0])}-{slug(first)}", _words(spec, sources), sources)
        notes.append(note)
        for dest, ts in by_dest.items():
            name = f"arrow-any-{slug(events[dest][0])}-{slug(dest)}"
            arrows.append(Arrow(name, note.id, dest, _lines(ts, taken), from_note=True))
    return Picture(
        spec=spec,
        notes=tuple(notes),
        arrows=tuple(arrows),
        star=star,
        hubs=_hubs(spec, plain, {dest for by_dest in folded.values() for dest in by_dest}),
        taken=taken,
        visited=frozenset(phase for source, _, dest in steps for phase in (source, dest)),
        now=steps[-1][2] if steps else "",
    )


def live(spec: Spec) -> tuple[str, ...]:
    """The live phases: those that a run reaches before it is on its way out."""
    found, todo = {spec.initial}, [spec.initial]
    while todo:
        for t in spec.by_source[todo.pop()].values():
            if t.dest not in found and spec.phase[t.dest].kind not in (Kind.EXIT, Kind.TERMINAL):
                found.add(t.dest)
                todo.append(t.dest)
    return tuple(p.name for p in spec.phases if p.name in found)


def slug(name: str) -> str:
    """A name as part of an id: letters, digits and underscores; different names stay different."""
    return re.sub(r"[^A-Za-z0-9_]|_(?=x[0-9A-F]+_)", lambda found: f"_x{ord(found[0]):X}_", name)


def transition_id(t: Transition) -> str:
    """`transition-SOURCE-EVENT-DEST`."""
    return f"transition-{slug(t.source)}-{slug(t.event)}-{slug(t.dest)}"


def phase_id(name: str) -> str:
    """`phase-NAME`."""
    return f"phase-{slug(name)}"


def printable(text: str) -> str:
    """The text without characters that no notation can hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


_Ends = tuple[str, str]
_Folded = dict[tuple[str, ...], dict[str, list[Transition]]]


def _fold(spec: Spec) -> tuple[_Folded, dict[_Ends, list[Transition]]]:
    """(sources -> dest -> transitions that leave them all alike, (source, dest) -> the others)."""
    alive = set(live(spec))
    alike: dict[tuple[str, str], list[Transition]] = defaultdict(list)
    for t in spec.transitions:
        if t.event not in FAULTS and t.source in alive:
            alike[t.event, t.dest].append(t)
    folded = {key: ts for key, ts in alike.items() if len(ts) >= _MANY}
    ends = {
        (t.source, t.dest)
        for t in spec.transitions
        if t.event not in FAULTS and t not in folded.get((t.event, t.dest), ())
    }
    alike = defaultdict(list)
    for t in spec.transitions:
        if t.event in FAULTS and (t.source, t.dest) not in ends:
            alike[t.event, t.dest].append(t)
    folded |= {key: ts for key, ts in alike.items() if len(ts) > 1}
    plain: dict[_Ends, list[Transition]] = defaultdict(list)
    for t in spec.transitions:
        if t not in folded.get((t.event, t.dest), ()):
            plain[t.source, t.dest].append(t)
    notes: _Folded = {}
    order = {p.name: i for i, p in enumerate(spec.phases)}
    for (_, dest), ts in folded.items():
        sources = tuple(sorted((t.source for t in ts), key=order.__getitem__))
        notes.setdefault(sources, {}).setdefault(dest, []).extend(ts)
    return notes, plain


def _star(plain: Mapping[_Ends, Sequence[Transition]]) -> tuple[str, ...]:
    """The set of faults that most often shares an arrow with something else; worth a star from two on."""
    sets = Counter(
        tuple(sorted(t.event for t in ts if t.event in FAULTS))
        for ts in plain.values()
        if any(t.event not in FAULTS for t in ts)
    )
    sets.pop((), None)
    best = max(sets, key=lambda events: (sets[events], events), default=())
    return tuple(e for e in FAULTS if e in best) if sets[best] > 1 else ()


def _plain_arrow(
    ends: _Ends, ts: Sequence[Transition], star: tuple[str, ...], taken: Mapping[Step, int]
) -> Arrow:
    """The arrow between two phases; what the run has taken is never behind the star."""
    source, dest = ends
    faults = [t for t in ts if t.event in FAULTS]
    ordinary = [t for t in ts if t.event not in FAULTS]
    name = f"arrow-{slug(source)}-{slug(dest)}"
    if not star or not ordinary or {t.event for t in faults} != set(star):
        return Arrow(name, source, dest, _lines([*ordinary, *faults], taken))
    shown = [t for t in faults if _count(t, taken)]
    lines = list(_lines(ordinary, taken))
    hidden = tuple(t for t in faults if t not in shown)
    lines[-1] = Line(lines[-1].event, lines[-1].transitions, hidden, lines[-1].taken)
    return Arrow(name, source, dest, (*lines, *_lines(shown, taken)))


def _lines(ts: Iterable[Transition], taken: Mapping[Step, int]) -> tuple[Line, ...]:
    """One line for each event."""
    by_event: dict[str, list[Transition]] = defaultdict(list)
    for t in ts:
        by_event[t.event].append(t)
    return tuple(
        Line(event, tuple(group), taken=sum(_count(t, taken) for t in group))
        for event, group in by_event.items()
    )


def _count(t: Transition, taken: Mapping[Step, int]) -> int:
    return taken.get((t.source, t.event, t.dest), 0)


def _hubs(spec: Spec, plain: Mapping[_Ends, object], targets: set[str]) -> dict[str, str]:
    """round-trip phase -> hub. A phase to which a note points is never one: its arrow needs a box."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for source, dest in plain:
        neighbours[source].add(dest)
        neighbours[dest].add(source)
    hubs: dict[str, str] = {}
    for phase in reversed(spec.phases):  # of two phases that know only each other, the first is the hub
        near = neighbours[phase.name]
        if len(near) != 1 or phase.kind not in (Kind.STABLE, Kind.FLIGHT) or phase.name in targets:
            continue
        (hub,) = near
        there_and_back = (hub, phase.name) in plain and (phase.name, hub) in plain
        if there_and_back and phase.name not in (spec.initial, hub, *hubs.values()) and hub not in hubs:
            hubs[phase.name] = hub
    return hubs


def _words(spec: Spec, sources: tuple[str, ...]) -> str:
    """The set of phases in words; exact, so that the drawing can be read back."""
    alive = live(spec)
    in_flight = [p.name for p in spec.phases if p.name in alive or p.kind is Kind.FLIGHT]
    if sources == alive:
        return "any live phase"
    if len(sources) <= _NAMED:
        return ", ".join(map(printable, sources))
    for text, base in (("any live phase", alive), ("any live or in-flight phase", in_flight)):
        missing = [name for name in base if name not in sources]
        if set(sources) <= set(base) and len(missing) <= _NAMED:
            return f"{text} but {', '.join(map(printable, missing))}" if missing else text
    return ", ".join(map(printable, sources))
