"""What a sweep begins with: undisturbed runs, which show the points and what a run is to lead to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from .errors import SweepError, UnknownCell
from .sweep_arm import arm
from .sweep_case import Reference
from .sweep_digests import form_of, weights_of
from .sweep_points import Cell, Point, cells_at
from .sweep_run import Bench, Seen
from .sweep_watch import Recording, Watching
from .sweep_whole import knowledge


@dataclass(frozen=True)
class Enumerated:
    """What the undisturbed runs showed.

    Attributes:
        points: Of a finished run, then those of the way out of a failed one.
        reference: What a run is to lead to.
        notes: What is worth knowing about it all.
        seconds: That one run took.
    """

    points: tuple[Point, ...]
    reference: Reference
    notes: tuple[str, ...]
    seconds: float


def enumerated(bench: Bench) -> Enumerated:
    """The points of the undisturbed run and of the way out of a failed one; what the former trains to.

    Raises:
        SweepError: The undisturbed run fails.
    """
    settings = bench.settings
    # Not noted: what torch does once in a process is done in the first run.
    recording = Recording()
    first = bench.run(exit="offload", watch=recording)
    home = _whole(bench, first)
    watch = Watching(settings.layers, bench.device, bench.life)
    began = time.monotonic()
    _whole(bench, bench.run(watch=watch))
    seconds = time.monotonic() - began
    watch.operations()
    # A step by hand, and a function that adopts, may change parameters beside the optimizer.
    plain = bench.task.step is None and not bench.task.adopt
    reference = Reference(
        steps=home.steps,
        weights=weights_of(home.model),
        form=form_of(home.model),
        built=recording.built if plain else {},
        optimizers=knowledge(home),
        updates=tuple(recording.updates) if plain else (),
        process=tuple(first.process),
    )
    points = watch.points
    if "backend" in settings.layers:
        points = [*points, *_of_failed_run(bench)]
    notes = []
    if "device" in settings.layers and bench.device.simulator is None:
        notes.append(f"device operations are struck on the simulated device only, not on {settings.backend}")
    return Enumerated(tuple(points), reference, tuple(notes), seconds)


def _of_failed_run(bench: Bench) -> list[Point]:
    """The backend's calls on the way out of a run that failed once it had taken its steps."""
    watch = Watching(("backend",), bench.device, bench.life)
    first = Cell(Point("run", "failed", "during", 1, "during", failed=True), "error")
    bench.run(arm(first, bench.device), watch=watch)
    return [replace(point, failed=True) for point in watch.points if point.stage == "out"]


def _whole(bench: Bench, seen: Seen) -> Any:
    outcome = seen.outcome
    if outcome is not None and outcome.status == "finished":
        return outcome
    told = seen.hung or str(seen.error) or "it was not begun"
    cause = seen.error
    if outcome is not None:
        told, cause = str(outcome.failure), outcome.error
    raise SweepError(
        f"the undisturbed run of task '{bench.task.name}' on {bench.settings.backend} does not finish, so "
        f"there is nothing to strike: {told}"
    ) from cause


def one_cell(wanted: str, cells: Sequence[Cell], points: Sequence[Point]) -> list[Cell]:
    """The cell of an id.

    Args:
        wanted: The id.
        cells: Those that would be tried.
        points: All points.

    Raises:
        UnknownCell: There is none; says which come closest.
    """
    everything = {cell.id: cell for cell in (*cells, *cells_at(points))}
    if wanted not in everything:
        kind = wanted.partition("[")[0]
        near = get_close_matches(wanted, everything, n=4, cutoff=0.5)
        near = near or [name for name in everything if name.partition("[")[0] == kind] or list(everything)
        raise UnknownCell(
            f"this sweep has no cell '{wanted}'; there are {len(everything)}, such as "
            f"{', '.join(map(repr, near[:4]))}"
        )
    return [everything[wanted]]
