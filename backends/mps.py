"""One Apple GPU, through Metal: the same order as CUDA, with an allocator that tells less.

`Calls` is everything that is asked of Metal; `MpsAdapter` decides what is asked, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlock.specs import Monitor

from .adapter import DeviceFacts, Leftover
from .device import DeviceAdapter, amount, bytes_of, causes, message_of, tensors_on
from .mps_monitor import MPS


class Calls:
    """What is asked of Metal."""

    device = torch.device("mps", 0)

    def facts(self) -> DeviceFacts:
        """Initialises the device."""
        told = {"memory": f"{torch.mps.recommended_max_memory()} bytes recommended at most"}
        return DeviceFacts(self.device, "Apple GPU", told)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the device."""
        # The memory is one and the same: a copy that does not wait could still read the source when its
        # owner changes it, and saves nothing.
        return tensor.to(self.device)

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the host."""
        return tensor.to("cpu", copy=True)

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        torch.mps.synchronize()

    def allocated(self) -> int:
        """Bytes in use by tensors, each rounded up, whoever made them."""
        return torch.mps.current_allocated_memory()

    def reserved(self) -> int:
        """Bytes that Metal has for this process."""
        return torch.mps.driver_allocated_memory()

    def clear_caches(self) -> None:
        """Give back what is cached."""
        torch.mps.empty_cache()

    def random_state(self) -> torch.Tensor:
        """That of the device's generator, on the host."""
        return torch.mps.get_rng_state()

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.mps.manual_seed(seed)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Continue from there."""
        torch.mps.set_rng_state(state)


class MpsAdapter(DeviceAdapter):
    """Trains on the GPU of a Mac.

    No error is taken for the loss of the device: Metal has none that outlives a command buffer.
    """

    name: ClassVar[str] = "mps"
    monitor: ClassVar[Monitor] = MPS

    def __init__(self) -> None:
        super().__init__(Calls.device)
        self.calls = Calls()
        self._floor = 0
        self._before: dict[int, StorageWeakRef] = {}

    @classmethod
    def unavailable(cls) -> str:
        """Why there is no Metal here."""
        if not torch.backends.mps.is_built():
            return f"this PyTorch ({torch.__version__}) is built without Metal, which only Macs have"
        if not torch.backends.mps.is_available():
            return (
                "this system has no Metal that PyTorch can use: it needs macOS 14 and a GPU that macOS sees"
            )
        return ""

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """Found by walking all tensors."""
        for tensor in tensors_on(self):
            if tensor.layout is torch.strided and not self._stood(tensor):
                yield tensor

    def explain(self, error: BaseException, parts: Mapping[str, Iterable[torch.Tensor]] | None = None) -> str:
        """What was held, after an out-of-memory error."""
        if not self._taken or not any(map(out_of_memory, causes(error))):
            return ""
        sizes = {name: bytes_of(self, tensors) for name, tensors in (parts or {}).items()}
        used = self.calls.allocated()
        named = [f"{name} {amount(nbytes)}" for name, nbytes in sizes.items() if nbytes]
        rest = max(used - self._floor - sum(sizes.values()), 0)
        named += [f"in use before the run began {amount(self._floor)}"] * bool(self._floor)
        named.append(f"all else (activations, batches) {amount(rest)}")
        return (
            f"interlock: held on {self.device} when its memory ran out: {amount(used)} in use by tensors of "
            f"this process, {amount(self.calls.reserved())} taken from Metal\n  {', '.join(named)}"
        )

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's generator, on the host; `None` while no device is acquired."""
        return self.calls.random_state() if self._taken else None

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Let the device's generator continue from a state that `random_state` gave."""
        if state is not None:
            self.calls.set_random_state(state)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        self.calls.seed(seed)

    # -- the hooks ------------------------------------------------------------------------------

    def _take(self) -> DeviceFacts:
        facts = self.calls.facts()
        self._floor = self.calls.allocated()
        there = tensors_on(self) if self._floor else ()
        storages = [tensor.untyped_storage() for tensor in there if tensor.layout is torch.strided]
        self._before = {storage._cdata: StorageWeakRef(storage) for storage in storages}
        return facts

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.copy(tensor)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.home(tensor)

    def _wait(self) -> None:
        self.calls.synchronize()

    def _measure(self) -> tuple[Leftover, ...] | None:
        """By the allocator's total; if that has grown, by the tensors that Python knows of.

        The total rounds up and counts everybody's, so it can only say that nothing is left. Where it has
        grown and no tensor is found, or another run had the device, too, nobody can tell.
        """
        if self.calls.allocated() <= self._floor:
            return ()
        sizes: dict[int, int] = {}
        for tensor in self.holders(Leftover(0, "")):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        if self._beside or not sizes:
            return None
        return (Leftover(sum(sizes.values()), f"{len(sizes)} tensors made since the run began"),)

    def _give_back(self) -> None:
        self.calls.clear_caches()
        self._before = {}

    def _stood(self, tensor: torch.Tensor) -> bool:
        """Whether it stood there before the run began."""
        known = self._before.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory is exhausted."""
    kind = type(error)
    told = issubclass(kind, RuntimeError) and message_of(error).startswith("MPS backend out of memory")
    return told or issubclass(kind, torch.OutOfMemoryError)
