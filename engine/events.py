"""What a run tells the outside, and the bus that carries it without ever stalling the run.

Each subscriber has a bounded queue and a daemon thread of its own. One that raises is reported
and goes on; one that is too slow loses events, which are counted. Nothing here holds a tensor.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from .errors import ObserverWarning, TaskError
from .evidence import message_of


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A transition was taken.

    Attributes:
        n: Its number, from 1.
        event: What was fired.
        source: The phase left.
        phase: The phase entered.
        held: What is held now.
        ended: (resource, how) of what ended with it.
        at: Seconds since the run was created.
    """

    n: int
    event: str
    source: str
    phase: str
    held: tuple[str, ...]
    ended: tuple[tuple[str, str], ...]
    at: float

    def __str__(self) -> str:
        return f"{self.source} --{self.event}--> {self.phase}"


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers, read from the device at intervals.

    Attributes:
        step: Steps complete.
        epoch: The epoch they belong to, from 0.
        metrics: `loss` is the mean since the last report; validation metrics carry `val_`.
        seconds: Since the run was created.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"epoch {self.epoch + 1}, step {self.step}: {numbers}"


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth reading.

    Attributes:
        text: One line.
    """

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Closed:
    """The run is over; the last event of every run.

    Attributes:
        status: As in `Outcome`.
        verdict: `clean` or `abandoned`.
        residue: Bytes left on the device; `None` if unknown.
        error: The first error as one line, or empty.
        steps: Steps complete.
        seconds: Since the run was created.
    """

    status: str
    verdict: str
    residue: int | None
    error: str
    steps: int
    seconds: float

    def __str__(self) -> str:
        end = f"{self.status}, {self.verdict}, {self.steps} steps in {self.seconds:.1f} s"
        return f"{end}: {self.error}" if self.error else end


Event: TypeAlias = PhaseChanged | Report | Note | Closed
Observer: TypeAlias = Callable[[Event], None]

_STOP = None

REST = 0.05
"""Seconds that an observer's thread rests after a report, if nothing but reports comes meanwhile."""


@dataclass(eq=False)
class Subscription:
    """One observer of one run.

    Reports reach it within `REST` seconds, all other events at once.

    An observer may have a method `on_end(lost)`: it is called on the same thread once there are no
    more events, whether or not the last one was `Closed`, with the number of events it lost.

    Attributes:
        observer: Called with each event, on a thread of its own, in order.
        capacity: Events that may wait; what comes while it is full is lost and counted. `Closed` is
            never lost: the oldest that waits makes room for it.
        past: What it is told first, however much that is.
        bus: Where it is taken off when it is closed.
        lost: How many were lost so far.
        errors: How many times the observer raised.
    """

    observer: Observer
    capacity: int = 1024
    past: Sequence[Event] = field(default=(), repr=False)
    bus: Bus | None = field(default=None, repr=False)
    lost: int = field(default=0, init=False)
    errors: int = field(default=0, init=False)
    _name: str = field(init=False, repr=False)
    _queue: queue.SimpleQueue[Event | None] = field(init=False, repr=False)
    _hurry: threading.Event = field(init=False, repr=False)
    _ended: threading.Event = field(init=False, repr=False)
    _thread: threading.Thread = field(init=False, repr=False)
    _seen: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        capacity: object = self.capacity  # it comes from anywhere
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise TaskError(f"an observer's capacity must be a whole number of at least 1, got {capacity!r}")
        self._queue = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._ended = threading.Event()
        self._name = _name_of(self.observer)
        self._thread = threading.Thread(
            target=self._run, name=f"interlock observer {self._name}", daemon=True
        )
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hand an event over; never waits."""
        # Not `queue.Queue`, whose locks are taken in Python: a report would cost each observer some 20 us.
        if self._queue.qsize() >= self.capacity:
            if not isinstance(event, Closed):
                self.lost += 1
                return
            with suppress(queue.Empty):  # its thread may be quicker
                self._queue.get_nowait()
                self.lost += 1
        self._queue.put(event)
        if not isinstance(event, Report) or 2 * self._queue.qsize() >= self.capacity:
            self._hurry.set()

    def _run(self) -> None:
        past, self.past = self.past, ()
        for earlier in past:
            self._see(earlier)
        del past
        while (event := self._queue.get()) is not _STOP:
            self._see(event)
            if isinstance(event, Report):
                self._rest()
        self._call(self._end)
        self._ended.set()

    def _rest(self) -> None:
        """Let further reports gather: each time a thread wakes up, it costs the run's own some time."""
        self._hurry.clear()
        if self._queue.empty():
            self._hurry.wait(REST)

    def _see(self, event: Event) -> None:
        if isinstance(event, PhaseChanged):
            if event.n <= self._seen:
                return  # told again, since an interrupt landed where it was told
            self._seen = event.n
        self._call(self.observer, event)

    def _end(self) -> None:
        on_end = getattr(self.observer, "on_end", None)
        if callable(on_end):
            on_end(self.lost)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            # Whatever it is, on this thread it is an observer's failure and nothing more.
            self.errors += 1
            if self.errors == 1:
                _complain(f"an observer raised {type(error).__name__}: {message_of(error)}; the run goes on")

    def finish(self, seconds: float) -> bool:
        """Let the observer see what is queued, then end its thread.

        Args:
            seconds: How long to wait for it.

        Returns:
            Whether it ended in time; if not, its daemon thread is left behind, and ends as soon as
            the observer lets it.
        """
        self._queue.put(_STOP)
        self._hurry.set()
        # Not by `join` alone: interrupted in it, Python 3.11 takes a thread that runs for one that ended.
        if self._ended.wait(max(seconds, 0.001)):
            self._thread.join()
        return self._ended.is_set()

    def close(self) -> None:
        """Stop observing; the observer still sees what is queued. It may be called by the observer itself."""
        bus, self.bus = self.bus, None
        if bus is not None:
            bus.remove(self)
        if threading.current_thread() is self._thread:
            self._queue.put(_STOP)
            self._hurry.set()
        else:
            self.finish(1.0)


def _complain(text: str) -> None:
    # On an observer's thread a warning that is an error, or that cannot be written, would kill the
    # thread, unheard.
    with suppress(BaseException):
        warnings.warn(text, ObserverWarning, stacklevel=2)


def _name_of(observer: Observer) -> str:
    with suppress(Exception):
        name = getattr(observer, "__name__", None)
        if isinstance(name, str):
            return name
    return type(observer).__name__


def _own(event: Event) -> Event:
    """The event, sharing nothing that whoever gets it could change for others."""
    if isinstance(event, Report):
        return Report(event.step, event.epoch, dict(event.metrics), event.seconds)
    return event


class Bus:
    """The observers of one run. Whoever subscribes late is first told what has happened."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        """Observers that raised, lost events or did not end: for the outcome's notes."""
        self._subscriptions: list[Subscription] = []
        self._past: list[Event] = []
        self._over = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._lock = threading.Lock()

    def subscribe(self, observer: Observer, capacity: int = 1024) -> Subscription:
        """Add an observer; it gets all events so far, then those to come.

        Raises:
            TaskError: The capacity is not a whole number of at least 1.
        """
        with self._lock:
            subscription = Subscription(observer, capacity, tuple(map(_own, self._past)), self)
            self._threads.add(subscription._thread)
            if not self._over:
                self._subscriptions.append(subscription)
                return subscription
        subscription.finish(0.0)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Tell this observer no more."""
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def is_observing(self) -> bool:
        """Whether this is called on the thread of one of the observers."""
        with self._lock:
            return threading.current_thread() in self._threads

    def publish(self, event: Event) -> None:
        """Give an event to every observer's queue; never waits."""
        with self._lock:
            self._past.append(_own(event))
            for subscription in self._subscriptions:
                subscription.put(_own(event))

    def finish(self, seconds: float) -> None:
        """End all observers' threads, together within `seconds`. After an interrupt, call it again."""
        end = time.monotonic() + seconds
        with self._lock:
            self._over = True
        while self._subscriptions:
            subscription = self._subscriptions[0]
            ended = subscription.finish(end - time.monotonic())
            self._subscriptions.pop(0)
            name = subscription._name
            if not ended:
                self.failed.append(f"observer {name} is blocked; its thread was left behind")
            if subscription.errors:
                self.failed.append(f"observer {name} raised {subscription.errors} time(s)")
            if subscription.lost:
                self.failed.append(f"observer {name} was too slow and lost {subscription.lost} event(s)")
