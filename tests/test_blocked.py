"""What blocks for ever: a backend's copy, a loader, an observer, a program that ends in mid-run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.runs import environment
from tools.small import batches, net, same, task, values

import interlock as il
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import Fault, faulty

DEADLINE = 0.3


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.fixture
def block() -> Iterator[threading.Event]:
    """What a copy or loader waits for; at the end it is let go, and the threads behind it end."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threads_of("interlock"):
        thread.join(10)


# A copy that never returns


@pytest.mark.parametrize(
    ("nth", "abandoned"), [(1, ("optimizer",)), (5, ("model",))], ids=["of the optimizer", "of the model"]
)
def test_a_copy_that_blocks_is_given_up(block: threading.Event, nth: int, abandoned: tuple[str, ...]):
    adapter = faulty(ReplacingDouble, Fault("fetch", nth=nth, block=block))
    began = time.monotonic()
    outcome = il.Engine(adapter, deadline=DEADLINE).start(task(optimizer=momentum), batches()).wait(30)
    assert DEADLINE < time.monotonic() - began < 15
    assert (outcome.status, outcome.verdict, outcome.abandoned) == ("failed", "abandoned", abandoned)
    assert not outcome.ok
    assert outcome.steps == 6
    assert outcome.history[-1].phase == "closed"
    error = outcome.error
    assert isinstance(error, il.errors.DeadlinePassed)
    assert "home did not return within 0.3 s and was abandoned" in str(error)
    assert "fault.block.wait()" in error.stack
    assert "copy_state" in error.stack if abandoned == ("optimizer",) else "copy_model" in error.stack
    assert outcome.failure is not None
    assert error.stack.splitlines()[-1] in outcome.failure.traceback


def test_everything_blocks(block: threading.Event):
    adapter = faulty(ReplacingDouble, Fault("fetch", times=1000, block=block))
    run = il.Engine(adapter, deadline=DEADLINE).start(task(optimizer=momentum), batches())
    outcome = run.wait(30)
    assert sorted(outcome.abandoned) == ["model", "optimizer"]
    assert [failure.type for failure in outcome.errors] == ["interlock.errors.DeadlinePassed"]
    with pytest.raises(il.errors.DeadlinePassed) as raised:
        run.result()
    assert raised.value is outcome.error


@pytest.mark.parametrize("call", ["sync", "leftovers", "free"])
def test_whatever_else_blocks_on_the_way_out(block: threading.Event, call: str):
    adapter = faulty(ReplacingDouble, Fault(call, block=block))
    outcome = il.Engine(adapter, deadline=DEADLINE).start(task(), batches()).wait(30)
    assert outcome.status == "failed"
    assert isinstance(outcome.error, il.errors.DeadlinePassed)
    assert outcome.history[-1].phase == "closed"
    assert outcome.abandoned == (("device",) if call == "free" else ())
    assert outcome.residue.known == (call != "leftovers")
    assert outcome.residue.bytes == (None if call == "leftovers" else 0)
    assert same(values(outcome.model), values(il.Engine("double").fit(task(), batches()).model))


@pytest.mark.parametrize("nth", [1, 5], ids=["of the optimizer", "of the model"])
def test_a_copy_that_comes_too_late_touches_nothing(block: threading.Event, nth: int):
    model = net()
    before, objects = values(model), dict(model.named_parameters())
    adapter: Any = faulty(ReplacingDouble, Fault("fetch", nth=nth, block=block))
    outcome = (
        il.Engine(adapter, deadline=DEADLINE).start(task(model=model, optimizer=momentum), batches()).wait(30)
    )
    assert outcome.model is model
    at_the_end = values(model)
    late = threads_of("interlock bringing")
    assert len(late) == 1
    block.set()
    for thread in late:
        thread.join(10)
        assert not thread.is_alive()
    assert same(values(model), at_the_end)
    assert all(parameter is objects[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(adapter.resident(tensor) for tensor in (*model.parameters(), *model.buffers()))
    # A model that is abandoned is as it was before the run; any other has been trained.
    assert same(at_the_end, before) == ("model" in outcome.abandoned)
    del late, thread
    assert adapter.allocated == 0, "the late copy kept something on the device"


def test_a_model_that_was_abandoned_can_be_trained_again(block: threading.Event):
    model = net()
    adapter = faulty(ReplacingDouble, Fault("fetch", block=block))
    assert il.Engine(adapter, deadline=DEADLINE).start(task(model=model), batches()).wait(30).abandoned
    again = il.Engine("double").fit(task(model=model), batches())
    assert same(values(again.model), values(il.Engine("double").fit(task(), batches()).model))


# A loader that never returns


class Stuck:
    """Two batches, and then a wait."""

    def __init__(self, block: threading.Event) -> None:
        self.block = block
        self.waiting = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        yield from batches(2)
        self.waiting.set()
        self.block.wait(60)


@pytest.mark.parametrize("backend", ["cpu", "double"])
def test_a_loader_that_blocks_is_named(block: threading.Event, backend: str):
    data = Stuck(block)
    run = il.Engine(backend).start(task(), data)
    assert data.waiting.wait(30)
    seen = run.snapshot()
    assert (seen.phase, seen.step) == ("training", 2)
    assert seen.doing.startswith("in loader")
    assert "self.block.wait(60)" in seen.stack
    with pytest.raises(il.errors.NotFinished, match=r"after step 2: in loader, \d+\.\d s since"):
        run.wait(0.05)
    run.stop()
    assert run.snapshot().doing.startswith("stopping: in loader")
    run.cancel()
    assert run.snapshot().doing.startswith("cancelling: in loader")
    with pytest.raises(il.errors.NotFinished, match="cancelling: in loader"):
        run.result(0.05)
    assert not run.done()
    assert not run.cancelled()
    block.set()
    assert run.wait(30).verdict == "clean"


# The end of the program

SCRIPT = """
import atexit, sys, threading, time
sys.path.insert(0, {tests!r})
import interlock as il
from interlock import run as module
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import Fault, faulty
from tools.small import batches, task

never = threading.Event()

class Slow:
    def __iter__(self):
        while True:
            time.sleep(0.01)
            yield from batches(1)

class Stuck:
    def __iter__(self):
        yield from batches(1)
        never.wait()

def begun(run):
    while run.step < 1:
        time.sleep(0.005)

def tell(*words):
    print(*words, time.monotonic(), flush=True)
"""

BLOCKED_COPY = """
blocked = faulty(ReplacingDouble, Fault("fetch", times=1000, block=never))
outcome = il.Engine(blocked, deadline=0.3).start(task(), batches()).wait()
tell(outcome.status, *outcome.abandoned)
sys.exit(7)
"""

LIVE = """
runs = []

def at_the_end():
    for run in runs:
        print(run.done(), run.wait(0).status, run.wait(0).verdict, run.phase)

atexit.register(at_the_end)
for backend in ("cpu", "double"):
    runs.append(il.Engine(backend).start(task(), Slow()))
    begun(runs[-1])
tell("end")
"""

STUCK = """
module.EXIT_PATIENCE = 0.3
run = il.Engine("cpu").start(task(), Stuck())
begun(run)
while run.snapshot().doing[:9] != "in loader":
    time.sleep(0.005)
tell("end")
sys.exit(5)
"""


def ended(script: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A program's end, and how long after its last words it came."""
    source = SCRIPT.format(tests=__file__.rpartition("/")[0]) + script
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", source],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        env=environment(),
    )
    assert done.stdout, done.stderr
    return done, time.monotonic() - float(done.stdout.splitlines()[0].split()[-1])


def test_the_interpreter_exits_at_once_beside_a_blocked_copy():
    done, seconds = ended(BLOCKED_COPY)
    assert done.stdout.split()[:2] == ["failed", "model"]
    assert (done.returncode, done.stderr) == (7, "")
    assert seconds < 10


def test_a_program_that_ends_ends_its_runs():
    done, seconds = ended(LIVE)
    assert done.stdout.splitlines()[1:] == ["True cancelled clean closed"] * 2
    assert (done.returncode, done.stderr) == (0, "")
    assert seconds < 10


def test_a_program_that_ends_names_the_run_it_leaves():
    done, seconds = ended(STUCK)
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith("interlock: the program ended while <Run ")
    assert "training, 1 steps> was still cancelling: in loader" in line
    assert seconds < 10
