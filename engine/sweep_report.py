"""What a sweep found: verdicts, a table, JUnit XML and JSON; and the file from which one goes on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from .errors import SweepError
from .sweep_points import FAULTS, START, Cell, Settings

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["clean", "broken", "undetermined", "never struck"]
STATUSES: tuple[Status, ...] = ("clean", "broken", "undetermined", "never struck")
FORMAT = 1
"""Of the state file."""


@dataclass(frozen=True)
class Verdict:
    """What came of one cell.

    Attributes:
        cell: Its id.
        group: The kind of point.
        fault: A key of `FAULTS`.
        status: `clean` if every promise was kept. `undetermined` if it could not be judged, `never struck` if
            the run did not come to the point: neither is a pass.
        lines: What was broken, or why there is no verdict.
        repeat: Code, or a command, that tries this cell alone.
        seconds: That it took.
    """

    cell: str
    group: str
    fault: str
    status: Status
    lines: tuple[str, ...] = ()
    repeat: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        lines = "".join(f"\n    {line}" for line in self.lines)
        again = f"\n    again: {self.repeat}" if self.repeat and self.status != "clean" else ""
        return f"{self.cell}: {self.status}{lines}{again}"


@dataclass(frozen=True)
class SweepReport:
    """What a sweep found. Two sweeps of the same task give equal reports, but for the times.

    Attributes:
        task: Its name.
        settings: Of the sweep.
        fingerprint: Of task name, settings and points.
        points: How many were enumerated.
        verdicts: One for each cell, in order.
        notes: What is worth knowing about it all.
        seconds: That the sweep took; of one that went on, the last part.
    """

    task: str
    settings: Settings
    fingerprint: str
    points: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether every fault struck and every promise was kept; a sweep of nothing is no pass."""
        return bool(self.verdicts) and all(verdict.status == "clean" for verdict in self.verdicts)

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts that are not clean, whatever the reason."""
        return tuple(verdict for verdict in self.verdicts if verdict.status != "clean")

    @property
    def counts(self) -> dict[str, int]:
        """Status -> how many cells."""
        found = Counter(verdict.status for verdict in self.verdicts)
        return {status: found[status] for status in STATUSES}

    def table(self) -> Table:
        """A row for each kind of point, for a terminal."""
        from rich.table import Table

        table = Table(title=self._title(), title_justify="left", caption=self._caption())
        table.add_column("kind of point", no_wrap=True)
        present = [status for status in STATUSES if self.counts[status] or status == "clean"]
        for name in ("faults", *present):
            table.add_column(name, justify="right")
        for group, (injected, *numbers) in self._rows():
            style = "" if injected == numbers[0] else "red"
            shown = [number for status, number in zip(STATUSES, numbers, strict=True) if status in present]
            table.add_row(group, str(injected), *(str(number or "") for number in shown), style=style)
        return table

    def _title(self) -> str:
        quick = "quick" if self.settings.quick else "full"
        return f"{self.task} on {self.settings.backend}, exit {self.settings.exit}, {quick}"

    def _caption(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items() if number)
        return f"{self.points} points, {len(self.verdicts)} faults: {counts} ({self.seconds:.1f} s)"

    def _rows(self) -> Iterator[tuple[str, list[int]]]:
        groups: dict[str, Counter[str]] = {}
        for verdict in self.verdicts:
            groups.setdefault(verdict.group, Counter())[verdict.status] += 1
        for group, found in groups.items():
            yield group, [sum(found.values()), *(found[status] for status in STATUSES)]

    def __str__(self) -> str:
        """The table as plain text, and everything that is not clean."""
        rows = [["kind of point", "faults", *STATUSES]]
        rows += [[group, *(str(number) for number in numbers)] for group, numbers in self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        told = [*self.notes, *(str(verdict) for verdict in self.broken)]
        return "\n".join([self._title(), "", *lines, "", self._caption(), *told])

    def write(self, path: str | Path) -> Path:
        """Write it to a file: JUnit XML or JSON, by the suffix.

        Args:
            path: Ends in `.xml` or `.json`; its folder is made if it is not there.

        Returns:
            The path.

        Raises:
            SweepError: Another suffix.
        """
        target = Path(path)
        writers = {".xml": self.as_junit, ".json": self.as_json}
        writer = writers.get(target.suffix.lower())
        if writer is None:
            raise SweepError(
                f"a report is written as JUnit XML or JSON, by its suffix, and '{target.name}' has neither: "
                "call it something.xml or something.json"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(writer(), encoding="utf-8")
        return target

    def as_json(self) -> str:
        """The report as JSON."""
        data = {
            "ok": self.ok,
            "task": self.task,
            "settings": self.settings.as_data(),
            "fingerprint": self.fingerprint,
            "points": self.points,
            "counts": self.counts,
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "verdicts": [
                {**asdict(verdict), "seconds": round(verdict.seconds, 3)} for verdict in self.verdicts
            ],
        }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    def as_junit(self) -> str:
        """The report as JUnit XML: one test case a cell."""
        return junit([self.suite()])

    def suite(self) -> ElementTree.Element:
        """The same as one of the suites of such a file."""
        counts = self.counts
        suite = ElementTree.Element(
            "testsuite",
            name=clean(f"fault sweep of {self._title()}"),
            tests=str(len(self.verdicts)),
            failures=str(counts["broken"]),
            errors=str(counts["undetermined"] + counts["never struck"]),
            skipped="0",
            time=f"{self.seconds:.3f}",
        )
        for verdict in self.verdicts:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=clean(f"sweep.{self.settings.backend}.{verdict.group}"),
                name=clean(verdict.cell),
                time=f"{verdict.seconds:.3f}",
            )
            if verdict.status == "clean":
                continue
            kind = "failure" if verdict.status == "broken" else "error"
            first = verdict.lines[0] if verdict.lines else verdict.status
            told = ElementTree.SubElement(case, kind, type=verdict.status, message=clean(first))
            told.text = clean("\n".join([FAULTS[verdict.fault], *verdict.lines, f"again: {verdict.repeat}"]))
        return suite


def junit(suites: Iterable[ElementTree.Element]) -> str:
    """A file of JUnit XML.

    Args:
        suites: What is in it.
    """
    root = ElementTree.Element("testsuites")
    root.extend(suites)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def clean(text: str) -> str:
    """A text without the characters that XML cannot have.

    Args:
        text: Any.
    """
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


# Going on


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
                "say nothing about this one. Remove it, or name another file"
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


def verdict_of(cell: Cell, status: Status, lines: list[str], repeat: str, seconds: float) -> Verdict:
    """A verdict on a cell."""
    group = "run, undisturbed" if cell.point == START else cell.point.group
    return Verdict(cell.id, group, cell.fault, status, tuple(lines), repeat, seconds)
