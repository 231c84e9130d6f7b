"""What is left after a failure: three kinds of exception at every place where user code is called.

A cell is one exception at one place. The handle and the exception object are both held, as a program does
that goes on living and keeps a record of its jobs; then it is looked, by weak references to storages,
what of the run is alive. The garbage collector is off meanwhile, so that luck decides nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from bench.timing import Tell

from .libraries import LIBRARIES
from .library import Library
from .loops import quieten
from .probe import STEPS, Probe

ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("planted"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("planted"),
    "KeyboardInterrupt": KeyboardInterrupt,
}


def failures(library: str, tell: Tell) -> dict[str, Any]:
    """All cells of a library."""
    quieten()
    torch.set_num_threads(1)
    kind = LIBRARIES[library]
    # torch imports some of itself during the first run of a process, and that leaves cycles behind.
    kind().run(kind().handle(Probe()), Probe())
    gc.collect()
    gc.freeze()  # what is alive now belongs to no cell, and need not be looked at in each
    cells = []
    for place in kind.places:
        for name, make in ERRORS.items():
            cells.append({"place": place, "error": name, **cell(kind(), place, make)})
            tell(len(cells) / (len(kind.places) * len(ERRORS)))
    return {"cells": cells}


def cell(library: Library, place: str, make: Callable[[], BaseException]) -> dict[str, Any]:
    """One exception at one place.

    Returns:
        `caught`: `original` if the caller got this very object, else the type of what it got, or
        `nothing`. `held`, `handle`, `collected`: the kinds of tensors that are alive while handle and
        exception are held; while only the handle is; and after a garbage collection. `again`: what
        the handle does next.
    """
    probe = Probe(place, make())  # nobody else holds the exception
    gc.collect()
    gc.disable()
    try:
        return _look(library, probe)
    finally:
        gc.enable()


def _look(library: Library, probe: Probe) -> dict[str, Any]:
    handle, caught = _fail(library, probe)
    found: dict[str, Any] = {"caught": "nothing" if caught is None else type(caught).__name__}
    if caught is probe.error:
        found["caught"] = "original"
    found["held"] = probe.alive()
    probe.disarm()
    del caught
    found["handle"] = probe.alive()
    gc.collect()
    found["collected"] = probe.alive()
    found["again"] = _again(library, handle, probe)
    return found


def _fail(library: Library, probe: Probe) -> tuple[Any, BaseException | None]:
    handle = library.handle(probe)
    try:
        library.run(handle, probe)
    except BaseException as caught:
        return handle, caught
    return handle, None


def _again(library: Library, handle: Any, probe: Probe) -> str:
    """Whether the handle serves for another run."""
    try:
        library.run(handle, probe)
    except BaseException as error:
        return f"error: {type(error).__name__}"
    return "trains" if probe.updates == STEPS else f"silent: {probe.updates} of {STEPS} updates"
