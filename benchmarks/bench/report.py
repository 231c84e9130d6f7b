"""Writes results: JSON with everything, and a Markdown page for people."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """What was measured on: no name of a host, no path."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def _version(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "in the tree"


def header(title: str, command: str, about: dict[str, Any]) -> list[str]:
    """The top of a page."""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    where = f"{about['cpu']}, {about['cores']} cores, {about['system']}; Python {about['python']}"
    return [
        f"# {title}",
        "",
        f"Written by `{command}`; do not edit. How: [docs/benchmarks.md](../../docs/benchmarks.md).",
        "",
        f"{about['date']}; {where}, {packages}. Load before it began: {about['load']}.",
        "",
    ]


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    return [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows), ""]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float, digits: int) -> str:
    """With so many decimals, and never minus zero."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def interval(figure: dict[str, float] | None, digits: int) -> str:
    """`1.02 (1.01 to 1.03)`: the median and its 95 % interval; empty for nothing."""
    if figure is None:
        return ""
    low, high = number(figure["low"], digits), number(figure["high"], digits)
    return f"{number(figure['median'], digits)} ({low} to {high})"


def spread(figure: dict[str, float] | None, digits: int) -> str:
    """`0.98 to 1.09`: where the middle four fifths of the repeats lie; empty for nothing."""
    return f"{number(figure['p10'], digits)} to {number(figure['p90'], digits)}" if figure else ""


def save(folder: Path, name: str, page: str, data: dict[str, Any]) -> list[Path]:
    """Write both files; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text(page, encoding="utf-8")
    paths[1].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return paths
