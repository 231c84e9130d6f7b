"""A step program before it is source: lines, loops and branches, and how an option gets into them.

Both the regular expression (`expression_of`) and the Python source (`render`) are made from this one
tree; `interlock.extraction` then reads the source back without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .extraction import PARAMETER
from .specs.errors import SpecError
from .specs.expressions import Alt, Expression, Opt, Star, events_of, seq
from .specs.inclusion import StepVerdict


class ProgramError(SpecError):
    """A step program cannot be built, or is not proved.

    Attributes:
        verdict: When it could be built and is not proved: the verdict, with the counterexample.
    """

    def __init__(self, what: str, problems: Sequence[str], verdict: StepVerdict | None = None) -> None:
        self.verdict = verdict
        super().__init__(what, problems)


@dataclass(frozen=True, slots=True)
class Line:
    """One statement.

    Attributes:
        source: Python, on one line.
        events: What it fires, in order.
        why: The comment beside it.
    """

    source: str
    events: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """`for name in values:` and its body, which may run any number of times, none included."""

    name: str
    values: str
    body: Block
    why: str = ""


@dataclass(frozen=True, slots=True)
class Branch:
    """`if test:` and one or two bodies."""

    test: str
    body: Block
    orelse: Block = ()
    why: str = ""


Node: TypeAlias = Line | Loop | Branch
Block: TypeAlias = tuple[Node, ...]


def before(block: Block, event: str, *nodes: Node) -> Block:
    """The program with `nodes` put before each line that fires `event`.

    Raises:
        ProgramError: No line does.
    """
    return _at(block, event, lambda line: (*nodes, line))


def after(block: Block, event: str, *nodes: Node) -> Block:
    """The program with `nodes` put after each line that fires `event`.

    Raises:
        ProgramError: No line does.
    """
    return _at(block, event, lambda line: (line, *nodes))


def instead(block: Block, event: str, *nodes: Node) -> Block:
    """The program with `nodes` in place of each line that fires `event`.

    Raises:
        ProgramError: No line does.
    """
    return _at(block, event, lambda _: nodes)


def span(block: Block, first: str, last: str) -> tuple[Block, Block, Block]:
    """A program cut in three: up to `first`, from `first` to `last` inclusive, the rest.

    Raises:
        ProgramError: The two events do not stand in this order on the same level.
    """
    begin = next((i for i, node in enumerate(block) if first in fired(node)), -1)
    end = next((i for i, node in enumerate(block) if last in fired(node) and i >= begin), -1)
    if min(begin, end) < 0:
        raise ProgramError("the step program", [f"there is no '{first}' with a '{last}' after it"])
    return block[:begin], block[begin : end + 1], block[end + 1 :]


def _at(block: Block, event: str, rewrite: Callable[[Line], Block]) -> Block:
    if not any(event in fired(node) for node in block):
        raise ProgramError("the step program", [f"nothing fires '{event}', so nothing can stand beside it"])
    return _map(block, lambda line: rewrite(line) if event in line.events else (line,))


def _map(block: Block, rewrite: Callable[[Line], Block]) -> Block:
    found: list[Node] = []
    for node in block:
        match node:
            case Line():
                found += rewrite(node)
            case Loop(name, values, body, why):
                found.append(Loop(name, values, _map(body, rewrite), why))
            case Branch(test, body, orelse, why):
                found.append(Branch(test, _map(body, rewrite), _map(orelse, rewrite), why))
    return tuple(found)


def fired(node: Node) -> frozenset[str]:
    """The events that a node may fire."""
    return events_of(expression_of((node,)))


def expression_of(block: Block) -> Expression:
    """The regular expression of a program."""
    parts: list[Expression] = []
    for node in block:
        match node:
            case Line(events=events):
                parts.append(seq(*events))
            case Loop(body=body):
                parts.append(Star(expression_of(body)))
            case Branch(body=body, orelse=()):
                parts.append(Opt(expression_of(body)))
            case Branch(body=body, orelse=orelse):
                parts.append(Alt((expression_of(body), expression_of(orelse))))
    return seq(*parts)


def render(program: Block, comments: Iterable[str] = ()) -> str:
    """The Python source of a program, with the comments above it."""
    rows = [(f"def step({PARAMETER}):", ""), *_rows(program, 1)]
    width = max(len(text) for text, _ in rows)
    head = [f"# {comment}" for comment in (*comments, str(expression_of(program)))]
    body = [f"{text:<{width}}  # {why}" if why else text for text, why in rows]
    return "\n".join([*head, *body, ""])


def _rows(block: Block, depth: int) -> Iterator[tuple[str, str]]:
    indent = "    " * depth
    for node in block:
        match node:
            case Line(source, _, why):
                yield f"{indent}{source}", why
            case Loop(name, values, body, why):
                yield f"{indent}for {name} in {values}:", why
                yield from _rows(body, depth + 1)
            case Branch(test, body, orelse, why):
                yield f"{indent}if {test}:", why
                yield from _rows(body, depth + 1)
                if orelse:
                    yield f"{indent}else:", ""
                    yield from _rows(orelse, depth + 1)
