"""Gradient accumulation: one update for several batches, weighted so that it equals one big batch.

A loss is the mean over what its batch has, so the mean over a window of batches is their losses, each
weighted by its share of the samples (or tokens) of the window. A last window that is shorter, and batches
of unequal size, come out right: dividing each loss by the length of the window would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interlock.errors import DataError, TaskError
from interlock.weaving import Block, Line, Loop, instead, span

from .option import Option, Parts, Running


class Accumulate(Option):
    """One update for each `window` batches: a step takes them all.

    Args:
        window: How many batches; the last window of an epoch has what is left.
        weigh: A function from a batch (on the host) to how much its loss counts: the number of tokens
            that its loss is the mean of, for instance. By default the number of samples.

    Raises:
        TaskError: The window is no whole number of at least 2, or `weigh` cannot be called.
    """

    name = "accumulate"
    follows = frozenset({"move", "scale"})
    bindings: Mapping[str, str] = {
        "head": "head(batch) -> all batches of the window but the last",
        "tail": "tail(batch) -> its last batch",
        "share": "share(loss) -> the loss of a batch, times its share of the window",
        "whole": "whole(loss) -> the loss of the window, without a graph",
    }

    def __init__(self, window: int, *, weigh: Callable[[Any], float] | None = None) -> None:
        number: object = window  # it comes from anywhere
        if not isinstance(number, int) or isinstance(number, bool) or number < 2:
            raise TaskError(
                f"Accumulate takes a window of at least 2 batches, got {window!r}: leave it out for an "
                "update after each batch"
            )
        if weigh is not None and not callable(weigh):
            raise TaskError(
                f"Accumulate's weigh is {weigh!r}: pass a function from a batch to how much it counts"
            )
        self.window = window
        self.weigh = weigh

    def __repr__(self) -> str:
        by = f", weigh={getattr(self.weigh, '__name__', self.weigh)}" if self.weigh else ""
        return f"Accumulate({self.window}{by})"

    def weave(self, program: Block) -> Block:
        """Puts forward and backward of all batches but the last into a loop: so there is one at least.

        Args:
            program: The plain step, with the options woven before.

        Returns:
            The program with this option in it.
        """
        start, micro, rest = span(program, "forward", "backward")
        micro = instead(micro, "forward", Line("loss = share(forward(micro))", ("forward",)))
        return (
            *start,
            Loop("micro", "head(batch)", micro, "the window but for its last batch"),
            Line("micro = tail(batch)"),
            *micro,
            Line("loss = whole(loss)", (), "what is reported: the window's"),
            *rest,
        )

    def begin(self, parts: Parts) -> Running:
        """The weights of a window are known before its first forward pass.

        Args:
            parts: Of the run.

        Returns:
            Values for the names of its lines.
        """
        window = _Window(self.weigh or _Size(parts))
        return Running(
            {"head": window.head, "tail": window.tail, "share": window.share, "whole": window.whole}
        )


class _Size:
    """The number of samples, by the run's own rule."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, batch: Any) -> float:
        return self.parts.size(batch)


class _Window:
    """The present window of a run."""

    def __init__(self, weigh: Callable[[Any], float]) -> None:
        self._weigh = weigh
        self._shares: list[float] = []
        self._total: Any = None

    def head(self, batches: Sequence[Any]) -> Sequence[Any]:
        if not isinstance(batches, list):
            raise DataError(
                f"with Accumulate a step takes a list of batches, and was given a {type(batches).__name__}: "
                "`training.step([first, second])`"
            )
        weights = [float(self._weigh(batch)) for batch in batches]
        total = sum(weights)
        if not 0 < total < math.inf or min(weights) < 0:
            raise DataError(
                f"the batches of a window count {weights} by `batch_size` or `weigh`: at least one of them "
                "must count, and none less than nothing or without end"
            )
        self._shares = [weight / total for weight in reversed(weights)]
        self._total = None
        return batches[:-1]

    def tail(self, batches: Sequence[Any]) -> Any:
        return batches[-1]

    def share(self, loss: Any) -> Any:
        part = loss * self._shares.pop()
        self._total = part.detach() if self._total is None else self._total + part.detach()
        return part

    def whole(self, _: Any) -> Any:
        total, self._total = self._total, None
        return total
