"""One kernel for every operator: it is computed on host tensors over the same bytes.

A tensor of the device is a plain `torch.Tensor` whose storage says `sim:0`, over memory of the host that its
`Allocation` keeps. So there is nothing to copy, and a result is bit for bit that of the CPU. What is new in
a result becomes memory of the device, and is counted; what it shares with an argument stays shared.

This is run below autograd, for every operator, tens of thousands of times a second: what can be known of an
operator beforehand stands in its `Plan`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import private
from .faults import Strike, faults
from .memory import Allocation, memory

HOST = torch.device("cpu")
_ATTRIBUTE = "_simulated"
"""On a storage of the device: its `Allocation`. On the host storage behind it: a weak reference to it."""

_INDEXING = frozenset(
    "aten::index aten::index_put aten::index_put_ aten::_index_put_impl_ aten::_unsafe_index "
    "aten::_unsafe_index_put".split()
)
"""Their indices may stand on the host, and the tensor they index decides where the result is."""

_nbytes: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes
_release = memory.release


class Refusal(RuntimeError):
    """The simulated device cannot do this, and does not do it elsewhere instead."""


class State:
    """Set once, when the device is registered."""

    device: torch.device = HOST


state = State()


# Storages and tensors


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
    nbytes = _nbytes(host)
    sequence = memory.charge(nbytes, operator)
    allocation = Allocation(host, nbytes, sequence, _release)
    if struck is not None:
        _fail(struck)
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
        found = private.storage_over(storage.data_ptr(), HOST, _nbytes(storage))
        found._simulated = weakref.ref(storage)  # type: ignore[attr-defined]
    return found


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the host over the bytes of one of the device, with its marks."""
    made = torch.empty(0, dtype=tensor.dtype, device=HOST)
    made.set_(host_of(tensor.untyped_storage()), tensor.storage_offset(), tensor.size(), tensor.stride())
    return marked(made, tensor)


def marked(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the marks of another: that its values are to be read as conjugate, or negative.

    torch resolves them before most operators, but not before those that make views, which hand them on.
    """
    if like.is_conj():
        made = made.conj()
    if like.is_neg():
        made = torch._neg_view(made)
    return made


def wrap(made: torch.Tensor, operator: str) -> torch.Tensor:
    """A tensor of the device over the bytes of one of the host."""
    if made.layout is not torch.strided:
        raise Refusal(_SPARSE.format(operator))
    host = made.untyped_storage()
    reference = getattr(host, _ATTRIBUTE, None)
    storage = reference() if reference is not None else None
    if storage is None:
        storage = adopt(host, operator)
        if not made.storage_offset() and not torch.is_inference_mode_enabled():
            _remember(storage._simulated, made)  # type: ignore[attr-defined]
    tensor = private.empty_of((0,), made.dtype)
    private.put(tensor, storage, made.storage_offset(), made.size(), made.stride())
    return marked(tensor, made)


def _remember(allocation: Allocation, view: torch.Tensor) -> None:
    if view.is_conj() or view.is_neg():
        return
    allocation.view = view
    allocation.shape = view.size()
    allocation.strides = view.stride()
    allocation.dtype = view.dtype


_SPARSE = (
    "SIM error: {} would make a tensor that is not dense, and such cannot stand on the simulated device. Use "
    "a dense one here (an embedding with sparse=False), or test this on another backend"
)


# The kernel


class Plan:
    """What is known of an operator before it is called.

    Attributes:
        name: With its namespace, without the overload.
        call: What computes it.
        anyhow: The same, by whichever overload takes a Python number for a tensor.
        indexing: Its indices may stand on the host.
        reshapes: It may change size, strides or storage of its arguments.
        converts: The positions of arguments that may be tensors, or name a device.
        returns: For an operator that returns its arguments: the position or name of each.
        writes: The positions or names of the arguments that it changes.
    """

    __slots__ = ("anyhow", "call", "converts", "indexing", "name", "reshapes", "returns", "writes")

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        self.name: str = schema.name
        self.call: Callable[..., Any] = operator._op
        self.anyhow: Callable[..., Any] = operator.overloadpacket
        self.indexing = self.name in _INDEXING
        kinds = [str(a.type) for a in schema.arguments if not a.kwarg_only]
        self.converts = tuple(i for i, kind in enumerate(kinds) if "Tensor" in kind or "Device" in kind)
        out = [a.name for a in schema.arguments if a.is_out]
        self.reshapes = torch.Tag.inplace_view in operator.tags or bool(out)
        written = [
            (a.name if a.kwarg_only else number, a.alias_info)
            for number, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.writes: tuple[int | str, ...] = tuple(key for key, _ in written)
        self.returns: tuple[int | str, ...] = ()
        if schema.returns and all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
            names = {frozenset(info.before_set): key for key, info in written}
            found = [names.get(frozenset(r.alias_info.before_set)) for r in schema.returns]
            if None not in found:
                self.returns = tuple(key for key in found if key is not None)


_plans: dict[Any, Plan] = {}


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out an operator; what torch calls for every one that has no kernel of its own here.

    Raises:
        RuntimeError: Tensors of two devices are mixed.
        Refusal: The result cannot stand on the device.
    """
    plan = _plans.get(operator)
    if plan is None:
        plan = _plans[operator] = Plan(operator)
    struck = faults.passes("operator", plan.name)
    if plan.indexing and not hasattr(args[0].untyped_storage(), _ATTRIBUTE):
        text = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        raise RuntimeError(text)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hosts = list(args)
    given = len(hosts)
    call = plan.call
    for position in plan.converts:
        if position < given and hosts[position] is not None:
            if _plain(hosts[position]):
                # A number that torch had made a tensor of comes as a number again.
                call = plan.anyhow
            else:
                hosts[position] = _convert(hosts[position], plan, seen)
    named = {key: _convert(value, plan, seen) for key, value in kwargs.items()} if kwargs else kwargs
    if struck is not None:
        return _struck(struck, plan, args, kwargs, hosts, named, seen)
    out = call(*hosts, **named)
    return _results(plan, out, args, kwargs, seen)


def kernel(operator: Any) -> Callable[..., Any]:
    """`run`, bound to one operator."""

    def run_it(*args: Any, **kwargs: Any) -> Any:
        return run(operator, *args, **kwargs)

    return run_it


def _results(plan: Plan, out: Any, args: Any, kwargs: Any, seen: Any) -> Any:
    if plan.reshapes:
        for tensor, host in seen:
            _follow(tensor, host, plan.name)
    if plan.returns:
        given = [args[key] if type(key) is int else kwargs[key] for key in plan.returns]
        return given[0] if len(given) == 1 else tuple(given)
    return _back(out, plan.name, seen)


def _convert(value: Any, plan: Plan, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        return _host_tensor(value, plan, seen)
    if isinstance(value, (list, tuple)):
        return [_convert(item, plan, seen) for item in value] if value and not _plain(value[0]) else value
    if isinstance(value, torch.device):
        return HOST if value.type == state.device.type else value
    return value


def _plain(value: Any) -> bool:
    return type(value) in (int, bool, float, complex)


def _host_tensor(tensor: torch.Tensor, plan: Plan, seen: Any) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise Refusal(_SPARSE.format(plan.name))
    storage: Any = tensor.untyped_storage()
    found = getattr(storage, _ATTRIBUTE, None)
    if type(found) is not Allocation:
        if tensor.device.type != state.device.type:
            if tensor.dim() == 0 or plan.indexing or tensor.device.type == "meta":
                return tensor
            raise _mixed(tensor, plan.name)
        zero = tensor._is_zerotensor()  # a derivative that is known to be zero has no memory at all
        host = torch.zeros(tensor.size(), dtype=tensor.dtype, device=HOST) if zero else alias(tensor)
    elif plan.reshapes or tensor.is_conj() or tensor.is_neg():
        host = alias(tensor)
    else:
        view = found.view
        if (
            view is not None
            and found.shape == tensor.shape
            and found.strides == tensor.stride()
            and found.dtype is tensor.dtype
            and not tensor.storage_offset()
        ):
            host = view
        else:
            host = torch.empty(0, dtype=tensor.dtype, device=HOST)
            offset = tensor.storage_offset()
            host.set_(found.host, offset, tensor.size(), tensor.stride())
            if not offset and not torch.is_inference_mode_enabled():
                _remember(found, host)
    seen.append((tensor, host))
    return host


def _mixed(tensor: torch.Tensor, name: str) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{state.device} and {tensor.device}! (when checking argument in method {name})"
    )


def _back(out: Any, name: str, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(out, torch.Tensor):
        # Some return an argument without saying so in their schema.
        for tensor, host in seen:
            if host is out:
                return tensor
        return wrap(out, name)
    if isinstance(out, (list, tuple)):
        return type(out)(_back(item, name, seen) for item in out)
    return out


def _follow(tensor: torch.Tensor, host: torch.Tensor, name: str) -> None:
    """Let a tensor have the size, strides and memory that its host tensor was given."""
    same = host.size() == tensor.size() and host.stride() == tensor.stride()
    if same and host.storage_offset() == tensor.storage_offset():
        return
    storage: Any = tensor.untyped_storage()
    grown = host.untyped_storage()
    if _nbytes(grown) > storage.nbytes():
        # A result that was too small for its values: these get memory that is counted.
        fresh = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=HOST).copy_(host)
        grown.resize_(storage.nbytes())
        private.put(tensor, adopt(fresh.untyped_storage(), name), 0, fresh.size(), fresh.stride())
    else:
        private.put(tensor, storage, host.storage_offset(), host.size(), host.stride())


# Faults


def _struck(
    strike: Strike, plan: Plan, args: Any, kwargs: Any, hosts: list[Any], named: Any, seen: Any
) -> Any:
    """Carry out an operator that a fault has struck: wholly, if it comes out later; or half."""
    if strike.how == "late":
        faults.later(strike.error())
        return _results(plan, plan.call(*hosts, **named), args, kwargs, seen)
    keys = plan.writes
    written = [hosts[key] if type(key) is int else named[key] for key in keys]
    tensors = [t for value in written for t in (value if isinstance(value, list) else [value])]
    before = [t.clone() for t in tensors]
    plan.call(*hosts, **named)
    undo_half(tensors, before)
    raise strike.error()


def undo_half(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Take back the second half of what was written: of several tensors the later ones, else elements."""
    if len(tensors) > 1:
        for tensor, old in list(zip(tensors, before, strict=True))[(len(tensors) + 1) // 2 :]:
            tensor.copy_(old)
        return
    for tensor, old in zip(tensors, before, strict=True):
        if tensor.shape == old.shape:
            kept = (torch.arange(tensor.numel()) < (tensor.numel() + 1) // 2).view(tensor.shape)
            tensor.copy_(torch.where(kept, tensor, old))


def _fail(strike: Strike) -> None:
    if strike.how == "late":
        faults.later(strike.error())
        return
    raise strike.error()


finish_strike = _fail
"""What is left of a strike once its work is done: raise it, now or at the next wait."""
