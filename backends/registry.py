"""Finds backends by name: those that Interlock brings, and those that packages register.

Free of torch at import, so that `check`, `graph` and `doctor` can list and describe backends on a
machine without it. A third party registers an adapter class under the entry point group
`interlock.backends`; a module `NAME_monitor` is not needed, the adapter names its monitor.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from interlock.specs import Monitor, UnknownName

from .monitors import MONITORS
from .mps_monitor import MPS
from .tpu_monitor import TPU

if TYPE_CHECKING:
    from .adapter import Adapter

GROUP = "interlock.backends"

BUILT_IN = {
    "cpu": "interlock.backends.cpu:CpuAdapter",
    "cuda": "interlock.backends.cuda:CudaAdapter",
    "mps": "interlock.backends.mps:MpsAdapter",
    "double": "interlock.backends.double:ReplacingDouble",
    "sim": "interlock.backends.sim:SimAdapter",
    "xla": "interlock.backends.xla:XlaAdapter",
    "tpu": "interlock.backends.tpu:TpuAdapter",
}
"""Adapters that exist today; the other monitors in `MONITORS` are specified and proved only."""

AUTO = ("cuda", "cpu")
"""What `auto` tries, best first. Not `mps`: it has no float64, so what trains on the CPU may fail there."""


def names() -> tuple[str, ...]:
    """The names of all adapters that could be used here, sorted."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))}))


def adapter_class(name: str) -> type[Adapter]:
    """The adapter class of a backend; imports torch.

    Raises:
        UnknownName: No such backend, or one that has only a monitor so far.
    """
    if name == "auto":
        return next(c for c in map(adapter_class, AUTO) if not c.unavailable())
    target = BUILT_IN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        found: type[Adapter] = getattr(import_module(module), attribute)
        return found
    for point in entry_points(group=GROUP):
        if point.name == name:
            loaded: type[Adapter] = point.load()
            return loaded
    hint = f"'{name}' has a monitor, so it can be checked and drawn, but no adapter yet." * (name in MONITORS)
    if name.startswith("cuda:"):
        hint = "For one of several set CUDA_VISIBLE_DEVICES, or pass interlock.backends.cuda.CudaAdapter(1)."
    raise UnknownName("backend", name, ("auto", *names()), hint)


def monitor(name: str) -> Monitor:
    """The monitor of a backend, without importing torch for the built-in ones.

    Raises:
        UnknownName: No such backend.
    """
    if name not in BUILT_IN and any(point.name == name for point in entry_points(group=GROUP)):
        return adapter_class(name).monitor
    if name in MONITORS:
        return MONITORS[name]
    if name in (MPS.name, TPU.name):
        return MPS if name == MPS.name else TPU
    if name in ("double", "sim"):
        return MONITORS["cuda"]
    raise UnknownName("backend", name, {*MONITORS, *names()})
