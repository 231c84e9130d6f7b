"""What the engine costs on XLA: its step beside a loop written by hand with torch_xla, interleaved.

make bench-xla                          # writes benchmarks/results/xla.md
python benchmarks/run_xla.py --rounds 3 # where torch_xla is installed
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch.nn.functional as F
import torch_xla
from torch import nn

import interlock as il
from interlock.backends import xla_calls

PAGE = Path(__file__).parent / "results" / "xla.md"
STEPS, WARM, EVERY = 150, 30, 50
"""Steps of each run; those left out; after how many both read their losses."""


def mlp() -> nn.Module:
    """Tiny: what the loop costs shows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    """The network of examples/digits.py."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.AdamW(model.parameters(), 1e-3)


class Clock:
    """Times between calls of the loss function, which both loops make once a step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Of the batch; and the time is noted."""
        self.at.append(time.perf_counter())
        return F.cross_entropy(model(batch[0]), batch[1])

    def seconds(self) -> float:
        """A step, in the mean over those that are not left out."""
        return (self.at[-1] - self.at[WARM]) / (len(self.at) - 1 - WARM)


def by_hand(build: Any, data: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """As one writes it: zero, forward, backward, update, `sync`; losses are read every so often."""
    clock = Clock()
    model = build().to("xla")
    optimizer = adamw(model)
    losses: list[torch.Tensor] = []
    for x, y in data:
        optimizer.zero_grad()
        loss = clock.loss(model, (x.to("xla"), y.to("xla")))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.detach())
        if len(losses) == EVERY:
            [one.item() for one in losses]
            losses = []
    return clock.seconds(), model.cpu().state_dict()


def compiled(build: Any, data: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same step through `torch_xla.compile`."""
    clock = Clock()
    model = build().to("xla")
    optimizer = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = clock.loss(model, (x, y))
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torch_xla.compile(step, full_graph=True)
    losses: list[torch.Tensor] = []
    for x, y in data:
        losses.append(run(x.to("xla"), y.to("xla")))
        if len(losses) == EVERY:
            [one.item() for one in losses]
            losses = []
    return clock.seconds(), model.cpu().state_dict()


def ours(build: Any, data: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by the engine, everything off that can be switched off."""
    clock = Clock()
    task = il.Task(model=build, optimizer=adamw, loss=clock.loss)
    outcome = il.Engine("xla", report_every=EVERY).fit(task, data)
    assert outcome.model is not None
    return clock.seconds(), outcome.model.state_dict()


def measure(build: Any, shape: tuple[int, ...], rounds: int) -> tuple[str, ...]:
    """Of one row: milliseconds of both, their ratio (median, least, most), largest difference of a weight."""
    torch.manual_seed(1)
    data = [(torch.randn(32, *shape), torch.randint(0, 10, (32,))) for _ in range(STEPS)]
    weights: dict[Any, dict[str, torch.Tensor]] = {}
    spent: dict[Any, list[float]] = {by_hand: [], ours: [], compiled: []}
    for number in range(rounds):
        order = [by_hand, ours, compiled]
        for run in order[number % 3 :] + order[: number % 3]:
            seconds, weights[run] = run(build, data)
            spent[run].append(seconds)
    ratios, theirs = (
        sorted(one / other for one, other in zip(spent[run], spent[by_hand], strict=True))
        for run in (ours, compiled)
    )
    far = max(float((weights[ours][k] - weights[by_hand][k]).abs().max()) for k in weights[ours])
    hand, mine = (1000 * statistics.median(spent[run]) for run in (by_hand, ours))
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{hand:.3f}", f"{mine:.3f}", spread, f"{statistics.median(theirs):.2f}", str(far)


def programs_of(build: Any, run: Any, shape: tuple[int, ...]) -> int:
    """Programs that a first run compiles, of a network that no other run has."""
    calls = xla_calls.Calls(spmd=False)
    calls.begin()
    data = [(torch.randn(31, *shape), torch.randint(0, 10, (31,))) for _ in range(WARM + 2)]
    before = calls.programs()
    run(build, data)
    return calls.programs() - before


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11, help="runs of each (default: 11)")
    parser.add_argument("--no-page", action="store_true", help="write no page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, build, shape in (("MLP 64-64-10", mlp, (64,)), ("digits network", convolutions, (1, 8, 8))):
        first = [
            programs_of(lambda b=build, w=w: nn.Sequential(b(), nn.Linear(10, w)), run, shape)
            for w, run in ((11, by_hand), (12, ours))
        ]
        figures = measure(build, shape, options.rounds)
        rows.append(f"| {name} | {' | '.join((*figures, *map(str, first)))} |")
    version, hardware = torch_xla.__version__, os.environ["PJRT_DEVICE"]
    heads = ("step", "by hand, ms", "Interlock, ms", "ratio (least, most)", "torch_xla.compile, ratio")
    lines = [
        "# What the engine costs on XLA",
        "",
        f"Written by `make bench-xla`: {options.rounds} runs of each, interleaved, {STEPS - WARM} steps,",
        f"batch 32, torch_xla {version} on its {hardware} device. By hand: zero, forward, backward, update,",
        f"`torch_xla.sync()`. Both read their losses every {EVERY} steps.",
        "",
        f"| {' | '.join(heads)} | largest difference of a weight | programs by hand | of Interlock |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    if not options.no_page:
        PAGE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
