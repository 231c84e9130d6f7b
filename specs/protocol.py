"""The step protocol: which orders of the events inside a training step are legal at all.

`STEP` is a few small automata that run side by side, as data; `step_protocol(monitor)` adds those of a
backend. An event is legal when every automaton that knows it has a move for it. Three things are
made of this one table: the proof that a program keeps to it (`inclusion.py`), the checker of hand-written
steps (`Protocol.checker`, linked rows: one dictionary look-up an event), and an ordinary `Spec`
(`Protocol.spec`), which brings a `transitions` machine and drawings.

| event | what it stands for |
|---|---|
| `zero` | the gradients are dropped, a new window begins |
| `move` | a batch goes to the device |
| `forward`, `scale`, `backward` | the loss of a micro-batch; scaled, when gradients are; its gradients |
| `unscale`, `clip` | the gradients of the window are made true, and bounded |
| `update`, `apply`, `updated` | the lifecycle enters `updating`; the optimizer's own step; it leaves again |
| `skip` | the window is given up without an update (a scaler found an overflow) |
| `average`, `schedule` | after an update: moving averages and learning rates follow |
| `sync` | queued or traced work is waited for, or cut |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from .compose import Monitor
from .errors import IllegalTransition
from .model import Automaton, Kind, Phase, Spec, Transition

State: TypeAlias = tuple[str, ...]
"""The state of each automaton of a protocol, in their order."""

LEAVE = "leave"
"""In the spec view: the loop is left, which is legal wherever a step may end."""


@dataclass(frozen=True)
class Protocol:
    """Orders of step events, as automata that run side by side.

    Attributes:
        name: For people.
        automata: The first one knows every event and is the one that the spec view shows as phases.
        rests: The states of the first one in which a step may end.
        shut: Its states in which events that are added later are never legal (inside an update).
        hints: (automaton, event) -> what to do instead where that automaton refuses that event. An
            automaton without a hint is explained by its `doc`.
    """

    name: str
    automata: tuple[Automaton, ...]
    rests: frozenset[str]
    shut: frozenset[str] = frozenset()
    hints: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def events(self) -> frozenset[str]:
        """All events that the protocol knows."""
        return self.automata[0].alphabet

    @property
    def start(self) -> State:
        """The state before the first step."""
        return tuple(a.initial for a in self.automata)

    def after(self, state: State, event: str) -> State | None:
        """The state that `event` leads to, or `None` where it is not legal."""
        if event not in self.events:
            return None
        after = []
        for automaton, here in zip(self.automata, state, strict=True):
            there = automaton.moves.get((here, event)) if event in automaton.alphabet else here
            if there is None:
                return None
            after.append(there)
        return tuple(after)

    def legal(self, state: State) -> tuple[str, ...]:
        """The events that are legal in a state, sorted."""
        return tuple(event for event in sorted(self.events) if self.after(state, event) is not None)

    def may_end(self, state: State) -> bool:
        """Whether a step may end in a state."""
        return state[0] in self.rests

    def describe(self, state: State) -> str:
        """A state in words: that of the first automaton, and of the others where they have moved."""
        others = zip(self.automata[1:], state[1:], strict=True)
        moved = [f"{other.name} {here}" for other, here in others if here != other.initial]
        return f"{state[0]} ({', '.join(moved)})" if moved else state[0]

    def obstacles(self, state: State, event: str) -> Iterator[str]:
        """Why `event` is not legal in a state: one phrase per automaton that refuses, and what to do.

        One that has not moved yet adds nothing where another refuses: without gradients it would be no help
        to read that they were not unscaled either.
        """
        if event not in self.events:
            yield f"the {self.name} has no such event"
            return
        refusing = [
            (automaton, here)
            for automaton, here in zip(self.automata, state, strict=True)
            if event in automaton.alphabet and (here, event) not in automaton.moves
        ]
        for automaton, here in refusing:
            if here != automaton.initial or automaton is refusing[0][0]:
                fitting = sorted(s for s, e in automaton.moves if e == event)
                remedy = self.hints.get((automaton.name, event), automaton.doc)
                yield f"{automaton.name} is '{here}', must be {' or '.join(fitting)}: {remedy}"

    def beside(self, *automata: Automaton) -> Protocol:
        """The protocol with more automata beside it (a backend's, or those that an option brings).

        An event that is new with them is legal wherever they allow it, except inside an update.
        """
        new = frozenset[str]().union(*(a.alphabet for a in automata)) - self.events
        main = self.automata[0]
        states = dict.fromkeys((main.initial, *main.moves.values()))
        loops = {(s, event): s for s in states if s not in self.shut for event in sorted(new)}
        main = replace(main, moves={**main.moves, **loops})
        return replace(self, automata=(main, *self.automata[1:], *automata))

    @cached_property
    def spec(self) -> Spec:
        """The protocol as an ordinary spec, to be run on a `transitions` machine or drawn.

        The states of the first automaton are its phases, the other automata stay automata. A
        terminal phase `left` is added, reached by `leave` from wherever a step may end.
        """
        main = self.automata[0]
        states = dict.fromkeys((main.initial, *main.moves.values()))
        return Spec(
            name=self.name,
            phases=(
                *(Phase(s, Kind.STABLE if s in self.rests else Kind.WORK) for s in states),
                Phase("left", Kind.TERMINAL, doc="the loop is over"),
            ),
            resources=(),
            transitions=(
                *(Transition(event, source, dest, ()) for (source, event), dest in main.moves.items()),
                *(Transition(LEAVE, s, "left", ()) for s in states if s in self.rests),
            ),
            table={},
            automata=self.automata[1:],
        )

    def checker(self) -> Checker:
        """A new checker, before its first step. The rows behind it are built once and shared."""
        tables = [(a.name, a.initial, sorted(a.moves.items())) for a in self.automata]
        key = repr((self.name, sorted(self.rests), tables))
        row = _compiled.get(key)
        if row is None:
            row = _compiled.setdefault(key, _compile(self))
        return Checker(row)


class Row(dict[str, "Row"]):
    """One state of a compiled protocol: event -> the row of the state that it leads to.

    Attributes:
        protocol: What it was compiled from.
        state: Which state it is.
    """

    __slots__ = ("protocol", "state")

    def __init__(self, protocol: Protocol, state: State) -> None:
        super().__init__()
        self.protocol = protocol
        self.state = state

    def __missing__(self, event: str) -> Row:
        why = "; ".join(self.protocol.obstacles(self.state, event))
        raise IllegalTransition(event, self.protocol.describe(self.state), self, why=why)


class Checker:
    """Follows the events of hand-written steps, and refuses the first one that is out of order.

    Attributes:
        row: The compiled state; a hot loop may hold it itself and do `row = row[event]`.
    """

    __slots__ = ("row",)

    def __init__(self, row: Row) -> None:
        self.row = row

    def fire(self, event: str) -> None:
        """Take one event.

        Raises:
            IllegalTransition: The event is not legal now; nothing has changed.
        """
        self.row = self.row[event]

    @property
    def legal(self) -> tuple[str, ...]:
        """The events that are legal now, sorted."""
        return tuple(sorted(self.row))

    @property
    def phase(self) -> str:
        """The state, in words."""
        return self.row.protocol.describe(self.row.state)

    @property
    def may_end(self) -> bool:
        """Whether a step may end here."""
        return self.row.protocol.may_end(self.row.state)


_compiled: dict[str, Row] = {}
"""Compiled protocols by content: rows are cyclic, so they live for ever instead of waiting for `gc`."""


def _compile(protocol: Protocol) -> Row:
    rows = {protocol.start: Row(protocol, protocol.start)}
    todo = [protocol.start]
    while todo:
        state = todo.pop()
        for event in protocol.legal(state):
            after = protocol.after(state, event)
            if after is None:
                continue
            if after not in rows:
                rows[after] = Row(protocol, after)
                todo.append(after)
            rows[state][event] = rows[after]
    return rows[protocol.start]


# The table of the step protocol. A *window* is what one update is made of: one micro-batch or several.

_UPDATE = frozenset({"updating", "applied"})


def _outside_update(*events: str) -> dict[tuple[str, str], str]:
    """Legal in all states outside of an update, changing none (other automata may say more)."""
    states = ("clean", "ahead", "gathered", "more", "ready", "spent")
    return {(state, event): state for state in states for event in events}


_GRADIENTS = Automaton(
    "gradients",
    "clean",
    {
        ("clean", "zero"): "clean",
        ("clean", "forward"): "ahead",
        ("ahead", "backward"): "gathered",
        ("gathered", "forward"): "more",
        ("more", "backward"): "gathered",
        # Once the gradients are made true or bounded, no further ones may be mixed in.
        ("gathered", "unscale"): "ready",
        ("gathered", "clip"): "ready",
        ("ready", "clip"): "ready",
        ("gathered", "update"): "updating",
        ("ready", "update"): "updating",
        ("updating", "apply"): "applied",
        ("applied", "updated"): "spent",
        ("spent", "zero"): "clean",
        # Giving a window up is legal at any point of it, and leaves gradients that have to go.
        **{(state, "skip"): "spent" for state in ("ahead", "gathered", "more", "ready")},
        **{(state, "scale"): state for state in ("ahead", "more")},
        **_outside_update("move", "sync", "average", "schedule"),
    },
    "zero, then forward and backward in pairs, then one update or none",
)

_SCALING = Automaton(
    "scaling",
    "undecided",
    {
        ("undecided", "backward"): "plain",
        ("undecided", "scale"): "scaling",
        ("scaling", "backward"): "scaled",
        ("plain", "backward"): "plain",
        ("plain", "clip"): "plain",
        ("plain", "update"): "plain",
        ("scaled", "scale"): "rescaling",
        ("rescaling", "backward"): "scaled",
        ("scaled", "unscale"): "unscaled",
        ("unscaled", "clip"): "unscaled",
        ("unscaled", "update"): "unscaled",
        ("plain", "updated"): "undecided",
        ("unscaled", "updated"): "undecided",
        **{
            (state, "skip"): "undecided"
            for state in ("undecided", "scaling", "plain", "scaled", "rescaling", "unscaled")
        },
    },
    "all gradients of a window are scaled or none; scaled ones are unscaled once, before clip and update",
)


def _once_after_update(event: str) -> Automaton:
    """At most once after an update, before the next forward."""
    moves = {
        ("waiting", "updated"): "due",
        ("due", event): "waiting",
        ("waiting", "forward"): "waiting",
        ("due", "forward"): "waiting",
    }
    return Automaton(event, "waiting", moves, f"{event} follows an update, once")


STEP = Protocol(
    "step protocol",
    (_GRADIENTS, _SCALING, _once_after_update("schedule"), _once_after_update("average")),
    rests=frozenset({"clean", "spent"}),
    shut=_UPDATE,
    hints={
        ("gradients", "zero"): "gathered gradients are used by an update, or given up by 'skip', first",
        ("gradients", "forward"): "zero the gradients after an update, and give each forward its backward",
        ("gradients", "backward"): "each backward needs a forward of its own",
        ("gradients", "scale"): "scale a loss between its forward and its backward",
        ("gradients", "unscale"): "unscale after the last backward, before clip and update",
        ("gradients", "clip"): "clip after the last backward, before the update",
        ("gradients", "update"): "one update needs at least one forward and backward of its own",
        ("gradients", "apply"): "the optimizer's step stands between 'update' and 'updated', once",
        ("gradients", "updated"): "it ends an update, after 'apply'",
        ("gradients", "skip"): "there is no open window to give up",
        ("scaling", "scale"): "scale each loss of a window once, or none of them",
        ("scaling", "backward"): "in one window all losses are scaled, or none",
        ("scaling", "unscale"): "unscale once, and only what was scaled",
        ("scaling", "clip"): "unscale before clipping: scaled gradients have another norm",
        ("scaling", "update"): "unscale before the update: it would use scaled gradients",
        ("schedule", "schedule"): "schedule once, after a real update and before the next forward",
        ("average", "average"): "average once, after a real update and before the next forward",
    },
)
"""The step protocol of every backend."""


def step_protocol(monitor: Monitor | None = None, automata: Iterable[Automaton] = ()) -> Protocol:
    """The step protocol on a backend.

    Args:
        monitor: The backend's monitor; its `step` automata are added.
        automata: Further ones, such as those of a program's options.
    """
    more = (*(monitor.step if monitor else ()), *automata)
    protocol = STEP.beside(*more) if more else STEP
    return replace(protocol, name=f"{STEP.name} of {monitor.name}") if monitor else protocol
