"""Each batch is moved to the device inside the step."""

from __future__ import annotations

from collections.abc import Mapping

from interlock.weaving import Block, Line, before

from .option import Option


class Move(Option):
    """Where the loader or the forward pass moves batches, leave it out."""

    name = "move"
    events = ("move",)
    bindings: Mapping[str, str] = {"move": "move(batch) -> the batch on the device"}

    def weave(self, program: Block) -> Block:
        """Puts it before each forward."""
        return before(program, "forward", Line("batch = move(batch)", ("move",)))
