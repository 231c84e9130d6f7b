"""Tries one cell: a struck run, judged, and the undisturbed one after it."""

from __future__ import annotations

import time
import traceback

from interlock.specs import Kind

from .sweep_arm import Armed, arm
from .sweep_case import Case, Reference
from .sweep_judge import AGAIN, again, judged
from .sweep_points import START, Cell
from .sweep_report import Status, Verdict, verdict_of
from .sweep_run import Bench, Seen


def tried(bench: Bench, cell: Cell, reference: Reference, repeat: str) -> tuple[Verdict, bool]:
    """Try one cell.

    Args:
        bench: Carries runs out.
        cell: Which.
        reference: What the undisturbed run showed.
        repeat: What tries this cell again.

    Returns:
        The verdict, and whether its run still hangs.
    """
    began = time.monotonic()
    taken = bench.device.allocated(None)
    hangs = False
    status: Status
    try:
        status, lines, hangs = _judged(bench, cell, reference)
    except Exception:
        # The judge itself failed: whatever the reason, that is no verdict on the cell.
        status, lines = (
            "undetermined",
            ["the cell could not be judged:", *traceback.format_exc().splitlines()],
        )
        if bench.device.lost():
            bench.device.replug()  # or no later cell could be judged
    if status == "undetermined" and taken is not None and not hangs:
        # No next run was looked at; what is left would be held against later cells.
        left = (bench.device.allocated(None) or 0) - taken
        lines += [f"{left} bytes are left on the device, which later cells begin with"] * (left > 0)
    return verdict_of(cell, status, lines, repeat, time.monotonic() - began), hangs


def _judged(bench: Bench, cell: Cell, reference: Reference) -> tuple[Status, list[str], bool]:
    settings = bench.settings
    armed = arm(cell, bench.device)
    seen = bench.run(armed, deadline=settings.deadline if cell.fault == "blocks" else None)
    seen.struck = armed.struck(cell.point.layer)
    if seen.hung:
        return "undetermined", [f"the run hangs: {seen.hung}"], not seen.ended
    if seen.error is not None or seen.outcome is None:
        return "undetermined", [f"the run did not begin: {seen.error!r}"], False
    if not seen.struck and cell.point != START:
        return "never struck", ["the run did not come to this point"], False
    lines = judged(Case(cell, seen, reference, settings.exit, settings.checkpoints))
    later, second = _again(bench, seen, armed, reference)
    lines += [f"{AGAIN}: {line}" for line in later]
    if second.hung:
        status: Status = "broken" if lines else "undetermined"
        return status, [*lines, f"the next run hangs: {second.hung}"], not second.ended
    return ("broken" if lines else "clean"), lines, False


def _again(bench: Bench, seen: Seen, armed: Armed, reference: Reference) -> tuple[list[str], Seen]:
    """What is wrong with a run after it, with the same adapter unless its device died; and that run."""
    lines: list[str] = []
    outcome, adapter = seen.outcome, seen.adapter
    kept = adapter
    if bench.device.lost():
        refused = bench.run(exit="offload")
        lines += _refused(refused)
        bench.device.replug()
        kept = None
    else:
        adapter.faults = ()
        if outcome is not None and "device" in outcome.abandoned:
            adapter.free()  # which the fault has kept from being called, or from being heard of
    # A model that was kept on the device is its caller's: here it goes, and must leave nothing.
    seen.outcome = outcome = None
    if seen.before is not None and not lines and kept is not None:
        left = bench.device.allocated(adapter)
        if left is not None and left > seen.before:
            lines.append(f"{left - seen.before} bytes are on the device once the outcome is gone")
    armed.raised.clear()
    second = bench.run(adapter=kept, exit="offload")
    return [*lines, *again(second, reference)], second


def _refused(seen: Seen) -> list[str]:
    outcome = seen.outcome
    if outcome is None or outcome.status != "failed" or outcome.steps:
        return ["the device is dead, and a run on it was not refused at once"]
    reached = {entry.phase for entry in outcome.history}
    if any(seen.slot is not None and seen.slot.lifecycle.spec.phase[p].kind is Kind.WORK for p in reached):
        return ["the device is dead, and a run on it trained"]
    return []
