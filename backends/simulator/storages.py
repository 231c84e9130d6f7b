"""Storages of the simulated device that are made, grown and shrunk as such, without a tensor."""

from __future__ import annotations

from typing import Any

import torch

from . import private
from .kernels import adopt, state
from .memory import Allocation, memory


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
        memory.resize(allocation, size)
        allocation.host.resize_(size)
        self._size = size
        return self

    def nbytes(self: Any) -> int:
        size = self.__dict__.get("_size")
        found: int = before["nbytes"](self) if size is None else size
        return found

    old = private.replace_storage_methods(new, resize, nbytes)
    before["new"], before["resize"], before["nbytes"] = old
