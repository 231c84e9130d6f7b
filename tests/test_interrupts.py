"""Ctrl-C at any moment of a run: at each line of the engine, and as a real signal at random times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.aftermath import aftermath, the_first_error_reaches_the_caller, the_run_is_freed
from tools.interrupts import AtLine, Line
from tools.lives import BACKENDS, Ended, Life, Strike, live, without_collector
from tools.runs import environment

from interlock.evidence import graph

NIGHTLY = os.environ.get("INTERLOCK_PROFILE") == "nightly"
LAST = ("carry_out", "Engine.fit", "raise_again")
"""Here the run is over, and all that is left to do is to raise its error: an interrupt takes its place."""

AN_ERROR = (Strike("loss", "half", 1, "cause"),)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from several threads, which make each run ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# At each line


def moments(life: Life, *strikes: Strike) -> list[tuple[Line, int]]:
    """Each line that a life passes in the engine, at its first and at its last visit."""
    live(life, *strikes)  # what is built once in a process is built by now
    with AtLine() as counted:
        live(life, *strikes)
    return [(line, visit) for line, count in counted.passed.items() for visit in sorted({1, count})]


def interrupted(life: Life, line: Line, visit: int, *strikes: Strike) -> list[str]:
    """The promises that an interrupt at a line breaks."""
    at = AtLine(line, visit)
    try:
        with without_collector(), at:
            ended = live(life, *strikes)
    except KeyboardInterrupt as error:
        return [] if error is at.error else ["another interrupt escaped"]
    if at.error is None:
        return ["the line was not passed again"]
    lines = wrong_error(ended, at.error)
    if ended.slot is None or len(ended.slot.history) == 1:
        return lines  # before anything began, or anything could have ended
    # What the interrupt's own frames hold once the run is closed stands on the host.
    return lines + aftermath(life, ended, but=(the_first_error_reaches_the_caller, the_run_is_freed))


def wrong_error(ended: Ended, interrupt: BaseException) -> list[str]:
    """The caller gets the first error; an interrupt while an `except` block looks at it comes before it."""
    first = [error for error in ended.struck if error is not interrupt]
    if ended.error is interrupt:
        known = list(graph(interrupt))
        late = str(interrupt).rpartition(", ")[2] in LAST
        return [f"{error!r} was lost" for error in first if error not in known and not late]
    if first and ended.error is first[0]:
        noted = "KeyboardInterrupt" in " ".join(getattr(first[0], "__notes__", []))
        return [] if noted else ["the interrupt was swallowed"]
    return [f"the caller got {ended.error!r}"]


@pytest.mark.timeout(1800 if NIGHTLY else 120)
@pytest.mark.parametrize(
    "strikes", [(), (Strike("loss", "half", 1, "cause"),)], ids=["alone", "after an error"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_at_each_line(backend: str, strikes: tuple[Strike, ...], record_property: Any) -> None:
    """All of them in the long tier, one in six otherwise."""
    life = Life(backend=backend, batches=1, epochs=1, given=True)
    found = moments(life, *strikes)
    assert len(found) > 600
    chosen = found if NIGHTLY else found[len(backend) % 6 :: 6]
    record_property(f"interrupts at a line on {backend}", len(chosen))
    broken = {
        f"{line[0].rpartition('/')[2]}:{line[1]}, visit {visit}": lines
        for line, visit in chosen
        if (lines := interrupted(life, line, visit, *strikes))
    }
    assert broken == {}


# A real signal


SIGNALS = """
import json, os, random, signal, sys, threading, time, traceback
import torch
torch.set_num_threads(1)
from tools.aftermath import (
    aftermath, nothing_is_left_on_the_device, nothing_of_a_step_is_alive, the_run_is_freed,
    the_weights_are_right,
)
from tools.lives import Life, live, without_collector

backend, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# A shell starts what it puts in the background with this signal ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
chance = random.Random(seed)
life = Life(backend=backend, given=True, observed=True)
live(life)
begin = time.perf_counter()
live(life)
lasts = time.perf_counter() - begin
seen, broken = {}, []


def once():
    aimed = threading.Event()

    def shoot(delay):
        aimed.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    gun = threading.Thread(target=shoot, args=(chance.uniform(0, 1.1 * lasts),))
    gun.start()
    ended = None
    try:
        aimed.set()
        with without_collector():
            ended = live(life)
        gun.join()
    except KeyboardInterrupt:
        pass  # it landed in the test's own code, before the run or after it
    gun.join()
    return ended


for _ in range(count):
    try:
        ended = once()
    except KeyboardInterrupt:
        ended = None
    if ended is None or ended.slot is None:
        seen["outside"] = seen.get("outside", 0) + 1
        continue
    kind = type(ended.error).__name__
    seen[kind] = seen.get(kind, 0) + 1
    if ended.error is not None:
        ended.points.raised.append(ended.error)
        struck = [f"in {entry.source}" for entry in ended.slot.history if entry.event == "interrupt"]
        where = struck[0] if struck else "between two phases on the way out"
        seen[where] = seen.get(where, 0) + 1
    if len(ended.slot.history) == 1:
        continue
    but = [the_run_is_freed]
    if ended.error is not None:
        but.append(the_weights_are_right)  # it may have landed within torch's update
        at = traceback.extract_tb(ended.error.__traceback__)[-1].filename
        if "/torch/_library/" in at or at.endswith("/torch/_ops.py"):
            # Raised where torch's dispatcher calls Python, which the double alone makes it do: torch
            # then loses references, for good.
            seen["in torch's dispatcher"] = seen.get("in torch's dispatcher", 0) + 1
            but += [nothing_is_left_on_the_device, nothing_of_a_step_is_alive]
    ended.process = [line for line in ended.process if "thread" not in line]  # the one that shoots
    broken += aftermath(life, ended, but=tuple(but))
print(json.dumps({"seen": seen, "broken": broken}))
"""


@pytest.mark.timeout(1800 if NIGHTLY else 120)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signal_at_a_random_time(backend: str, record_property: Any) -> None:
    """Many runs in one process, each hit once: every one ends in order, and leaves the next one alone."""
    count = 5000 if NIGHTLY else 150
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, backend, str(count), "7"],
        check=False,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800 if NIGHTLY else 100,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    record_property(f"runs hit by a signal on {backend}", result["seen"])
    assert result["broken"] == []
    assert result["seen"]["KeyboardInterrupt"] > count / 10
