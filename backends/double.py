"""The replacing double: a backend for tests that does on the CPU what makes XLA dangerous.

Placement replaces every Parameter by a new one and unties tied weights (through
`torch.__future__.set_overwrite_module_params_on_conversion`, the switch that XLA's behaviour
corresponds to), so an optimizer that was built too early trains nothing. "Device memory" is
every storage that an operation makes while a run is in session; it is counted to the byte by
weak references to storages, so what a run leaves behind is observed and not assumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from interlock.specs import Monitor

from .adapter import Adapter, DeviceFacts, Leftover
from .monitors import CUDA

_SWITCH = threading.Lock()
"""The switch below is process-wide; two placements must not see each other's setting."""


class replacing_parameters:  # noqa: N801 - used as a function is
    """Within the block, `nn.Module` conversions make new Parameters; afterwards as it was.

    Not by `contextlib`, whose managers set attributes on the exception that passes: some refuse that.
    """

    def __enter__(self) -> None:
        _SWITCH.acquire()
        self.before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)

    def __exit__(self, *_: object) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(self.before)
        _SWITCH.release()


class Ledger(TorchDispatchMode):
    """Counts the storages that operations make from counted ones while it is active on this thread.

    What is made from nothing, or from what stands on the host, stands on the host: a model that the
    run builds, a batch that the loader makes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._lock = threading.Lock()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {storage._cdata for tensor in _tensors((args, kwargs)) for storage in _storages(tensor)}
        if self._counts(given):
            for tensor in _tensors(out):
                for storage in _storages(tensor):
                    if storage._cdata not in given:
                        self._enter(storage, str(func))
        return out

    def _counts(self, storages: set[int]) -> bool:
        with self._lock:
            entries = [self._blocks[key] for key in storages if key in self._blocks]
        return any(not reference.expired() for reference, _, _ in entries)

    def enter(self, tensor: torch.Tensor, origin: str) -> None:
        """Count the tensor's storage from now on, until it dies."""
        for storage in _storages(tensor):
            self._enter(storage, origin)

    def _enter(self, storage: torch.UntypedStorage, origin: str) -> None:
        with self._lock:
            self._blocks[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), origin)

    def live(self) -> list[tuple[int, int, str]]:
        """(storage, bytes, origin) of what is alive."""
        with self._lock:
            dead = [key for key, (ref, _, _) in self._blocks.items() if ref.expired()]
            for key in dead:
                del self._blocks[key]
            return [(key, nbytes, origin) for key, (_, nbytes, origin) in self._blocks.items()]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is counted (a storage keeps its address while it lives)."""
        keys = [storage._cdata for storage in _storages(tensor)]
        with self._lock:
            entries = [self._blocks.get(key) for key in keys]
        return any(entry is not None and not entry[0].expired() for entry in entries)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """A tensor's storage; of a sparse one, those of its indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    with torch._C._DisableTorchDispatch():
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        else:
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [part.untyped_storage() for part in parts]


class ReplacingDouble(Adapter):
    """A CPU that behaves like a device that replaces Parameters, and counts its memory."""

    name: ClassVar[str] = "double"
    monitor: ClassVar[Monitor] = CUDA
    copies: ClassVar[bool] = True

    def __init__(self) -> None:
        self.ledger = Ledger()

    @property
    def allocated(self) -> int:
        """Bytes of device memory alive now."""
        return sum(nbytes for _, nbytes, _ in self.ledger.live())

    def session(self) -> AbstractContextManager[object]:
        """Operations of this thread allocate on the double's device."""
        return self.ledger

    def resident(self, tensor: torch.Tensor) -> bool:
        """Whether the ledger counts the tensor's storage."""
        return self.ledger.has(tensor)

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """Found by walking all tensors: this is a report on something gone wrong, it may be slow."""
        import gc

        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, nn.Parameter) and self.resident(thing):
                yield thing

    def actions(self) -> Mapping[str, Callable[[nn.Module | None], None]]:
        """Its monitor is that of a device whose queue is waited for before anything moves home."""
        return {"syncing": lambda _: self.sync(), "flushing": lambda _: self.sync()}

    def _acquire(self) -> DeviceFacts:
        return DeviceFacts(torch.device("cpu"), "replacing double")

    def _place(self, model: nn.Module) -> None:
        with replacing_parameters():
            model._apply(self.move)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.resident(tensor):
            return tensor
        with torch.no_grad():
            moved = tensor.detach().clone()
        self.ledger.enter(moved, "move")
        return moved.requires_grad_(tensor.requires_grad) if tensor.is_leaf else moved

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        # Modes are thread-local: on the run's own thread the copy would count as device memory.
        with torch._C._DisableTorchDispatch():
            return tensor.detach().clone()

    def _leftovers(self) -> tuple[Leftover, ...]:
        return tuple(Leftover(nbytes, origin) for _, nbytes, origin in self.ledger.live())
