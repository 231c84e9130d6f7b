"""Calls a function in a fresh interpreter that has a terminal of its own.

Each benchmark is measured this way, so none warms up another; and progress bars, ours and those of other
libraries, really draw (they draw nothing on a pipe), while the benchmark's own progress is shown by the
parent. What crosses is JSON, over a pipe that is separate from the terminal.

    python -m bench.isolated MODULE:FUNCTION JSON-ARGUMENTS FILE-DESCRIPTOR
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent.parent
"""The folder from which `bench` and `peers` are imported."""

SHOWN = 4000
"""Characters of the child's terminal that an error message shows, at most."""


class BenchmarkError(RuntimeError):
    """A benchmark did not measure what it claims to; the message is the child's traceback."""


def call(target: str, arguments: dict[str, Any], tell: Callable[[float], None] = lambda _: None) -> Any:
    """Run `module:function` with keyword arguments and return its result.

    Args:
        target: The function; it is also given `tell`, by which it reports its progress.
        arguments: JSON.
        tell: Called with the fraction that is done.

    Raises:
        BenchmarkError: The function raised, or the interpreter died.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    messages, theirs = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.isolated", target, json.dumps(arguments), str(theirs)],
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            pass_fds=[theirs],
            cwd=folder,  # libraries that write logs and checkpoints where they stand write them here
            env=environment(),
        )
        os.close(slave)
        os.close(theirs)
        screen: list[str] = []
        drain = threading.Thread(target=_drain, args=(master, screen), daemon=True)
        drain.start()
        try:
            with os.fdopen(messages, encoding="utf-8") as lines:
                answer = _listen(lines, tell)
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.terminate()
            child.wait()
            drain.join()
            os.close(master)
    if answer is None:
        raise BenchmarkError(
            f"{target} ended with {child.returncode} and no result:\n{''.join(screen)[-SHOWN:]}"
        )
    if "error" in answer:
        raise BenchmarkError(f"{target} failed:\n{answer['error']}")
    return answer["result"]


def environment() -> dict[str, str]:
    """The variables of a child: this folder is importable, a terminal is what rich expects."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TERM": "xterm-256color"}


def _listen(lines: IO[str], tell: Callable[[float], None]) -> dict[str, Any] | None:
    answer: dict[str, Any] | None = None
    for line in lines:
        message: dict[str, Any] = json.loads(line)
        if "done" in message:
            tell(message["done"])
        else:
            answer = message
    return answer


def _drain(master: int, screen: list[str]) -> None:
    """Read a terminal until its last user has gone, and keep what it showed last."""
    while True:
        try:
            text = os.read(master, 65536)
        except OSError:  # Linux says EIO where others say end of file
            return
        if not text:
            return
        screen.append(text.decode(errors="replace"))
        del screen[:-50]


def main(target: str, arguments: str, descriptor: str) -> None:
    """The child's side."""
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as out:

        def say(**message: Any) -> None:
            print(json.dumps(message), file=out, flush=True)

        try:
            module, _, name = target.partition(":")
            function = getattr(importlib.import_module(module), name)
            say(result=function(**json.loads(arguments), tell=lambda done: say(done=done)))
        except Exception:
            say(error=traceback.format_exc())


if __name__ == "__main__":
    main(*sys.argv[1:])
