"""A fault of the simulated device: where it strikes, when, and how; and one chosen by a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from interlock.backends.errors import StrikeMisused

POINTS = ("operator", "to_device", "to_host", "on_device", "allocation", "sync")
"""Where a fault can strike: an operator, a copy in one of three directions, an allocation, a wait."""
HOWS = ("fails", "half", "late", "blocks", "slow", "loses")
"""`fails`: raises, and nothing was done. `half`: raises when half of it was done (an allocation is given
back, a wait was waited for). `late`: is done, and the error comes out at the next wait or copy to the
host, as those of CUDA do. `blocks`: until the strike is released. `slow`: is done later. `loses`: the device
is dead from then on."""


LOST = 719
"""The error's code: CUDA's for an unspecified launch failure."""


class SimulatedFault(RuntimeError):
    """What a strike raises if nothing else was asked for."""


class SimulatedLoss(torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError):  # type: ignore[misc]
    """The simulated device is lost: every call raises this from then on."""


@dataclass
class Strike:
    """One fault: where, when, and how.

    Attributes:
        point: One of `POINTS`.
        nth: At which passage, from 1, of those that match.
        how: One of `HOWS`.
        error: Makes the exception.
        match: Count only what has this in its operator's name, such as `addmm`.
        seconds: How long `slow` takes.
        release: Set by whoever lets a `blocks` go on.
        times: For how many passages, from the nth on.
        struck: How often it has struck.
        unheard: The error of a `late` that has not come out yet. If it never does, since nothing waits for
            the device until the block ends, it stays here.

    Raises:
        StrikeMisused: It would never strike.
    """

    point: str
    nth: int = 1
    how: str = "fails"
    error: Callable[[], BaseException] = SimulatedFault
    match: str = ""
    seconds: float = 0.05
    release: threading.Event | None = None
    times: int = 1
    struck: int = field(default=0, compare=False)
    unheard: BaseException | None = field(default=None, compare=False)
    _seen: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.point not in POINTS or self.how not in HOWS or self.nth < 1:
            raise StrikeMisused(
                f"a strike at {self.point!r} number {self.nth} that {self.how!r} would never strike: points "
                f"are {', '.join(POINTS)}, counted from 1, and ways are {', '.join(HOWS)}"
            )
        if self.how == "blocks" and self.release is None:
            raise StrikeMisused("a strike that blocks needs `release=threading.Event()`, to let it go on")

    def __str__(self) -> str:
        match = f" of '{self.match}'" if self.match else ""
        return f"{self.point} {self.nth}{match} {self.how}"


def draw(seed: int, counts: Mapping[str, int], hows: tuple[str, ...] = HOWS) -> Strike:
    """A strike chosen by a seed: the same for the same seed and counts.

    Args:
        seed: Any.
        counts: Point -> how often it is passed, as `counted` gives them.
        hows: To choose from.

    Raises:
        StrikeMisused: Nothing is passed at all.
    """
    chooser = random.Random(seed)
    passed = {point: counts[point] for point in POINTS}
    total = sum(passed.values())
    if not total:
        raise StrikeMisused(
            "nothing passes on the device, so nothing can be struck: count the passages of the work that is "
            "to be struck, as `with counted() as counts` does"
        )
    number = chooser.randrange(total)
    how = chooser.choice(hows)
    more: dict[str, Any] = {"release": threading.Event()} if how == "blocks" else {}
    point = POINTS[0]
    for point in POINTS:
        if number < passed[point]:
            break
        number -= passed[point]
    return Strike(point, number + 1, how, **more)
