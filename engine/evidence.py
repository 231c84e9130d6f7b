"""Turns an exception into evidence that pins nothing.

An exception holds its traceback, the traceback its frames, and the frames every tensor of the
step that failed; whoever keeps the exception (a job record does) keeps the device full. So the
traceback is rendered to text, and the frames below the engine are cleared, along the whole graph
of causes, contexts and groups. The exception object itself stays what it was.

An exception's class is the user's: what it overrides may raise, or say something else. So what is
walked here is read past it, as the interpreter itself reads it.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType
from typing import NoReturn, TypeAlias


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


Kinds: TypeAlias = type[BaseException]


def record(error: BaseException, phase: str, step: int, hostile: Kinds = BaseException) -> Failure:
    """Render an exception.

    Args:
        error: Any.
        phase: In which it struck.
        step: How many steps were complete.
        hostile: What the exception's own methods may raise, and is noted in the text. By default it
            is anything at all, an interrupt that lands here included.
    """
    try:
        text = "".join(traceback.format_exception(error))
    except hostile as second:
        lines = "".join(traceback.format_tb(_TRACEBACK.__get__(error)))
        text = f"{lines}(the rest could not be rendered: {type(second).__name__})"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failure(name, message_of(error, hostile), text, phase, step)


def message_of(error: BaseException, hostile: Kinds = BaseException) -> str:
    """An exception's message; `hostile` as for `record`."""
    try:
        return str(error)
    except hostile as second:
        return f"(its message could not be rendered: {type(second).__name__})"


def unpin(error: BaseException, outside: BaseException | None) -> None:
    """Clear the frames that an exception keeps alive, along its whole graph.

    These are the frames in its tracebacks, and also those that had called them and returned since:
    whoever stores an exception and lets its callers go on, as a retry does, keeps their locals too.
    Frames that are still executing (the engine's own, and its callers') are left alone. The
    traceback still prints the same lines.

    A cleared frame keeps its function, and the function what it closes over: that is dropped, where
    nobody but the frame can reach it any more.

    Args:
        error: The exception.
        outside: The exception that was being handled when the engine was entered, if any: it is
            the caller's, and is not touched although `error` may have it as context.
    """
    for one in graph(error, outside):
        for frame in _frames(_TRACEBACK.__get__(one)):
            # Executing frames refuse.
            with suppress(RuntimeError):
                frame.clear()
                _empty_cells(frame)


def _empty_cells(frame: FrameType) -> None:
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
                # Nobody can call the function again, so nobody can miss what it closes over.
                with suppress(ValueError):  # empty already
                    del cell.cell_contents


_HELD_HERE = 3


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """The frames of a traceback, and the callers of the outermost one."""
    caller = trace.tb_frame if trace is not None else None
    while caller is not None:
        if not _may_go_on(caller):
            yield caller
        caller = caller.f_back
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
        if not _may_go_on(trace.tb_frame):
            yield trace.tb_frame


def _may_go_on(frame: FrameType) -> bool:
    """Whether it belongs to a generator or coroutine that is not finished: clearing would end that.

    Such a generator owns what is in its frame, and the frame itself refers to nothing; once it is
    finished the frame owns it, its code included.
    """
    code = frame.f_code
    return bool(code.co_flags & _SUSPENDS) and all(held is not code for held in gc.get_referents(frame))


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_TRACEBACK = vars(BaseException)["__traceback__"]
_CAUSE = vars(BaseException)["__cause__"]
_CONTEXT = vars(BaseException)["__context__"]
_MEMBERS = vars(BaseExceptionGroup)["exceptions"]


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of an error, whatever its class makes of that attribute."""
    trace: TracebackType | None = _TRACEBACK.__get__(error)
    return trace


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
        todo += [_CAUSE.__get__(one), _CONTEXT.__get__(one)]
        if issubclass(type(one), BaseExceptionGroup):
            todo += _MEMBERS.__get__(one)


class Errors:
    """The errors of one run: the first stays the error, later ones are attached to it.

    Args:
        keep_frames: Leave their frames alone.
    """

    def __init__(self, keep_frames: bool) -> None:
        self._keep_frames = keep_frames
        self._noted: list[tuple[BaseException, str, int]] = []
        self._rendered: list[Failure] = []
        self._interrupted = False
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
        self._outside = self._outside if outside is None else outside
        if all(error is not noted for noted, _, _ in self._noted):
            self._noted.append((error, phase, step))
        # All of them: an interrupt that cut this short is an error itself, and leads back here.
        self.unpin()

    def unpin(self) -> None:
        """Let go of what the errors keep alive; frames that were executing then may have ended since."""
        if not self._keep_frames:
            for noted, _, _ in self._noted:
                unpin(noted, self._outside)

    def failures(self) -> tuple[Failure, ...]:
        """All errors as text, in order, each rendered once; the later ones are noted on the first.

        Raises:
            BaseException: An interrupt. It may also be one that an error's own methods raise: so at
                the second time, and from then on, it is taken for that, and noted in the text.
        """
        hostile: Kinds = BaseException if self._interrupted else Exception
        try:
            return self._as_text(hostile)
        except BaseException:
            self._interrupted = True
            raise

    def _as_text(self, hostile: Kinds) -> tuple[Failure, ...]:
        while len(self._rendered) < len(self._noted):
            self._rendered.append(record(*self._noted[len(self._rendered)], hostile))
        for later in self._rendered[1:]:
            note = f"interlock: while cleaning up, also {later.type}: {later.message}"
            add_note(self._noted[0][0], note, hostile)
        return tuple(self._rendered)


def add_note(error: BaseException, note: str, hostile: Kinds = Exception) -> None:
    """Add a note, once. Some errors refuse attributes, notes among them: these stay without."""
    with suppress(hostile):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def raise_again(error: BaseException) -> NoReturn:
    """Raise an error that was raised before, leaving its context as it is.

    A plain `raise` within somebody's `except` block would put what is handled there in its place.
    Nothing of this frame stays in the traceback's locals.
    """
    context = _CONTEXT.__get__(error)
    try:
        raise error
    finally:
        _CONTEXT.__set__(error, context)
        del error, context
