"""Rules by which a run stops before its last epoch: by a metric that gets no better, or is good enough.

Each is a frozen setting; `begin` makes the judge of one run, which sees its reports on the run's own thread
and says why to stop. What a judge remembers goes into checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from .checkpoint import LOWER, CheckpointError, counts
from .errors import TaskError

if TYPE_CHECKING:
    from .events import Report

VALIDATION = "val_"
"""What the names of a validation's metrics begin with."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a run whose metric has not improved for a while.

    The run ends as stopped, with the parameters that it has then; those of the best validation are in
    `Checkpoints(folder, best=metric)`. NaN is no improvement, and neither is the worst infinity.

        engine.fit(task, train, validate=val, epochs=100, stop_when=[il.EarlyStopping("val_loss")])

    Attributes:
        metric: The name it has in reports: `val_loss`, or `loss` for the loss in training.
        patience: How many values in a row may be no improvement; with that many the run stops.
        min_delta: How much better than the best so far a value must be to be an improvement.
        lower_is_better: Need not be said where the name has "loss" or "error" in it.
        after: So many values, the first ones, are never counted as being no improvement.

    Raises:
        TaskError: Naming everything that is wrong.
    """

    metric: str
    _: KW_ONLY
    patience: int = 3
    min_delta: float = 0.0
    lower_is_better: bool | None = None
    after: int = 0

    def __post_init__(self) -> None:
        problems = [*_wrong_metric(self.metric, self.lower_is_better)]
        if not counts(self.patience):
            problems.append(f"patience is {self.patience!r}: pass a whole number of at least 1")
        if not _is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            problems.append(f"min_delta is {self.min_delta!r}: pass a number from 0")
        if not (counts(self.after) or (self.after == 0 and not isinstance(self.after, bool))):
            problems.append(f"after is {self.after!r}: pass a whole number from 0")
        _refuse("EarlyStopping", problems)

    def begin(self) -> _Patience:
        """A judge for one run."""
        return _Patience(self)


@dataclass(frozen=True)
class StopAt:
    """Stops a run whose metric is good enough.

    Attributes:
        metric: The name it has in reports: `val_loss`, or `loss` for the loss in training.
        value: What is good enough; better is too.
        lower_is_better: Need not be said where the name has "loss" or "error" in it.

    Raises:
        TaskError: Naming everything that is wrong.
    """

    metric: str
    value: float
    _: KW_ONLY
    lower_is_better: bool | None = None

    def __post_init__(self) -> None:
        problems = [*_wrong_metric(self.metric, self.lower_is_better)]
        if not _is_number(self.value) or math.isnan(self.value):
            problems.append(f"value is {self.value!r}: pass a number")
        _refuse("StopAt", problems)

    def begin(self) -> _Goal:
        """A judge for one run."""
        return _Goal(self)


class _Followed:
    """One metric in the reports of one run, and whether it ever came."""

    def __init__(self, rule: EarlyStopping | StopAt) -> None:
        self._rule = type(rule).__name__
        self._metric = rule.metric
        self._seen = False
        self._first: int | None = None
        self._names: dict[str, None] = {}

    def value(self, report: Report) -> float | None:
        """The metric's value, or `None` where the report is about other things.

        The metrics of a validation come together: one validation without it is enough to know. Others may
        come later than the first report, but not later than the first epoch that is reported of.

        Raises:
            TaskError: It never came.
        """
        value = report.metrics.get(self._metric)
        if value is not None or self._seen:
            self._seen = True
            return None if value is None else float(value)
        self._names.update(dict.fromkeys(report.metrics))
        if self._metric.startswith(VALIDATION):
            missing = any(name.startswith(VALIDATION) for name in report.metrics)
        else:
            self._first = report.epoch if self._first is None else self._first
            missing = report.epoch > self._first
        if missing:
            raise TaskError(self._missing(report))
        return None

    def _missing(self, report: Report) -> str:
        names = ", ".join(f"'{name}'" for name in self._names)
        text = f"{self._rule} follows '{self._metric}', and up to step {report.step} only {names} came"
        meant = VALIDATION + self._metric
        if meant in self._names:
            return f"{text}: did you mean '{meant}', which is its value in validation?"
        return f"{text}: name one of these, or return it from the task's metrics"


class _Patience:
    """The judge of `EarlyStopping`: remembers the best value, and how many were no improvement since."""

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self._metric = _Followed(rule)
        self._lower = rule.lower_is_better is not False
        self._best = math.inf if self._lower else -math.inf
        self._values = 0
        self._misses = 0

    def __call__(self, report: Report) -> str | None:
        rule, value = self._rule, self._metric.value(report)
        if value is None:
            return None
        self._values += 1
        # Written so that NaN, with which each comparison is false, is no improvement.
        better = value < self._best - rule.min_delta if self._lower else value > self._best + rule.min_delta
        if better:
            self._best, self._misses = value, 0
        elif self._values > rule.after:
            self._misses += 1
        if self._misses < rule.patience:
            return None
        than = f"{self._best:g}" if math.isfinite(self._best) else "any number yet"
        by = f" by {rule.min_delta:g}" if rule.min_delta else ""
        return (
            f"'{rule.metric}' was not better than {than}{by} {self._misses} time(s) in a row, now {value:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What decides its future."""
        return {
            "metric": self._rule.metric,
            "lower": self._lower,
            "best": self._best,
            "values": self._values,
            "misses": self._misses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. The patience and the like may be others by now; they are settings.

        Raises:
            CheckpointError: What is saved is about another metric.
        """
        for name, now in (("metric", self._rule.metric), ("lower", self._lower)):
            if state[name] != now:
                what = "metric" if name == "metric" else "lower_is_better"
                raise CheckpointError(
                    f"EarlyStopping was saved with {what}={state[name]!r} and has {what}={now!r} now: of it "
                    "the best value so far says nothing. Resume with the former, or leave out `resume`"
                )
        self._best, self._values, self._misses = state["best"], state["values"], state["misses"]


class _Goal:
    """The judge of `StopAt`."""

    def __init__(self, rule: StopAt) -> None:
        self._rule = rule
        self._metric = _Followed(rule)

    def __call__(self, report: Report) -> str | None:
        rule, value = self._rule, self._metric.value(report)
        if value is None:
            return None
        reached = value >= rule.value if rule.lower_is_better is False else value <= rule.value
        return f"'{rule.metric}' is {value:g}, and {rule.value:g} is good enough" if reached else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong_metric(metric: object, lower_is_better: object) -> Iterator[str]:
    if not isinstance(metric, str) or not metric:
        yield f"metric is {metric!r}: pass the name of one, such as 'val_loss'"
    elif lower_is_better is None and not LOWER.search(metric):
        yield (
            f"'{metric}' does not say which way is better: pass lower_is_better=True or lower_is_better=False"
        )
    if lower_is_better is not None and not isinstance(lower_is_better, bool):
        yield f"lower_is_better is {lower_is_better!r}: pass True, False, or leave it out"


def _refuse(rule: str, problems: list[str]) -> None:
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise TaskError(f"{rule} cannot judge like that:\n{lines}")
