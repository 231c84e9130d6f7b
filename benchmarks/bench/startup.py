"""What it costs to begin: imports, and the proof of every lifecycle. Nothing here imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from .stats import compare, summarize
from .timing import Budget, Tell, interleave


def imports(pairs: Mapping[str, Mapping[str, str]], seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """Wall time of programs that only import, each in an interpreter of its own.

    Args:
        pairs: Group -> (label -> program); the first program of a group is what the others are compared
            with, and only programs of one group are interleaved.
        seconds: To measure each group.
        least: Repeats in any case.
        tell: Progress.
    """
    groups = []
    for number, programs in enumerate(pairs.values()):
        cells = {label: lambda code=code: _python(code) for label, code in programs.items()}
        times = interleave(
            cells, Budget(seconds, least), lambda done, n=number: tell((n + done) / len(pairs))
        )
        base = next(iter(programs))
        groups.append({"base": base, "variants": compare(times, base, 1e3)})
    return {"unit": "ms", "groups": groups}


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def core_imports(seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """`import interlock` beside Python alone; the engine, which needs torch, beside torch."""
    light = {"python": "", "import interlock": "import interlock"}
    heavy = {"import torch": "import torch", "interlock.Engine": "import interlock; interlock.Engine"}
    return imports({"light": light, "heavy": heavy}, seconds, least, tell)


def prove_all() -> tuple[int, int, float]:
    """Compose, build and check each lifecycle on each backend.

    Returns:
        How many lifecycles, how many properties, seconds.

    Raises:
        AssertionError: One is not proved.
    """
    from interlock.backends.monitors import MONITORS
    from interlock.specs import SPECS, check, compose

    begin = time.perf_counter()
    reports = [check(compose(spec, monitor)) for spec in SPECS.values() for monitor in MONITORS.values()]
    seconds = time.perf_counter() - begin
    open_ones = [report.spec.name for report in reports if not report.proved]
    if open_ones:
        raise AssertionError(f"not proved: {', '.join(open_ones)}")
    return len(reports), sum(len(report.verdicts) for report in reports), seconds


_FRESH = """
import json, transitions, interlock.specs, interlock.backends.monitors
from bench.startup import prove_all
print(json.dumps([prove_all() for _ in range(2)]))
"""


def proof(seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """The proof of everything: the first time in a process (imports aside), and when it is warm."""
    fresh: list[float] = []
    begin = time.perf_counter()
    while len(fresh) < least or time.perf_counter() - begin < seconds / 2:
        out = subprocess.run([sys.executable, "-c", _FRESH], check=True, capture_output=True, text=True)
        fresh.append(1e3 * json.loads(out.stdout)[0][2])
        tell(min(0.5, 0.5 * (time.perf_counter() - begin) / (seconds / 2)))
    lifecycles, properties, _ = prove_all()
    warm = interleave({"warm": prove_all}, Budget(seconds / 2, least), lambda done: tell(0.5 + done / 2))
    return {
        "unit": "ms",
        "lifecycles": lifecycles,
        "properties": properties,
        "variants": {
            "fresh process": {"time": summarize(fresh).as_dict()},
            "warm": {"time": summarize([1e3 * t for t in warm["warm"]]).as_dict()},
        },
    }


def transition(seconds: float, least: int, tell: Tell) -> dict[str, Any]:
    """`Slot.fire` on the `transitions` machine, along the path of a whole run on the CPU."""
    from interlock.backends.monitors import CPU
    from interlock.specs import TRAINING, compose, lifecycle

    life = lifecycle(compose(TRAINING, CPU))
    path = _path(life.slot())
    rounds = 20

    def walk() -> None:
        for _ in range(rounds):
            slot = life.slot()
            for event in path:
                slot.fire(event)

    times = interleave({"walk": walk}, Budget(seconds, least), tell)["walk"]
    scale = 1e6 / (rounds * len(path))
    return {
        "unit": "us",
        "path": path,
        "variants": {"Slot.fire": {"time": summarize([scale * t for t in times]).as_dict()}},
    }


def _path(slot: Any) -> list[str]:
    """The events of a run that trains, validates once and finishes, as the spec's table leads it."""
    spec, path, turns = slot.lifecycle.spec, [], ["validate", "finish"]
    while slot.state != spec.terminal:
        phase = spec.phase[slot.state]
        event = turns.pop(0) if slot.state == "training" else phase.done or slot.next(frozenset())
        slot.fire(event)
        path.append(event)
    return path
