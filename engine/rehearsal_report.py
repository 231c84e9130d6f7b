"""What a rehearsal found, as data, JSON and JUnit XML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from .sweep_report import SweepReport, clean, junit

if TYPE_CHECKING:
    from .rehearsal_watch import Transfer


@dataclass(frozen=True)
class Finding:
    """One thing that a rehearsal has to say.

    Attributes:
        kind: `order` (the run did not go as it should), `leak`, `policy`, `evaluation`, `restore`, `copy`,
            `parameters`, `foreign` (code that names a device of its own), `compile`, or `faults` (none was
            injected).
        problem: Whether the rehearsal fails because of it; else it is worth a look.
        text: What, where, and what to do.
    """

    kind: str
    problem: bool
    text: str


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
    """

    task: str
    steps: int = 0
    findings: tuple[Finding, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    peak: int = 0
    peak_by_owner: Mapping[str, int] = field(default_factory=dict)
    sweeps: tuple[SweepReport, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no problem, and every fault led to a clean end."""
        swept = bool(self.sweeps) and all(report.ok for report in self.sweeps)
        return swept and not any(finding.problem for finding in self.findings)

    def as_junit(self) -> str:
        """JUnit XML: a suite of what was found without faults, and one of each sweep."""
        suite = ElementTree.Element("testsuite", name=clean(f"rehearsal of {self.task}"))
        ElementTree.SubElement(suite, "testcase", classname="rehearsal", name="a watched run")
        problems = [finding for finding in self.findings if finding.problem]
        for number, finding in enumerate(problems, 1):
            name = f"{finding.kind} {number}"
            case = ElementTree.SubElement(suite, "testcase", classname="rehearsal", name=name)
            told = ElementTree.SubElement(case, "failure", type=finding.kind)
            told.text = clean(finding.text)
        suite.set("tests", str(len(problems) + 1))
        suite.set("failures", str(len(problems)))
        looks = [clean(f"look ({f.kind}): {f.text}") for f in self.findings if not f.problem]
        ElementTree.SubElement(suite, "system-out").text = "\n".join(looks)
        return junit([suite, *(report.suite() for report in self.sweeps)])

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "task": self.task,
            "ok": self.ok,
            "steps": self.steps,
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
