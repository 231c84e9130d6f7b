"""The simulated accelerator as a backend: for rehearsals and tests, on any machine, at no cost.

The device itself is in `simulator/`. It is registered with torch when a run takes it, for the rest of the
process; describing and making an adapter registers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import torch

from interlock.specs import Monitor

from . import simulator
from .adapter import DeviceFacts, Leftover
from .device import DeviceAdapter, amount, bytes_of, causes, tensors_on
from .errors import DeviceUnavailable
from .monitors import CUDA
from .simulator import SimulatedLoss, private
from .simulator.device import hold, let_go


class SimAdapter(DeviceAdapter):
    """Trains on the simulated device.

    Args:
        parameters: What placement does to Parameter objects: `replaced` by new ones, as on XLA, which finds
            more mistakes; or `kept`, as on CUDA.
    """

    name: ClassVar[str] = "sim"
    monitor: ClassVar[Monitor] = CUDA

    def __init__(self, parameters: str = "replaced") -> None:
        if parameters not in ("replaced", "kept"):
            raise DeviceUnavailable(
                f"parameters are 'replaced' or 'kept' on placement, and not {parameters!r}"
            )
        # Until it is registered the device has another name, and is the same one.
        super().__init__(torch.device(private.slot(), 0))
        self._parameters = parameters
        self._before = simulator.memory.sequence

    @classmethod
    def unavailable(cls) -> str:
        """Why it cannot be registered in this process; registers nothing."""
        return simulator.unavailable()

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """The tensors over one block."""
        for tensor in tensors_on(self):
            block = simulator.block_of(tensor)
            if block is not None and block.sequence == leftover.key:
                yield tensor

    def loss(self, error: BaseException) -> str:
        """By the class of the error: the simulator raises one of its own."""
        return simulator.lost() or "simulated" if issubclass(type(error), SimulatedLoss) else ""

    def explain(self, error: BaseException, parts: Mapping[str, Iterable[torch.Tensor]] | None = None) -> str:
        """What was held, after an out-of-memory error."""
        if not self._taken or not any(issubclass(type(e), torch.OutOfMemoryError) for e in causes(error)):
            return ""
        sizes = {name: bytes_of(self, tensors) for name, tensors in (parts or {}).items()}
        used = simulator.memory.allocated
        named = [f"{name} {amount(nbytes)}" for name, nbytes in sizes.items() if nbytes]
        named.append(f"all else (activations, batches) {amount(max(used - sum(sizes.values()), 0))}")
        return (
            f"interlock: held on {self.device} when its memory ran out: {amount(used)}\n  {', '.join(named)}"
        )

    # -- the hooks ------------------------------------------------------------------------------

    def _acquire(self) -> DeviceFacts:
        why = self.unavailable()
        if not why:
            simulator.install()
        return super()._acquire()

    def _take(self) -> DeviceFacts:
        hold(self._parameters, self)
        self._before = simulator.memory.sequence
        room = simulator.memory.capacity
        capacity = "that of the host" if room is None else amount(room)
        facts = {"memory": capacity, "parameters": self._parameters}
        return DeviceFacts(self.device, "simulated device", facts)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def _wait(self) -> None:
        simulator.synchronize()

    @property
    def allocated(self) -> int:
        """Bytes on the device that were taken since this adapter last acquired it, and are still alive."""
        return sum(block.nbytes for block in simulator.memory.live(after=self._before))

    def _measure(self) -> tuple[Leftover, ...] | None:
        blocks = simulator.memory.live(after=self._before)
        # Which of two runs has made a block is not written on it.
        if blocks and self._beside:
            return None
        return tuple(_left(block) for block in blocks)

    def _free(self) -> None:
        super()._free()
        # Also of a device that was lost: this asks nothing of it.
        let_go(self)

    def _give_back(self) -> None:
        return


_OURS = str(Path(__file__).parents[1])


def _left(block: simulator.Block) -> Leftover:
    # The frames of the engine itself say nothing about whose it is.
    theirs = tuple(place for place in block.stack if not place.startswith(_OURS))
    return Leftover(block.nbytes, block.operator, stack=theirs or block.stack, key=block.sequence)
