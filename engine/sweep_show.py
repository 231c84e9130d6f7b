"""Shows how a sweep goes: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from .sweep_report import Verdict


class Shown:
    """A progress bar on the standard error stream, within a `with` block.

    Args:
        wanted: `True`, `False`, or `None` for one where the stream is a terminal.
        total: How many cells there are.
        title: Of the bar.
    """

    def __init__(self, wanted: bool | None, total: int, title: str) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._other = 0
        if wanted or (wanted is None and sys.stderr.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[found]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                # No thread of its own, which each run would find beside it: it is drawn after each cell.
                auto_refresh=False,
            )
            self._task = self._bar.add_task(title, total=total, found="")

    def __enter__(self) -> Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def step(self, verdict: Verdict) -> None:
        """One cell more was judged."""
        self._other += verdict.status != "clean"
        if self._bar is not None:
            found = f"{self._other} not clean" if self._other else "all clean"
            self._bar.update(self._task, advance=1, found=found, refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
