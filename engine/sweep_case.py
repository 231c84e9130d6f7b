"""One struck run with what it is compared with: what every promise of the judge is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .sweep_digests import Digests
from .sweep_points import Cell
from .sweep_run import Seen


@dataclass(frozen=True)
class Reference:
    """What undisturbed runs show.

    Attributes:
        steps: How many one takes.
        weights: What it trains to.
        form: Modules, modes, and what of its parameters trains.
        built: The same when the optimizer was built, without the modes; empty where it may change on the way.
        optimizers: What its optimizers know at the end, with their settings.
        updates: Parameters and what the optimizer knows of them, before the first update and after each;
            empty where something else may change them, too.
        process: In what the process was another one after the first of them than before.
    """

    steps: int
    weights: Digests
    form: Digests = field(default_factory=dict)
    built: Digests = field(default_factory=dict)
    optimizers: Digests = field(default_factory=dict)
    updates: tuple[Digests, ...] = ()
    process: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One struck run, and what it is compared with.

    Attributes:
        cell: What struck, where.
        seen: What could be seen of it.
        reference: What undisturbed runs show.
        exit: The exit policy.
        checkpoints: Whether it was to save, and to rescue.
    """

    cell: Cell
    seen: Seen
    reference: Reference
    exit: str
    checkpoints: bool = False

    @property
    def outcome(self) -> Any:
        """Of the run, which has one: others are not judged."""
        return self.seen.outcome

    @property
    def history(self) -> list[Any]:
        """Its transitions."""
        return self.seen.slot.history[1:] if self.seen.slot is not None else []

    @property
    def survives(self) -> bool:
        """Whether the run is to finish in spite of the fault."""
        return self.cell.fault in ("nothing", "slow")

    @property
    def whole(self) -> bool:
        """Whether it took all its steps before the fault struck."""
        point = self.cell.point
        return self.survives or (point.stage == "out" and not point.failed)

    @property
    def endings(self) -> dict[str, str]:
        """Resource -> how it ended."""
        return dict(self.seen.slot.ended) if self.seen.slot is not None else {}

    def came(self, event: str) -> bool:
        """Whether an event came."""
        return any(entry.event == event for entry in self.history)
