"""What a run must leave as it found it: the process's state, and its random generators."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .switches import host_sources


@dataclass(frozen=True)
class Reading:
    """One reading.

    Attributes:
        process: As `process_state.snapshot()` gives it.
        generators: Name -> state, as text, of each random generator of the host.
    """

    process: Any
    generators: dict[str, str]


def reading() -> Reading:
    """Read the state now."""
    return Reading(_process_state().snapshot(), _generators())


def _process_state() -> Any:
    # By name and late: it is part of what whole test suites use, and no sweep needs it to be described.
    return import_module("interlock.process_state")


def settled(before: Reading) -> list[str]:
    """In what the process is other than it was, for good: a line each."""
    lines: list[str] = list(_process_state().settled(before.process))
    now = _generators()
    lines += [
        f"random generator: {name} does not stand where it stood"
        for name, state in before.generators.items()
        if now.get(name) != state
    ]
    if torch._C._len_torch_dispatch_stack():
        lines.append("a context of torch was entered and never left")
    return lines


def _generators() -> dict[str, str]:
    return {source.name: _text(source.get()) for source in host_sources()}


def _text(state: Any) -> str:
    # A digest of the bytes: the text of an array of numpy would leave out its middle.
    plain = state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
    return hashlib.sha256(plain).hexdigest()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block the host's random generators start at a seed; afterwards they are what they were."""
    before = [(source, source.get()) for source in host_sources()]
    try:
        for source, _ in before:
            source.seed(seed)
        yield
    finally:
        for source, state in before:
            source.put(state)
