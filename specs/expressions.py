"""Regular expressions over events: what a step program can do, as data, and the automata made of them.

Five kinds of node make an `Expression`: `Event`, `Seq`, `Alt`, `Star`, `Opt`. The automaton comes from
partial derivatives (Antimirov 1996): a state *is* the expression of what may still come, so there are
no empty moves and no state from which nothing can be completed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .errors import SpecError


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Seq:
    """The parts one after the other; without parts, nothing happens. `seq` makes flat ones."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " ".join(f"({p})" if isinstance(p, Alt | Seq) else str(p) for p in self.parts) or "()"


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the choices.

    Raises:
        SpecError: There is no choice: nothing could ever be done.
    """

    choices: tuple[Expression, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise SpecError("an alternative", ["it has no choice: give it at least one"])

    def __str__(self) -> str:
        return " | ".join(f"({c})" if isinstance(c, Alt) else str(c) for c in self.choices)


@dataclass(frozen=True, slots=True)
class Star:
    """The body any number of times, or not at all."""

    body: Expression

    def __str__(self) -> str:
        return f"{self.body}*" if isinstance(self.body, Event) else f"({self.body})*"


@dataclass(frozen=True, slots=True)
class Opt:
    """The body once, or not at all."""

    body: Expression

    def __str__(self) -> str:
        return f"{self.body}?" if isinstance(self.body, Event) else f"({self.body})?"


Expression: TypeAlias = Event | Seq | Alt | Star | Opt

NOTHING = Seq(())
"""The expression whose only word is the empty one."""


def seq(*parts: Expression | str) -> Expression:
    """The parts one after the other, flattened; a string stands for the event of that name.

    >>> str(seq("zero", Star(seq("forward", "backward")), Opt(Event("clip"))))
    'zero (forward backward)* clip?'
    """
    flat: list[Expression] = []
    for part in parts:
        node = Event(part) if isinstance(part, str) else part
        flat += node.parts if isinstance(node, Seq) else (node,)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def events_of(expression: Expression) -> frozenset[str]:
    """The names of all events in an expression."""
    match expression:
        case Event(name):
            return frozenset({name})
        case Seq(nodes) | Alt(nodes):
            return frozenset().union(*(events_of(node) for node in nodes))
        case Star(body) | Opt(body):
            return events_of(body)


def nullable(expression: Expression) -> bool:
    """Whether the empty word belongs to the expression."""
    match expression:
        case Event():
            return False
        case Seq(parts):
            return all(nullable(part) for part in parts)
        case Alt(choices):
            return any(nullable(choice) for choice in choices)
        case Star() | Opt():
            return True


def derive(expression: Expression, event: str) -> frozenset[Expression]:
    """What may still come once `event` has come first: one expression per way of reading it."""
    match expression:
        case Event(name):
            return frozenset({NOTHING} if name == event else ())
        case Seq(parts):
            found: frozenset[Expression] = frozenset()
            for i, part in enumerate(parts):
                found |= {seq(rest, *parts[i + 1 :]) for rest in derive(part, event)}
                if not nullable(part):
                    break
            return found
        case Alt(choices):
            return frozenset().union(*(derive(choice, event) for choice in choices))
        case Star(body):
            return frozenset(seq(rest, expression) for rest in derive(body, event))
        case Opt(body):
            return derive(body, event)


@dataclass(frozen=True)
class Dfa:
    """A deterministic automaton; state 0 is the start.

    Attributes:
        rows: For each state, event -> state. An event that is missing there leads nowhere. From
            each state an accepting one can be reached.
        accepting: The states in which a word may end.
    """

    rows: tuple[Mapping[str, int], ...]
    accepting: frozenset[int]

    def accepts(self, word: tuple[str, ...]) -> bool:
        """Whether the word belongs to the language."""
        state: int | None = 0
        for event in word:
            state = None if state is None else self.rows[state].get(event)
        return state in self.accepting


def dfa(expression: Expression) -> Dfa:
    """The deterministic automaton of an expression (subset construction over `derive`)."""
    alphabet = sorted(events_of(expression))
    states: list[frozenset[Expression]] = [frozenset({expression})]
    number = {states[0]: 0}
    rows: list[dict[str, int]] = []
    for state in states:  # grows while it is walked
        row: dict[str, int] = {}
        for event in alphabet:
            after = frozenset[Expression]().union(*(derive(e, event) for e in state))
            if not after:
                continue
            if after not in number:
                number[after] = len(states)
                states.append(after)
            row[event] = number[after]
        rows.append(row)
    accepting = frozenset(i for i, state in enumerate(states) if any(nullable(e) for e in state))
    return Dfa(tuple(rows), accepting)


def difference(left: Expression, right: Expression) -> tuple[str, ...] | None:
    """A shortest word that belongs to exactly one of two expressions.

    Returns:
        The word, or `None` when the two describe the same language.
    """
    one, two = dfa(left), dfa(right)
    start: tuple[int | None, int | None] = (0, 0)
    seen = {start}
    todo: deque[tuple[tuple[int | None, int | None], tuple[str, ...]]] = deque([(start, ())])
    while todo:
        (a, b), word = todo.popleft()
        if (a in one.accepting) != (b in two.accepting):
            return word
        row_a: Mapping[str, int] = {} if a is None else one.rows[a]
        row_b: Mapping[str, int] = {} if b is None else two.rows[b]
        for event in sorted({*row_a, *row_b}):
            after = (row_a.get(event), row_b.get(event))
            if after not in seen:
                seen.add(after)
                todo.append((after, (*word, event)))
    return None
