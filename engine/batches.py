"""Walks nested data: moves the tensors of a batch, finds its size. The structure is kept.

Understood: tensors, mappings (also `UserDict` and immutable ones), lists, tuples, namedtuples,
dataclasses, in any nesting, and `PackedSequence`, whose `batch_sizes` stay on the host, where torch
wants them. Everything else - `None`, strings, numbers, objects - passes through untouched.

The type of a container is kept, and its attributes. A class that cannot be rebuilt (its constructor
asks for something else, and it cannot be copied) gives way to the plain `dict`, `list` or `tuple`
with the same content: what is read from it by key or position is right.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils.rnn import PackedSequence

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Known: TypeAlias = dict[int, tuple[Any, Any]]
"""id of a container that a walk has come by -> it (so that it lives, and keeps its id), and what it became.

What is in progress became itself, so far: where a container contains itself it is passed through.
"""
Walk: TypeAlias = Callable[[Any, Function, Known], Any]


def convert(data: Any, function: Function) -> Any:
    """The same structure with each tensor replaced by `function(tensor)`.

    Args:
        data: Any nesting. It is not changed; containers in which no tensor changed are kept.
        function: Called once per tensor, also for one that stands in several places: what was the
            same tensor before is the same tensor after.

    Returns:
        The data itself where nothing changed, else copies of the same types.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    return _walk(data, _Once(function), {})


class _Once:
    """A function of tensors that is called once for each.

    No closure, here and in the walk below: where `function` raises, the error's traceback keeps the cells
    of closures (comprehensions have them too, before Python 3.12), and with them what was moved so far.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.done.get(id(tensor))
        if found is None:
            # With the tensor itself, or one that a mapping makes when asked could leave its id to the next.
            found = self.done[id(tensor)] = (tensor, self.function(tensor))
        return found[1]


def replace_in(data: Any, function: Function) -> Any:
    """As `convert`, but in place where that can be: whoever holds a container sees the change.

    Args:
        data: Any nesting. Here deques and sets are looked into as well. Lists, dictionaries, deques, sets
            and dataclasses that are not frozen are changed in place, at any depth.
        function: Called once for each tensor.

    Returns:
        The data itself, or a copy where it is of another kind and something in it changed.
    """
    return _replace_in(data, _Once(function), {})


def _replace_in(data: Any, function: Function, known: Known) -> Any:
    if isinstance(data, torch.Tensor):
        return function(data)
    if data is None or isinstance(data, (str, bytes, int, float)):
        return data
    found = known.get(id(data))
    if found is not None:
        return found[1]
    known[id(data)] = (data, data)
    if isinstance(data, (dict, list, deque)):
        for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
            new = _replace_in(value, function, known)
            if new is not value:
                data[key] = new
        return data
    if isinstance(data, (set, frozenset)):
        made = _replace_in_set(data, function, known)
    elif _is_dataclass(data) and not type(data).__dataclass_params__.frozen:
        for name, value in _changed_fields(data, function, known, _replace_in).items():
            object.__setattr__(data, name, value)
        return data
    else:
        made = _walk_container(data, function, known, _replace_in)
    known[id(data)] = (data, made)
    return made


def _replace_in_set(data: Any, function: Function, known: Known) -> Any:
    before = list(data)
    after = [_replace_in(item, function, known) for item in before]
    if not _differ(after, before):
        return data
    if isinstance(data, frozenset):
        return frozenset(after)
    data.update(after)
    data.difference_update([old for old, new in zip(before, after, strict=True) if old is not new])
    return data


def _walk(data: Any, function: Function, known: Known) -> Any:
    if isinstance(data, torch.Tensor):
        return function(data)
    if data is None or isinstance(data, (str, bytes, int, float)):
        return data
    found = known.get(id(data))
    if found is not None:
        return found[1]
    known[id(data)] = (data, data)
    made = _walk_container(data, function, known, _walk)
    if made is not data:
        known[id(data)] = (data, made)
    return made


def _walk_container(data: Any, function: Function, known: Known, walk: Walk) -> Any:
    if isinstance(data, PackedSequence):
        return _walk_packed(data, function)
    if isinstance(data, Mapping):
        values = {}
        before = {}  # asked for once: some mappings make what they are asked for
        for key, value in data.items():
            before[key] = value
            values[key] = walk(value, function, known)
        return _new_mapping(data, values) if _differ(values.values(), before.values()) else data
    if isinstance(data, (list, tuple)):
        items = []
        for item in data:
            items.append(walk(item, function, known))  # noqa: PERF401 - a comprehension is a closure
        if not _differ(items, data):
            return data
        return _new_list(data, items) if isinstance(data, list) else _new_tuple(data, items)
    if _is_dataclass(data):
        return _walk_dataclass(data, function, known, walk)
    return data


def _is_dataclass(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, (type, torch.nn.Module))


def _differ(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def _new_mapping(data: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same class with other values."""
    if type(data) is dict:
        return values
    if isinstance(data, (dict, UserDict)):
        # Their copies share nothing with the original, and keep attributes and a default factory.
        clone = _copied(data)
        if isinstance(clone, MutableMapping) and clone is not data:
            for key, value in values.items():
                clone[key] = value
            return clone
        return values
    # A shallow copy of any other class shares its inner dictionary with the original, which a write
    # to the copy would change: the class is called instead, and what it makes is looked at.
    kind: Any = type(data)
    try:
        made: Any = kind(values)
    except Exception:
        return values
    if not isinstance(made, Mapping) or list(made) != list(values):
        return values
    return values if _differ(made.values(), values.values()) else made


def _new_list(data: list[Any], items: list[Any]) -> list[Any]:
    """A list of the same class with other items."""
    if type(data) is list:
        return items
    clone = _copied(data)
    if not isinstance(clone, list) or clone is data:
        return items
    clone[:] = items
    return clone


def _new_tuple(data: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the same class with other items."""
    kind = type(data)
    if kind is tuple:
        return tuple(items)
    try:
        # Past the constructor, which may ask for anything: it ran when the original was made.
        made = tuple.__new__(kind, items)
    except TypeError:
        # A structure of C code, such as torch.return_types.max: it takes one iterable.
        return kind(items)
    vars_of = getattr(data, "__dict__", None)
    if vars_of:
        made.__dict__.update(vars_of)
    return made


def _walk_packed(data: PackedSequence, function: Function) -> PackedSequence:
    new = function(data.data)
    before = (data.sorted_indices, data.unsorted_indices)
    orders = []
    for order in before:
        orders.append(order if order is None else function(order))  # noqa: PERF401 - as above
    if new is data.data and not _differ(orders, before):
        return data
    return PackedSequence(new, data.batch_sizes, *orders)


def _walk_dataclass(data: Any, function: Function, known: Known, walk: Walk) -> Any:
    # Fields are set on a shallow copy: `replace` would run __init__ and __post_init__ again, and
    # could not set fields with init=False.
    changed = _changed_fields(data, function, known, walk)
    if not changed:
        return data
    clone = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(clone, name, value)
    return clone


def _changed_fields(data: Any, function: Function, known: Known, walk: Walk) -> dict[str, Any]:
    """Field of a dataclass -> its new value, where that is another one."""
    changed = {}
    for field in dataclasses.fields(data):
        if not hasattr(data, field.name):
            continue
        value = getattr(data, field.name)
        new = walk(value, function, known)
        if new is not value:
            changed[field.name] = new
    return changed


def _copied(data: Any) -> Any:
    """A shallow copy; `None` for what cannot be copied."""
    try:
        return copy.copy(data)
    except Exception:
        return None


def tensors(data: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nesting, each once, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(data, note)
    yield from found


def held(data: Any) -> list[torch.Tensor]:
    """The tensors that `replace_in` would come by, each once: as `tensors`, and those in deques and sets.

    Args:
        data: Any nesting. Nothing in it is changed.

    Returns:
        Those that have a shape: not the uninitialised ones of lazy modules.
    """
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    replace_in(data, note)
    return [tensor for tensor in found if not isinstance(tensor, UninitializedTensorMixin)]


def size(data: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor; 1 if it has none.

    Args:
        data: Any nesting. Of a `PackedSequence` the sequences are counted, not their elements.

    Returns:
        A number from 0.
    """
    if isinstance(data, PackedSequence):
        return int(data.batch_sizes[0])
    for tensor in tensors(data):
        if tensor.ndim:
            return len(tensor)
    return 1


def describe(data: Any, depth: int = 3) -> str:
    """The structure of a batch in one line, for messages: `(float32[32, 64], int64[32])`.

    Args:
        data: Any nesting.
        depth: Levels that are shown; of each level, the first eight entries.

    Returns:
        Shapes and types; never values, which may be private.
    """
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if depth and isinstance(data, PackedSequence):
        return f"PackedSequence({describe(data.data)})"
    if depth and isinstance(data, Mapping):
        inner = [f"{key!r}: {describe(value, depth - 1)}" for key, value in list(data.items())[:8]]
        return "{" + ", ".join(inner + ["..."] * (len(data) > 8)) + "}"
    if depth and isinstance(data, (list, tuple)):
        inner = [describe(item, depth - 1) for item in data[:8]] + ["..."] * (len(data) > 8)
        return f"[{', '.join(inner)}]" if isinstance(data, list) else f"({', '.join(inner)})"
    if depth and dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)][:8]
        inner = [f"{name}={describe(getattr(data, name), depth - 1)}" for name in names]
        return f"{type(data).__name__}({', '.join(inner)})"
    return type(data).__name__
