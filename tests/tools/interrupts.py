"""An interrupt at any line of the package, as a signal handler would raise it.

CPython runs signal handlers on the main thread between two instructions; a trace function that raises at the
nth line does the same, and does it again at the same place the next time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import interlock

PACKAGE = str(Path(interlock.__file__).parent)
PARTS = frozenset(
    (
        *("adapter", "batches", "cpu", "deadline", "driver", "engine", "events", "evidence", "facts", "handles"),
        *("loop", "machine", "outcome", "owners", "release", "residency", "run", "semantics", "session", "work"),
    )
)
"""The modules that make up a run. Others only describe, prove, or belong to the tests."""


class AtLine:
    """Within the block, `KeyboardInterrupt` is raised at the nth line of the package on this thread.

    Attributes:
        passed: How many lines have been passed.
        struck: Where it was raised, `file:line`; empty if it never was.
        error: What was raised.
    """

    def __init__(self, nth: int = 0) -> None:
        self.nth = nth
        self.passed = 0
        self.struck = ""
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
        name = frame.f_code.co_filename
        mine = name.startswith(PACKAGE) and Path(name).stem in PARTS
        return self._line if mine or name.startswith("<interlock") else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.passed += 1
            if self.passed == self.nth:
                file = Path(frame.f_code.co_filename).name
                self.struck = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
                self.error = KeyboardInterrupt(self.struck)
                raise self.error
        return self._line
