"""Turns an exception into evidence that pins nothing.

An exception holds its traceback, the traceback its frames, and the frames every tensor of the
step that failed; whoever keeps the exception (a job record does) keeps the device full. So the
traceback is rendered to text, and the frames below the engine are cleared, along the whole graph
of causes, contexts and groups. The exception object itself stays what it was.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """What went wrong, as text.

    Attributes:
        type: The exception's class, qualified.
        message: Its message.
        traceback: The complete traceback, causes and contexts included.
        phase: The phase in which it struck.
        step: How many steps were complete.
    """

    type: str
    message: str
    traceback: str
    phase: str
    step: int

    def __str__(self) -> str:
        return f"{self.type}: {self.message} (in phase '{self.phase}', after step {self.step})"


def record(error: BaseException, phase: str, step: int) -> Failure:
    """Render an exception. Never raises, whatever the exception's own methods do."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as second:
        text = f"(the traceback could not be rendered: {type(second).__name__})"
    try:
        message = str(error)
    except Exception as second:
        message = f"(its message could not be rendered: {type(second).__name__})"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failure(name, message, text, phase, step)


def unpin(error: BaseException, outside: BaseException | None) -> None:
    """Clear the frames that an exception's tracebacks hold, along its whole graph.

    Frames that are still executing (the engine's own, and its callers') are left alone. The
    traceback still prints the same lines.

    Args:
        error: The exception.
        outside: The exception that was being handled when the engine was entered, if any: it is
            the caller's, and is not touched although `error` may have it as context.
    """
    for one in graph(error, outside):
        traceback.clear_frames(one.__traceback__)


def graph(error: BaseException, outside: BaseException | None = None) -> Iterator[BaseException]:
    """An exception, its causes, contexts and group members, each once."""
    seen: set[int] = set() if outside is None else {id(outside)}
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions


def attach(first: BaseException, later: BaseException) -> None:
    """Note on the first error that a later one happened while cleaning up after it."""
    if later is not first:
        first.add_note(f"interlock: while cleaning up, also {type(later).__name__}: {later}")
