"""`torch.sim`: what `torch.cuda` is for CUDA, for the simulated device. Asking it of a lost device raises."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from . import private
from .faults import faults
from .kernels import Refusal
from .memory import memory


def synchronize(device: Any = None) -> None:
    """Wait for the device; what went wrong earlier is raised here."""
    struck = faults.passes("sync", "synchronize")
    if struck is not None:
        if struck.how == "late":
            faults.later(struck.error())
        else:
            raise struck.error()


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
    """(free, total) bytes; zeros where no capacity was set."""
    faults.asked("mem_get_info")
    return memory.free_bytes(), memory.capacity or 0


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


def manual_seed(seed: int) -> None:
    """The device draws from the host's generator, which `torch.manual_seed` seeds."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    """That of the host's generator."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Of the host's generator."""
    torch.set_rng_state(new_state)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Event:
    """A mark in the queue, which is passed at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def record(self, stream: Any = None) -> None:
        """Mark now."""
        faults.asked("Event.record")

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize()

    def query(self) -> bool:
        """Whether the mark is passed."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another mark: the device keeps no clock."""
        return 0.0


class Stream:
    """The one queue, in which each operator ends before the next begins."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """A mark, passed at once."""
        return event or Event()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize()

    def query(self) -> bool:
        """Whether everything is done."""
        return True


_STREAM = Stream()


class _OneDevice(nullcontext[None]):
    """A context in which the one device is the current one, as it is outside."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def _stream(stream: Any) -> AbstractContextManager[None]:
    return nullcontext()


class _Module(ModuleType):
    """Also answers torch's compiler, which asks here for one for this device: there is none."""

    def __getattr__(self, name: str) -> Any:
        if name in private.COMPILER_PARTS:
            private.give_compiler_part(self.__name__.rpartition(".")[2], _NoCompiler)
            return _NoCompiler
        raise AttributeError(f"module 'torch.sim' has no attribute '{name}'")


class _Asked(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever looks at any class
            raise AttributeError(name)
        raise Refusal(_NOT_COMPILED)


class _NoCompiler(metaclass=_Asked):
    """In place of each part of a compiler; whichever is asked or made first says so."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise Refusal(_NOT_COMPILED)

    @classmethod
    def create(cls, *_: Any, **__: Any) -> Any:
        """How torch makes one of the parts."""
        raise Refusal(_NOT_COMPILED)


_NOT_COMPILED = (
    "SIM error: torch.compile with its default backend, inductor, makes no code for the simulated device. "
    "Leave `compile` out here, or take backend='aot_eager', which traces and compiles nothing"
)


def build() -> ModuleType:
    """The module, to be registered as `torch.sim`."""
    made = _Module("torch.sim", __doc__)
    made.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=_nothing,
        _lazy_init=_nothing,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=_nothing,
        device=_OneDevice,
        device_of=_OneDevice,
        get_device_name=lambda device=None: "simulated device",
        get_device_capability=lambda device=None: (0, 0),
        get_device_properties=_nothing,
        is_bf16_supported=lambda *_, **__: True,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        synchronize=synchronize,
        empty_cache=_nothing,
        ipc_collect=_nothing,
        memory_allocated=memory_allocated,
        memory_reserved=memory_allocated,
        max_memory_allocated=max_memory_allocated,
        max_memory_reserved=max_memory_allocated,
        reset_peak_memory_stats=reset_peak_memory_stats,
        mem_get_info=mem_get_info,
        memory_stats=memory_stats,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        seed=_nothing,
        seed_all=_nothing,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        Stream=Stream,
        Event=Event,
        stream=_stream,
        current_stream=lambda device=None: _STREAM,
        default_stream=lambda device=None: _STREAM,
        set_stream=_nothing,
    )
    return made
