"""What the command line says: output, and one clear message for an error.

A traceback is shown for errors of the user's code only, and without the engine's own frames.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interlock.specs.errors import InterlockError

# Frames that tell a user nothing: the engine's, those of its generated step, and of the import system.
_OWN = (f"{Path(__file__).parent}/", "<interlock step ", "<frozen ", importlib.__file__)
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = "/site-packages/"


class OutputLost(InterlockError):
    """The standard output takes no more.

    Attributes:
        unread: Whether it is a pipe whose reader has enough, which is nothing to complain of.
    """

    def __init__(self, error: OSError) -> None:
        self.unread = isinstance(error, BrokenPipeError)
        super().__init__(f"the output cannot be written: {error.strerror}")


@contextmanager
def to_output() -> Iterator[None]:
    """Where the standard output is written: its errors are told apart from those of the task.

    Raises:
        OutputLost: It takes no more.
    """
    try:
        yield
    except OSError as error:
        raise OutputLost(error) from error


def say(text: str = "") -> None:
    """Write a line to the standard output."""
    with to_output():
        sys.stdout.write(f"{text}\n")


def warn(text: str) -> None:
    """Write a line to the standard error stream."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def describe(error: BaseException) -> str:
    """An error for people: where in the user's code it was raised, if it was; its type, message and notes.

    Args:
        error: Any. For an error of Interlock that has another one as cause, both are shown.
    """
    cause = error.__cause__ if isinstance(error, InterlockError) else None
    if cause is not None and not isinstance(cause, OSError):
        return "\n".join([f"error: {one_error(error)}", *user_frames(cause), one_error(cause)])
    return "\n".join([*user_frames(error), f"error: {one_error(error)}"])


def one_error(error: BaseException) -> str:
    """`Type: message`, and the notes."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    try:
        text = str(error)
    except Exception:  # an error may do anything in its own methods
        text = ""
    name = type(error).__name__
    return "\n".join([f"{name}: {text}" if text else name, *map(str, getattr(error, "__notes__", ()))])


def user_frames(error: BaseException) -> list[str]:
    """The frames outside of Interlock, with those of what led to the error; none if it is all ours."""
    blocks: list[str] = []
    for one in reversed(list(_chain(error))):
        kept = _of_user(traceback.extract_tb(one.__traceback__))
        if kept and one is not error:
            blocks += ["Traceback, without the frames of Interlock:", *_lines(kept), one_error(one), ""]
            blocks += ["While that was handled, or because of it:"]
        elif kept:
            blocks += ["Traceback, without the frames of Interlock:", *_lines(kept)]
    return blocks


def _of_user(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """From the first frame of the user's code on, without those of Interlock.

    What comes before it is Interlock, or the standard library called by it.
    """
    for begin, frame in enumerate(stack):
        # Interlock itself may lie in site-packages, and those in the standard library's folder.
        foreign = not frame.filename.startswith(_STANDARD) or _INSTALLED in frame.filename
        if foreign and not frame.filename.startswith(_OWN):
            return [frame for frame in stack[begin:] if not frame.filename.startswith(_OWN)]
    return []


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    return "".join(traceback.format_list(frames)).rstrip("\n").split("\n")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then what led to it, the latest first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
