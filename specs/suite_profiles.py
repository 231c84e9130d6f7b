"""Hypothesis profiles, and torch's random generators as Hypothesis seeds them; registered when asked for."""

from __future__ import annotations

from typing import Any

import hypothesis
import torch


def register_profiles(prefix: str = "") -> None:
    """Register the Hypothesis profiles `dev`, `ci` and `nightly`; none of them is loaded.

    No deadline, since a first step compiles and a loaded machine stalls. `ci` is derandomized, so that a
    change that has nothing to do with it never turns red by chance; `nightly` goes looking.

    Args:
        prefix: Before each name, for a project that has such profiles already.
    """
    common: dict[str, Any] = {"deadline": None, "print_blob": True}
    register = hypothesis.settings.register_profile
    register(f"{prefix}dev", max_examples=20, stateful_step_count=20, derandomize=False, **common)
    register(f"{prefix}ci", max_examples=100, stateful_step_count=30, derandomize=True, **common)
    register(f"{prefix}nightly", max_examples=3000, stateful_step_count=100, derandomize=False, **common)


class _TorchGenerators:
    """torch's own generators, as Hypothesis seeds and restores those that it knows."""

    def seed(self, seed: int) -> None:
        """Of the host, and of each device that was initialised."""
        torch.manual_seed(seed)

    def getstate(self) -> Any:
        """The states, on the host."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return torch.get_rng_state(), devices

    def setstate(self, state: Any) -> None:
        """Put back what `getstate` returned."""
        host, devices = state
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)


_generators: _TorchGenerators | None = None
"""Hypothesis itself keeps a weak reference only."""


def register_generators() -> None:
    """Let Hypothesis seed torch's random generators for each example, and restore them after it.

    So an example that fails fails again when it is replayed. A second call does nothing.
    """
    global _generators
    if _generators is None:
        _generators = _TorchGenerators()
        hypothesis.register_random(_generators)
