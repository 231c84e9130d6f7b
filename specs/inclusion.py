"""Decides whether a regular expression of events keeps to a protocol: language inclusion.

Both sides become automata; a breadth-first search over pairs of their states meets the shortest word
that the expression allows and the protocol does not, or meets none, and then there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from .checker import Result
from .expressions import Dfa, Expression, Star, dfa, events_of
from .protocol import Protocol, State


@dataclass(frozen=True)
class StepVerdict:
    """What was found about an expression and a protocol.

    Attributes:
        expression: What was judged.
        protocol: Against what.
        result: Proved, refuted, or undetermined (when there is nothing to judge).
        word: For refuted: a shortest sequence of events that the expression allows and the protocol
            does not. Its last event is the illegal one, unless `unfinished`.
        unfinished: The word is legal as far as it goes, but the expression may end there, and a
            step may not.
        phase: The state of the protocol in which it breaks.
        legal: The events that were legal there.
        note: Why it breaks, or why it is undetermined.
    """

    expression: Expression
    protocol: Protocol
    result: Result
    word: tuple[str, ...] = ()
    unfinished: bool = False
    phase: str = ""
    legal: tuple[str, ...] = ()
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is proved."""
        return self.result is Result.PROVED

    @property
    def path(self) -> str:
        """The word as text: `zero -> forward -> update`."""
        return " -> ".join(self.word)

    def __str__(self) -> str:
        lines = [f"{self.result}: {self.expression} keeps to the {self.protocol.name}"]
        if self.result is Result.REFUTED:
            broken = "the step may end here" if self.unfinished else f"'{self.word[-1]}' is not legal here"
            lines.append(f"  counterexample: {self.path or '(nothing)'}")
            lines.append(f"  {broken}, in phase '{self.phase}'; legal: {', '.join(self.legal) or 'nothing'}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


def prove(program: Expression, protocol: Protocol) -> StepVerdict:
    """Decide whether a step program keeps to a protocol, step after step, for ever.

    Args:
        program: The events of one step.
        protocol: Usually `step_protocol(monitor)`.

    Returns:
        The verdict on the program repeated any number of times; a program without events is
        undetermined, for it would keep to anything.
    """
    if not events_of(program):
        return StepVerdict(program, protocol, Result.UNDETERMINED, note="vacuous: it does nothing at all")
    return replace(included(Star(program), protocol), expression=program)


def included(expression: Expression, protocol: Protocol) -> StepVerdict:
    """Decide whether each word of an expression is legal in a protocol, to its end.

    A breadth-first search over pairs of states, so that what it finds is shortest.
    """
    automaton = dfa(expression)
    start = (0, protocol.start)
    came: dict[_Pair, tuple[_Pair, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        pair = todo.popleft()
        broken = _broken(automaton, protocol, pair)
        if broken is not None:
            return _refuted(expression, protocol, _word(came, pair), pair[1], broken)
        here, state = pair
        for event, there in automaton.rows[here].items():
            after = protocol.after(state, event)
            if after is not None and (there, after) not in came:
                came[there, after] = (pair, event)
                todo.append((there, after))
    return StepVerdict(expression, protocol, Result.PROVED)


_Pair: TypeAlias = tuple[int, State]
_END = ""


def _broken(automaton: Dfa, protocol: Protocol, pair: _Pair) -> str | None:
    """An event that the expression may do in this pair of states and the protocol does not allow.

    `_END` stands for ending here, and comes first: it makes the shorter counterexample.
    """
    here, state = pair
    if here in automaton.accepting and not protocol.may_end(state):
        return _END
    return next((e for e in automaton.rows[here] if protocol.after(state, e) is None), None)


def _word(came: Mapping[_Pair, tuple[_Pair, str] | None], pair: _Pair) -> tuple[str, ...]:
    word: list[str] = []
    while step := came[pair]:
        pair, event = step
        word.append(event)
    return tuple(reversed(word))


def _refuted(
    expression: Expression, protocol: Protocol, word: tuple[str, ...], state: State, broken: str
) -> StepVerdict:
    ends = broken == _END
    note = f"a step ends in {' or '.join(sorted(protocol.rests))}"
    return StepVerdict(
        expression,
        protocol,
        Result.REFUTED,
        word if ends else (*word, broken),
        unfinished=ends,
        phase=protocol.describe(state),
        legal=protocol.legal(state),
        note=note if ends else "; ".join(protocol.obstacles(state, broken)),
    )
