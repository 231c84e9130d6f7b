"""Mixed precision: `bf16` by autocast, `fp16` by autocast and loss scaling.

Parameters, gradients and the optimizer's state stay in single precision; the forward pass computes in
half precision where torch holds that to be safe (`torch.autocast`). In fp16 small gradients vanish, so
losses are scaled and gradients unscaled again (`torch.amp.GradScaler`): where the scale was too large for
a window, its update is *skipped*, which is an event of the step program. The scheduler moves after real
updates only, and skipped ones are counted and reported as `skipped_updates`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

from interlock.errors import TaskError
from interlock.weaving import Block, Branch, Line, before, instead, span

from .option import Option, Parts, Running

Halves = Literal["bf16", "fp16"]


class Precision(Option):
    """The forward pass in half precision.

    Args:
        dtype: `bf16`, or `fp16` with loss scaling.
        init_scale: fp16: the scale of the first step; it halves where gradients overflow, and doubles
            after `growth_interval` updates without.
        growth_interval: fp16: updates in a row.

    Raises:
        TaskError: No such precision, or a scale that is no positive number.
    """

    def __init__(self, dtype: Halves, *, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        if dtype not in get_args(Halves):
            raise TaskError(
                f"Precision must be one of {', '.join(map(repr, get_args(Halves)))}, got {dtype!r}; leave "
                "it out for single precision"
            )
        scale: object = init_scale  # they come from anywhere
        interval: object = growth_interval
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < math.inf:
            raise TaskError(f"Precision's init_scale must be a finite number above 0, got {scale!r}")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise TaskError(
                f"Precision's growth_interval must be a whole number of at least 1, got {interval!r}"
            )
        self.dtype = dtype
        self.init_scale = float(init_scale)
        self.growth_interval = growth_interval
        self.scales = dtype == "fp16"
        self.name = "scale" if self.scales else "precision"
        self.events = ("scale", "unscale", "skip") if self.scales else ()
        self.bindings = _SCALER if self.scales else {}
        self.follows = frozenset({"schedule"})
        self.conflicts = {"precision": "one precision is enough", "scale": "one precision is enough"}

    def __repr__(self) -> str:
        return f"Precision({self.dtype!r})"

    def weave(self, program: Block) -> Block:
        """In fp16: scales each loss, unscales before the update, and gives it up where that overflowed.

        Args:
            program: The plain step, with the options woven before.

        Returns:
            The program with this option in it.
        """
        if not self.scales:
            return program
        program = instead(program, "backward", Line("backward(scale(loss))", ("scale", "backward")))
        program = before(program, "update", Line("unscale()", ("unscale",), "true gradients from here on"))
        start, update, rest = span(program, "update", "updated")
        real = Branch(
            "finite()",
            (*update, *rest),
            (Line("skip()", ("skip",), "the scale was too large: no update, and counted"),),
        )
        return (*start, real, Line("rescale()", (), "for the next window"))

    def in_evaluation(self, call: Callable[..., Any], device: str) -> Callable[..., Any]:
        """Autocast around it, as in training.

        Args:
            call: Computes something of a batch.
            device: The type of the device.

        Returns:
            The same in half precision.
        """
        import torch

        context = torch.autocast(device, torch.float16 if self.scales else torch.bfloat16)

        def autocast(*arguments: Any) -> Any:
            before = autocast_state(device)
            try:
                with context:
                    return call(*arguments)
            except BaseException:
                # An interrupt may land in the context's own lines, and leave it half entered.
                put_back(device, before)
                raise

        return autocast

    def begin(self, parts: Parts) -> Running:
        """Autocast around the forward pass; in fp16 a scaler beside it.

        Args:
            parts: Of the run.

        Returns:
            Values for the names of its lines.

        Raises:
            TaskError: fp16 on XLA, where each step would be compiled in pieces around the overflow check.
        """
        around = partial(self.in_evaluation, device=parts.device)
        if not self.scales:
            return Running(forward=around)
        if parts.device == "xla":
            raise TaskError(
                "Precision('fp16') asks the device in each step whether gradients overflowed, which cuts "
                "XLA's program in pieces: use Precision('bf16'), which needs no scale"
            )
        scaling = _Scaling(parts, self.init_scale, self.growth_interval)
        return Running(
            {
                "scale": scaling.scale,
                "unscale": scaling.unscale,
                "finite": scaling.finite,
                "skip": scaling.skip,
                "rescale": scaling.rescale,
            },
            forward=around,
            metrics=scaling.report,
            state={"scaler": scaling},
            suspend=scaling.suspend,
        )


_SCALER: Mapping[str, str] = {
    "scale": "scale(loss) -> the loss, scaled",
    "unscale": "unscale(): divide the gradients by the scale",
    "finite": "finite() -> whether all gradients were finite then",
    "skip": "skip(): count an update that was given up",
    "rescale": "rescale(): halve the scale after an overflow, double it after many windows without",
}


def autocast_state(kind: str) -> tuple[bool, Any, bool, int]:
    """What entering `torch.autocast` changes on this thread, to be put back.

    Args:
        kind: The type of the device.

    Returns:
        Whether it is on, its type, whether conversions are kept, how deep it is nested.
    """
    import torch

    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    # How deep it is nested is only said by going one deeper and back: in one go, so that no interrupt
    # can land between the two.
    _, depth = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return enabled, dtype, torch.is_autocast_cache_enabled(), depth


def put_back(kind: str, state: tuple[bool, Any, bool, int]) -> None:
    """Make autocast on this thread what it was; doing so twice does no harm.

    Args:
        kind: The type of the device.
        state: As `autocast_state` returned it.
    """
    import torch

    enabled, dtype, cached, depth = state
    for _ in range(autocast_state(kind)[-1] - depth):
        torch.autocast_decrement_nesting()
    if depth == 0:
        torch.clear_autocast_cache()
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cached)


def finite(scaler: Any, optimizer: Any) -> bool:
    """Whether all gradients of an optimizer were finite when they were unscaled.

    Args:
        scaler: A `torch.amp.GradScaler`.
        optimizer: Unscaled by it.
    """
    # What `GradScaler.step` asks too, inside. Asked here, so that skipping is an event of its own.
    return not any(one.item() for one in scaler._found_inf_per_device(optimizer).values())


class _Scaling:
    """The scaler of one run."""

    def __init__(self, parts: Parts, init_scale: float, growth_interval: int) -> None:
        import torch

        self._parts = parts
        self._make = partial(
            torch.amp.GradScaler, parts.device, init_scale=init_scale, growth_interval=growth_interval
        )
        self._scaler: Any = self._make()
        self.skipped = 0

    def suspend(self) -> None:
        # A new one with the same numbers: it makes its tensors when it first scales.
        state = self._scaler.state_dict()
        self._scaler = self._make()
        self._scaler.load_state_dict(state)

    def scale(self, loss: Any) -> Any:
        return self._scaler.scale(loss)

    def unscale(self) -> None:
        self._scaler.unscale_(self._parts.optimizer)

    def finite(self) -> bool:
        return finite(self._scaler, self._parts.optimizer)

    def skip(self) -> None:
        self.skipped += 1

    def rescale(self) -> None:
        self._scaler.update()

    def report(self) -> dict[str, float]:
        return {"scale": self._scaler.get_scale(), "skipped_updates": float(self.skipped)}

    def state_dict(self) -> dict[str, Any]:
        """The scale, its growth, and how many updates were skipped."""
        return {"scaler": self._scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]
