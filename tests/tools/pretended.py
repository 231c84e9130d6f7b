"""Calls of a device, answered by the host: what `cuda` and `mps` decide, tested where there is neither.

The memory of the pretended device is the ledger of the replacing double. A snapshot of it has the format
of CUDA's allocator. No call is answered once the device is lost, or before it is taken.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from interlock.backends import cuda_calls, mps
from interlock.backends.adapter import DeviceFacts
from interlock.backends.cuda import CudaAdapter
from interlock.backends.double import Ledger
from interlock.backends.mps import MpsAdapter

FREE = 1 << 30


class Answers:
    """What both kinds of calls have in common.

    Attributes:
        ledger: The memory.
        made: Names of the calls that were made, in order.
        dead: Whether the device is lost: then a call is an error of the adapter.
    """

    def __init__(self) -> None:
        self.ledger = LEDGER
        self.made: list[str] = []
        self.dead = False

    def note(self, name: str) -> None:
        """A call was made."""
        if self.dead:
            raise AssertionError(f"'{name}' was asked of a device that is lost")
        self.made.append(name)

    def facts(self) -> DeviceFacts:
        self.note("facts")
        return DeviceFacts(torch.device("cpu"), "a pretended device", {"memory": "1 GiB"})

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note("home")
        with torch._C._DisableTorchDispatch():
            return tensor.clone()

    def synchronize(self) -> None:
        self.note("synchronize")

    def clear_caches(self) -> None:
        self.note("clear_caches")

    def random_state(self) -> torch.Tensor:
        self.note("random_state")
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self.note("set_random_state")
        torch.set_rng_state(state)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the ledger."""
        moved = tensor.clone()
        self.ledger.enter(moved, "copy")
        return moved


class _Memory(Ledger):
    """The ledger of a device that is there once in a process."""

    def blocks(self) -> list[tuple[int, int]]:
        """(address, bytes) of what is alive."""
        found = []
        for key, nbytes, _ in self.live():
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._blocks[key][0].cdata)
            if storage is not None and nbytes:
                found.append((storage.data_ptr(), nbytes))
        return found


LEDGER = _Memory()


class CudaAnswers(Answers, cuda_calls.Calls):
    """CUDA's calls. The current device is a switch of each thread."""

    def __init__(self, index: int, count: int = 1) -> None:
        Answers.__init__(self)
        cuda_calls.Calls.__init__(self, index)
        self.devices = count
        self.ways: list[str] = []

    def count(self) -> int:
        return self.devices

    def current(self) -> AbstractContextManager[Any]:
        return _Current(self)

    def copy(self, tensor: torch.Tensor, way: cuda_calls.Way) -> torch.Tensor:
        self.note("copy")
        self.ways.append(way)
        return self.placed(tensor)

    def segments(self) -> list[dict[str, Any]]:
        self.note("segments")
        return [segment(self.index, address, nbytes) for address, nbytes in LEDGER.blocks()]

    def clear_workspaces(self) -> None:
        self.note("clear_workspaces")

    def room(self) -> tuple[int, int]:
        self.note("room")
        return FREE, 2 * FREE


class _Current:
    """Operations of this thread allocate in the ledger, until the end of the block."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def __enter__(self) -> None:
        self.answers.note("current")
        LEDGER.__enter__()  # type: ignore[no-untyped-call]
        DEPTH.depth = getattr(DEPTH, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        DEPTH.depth -= 1
        LEDGER.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.answers.note("current again")


DEPTH = threading.local()


def segment(device: int, address: int, nbytes: int, state: str = "active_allocated") -> dict[str, Any]:
    """One segment with one block, as the allocator tells of it."""
    size = -(-nbytes // 512) * 512
    block = {"address": address, "size": size, "requested_size": nbytes, "state": state, "frames": []}
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size if state == "active_allocated" else 0,
        "active_size": size,
        "requested_size": nbytes,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [block],
    }


class PretendedCuda(CudaAdapter):
    """The `cuda` adapter, with other calls under it."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.answers = CudaAnswers(index, count=2)
        self.calls = self.answers

    @classmethod
    def unavailable(cls) -> str:
        return ""

    def resident(self, tensor: torch.Tensor) -> bool:
        return LEDGER.has(tensor)


class MpsAnswers(Answers, mps.Calls):
    """Metal's calls."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note("copy")
        return self.placed(tensor)

    def allocated(self) -> int:
        self.note("allocated")
        return sum(-(-nbytes // 256) * 256 for _, nbytes, _ in LEDGER.live())

    def reserved(self) -> int:
        return 2 * self.allocated()


class PretendedMps(MpsAdapter):
    """The `mps` adapter, with other calls under it."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = MpsAnswers()
        self.calls = self.answers

    @classmethod
    def unavailable(cls) -> str:
        return ""

    def resident(self, tensor: torch.Tensor) -> bool:
        return LEDGER.has(tensor)

    def session(self) -> AbstractContextManager[object]:
        return LEDGER
