"""Queued or traced work is cut and run after each micro-batch's program (XLA)."""

from __future__ import annotations

from collections.abc import Mapping

from interlock.weaving import Block, Line, Loop, fired

from .option import Option


class Sync(Option):
    """Added last, by `step_program`, where the monitor's step automata speak of `sync`."""

    name = "sync"
    events = ("sync",)
    bindings: Mapping[str, str] = {"sync": "sync(): wait for queued work, or cut the traced graph and run it"}
    _HOST_ONLY = frozenset({"zero", "move", "schedule", "skip"})

    def weave(self, program: Block) -> Block:
        """Puts it after the last work on the device: in each loop's body, and in the program itself."""
        sync = Line("sync()", ("sync",), "this micro-batch's program ends here")
        inner = tuple(
            Loop(node.name, node.values, self.weave(node.body), node.why) if isinstance(node, Loop) else node
            for node in program
        )
        working = [i for i, node in enumerate(inner) if fired(node) - self._HOST_ONLY]
        cut = working[-1] + 1 if working else 0
        return (*inner[:cut], sync, *inner[cut:]) if working else inner
