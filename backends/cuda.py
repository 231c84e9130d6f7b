"""One NVIDIA GPU: copies that do not wait, leftovers by the allocator's account, no call after a loss.

`cuda_calls.Calls` is everything that is asked of CUDA; here is decided what is asked, and when. So the
decisions can be tested where there is no device, with other calls in their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import torch

from interlock.specs import Monitor

from .adapter import DeviceFacts, Leftover
from .cuda_calls import Calls, way_of
from .cuda_memory import Block, blocks, held_report, since
from .device import WithGenerator, bytes_of, causes, message_of, tensors_on
from .errors import DeviceUnavailable
from .monitors import CUDA

LOSSES = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "contained device error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    999: "unknown error",
}
"""CUDA's error codes after which every later call in the process fails as well -> what CUDA says of them."""
OUT_OF_MEMORY = 2

_TEXTS = "|".join(map(re.escape, LOSSES.values()))
_TEXT = re.compile(f"({_TEXTS})")
_LOSS = re.compile(rf"(?:CUDA(?: driver)? error|Triton Error \[CUDA\]|HIP error)\s*:\s*({_TEXTS})")


class CudaAdapter(WithGenerator):
    """Trains on one NVIDIA GPU, and names it by its index.

    Args:
        index: Which one, of those that `CUDA_VISIBLE_DEVICES` leaves visible.
    """

    name: ClassVar[str] = "cuda"
    monitor: ClassVar[Monitor] = CUDA

    calls: Calls

    def __init__(self, index: int = 0) -> None:
        # `torch.device` takes -1, which means "the current one": that is another one on another thread.
        if type(index) is not int or index < 0:
            raise DeviceUnavailable(f"the index of a CUDA device is 0, 1, ..., and not {index!r}")
        super().__init__(torch.device("cuda", index))
        self.calls = Calls(index)
        self._index = index
        self._before: dict[int, Block] = {}
        self._session: _Session | None = None

    @classmethod
    def unavailable(cls) -> str:
        """Why there is no CUDA here; asks the driver's management library, and creates no context."""
        if not torch.cuda._is_compiled():
            return f"this PyTorch ({torch.__version__}) is built without CUDA: install a build with CUDA"
        if torch.cuda._is_in_bad_fork():
            return "this process was forked from one that uses CUDA: start it with the method 'spawn'"
        if not torch.cuda.device_count():
            return "there is no NVIDIA GPU with a driver, or CUDA_VISIBLE_DEVICES hides it"
        return ""

    def session(self) -> AbstractContextManager[object]:
        """From `acquire` on the device is the current one of the thread."""
        return _Session(self)

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """Found by walking all tensors; those that only an autograd graph holds are not among them."""
        if isinstance(leftover, Block) and leftover.extent:
            for tensor in tensors_on(self):
                with suppress(RuntimeError, NotImplementedError):  # a sparse tensor has no one storage
                    if leftover.has(tensor.untyped_storage().data_ptr()):
                        yield tensor

    def loss(self, error: BaseException) -> str:
        """By CUDA's error code; by its text where only that is left, as in errors of compiled kernels."""
        kind = type(error)
        if issubclass(kind, torch.AcceleratorError):
            code = getattr(error, "error_code", None)
            if type(code) is int:
                return LOSSES.get(code, "")
        if issubclass(kind, RuntimeError) and not issubclass(kind, torch.OutOfMemoryError):
            # `torch.cuda.CudaError` is CUDA's own by its class, and has the text alone.
            known = _TEXT if issubclass(kind, torch.cuda.CudaError) else _LOSS
            found = known.search(message_of(error))
            return found[1] if found else ""
        return ""

    def explain(self, error: BaseException, parts: Mapping[str, Iterable[torch.Tensor]] | None = None) -> str:
        """What was held, after an out-of-memory error; where to look, after the loss of the device."""
        if self.lost:
            return (
                f"interlock: device '{self.device}' is lost until the process ends. CUDA reports such errors "
                "late: CUDA_LAUNCH_BLOCKING=1 shows the call that caused it"
            )
        if not self._taken or not any(map(out_of_memory, causes(error))):
            return ""
        sizes = {name: bytes_of(self, tensors) for name, tensors in (parts or {}).items()}
        stood = sum(block.nbytes for block in self._before.values())
        # It is a report on an error, and must not become another one.
        with suppress(Exception):
            calls = self.calls
            return held_report(str(self.device), calls.segments(), self._index, calls.room(), sizes, stood)
        return ""

    # -- the hooks ------------------------------------------------------------------------------

    def _take(self) -> DeviceFacts:
        count = self.calls.count()
        if self._index >= count:
            raise DeviceUnavailable(
                f"there is no device '{self.device}': {count} can be seen, from index 0 on. Choose another "
                "index, or look at CUDA_VISIBLE_DEVICES"
            )
        facts = self.calls.facts()
        if self._session is not None:
            self._session.begin()
        self._clear_workspaces()
        self._before = blocks(self.calls.segments(), self._index)
        return facts

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.copy(tensor, way_of(tensor))

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.home(tensor)

    def _wait(self) -> None:
        self.calls.synchronize()

    def _measure(self) -> tuple[Leftover, ...] | None:
        self._clear_workspaces()
        new = since(self._before, blocks(self.calls.segments(), self._index))
        # The allocator does not say whose a block is: that another run had the device makes it unknown.
        return None if new and self._beside else new

    def _give_back(self) -> None:
        self._clear_workspaces()
        self.calls.clear_caches()
        self._before = {}

    def _clear_workspaces(self) -> None:
        # Another run's thread might be about to use its own: then they stay, and the residue is unknown.
        if self._alone():
            self.calls.clear_workspaces()


class _Session:
    """Not by `contextlib`, whose managers set attributes on the exception that passes: some refuse that.

    Entering it before `acquire` initialises nothing, and leaving it after a loss calls nothing.
    """

    def __init__(self, adapter: CudaAdapter) -> None:
        self._adapter = adapter
        self._scope: AbstractContextManager[Any] | None = None

    def begin(self) -> None:
        """Make the device the current one of this thread, once."""
        if self._scope is None:
            scope = self._adapter.calls.current()
            scope.__enter__()
            self._scope = scope

    def __enter__(self) -> None:
        adapter = self._adapter
        adapter._session = self
        if adapter._taken and not adapter.lost:
            self.begin()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        scope, self._scope = self._scope, None
        adapter, adapter._session = self._adapter, None
        # The error that passes may be the first to tell of the loss: the engine classifies it later.
        if error is not None and adapter._taken and adapter.is_loss_of_device(error):
            return
        if scope is not None and not adapter.lost:
            scope.__exit__(None, None, None)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or pinned memory, is exhausted. The device lives on."""
    kind = type(error)
    if issubclass(kind, torch.OutOfMemoryError):
        return True
    return issubclass(kind, torch.AcceleratorError) and getattr(error, "error_code", 0) == OUT_OF_MEMORY
