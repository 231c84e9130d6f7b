"""What passes on the simulated device, counted; and faults that strike there.

Process-wide, as the device is: the backward pass, and loaders, work on threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from interlock.backends.errors import StrikeMisused

from .strikes import LOST, POINTS, SimulatedLoss, Strike


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
        self._pending: tuple[Strike, ...] = ()
        self._traces: tuple[Any, ...] = ()
        # A collection of garbage may end a block while this very thread changes what is here.
        self._lock = threading.RLock()

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
        """Raise what went wrong earlier and has not been told yet: of several errors the oldest."""
        error: BaseException | None = None
        with self._lock:
            if self._pending:
                strike, *rest = self._pending
                error, strike.unheard = strike.unheard, None
                self._pending = tuple(rest)
                self._cool()
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it, and this frame in its traceback, would keep each other

    def later(self, strike: Strike) -> None:
        """Keep a strike's error for the next wait; one that is kept already stands for both."""
        error = strike.error()
        with self._lock:
            if strike.unheard is None:
                strike.unheard = error
                self._pending = (*self._pending, strike)
            self._cool()

    def finish(self, strike: Strike) -> None:
        """What is left of a strike once its work is done: raise its error, now or at the next wait."""
        if strike.how != "late":
            raise strike.error()
        self.later(strike)

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
        with self._lock:
            self.lost = why
            self.touched = []
            self._cool()

    def replug(self) -> None:
        """Put a new device in the place of a dead one."""
        with self._lock:
            self.lost = ""
            self.touched = []
            self._pending = ()
            self._cool()

    @contextmanager
    def striking(self, *strikes: Strike) -> Iterator[tuple[Strike, ...]]:
        """Within the block these strike, each counted from its beginning.

        Blocks may overlap, also on several threads: each ends what is its own, an error of `late` that
        nothing has waited for among it (`Strike.unheard`).

        Raises:
            StrikeMisused: One of them is in force already.
        """
        with self._lock:
            doubled = [
                str(one) for n, one in enumerate(strikes) if _among(one, (*self._strikes, *strikes[:n]))
            ]
            if doubled:
                raise StrikeMisused(
                    f"this strike is in force already: {', '.join(doubled)}. Make one of its own for each "
                    "block, since each counts for itself"
                )
            for strike in strikes:
                strike._seen = 0
            self._strikes = (*self._strikes, *strikes)
            self._cool()
        try:
            yield strikes
        finally:
            with self._lock:
                self._strikes = tuple(one for one in self._strikes if not _among(one, strikes))
                self._pending = tuple(one for one in self._pending if not _among(one, strikes))
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
            self._cool()
        try:
            yield found
        finally:
            with self._lock:
                self._traces = tuple(trace for trace in self._traces if trace is not found)
                self._cool()

    def _cool(self) -> None:
        self.hot = bool(self._strikes or self.lost or self._pending or self._traces)

    def _dead(self, what: str) -> None:
        self.touched.append(what)
        raise SimulatedLoss(f"SIM error: the device is lost ({self.lost}); asked for: {what}", LOST)


def _among(strike: Strike, others: Iterable[Strike]) -> bool:
    """By identity: two that are equal count for themselves."""
    return any(strike is other for other in others)


def _matches(strike: Strike, point: str, name: str) -> bool:
    if strike.point != point or strike.match not in name:
        return False
    strike._seen += 1
    return strike.nth <= strike._seen < strike.nth + strike.times


faults = Faults()
"""Of the one simulated device of this process."""
