"""What Hypothesis draws for random runs: which events are in play, which is next, where a fault strikes.

Few examples of Hypothesis have nothing in common: most are variations of one before, and many end as simply
as they can. So the simplest run is made one that goes everywhere, and what is rare but matters is drawn
often: a fault where something is half there, another one while the first is cleared away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from interlock.backends.faults import MOMENTS

from .suite_device import ERRORS, FAULT_CALLS
from .suite_life import Exit
from .suite_operations import LEAVING, OPERATIONS

if TYPE_CHECKING:
    from .suite import RunMachine

_OPTIONAL = tuple(
    event
    for event in OPERATIONS
    if event not in ("acquire", "place", "optimize", "train", "update", "resume")
)
_EXITS = ("finish", "stop", "offload", *LEAVING)
EXIT_POLICIES: tuple[Exit, ...] = ("offload", "keep", "discard")
_ONWARD, _OFTEN, _SOMETIMES, _RARELY = 8, 4, 2, 1
_NEW = 3
_WAY_OUT = ("sync", "fetch", "leftovers", "free")
_HALF = ("place", "move", "fetch", "fetch")
"""Calls that are struck more often: what is half there, or half home, is where most goes wrong."""
_COUNTS = {"place": 1, "move": 6, "fetch": 12, "update": 4}
"""Call -> up to the how manieth a fault mostly strikes; the others are made once or twice in a run."""


def faults() -> st.SearchStrategy[tuple[str, str, int, str, int] | None]:
    """Three times in four one. Plain tuples, so that they print as what can be typed."""

    def at(call: str) -> st.SearchStrategy[tuple[str, str, int, str, int]]:
        count = _COUNTS.get(call, 2)
        nth = st.integers(0, 3).flatmap(lambda lot: st.integers(1, 2 * count if lot == 3 else count))
        # On the way out a call that fails is made a second time, and that may fail, too.
        times = st.sampled_from((1, 2, 2) if call in _WAY_OUT else (1,))
        return st.tuples(st.just(call), st.sampled_from(MOMENTS), nth, st.sampled_from(sorted(ERRORS)), times)

    some = st.sampled_from((*FAULT_CALLS, *_HALF)).flatmap(at)
    return st.integers(0, 3).flatmap(lambda lot: some if lot else st.none())


def in_play(machine: RunMachine) -> st.SearchStrategy[list[str]]:
    """Of the ends one in three, so that runs last; of what may come before them two in three.

    The simplest example has all of the latter, and none of the ends.
    """
    there = [event for event in _OPTIONAL if event in machine.setup.spec.events]
    lots = st.tuples(*(st.integers(0, 2) for _ in there))
    return lots.map(
        lambda drawn: [e for e, lot in zip(there, drawn, strict=True) if (lot == 2) == (e in _EXITS)]
    )


def _weight(machine: RunMachine, event: str) -> int:
    """How often an event is drawn against the others that are legal: most often one new to the run."""
    life, fired = machine.running(), machine.fired
    if event in _EXITS:
        due = life.steps and life.fault is not None and life.fault.call in _WAY_OUT
        return _ONWARD if due else _RARELY
    often = _SOMETIMES if event in _OPTIONAL else _OFTEN if event == "update" else _ONWARD
    return often if fired[event] else _NEW * often


def events(machine: RunMachine) -> st.SearchStrategy[str]:
    """An event that is legal now and in play, or, one time in eight, one that is not legal."""
    life, fired = machine.running(), machine.fired
    legal = [event for event in life.operations if event in machine.optional or event not in _OPTIONAL]
    # Simplest, to Hypothesis, is what stands first: what was fired least often, so the run goes everywhere.
    legal.sort(key=lambda event: 1 if event in _EXITS else fired[event])
    weighted = [event for event in legal for _ in range(_weight(machine, event))]
    taken, refused = st.sampled_from(weighted), st.sampled_from(life.illegal)
    return st.integers(0, 7).flatmap(lambda drawn: refused if drawn == 7 else taken)
