"""What one run is asked to do: the data, how long, and what happens when. Frozen; checked as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .checkpoint import Checkpoints
from .errors import TaskError
from .task import Data

if TYPE_CHECKING:
    from .events import Report

Judge = Callable[["Report"], str | None]
"""Sees each report of a run; returns why the run is to stop, or nothing."""


class StopRule(Protocol):
    """When a run has had enough: early stopping, for instance."""

    def begin(self) -> Judge:
        """A judge for one run, which may remember what it has seen."""


@dataclass(frozen=True)
class Plan:
    """How long one run goes on, and what happens when.

    Attributes:
        data: What is trained and validated on.
        epochs: How often the training data is gone through.
        max_steps: Steps after which the run ends, as finished.
        max_time: Seconds after which it is asked to stop: at the next step boundary.
        limit_batches: Batches of each pass, in training and in validation, that are used.
        overfit: Train on so many batches only, the first ones, again and again: can it learn them?
        validate_every: Steps between two validations; `None` for one after each epoch.
        stop_when: Rules that may end it, as stopped.
        checkpoints: Where and how often the run is saved.
        resume: `True` for the newest one there that was saved between two epochs (from the beginning if
            there is none yet), or the directory of a checkpoint.
    """

    data: Data
    epochs: int = 1
    max_steps: int | None = None
    max_time: float | None = None
    limit_batches: int | None = None
    overfit: int | None = None
    validate_every: int | None = None
    stop_when: Sequence[StopRule] = ()
    checkpoints: Checkpoints | None = None
    resume: bool | str | Path | None = None

    def __post_init__(self) -> None:
        problems = [problem for field in fields(self) for problem in self._wrong(field.name)]
        if self.validate_every is not None and self.data.validate is None:
            problems.append("validate_every is given, and there is no validation data: pass `validate=`")
        if self.overfit is not None and self.resume:
            problems.append(
                "overfit takes the first batches anew, and one that resumes may find others there: leave out "
                "`overfit`, or `resume`"
            )
        if problems:
            raise TaskError("the run cannot be planned:\n" + "\n".join(f"  - {text}" for text in problems))

    def _wrong(self, name: str) -> Iterator[str]:
        value: Any = getattr(self, name)
        if name == "stop_when":
            rules = value if isinstance(value, (list, tuple)) else [value]
            bad = [rule for rule in rules if not callable(getattr(rule, "begin", None))]
            if bad or not isinstance(value, (list, tuple)):
                yield 'stop_when must be a list of rules such as `EarlyStopping("val_loss")`, got ' + repr(
                    value
                )
            for rule in rules if self.data.validate is None else ():
                if str(getattr(rule, "metric", "")).startswith("val_"):
                    yield f"{rule!r} follows a validation, and there is no validation data: pass `validate=`"
        elif name == "max_time":
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                yield f"max_time must be a number of seconds above 0, got {value!r}"
        elif name == "checkpoints":
            if value is not None and not isinstance(value, Checkpoints):
                yield f"checkpoints must be a Checkpoints(folder), got {value!r}"
        elif name == "resume":
            if value is not None and not isinstance(value, (bool, str, Path)):
                yield f"resume must be True or the directory of a checkpoint, got {value!r}"
        elif name not in ("data", "epochs") and value is not None:
            number = isinstance(value, int) and not isinstance(value, bool)
            if not (number and value >= 1):
                yield f"{name} must be a whole number of at least 1, got {value!r}"

    def training(self) -> Iterable[Any]:
        """The batches of an epoch."""
        return self.data.train if self.limit_batches is None else Limited(self.data.train, self.limit_batches)

    def validation(self) -> Iterable[Any] | None:
        """The batches of a validation."""
        if self.data.validate is None or self.limit_batches is None:
            return self.data.validate
        return Limited(self.data.validate, self.limit_batches)

    def steps(self, window: int) -> int | None:
        """How many steps an epoch has, if the loader can tell."""
        try:
            # A loader over a stream raises, each kind its own error.
            batches = len(self.data.train) if self.overfit is None else self.overfit  # type: ignore[arg-type]
        except Exception:
            return None
        if self.limit_batches is not None:
            batches = min(batches, self.limit_batches)
        return -(-batches // window)


class Limited:
    """The first batches of something that can be gone over again and again."""

    def __init__(self, batches: Iterable[Any], limit: int) -> None:
        self.batches, self.limit = batches, limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.limit)
