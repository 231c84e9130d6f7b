"""`interlock doctor`: what is installed, which backends can run here, what is proved. Needs no torch.

Nothing is initialised: an adapter class is asked why it could not run, and no device is touched.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import sysconfig
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from interlock.backends.monitors import MONITORS
from interlock.backends.registry import adapter_class, monitor, names
from interlock.specs import INFERENCE, SPECS, TRAINING, check, compose

from .choices import titled
from .messages import say

PACKAGES = ("torch", "transitions", "rich", "graphviz-pure")
RUN_ON_HARDWARE = ("cpu",)
"""The backends that were run on what they are made for, and not only proved."""


def run_doctor(options: Namespace) -> int:
    """Report; the exit status is 1 if a monitor is not proved."""
    versions = _versions()
    backends = [_backend(name) for name in sorted({*MONITORS, *names()})]
    if options.json:
        say(json.dumps({"versions": versions, "backends": backends}, indent=1))
    else:
        _say(versions, backends)
    return 0 if all(row["proved"] is not False for row in backends) else 1


def _versions() -> dict[str, str]:
    from . import __version__

    system = f"{platform.system()} {platform.machine()}"
    return {
        "interlock": __version__,
        "python": f"{platform.python_version()} ({sys.executable}, {system})",
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    # A module that is blocked is as good as missing, whatever the installation says of it.
    if name in sys.modules and sys.modules[name] is None:
        return "cannot be imported"
    try:
        found = version(name)
    except PackageNotFoundError:
        return "missing"
    if name == "graphviz-pure" and not _program(name):
        return f"{found}, but its program is not on the path"
    return found


def _program(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def _backend(name: str) -> dict[str, Any]:
    adapter = name in names()
    why = _why_not(name) if adapter else "no adapter yet: it can be checked and drawn, and not run"
    row: dict[str, Any] = {
        "name": name,
        "adapter": adapter,
        "available": not why,
        "why": why,
        "doc": "",
        "proved": None,
    }
    try:
        found = monitor(name)
    except Exception as error:  # a third party's, which needs its adapter
        return {**row, "doc": f"its monitor cannot be loaded: {error}"}
    reports = [check(compose(SPECS[spec], found)) for spec in (TRAINING.name, INFERENCE.name)]
    row["doc"] = found.doc if name == found.name else f"for tests: {titled(name, found.name)}"
    row["proved"] = all(report.proved for report in reports)
    row["properties"] = sum(len(report.verdicts) for report in reports)
    row["milliseconds"] = round(1000 * sum(report.seconds for report in reports))
    return row


def _why_not(name: str) -> str:
    try:
        return adapter_class(name).unavailable()
    except ImportError as error:
        return f"needs {error.name or error}, which cannot be imported"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _say(versions: dict[str, str], backends: list[dict[str, Any]]) -> None:
    for name, text in versions.items():
        say(f"{name:<14} {text}")
    say()
    say(f"{'backend':<10} {'runs here':<10} {'monitor':<30} what it is")
    for row in backends:
        runs = "yes" if row["available"] else "no"
        say(f"{row['name']:<10} {runs:<10} {_proof(row):<30} {row['doc']}")
        if row["why"]:
            say(f"{'':<22}{row['why']}")
    proved_only = ", ".join(name for name in (*MONITORS, "mps", "tpu") if name not in RUN_ON_HARDWARE)
    say()
    say(f"never run on their hardware: {proved_only}. What is proved of them is their order of events.")


def _proof(row: dict[str, Any]) -> str:
    if row["proved"] is None:
        return "unknown"
    if not row["proved"]:
        return "NOT proved: interlock check"
    return f"proved, {row['properties']} properties, {row['milliseconds']} ms"
