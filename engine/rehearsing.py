"""`interlock rehearse`: a task on the simulated device, and what came of it, for people and as JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .choices import UsageError, writable
from .errors import UnknownCell
from .loading import task_from
from .messages import say, warn

if TYPE_CHECKING:
    from .rehearsal_report import Rehearsal

_ALONE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Set to 0, torch loads no device that a package brings."""


def run_rehearse(options: Namespace) -> int:
    """Rehearse, and report.

    Returns:
        0 if all is well, 1 if not (with `--strict` also if something is merely worth a look).
    """
    _refuse_bad_targets(options)
    from interlock.backends import simulator

    if simulator.taken_by() and os.environ.get(_ALONE) != "0":
        warn(f"interlock: '{simulator.taken_by()}' has PyTorch's one slot for devices; rehearsing without it")
        words = [sys.executable, "-m", "interlock", *options.words]
        return subprocess.run(words, env={**os.environ, _ALONE: "0"}, check=False).returncode
    from .rehearsal import rehearse

    quiet = options.json or options.no_progress
    last: list[tuple[str, int, int]] = []
    with _told(options, last), task_from(options.task) as task:
        found = rehearse(
            task,
            steps=options.steps,
            quick=not options.full,
            parameters=options.parameters,
            checkpoints=not options.no_checkpoints,
            seed=options.seed,
            only=options.only,
            state=options.state,
            exits=None if options.exit is None else [options.exit],
            repeat=lambda cell, policy: _again(options, cell, policy),
            progress=False if quiet else None,
            strict=options.strict,
            on_cell=lambda *now: last.__setitem__(slice(None), [now]),
            tell=(lambda _: None) if quiet else (lambda what: warn(f"interlock: {what}")),
        )
    _write(options.report, found)
    if options.json:
        say(json.dumps(found.as_data(), indent=1))
    else:
        _show(found)
    return 0 if found.ok else 1


@contextmanager
def _told(options: Namespace, last: list[tuple[str, int, int]]) -> Iterator[None]:
    """What ends a rehearsal, for people.

    Args:
        options: Of the command line.
        last: The last verdict: exit policy, number, of how many.

    Raises:
        UsageError: There is no such cell.
    """
    try:
        yield
    except KeyboardInterrupt:
        if options.state is not None and last:
            policy, number, total = last[0]
            kept = f"{number} of {total} verdicts of exit {policy} are in '{options.state}'"
            warn(f"interlock: {kept}; the same command goes on from there")
        raise
    except UnknownCell as error:
        raise UsageError(str(error)) from None


def _refuse_bad_targets(options: Namespace) -> None:
    state: Path | None = options.state
    if state is not None and state.exists() and not state.is_dir():
        raise UsageError(f"'{state}' is a file, and --state names a folder, which is made if it is not there")
    report: Path | None = options.report
    if report is not None and report.suffix not in (".json", ".xml"):
        raise UsageError(f"'{report}': a report is written to a file ending in .json or .xml (JUnit)")
    if report is not None:
        writable(report)


def _again(options: Namespace, cell: str, policy: str) -> str:
    words = ["interlock", "rehearse", options.task, "--only", cell, "--seed", str(options.seed)]
    if policy != "offload":
        words += ["--exit", policy]
    if options.steps != 3:
        words += ["--steps", str(options.steps)]
    if options.parameters != "replaced":
        words += ["--parameters", options.parameters]
    words += ["--full"] * options.full + ["--no-checkpoints"] * options.no_checkpoints
    return shlex.join(words)


def _write(report: Path | None, found: Rehearsal) -> None:
    if report is not None:
        text = found.as_junit() if report.suffix == ".xml" else json.dumps(found.as_data(), indent=1) + "\n"
        report.write_text(text, encoding="utf-8")


def _show(found: Rehearsal) -> None:
    from rich.console import Console
    from rich.text import Text

    from .messages import to_output

    console = Console(highlight=False, soft_wrap=True)
    with to_output():
        if found.peak:
            console.print(f"memory at its peak: {found.peak:,} bytes")
            for owner, nbytes in found.peak_by_owner.items():
                console.print(f"  {nbytes:>14,}  {owner}")
        if found.transfers:
            console.print("\ncopies between host and device in training")
            for transfer in found.transfers:
                line = f"  {transfer.per_step:>8g} a step {transfer.direction:<9} {transfer.place}"
                console.print(Text(line))
        for swept in found.sweeps:
            console.print(Text(f"\nfaults, exit {swept.settings.exit}: {swept.caption}"))
            for line in swept.lines(spoilt=True) if swept.broken else ():
                console.print(Text(f"  {line}"))
        for note in found.notes:
            console.print(Text(note))
        for finding in found.findings:
            mark, colour = ("problem", "red") if finding.problem else ("look", "yellow")
            console.print()
            console.print(Text(f"{mark} ({finding.kind}): ", style=colour) + Text(finding.text))
        for swept in found.sweeps:
            for verdict in swept.broken[:20]:
                console.print(Text(f"\n{verdict}"))
            if len(swept.broken) > 20:
                console.print(f"... and {len(swept.broken) - 20} more: --report FILE.json has all")
        style = "bold green" if found.ok else "bold red"
        console.print(Text(f"\n{found.verdict}", style=style))
