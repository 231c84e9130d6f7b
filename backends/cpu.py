"""The CPU: the host itself. Placement and homecoming have nothing to do; all checks still run."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from interlock.specs import Monitor

from .adapter import Adapter
from .monitors import CPU


class CpuAdapter(Adapter):
    """Trains in host memory."""

    name: ClassVar[str] = "cpu"
    monitor: ClassVar[Monitor] = CPU

    def _place(self, model: nn.Module) -> None:
        # Walking the tensors keeps one contract for all backends: a fault strikes half way here too.
        for tensor in (*model.parameters(), *model.buffers()):
            self.move(tensor)
