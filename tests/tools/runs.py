"""Small tasks, and the command line in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "interlock")

TASK = """
import os, sys, time
import torch
from torch import nn
import interlock as il

HANG = os.environ.get("HANG", "")

def at(moment):
    if moment == HANG:
        print("AT", moment, flush=True)
        time.sleep(30)

at("import")

def build():
    at("placing")
    return nn.Linear(4, 2)

def loss(model, batch):
    at("training")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

from interlock.backends.cpu import CpuAdapter
free = CpuAdapter._free
CpuAdapter._free = lambda adapter: (at("teardown"), free(adapter))[1]

batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(6)]
optimizer = lambda m: torch.optim.SGD(m.parameters(), 0.1)
parts = dict(model=build, optimizer=optimizer, loss=loss, data=lambda: il.Data(batches, batches[:2]))
task = il.Task(**parts, epochs=2)
"""


TESTS = Path(__file__).resolve().parent.parent


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: like ours, without what changes colours and widths.

    It finds the tools of the tests, as ours does. One thread: beside other work, several spend their time
    waiting for each other on such small models.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS", "HANG")}
    path = os.pathsep.join([str(TESTS), *filter(None, [kept.get("PYTHONPATH", "")])])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def command(*words: Any, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=cwd,
        env=environment(**more),
    )


def begun(*words: Any, moment: str, **more: str) -> subprocess.Popen[str]:
    """Start the command line on a task that says when it is where it will hang, and wait for that."""
    child = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(HANG=moment, **more),
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    if line != f"AT {moment}\n":
        child.kill()
        raise AssertionError(f"it never came to '{moment}': {line}{child.communicate()}")
    return child
