"""Finds the memory that stands on devices, and what holds it: Python's tensors, autograd, the simulator.

No device is asked for anything, no code of a tensor's class is run, and nothing is imported: while torch is
not loaded there is nothing. What is found is held while the result lives, and no longer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from .references import gradient_of

if TYPE_CHECKING:
    import torch

Counts: TypeAlias = "Callable[[torch.Tensor], bool]"
"""Says of a tensor whether it stands on a device that is to be empty."""

_NODES = 10_000
"""How many nodes of autograd's graphs are looked at."""


@dataclass
class Held:
    """What holds one storage.

    Attributes:
        nbytes: Its size.
        storage: Itself; `None` for a tensor that shows none.
        tensors: Over it, at least one.
        only_saved: Whether only autograd has them: nobody in Python.
        saved_by: The kind of autograd's node that keeps it; empty if none does.
        graph: A tensor at the end of that node's graph, or a node that something in Python has.
        leaf: The tensor whose gradient it is, if it is one.
        leaf_saved: A tensor at the end of a graph that keeps that leaf.
        bare: Whether no tensor is over it: the one in `tensors` was made for this look.
    """

    nbytes: int
    storage: Any
    tensors: list[Any] = field(default_factory=list)
    only_saved: bool = False
    saved_by: str = ""
    graph: Any = None
    leaf: Any = None
    leaf_saved: Any = None
    bare: bool = False


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands on any device other than the host; `meta` is none.

    Args:
        tensor: Of any class; its code is not run.
    """
    return _device_of(tensor) not in ("cpu", "meta")


# -- finding -------------------------------------------------------------------------------------------


def torch_module() -> Any:
    """Torch, if it is loaded; `None` if it is not."""
    # A look must not be what imports it; while its own import is under way there are no tensors yet.
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "multiprocessing") else None


def _device_of(tensor: Any) -> str:
    torch = torch_module()
    with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError, NotImplementedError):
        if _dispatches(type(tensor), torch):
            # What such a class says of its device is its own affair; its memory is what it is.
            return str(torch._C.TensorBase.untyped_storage(tensor).device.type)
        return str(torch._C.TensorBase.device.__get__(tensor).type)
    return "cpu"


def _dispatches(kind: type, torch: Any) -> bool:
    """Whether operators on tensors of this class run code of the class, as for those that wrap others."""
    owns = (vars(base).get("__torch_dispatch__") for base in kind.__mro__)
    own = next((one for one in owns if one is not None), None)
    return getattr(own, "__func__", own) is not torch._C._disabled_torch_dispatch_impl


def known_tensors(torch: Any) -> list[Any]:
    """The tensors that Python's collector knows, of any class.

    Args:
        torch: The module.
    """
    kinds = _with_subclasses(torch.Tensor)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def _with_subclasses(*roots: type) -> set[type]:
    kinds: set[type] = set()
    todo = [*roots]
    while todo:
        kind = todo.pop()
        kinds.add(kind)
        below: list[type] = type.__subclasses__(kind)
        todo += [one for one in below if one not in kinds]
    return kinds


def _known(torch: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """In one look: the tensors, the storages, and autograd's nodes that Python's collector knows."""
    tensors, storages = _with_subclasses(torch.Tensor), _with_subclasses(torch.UntypedStorage)
    # Each kind of node has a class of its own, made in C++ with nothing in common but what it offers.
    kinds: list[type] = type.__subclasses__(object)
    nodes = _with_subclasses(*(kind for kind in kinds if "next_functions" in vars(kind)))
    wanted = tensors | storages | nodes
    found = [thing for thing in gc.get_objects() if type(thing) in wanted]
    parts = [[thing for thing in found if type(thing) in some] for some in (tensors, storages, nodes)]
    return parts[0], parts[1], parts[2]


def standing(counts: Counts) -> dict[int, Held]:
    """The storages on devices, each with what holds it.

    Args:
        counts: Which tensors are looked at.

    Returns:
        By the storage's identity; by the tensor's own for one that shows no storage.
    """
    torch = torch_module()
    found: dict[int, Held] = {}
    if torch is None:
        return found
    graphs: list[tuple[Any, Any]] = []
    tensors, bare, nodes = _known(torch)
    for tensor in tensors:
        _enter(found, tensor, counts, torch)
        gradient = gradient_of(tensor)
        if gradient is not None:
            for entered in _enter(found, gradient, counts, torch):
                entered.leaf = tensor
        node = _node_of(tensor, torch)
        if node is not None:
            graphs.append((tensor, node))
    graphs += [(node, node) for node in nodes]
    ends: dict[int, Any] = {}
    for tensor, name, saved in _saved(graphs):
        ends.setdefault(id(saved), tensor)
        if counts(saved):
            for storage in _storages(saved, torch):
                key = id(saved) if storage is None else storage._cdata
                one = found.setdefault(key, Held(_size(storage), storage, only_saved=True))
                if not one.saved_by:
                    one.saved_by, one.graph = name, tensor
                if one.only_saved:
                    one.tensors.append(saved)
    # A storage of the simulator's that grew refers to its new memory: known as one, by the tensors over it.
    grown = {id(vars(one).get("_larger")) for one in bare}
    for storage in bare:
        if storage._cdata not in found and storage.nbytes() and id(storage) not in grown:
            made = over(storage, torch)
            if made is not None and counts(made):
                found[storage._cdata] = Held(_size(storage), storage, [made], bare=True)
    for one in found.values():
        one.leaf_saved = ends.get(id(one.leaf))
    return found


def _size(storage: Any) -> int:
    return 0 if storage is None else int(storage.nbytes())


def over(storage: Any, torch: Any) -> Any:
    """A tensor over a storage that has none, to look at; `None` where its device does not answer.

    Args:
        storage: Untyped.
        torch: The module.
    """
    with suppress(RuntimeError, NotImplementedError), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return None


def _enter(found: dict[int, Held], tensor: Any, counts: Counts, torch: Any) -> list[Held]:
    entered = []
    if counts(tensor):
        for storage in _storages(tensor, torch):
            key = id(tensor) if storage is None else storage._cdata
            one = found.setdefault(key, Held(_size(storage), storage))
            one.tensors.append(tensor)
            entered.append(one)
    return entered


def _storages(tensor: Any, torch: Any) -> list[Any]:
    """A tensor's memory; of a sparse one, that of its parts; `None` for what shows none."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        base = torch._C.TensorBase
        parts = _PARTS.get(str(base.layout.__get__(tensor)), ())
        try:
            if parts:
                return [base.untyped_storage(getattr(base, name)(tensor)) for name in parts]
            storage = base.untyped_storage(tensor)
        except (RuntimeError, NotImplementedError):  # a device, or a layout, whose memory is hidden
            return [None]
        if _dispatches(type(tensor), torch) and _hollow(storage):
            return []  # it wraps other tensors, which are found by themselves
        return [storage]


_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def _hollow(storage: Any) -> bool:
    with suppress(RuntimeError):
        return bool(storage.data_ptr() == 0)
    return True


# -- autograd's graphs ---------------------------------------------------------------------------------


def _node_of(tensor: Any, torch: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError):
        return torch._C.TensorBase.grad_fn.__get__(tensor)
    return None


def _saved(graphs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, str, Any]]:
    """What graphs keep: (the tensor whose graph it is, the node's name, the kept tensor). No hook is run."""
    torch = torch_module()
    seen: set[Any] = set()
    for tensor, root in graphs:
        todo = [root]
        while todo and len(seen) < _NODES:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += [after for after, _ in node.next_functions if after is not None]
            for name in dir(type(node)):
                if name == "variable":  # of a leaf, whose gradient the node adds up
                    yield tensor, _name(node), node.variable
                if name.startswith("_raw_saved_"):
                    with suppress(RuntimeError):  # given up already, after its backward pass
                        raw = getattr(node, name)
                        for one in raw if isinstance(raw, (list, tuple)) else [raw]:
                            kept = getattr(one, "data", None)
                            if torch.Tensor in type(kept).__mro__:
                                yield tensor, _name(node), kept


def _name(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


# -- the simulated device ------------------------------------------------------------------------------


def _simulator() -> Any:
    found = sys.modules.get("interlock.backends.simulator")
    return found if found is not None and found.installed() else None


def blocks() -> list[Any]:
    """The blocks of the simulated device that are alive; none while it is not installed."""
    simulator = _simulator()
    return list(simulator.memory.live()) if simulator is not None else []


def block_of(held: Held) -> Any:
    """The simulated device's block behind a storage; `None` for other memory."""
    simulator = _simulator()
    if simulator is None or held.storage is None:
        return None
    with torch_module()._C.DisableTorchFunctionSubclass():
        return simulator.block_of(held.tensors[0])


def sequence_of(held: Held) -> int | None:
    """The number of that block."""
    block = block_of(held)
    return None if block is None else int(block.sequence)
