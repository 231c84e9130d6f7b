"""The figures that are made of repeated timings: medians, their spread, and paired differences.

Timings on a shared machine have a long tail to the right, so nothing here is a mean. Each repeat times
every variant once, close together, and what is compared is compared *within* a repeat: a slow minute
slows both sides of a ratio.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class Summary:
    """A median and how far it can be trusted.

    Attributes:
        median: Of the values.
        low: Lower end of the 95 % bootstrap interval of the median.
        high: Upper end of it.
        p10: A tenth of the values lie below.
        p90: A tenth of the values lie above.
        count: How many values there are.
    """

    median: float
    low: float
    high: float
    p10: float
    p90: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which a part (0 to 1) of the values lies, interpolated.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("no values: nothing was measured")
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def summarize(values: Sequence[float], resamples: int = 1000) -> Summary:
    """Median, 95 % bootstrap interval of the median, and the middle four fifths of the values.

    Args:
        values: In any order.
        resamples: How many bootstrap samples; drawn from a fixed seed, so that the figures of one set
            of timings are always the same.

    Raises:
        ValueError: There are no values.
    """
    draw = random.Random(0)
    medians = [median(draw.choices(values, k=len(values))) for _ in range(resamples)] if values else []
    return Summary(
        quantile(values, 0.5),
        quantile(medians, 0.025),
        quantile(medians, 0.975),
        quantile(values, 0.1),
        quantile(values, 0.9),
        len(values),
    )


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """value / base of each repeat."""
    return [value / of for value, of in zip(values, base, strict=True)]


def differences(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """value - base of each repeat."""
    return [value - of for value, of in zip(values, base, strict=True)]


def compare(
    timings: Mapping[str, Sequence[float]], base: str, scale: float = 1.0
) -> dict[str, dict[str, dict[str, float]]]:
    """Each variant against a base, repeat by repeat.

    Args:
        timings: Variant -> one value per repeat, in the same order of repeats.
        base: The variant to compare with.
        scale: Multiplies times and differences: 1e6 makes microseconds of seconds.

    Returns:
        Variant -> `time`, and for all but the base `ratio` and `added`, each a summary.
    """
    found = {}
    for name, values in timings.items():
        figures = {"time": summarize([scale * value for value in values])}
        if name != base:
            figures["ratio"] = summarize(ratios(values, timings[base]))
            figures["added"] = summarize([scale * d for d in differences(values, timings[base])])
        found[name] = {key: figure.as_dict() for key, figure in figures.items()}
    return found
