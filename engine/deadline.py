"""Waits for a call no longer than allowed.

A deadline bounds the wait of the caller and nothing else: the call goes on, on a daemon thread,
and whatever it returns too late is dropped. So calls are given here that change nothing of the user's:
copies, not commits; and calls of a backend, such as giving a device back, which may come late.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from .errors import DeadlinePassed

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: list[T] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.result.append(self.function())
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


def bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """Call `function` on a daemon thread and wait for it.

    Args:
        function: Changes nothing of the user's but by what it returns; it may come late.
        seconds: How long to wait.
        what: For the message, such as "copying the model to the host".

    Returns:
        What the function returns.

    Raises:
        DeadlinePassed: It did not return in time; the error has the thread's stack.
        BaseException: Whatever the function raised.
    """
    call = _Call(function)
    thread = threading.Thread(target=call, name=f"interlock {what}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        # The interpreter is at its end and starts no threads any more: wait without a bound.
        call()
    else:
        if not call.done.wait(seconds):
            raise DeadlinePassed(what, seconds, stack_of(thread.ident))
        thread.join()
    if call.error is not None:
        raise call.error
    return call.result[0]


def stack_of(ident: int | None) -> str:
    """The present stack of a thread, as text; empty if it has ended."""
    frame = sys._current_frames().get(ident or -1)
    try:
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
    finally:
        # Of the thread that asks, it is this very frame: a cycle, with all that its callers hold.
        del frame
