"""A slow training loop that is plainly right, to compare the engine with. It uses no code of the engine.

Everything is written out: windows are lists, scaling is a multiplication, and whether a window overflowed is
asked of each gradient. A `Fault` is one of the mistakes of the public reports, to show that a comparison
finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

Fault = Literal["", "tail", "equal", "schedule", "clip", "twice"]
"""A last window divided by the full length, batches of a window averaged as equals, a scheduler that moves
on although the update was skipped, clipping before unscaling, unscaling twice."""


@dataclass(frozen=True)
class Plan:
    """What a training run does, as plain data.

    Attributes:
        window: Batches for each update.
        weigh: How much a batch counts in its window.
        clip: The norm that gradients are bounded to; `None` for no bound.
        half: The precision of the forward pass.
        init_scale: Of the loss in fp16.
        growth_interval: Updates in a row after which the scale doubles.
        schedule: When the scheduler moves.
        epochs: How often the data is gone through.
        fault: A mistake to make.
    """

    window: int = 1
    weigh: Callable[[Any], float] = lambda batch: len(batch[0])
    clip: float | None = None
    half: Literal["", "bf16", "fp16"] = ""
    init_scale: float = 2.0**16
    growth_interval: int = 2000
    schedule: Literal["", "step", "epoch", "plateau"] = ""
    epochs: int = 1
    fault: Fault = ""


@dataclass
class Trained:
    """What came of it.

    Attributes:
        losses: Of each window.
        norms: Of the gradients of each window, where they are clipped and there was an update.
        skipped: How many windows were given up, so far, at each.
        scales: After each window.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    batches: Sequence[Any],
    plan: Plan,
) -> Trained:
    """Train a model in place."""
    found = Trained()
    scale, in_a_row, skipped, updates = plan.init_scale, 0, 0, 0
    for _ in range(plan.epochs):
        for start in range(0, len(batches), plan.window):
            window = batches[start : start + plan.window]
            weights = [float(plan.weigh(batch)) for batch in window]
            if plan.fault == "equal":
                weights = [1.0] * len(window)
            total = sum(weights)
            if plan.fault == "tail":
                total = total * plan.window / len(window)

            optimizer.zero_grad()
            of_window: Any = None
            for batch, weight in zip(window, weights, strict=True):
                with _autocast(plan.half):
                    loss = loss_of(model, batch)
                if plan.window > 1:
                    loss = loss * (weight / total)
                of_window = loss.detach() if of_window is None else of_window + loss.detach()
                (loss * scale if plan.half == "fp16" else loss).backward()
            found.losses.append(of_window.item())

            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if plan.half == "fp16":
                if plan.fault == "clip" and plan.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
                for gradient in gradients * (2 if plan.fault == "twice" else 1):
                    gradient.mul_(1 / scale)
            overflowed = plan.half == "fp16" and not all(g.isfinite().all() for g in gradients)
            if overflowed:
                skipped += 1
                scale, in_a_row = scale / 2, 0
            else:
                if plan.clip is not None and not (plan.fault == "clip" and plan.half == "fp16"):
                    found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip).item())
                optimizer.step()
                updates += 1
                in_a_row += 1
                if in_a_row == plan.growth_interval:
                    scale, in_a_row = scale * 2, 0
            if plan.schedule == "step" and (not overflowed or plan.fault == "schedule"):
                scheduler.step()
            found.skipped.append(float(skipped))
            found.scales.append(scale)
        if plan.schedule == "epoch" and updates:
            scheduler.step()
        if plan.schedule == "plateau" and updates:
            scheduler.step(found.losses[-1])
    return found


def _autocast(half: str) -> contextlib.AbstractContextManager[Any]:
    if not half:
        return contextlib.nullcontext()
    return torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[half])
