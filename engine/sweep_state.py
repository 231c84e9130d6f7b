"""The file of a sweep's verdicts, from which a sweep that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .errors import SweepError
from .sweep_points import Settings
from .sweep_report import STATUSES, Verdict

FORMAT = 1
"""Of the file."""


class State:
    """The file of a sweep's verdicts: a header, and one line for each cell that was judged.

    Args:
        path: Where; `None` keeps nothing.
        task: The task's name.
        settings: Of the sweep.
        fingerprint: What must be equal to go on.

    Raises:
        SweepError: The file is of another sweep, or no such file at all.
    """

    def __init__(self, path: str | Path | None, task: str, settings: Settings, fingerprint: str) -> None:
        self.known: dict[str, Verdict] = {}
        self._path = None if path is None else Path(path)
        header = {
            "interlock sweep": FORMAT,
            "fingerprint": fingerprint,
            "task": task,
            "settings": settings.as_data(),
        }
        if self._path is None:
            return
        if self._path.exists() and self._path.stat().st_size:
            self._read(self._path, header)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        whole, _, torn = text.rpartition("\n")
        lines = whole.split("\n")
        there = _line(lines[0])
        if "interlock sweep" not in there:
            raise SweepError(
                f"'{path}' is not the state of a sweep: name another file, and nothing will be overwritten"
            )
        if there.get("fingerprint") != header["fingerprint"] or there["interlock sweep"] != FORMAT:
            raise SweepError(
                f"'{path}' is the state of another sweep ({_differences(there, header)}), and its verdicts "
                "say nothing about this one. Remove it, or keep the state of this one elsewhere"
            )
        for line in lines[1:]:
            entry = _line(line)
            if entry.get("status") in STATUSES:
                self.known[entry["cell"]] = Verdict(**{**entry, "lines": tuple(entry["lines"])})
        if torn:  # it was killed in the middle of a line: that cell is tried again
            path.write_text(whole + "\n", encoding="utf-8")

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict; it is on the disk when this returns."""
        self.known[verdict.cell] = verdict
        if self._path is not None:
            # Opened anew each time: a file that stays open would be one more in each reading of the process.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")


def _line(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if there.get("task") != here["task"]:
        return f"of task '{there.get('task')}', not '{here['task']}'"
    before, now = there.get("settings", {}), here["settings"]
    changed = [f"{n}={before.get(n)!r}, not {v!r}" for n, v in now.items() if before.get(n) != v]
    return "; ".join(changed) or "the task passes other points now than it did then"
