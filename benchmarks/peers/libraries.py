"""All libraries by name. Each one's job is written as that library's documentation writes it.

A library has a *handle* - what its user keeps between runs: the engine, the trainer, the accelerator - and
`run` carries the job out on it. Only what the documentation has the user keep in a variable is kept in
one: with a loop of one's own that is model and optimizer, with an engine nothing.
"""

from __future__ import annotations

from .library import Library
from .ours import Interlock, InterlockRun
from .own_loops import Accelerate, AccelerateFreed, ByHand, Fabric, Ignite
from .trainers import Lightning, Transformers

LIBRARIES: dict[str, type[Library]] = {
    library.name: library
    for library in (
        ByHand,
        Ignite,
        Fabric,
        Accelerate,
        AccelerateFreed,
        Lightning,
        Transformers,
        Interlock,
        InterlockRun,
    )
}
