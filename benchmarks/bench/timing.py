"""Times several variants of one thing in turn, until a budget of seconds is used up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes:
        seconds: No repeat begins after that.
        least: Repeats that are made in any case.
        most: Repeats after which it is enough.
    """

    seconds: float
    least: int = 5
    most: int = 1000


Tell = Callable[[float], None]
"""Told the fraction that is done, from 0 to 1."""


def order(names: Sequence[str], repeat: int) -> list[str]:
    """The order of the variants in a repeat: another one begins each time, every second time backwards.

    So each variant stands in each place, and follows each neighbour, equally often.
    """
    cut = (repeat // 2) % len(names)
    turned = [*names[cut:], *names[:cut]]
    return turned[::-1] if repeat % 2 else turned


def wall(call: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Stopwatch:
    """A loss function that looks at the clock at two of its calls, the same two in every variant.

    What lies between is so many whole steps, whoever runs them, and nothing that a run does once: neither
    its beginning nor its end. (Long runs minus short ones say the same, with the noise of four run ends.)

    Args:
        loss: The function to call.
        first: The call, from 1, at which the watch starts.
        last: The call at which it stops.
    """

    def __init__(self, loss: Callable[..., Any], first: int, last: int) -> None:
        self._loss, self._first, self._last = loss, first, last
        self._calls = 0
        self._started = self._stopped = 0.0

    def __call__(self, model: Any, batch: Any) -> Any:
        self._calls += 1
        if self._calls == self._first:
            self._started = time.perf_counter()
        elif self._calls == self._last:
            self._stopped = time.perf_counter()
        return self._loss(model, batch)

    def timed(self, call: Callable[[], object]) -> float:
        """The seconds of one step during a call.

        Raises:
            RuntimeError: It had too few steps or too many.
        """
        self._calls = 0
        call()
        if self._calls != self._last:
            raise RuntimeError(f"{self._calls} steps were made, and not {self._last}")
        return (self._stopped - self._started) / (self._last - self._first)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    budget: Budget,
    tell: Tell = lambda _: None,
    timed: Callable[[Callable[[], object]], float] = wall,
) -> dict[str, list[float]]:
    """The seconds that each variant took, one value per repeat.

    Garbage of one variant is collected before the next one is timed, outside of its time; the collector
    stays on while it runs, as it does for users.

    Args:
        variants: Name -> what to time. Called once beforehand, untimed.
        budget: How long.
        tell: Progress.
        timed: Calls a variant and says how long it took.
    """
    for call in variants.values():
        call()
    gc.collect()
    gc.freeze()  # what is alive now need not be looked at before each timing
    times: dict[str, list[float]] = {name: [] for name in variants}
    begin = time.perf_counter()
    try:
        for repeat in range(budget.most):
            passed = time.perf_counter() - begin
            if repeat >= budget.least and passed > budget.seconds:
                break
            tell(min(1.0, max(passed / budget.seconds, repeat / budget.most)))
            for name in order(list(variants), repeat):
                gc.collect()
                times[name].append(timed(variants[name]))
    finally:
        gc.unfreeze()
    return times
