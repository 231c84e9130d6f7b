"""The memory of the simulated device: every byte counted, whose it is, and a capacity.

The bytes themselves stand in host memory; what is counted here lives exactly as long as the storage on the
device. Numbers are exact to the byte: nothing is rounded up or cached.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Frames of these say nothing about who asked for memory."""
_DEPTH = 12


def _host_memory() -> int:
    """Bytes of memory that the host has; of one that does not say it, more than a task takes."""
    if sys.platform == "win32":
        return 1 << 40
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_HOST = _host_memory()


@dataclass(frozen=True)
class Block:
    """One allocation that is alive.

    Attributes:
        sequence: Allocations are numbered from 1.
        nbytes: Its size in bytes.
        operator: What asked for it, such as `aten::mm`.
        owner: The tag that was in force; empty if there was none.
        stack: `file:line in function`, the innermost frame outside of torch first; empty unless stacks
            were asked for.
    """

    sequence: int
    nbytes: int
    operator: str
    owner: str = ""
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        owner = f" for {self.owner}" if self.owner else ""
        where = f", made at {self.stack[0]}" if self.stack else ""
        return f"block {self.sequence}: {self.nbytes} bytes by {self.operator}{owner}{where}"


class Allocation:
    """What a storage on the device carries: when the storage dies, so does this, and the bytes are free.

    It also remembers the host tensor over the whole of it that was used last, since making one costs more
    than an operator on few elements.
    """

    __slots__ = ("dtype", "free", "host", "nbytes", "resized", "sequence", "shape", "strides", "view")

    def __init__(self, host: torch.UntypedStorage, nbytes: int, sequence: int, free: Any) -> None:
        self.host = host
        self.nbytes = nbytes
        self.sequence = sequence
        self.free = free
        self.view: torch.Tensor | None = None
        self.shape: Any = None
        self.strides: Any = None
        self.dtype: torch.dtype | None = None
        self.resized = False

    def __del__(self) -> None:
        self.free(self.sequence, self.nbytes)


class Memory:
    """The account of the device.

    Attributes:
        allocated: Bytes alive.
        peak: The most that were alive at once, since the last `reset_peak`.
        capacity: Bytes that may be alive at once; `None` for as many as the host has.
        refused: How many allocations found no room.
        poison: Fill new floating-point memory with NaN, as memory that held something else before.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0
        self.capacity: int | None = None
        self.refused = 0
        self.poison = False
        self.sequence = 0
        self.stacks = False
        self.at_peak: tuple[Block, ...] | None = None
        self._owners: list[str] = []
        self._live: dict[int, tuple[int, str, str, tuple[tuple[CodeType, int], ...]]] = {}
        self._watching = False
        # A collection of garbage may free a block while this very thread counts another one.
        self._lock = threading.RLock()

    def charge(self, nbytes: int, operator: str) -> int:
        """Take memory.

        Args:
            nbytes: How much.
            operator: What asks for it.

        Returns:
            The number of the allocation.

        Raises:
            torch.OutOfMemoryError: There is not as much room; worded as CUDA does it.
        """
        stack = _stack() if self.stacks else ()
        with self._lock:
            allocated = self.allocated + nbytes
            if self.capacity is not None and allocated > self.capacity:
                self.refused += 1
                raise torch.OutOfMemoryError(self._no_room(nbytes))
            self.allocated = allocated
            self.sequence = sequence = self.sequence + 1
            self._live[sequence] = nbytes, operator, self._owners[-1] if self._owners else "", stack
            if allocated > self.peak:
                self.peak = allocated
                if self._watching:
                    self.at_peak = self._blocks()
            return sequence

    def release(self, sequence: int, nbytes: int) -> None:
        """Count an allocation no longer."""
        with self._lock:
            self.allocated -= nbytes
            self._live.pop(sequence, None)

    def resize(self, allocation: Allocation, nbytes: int) -> None:
        """Count an allocation as larger or smaller, in place.

        Raises:
            torch.OutOfMemoryError: There is no room for the growth.
        """
        with self._lock:
            more = nbytes - allocation.nbytes
            if more > 0 and self.capacity is not None and self.allocated + more > self.capacity:
                self.refused += 1
                raise torch.OutOfMemoryError(self._no_room(more))
            self.allocated += more
            _, operator, owner, stack = self._live[allocation.sequence]
            self._live[allocation.sequence] = nbytes, operator, owner, stack
            allocation.nbytes = nbytes
            if self.allocated > self.peak:
                self.peak = self.allocated
                if self._watching:
                    self.at_peak = self._blocks()

    def live(self, after: int = 0) -> list[Block]:
        """What is alive, in the order in which it was made.

        Args:
            after: Leave out what was made up to this allocation.
        """
        with self._lock:
            return [block for block in self._blocks() if block.sequence > after]

    def block(self, sequence: int) -> Block | None:
        """The block of one allocation, while it lives."""
        with self._lock:
            found = self._live.get(sequence)
        return _block(sequence, *found) if found is not None else None

    def reset_peak(self) -> None:
        """Let the peak be what is alive now."""
        with self._lock:
            self.peak = self.allocated
            self.at_peak = self._blocks() if self._watching else None

    def total_bytes(self) -> int:
        """Bytes that there are: the capacity, or the memory of the host, where the bytes stand."""
        return _HOST if self.capacity is None else self.capacity

    def free_bytes(self) -> int:
        """Bytes that could be taken now."""
        return max(self.total_bytes() - self.allocated, 0)

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """What is taken within the block, on any thread, is marked as somebody's.

        Args:
            name: Of whom, or for what.
        """
        self._owners.append(name)
        try:
            yield
        finally:
            self._owners.pop()

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        """Within the block, `at_peak` has every block that was alive at the peak. Slow."""
        before, self._watching = self._watching, True
        self.reset_peak()
        try:
            yield self
        finally:
            self._watching = before

    def _blocks(self) -> tuple[Block, ...]:
        # A copy first: making blocks may set off a collection of garbage, which frees some under our hands.
        return tuple(_block(sequence, *rest) for sequence, rest in [*self._live.items()])

    def _no_room(self, nbytes: int) -> str:
        capacity, used = self.capacity or 0, self.allocated
        return (
            f"SIM out of memory. Tried to allocate {_amount(nbytes)}. Device sim:0 has a total capacity of "
            f"{_amount(capacity)} of which {_amount(max(capacity - used, 0))} is free. Of the allocated "
            f"memory {_amount(used)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
            "unallocated."
        )


def _block(
    sequence: int, nbytes: int, operator: str, owner: str, stack: tuple[tuple[CodeType, int], ...]
) -> Block:
    lines = tuple(f"{code.co_filename}:{line} in {code.co_qualname}" for code, line in stack)
    return Block(sequence, nbytes, operator, owner, lines)


def _stack() -> tuple[tuple[CodeType, int], ...]:
    """Code and lines, and no frame: a frame would keep all that its function holds."""
    frame: Any = sys._getframe(2)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEPTH:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _amount(nbytes: int) -> str:
    """As CUDA says it: two digits, and the largest unit that gives at least one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


Free = Callable[[int, int], None]
memory = Memory()
"""Of the one simulated device of this process."""
