"""What a sweep found: verdicts, a table, JUnit XML and JSON; and the file from which one goes on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree

from .errors import SweepError
from .sweep_points import FAULTS, START, Cell, Settings

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["clean", "broken", "undetermined", "never struck"]
STATUSES: tuple[Status, ...] = ("clean", "broken", "undetermined", "never struck")


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

        table = Table(title=self._title(), title_justify="left", caption=self.caption)
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
        extent = "one fault" if len(self.verdicts) == 1 else "quick" if self.settings.quick else "full"
        return f"{self.task} on {self.settings.backend}, exit {self.settings.exit}, {extent}"

    @property
    def caption(self) -> str:
        """How many points and faults there were, and what came of them."""
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items() if number)
        points, faults = counted(self.points, "point"), counted(len(self.verdicts), "fault")
        return f"{points}, {faults}: {counts} ({self.seconds:.1f} s)"

    def _rows(self) -> Iterator[tuple[str, list[int]]]:
        groups: dict[str, Counter[str]] = {}
        for verdict in self.verdicts:
            groups.setdefault(verdict.group, Counter())[verdict.status] += 1
        for group, found in groups.items():
            yield group, [sum(found.values()), *(found[status] for status in STATUSES)]

    def lines(self, *, spoilt: bool = False) -> list[str]:
        """The table as plain text, as wide as it has to be.

        Args:
            spoilt: Only the rows of points at which not everything is clean.
        """
        rows = [["kind of point", "faults", *STATUSES]]
        rows += [
            [group, *map(str, numbers)]
            for group, numbers in self._rows()
            if not spoilt or numbers[0] != numbers[1]
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]

    def __str__(self) -> str:
        """The table as plain text, and everything that is not clean."""
        told = [*self.notes, *(str(verdict) for verdict in self.broken)]
        return "\n".join([self._title(), "", *self.lines(), "", self.caption, *told])

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


def counted(number: int, noun: str) -> str:
    """A number of things in words: `1 fault`, `2 faults`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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


def verdict_of(cell: Cell, status: Status, lines: list[str], repeat: str, seconds: float) -> Verdict:
    """A verdict on a cell."""
    group = "run, undisturbed" if cell.point == START else cell.point.group
    return Verdict(cell.id, group, cell.fault, status, tuple(lines), repeat, seconds)
