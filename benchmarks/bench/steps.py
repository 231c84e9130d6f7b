"""What a step and a run cost with Interlock, against a loop written by hand."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import interlock as il

from .stats import compare
from .timing import Budget, Stopwatch, Tell, interleave
from .workloads import (
    REPORT_EVERY,
    WORKLOADS,
    Workload,
    by_hand,
    by_hand_logged,
    optimizer,
    require_equal_weights,
    wordless,
)

BASE = "by hand"
ON = "Interlock, everything on"
OFF = "Interlock, everything off"
LOGGED = "by hand, with a bar and a log"
"""What `ON` is held against too: a loop that does the same accounting."""
PLAIN = "by hand, AdamW without a word"
COMES = "Interlock, as it comes"
"""Held against `PLAIN`: nothing is said about the optimizer's form, so that Interlock takes the fused one."""

Train = Callable[[Iterable[Any]], nn.Module]
"""Trains on some batches and returns the model."""

Ways = Callable[[Workload, Path], dict[str, Train]]
"""Of a workload, and a folder to write in: name -> how to train it, the hand-written loop first."""


class Counter:
    """An observer as a service has one: it does a little with each event."""

    def __init__(self) -> None:
        self.events = 0

    def __call__(self, event: object) -> None:
        self.events += 1


def variants(work: Workload, folder: Path) -> dict[str, Train]:
    """Name -> how to train on some batches; each trains the same, `COMES` up to rounding."""
    task = il.Task(model=work.build, optimizer=optimizer, loss=work.loss, name=work.name)
    usual = il.Task(model=work.build, optimizer=wordless, loss=work.loss, name=work.name)
    full = il.Engine(
        "cpu",
        report_every=REPORT_EVERY,
        progress=True,
        journal=folder / "run.jsonl",
        observers=[Counter()],
    )
    bare = il.Engine("cpu", report_every=REPORT_EVERY)
    return {
        BASE: functools.partial(by_hand, work),
        LOGGED: functools.partial(by_hand_logged, work, folder),
        ON: lambda batches: _model(full.fit(task, batches)),
        OFF: lambda batches: _model(bare.fit(task, batches)),
        PLAIN: functools.partial(by_hand, work, make=wordless),
        COMES: lambda batches: _model(full.fit(usual, batches)),
    }


def _model(outcome: il.Outcome) -> nn.Module:
    if outcome.model is None:
        raise RuntimeError(f"no model came back: {outcome.status}")
    return outcome.model


def step_overhead(
    workload: str, kind: str, seconds: float, least: int, shrink: int, tell: Tell
) -> dict[str, Any]:
    """Time and cost of a step, for each variant.

    Args:
        workload: Its name.
        kind: `list` or `loader`.
        seconds: To measure.
        least: Repeats in any case.
        shrink: Divides the number of steps, for a quick look.
        tell: Progress.
    """
    return measure_steps(variants, WORKLOADS[workload], kind, shrink, Budget(seconds, least), tell)


def measure_steps(
    ways: Ways, work: Workload, kind: str, shrink: int, budget: Budget, tell: Tell
) -> dict[str, Any]:
    """Per-step figures of ways to train, the first of which is what the others are compared with."""
    torch.set_num_threads(1)
    skipped, steps = REPORT_EVERY // shrink, work.steps // shrink
    watch = Stopwatch(work.loss, skipped + 1, skipped + steps + 1)
    batches = work.batches(skipped + steps + 1, kind)
    with tempfile.TemporaryDirectory() as folder:
        trains = ways(replace(work, loss=watch), Path(folder))
        require_equal_work(trains, batches)
        cells = {name: functools.partial(train, batches) for name, train in trains.items()}
        times = interleave(cells, budget, tell, watch.timed)
    base = next(iter(trains))
    return {
        "workload": work.name,
        "batches": kind,
        "steps": steps,
        "unit": "us a step",
        "base": base,
        "variants": compared(times, 1e6),
    }


def one_step(seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """A run of one step in a warm process: what a run costs beside its steps."""
    return measure_runs(variants, WORKLOADS["tiny"], Budget(seconds, least), tell)


def measure_runs(ways: Ways, work: Workload, budget: Budget, tell: Tell) -> dict[str, Any]:
    """Figures of whole runs of one step; the first way to train is what the others are compared with."""
    torch.set_num_threads(1)
    batches = work.batches(1, "list")
    with tempfile.TemporaryDirectory() as folder:
        trains = ways(work, Path(folder))
        require_equal_work(trains, batches)
        cells = {name: functools.partial(train, batches) for name, train in trains.items()}
        times = interleave(cells, budget, tell)
    base = next(iter(trains))
    return {"unit": "ms a run", "base": base, "variants": compared(times, 1e3)}


def compared(times: Mapping[str, Sequence[float]], scale: float) -> dict[str, dict[str, dict[str, float]]]:
    """Each variant against the first one, but `COMES` against `PLAIN`; `ON` also beside `LOGGED`.

    Args:
        times: Variant -> one value per repeat.
        scale: As for `stats.compare`.
    """
    usual = {name: values for name, values in times.items() if name in (PLAIN, COMES)}
    found = compare({n: v for n, v in times.items() if n not in usual}, next(iter(times)), scale)
    if LOGGED in times and ON in times:
        same = compare({LOGGED: times[LOGGED], ON: times[ON]}, LOGGED, scale)[ON]
        found[ON] |= {f"{figure} beside {LOGGED}": same[figure] for figure in ("ratio", "added")}
    return {**found, **(compare(usual, PLAIN, scale) if usual else {})}


def require_equal_work(trains: Mapping[str, Train], batches: Iterable[Any]) -> None:
    """Hold the weights that each variant makes against those that the first one makes.

    All must be bit-identical, but those of `COMES`: they must be close, since the fused update rounds
    otherwise.

    Raises:
        UnequalWeightsError: Naming the variant.
    """
    reference: nn.Module | None = None
    for name, train in trains.items():
        model = train(batches)
        reference = reference or model
        require_equal_weights(name, model, reference, close=name == COMES)
