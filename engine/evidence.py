"""Turns an exception into evidence that pins nothing.

An exception holds its traceback, the traceback its frames, and the frames every tensor of the
step that failed; whoever keeps the exception (a job record does) keeps the device full. So the
traceback is rendered to text, and the frames below the engine are cleared, along the whole graph
of causes, contexts and groups. The exception object itself stays what it was.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType
from typing import NoReturn, TypeAlias

OnDevice: TypeAlias = Callable[[object], bool]


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


def unpin(error: BaseException, outside: BaseException | None, on_device: OnDevice) -> None:
    """Clear the frames that an exception keeps alive, along its whole graph.

    These are the frames in its tracebacks, and also those that had called them and returned since:
    whoever stores an exception and lets its callers go on, as a retry does, keeps their locals too.
    Frames that are still executing (the engine's own, and its callers') are left alone. The
    traceback still prints the same lines.

    A cleared frame keeps its function, and the function what it closes over: of that, whatever
    stands on the device is dropped, where nobody but the frame can reach it any more.

    Args:
        error: The exception.
        outside: The exception that was being handled when the engine was entered, if any: it is
            the caller's, and is not touched although `error` may have it as context.
        on_device: Whether a value stands on the device of the run.
    """
    for one in graph(error, outside):
        for frame in _frames(one.__traceback__):
            # Executing frames refuse.
            with suppress(RuntimeError):
                frame.clear()
                _empty_cells(frame, on_device)


def _empty_cells(frame: FrameType, on_device: OnDevice) -> None:
    """Drop what only this frame's function closes over; what others can still reach is theirs."""
    if not frame.f_code.co_freevars:
        return
    for function in gc.get_referents(frame):
        if isinstance(function, FunctionType) and function.__code__ is frame.f_code:
            # Held by the frame, the list, this variable and the call; by anybody else, it may run again.
            if sys.getrefcount(function) > _HELD_HERE + 1:
                continue
            for cell in function.__closure__ or ():
                # Held by the closure, this variable and the call; another function may share it.
                if sys.getrefcount(cell) > _HELD_HERE:
                    continue
                # An empty cell has no contents; and those of others may be anything.
                with suppress(Exception):
                    if on_device(cell.cell_contents):
                        del cell.cell_contents


_HELD_HERE = 3


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """The frames of a traceback, and the callers of the outermost one."""
    caller = trace.tb_frame if trace else None
    while caller is not None:
        # A generator that caught the exception may only be suspended: clearing would end it.
        if not caller.f_code.co_flags & _SUSPENDS:
            yield caller
        caller = caller.f_back
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
        yield trace.tb_frame


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


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


class Errors:
    """The errors of one run: the first stays the error, later ones are attached to it.

    Args:
        keep_frames: Leave their frames alone.
        on_device: As for `unpin`.
    """

    def __init__(self, keep_frames: bool, on_device: OnDevice) -> None:
        self._keep_frames = keep_frames
        self._on_device = on_device
        self._noted: list[tuple[BaseException, str, int]] = []
        self._outside: BaseException | None = None

    @property
    def first(self) -> BaseException | None:
        """The error that ended the run, if one did."""
        return self._noted[0][0] if self._noted else None

    def note(self, error: BaseException, phase: str, step: int, outside: BaseException | None) -> None:
        """Take up an error, and let go of what it keeps alive. Again: no further effect.

        Args:
            error: Any.
            phase: In which it struck.
            step: How many steps were complete.
            outside: As for `unpin`.
        """
        # Before anything else: an interrupt may land in any of the lines below.
        self._outside = outside or self._outside
        if all(error is not noted for noted, _, _ in self._noted):
            self._noted.append((error, phase, step))
        # All of them: an interrupt that cut this short is an error itself, and leads back here.
        self.unpin()

    def unpin(self) -> None:
        """Let go of what the errors keep alive; frames that were executing then may have ended since."""
        if not self._keep_frames:
            for noted, _, _ in self._noted:
                unpin(noted, self._outside, self._on_device)

    def failures(self) -> tuple[Failure, ...]:
        """All errors as text, in order; the later ones are noted on the first."""
        found = tuple(record(*noted) for noted in self._noted)
        for failure in found[1:]:
            _attach(self._noted[0][0], failure)
        return found


def _attach(first: BaseException, later: Failure) -> None:
    add_note(first, f"interlock: while cleaning up, also {later.type}: {later.message}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note, once. Some errors refuse attributes, notes among them: these stay without."""
    with suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


_CONTEXT = vars(BaseException)["__context__"]
"""Sets it also where an error's class refuses attributes."""


def raise_again(error: BaseException) -> NoReturn:
    """Raise an error that was raised before, leaving its context as it is.

    A plain `raise` within somebody's `except` block would put what is handled there in its place.
    Nothing of this frame stays in the traceback's locals.
    """
    context = error.__context__
    try:
        raise error
    finally:
        _CONTEXT.__set__(error, context)
        del error, context
