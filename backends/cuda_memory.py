"""Reads snapshots of CUDA's allocator: which blocks a run left, what was held when memory ran out.

A snapshot is the list of segments that `torch.cuda.memory_snapshot()` returns: what was taken from
the driver, each cut into blocks. Everything here works on that list alone, so it needs no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .adapter import Leftover
from .device import amount

Segments: TypeAlias = Iterable[Mapping[str, Any]]

LISTED = 16
"""Leftovers that are listed one by one, the largest; the others are summed up."""
LARGEST = 5
"""Blocks that the report of an exhausted memory names."""


@dataclass(frozen=True)
class Block(Leftover):
    """A leftover that stands at a known place.

    Attributes:
        address: Of its first byte, on the device; 0 if it stands for several.
        extent: The bytes that the allocator reserves for it: `nbytes`, rounded up.
    """

    address: int = 0
    extent: int = 0

    def has(self, address: int) -> bool:
        """Whether an address on the device lies in it."""
        return self.address <= address < self.address + self.extent


def blocks(segments: Segments, device: int) -> dict[int, Block]:
    """Address -> block, of all that is in use on a device.

    What its owner has given back already, and only waits for another stream, is not in use.

    Args:
        segments: A snapshot.
        device: Index of the device; a snapshot has those of all.
    """
    found: dict[int, Block] = {}
    for segment in segments:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            address = at + block["size"]
            if block["state"] == "active_allocated":
                nbytes = block.get("requested_size") or block["size"]
                found[at] = Block(nbytes, _origin(segment, block), address=at, extent=block["size"])
    return found


def _origin(segment: Mapping[str, Any], block: Mapping[str, Any]) -> str:
    """Where it was made, if somebody has PyTorch record the history of its memory; else what is known."""
    for frame in block.get("frames") or ():
        filename = str(frame.get("filename", ""))
        if filename.endswith(".py") and "/torch/" not in filename:
            return f"{frame.get('name')} ({filename}:{frame.get('line')})"
    if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
        return "an allocation since the run began, in a private pool (CUDA graphs have such)"
    return "an allocation since the run began"


def since(before: Mapping[int, Block], now: Mapping[int, Block]) -> tuple[Block, ...]:
    """What is in use now and was not before, the largest first.

    A block that was freed and made again in the same place, as large as before, counts as the same.

    Args:
        before: As `blocks` gave it when the run began.
        now: As it gives it at the end.
    """
    new = [block for at, block in now.items() if at not in before or before[at].nbytes != block.nbytes]
    new.sort(key=lambda block: (-block.nbytes, block.address))
    rest = new[LISTED:]
    if not rest:
        return tuple(new)
    summed = Block(
        sum(block.nbytes for block in rest), f"{len(rest)} smaller allocations since the run began"
    )
    return (*new[:LISTED], summed)


def held_report(
    device: str, segments: Segments, index: int, room: tuple[int, int], parts: Mapping[str, int], before: int
) -> str:
    """What was held when memory ran out, by whom as far as it can be told.

    Args:
        device: How it is called.
        segments: A snapshot, taken while everything was still held.
        index: Of the device.
        room: Bytes free on the device, and bytes that it has.
        parts: Part of the run -> bytes.
        before: Bytes that were in use when the run began.

    Returns:
        Some lines.
    """
    mine = [segment for segment in segments if segment["device"] == index]
    used = blocks(mine, index)
    total = sum(block.extent for block in used.values())
    reserved = sum(segment["total_size"] for segment in mine)
    free, size = room
    others = max(size - free - reserved, 0)
    lines = [
        f"interlock: held on {device} when its memory ran out: {amount(total)} in use by this process",
        (
            f"  beside it {amount(max(reserved - total, 0))} cached by PyTorch, {amount(others)} of other "
            f"processes, contexts and libraries; {amount(free)} of {amount(size)} free"
        ),
    ]
    named = [f"{name} {amount(nbytes)}" for name, nbytes in parts.items() if nbytes]
    # As asked for, not as rounded up by the allocator: sums of tensors are to be taken from it.
    rest = max(sum(block.nbytes for block in used.values()) - before - sum(parts.values()), 0)
    named += [f"in use before the run began {amount(before)}"] * bool(before)
    lines.append(f"  {', '.join([*named, f'all else (activations, batches, workspaces) {amount(rest)}'])}")
    largest = sorted((block.nbytes for block in used.values()), reverse=True)[:LARGEST]
    if largest:
        lines.append(f"  largest blocks: {', '.join(map(amount, largest))}")
    if reserved - total > total // 4 + free:
        lines.append(
            "  much is cached in pieces too small: PYTORCH_ALLOC_CONF=expandable_segments:True may help"
        )
    return "\n".join(lines)
