"""Many runs in one process, a third of them failing: nothing grows, and no garbage collector is needed."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import process_state
from tools.small import BACKENDS, batches, loss_of, net, task

import interlock as il
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import Fault, faulty

RUNS = 200
CLASSES = {"cpu": CpuAdapter, "double": ReplacingDouble}
SLACK = 24 * 2**20
"""Bytes that the process may grow by: what the allocator keeps, of some 40 MiB that the runs pass through."""

both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each new thread would else start OpenMP's pool anew, which takes ten times as long as the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Planned(Exception):
    pass


def fails(*_: Any) -> Any:
    raise Planned


class FailingData:
    def __iter__(self) -> Iterator[Any]:
        yield from batches(1)
        raise Planned


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def late(model: Any, batch: Any) -> Any:
    """Fails in the second step, with a graph in its frames."""
    loss = loss_of(model, batch)
    if model.seen > 5:
        raise Planned
    return loss


FAILING: list[tuple[str, dict[str, Any], tuple[Fault, ...]]] = [
    ("model", {"model": fails}, ()),
    ("optimizer", {"optimizer": fails}, ()),
    ("scheduler", {"scheduler": fails}, ()),
    ("loss", {"loss": late}, ()),
    ("metrics", {"metrics": fails}, ()),
    ("data", {}, ()),
    *(
        (call, {}, (Fault(call, "after", error=Planned),))
        for call in ("acquire", "place", "leftovers", "free")
    ),
]


def one_run(backend: str, number: int, how: str = "start") -> il.Outcome:
    """The nth run: every third one fails, each time elsewhere."""
    changes: dict[str, Any] = {}
    faults: tuple[Fault, ...] = ()
    data: Any = batches(2)
    if number % 3 == 2:
        name, changes, faults = FAILING[number // 3 % len(FAILING)]
        data = FailingData() if name == "data" else data
    what = task(**{"optimizer": adam, "scheduler": scheduler, **changes})
    adapter = faulty(CLASSES[backend], *faults) if faults else CLASSES[backend]()
    return il.Engine(adapter).start(what, data, validate=batches(1)).wait(60)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """No garbage collection within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@both
def test_nothing_grows(backend: str):
    one_run(backend, 0)
    failed = 0
    with no_collector():
        before, tensors = process_state.snapshot(), live_tensors()
        threads = threading.active_count(), system_threads()
        resident = 0
        for number in range(RUNS):
            outcome = one_run(backend, number)
            failed += outcome.status == "failed"
            assert outcome.verdict == "clean"
            assert not outcome.residue.bytes  # `None` where the measurement was what failed
            assert isinstance(outcome.error, Planned) == (number % 3 == 2)
            del outcome
            if number == RUNS // 10:
                resident = resident_bytes()
        grown = resident_bytes() - resident
        assert live_tensors() - tensors == 0
        assert (threading.active_count(), system_threads()) == threads
        # Children, descriptors, and all else that the fixture looks at.
        assert process_state.settled(before) == []
    assert failed == RUNS // 3
    assert grown < SLACK, f"{grown / 2**20:.1f} MiB"


# What dies with the last reference to it


def watched(backend: str, **changes: Any) -> tuple[il.Run, dict[str, weakref.ref[Any]]]:
    """A run that is over, and weak references to its parts."""
    seen: dict[str, weakref.ref[Any]] = {}

    def build() -> Any:
        model = net()
        seen["model"] = weakref.ref(model)
        seen["parameter"] = weakref.ref(model.body.weight)
        return model

    def build_optimizer(model: Any) -> Any:
        optimizer = adam(model)
        seen["optimizer"] = weakref.ref(optimizer)
        return optimizer

    what = task(**{"model": build, "optimizer": build_optimizer, **changes})
    seen["task"] = weakref.ref(what)
    engine = Watching(backend)
    run = engine.start(what, batches(2), validate=batches(1))
    seen["outcome"] = weakref.ref(run.wait(60))
    seen["session"] = engine.session
    return run, seen


class Watching(il.Engine):
    """An engine that remembers weakly what it made."""

    session: weakref.ref[Any]

    def _session(self, *args: Any) -> Any:
        made = super()._session(*args)
        self.session = weakref.ref(made)
        return made


def alive(seen: dict[str, weakref.ref[Any]]) -> set[str]:
    return {name for name, reference in seen.items() if reference() is not None}


@both
def test_a_handle_keeps_the_outcome_and_nothing_else(backend: str):
    watched(backend)
    with no_collector():
        run, seen = watched(backend)
        assert alive(seen) == {"model", "parameter", "optimizer", "outcome"}
        outcome = run.wait()
        del run
        assert alive(seen) == {"model", "parameter", "optimizer", "outcome"}
        model = outcome.model
        del outcome
        assert alive(seen) == {"model", "parameter"}
        del model
        assert alive(seen) == set()


@both
def test_fit_keeps_the_outcome_and_nothing_else(backend: str):
    reference: list[weakref.ref[Any]] = []
    with no_collector():
        for number in range(2):
            outcome = il.Engine(backend).fit(task(optimizer=adam), batches(2))
            if number:
                reference = [weakref.ref(thing) for thing in (outcome, outcome.model, outcome.optimizer)]
            del outcome
    assert [thing() for thing in reference] == [None, None, None]


@both
@pytest.mark.parametrize("hook", ["loss", "metrics", "scheduler"])
def test_an_error_that_is_kept_keeps_nothing_of_the_run(backend: str, hook: str):
    changes: dict[str, Callable[..., Any]] = {hook: late if hook == "loss" else fails}
    watched(backend, **changes)
    with no_collector():
        run, seen = watched(backend, **changes)
        error = run.exception()
        assert isinstance(error, Planned)
        assert error.__traceback__ is not None
        assert "model" in alive(seen), "the outcome of a failed run has the model"
        del run
        assert alive(seen) == set()
        assert isinstance(error, Planned)


@both
def test_an_error_that_was_raised_keeps_nothing_of_the_run(backend: str):
    watched(backend, loss=late)
    with no_collector():
        run, seen = watched(backend, loss=late)
        with pytest.raises(Planned) as raised:
            run.result()
        del run
        assert alive(seen) == set()
        assert raised.value.__traceback__ is not None


@both
def test_fit_that_raises_keeps_nothing_of_the_run(backend: str):
    seen: list[weakref.ref[Any]] = []

    def build() -> Any:
        model = net()
        seen.append(weakref.ref(model))
        return model

    with no_collector():
        for _ in range(2):
            with pytest.raises(Planned) as raised:
                il.Engine(backend).fit(task(model=build, optimizer=adam, loss=late), batches(2))
        assert [reference() for reference in seen] == [None, None]
        assert raised.value.__traceback__ is not None
