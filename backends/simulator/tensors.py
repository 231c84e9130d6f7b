"""Tensors of the simulated device, and the host's memory behind them: made, viewed from the host, resized."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import private
from .faults import faults
from .memory import Allocation, memory

HOST = torch.device("cpu")
ATTRIBUTE = "_simulated"
"""On a storage of the device: its `Allocation`. On the host storage behind it: a weak reference to it."""

nbytes_of: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes
_release = memory.release


class Refusal(RuntimeError):
    """The simulated device cannot do this, and does not do it elsewhere instead."""


class State:
    """Set once, when the device is registered."""

    device: torch.device = HOST


state = State()


def adopt(host: torch.UntypedStorage, operator: str) -> torch.UntypedStorage:
    """Count a storage of the host as memory of the device.

    Args:
        host: Not counted so far.
        operator: That made it.

    Returns:
        The storage on the device, over the same bytes.

    Raises:
        torch.OutOfMemoryError: There is no room.
    """
    struck = faults.passes("allocation", operator)
    nbytes = nbytes_of(host)
    sequence = memory.charge(nbytes, operator)
    allocation = Allocation(host, nbytes, sequence, _release)
    if struck is not None:
        faults.finish(struck)
    storage: Any = private.storage_over(host.data_ptr(), state.device, nbytes)
    storage._simulated = allocation
    host._simulated = weakref.ref(storage)  # type: ignore[attr-defined]
    return storage  # type: ignore[no-any-return]


def host_of(storage: Any) -> torch.UntypedStorage:
    """The storage of the host behind one of the device."""
    try:
        found: torch.UntypedStorage = storage._simulated.host
    except AttributeError:
        # Made inside torch over the bytes of another one, as when a storage is written to a file.
        found = private.storage_over(storage.data_ptr(), HOST, nbytes_of(storage))
        found._simulated = weakref.ref(storage)  # type: ignore[attr-defined]
    return found


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the host over the bytes of one of the device, with its marks."""
    storage: Any = tensor.untyped_storage()
    found = getattr(storage, ATTRIBUTE, None)
    if type(found) is Allocation and found.resized:
        check_within(tensor, found)
    made = torch.empty(0, dtype=tensor.dtype, device=HOST)
    made.set_(host_of(storage), tensor.storage_offset(), tensor.size(), tensor.stride())
    return marked(made, tensor)


def check_within(tensor: torch.Tensor, allocation: Allocation) -> None:
    """The host would make a storage that was shrunk large enough again, uncounted."""
    if not tensor.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if needed > allocation.nbytes:
        raise RuntimeError(
            f"SIM error: a tensor of {tuple(tensor.size())} needs {needed} bytes of its storage, which was "
            f"resized to {allocation.nbytes}: resize it again before the tensor is used"
        )


def resize_memory(storage: Any, nbytes: int, operator: str) -> torch.UntypedStorage:
    """Let the memory behind a storage be larger or smaller; all tensors over it go on sharing it.

    Args:
        storage: Of the device.
        nbytes: Its new size.
        operator: That asks for it.

    Returns:
        The storage that a tensor has to stand over to reach all of it: torch cannot enlarge one of a device
        that is registered from Python, so there are then two over one memory.

    Raises:
        torch.OutOfMemoryError: There is no room.
    """
    allocation: Allocation = storage._simulated
    before = allocation.nbytes
    struck = None
    if nbytes > before:
        struck = faults.passes("allocation", operator)
    else:
        faults.asked(operator)
    memory.resize(allocation, nbytes)
    if struck is not None:
        if struck.how == "half":
            memory.resize(allocation, before)
        faults.finish(struck)
    if nbytes_of(allocation.host) != nbytes:
        allocation.host.resize_(nbytes)
    allocation.view, allocation.resized = None, True
    storage = newest(storage)
    if nbytes > nbytes_of(storage):
        larger: Any = private.storage_over(allocation.host.data_ptr(), state.device, nbytes)
        larger._simulated = allocation
        allocation.host._simulated = weakref.ref(larger)  # type: ignore[attr-defined]
        storage._larger = larger  # which lives as long as the other one, so that both are known as one memory
        storage = larger
    return storage  # type: ignore[no-any-return]


def newest(storage: Any) -> Any:
    """The largest storage over the memory of one."""
    while (larger := getattr(storage, "_larger", None)) is not None:
        storage = larger
    return storage


def marked(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the marks of another: that its values are to be read as conjugate, or negative.

    torch resolves them before most operators, but not before those that make views, which hand them on.
    """
    if like.is_conj():
        made = made.conj()
    if like.is_neg():
        made = private.negative_view(made)
    return made


def wrap(made: torch.Tensor, operator: str) -> torch.Tensor:
    """A tensor of the device over the bytes of one of the host."""
    if made.layout is not torch.strided:
        raise Refusal(SPARSE.format(operator))
    host = made.untyped_storage()
    reference = getattr(host, ATTRIBUTE, None)
    storage = reference() if reference is not None else None
    if storage is None:
        storage = adopt(host, operator)
        if not made.storage_offset() and not torch.is_inference_mode_enabled():
            remember(storage._simulated, made)  # type: ignore[attr-defined]
    tensor = private.empty_of((0,), made.dtype)
    private.put(tensor, storage, made.storage_offset(), made.size(), made.stride())
    return marked(tensor, made)


def remember(allocation: Allocation, view: torch.Tensor) -> None:
    """Keep the tensor of the host over the whole of an allocation, for the next operator on it."""
    if view.is_conj() or view.is_neg():
        return
    allocation.view = view
    allocation.shape = view.size()
    allocation.strides = view.stride()
    allocation.dtype = view.dtype


SPARSE = (
    "SIM error: {} would make a tensor that is not dense, and such cannot stand on the simulated device. Use "
    "a dense one here (an embedding with sparse=False), or test this on another backend"
)
