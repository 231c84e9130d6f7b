"""The figures of the simulated device's memory, under the names that `torch.cuda` has for its own.

Asking a lost device for them raises.
"""

from __future__ import annotations

from typing import Any

from .faults import faults
from .memory import memory


def memory_allocated(device: Any = None) -> int:
    """Bytes alive."""
    faults.asked("memory_allocated")
    return memory.allocated


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were alive at once."""
    faults.asked("max_memory_allocated")
    return memory.peak


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peak be what is alive now."""
    faults.asked("reset_peak_memory_stats")
    memory.reset_peak()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes; the memory of the host is what there is where no capacity was set."""
    faults.asked("mem_get_info")
    return memory.free_bytes(), memory.total_bytes()


def memory_stats(device: Any = None) -> dict[str, int]:
    """Figures under the names that those of CUDA have."""
    faults.asked("memory_stats")
    return {
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak,
        "allocation.all.allocated": memory.sequence,
        "active.all.current": len(memory.live()),
        "num_ooms": memory.refused,
    }


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """The same, one dictionary in another, as CUDA has them."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats().items():
        *path, last = name.split(".")
        level = nested
        for part in path:
            level = level.setdefault(part, {})
        level[last] = value
    return nested


def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """The blocks that are alive, each as a segment of its own with one block, as CUDA names them."""
    faults.asked("memory_snapshot")
    return [
        {
            "device": 0,
            "address": block.sequence,
            "total_size": block.nbytes,
            "allocated_size": block.nbytes,
            "active_size": block.nbytes,
            "segment_type": "small",
            "frames": [{"name": place} for place in block.stack],
            "blocks": [{"size": block.nbytes, "requested_size": block.nbytes, "state": "active_allocated"}],
        }
        for block in memory.live()
    ]


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The figures of `memory_stats` as a table, one a line."""
    rows = memory_stats().items()
    return "\n".join(["simulated device sim:0", *(f"{name:32} {value:>16}" for name, value in rows)])
