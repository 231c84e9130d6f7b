"""What a run leaves behind: an `Outcome`, and in it the residue that was observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlock.specs import Entry

from .events import Report
from .evidence import Failure

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from interlock.backends.adapter import Leftover

StatusName = Literal["finished", "stopped", "failed", "cancelled"]


def held_by(owners: Sequence[str]) -> str:
    """Who holds a leftover, in words: at most three of them."""
    told = "; ".join(owners[:3]) or "an owner that was not found"
    return told if told.startswith("saved by ") else f"held by {told}"


@dataclass(frozen=True)
class Residue:
    """What of a run is still on the device after it.

    Attributes:
        known: Whether it could be observed (not if the device is lost or was abandoned).
        bytes: How much; `None` if unknown.
        leftovers: Each block, with the paths of references that hold it.
        by_design: Why something may be left on purpose (exit policy `keep`, kept frames).
    """

    known: bool = True
    bytes: int | None = 0
    leftovers: tuple[Leftover, ...] = ()
    by_design: str = ""

    def __str__(self) -> str:
        if not self.known:
            return "unknown: the device could not be asked"
        text = f"{self.bytes} bytes"
        if self.leftovers:
            text += f" in {len(self.leftovers)} block(s)"
        for leftover in self.leftovers[:5]:
            place = f" at {leftover.stack[0]}" if leftover.stack else ""
            held = held_by(leftover.owners)
            text += f"\n  {leftover.nbytes} bytes made by {leftover.origin}{place}, {held}"
        return text + (f" ({self.by_design})" if self.by_design else "")


UNKNOWN = Residue(known=False, bytes=None)
"""Of a device that could not be asked any more."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what it produced.

    Attributes:
        status: `finished`, `stopped` (on request, results kept), `failed` or `cancelled`.
        abandoned: Resources that could not be given back properly; empty for a clean end.
        model: The trained model (the task's own object where it gave one), on the host unless the
            exit policy is `keep`; `None` if there never was one or it was discarded.
        optimizers: The optimizers by name ("optimizer" if there is one only), their state on the host, bound
            to the model's parameters; none if there never was one, or the model is not at home (exit
            policies `keep` and `discard`).
        error: The exception that ended the run: the first one, the same object.
        failure: The same as text.
        errors: Later errors, from cleaning up, in order.
        residue: What is left on the device.
        history: Every transition.
        metrics: The last mean loss and the last validation's metrics.
        reports: Every report.
        steps: Steps that were complete; with loss scaling, those whose update was skipped among them.
        seconds: From start to closed.
        notes: Observations worth reading, such as "8 of 8 parameters changed".
        spec_hash: Of the lifecycle that ran, as written in its journal.
        checkpoint: The directory of the last one that the run saved.
        result: Of an evaluation or a prediction.
    """

    status: StatusName
    abandoned: tuple[str, ...] = ()
    model: nn.Module | None = None
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    error: BaseException | None = None
    failure: Failure | None = None
    errors: tuple[Failure, ...] = ()
    residue: Residue = field(default_factory=Residue)
    history: tuple[Entry, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    reports: tuple[Report, ...] = ()
    steps: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    spec_hash: str = ""
    checkpoint: Path | None = None
    result: Any = field(default=None, repr=False)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, if there is exactly one."""
        return next(iter(self.optimizers.values())) if len(self.optimizers) == 1 else None

    @property
    def ok(self) -> bool:
        """Whether the run did what it was asked: finished, or stopped on request, and clean."""
        return self.status in ("finished", "stopped") and not self.abandoned

    @property
    def verdict(self) -> Literal["clean", "abandoned"]:
        """Whether every resource was given back."""
        return "abandoned" if self.abandoned else "clean"

    @property
    def path(self) -> tuple[tuple[str, str, str], ...]:
        """(source, event, phase) of each transition, as drawings take it."""
        return tuple((entry.source, entry.event, entry.phase) for entry in self.history if entry.event)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds spent in each phase, in order of first entry."""
        spent: dict[str, float] = {}
        for entry, after in zip(self.history, self.history[1:], strict=False):
            spent[entry.phase] = spent.get(entry.phase, 0.0) + after.at - entry.at
        return spent

    def __repr__(self) -> str:
        return (
            f"<Outcome {self.status}, {self.verdict}, {self.steps} steps, residue {self.residue.bytes} bytes>"
        )
