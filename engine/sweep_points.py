"""The points of a run at which a fault can strike, the faults, and which of them a sweep tries: plain data.

A *point* is one passage: the third call of the loss, the second copy to the host, the operator of number 41.
A *cell* is one fault at one point, and is tried by one run. Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Layer = Literal["run", "hook", "backend", "device"]
Stage = Literal["in", "during", "out"]

LAYERS: tuple[Layer, ...] = ("hook", "backend", "device")
"""User hooks, calls of the backend, operations of a simulated device."""
QUICK = 240
"""Cells of a quick sweep, at most (more only if there are more kinds of point)."""


class InjectedFault(RuntimeError):
    """The ordinary error that a sweep raises."""


@dataclass(frozen=True)
class Point:
    """One passage of one place.

    Attributes:
        layer: Whose place: a user `hook`, the `backend`, the `device`.
        name: Of the hook, of the adapter's call, of the kind of device operation.
        moment: `before`, `during` or `after` it; of a device operation always `during`.
        nth: Which passage, from 1.
        stage: On the way `in`, `during` training, on the way `out`.
        bounded: Whether the engine waits for it no longer than its deadline.
        failed: Whether it is passed on the way out of a run that failed in training, not a finished one.
    """

    layer: Layer
    name: str
    moment: str
    nth: int
    stage: Stage
    bounded: bool = False
    failed: bool = False

    def __str__(self) -> str:
        after = " of a failed run" if self.failed else ""
        return f"{self.layer}.{self.name}[{self.nth}] {self.moment}{after}"

    @property
    def group(self) -> str:
        """What it is one of: `hook.loss before, during`."""
        after = " of a failed run" if self.failed else ""
        return f"{self.layer}.{self.name} {self.moment}, {_STAGES[self.stage]}{after}"


_STAGES = {"in": "on the way in", "during": "in training", "out": "on the way out"}

START = Point("run", "undisturbed", "during", 1, "during")
"""Stands for the whole run, of the one cell in which nothing strikes."""


@dataclass(frozen=True)
class Cell:
    """One fault at one point."""

    point: Point
    fault: str

    @property
    def id(self) -> str:
        """Names it, the same in every sweep of the same task."""
        return "undisturbed" if self.point == START else f"{self.point}: {self.fault}"


FAULTS: Mapping[str, str] = {
    "nothing": "nothing strikes",
    "error": "an ordinary error is raised",
    "memory": "the device's memory runs out",
    "interrupt": "Ctrl-C",
    "twice": "an error is raised, and again when it is tried once more",
    "blocks": "it does not return before the deadline",
    "fails": "the operation raises before its work",
    "half": "the operation raises when half of its work is done",
    "late": "the operation's error comes with the next wait for the device",
    "loses": "the device dies",
    "slow": "the operation is slow, and then done",
}
"""Every kind of fault, in words."""

_BEFORE_AND_AFTER = {"before": ("error", "twice", "blocks"), "after": ("error", "twice")}

_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "operator": ("fails", "half", "late", "loses"),
    "to_device": ("fails", "half", "late", "loses"),
    "to_host": ("fails", "half", "loses", "blocks", "slow"),
    "on_device": ("fails", "half", "late", "loses"),
    "allocation": ("memory", "loses"),
    "sync": ("fails", "loses", "blocks", "slow"),
}
"""Device operation -> how it can go wrong, as far as that means anything there."""


def faults_at(point: Point) -> tuple[str, ...]:
    """The kinds of fault that are tried at a point."""
    if point.layer == "hook":
        return ("error", "memory", "interrupt")
    if point.layer == "device":
        kinds = _OPERATIONS.get(point.name, ("fails", "loses"))
        # What waits for nothing bounds nothing; and after the last wait no late error ever comes.
        waits = () if point.bounded else ("blocks", "slow")
        never = ("late",) if point.stage == "out" else ()
        return tuple(kind for kind in kinds if kind not in (*waits, *never))
    kinds = _BEFORE_AND_AFTER[point.moment]
    retried = point.stage == "out" and point.name in ("fetch", "free")
    return tuple(
        kind
        for kind in kinds
        if not (kind == "twice" and not retried) and not (kind == "blocks" and not point.bounded)
    )


def cells_at(points: Iterable[Point]) -> list[Cell]:
    """Every fault at every point, in the order of the points."""
    return [Cell(point, fault) for point in points for fault in faults_at(point)]


def quick_cells(points: Sequence[Point], seed: int, limit: int = QUICK) -> list[Cell]:
    """Of each kind of point the first, the middle and the last passage; each fault kind once at least.

    Args:
        points: All of them.
        seed: Chooses which fault meets which passage.
        limit: Cells at most, unless there are more kinds of point.

    Returns:
        The cells, in the order of the points.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    chosen = {name: _of_group(members, f"{seed} {name}") for name, members in groups.items()}
    kept: list[Cell] = []
    # Round by round, so that what is cut off is the second and third of a kind, never a whole kind.
    for turn in range(max(map(len, chosen.values()), default=0)):
        for cells in chosen.values():
            if turn < len(cells) and (turn == 0 or len(kept) < limit):
                kept.append(cells[turn])
    place = {point: number for number, point in enumerate(points)}
    order = list(FAULTS)
    return sorted(kept, key=lambda cell: (place[cell.point], order.index(cell.fault)))


def _of_group(members: list[Point], seed: str) -> list[Cell]:
    generator = random.Random(seed)
    kinds = list(dict.fromkeys(fault for point in members for fault in faults_at(point)))
    generator.shuffle(kinds)
    cells = []
    for number, fault in enumerate(kinds):
        where = _ends([point for point in members if fault in faults_at(point)])
        cells.append(Cell(where[number % len(where)], fault))
    met = {cell.point for cell in cells}
    cells += [Cell(point, generator.choice(faults_at(point))) for point in _ends(members) if point not in met]
    return cells


def _ends(points: list[Point]) -> list[Point]:
    """The first, the middle and the last one, each once."""
    return list(dict.fromkeys((points[0], points[len(points) // 2], points[-1])))


@dataclass(frozen=True)
class Settings:
    """What decides which cells a sweep has and how each is tried; a sweep goes on only with the same.

    Attributes:
        backend: Its name.
        exit: The exit policy of the runs that are struck.
        batches: Steps of an epoch.
        epochs: Epochs of a run.
        validates: Whether there is validation data.
        checkpoints: Whether each run saves, and rescues when it fails.
        quick: A choice of the cells.
        layers: Where faults are injected.
        seed: Of the runs, and of that choice.
        deadline: Seconds that a blocked call is waited for.
        patience: Seconds after which a run counts as hanging.
    """

    backend: str
    exit: str
    batches: int
    epochs: int
    validates: bool
    checkpoints: bool
    quick: bool
    layers: tuple[str, ...]
    seed: int
    deadline: float
    patience: float = field(compare=False)

    def as_data(self) -> dict[str, Any]:
        """For the header of a state file."""
        return {**vars(self), "layers": list(self.layers)}


def fingerprint(task: str, settings: Settings, points: Sequence[Point]) -> str:
    """What must be equal for a sweep to go on where it was: task name, settings, every point.

    Args:
        task: Its name.
        settings: Of the sweep.
        points: All that were enumerated, in order.
    """
    known = {name: value for name, value in settings.as_data().items() if name != "patience"}
    text = json.dumps([task, known, [f"{point} {point.stage} {point.bounded}" for point in points]])
    return hashlib.sha256(text.encode()).hexdigest()


Strike = Callable[[], BaseException]
"""Makes the error of a fault."""
