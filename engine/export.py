"""Weights for other programs: one safetensors file, which no code runs to read. It is not a checkpoint."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from interlock.specs.errors import MissingExtra

from .capture import Fetch, buffers, ties
from .checkpoint import CheckpointError
from .durable import sync_folder


def export_weights(model: nn.Module, path: str | Path, *, fetch: Fetch = torch.Tensor.cpu) -> Path:
    """Write a model's parameters and persistent buffers to a safetensors file.

    A tied tensor is stored once, under its first name; under `ties` the metadata says which names are one,
    as JSON. The file appears under its name when it is whole; one that is there already is replaced.

    Args:
        model: On the host or on a device.
        path: The file, by custom `*.safetensors`.
        fetch: Brings a tensor to the host: `Adapter.fetch`.

    Returns:
        The path.

    Raises:
        MissingExtra: The package safetensors is not installed.
        CheckpointError: A tensor cannot be stored so, or the file cannot be written.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise MissingExtra("exporting weights", "safetensors", "safetensors") from error
    path = Path(path)
    here = dict((*model.named_parameters(), *buffers(model, persistent=True)))
    sparse = [name for name, tensor in here.items() if tensor is not None and tensor.layout != torch.strided]
    if sparse:
        raise CheckpointError(
            f"safetensors stores no sparse tensors: make '{sparse[0]}' dense (`to_dense()`)"
        )
    with torch.no_grad():
        tensors = {name: fetch(t).detach().contiguous() for name, t in here.items() if t is not None}
    shared = _apart(tensors)
    metadata = {"format": "pt", "ties": json.dumps(ties(model))}
    hidden = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        data = save(shared, metadata)
        with hidden.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            hidden.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the weights cannot be written to {path} ({error.strerror or error}): choose another file"
            ) from error
        if isinstance(error, (ValueError, KeyError)):  # of a type that the format does not have
            raise CheckpointError(
                f"the weights cannot be stored as safetensors ({error}): convert what it names first"
            ) from error
        raise
    return path


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, no two over one storage: the format refuses that."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        key = tensor.untyped_storage()._cdata
        found[name] = tensor.clone() if key in seen else tensor
        seen.add(key)
    return found
