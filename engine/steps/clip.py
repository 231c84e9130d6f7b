"""Clipping: the norm of all gradients together is bounded before each update, and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from interlock.errors import TaskError
from interlock.weaving import Block, Line, before

from .option import Option, Parts, Running


class ClipNorm(Option):
    """Bounds the norm of the gradients, all taken together, and reports it as `grad_norm`.

    Where gradients are scaled (fp16) they are unscaled first; so the bound is that of the true ones.

    Args:
        bound: The norm that is allowed; `math.inf` only reports it.
        norm: Which norm: 2, or `math.inf` for the largest element.

    Raises:
        TaskError: One of them is no positive number.
    """

    name = "clip"
    events = ("clip",)
    bindings: Mapping[str, str] = {"clip": "clip(): bound the norm of the gradients"}
    follows = frozenset({"scale", "accumulate"})

    def __init__(self, bound: float, *, norm: float = 2.0) -> None:
        given: dict[str, object] = {"bound": bound, "norm": norm}  # they come from anywhere
        for what, value in given.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise TaskError(f"ClipNorm's {what} must be a number above 0, got {value!r}")
        self.bound = float(bound)
        self.norm = float(norm)

    def __repr__(self) -> str:
        return (
            f"ClipNorm({self.bound:g})" if self.norm == 2 else f"ClipNorm({self.bound:g}, norm={self.norm:g})"
        )

    def weave(self, program: Block) -> Block:
        """Puts it right before the update.

        Args:
            program: The plain step, with the options woven before.

        Returns:
            The program with this option in it.
        """
        return before(program, "update", Line("clip()", ("clip",), f"to a norm of {self.bound:g}"))

    def begin(self, parts: Parts) -> Running:
        """The norms stay on the device until a report reads them.

        Args:
            parts: Of the run.

        Returns:
            Values for the names of its lines.
        """
        clipping = _Clipping(parts, self.bound, self.norm)
        return Running({"clip": clipping.clip}, metrics=clipping.report, suspend=clipping.read)


class _Clipping:
    """The gradients of one run, and their norms since the last report."""

    def __init__(self, parts: Parts, bound: float, norm: float) -> None:
        self._parts, self._bound, self._norm = parts, bound, norm
        self._norms: list[Any] = []
        self._known: list[float] = []

    def clip(self) -> None:
        from torch.nn.utils import clip_grad_norm_

        groups = self._parts.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        self._norms.append(clip_grad_norm_(parameters, self._bound, self._norm))

    def read(self) -> None:
        """The norms as numbers: none of them stands on the device after it."""
        norms, self._norms = self._norms, []
        if norms:
            self._known += self._parts.read(norms)

    def report(self) -> dict[str, float]:
        self.read()
        norms, self._known = self._known, []
        if not norms:
            return {}
        values = [value for value in norms if math.isfinite(value)]
        return {"grad_norm": sum(values) / len(values)} if values else {"grad_norm": math.nan}
