"""Invariant suites for your own project: whole runs by Hypothesis, and every transition by pytest.

    from interlock.specs.suite import SpecSuite, machine_for

    TestRuns = machine_for("cpu", my_task).TestCase   # random runs of your task, struck by faults

    class TestLifecycle(SpecSuite):                    # each transition, each pair, each illegal event
        backend = "cpu"

It needs Hypothesis, and nothing else needs it. Nothing is registered when it is imported: profiles and
random generators are, when you say so.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from interlock import Task
from interlock.backends.adapter import Adapter
from interlock.backends.registry import adapter_class

from .compose import compose
from .errors import BrokenPromise, MissingExtra, SpecError
from .lifecycles import TRAINING
from .suite_device import RunFault, Watch
from .suite_life import LEASES, Exit, Life
from .suite_operations import added
from .suite_paths import (
    Case,
    SpecSuite,
    covering_paths,
    illegal_pairs_of,
    pairs_of,
    transitions_of,
)
from .suite_plain import Plain
from .suite_setup import Setup, built_in, built_in_batches, preamble

try:
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

    from .suite_draws import EXIT_POLICIES, events, faults, in_play
    from .suite_profiles import register_generators, register_profiles
except ImportError as error:
    raise MissingExtra("interlock.specs.suite", "hypothesis", "test") from error

__all__ = [
    "BrokenPromise",
    "Case",
    "Plain",
    "RunMachine",
    "SpecSuite",
    "covering_paths",
    "illegal_pairs_of",
    "machine_for",
    "pairs_of",
    "register_generators",
    "register_profiles",
    "transitions_of",
]


def _is_running(machine: RunMachine) -> bool:
    return machine.life is not None and not machine.life.closed


def _is_over(machine: RunMachine) -> bool:
    return machine.life is not None and machine.life.closed


class RunMachine(RuleBasedStateMachine):
    """Random runs of one task on one backend; `machine_for` makes subclasses.

    Random walks alone find little, since the first fault absorbs them. So each example draws which
    optional events are in play at all; the way to training is always open, and the ends are rare. A run
    that is over is followed by another one on the same device, which must be as good as the first.

    Attributes:
        setup: What is run where.
        preamble: Prints the imports that a printed example needs.
        optional: The events in play.
        life: The present run, once there is one.
        fired: How often each event was fired in it so far.
    """

    setup: ClassVar[Setup]
    preamble: ClassVar[Callable[[], str]]

    def __init__(self) -> None:
        super().__init__()
        if hypothesis.currently_in_test_context():
            hypothesis.note(type(self).preamble())
        self.optional: list[str] = []
        self.life: Life | None = None
        self.fired: Counter[str] = Counter()
        self._watch = Watch(self.setup.make())
        self._failed = False

    def running(self) -> Life:
        """The present run.

        Raises:
            SpecError: There is none yet.
        """
        if self.life is None:
            raise SpecError("the run under test", ["there is none yet: call `begin` first"])
        return self.life

    @initialize(
        optional=st.runner().flatmap(in_play),
        exit=st.sampled_from(EXIT_POLICIES),
        fault=faults(),
        lease=st.sampled_from(sorted(LEASES)),
    )
    def begin(
        self,
        optional: list[str] = [],  # noqa: B006 - never changed; so it prints as what Hypothesis drew
        exit: Exit = "offload",  # noqa: A002 - named as the engine's setting
        fault: tuple[str, str, int, str, int] | None = None,
        lease: str = "",
    ) -> None:
        """Open the first run.

        Args:
            optional: The events in play, beside those that lead to training.
            exit: Its exit policy.
            fault: Where a fault strikes it: call, moment, which call, error, how many calls.
            lease: What it has on lease of the process: "", "seed" or "threads".
        """
        self.optional = list(optional)
        self._open(exit, fault, lease)

    @precondition(_is_running)
    @rule(event=st.runner().flatmap(events))
    def fire(self, event: str) -> None:
        """Fire an event, and look at everything. What is illegal must be refused, and change nothing.

        Args:
            event: Of the spec, whether it is legal or not.
        """
        self.fired[event] += 1
        self._guarded(partial(self.running().fire, event))

    @precondition(_is_over)
    @rule(exit=st.sampled_from(EXIT_POLICIES), fault=faults(), lease=st.sampled_from(sorted(LEASES)))
    def restart(
        self,
        exit: Exit = "offload",  # noqa: A002 - named as the engine's setting
        fault: tuple[str, str, int, str, int] | None = None,
        lease: str = "",
    ) -> None:
        """Open another run on the same device; arguments as for `begin`."""
        self._let_go()
        self._open(exit, fault, lease)

    def teardown(self) -> None:
        """Leave the run's block, and look at everything a last time."""
        life = self.life
        if life is None:
            return
        self.life = None
        if self._failed:
            life.abort()
            return
        try:
            life.leave()
        except BaseException:
            life.abort()
            raise
        life.drop()

    def _open(self, exit: Exit, fault: tuple[str, str, int, str, int] | None, lease: str) -> None:  # noqa: A002
        if self._watch.lost:
            # Nothing may touch that device any more.
            self._watch = Watch(self.setup.make())
        self.fired = Counter()
        self.life = Life(self.setup, self._watch, exit, None if fault is None else RunFault(*fault), lease)

    def _let_go(self) -> None:
        """What a run left on the device on purpose goes, before the next one counts."""
        if self.life is not None:
            self.life.drop()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._failed = True
            raise


def machine_for(
    backend: str | Callable[[], Adapter] = "cpu",
    task: Task | None = None,
    *,
    data: Iterable[Any] | None = None,
    tolerance: float = 0.0,
    deadline: float = 30.0,
) -> type[RunMachine]:
    """A Hypothesis state machine that drives runs of a task on a backend: `.TestCase` is the test.

    Args:
        backend: A name, or a function (an adapter's class, for instance) that makes an adapter.
        task: What is trained; a small built-in one if left out. Its model is built anew for each run, with
            torch's generator at seed 0; it must be the same each time, and `compile` is left out.
        data: Batches on the host; at most eight are used. The task's own if left out.
        tolerance: By how much a weight may differ between a run and an undisturbed one of as many steps:
            0 where the device computes the same each time.
        deadline: Seconds for each backend call on the way out.

    Returns:
        A subclass of `RunMachine`. Its settings are those of the Hypothesis profile that is loaded.

    Raises:
        UnknownName: No such backend.
        SpecError: There is no data.
    """
    make: Callable[[], Adapter] = adapter_class(backend) if isinstance(backend, str) else backend
    adapter = make()
    what = built_in() if task is None else task
    given = data if data is not None else built_in_batches() if task is None else what.load().train
    batches = tuple(islice(given, 8))
    if not batches:
        raise SpecError(f"the suite of task '{what.name}'", ["it has no batches: pass `data=` with some"])
    spec = compose(TRAINING, adapter.monitor)
    setup = Setup(make, what, batches, spec, tolerance, deadline, added(spec, adapter.monitor))
    name = "RunsOn_" + re.sub(r"\W", "_", adapter.name)
    module: str = sys._getframe(1).f_globals.get("__name__", "__main__")
    printed = partial(preamble, name, module, backend, task, data, tolerance)
    members = {"setup": setup, "preamble": staticmethod(printed), "__module__": module}
    members["__doc__"] = f"Runs of '{what.name}' on {adapter.name}."
    return type(name, (RunMachine,), members)
