"""What the command line tells of a run that is over: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.specs.journal import Replay

from .messages import to_output

if TYPE_CHECKING:
    from .outcome import Outcome

BAR = "#"
SHORT = 0.001
"""Phases that took fewer seconds are one line together."""


def show(outcome: Outcome, files: Mapping[str, str]) -> None:
    """Print it.

    Args:
        outcome: Of the run.
        files: What was written: name -> a line about it.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - called where the error is handled; rich's own would end the program

    console = Plain(highlight=False, soft_wrap=True)
    head = Text(f"{outcome.status}, {outcome.verdict}", style="bold green" if outcome.ok else "bold red")
    with to_output():
        console.print(head + Text(f": {outcome.steps} steps in {outcome.seconds:.1f} s"))
        for block in _blocks(outcome, files):
            console.print()
            width = max(len(name) for name, _ in block)
            for name, text in block:
                first, *more = text.split("\n")
                console.print(Text(f"  {name:<{width}}  ", style="dim") + Text(first))
                for line in more:
                    console.print(Text(f"  {'':<{width}}  {line}"))


def _blocks(outcome: Outcome, files: Mapping[str, str]) -> list[list[tuple[str, str]]]:
    """Rows of name and text: the numbers, the phases, and what else there is to say."""
    numbers = [(name, f"{value:.4f}") for name, value in sorted(outcome.metrics.items())]
    spent = outcome.phase_seconds
    whole = sum(spent.values()) or 1.0
    brief = [seconds for seconds in spent.values() if seconds < SHORT]
    shown = {phase: seconds for phase, seconds in spent.items() if seconds >= SHORT}
    shown |= {f"{len(brief)} others": sum(brief)} if brief else {}
    phases = [
        (phase, f"{seconds:9.3f} s {BAR * round(30 * seconds / whole)}".rstrip())
        for phase, seconds in shown.items()
    ]
    rest = [("residue", str(outcome.residue))]
    if any(event == "update" for _, event, _ in outcome.path):
        text = f"{outcome.steps}; the history has `update` once for all between two other events"
        rest.insert(0, ("updates", text))
    rest += [("abandoned", ", ".join(outcome.abandoned))] * bool(outcome.abandoned)
    rest += [("note", note) for note in outcome.notes]
    rest += [("and then", f"{later.type}: {later.message}") for later in outcome.errors]
    return [block for block in (numbers, phases, [*rest, *files.items()]) if block]


def as_data(
    outcome: Outcome, journal: Path | None, drawing: Path | None, replayed: Replay | None
) -> dict[str, Any]:
    """The same as data for JSON.

    Args:
        outcome: Of the run.
        journal: Its journal, if one was written.
        drawing: The drawing of its path, if there is one.
        replayed: What came of replaying the journal.
    """
    residue = outcome.residue
    return {
        "status": outcome.status,
        "verdict": outcome.verdict,
        "ok": outcome.ok,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 6),
        "metrics": dict(outcome.metrics),
        "phases": {phase: round(seconds, 6) for phase, seconds in outcome.phase_seconds.items()},
        "path": [list(step) for step in outcome.path],
        "residue": {"known": residue.known, "bytes": residue.bytes, "text": str(residue)},
        "abandoned": list(outcome.abandoned),
        "error": str(outcome.failure) if outcome.failure else None,
        "later_errors": [str(failure) for failure in outcome.errors],
        "notes": list(outcome.notes),
        "spec_hash": outcome.spec_hash,
        "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
        "journal": str(journal) if journal else None,
        "replay": {"result": str(replayed.result), "transitions": replayed.steps} if replayed else None,
        "drawing": str(drawing) if drawing else None,
    }
