"""Leases on what a process has only once: generators, determinism, default dtype, thread count.

Runs that want the same value share it; one that wants another waits, or is refused with the reason.
Who comes first remembers what the process had, and who leaves last puts exactly that back. The
random generators are never shared: two runs that draw from them would spoil each other's numbers.

A request gets all that it asks for at once, or nothing, and nothing that would hold up one that has
waited for longer: so no two requests can wait for each other, and none waits for ever.

As with a release stack, what is needed to give back is noted before anything is changed, and a
lease ends only when all of it was put back: `give_back` can be repeated after an interrupt.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from .errors import LeaseRefused, RunInUse, TaskError
from .evidence import add_note
from .switches import SWITCHES, RandomSource, Seeds, States, Switch, host_sources, raise_first

WhenTaken = Literal["wait", "refuse"]
PATIENCE = 0.05
"""Seconds between two looks at whether a request that waits can be granted, or its run was cancelled."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ProcessSettings:
    """What a run wants of its process; `None` takes what is there, and shares it with anybody.

    Attributes:
        seed: Seeds the random generators, and makes them this run's alone.
        deterministic: Whether torch may use deterministic algorithms only.
        dtype: What floating-point tensors are made of when nobody says.
        threads: How many threads an operator may use, on the run's own thread and on new ones. The
            threads that have used torch before keep theirs.

    Raises:
        TaskError: A value that the process cannot have; all of them are named.
    """

    seed: int | None = None
    deterministic: bool | None = None
    dtype: torch.dtype | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.seed is not None and not (_whole(self.seed) and 0 <= self.seed < 2**64):
            problems.append(f"seed must be a whole number from 0 to 2**64 - 1, got {self.seed!r}")
        if type(self.deterministic) not in (bool, type(None)):
            problems.append(f"deterministic must be True, False or None, got {self.deterministic!r}")
        if self.dtype is not None and self.dtype not in _DTYPES:
            problems.append(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {self.dtype!r}")
        if self.threads is not None and not (_whole(self.threads) and self.threads >= 1):
            problems.append(f"threads must be a whole number of at least 1, got {self.threads!r}")
        if problems:
            raise TaskError("; ".join(problems))

    def wanted(self) -> dict[str, Any]:
        """Setting -> value, of those that are asked for."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Suspended:
    """What a run that gave everything back needs to go on as if it had not.

    Attributes:
        settings: What it had asked for.
        name: The run's.
        states: Its random generators, as it left them.
    """

    settings: ProcessSettings
    name: str
    states: States = field(repr=False)


@dataclass(eq=False)
class _Lease:
    owner: object
    name: str
    settings: ProcessSettings
    seeds: Seeds
    thread: int = 0
    complete: bool = False
    left: dict[str, Any] = field(default_factory=dict)
    """Setting -> value, of those that were not given back."""
    own: dict[str, Any] = field(default_factory=dict)
    """Setting -> what its own thread had."""

    def __post_init__(self) -> None:
        self.thread = threading.get_ident()
        self.left = self.settings.wanted()

    def switch(self, setting: str) -> Switch:
        return self.seeds if setting == "seed" else SWITCHES[setting]


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held: list[_Lease] = []
        self.queue: list[_Lease] = []
        """Those that wait; who came first stands first."""
        self.before: dict[str, Any] = {}
        """Setting -> what the process had before the first of those who hold it."""
        self.parked: list[tuple[object, Suspended]] = []
        """Those that are being suspended, or were."""

    def of(self, owner: object) -> _Lease | None:
        return next((lease for lease in self.held if lease.owner is owner), None)

    def grant(self, lease: _Lease, when_taken: WhenTaken) -> bool:
        """Take all that the lease asks for, if nothing stands in the way."""
        obstacle = self._obstacle(lease)
        if obstacle is not None:
            setting, other = obstacle
            if when_taken == "refuse":
                has = "holds" if other in self.held else "waits for"
                raise LeaseRefused(
                    lease.name, setting, lease.left[setting], other.left[setting], other.name, has
                )
            if lease not in self.queue:
                self.queue.append(lease)
            return False
        self.held.append(lease)
        if lease in self.queue:
            self.queue.remove(lease)
        for setting, wanted in lease.left.items():
            switch = lease.switch(setting)
            shared = setting in self.before
            if not shared:
                self.before[setting] = switch.read()
            beside = self._beside(lease, setting)
            if beside is not None:
                lease.own[setting] = beside.own[setting]
            else:
                lease.own[setting] = switch.read_own(wanted, self.before[setting] if shared else None)
            # Also if it is shared: whoever was first may have been interrupted half way.
            switch.write(wanted)
        lease.complete = True
        return True

    def refuse_waiting_for_itself(self, lease: _Lease) -> None:
        """A run that was begun in a hook of another one cannot wait for that one.

        Raises:
            RunInUse: What is in its way is held on this very thread.
        """
        obstacle = self._obstacle(lease)
        if obstacle is not None and obstacle[1].thread == lease.thread and obstacle[1] in self.held:
            setting, other = obstacle
            raise RunInUse(
                f"run '{lease.name}' would wait for itself: run '{other.name}', in one of whose hooks it was "
                f"begun, holds the process's {setting}. Ask for the same value, or begin it outside of it"
            )

    def _obstacle(self, lease: _Lease) -> tuple[str, _Lease] | None:
        """The first setting that cannot be had, and the lease, held or waiting for longer, that is why."""
        place = self.queue.index(lease) if lease in self.queue else len(self.queue)
        for other in (*self.held, *self.queue[:place]):
            for setting in () if other.owner is lease.owner else lease.left:
                if setting not in other.left:
                    continue
                if setting == "seed" or lease.left[setting] != other.left[setting]:
                    return setting, other
        return None

    def release(self, owner: object) -> list[BaseException]:
        """Put back all that nobody else holds; what fails stays, and can be tried again."""
        self.queue[:] = [lease for lease in self.queue if lease.owner is not owner]
        errors: list[BaseException] = []
        for lease in [lease for lease in self.held if lease.owner is owner]:
            lease.complete = False
            for setting in reversed([*lease.left]):
                try:
                    self._put_back(lease, setting)
                    lease.left.pop(setting)
                except BaseException as error:
                    errors.append(error)
            if not lease.left:
                self.held.remove(lease)
        return errors

    def _put_back(self, lease: _Lease, setting: str) -> None:
        switch = lease.switch(setting)
        shared = any(setting in other.left for other in self.held if other is not lease)
        if setting in lease.own:
            if lease.thread == threading.get_ident() and self._beside(lease, setting) is None:
                value = lease.left[setting] if shared else self.before[setting]
                switch.restore_own(lease.own[setting], value)
            # Before the process's part: once that is put back, this must not be done again.
            del lease.own[setting]
        if setting in self.before and not shared:
            switch.restore(self.before[setting])
            del self.before[setting]

    def _beside(self, lease: _Lease, setting: str) -> _Lease | None:
        """Another lease on the setting that was taken on the same thread."""
        same = (other for other in self.held if other is not lease and other.thread == lease.thread)
        return next((other for other in same if setting in other.own), None)


_registry = _Registry()
_hooked = False


def take(
    settings: ProcessSettings,
    owner: object,
    *,
    when_taken: WhenTaken,
    check: Callable[[], None],
    name: str,
    sources: Sequence[RandomSource] = (),
) -> None:
    """Take a lease on all that a run wants of its process, and set it, on the run's own thread.

    Taking the same again, before it was given back, does nothing.

    Args:
        settings: What it wants.
        owner: Stands for the run; `give_back` takes the same object. Give back after an error or an
            interrupt too.
        when_taken: `wait` waits while another run has another value, `refuse` raises at once.
        check: Called about every 50 ms while it waits; raises to give up, as `Cancelled` of a run
            that was.
        name: The run's, for messages.
        sources: Generators of devices, to be seeded beside those of the host.

    Raises:
        LeaseRefused: Another run has another value, or waits for one. Nothing was taken.
        RunInUse: The owner holds a lease on something else.
        TaskError: `when_taken` is neither.
        BaseException: What `check` or a setter raised. Everything is as it was.
    """
    seeds = Seeds((*host_sources(), *sources) if settings.seed is not None else ())
    _take(_Lease(owner, name, settings, seeds), when_taken, check)


def give_back(owner: object) -> None:
    """End a run's lease, and its wait for one; nothing happens if there is none.

    What only it held becomes what it was before. Call it on the thread that took: only there can
    that thread's own thread count be put back.

    Args:
        owner: As given to `take`.

    Raises:
        BaseException: The first error of a setter; all others were called, and it can be tried again.
    """
    registry = _registry
    with registry.lock:
        errors = registry.release(owner)
        registry.parked[:] = [entry for entry in registry.parked if entry[0] is not owner]
    raise_first(errors)


def suspend(owner: object) -> Suspended:
    """Give everything back for a while. Can be repeated after an interrupt.

    Args:
        owner: As given to `take`.

    Returns:
        What `resume` needs.

    Raises:
        RunInUse: It holds no lease.
        BaseException: As `give_back`.
    """
    registry = _registry
    with registry.lock:
        token = next((token for parked, token in registry.parked if parked is owner), None)
        if token is None:
            lease = registry.of(owner)
            if lease is None or not lease.complete:
                raise RunInUse(
                    "there is no lease to suspend: the run has taken none, or gave it back; take first"
                )
            token = Suspended(lease.settings, lease.name, lease.seeds.read())
            registry.parked.append((owner, token))
        errors = registry.release(owner)
    raise_first(errors)
    return token


def resume(owner: object, token: Suspended, *, when_taken: WhenTaken, check: Callable[[], None]) -> None:
    """Take again what was suspended: the generators go on where the run left them.

    Args:
        owner: Stands for the run.
        token: From `suspend`. It can be used again after an error or an interrupt.
        when_taken: As for `take`.
        check: As for `take`.

    Raises:
        BaseException: As `take`.
    """
    seeds = Seeds(tuple(source for source, _ in token.states), token.states)
    _take(_Lease(owner, token.name, token.settings, seeds), when_taken, check)


def _take(lease: _Lease, when_taken: WhenTaken, check: Callable[[], None]) -> None:
    global _hooked
    if when_taken not in get_args(WhenTaken):
        raise TaskError(f"when_taken must be one of {get_args(WhenTaken)}, got {when_taken!r}")
    if not _hooked:
        os.register_at_fork(after_in_child=_forget_all)
        _hooked = True
    registry = _registry
    with registry.lock:
        mine = registry.of(lease.owner)
        if mine is not None and mine.complete:
            if mine.settings == lease.settings:
                return
            raise RunInUse(
                f"run '{lease.name}' holds a lease on {mine.settings}: give it back before taking "
                f"{lease.settings}"
            )
    try:
        # What an earlier attempt, interrupted, may have left.
        give_back(lease.owner)
        while True:
            with registry.lock:
                if registry.grant(lease, when_taken):
                    return
            check()
            with registry.lock:
                registry.refuse_waiting_for_itself(lease)
            time.sleep(PATIENCE)
    except BaseException as error:
        try:
            give_back(lease.owner)
        except BaseException as later:
            add_note(error, f"interlock: and giving the lease back raised {type(later).__name__}: {later}")
        raise


def _forget_all() -> None:
    """In a forked child there are none of the runs, and the lock may have been held at that moment."""
    global _registry
    _registry = _Registry()
