"""`torch.sim`: what `torch.cuda` is for CUDA, for the simulated device. Asking it of a lost device raises."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from . import figures, private
from .faults import faults
from .tensors import Refusal


def synchronize(device: Any = None) -> None:
    """Wait for the device; what went wrong earlier is raised here."""
    struck = faults.passes("sync", "synchronize")
    if struck is not None:
        if struck.how == "late":
            faults.later(struck)
        else:
            raise struck.error()


# Drawing: the device draws from the host's default generator.


def manual_seed(seed: int) -> None:
    """Seed the generator that the device draws from: the host's, so the host draws anew, too."""
    torch.default_generator.manual_seed(int(seed))


def seed() -> int:
    """Seed it by chance.

    Returns:
        The seed.
    """
    return torch.default_generator.seed()


def initial_seed() -> int:
    """What it was seeded with last."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """That of the host's generator."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Of the host's generator."""
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Of each device: there is one."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Of each device: there is one."""
    for state in new_states:
        set_rng_state(state)


def empty_cache() -> None:
    """Nothing is cached."""
    faults.asked("empty_cache")


def ipc_collect() -> None:
    """Nothing is shared with other processes."""
    faults.asked("ipc_collect")


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
        faults.asked("Event.wait")

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize()

    def query(self) -> bool:
        """Whether the mark is passed."""
        faults.asked("Event.query")
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
        faults.asked("Stream.wait_stream")

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""
        faults.asked("Stream.wait_event")

    def record_event(self, event: Any = None) -> Any:
        """A mark, passed at once."""
        faults.asked("Stream.record_event")
        return event or Event()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize()

    def query(self) -> bool:
        """Whether everything is done."""
        faults.asked("Stream.query")
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
        empty_cache=empty_cache,
        ipc_collect=ipc_collect,
        memory_allocated=figures.memory_allocated,
        memory_reserved=figures.memory_allocated,
        max_memory_allocated=figures.max_memory_allocated,
        max_memory_reserved=figures.max_memory_allocated,
        reset_peak_memory_stats=figures.reset_peak_memory_stats,
        mem_get_info=figures.mem_get_info,
        memory_stats=figures.memory_stats,
        memory_stats_as_nested_dict=figures.memory_stats_as_nested_dict,
        memory_snapshot=figures.memory_snapshot,
        memory_summary=figures.memory_summary,
        OutOfMemoryError=torch.OutOfMemoryError,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        seed=seed,
        seed_all=seed,
        initial_seed=initial_seed,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        get_rng_state_all=get_rng_state_all,
        set_rng_state_all=set_rng_state_all,
        Stream=Stream,
        Event=Event,
        stream=_stream,
        current_stream=lambda device=None: _STREAM,
        default_stream=lambda device=None: _STREAM,
        set_stream=_nothing,
    )
    return made
