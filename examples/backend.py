"""A backend of one's own, whole: an adapter for a device made of host memory, and its monitor.

    python examples/backend.py

The device is a shelf. Whoever uses it holds its key, a lock file, from before a model is placed until
everything is home: one resource more than other backends have, so the monitor adds a phase in which it
is taken, and one in which it is given back. docs/backends.md goes through it.
"""

import itertools
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import interlock as il
from interlock.backends.adapter import Adapter, DeviceFacts, Leftover
from interlock.specs import (
    TRAINING,
    Automaton,
    Kind,
    Monitor,
    Pattern,
    Phase,
    Property,
    Status,
    check,
    compose,
    does,
)
from interlock.specs.lifecycles import (
    USES,
    acquires,
    completes,
    fault_edges,
    flight,
    needs,
    release_flight,
)
from interlock.specs.model import only

KEY = "key"
TAKING = Phase("taking_key", Kind.FLIGHT, "key_taken", "the shelf's lock file is made")
RETURNING = Phase("returning_key", Kind.FLIGHT, "key_returned", "the lock file is removed")

MONITOR = Monitor(
    "shelf",
    "host memory behind a lock file",
    # In which order legal events come: the key is taken once, and a model is placed with it only.
    automata=(Automaton("key", "out", {("out", "take_key"): "in", ("in", "place"): "in"}),),
    phases=(TAKING, RETURNING),
    resources=(KEY,),
    transitions=(
        # In flight the key may be half there: a fault leads to `failed`, and from there to its release.
        *flight(
            "take_key",
            "acquired",
            "taking_key",
            "key_taken",
            "acquired",
            begin=(*needs("device"), *USES, *acquires(KEY)),
            end=completes(KEY),
        ),
        *fault_edges((TAKING,)),
        *release_flight("return_key", "returning_key", "key_returned", KEY, when=only("device", KEY)),
    ),
    # What the run goes on with, where several events are legal: the first that may be fired.
    table={
        "acquired": ("take_key", "place"),
        "offloading": ("drop", "keep", "discard", "home", "return_key", "measure", "free", "close"),
    },
    forbids={"suspend": "the key cannot be given back in mid-run"},
    properties=(
        Property(
            "key-before-model",
            Pattern.PRECEDENCE,
            does("acquires", "model"),
            first=does("completes", KEY),
            doc="nothing is put on the shelf without its key",
        ),
    ),
)


_NUMBERS = itertools.count()  # each shelf has a key of its own


class ShelfCollapsed(RuntimeError):
    """The shelf is gone, and everything that stood there."""


class Shelf(Adapter):
    """Keeps what is moved to it, and knows what stands there."""

    name = "shelf"
    monitor = MONITOR
    copies = True  # there is a device beside the host

    def __init__(self):
        self._lock_file = Path(tempfile.gettempdir()) / f"shelf-{os.getpid()}-{next(_NUMBERS)}.lock"
        self._blocks = {}
        self._guard = threading.Lock()

    # What is asked of a tensor or of an exception never touches the device.

    def resident(self, tensor):
        with self._guard:
            entry = self._blocks.get(tensor.untyped_storage()._cdata)
        return entry is not None and not entry[0].expired()

    def is_loss_of_device(self, error):
        return isinstance(error, ShelfCollapsed)

    # In flight: the phases that the monitor adds.

    def actions(self):
        return {"taking_key": self._take_key}

    def releases(self):
        return {**super().releases(), KEY: self._return_key}

    def _take_key(self, model):
        os.close(os.open(self._lock_file, os.O_CREAT | os.O_EXCL))

    def _return_key(self):
        # Again, or when it was never taken: no effect.
        self._lock_file.unlink(missing_ok=True)

    # The hooks behind the calls that every backend has.

    def _acquire(self):
        # Frozen here, and never asked again.
        return DeviceFacts(torch.device("cpu"), "a shelf", {"boards": "3"})

    def _move(self, tensor):
        if self.resident(tensor):
            return tensor
        with torch.no_grad():
            moved = tensor.detach().clone()
        storage = moved.untyped_storage()
        with self._guard:
            self._blocks[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return moved.requires_grad_(tensor.requires_grad) if tensor.is_leaf else moved

    def _fetch(self, tensor):
        # On a thread of its own, under a deadline: it changes nothing that anybody can see.
        return tensor.detach().clone()

    def _leftovers(self):
        return tuple(Leftover(nbytes, "move") for nbytes in self._alive())

    def _alive(self):
        with self._guard:
            return [nbytes for reference, nbytes in self._blocks.values() if not reference.expired()]

    @property
    def allocated(self):
        """Bytes that stand there. Suites ask it after each event; without it they look at every object."""
        return sum(self._alive())

    def _free(self):
        with self._guard:
            self._blocks = {key: entry for key, entry in self._blocks.items() if not entry[0].expired()}


def loss(model, batch):
    return model(batch).square().mean()


TASK = il.Task(
    name="shelved",
    model=lambda: torch.nn.Linear(3, 1),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.05),
    loss=loss,
)
DATA = [torch.ones(4, 3), torch.zeros(4, 3)]


def main():
    report = check(compose(TRAINING, MONITOR))
    print(f"the shelf's lifecycle is {report.result}: {len(report.verdicts)} properties")
    outcome = il.Engine(Shelf()).fit(TASK, DATA, epochs=2)
    phases = [entry.phase for entry in outcome.history]
    print("went through " + " -> ".join(phases[: phases.index("training") + 1]))
    print("and home by  " + " -> ".join(phases[phases.index("offloading") :]))
    assert outcome.residue.bytes == 0
    assert set(outcome.history[-1].config.statuses) == {Status.ABSENT}

    print("without the automaton that orders them:")
    for verdict in check(compose(TRAINING, replace(MONITOR, automata=()))).verdicts:
        if not verdict.holds:
            print(verdict)


if __name__ == "__main__":
    main()
