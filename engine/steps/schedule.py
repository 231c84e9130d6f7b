"""The learning rate scheduler follows each update."""

from __future__ import annotations

from collections.abc import Mapping

from interlock.weaving import Block, Line, after

from .option import Option


class Schedule(Option):
    """A scheduler moves after each real update; one that was given up moves nothing."""

    name = "schedule"
    events = ("schedule",)
    bindings: Mapping[str, str] = {"schedule": "schedule(): one step of the learning rate scheduler"}

    def weave(self, program: Block) -> Block:
        """Puts it after the update."""
        return after(program, "updated", Line("schedule()", ("schedule",), "the update was a real one"))
