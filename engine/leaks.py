"""What is left on a device, by whom it is held and where it was made: for anybody's program.

`census()` before, `since(census)` after: a `Leak` for each piece of device memory that was not there before.
Found are tensors that Python knows of (sparse ones and subclasses too, without running their code), their
gradients, what autograd saved for a backward pass, and on the simulated device every block, whoever
holds it. Memory is told apart by its storage, so views count once, and a storage is never kept alive.

No device is asked for anything: a device that was never initialised has no tensors. While torch is not
loaded there are none at all. Nothing is collected either: what only a reference cycle holds is found by
counting references.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import standing
from .owners import Finder, Owner
from .process_state import Allowed
from .references import own_part
from .standing import Counts, Held, on_device

SECONDS = 3.0
"""For the search for owners of one report; what is left after that is listed without."""

RESIDUE = (
    Allowed("tensor", "global torch._inductor.*", "the compiler's caches, kept for the next call"),
    Allowed("tensor", "global torch._dynamo.*", "the compiler's caches, kept for the next call"),
    Allowed("tensor", "global torch._functorch.*", "the compiler's caches, kept for the next call"),
    Allowed("tensor", "global torch.cuda.graphs*", "pools of CUDA graphs, kept for the next replay"),
    Allowed("tensor", "(by the test tool) *", "the test tool's own variable, gone when the test is over"),
    Allowed("tensor", "global sys.last_*", "the last failed test's traceback, which pytest keeps"),
    Allowed("tensor", "*LogRecord*.exc_info*", "a captured log record, which pytest keeps"),
)
"""What libraries hold and give back by themselves, by the path of references: named, not blamed on anybody.

Workspaces of cuBLAS, pinned buffers and the context of a device are no tensors and are never looked at.
"""


@dataclass(frozen=True)
class Leak:
    """One piece of device memory that was left.

    Attributes:
        kind: `tensor`: Python knows it. `saved`: only autograd has it, for a backward pass. `block`: the
            simulated device counts it, and no tensor over it was found. `storage`: Python knows that alone,
            without a tensor over it.
        shape: Of the tensor that takes most of it.
        dtype: Its type, such as `torch.float32`; empty for a block or a storage.
        device: Where it stands.
        nbytes: The size of its memory, in bytes, counted once for all views of it; of what was there before,
            by how much it has grown.
        owners: Paths of references that hold it.
        held: As `Owner.held` of the first of these.
        operator: What made it, where the simulated device has recorded that.
        stack: Where, innermost first; empty unless stacks are recorded.
        residue: Why a library may keep it; empty if it is a leak.
    """

    kind: Literal["tensor", "saved", "block", "storage"]
    shape: tuple[int, ...]
    dtype: str
    device: str
    nbytes: int
    owners: tuple[str, ...] = ()
    held: str = "unknown"
    operator: str = ""
    stack: tuple[str, ...] = ()
    residue: str = ""

    def __str__(self) -> str:
        what = f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}" if self.dtype else "memory"
        made = f", made by {self.operator}" if self.operator else ""
        lines = [f"{what} on {self.device}, {self.nbytes} bytes{made}"]
        lines += [f"  {_held(self.held, owner)}" for owner in self.owners]
        lines += [
            "  made at " + place if at == 0 else "     from " + place for at, place in enumerate(self.stack)
        ]
        return "\n".join(lines)


_HELD = {
    "cycle": "held only by a reference cycle; gc would free it: ",
    "unseen": "held by something that Python cannot see (C++, a thread's stack); last known: ",
    "unknown": "held by, as far as the search went: ",
}


def _held(how: str, owner: str) -> str:
    # A path that begins with what autograd saved has its verb already.
    return _HELD.get(how, "" if owner.startswith("saved by ") else "held by ") + owner


@dataclass(frozen=True)
class Census:
    """What stands on devices at one time. It keeps nothing alive.

    Attributes:
        counts: Which tensors are looked at.
        storages: Storage -> a weak reference, so that its address is not given to another one.
        opaque: Tensors without a storage, by their identity.
        blocks: Allocations of the simulated device, by number.
    """

    counts: Counts
    storages: dict[int, Any] = field(repr=False)
    opaque: frozenset[int] = frozenset()
    blocks: frozenset[int] = frozenset()
    sizes: Mapping[int, int] = field(default_factory=dict)


def census(counts: Counts | None = None) -> Census:
    """What stands on devices now.

    Args:
        counts: Which tensors count; by default those on any device other than the host.
    """
    counts = counts or on_device
    found = standing.standing(counts)
    storages: dict[int, Any] = {}
    if found:
        weak = standing.torch_module().multiprocessing.reductions.StorageWeakRef
        storages = {key: weak(one.storage) for key, one in found.items() if one.storage is not None}
    opaque = frozenset(key for key, one in found.items() if one.storage is None)
    sizes = {key: one.nbytes for key, one in found.items()}
    return Census(counts, storages, opaque, frozenset(block.sequence for block in standing.blocks()), sizes)


def live_tensors(counts: Counts | None = None) -> tuple[Leak, ...]:
    """Everything that stands on a device now, with its owners.

    Args:
        counts: Which tensors count; by default those on any device other than the host.
    """
    return since(Census(counts or on_device, {}))


def since(before: Census, allowed: Sequence[Allowed] = (), seconds: float = SECONDS) -> tuple[Leak, ...]:
    """What stands on devices now and did not before, largest first, residue of libraries last.

    Args:
        before: From `census()`.
        allowed: What more may stay, beside `RESIDUE`: entries of what `tensor`, with a pattern for the path.
        seconds: For the search for owners.
    """
    found = standing.standing(before.counts)
    new = []
    for key, one in found.items():
        if key in (before.opaque if one.storage is None else before.storages):
            one.nbytes -= before.sizes.get(key, one.nbytes)  # what it has grown by
            if one.nbytes <= 0:
                continue
        new.append(one)
    known = {standing.sequence_of(one) for one in found.values()}
    blocks = [one for one in standing.blocks() if one.sequence not in before.blocks | known]
    found.clear()
    if not new and not blocks:
        return ()
    leaks = _explained(new, (*RESIDUE, *allowed), time.monotonic() + seconds)
    leaks += [_unheld(block) for block in blocks]
    return tuple(sorted(leaks, key=lambda leak: (bool(leak.residue), -leak.nbytes)))


def blamed(leaks: Iterable[Leak]) -> tuple[Leak, ...]:
    """Those that are nobody's residue."""
    return tuple(leak for leak in leaks if not leak.residue)


def render(leaks: Sequence[Leak], limit: int = 10) -> str:
    """A report for people.

    Args:
        leaks: As found.
        limit: How many are written out.
    """
    own, residue = blamed(leaks), [leak for leak in leaks if leak.residue]
    if not leaks:
        return "nothing is left on a device"
    total = sum(leak.nbytes for leak in own)
    lines = [f"{len(own)} piece(s) of memory are left on a device, {total} bytes:"] if own else []
    for leak in own[:limit]:
        lines += ["- " + str(leak).replace("\n", "\n  ")]
    if len(own) > limit:
        lines.append(f"- and {len(own) - limit} more")
    for leak in residue[:limit]:
        lines.append(f"not blamed: {leak.nbytes} bytes, {'; '.join(leak.owners)}: {leak.residue}")
    return "\n".join(lines)


# -- explaining ----------------------------------------------------------------------------------------


def _explained(held: list[Held], allowed: Sequence[Allowed], until: float) -> list[Leak]:
    """Leaks with owners. Searched for only where the way from an owner found before does not lead."""
    finder = Finder(held, until, own=[held], passed_over=lambda path: bool(_residue(path, allowed)))
    leaks = []
    for one in sorted(held, key=lambda one: -one.nbytes):
        found = next(finder.owners_of(one))
        leaks.append(_leak(one, found, allowed))
    return leaks


def _leak(held: Held, owner: Owner, allowed: Sequence[Allowed]) -> Leak:
    torch = standing.torch_module()
    base = torch._C.TensorBase
    block = standing.block_of(held)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        largest = max(held.tensors, key=base.numel)
        return Leak(
            kind="storage" if held.bare else "saved" if held.only_saved else "tensor",
            shape=() if held.bare else tuple(base.shape.__get__(largest)),
            dtype="" if held.bare else str(base.dtype.__get__(largest)),
            device=str(base.device.__get__(largest)),
            nbytes=held.nbytes,
            owners=(owner.path,),
            held=owner.held,
            operator=block.operator if block is not None else "",
            stack=own_part(block.stack) if block is not None else (),
            residue=_residue(owner.path, allowed) if owner.held == "named" else "",
        )


def _unheld(block: Any) -> Leak:
    """A block over which there is no tensor: C++ has it."""
    owners = ("no tensor that Python knows",)
    return Leak(
        "block", (), "", "sim:0", block.nbytes, owners, "unseen", block.operator, own_part(block.stack)
    )


def _residue(path: str, allowed: Sequence[Allowed]) -> str:
    return next(
        (e.reason for e in allowed if e.what == "tensor" and fnmatch.fnmatchcase(path, e.pattern)), ""
    )
