"""What a rehearsal found, as data, JSON and JUnit XML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from .sweep_report import SweepReport, clean, counted, junit

if TYPE_CHECKING:
    from .rehearsal_watch import Transfer


WATCHED = "a watched run"
"""The first part of a rehearsal."""


@dataclass(frozen=True)
class Finding:
    """One thing that a rehearsal has to say.

    Attributes:
        kind: `order` (the run did not go as it should), `error` (the task raised one), `leak`, `process` (it
            is another one afterwards), `policy`, `evaluation`, `restore`, `copy`, `parameters`, `foreign`
            (code that names a device of its own), `compile`, or `faults` (none was injected).
        problem: Whether the rehearsal fails because of it; else it is worth a look.
        text: What, where, and what to do.
        part: Of the rehearsal, in which it was found.
    """

    kind: str
    problem: bool
    text: str
    part: str = WATCHED


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        task: Its name.
        steps: That the watched run took.
        findings: Problems first.
        transfers: The copies between host and device in training, by place.
        peak: The most bytes that were alive at once.
        peak_by_owner: The same by what they were for.
        sweeps: Of the faults, one for each exit policy; none if the task does not run well without any.
        seconds: That it took.
        parts: That were carried out before the faults.
        notes: What was not tried.
        strict: Whether it fails also for what is merely worth a look.
    """

    task: str
    steps: int = 0
    findings: tuple[Finding, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    peak: int = 0
    peak_by_owner: Mapping[str, int] = field(default_factory=dict)
    sweeps: tuple[SweepReport, ...] = ()
    seconds: float = 0.0
    parts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    strict: bool = False

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that make it fail."""
        return tuple(finding for finding in self.findings if finding.problem or self.strict)

    @property
    def ok(self) -> bool:
        """Whether there is no problem, and every fault led to a clean end."""
        return bool(self.sweeps) and all(report.ok for report in self.sweeps) and not self.problems

    @property
    def verdict(self) -> str:
        """The whole in a line."""
        looks = len(self.findings) - len(self.problems)
        tried = sum(len(report.verdicts) for report in self.sweeps)
        spoilt = sum(len(report.broken) for report in self.sweeps)
        told = [
            counted(self.steps, "step") + " watched" if self.steps else "",
            counted(len(self.problems), "problem") if self.problems else "",
            f"{looks} worth a look" if looks else "",
            counted(tried, "fault") + (f", {spoilt} not clean" if spoilt else ", all clean") if tried else "",
            f"{self.seconds:.1f} s",
        ]
        word = "pass" if self.ok else "fail"
        return f"{word}{' (strict)' * self.strict}: {self.task}: {'; '.join(filter(None, told))}"

    def as_junit(self) -> str:
        """JUnit XML: a suite of what was found without faults, and one of each sweep."""
        suite = ElementTree.Element("testsuite", name=clean(f"rehearsal of {self.task}"))
        problems = self.problems
        spoilt = {finding.part for finding in problems}
        for part in self.parts:
            if part not in spoilt:
                ElementTree.SubElement(suite, "testcase", classname="rehearsal", name=part)
        for number, finding in enumerate(problems, 1):
            name = f"{finding.part}: {finding.kind} {number}"
            case = ElementTree.SubElement(suite, "testcase", classname="rehearsal", name=clean(name))
            told = ElementTree.SubElement(case, "failure", type=finding.kind)
            told.text = clean(finding.text)
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(problems)))
        looks = [clean(f"look ({f.kind}): {f.text}") for f in self.findings if f not in problems]
        ElementTree.SubElement(suite, "system-out").text = "\n".join(looks)
        return junit([suite, *(report.suite() for report in self.sweeps)])

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "task": self.task,
            "ok": self.ok,
            "strict": self.strict,
            "steps": self.steps,
            "parts": list(self.parts),
            "notes": list(self.notes),
            "findings": [asdict(finding) for finding in self.findings],
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "peak_bytes": self.peak,
            "peak_bytes_by_owner": dict(self.peak_by_owner),
            "faults": [
                {
                    "exit": report.settings.exit,
                    "points": report.points,
                    "counts": report.counts,
                    "not_clean": [asdict(verdict) for verdict in report.broken],
                }
                for report in self.sweeps
            ],
            "seconds": round(self.seconds, 3),
        }
