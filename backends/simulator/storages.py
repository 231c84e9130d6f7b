"""Storages of the simulated device that are made, grown and shrunk as such, without a tensor."""

from __future__ import annotations

from typing import Any

import torch

from . import private
from .memory import Allocation
from .tensors import adopt, newest, resize_memory, state


def patch() -> None:
    """Let `torch.UntypedStorage` know of the device. Cannot be undone, as its registration cannot."""
    before: dict[str, Any] = {}

    def new(kind: Any, *args: Any, device: Any = None, **more: Any) -> Any:
        if device is not None:
            if torch.device(device).type == state.device.type:
                return adopt(before["new"](kind, *args, **more), "UntypedStorage")
            more["device"] = device
        return before["new"](kind, *args, **more)

    def resize(self: Any, size: int) -> Any:
        allocation = getattr(self, "_simulated", None)
        if type(allocation) is not Allocation:
            return before["resize"](self, size)
        resize_memory(self, size, "UntypedStorage.resize_")
        return self

    def nbytes(self: Any) -> int:
        allocation = self.__dict__.get("_simulated")
        found: int = allocation.nbytes if type(allocation) is Allocation else before["nbytes"](self)
        return found

    def copy(self: Any, source: Any, *args: Any, **more: Any) -> Any:
        before["copy"](newest(self), newest(source), *args, **more)
        return self

    old = private.replace_storage_methods(new, resize, nbytes, copy)
    before["new"], before["resize"], before["nbytes"], before["copy"] = old
