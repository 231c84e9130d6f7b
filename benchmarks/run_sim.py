"""What the simulated device costs: the digits network on it and on the CPU, interleaved, one thread.

python benchmarks/run_sim.py            # writes benchmarks/results/sim.md
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from interlock.backends import simulator

PAGE = Path(__file__).parent / "results" / "sim.md"
ROUNDS, WARM = 120, 10


def net() -> nn.Module:
    """The network of examples/digits.py."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))


def small() -> nn.Module:
    """A network so small that operators cost more than arithmetic."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def measure(build) -> tuple[float, float, float]:
    """Median seconds of a step on the CPU and on the device, and passages of operators and copies a step."""
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    kinds = {}
    for device in ("cpu", "sim"):
        model = build().to(device)
        kinds[device] = model, torch.optim.AdamW(model.parameters(), fused=True)
    spent = {device: [] for device in kinds}
    for _ in range(ROUNDS):
        for device, (model, optimizer) in kinds.items():
            began = time.perf_counter()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            spent[device].append(time.perf_counter() - began)
    with simulator.counted() as counts:
        model, optimizer = kinds["sim"]
        F.cross_entropy(model(images.to("sim")), labels.to("sim")).backward()
        optimizer.step()
        optimizer.zero_grad()
    passages = counts["operator"] + counts["to_device"] + counts["to_host"] + counts["on_device"]
    host, there = (statistics.median(spent[device][WARM:]) for device in ("cpu", "sim"))
    return host, there, passages


def main() -> int:
    """Measure, and write the page."""
    simulator.install()
    torch.set_num_threads(1)
    rows = []
    for name, build in (("digits network, batch 32", net), ("two small layers, batch 32", small)):
        host, there, passages = measure(build)
        added = f"{(there - host) * 1e6 / passages:.1f}"
        figures = (f"{host * 1e6:.0f}", f"{there * 1e6:.0f}", f"{there / host:.2f}", str(passages), added)
        rows.append(f"| {name} | {' | '.join(figures)} |")
    lines = [
        "# What the simulated device costs",
        "",
        f"Written by `python benchmarks/run_sim.py`: medians of {ROUNDS - WARM} steps, interleaved, one",
        f"thread, torch {torch.__version__.partition('+')[0]}.",
        "",
        "| step | CPU, us | simulated, us | ratio | operators and copies a step | us added to each |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
