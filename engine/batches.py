"""Walks nested data: moves the tensors of a batch, finds its size. The structure is kept.

Understood: tensors, mappings (also `UserDict`), lists, tuples, namedtuples, dataclasses, in any
nesting. Everything else - `None`, strings, numbers, objects - passes through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def convert(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with each tensor replaced by `function(tensor)`.

    Args:
        data: Any nesting. It is not changed; containers in which no tensor changed are kept.
        function: Called once per tensor.

    Returns:
        The data itself where nothing changed, else copies of the same types.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, (str, bytes)) or data is None:
        return data
    if isinstance(data, Mapping):
        new = {key: convert(value, function) for key, value in data.items()}
        if all(new[key] is data[key] for key in new):
            return data
        if type(data) is dict:
            return new
        clone = copy.copy(data)
        for key, value in new.items():
            clone[key] = value  # type: ignore[index]
        return clone
    if isinstance(data, (list, tuple)):
        items = [convert(item, function) for item in data]
        if all(a is b for a, b in zip(items, data, strict=True)):
            return data
        if type(data) in (list, tuple):
            return type(data)(items)
        if hasattr(data, "_fields"):
            return type(data)(*items)
        if isinstance(data, list):
            clone = copy.copy(data)
            clone[:] = items
            return clone
        return type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _convert_dataclass(data, function)
    return data


def _convert_dataclass(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # Fields are set on a shallow copy: `replace` would run __init__ and __post_init__ again, and
    # could not set fields with init=False.
    changed = {}
    for field in dataclasses.fields(data):
        if not hasattr(data, field.name):
            continue
        value = getattr(data, field.name)
        new = convert(value, function)
        if new is not value:
            changed[field.name] = new
    if not changed:
        return data
    clone = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(clone, name, value)
    return clone


def tensors(data: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nesting, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(data, note)
    yield from found


def size(data: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor; 1 if it has none."""
    for tensor in tensors(data):
        if tensor.ndim:
            return len(tensor)
    return 1


def describe(data: Any, depth: int = 3) -> str:
    """The structure of a batch in one line, for messages: `(float32[32, 64], int64[32])`."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if depth and isinstance(data, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v, depth - 1)}" for k, v in list(data.items())[:8]) + "}"
    if depth and isinstance(data, (list, tuple)):
        return "(" + ", ".join(describe(item, depth - 1) for item in data[:8]) + ")"
    return type(data).__name__
