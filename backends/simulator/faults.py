"""What passes on the simulated device, counted; and faults that strike there, by number or by seed.

Process-wide, as the device is: the backward pass, and loaders, work on threads of their own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

POINTS = ("operator", "to_device", "to_host", "on_device", "allocation", "sync")
"""Where a fault can strike: an operator, a copy in one of three directions, an allocation, a wait."""
HOWS = ("fails", "half", "late", "blocks", "slow", "loses")
"""`fails`: raises, and nothing was done. `half`: raises when half of it was done (an allocation is given
back, a wait was waited for). `late`: is done, and the error comes out at the next wait or copy to the
host, as those of CUDA do. `blocks`: until the strike is released. `slow`: is done later. `loses`: the device
is dead from then on."""


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

    Raises:
        ValueError: It would never strike.
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
    _seen: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.point not in POINTS or self.how not in HOWS or self.nth < 1:
            raise ValueError(
                f"a strike at {self.point!r} number {self.nth} that {self.how!r} would never strike: points "
                f"are {', '.join(POINTS)}, counted from 1, and ways are {', '.join(HOWS)}"
            )
        if self.how == "blocks" and self.release is None:
            raise ValueError("a strike that blocks needs `release=threading.Event()`, to let it go on")

    def __str__(self) -> str:
        match = f" of '{self.match}'" if self.match else ""
        return f"{self.point} {self.nth}{match} {self.how}"


class Faults:
    """What has passed, and what is to strike.

    Attributes:
        lost: Why the device is dead; empty while it lives.
        touched: What was asked of it since then: nothing, if whoever uses it keeps to the rules.
        hot: Whether a passage needs more than being counted.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(POINTS, 0)
        self.lost = ""
        self.touched: list[str] = []
        self.hot = False
        self._strikes: tuple[Strike, ...] = ()
        self._pending: BaseException | None = None
        self._traces: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def passes(self, point: str, name: str) -> Strike | None:
        """Something passes: count it, and let it be struck.

        Args:
            point: One of `POINTS`.
            name: Of the operator.

        Returns:
            A strike that the caller has to carry out (`half` and `late`); usually `None`.

        Raises:
            BaseException: The strike's.
        """
        with self._lock:
            self.counts[point] += 1
        return self._hot(point, name) if self.hot else None

    def asked(self, name: str) -> None:
        """The device is asked for something that no fault can strike, such as its memory.

        Raises:
            SimulatedLoss: It is dead.
        """
        if self.lost:
            self._dead(name)

    def surfaces(self) -> None:
        """Raise what went wrong earlier and has not been told yet."""
        error, self._pending = self._pending, None
        if error is not None:
            self._cool()
            try:
                raise error
            finally:
                del error  # else it, and this frame in its traceback, would keep each other

    def later(self, error: BaseException) -> None:
        """Keep an error for the next wait."""
        with self._lock:
            self._pending = self._pending or error
            self.hot = True

    def _hot(self, point: str, name: str) -> Strike | None:
        if self.lost:
            self._dead(f"{point} {name}")
        for trace in self._traces:
            trace.append((point, name))
        if point in ("sync", "to_host"):
            self.surfaces()
        with self._lock:
            strike = next((s for s in self._strikes if _matches(s, point, name)), None)
            if strike is None:
                return None
            strike.struck += 1
        if strike.how == "blocks" and strike.release is not None:
            strike.release.wait()
        elif strike.how == "slow":
            time.sleep(strike.seconds)
        elif strike.how == "fails":
            raise strike.error()
        elif strike.how == "loses":
            self.lose(f"simulated at {point} {strike.nth}")
            raise SimulatedLoss(f"SIM error: the device is lost ({self.lost})", LOST)
        else:
            return strike
        return None

    def lose(self, why: str) -> None:
        """Let the device be dead from now on."""
        self.lost = why
        self.touched = []
        self.hot = True

    def replug(self) -> None:
        """Put a new device in the place of a dead one."""
        self.lost = ""
        self.touched = []
        self._pending = None
        self._cool()

    @contextmanager
    def striking(self, *strikes: Strike) -> Iterator[tuple[Strike, ...]]:
        """Within the block these strike, each counted from its beginning."""
        with self._lock:
            before, self._strikes = self._strikes, (*self._strikes, *strikes)
            self.hot = True
        try:
            yield strikes
        finally:
            self._strikes = before
            self._pending = None
            self._cool()

    @contextmanager
    def counted(self) -> Iterator[dict[str, int]]:
        """The passages within the block, by point; complete when it ends."""
        before = dict(self.counts)
        found = dict.fromkeys(POINTS, 0)
        try:
            yield found
        finally:
            found.update({point: self.counts[point] - before[point] for point in POINTS})

    @contextmanager
    def traced(self, into: Any = None) -> Iterator[Any]:
        """(point, operator) of each passage within the block, in order.

        Args:
            into: What is told of each, by its method `append`; a new list by default.
        """
        found: Any = [] if into is None else into
        with self._lock:
            self._traces = (*self._traces, found)
            self.hot = True
        try:
            yield found
        finally:
            self._traces = tuple(trace for trace in self._traces if trace is not found)
            self._cool()

    def _cool(self) -> None:
        self.hot = bool(self._strikes or self.lost or self._pending or self._traces)

    def _dead(self, what: str) -> None:
        self.touched.append(what)
        raise SimulatedLoss(f"SIM error: the device is lost ({self.lost}); asked for: {what}", LOST)


LOST = 719
"""The error's code: CUDA's for an unspecified launch failure."""


def _matches(strike: Strike, point: str, name: str) -> bool:
    if strike.point != point or strike.match not in name:
        return False
    strike._seen += 1
    return strike.nth <= strike._seen < strike.nth + strike.times


def draw(seed: int, counts: Mapping[str, int], hows: tuple[str, ...] = HOWS) -> Strike:
    """A strike chosen by a seed: the same for the same seed and counts.

    Args:
        seed: Any.
        counts: Point -> how often it is passed, as `counted` gives them.
        hows: To choose from.

    Raises:
        ValueError: Nothing is passed at all.
    """
    chooser = random.Random(seed)
    total = sum(counts[point] for point in POINTS)
    if not total:
        raise ValueError("nothing passes on the device, so nothing can be struck")
    number = chooser.randrange(total)
    how = chooser.choice(hows)
    for point in POINTS:
        if number < counts[point]:
            more: dict[str, Any] = {"release": threading.Event()} if how == "blocks" else {}
            return Strike(point, number + 1, how, **more)
        number -= counts[point]
    raise AssertionError("the counts changed while they were read")


faults = Faults()
"""Of the one simulated device of this process."""
