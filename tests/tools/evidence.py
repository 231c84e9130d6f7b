"""Writes what a test session measured to a Markdown page: the figures of `make nightly`.

A test adds a figure of its own with pytest's `record_property("illegal pairs tried", 130)`. Counts of
Hypothesis examples are taken from its statistics. The page is written after a
failed session too, and says so.
"""

from __future__ import annotations

import datetime
import platform
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

_PACKAGES = ("torch", "transitions", "hypothesis", "pytest")
_EXAMPLES = re.compile(r"(\d+) passing\b")
_STATISTICS = "_hypothesis_stats"  # where Hypothesis's plugin leaves its summary, on the report


class Evidence:
    """A pytest plugin that collects figures and writes the page when the session ends."""

    def __init__(self, path: Path, profile: str) -> None:
        self.path = path
        self.profile = profile
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.seconds: dict[str, float] = {}
        self.examples: dict[str, int] = {}
        self.figures: list[tuple[str, object, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what one stage of one test reports."""
        test = report.nodeid
        self.seconds[test] = self.seconds.get(test, 0.0) + report.duration
        if report.failed or report.skipped or report.when == "call":
            self.outcomes["error" if report.failed and report.when != "call" else report.outcome] += 1
        if report.failed:
            self.failures.append(f"{test} ({report.when})")
        if report.when == "call":
            self.figures.extend((name, value, test) for name, value in report.user_properties)
        if statistics := getattr(report, _STATISTICS, None):
            self.examples[test] = sum(int(count) for count in _EXAMPLES.findall(statistics))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Writes the page."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.page(exitstatus), encoding="utf-8")

    def page(self, exitstatus: int) -> str:
        """The page's text."""
        result = "passed" if exitstatus == 0 else f"failed (pytest exit status {int(exitstatus)})"
        counts = (
            ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
            or "no test ran"
        )
        versions = ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in _PACKAGES)]
        )
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:10]
        lines = [
            "# The long tier: figures of the last run",
            "",
            "Written by `make nightly`; do not edit.",
            "",
            f"- Date: {datetime.date.today().isoformat()}",
            f"- Profile: {self.profile}",
            f"- Versions: {versions}",
            f"- Result: **{result}**: {counts}",
            f"- Time in tests: {sum(self.seconds.values()):.0f} s",
            f"- Hypothesis examples: {sum(self.examples.values())} in {len(self.examples)} tests",
        ]
        if self.failures:
            lines += ["", "## Failures", "", *(f"- `{test}`" for test in self.failures)]
        if self.figures:
            lines += ["", "## Figures", "", "| figure | value | test |", "|---|---|---|"]
            lines += [f"| {name} | {value} | `{test}` |" for name, value, test in self.figures]
        if self.examples:
            lines += ["", "## Hypothesis examples", "", "| test | examples |", "|---|---|"]
            lines += [f"| `{test}` | {count} |" for test, count in sorted(self.examples.items())]
        lines += ["", "## Slowest", "", "| test | seconds |", "|---|---|"]
        lines += [f"| `{test}` | {seconds:.1f} |" for test, seconds in slowest]
        return "\n".join(lines) + "\n"
