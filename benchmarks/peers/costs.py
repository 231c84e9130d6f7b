"""Times the libraries, in one interleaved run. Called in an interpreter of its own."""

from __future__ import annotations

from typing import Any

from bench import startup
from bench.steps import measure_runs, measure_steps
from bench.timing import Budget, Tell
from bench.workloads import WORKLOADS

from .loops import trains


def step_cost(
    workload: str, kind: str, seconds: float, least: int, shrink: int, tell: Tell
) -> dict[str, Any]:
    """Cost of a step with each library; arguments as for `bench.steps.step_overhead`."""
    return measure_steps(trains, WORKLOADS[workload], kind, shrink, Budget(seconds, least), tell)


def run_cost(seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """Cost of a run of one step in a warm process, everything built anew each time."""
    return measure_runs(trains, WORKLOADS["tiny"], Budget(seconds, least), tell)


def import_cost(seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """Time to import what one needs to train, beside torch alone."""
    programs = {
        "import torch": "import torch",
        "Ignite": "from ignite.engine import Engine",
        "Fabric": "from lightning.fabric import Fabric",
        "Accelerate": "from accelerate import Accelerator",
        "Lightning": "from lightning.pytorch import LightningModule, Trainer",
        "transformers' Trainer": "from transformers import Trainer, TrainingArguments",
        "Interlock": "from interlock import Engine, Task",
    }
    return startup.imports({"all": programs}, seconds, least, tell)
