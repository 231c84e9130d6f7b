"""Checks for anybody's tests: what may be left behind, on a device and in the process.

    with testing.device_empty():
        train_one_epoch()

They compare and repair nothing. As fixtures of pytest they come with the plug-in; here are the context
managers, a decorator for each example under Hypothesis's `@given`, and a mix-in for its state machines,
since a fixture of function scope runs once for all examples.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, ParamSpec, TypeAlias, TypeVar

from . import leaks, process_state
from .errors import CheckMisused, ProcessChanged, TensorsLeft
from .leaks import Leak, render
from .process_state import Allowed
from .standing import Counts

__all__ = [
    "Allowed",
    "CheckMisused",
    "CleanMachine",
    "Leak",
    "ProcessChanged",
    "TensorsLeft",
    "device_empty",
    "each_example",
    "process_clean",
    "sim_device",
]

Check: TypeAlias = Callable[[], AbstractContextManager[Any]]
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def device_empty(
    counts: Counts | None = None, *, allowed: Sequence[Allowed] = (), seconds: float = leaks.SECONDS
) -> Iterator[None]:
    """What is on a device at the end of the block was there at its beginning.

    An error of the block is let through without a judgement: its traceback holds the block's variables.

    Args:
        counts: Which tensors are looked at; by default those on any device other than the host.
        allowed: What may stay besides, by entries of what `tensor` with a pattern for the owner's path.
        seconds: For the search for owners, if something is left.

    Raises:
        TensorsLeft: Something is left, with its owners.
    """
    before = leaks.census(counts)
    yield
    left = leaks.since(before, allowed, seconds)
    if leaks.blamed(left):
        raise TensorsLeft(left, render(left))


@contextmanager
def process_clean(*, allowed: Sequence[Allowed] = (), seconds: float = 0.5) -> Iterator[None]:
    """After the block the process is as it was: threads, descriptors, environment, switches of libraries, ...

    An error of the block is let through without a judgement.

    Args:
        allowed: What may differ besides `process_state.ALLOWED`.
        seconds: How long to wait for threads and children that are ending.

    Raises:
        ProcessChanged: It is not.
    """
    before = process_state.snapshot()
    yield
    found = process_state.settled(before, seconds, (*process_state.ALLOWED, *allowed))
    if found:
        raise ProcessChanged(found)


@contextmanager
def sim_device(*, stacks: bool = True) -> Iterator[Any]:
    """The simulated device `sim:0`, which needs no hardware. It stays installed: torch cannot undo that.

    Args:
        stacks: Record within where each block is made, for the reports.

    Returns:
        The package `interlock.backends.simulator`, to look at the device's memory and to plant faults.

    Raises:
        DeviceUnavailable: It cannot be installed here, and why.
    """
    from interlock.backends import simulator

    simulator.install()
    with ExitStack() as stack:
        if stacks:
            stack.enter_context(simulator.stacks())
        yield simulator


def each_example(*checks: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Checks around every single example: stands below `@given`, right above the function.

        @given(st.integers(0, 10))
        @each_example(device_empty, process_clean)
        def test_training(steps): ...

    Args:
        checks: Functions that make a context manager; the first one is the outermost.

    Raises:
        CheckMisused: It stands above `@given`, where it would check once for all examples, or around a
            coroutine or generator, whose body runs later.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if hasattr(function, "hypothesis"):
            raise CheckMisused(
                "each_example stands above @given, where it would check once for all examples; put it below, "
                "right above the function"
            )
        if any(is_it(function) for is_it in _LATER):
            raise CheckMisused(
                f"each_example is around {function.__qualname__}, whose body runs only later; use the "
                "context managers inside it"
            )

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            with ExitStack() as stack:
                for check in checks:
                    stack.enter_context(check())
                return function(*args, **kwargs)

        return checked

    return decorate


_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class CleanMachine:
    """Mix-in for Hypothesis's `RuleBasedStateMachine`: each run of the machine leaves nothing behind.

        class Training(CleanMachine, RuleBasedStateMachine): ...

    It must stand before the machine in the list of bases. What the machine itself holds, in attributes and
    bundles, goes with it and is not blamed; a `teardown` of your own calls `super().teardown()` last.

    Attributes:
        checks: Functions that make a context manager.
    """

    checks: ClassVar[Sequence[Check]] = (device_empty, process_clean)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        after = cls.__mro__[cls.__mro__.index(CleanMachine) + 1 :]
        if not any(hasattr(base, "teardown") for base in after):
            raise CheckMisused(
                f"{cls.__name__}: CleanMachine must stand before RuleBasedStateMachine in the list of bases, "
                "or its teardown would never run"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        entered = ExitStack()
        for check in self.checks:
            entered.enter_context(check())
        super().__init__(*args, **kwargs)
        self._entered = entered
        self._own = frozenset({*vars(self), "_own"})

    def teardown(self) -> None:
        """Hypothesis calls it after each run."""
        entered, own = self._entered, self._own
        error = sys.exc_info()[1]
        super().teardown()  # type: ignore[misc]
        for name in set(vars(self)) - own:
            delattr(self, name)
        for name in ("bundles", "names_to_values"):
            held = vars(self).get(name)
            if isinstance(held, dict):
                held.clear()
        if error is None:
            entered.close()
        # Otherwise the rule's error is what is to be seen, and its traceback holds what the rule held.
