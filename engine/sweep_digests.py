"""Results of a run as text that can be compared: equal to the bit, or not."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .capture import names_of
from .checkpoint import CheckpointError
from .store import Store

Digests = Mapping[str, str]
"""What it is -> its digest, or a short text."""


def weights_of(model: nn.Module) -> dict[str, str]:
    """The state of a model, wherever it stands."""
    return {name: _text(value) for name, value in model.state_dict().items()}


def form_of(model: nn.Module) -> dict[str, str]:
    """Which modules a model has, in which mode they are, and which of its parameters train."""
    modes = {f"mode of '{n}'": "train" if module.training else "eval" for n, module in model.named_modules()}
    return {**modes, **built_of(model)}


def built_of(model: nn.Module) -> dict[str, str]:
    """Which modules a model has, and which of its parameters train."""
    modules = {f"module '{name}'": type(module).__qualname__ for name, module in model.named_modules()}
    trains = {f"requires_grad of '{name}'": str(p.requires_grad) for name, p in model.named_parameters()}
    return {"modules": str(len(modules)), **modules, **trains}


def trained_of(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """The parameters of a model, and what its optimizers know of each: what updates change."""
    found = {f"parameter '{name}'": _text(p) for name, p in model.named_parameters()}
    return {**found, **states_of(model, optimizers)}


def states_of(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """What optimizers know of each parameter of a model."""
    names = names_of(model)
    return {
        _state(names.get(id(parameter), "?"), key): _text(value)
        for optimizer in optimizers.values()
        for parameter, state in optimizer.state.items()
        for key, value in (state.items() if isinstance(state, Mapping) else [("", state)])
    }


def groups_of(optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """The settings of each group of optimizers, and how many parameters it has."""
    return {
        f"{key} of group {number} of {name}": str(len(value)) if key == "params" else _text(value)
        for name, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
    }


def different(one: Digests, other: Digests) -> str:
    """The names at which two states differ, the first four; empty if they are equal to the bit."""
    return ", ".join(sorted(n for n in {*one, *other} if one.get(n) != other.get(n))[:4])


def saved_in(folder: Path) -> tuple[int, dict[str, str]] | str:
    """The last checkpoint of a folder, read back: its step, and as `trained_of`; or why there is none.

    Args:
        folder: Of the run's checkpoints.
    """
    store = Store(folder)
    try:
        newest = max(store.all(), key=lambda one: one.number, default=None)
        if newest is None:
            return "there is no checkpoint"
        state = store.read(newest)
    except CheckpointError as error:
        return str(error)
    found = {f"parameter '{name}'": _text(value) for name, value in state["parameters"].items()}
    for optimizer in state["optimizers"]:
        for name, known in optimizer["state"].items():
            values = known.items() if isinstance(known, Mapping) else [("", known)]
            found |= {_state(name, key): _text(value) for key, value in values}
    return newest.step, found


def _state(name: str, key: object) -> str:
    return f"state '{key}' of '{name}'"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _digest(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple, deque)):
        return f"[{', '.join(map(_text, value))}]"
    # The text of anything else may name its address, which is another one in each run.
    plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return repr(value) if plain else type(value).__qualname__


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    flat = plain.contiguous().reshape(-1).view(torch.uint8)
    text = f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + flat.numpy().tobytes()
    return hashlib.sha256(text).hexdigest()
