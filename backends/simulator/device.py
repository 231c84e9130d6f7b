"""Registers the simulated device with torch, once for a process; and says why it cannot be."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from interlock.backends.errors import DeviceInUse, DeviceUnavailable

from . import autocast, composed, module, private, special, storages
from .kernels import kernel, run
from .tensors import state

NAME = "sim"

_lock = threading.RLock()
_libraries: list[torch.library.Library] = []
"""Kernels are registered as long as these live: until the process ends."""


class _Placement:
    """Whether `module.to(device)` keeps the Parameters, as on CUDA, or makes new ones, as on XLA."""

    def __init__(self) -> None:
        self.holders: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()

    @property
    def keeps(self) -> bool:
        """Whether somebody wants Parameters kept; whoever wants it is alone with those who want the same."""
        return "kept" in self.holders.values()


_placement = _Placement()


def installed() -> bool:
    """Whether the simulated device is registered in this process."""
    return bool(_libraries)


def taken_by() -> str:
    """The name of another device that has torch's one slot for such devices; empty if none has."""
    name = private.slot()
    return "" if installed() or name == private.UNTAKEN else name


def unavailable() -> str:
    """Why it cannot be registered in this process; empty if it can, or is. Registers nothing."""
    if installed():
        return ""
    if taken_by():
        return (
            f"PyTorch has one slot for devices that it does not know, and '{taken_by()}' has taken it: start "
            "the process with TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that no such device is loaded"
        )
    return private.too_old()


def install() -> None:
    """Register the device type `sim`, for the rest of the process. Again: no effect.

    Raises:
        DeviceUnavailable: With the reason of `unavailable`.
    """
    with _lock:
        if installed():
            return
        reason = unavailable()
        if reason:
            raise DeviceUnavailable(f"the simulated device cannot be used here: {reason}")
        # Modules of torch that look at devices when they are first imported are to find the real ones only.
        import torch.distributed

        made = module.build()
        private.register(NAME, made)
        sys.modules["torch.sim"] = made
        state.device = torch.device(NAME, 0)
        storages.patch()
        private.run_backward_where_it_is_called()
        _libraries.extend(_kernels())
        _libraries.extend(_collectives())


def _kernels() -> list[torch.library.Library]:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1"):
        everything.fallback(special.refuse, key)
    aten = torch.library.Library("aten", "IMPL")
    for key in ("Conjugate", "Negative"):
        # Else copying resolves the mark by a copy, which resolves the mark, and so on.
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    for name, function in special.ON_HOST.items():
        aten.impl(name, function, "CPU")
    for name, function in special.SPECIAL.items():
        aten.impl(name, function, "PrivateUse1")
    for name, function in special.pinned_to_host():
        aten.impl(name, function, "PrivateUse1")
    for name, function in composed.COMPOSED.items():
        aten.impl(name, function, "AutogradPrivateUse1")
        aten.impl(name, function, "PrivateUse1")
    for name, function in autocast.kernels():
        aten.impl(name, function, "AutocastPrivateUse1")
    for key in ("PrivateUse1", "CPU", "AutogradPrivateUse1", "AutogradCPU"):
        aten.impl("_has_compatible_shallow_copy_type", _compatible, key)
    return [everything, aten]


def _collectives() -> list[torch.library.Library]:
    """Collectives on tensors of the device, by the backend that the process group has for the host."""
    if not torch.distributed.is_available():
        return []
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch's own kernels for such devices look for a backend of theirs; it tells that they are replaced.
        warnings.filterwarnings("ignore", ".*only once for all operators", UserWarning)
        for name, operator in private.collectives():
            if operator is not None:
                library.impl(name, kernel(operator), "PrivateUse1", allow_override=True)
    return [library]


def _compatible(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a Parameter may be given the memory of another tensor; what `module.to` asks."""
    kinds = {self.device.type, other.device.type}
    if self.layout is not other.layout or not kinds <= {NAME, "cpu"}:
        return self.device.type == other.device.type and self.layout is other.layout
    return len(kinds) == 1 or _placement.keeps


@contextmanager
def parameters(how: str) -> Iterator[None]:
    """Within the block `module.to` keeps the Parameter objects, or replaces them; for the whole process.

    Args:
        how: `kept`, as CUDA does, or `replaced`, as XLA does. Outside of any block they are replaced. Buffers
            are replaced always, as everywhere.

    Raises:
        DeviceUnavailable: Neither of them.
        DeviceInUse: A run that goes on wants it otherwise.
    """
    block = _Block()
    hold(how, block)
    try:
        yield
    finally:
        let_go(block)


class _Block:
    """Stands for one block of `parameters`."""


def hold(how: str, holder: object) -> None:
    """What `parameters` does when its block begins; `let_go` ends it, and so does the holder's death.

    Args:
        how: As for `parameters`.
        holder: Whoever wants it so; known by identity.

    Raises:
        DeviceUnavailable: As for `parameters`.
        DeviceInUse: As for `parameters`.
    """
    if how not in ("kept", "replaced"):
        raise DeviceUnavailable(f"parameters are 'kept' or 'replaced' on placement, and not {how!r}")
    with _lock:
        others = {other for one, other in _placement.holders.items() if one is not holder}
        if others - {how}:
            raise DeviceInUse(
                f"the simulated device is in use, with parameters that are {', '.join(others)}; it cannot "
                f"have them {how} at the same time. Wait for that run, or take the same mode"
            )
        _placement.holders[holder] = how


def let_go(holder: object) -> None:
    """The end of `hold`."""
    with _lock:
        _placement.holders.pop(holder, None)
