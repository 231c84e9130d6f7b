"""A TPU through torch_tpu, the successor of torch_xla: a PyTorch device of its own, and eager.

`Calls` is everything that is asked of the device, by `torch.accelerator` where that has it, as torch_tpu
wants it; `TpuAdapter` decides what is asked, and when. Never run on hardware: it was tried with the simulated
device in the place of the TPU, where placement keeps Parameters and where it makes new ones; its names were
read in the wheel of torch_tpu 0.2.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

import torch

from interlock.specs import Monitor

from .adapter import DeviceFacts, Leftover
from .device import WithGenerator, message_of, tensors_on
from .tpu_monitor import TPU
from .xla import DEAD

NEEDS = (2, 11)
"""The first torch that torch_tpu works with."""
_MADE = "a tensor made since the run began"


class Calls:
    """What is asked of the TPU of this process."""

    device = torch.device("tpu", 0) if hasattr(torch, "tpu") else torch.device("privateuseone", 0)

    def facts(self) -> DeviceFacts:
        """Starts the runtime."""
        count = torch.accelerator.device_count()
        told = {"devices": f"1 of {count}", "torch_tpu": _version("torch_tpu"), "libtpu": _version("libtpu")}
        return DeviceFacts(self.device, "TPU", told)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the device."""
        return tensor.to(self.device)

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the host."""
        return tensor.to("cpu", copy=True)

    def synchronize(self) -> None:
        """Wait for all that is queued or deferred."""
        torch.accelerator.synchronize(self.device)

    def random_state(self) -> torch.Tensor:
        """That of the device's generator, on the host."""
        return self._generator().get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Let the device's generator continue from there."""
        self._generator().set_state(state)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        self._generator().manual_seed(seed)

    def _generator(self) -> torch.Generator:
        # `torch.tpu.get_rng_state` raises from torch 2.13 on, in favour of a function that 2.13 has not.
        found: torch.Generator = torch.get_device_module(self.device).default_generators[self.device.index]
        return found


class TpuAdapter(WithGenerator):
    """Trains on one TPU.

    What is left is told by the tensors that Python knows of: torch_tpu tells no bytes of its own.
    """

    name: ClassVar[str] = "tpu"
    monitor: ClassVar[Monitor] = TPU

    calls: Calls

    def __init__(self) -> None:
        super().__init__(Calls.device)
        self.calls = Calls()
        self._stood: frozenset[int] = frozenset()

    @classmethod
    def unavailable(cls) -> str:
        """Why there is no TPU here, in a few words; starts no runtime."""
        if find_spec("torch_tpu") is None:
            return "torch_tpu is not installed: on a TPU host, pip install 'interlock[tpu]'"
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < NEEDS:
            return (
                f"torch_tpu needs torch {'.'.join(map(str, NEEDS))} or newer, and this is {torch.__version__}"
            )
        if not hasattr(torch, "tpu"):
            return (
                "torch_tpu is installed and was not loaded: torch does so when it is imported, unless "
                "TORCH_DEVICE_BACKEND_AUTOLOAD is 0"
            )
        if not torch.accelerator.is_available():
            return "torch_tpu sees no TPU on this host"
        return ""

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """The tensors over one piece of memory, found by walking all of them."""
        for tensor in tensors_on(self):
            with suppress(RuntimeError, NotImplementedError):  # a sparse tensor has no one storage
                if _storage(tensor) == leftover.key:
                    yield tensor

    def loss(self, error: BaseException) -> str:
        """By the text of a `RuntimeError`, as on XLA: the hardware and its library are the same."""
        found = DEAD.search(message_of(error)) if issubclass(type(error), RuntimeError) else None
        return found[0] if found else ""

    # -- the hooks ------------------------------------------------------------------------------

    def _take(self) -> DeviceFacts:
        facts = self.calls.facts()
        self._stood = frozenset(self._sizes())
        return facts

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.copy(tensor)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.home(tensor)

    def _wait(self) -> None:
        self.calls.synchronize()

    @property
    def allocated(self) -> int:
        """Bytes of the tensors that Python knows on the device and that were not there before the run."""
        return sum(nbytes for storage, nbytes in self._sizes().items() if storage not in self._stood)

    def _measure(self) -> tuple[Leftover, ...] | None:
        new = {storage: size for storage, size in self._sizes().items() if storage not in self._stood}
        # Which of two runs has made one is not written on it.
        if new and self._beside:
            return None
        return tuple(Leftover(size, _MADE, key=storage) for storage, size in new.items())

    def _give_back(self) -> None:
        self._stood = frozenset()

    def _sizes(self) -> dict[int, int]:
        """Storage -> its bytes, for each tensor on the device that Python knows of."""
        found: dict[int, int] = {}
        for tensor in tensors_on(self):
            with suppress(RuntimeError, NotImplementedError):  # a sparse tensor has no one storage
                found[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
