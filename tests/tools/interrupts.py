"""An interrupt at any line of the package, as a signal handler would raise it.

CPython runs signal handlers on the main thread between two instructions; a trace function that raises at a
line does the same, and does it again at the same place the next time.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import interlock

PACKAGE = str(Path(interlock.__file__).parent)
PARTS = frozenset(
    (
        "adapter",
        "batches",
        "cpu",
        "deadline",
        "driver",
        "ending",
        "engine",
        "evaluation",
        "events",
        "evidence",
        "facts",
        "handles",
        "holding",
        "leases",
        "loop",
        "machine",
        "outcome",
        "owners",
        "phases",
        "release",
        "residency",
        "routine",
        "run",
        "semantics",
        "session",
        "stepping",
        "wiring",
        "work",
    )
)
"""The modules that make up a run. Others only describe, prove, or belong to the tests."""


Line = tuple[str, int]
"""A file of the package and a line in it."""


class AtLine:
    """Within the block, `KeyboardInterrupt` is raised on this thread when a line is about to run.

    Args:
        line: At which line; without one, lines are only counted.
        visit: The how many-th time it is reached, from 1.

    Attributes:
        passed: How often each line was reached.
        error: What was raised, if it was.
    """

    def __init__(self, line: Line | None = None, visit: int = 1) -> None:
        self.line, self.visit = line, visit
        self.passed: Counter[Line] = Counter()
        self.error: BaseException | None = None

    def __enter__(self) -> AtLine:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if _is_part(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not _is_between(frame.f_code.co_filename, frame.f_lineno):
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.passed[line] += 1
            if line == self.line and self.passed[line] == self.visit:
                self.error = KeyboardInterrupt(f"at {line[0]}:{line[1]}, {frame.f_code.co_qualname}")
                raise self.error
        return self._line


@cache
def _is_part(file: str) -> bool:
    return file.startswith("<interlock") or (file.startswith(PACKAGE) and Path(file).stem in PARTS)


@cache
def _is_between(file: str, number: int) -> bool:
    """Whether the line is one at which the interpreter looks for no signal, and a context would be lost.

    A `with` is traced once more when its block ends, before the context is left; and a `try` within a `with`
    stands outside of what the `with` protects.
    """
    return linecache.getline(file, number).lstrip().startswith(("with ", "try:"))
