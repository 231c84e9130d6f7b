"""Writers of checkpoints that are there to be killed: a process that forks one after the other.

    python tests/tools/killed.py FOLDER ["in place"]

For each line on its input it forks a writer, prints its process id, waits until it has been killed, and
prints `gone`. A fork costs no import of torch. Each value of what is written says which step it is of,
so that a mixture of two checkpoints is seen (`mixed`). With "in place" they are
writers as they should not be: each checkpoint is written over the one before.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from interlock.checkpoint import MANIFEST, MARKER, STATE
from interlock.durable import sha256
from interlock.store import Store, manifest

PARTS, SIZE = 6, 20_000


def state_of(step: int) -> dict[str, Any]:
    """A state of which each value is the step."""
    return {"step": step, "tensors": [torch.full((SIZE,), step) for _ in range(PARTS)]}


def mixed(state: Mapping[str, Any], step: int) -> bool:
    """Whether a state has a value that is not of this step."""
    return (
        state["step"] != step
        or len(state["tensors"]) != PARTS
        or not all(tensor.shape == (SIZE,) and bool((tensor == step).all()) for tensor in state["tensors"])
    )


def about(step: int) -> dict[str, Any]:
    """What the manifest says of it; the metric makes an earlier one the best again and again."""
    return {"step": step, "epoch": step // 10, "boundary": "step", "metrics": {"loss": 1 + step % 7}}


def write_on(folder: str) -> None:
    """Write one after the other, and prune, until killed or orphaned."""
    parent = os.getppid()
    store = Store(folder, keep=2)
    while os.getppid() == parent:
        newest = store.newest()
        step = 1 if newest is None else newest.step + 1
        store.write(state_of(step), about(step))
        store.prune(best="loss")


def write_over(folder: str) -> None:
    """The planted fault: the same directory again and again."""
    parent, store = os.getppid(), Store(folder)
    first = store.newest() or store.write(state_of(1), about(1))
    for step in range(first.step + 1, sys.maxsize):
        if os.getppid() != parent:
            return
        state = first.path / STATE
        torch.save(state_of(step), state)
        facts = {STATE: {"size": state.stat().st_size, "sha256": sha256(state)}}
        data = manifest(about(step), facts)
        (first.path / MANIFEST).write_bytes(data)
        (first.path / MARKER).write_bytes(hashlib.sha256(data).hexdigest().encode())


def main(folder: str, *in_place: str) -> None:
    """Fork a writer for each line read."""
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                (write_over if in_place else write_on)(folder)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("gone" if os.WIFSIGNALED(status) else "ended by itself", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
