"""Everything that is asked of CUDA, and how a tensor gets there; `cuda.CudaAdapter` decides when."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from .adapter import DeviceFacts
from .cuda_memory import Segments

TINY = 64 * 1024
"""Up to this the driver itself copies a host tensor aside before the call returns: pinning costs more."""
HUGE = 64 * 1024**2
"""Beyond this a pinned copy would lock too much of the host's memory, which it may not have twice."""

Way: TypeAlias = Literal["queue", "stage", "wait"]


class Calls:
    """What is asked of CUDA, for one device.

    Args:
        index: Of the device.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)

    def current(self) -> AbstractContextManager[Any]:
        """Within it the device is the thread's current one; afterwards it is the one from before."""
        return torch.cuda.device(self.index)

    def count(self) -> int:
        """How many devices there are."""
        return torch.cuda.device_count()

    def facts(self) -> DeviceFacts:
        """Initialises CUDA."""
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(self.index)
        told = {
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory} bytes",
            "processors": str(properties.multi_processor_count),
            "driver": str(torch._C._cuda_getDriverVersion()),  # type: ignore[attr-defined]
            "runtime": torch.version.cuda or f"HIP {torch.version.hip}",
        }
        return DeviceFacts(self.device, properties.name, told)

    def copy(self, tensor: torch.Tensor, way: Way) -> torch.Tensor:
        """Bring a tensor to the device."""
        # The allocator of pinned memory notes the stream of each copy, and does not give a block to
        # anybody else before the copy is done: so the staged source may be forgotten here.
        if way == "stage":
            # Where no more memory can be locked a plain copy works; what else is wrong, that raises again.
            with suppress(RuntimeError):
                return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device, non_blocking=way == "queue")

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the host."""
        # Streams and current device are the calling thread's own, and it may be one with a deadline. The
        # queue was waited for before; this waits for its own copy. Not pinned: it stays with the user.
        with self.current():
            return tensor.to("cpu", non_blocking=False, copy=True)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.index)

    def segments(self) -> Segments:
        """The allocator's account, of all devices."""
        found: Segments = torch.cuda.memory_snapshot()
        return found

    def clear_workspaces(self) -> None:
        """Drop the memory that cuBLAS works in: the allocator would count it as in use."""
        with self.current():
            torch._C._cuda_clearCublasWorkspaces()

    def clear_caches(self) -> None:
        """Give back what is cached: plans of cuFFT, free device memory, free pinned memory."""
        with self.current():
            torch.backends.cuda.cufft_plan_cache[self.index].clear()
            torch.cuda.empty_cache()
            # Public only in later releases.
            getattr(torch.accelerator, "empty_host_cache", torch._C._host_emptyCache)()

    def room(self) -> tuple[int, int]:
        """Bytes free on the device, and bytes that it has."""
        free, size = torch.cuda.mem_get_info(self.index)
        return free, size

    def random_state(self) -> torch.Tensor:
        """That of the device's generator, on the host."""
        return torch.cuda.get_rng_state(self.index)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.cuda.default_generators[self.index].manual_seed(seed)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Continue from there."""
        torch.cuda.set_rng_state(state, self.index)


def way_of(tensor: torch.Tensor) -> Way:
    """How a tensor goes to the device.

    `queue` does not wait: correct for pinned memory (whoever pins a batch leaves it alone until it
    was used), and for what is so small that the driver copies it aside. `stage` copies into pinned
    memory first, which nobody else knows, so that the caller may change or free the source at once.
    `wait` is for all that is out of the ordinary: another device, strides, layouts, subclasses,
    tensors too big to be held twice.

    Args:
        tensor: Anywhere but on the device, without a graph.
    """
    plain = (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
    )
    if not plain:
        return "wait"
    if tensor.nbytes <= TINY:
        return "queue"
    if tensor.is_pinned():
        return "queue"
    return "stage" if tensor.nbytes <= HUGE else "wait"
