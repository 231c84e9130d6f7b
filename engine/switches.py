"""What a process has only once, and how it is switched: generators, determinism, default dtype, threads.

Each switch can say what is set, set something else, and put back exactly what was there. Who may do so when
is the matter of `leases`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from . import compiler
from .deadline import bounded
from .evidence import add_note

T = TypeVar("T")
States = tuple[tuple["RandomSource", Any], ...]
"""Random generators, each with a state."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class RandomSource:
    """One random generator of the process.

    Attributes:
        name: For messages.
        get: Its state, a copy.
        put: Lets it stand in a state.
        seed: Seeds it.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]


def host_sources() -> tuple[RandomSource, ...]:
    """The generators of torch on the CPU, of Python, and of numpy if it is loaded; touches no device."""
    cpu = torch.default_generator
    found = [
        RandomSource("torch on the CPU", cpu.get_state, cpu.set_state, cpu.manual_seed),
        RandomSource("python", random.getstate, random.setstate, random.seed),
    ]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:

        def seed(value: int) -> None:
            # It takes 32 bits at a time; what fits gives the numbers that users know.
            numpy.seed(value if value < 2**32 else [value % 2**32, value >> 32])

        found.append(RandomSource("numpy", lambda: numpy.get_state(legacy=False), numpy.set_state, seed))
    return tuple(found)


class Switch(ABC):
    """One setting of the process: how it is read, set, and put back. All can be repeated."""

    @abstractmethod
    def read(self) -> Any:
        """What the process has."""

    @abstractmethod
    def write(self, wanted: Any) -> None:
        """Set it, for the process and for this thread."""

    @abstractmethod
    def restore(self, before: Any) -> None:
        """Let the process have what `read` returned."""

    def read_own(self, wanted: Any, before: Any) -> Any:
        """What this thread has of its own; `before` is what the process had, if `wanted` is set already."""
        return None

    def restore_own(self, own: Any, others: Any) -> None:
        """Let this thread have what `read_own` returned, and all others the value that stands for them."""
        return


class _Dtype(Switch):
    def read(self) -> Any:
        return torch.get_default_dtype()

    def write(self, wanted: Any) -> None:
        torch.set_default_dtype(wanted)

    def restore(self, before: Any) -> None:
        torch.set_default_dtype(before)


class _Threads(Switch):
    """The process has a count for threads that use torch for the first time; each thread then has its own.

    `torch.set_num_threads` sets both, and only a new thread can tell, or set, the first alone. So, when
    one of several runs leaves, a thread that is new at that very moment may get what that run's had.
    """

    def read(self) -> Any:
        return _on_new_thread(torch.get_num_threads)

    def write(self, wanted: Any) -> None:
        torch.set_num_threads(wanted)

    def restore(self, before: Any) -> None:
        _on_new_thread(lambda: torch.set_num_threads(before))

    def read_own(self, wanted: Any, before: Any) -> Any:
        own = torch.get_num_threads()
        # A thread that has the leased value has it from the lease: this very call may be its first use.
        return before if before is not None and own == wanted else own

    def restore_own(self, own: Any, others: Any) -> None:
        torch.set_num_threads(own)
        if own != others:
            self.restore(others)


def _on_new_thread(function: Callable[[], T]) -> T:
    return bounded(function, threading.TIMEOUT_MAX, "thread count")


class _Determinism(Switch):
    """torch's own flag, cuDNN's two, and a variable that cuBLAS reads when it starts."""

    def read(self) -> Any:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            os.environ.get(_CUBLAS),
        )

    def write(self, wanted: Any) -> None:
        torch.use_deterministic_algorithms(wanted)
        torch.backends.cudnn.deterministic = wanted
        if wanted:
            torch.backends.cudnn.benchmark = False
            os.environ.setdefault(_CUBLAS, ":4096:8")

    def restore(self, before: Any) -> None:
        mode, warn_only, cudnn, benchmark, variable = before
        # Not the public function: it sets the compiler's flag too, which may stand otherwise.
        torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)
        torch.backends.cudnn.deterministic = cudnn
        torch.backends.cudnn.benchmark = benchmark
        if variable is None:
            os.environ.pop(_CUBLAS, None)
        else:
            os.environ[_CUBLAS] = variable

    def read_own(self, wanted: Any, before: Any) -> Any:
        # The compiler's flag, which `use_deterministic_algorithms` sets, is a context variable.
        return getattr(_compiler(), "deterministic", None)  # torch 2.9 has none

    def restore_own(self, own: Any, others: Any) -> None:
        if own is not None:
            _compiler().deterministic = own


def _compiler() -> Any:
    return compiler.load(compiler.SETTINGS)


class Seeds(Switch):
    """Seeds sources or, for a run that goes on, puts its states into them."""

    def __init__(self, sources: Sequence[RandomSource], states: States = ()) -> None:
        self.sources, self.states = tuple(sources), states

    def read(self) -> Any:
        """The state of each source."""
        return tuple((source, source.get()) for source in self.sources)

    def write(self, wanted: Any) -> None:
        """Seed each source, or put the states of a run that goes on."""
        if self.states:
            self.restore(self.states)
            return
        for source in self.sources:
            source.seed(wanted)

    def restore(self, before: Any) -> None:
        """Put states back; all are attempted."""
        errors: list[BaseException] = []
        for source, state in before:
            try:
                source.put(state)
            except BaseException as error:
                add_note(error, f"interlock: in putting back the random generator of {source.name}")
                errors.append(error)
        raise_first(errors)


SWITCHES: dict[str, Switch] = {"deterministic": _Determinism(), "dtype": _Dtype(), "threads": _Threads()}


# -- who has it ------------------------------------------------------------------------------


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first of some errors, with the others as notes; nothing if there is none."""
    if not errors:
        return
    for later in errors[1:]:
        add_note(errors[0], f"interlock: giving a lease back also raised {type(later).__name__}: {later}")
    raise errors[0]
