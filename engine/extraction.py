"""Reads the events of a step program back from its Python source.

The generator and this reader know nothing of each other: what the generator meant is compared with
what the source says. The reader understands a small part of Python and refuses everything else, so
that nothing can hide in a statement it does not know.

| source | read as |
|---|---|
| a call of an event's name | the event, after those in its arguments |
| a call of a helper's name | nothing, after the events in its arguments |
| `at.updating = True`, `= False` | `update`, `updated` |
| `for name in ...:` | any number of times the body |
| `if ...: ... else: ...` | one of the two bodies; without `else`, perhaps the body |
| `return ...` as the last statement | the events in it |
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .specs.errors import SpecError
from .specs.expressions import Alt, Expression, Opt, Star, seq
from .specs.protocol import STEP

FLAG, FLAG_FIELD = "at", "updating"
"""`at.updating = True` is how a program says `update`."""
PARAMETER = "batch"
HELPERS = frozenset({"detach"})
"""Calls that are no events in every program."""
_CALLED_EVENTS = STEP.events - {"update", "updated"}


class ExtractionError(SpecError):
    """The source of a step program holds something that cannot be read as events."""


@dataclass(frozen=True)
class Extracted:
    """What was read from a source.

    Attributes:
        expression: The events.
        free: The names that the source uses and does not set: they have to be bound.
    """

    expression: Expression
    free: frozenset[str]


def extract(
    source: str, events: Iterable[str] = _CALLED_EVENTS, helpers: Iterable[str] = HELPERS
) -> Expression:
    """The regular expression of the events in the source of a step program.

    Args:
        source: One function `step(batch)`.
        events: The names whose calls are events.
        helpers: The names that may be called and are no events.

    Raises:
        ExtractionError: Naming each statement that cannot be read, by line.
    """
    return read(source, events, helpers).expression


def read(source: str, events: Iterable[str], helpers: Iterable[str]) -> Extracted:
    """As `extract`, with the names that have to be bound.

    Raises:
        ExtractionError: Naming each statement that cannot be read, by line.
    """
    reader = _Reader(frozenset(events), frozenset(helpers))
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ExtractionError("the step program", [f"line {error.lineno}: {error.msg}: mend it"]) from error
    expression = reader.module(tree)
    if reader.problems:
        raise ExtractionError("the step program", reader.problems)
    return Extracted(expression, frozenset(reader.free))


class _Reader:
    """Walks a source once, in the order of execution; gathers problems rather than stopping at the first."""

    def __init__(self, events: frozenset[str], helpers: frozenset[str]) -> None:
        self.events = events
        self.helpers = helpers
        self.problems: list[str] = []
        self.free: set[str] = set()
        self.known = {PARAMETER}
        self.set: set[str] = set()

    def refuse(self, node: ast.AST, why: str) -> Expression:
        line = getattr(node, "lineno", 1)
        text = ast.unparse(node).partition("\n")[0]
        self.problems.append(f"line {line}: `{text}`: {why}")
        return seq()

    def module(self, tree: ast.Module) -> Expression:
        if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
            return self.refuse(tree, "the source must be one function and nothing else")
        function = tree.body[0]
        head = ast.unparse(function).partition("\n")[0]
        if head != f"def step({PARAMETER}):":
            self.refuse(function, f"it must be a plain `step({PARAMETER})`, without decorator or annotation")
        *body, last = function.body
        if not isinstance(last, ast.Return):
            self.refuse(last, "the last statement must be a `return`")
            return self.block(function.body)
        parts = [self.block(body)]
        if last.value is not None:
            parts += self.value(last.value)
        for name in sorted(self.set & self.free):
            self.refuse(
                last, f"'{name}' is both set here and needed from outside, or used before it is surely set"
            )
        return seq(*parts)

    def block(self, body: list[ast.stmt]) -> Expression:
        return seq(*(self.statement(statement) for statement in body))

    def statement(self, node: ast.stmt) -> Expression:
        match node:
            case ast.Expr(ast.Call() as call):
                return seq(*self.value(call))
            case ast.Assign([ast.Name(name)], value):
                events = seq(*self.value(value))
                self.bind(name)
                return events
            case ast.Assign([ast.Attribute(ast.Name(at), field)], ast.Constant(bool() as value)) if (
                at == FLAG and field == FLAG_FIELD
            ):
                self.free.add(FLAG)
                return seq("update" if value else "updated")
            case ast.For(ast.Name(name), values, body, [], None):
                before = self.value(values)
                return seq(*before, Star(self.inner(body, name)))
            case ast.If(test, body, orelse):
                return seq(*self.value(test), self.branch(body, orelse))
            case ast.Return():
                return self.refuse(node, "a step returns at its end only")
            case _:
                return self.refuse(node, f"a step program has no such statement ({type(node).__name__})")

    def branch(self, body: list[ast.stmt], orelse: list[ast.stmt]) -> Expression:
        start = set(self.known)
        first = self.block(body)
        after_first, self.known = self.known, start
        second = self.block(orelse)
        self.known &= after_first
        return Alt((first, second)) if orelse else Opt(first)

    def inner(self, body: list[ast.stmt], name: str) -> Expression:
        """A loop's body, which may not run: what it sets is not surely set afterwards."""
        start = set(self.known)
        self.bind(name)
        events = self.block(body)
        self.known = start
        return events

    def bind(self, name: str) -> None:
        self.known.add(name)
        self.set.add(name)

    def value(self, node: ast.expr) -> list[Expression]:
        """The events of an expression, in the order of evaluation."""
        return list(self.events_in(node))

    def events_in(self, node: ast.expr) -> Iterator[Expression]:
        match node:
            case ast.Constant():
                return
            case ast.Name(name):
                self.use(node, name)
            case ast.UnaryOp(ast.Not(), operand):
                yield from self.events_in(operand)
            case ast.Call(ast.Name(name), arguments, keywords):
                for argument in (*arguments, *(keyword.value for keyword in keywords)):
                    yield from self.events_in(argument)
                if any(keyword.arg is None for keyword in keywords):
                    self.refuse(node, "write the keywords out")
                self.free.add(name)
                if name in self.events:
                    yield seq(name)
                elif name not in self.helpers:
                    self.refuse(node, f"'{name}' is neither an event nor a declared helper")
            case _:
                self.refuse(node, f"a step program has no such expression ({type(node).__name__})")

    def use(self, node: ast.expr, name: str) -> None:
        if name in self.events or name in self.helpers:
            self.refuse(node, f"'{name}' may be called, and not passed on: its call would be hidden")
        elif name == FLAG:
            self.refuse(node, f"'{FLAG}' is only ever set")
        elif name not in self.known:
            self.free.add(name)
