"""What a test here must leave as it was: `interlock.process_state`, and what is this project's own.

Besides what every suite can have checked, no second copy of the package may be loaded by a folder's name.
"""

from __future__ import annotations

from interlock import process_state
from interlock.process_state import ALLOWED, Allowed, State

__all__ = ["ALLOWED", "SECOND_COPIES", "Allowed", "State", "differences", "settled", "snapshot"]

# Modules that would be a second copy of the package, loaded by a folder's name.
SECOND_COPIES = ("engine", "backends", "specs")


def snapshot() -> State:
    """Reads the state now."""
    return process_state.snapshot(SECOND_COPIES)


def differences(before: State, after: State) -> list[str]:
    """One line for each difference that `ALLOWED` does not name; empty when the process is as it was."""
    return _named(process_state.differences(before, after))


def settled(before: State, seconds: float = 0.5) -> list[str]:
    """The differences that last: those of threads, children and files are given a moment to end."""
    return _named(process_state.settled(before, seconds, watched=SECOND_COPIES))


def _named(lines: list[str]) -> list[str]:
    return [line.replace("module loaded", "second copy of the package loaded", 1) for line in lines]
