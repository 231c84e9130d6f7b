"""Measures what Interlock costs: a step, a run, an import, a proof, a transition.

    make bench                                    python benchmarks/run.py --help

Each benchmark runs in an interpreter of its own; variants are interleaved within it, so that a slow
moment of the machine slows them alike. `docs/benchmarks.md` says what the figures mean.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.command import Benchmark, Program
from bench.report import header, interval, number, spread, table

COMMAND = "make bench ARGS=--write"

# As in bench/steps.py, which needs torch.
ON, OFF = "Interlock, everything on", "Interlock, everything off"
COMES = "Interlock, as it comes"
LOGGED = "by hand, with a bar and a log"

QUICK = {"seconds": 0.5, "least": 2}


def _step(workload: str, kind: str, seconds: float) -> Benchmark:
    return Benchmark(
        f"step-{workload}-{kind}",
        f"cost of a step: {workload}, batches from a {kind}",
        "bench.steps:step_overhead",
        {"workload": workload, "kind": kind, "seconds": seconds, "least": 10, "shrink": 1},
        {**QUICK, "shrink": 10},
    )


BENCHMARKS = (
    *(_step("tiny", kind, 30) for kind in ("list", "loader")),
    *(_step("digits", kind, 30) for kind in ("list", "loader")),
    *(_step("transformer", kind, 35) for kind in ("list", "loader")),
    Benchmark(
        "one-step",
        "cost of a run: one step, in a warm process",
        "bench.steps:one_step",
        {"seconds": 15, "least": 50},
        QUICK,
    ),
    Benchmark(
        "import",
        "time of the imports, beside Python and torch",
        "bench.startup:core_imports",
        {"seconds": 12, "least": 5},
        {"seconds": 0.1, "least": 1},
    ),
    Benchmark(
        "proof",
        "time to prove every lifecycle on every backend",
        "bench.startup:proof",
        {"seconds": 10, "least": 5},
        QUICK,
    ),
    Benchmark(
        "transition",
        "time of one transition of a run's lifecycle",
        "bench.startup:transition",
        {"seconds": 5, "least": 20},
        QUICK,
    ),
)


def page(data: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = data["results"]
    lines = header("What Interlock costs", COMMAND, data["machine"])
    if steps := [result for name, result in results.items() if name.startswith("step-")]:
        lines += _steps(steps)
    if "one-step" in results:
        lines += _runs(results["one-step"])
    if "import" in results:
        lines += _imports(results["import"])
    for name, title in (("proof", "Proof"), ("transition", "Transition")):
        if name in results:
            lines += _plain(title, results[name])
    return "\n".join(lines)


def _steps(results: list[dict[str, Any]]) -> list[str]:
    rows = []
    for result in results:
        found = result["variants"]
        row = [result["workload"], result["batches"], number(found[result["base"]]["time"]["median"], 1)]
        beside = [found[ON][f"{figure} beside {LOGGED}"] for figure in ("ratio", "added")]
        for ratio, added in (
            (found[OFF]["ratio"], found[OFF]["added"]),
            (found[ON]["ratio"], found[ON]["added"]),
            beside,
            (found[COMES]["ratio"], found[COMES]["added"]),
        ):
            row += [interval(ratio, 3), interval(added, 1)]
        rows.append([*row, str(found[ON]["ratio"]["count"])])
    head = [
        "model",
        "batches",
        "by hand, us a step",
        "off: ratio",
        "off: us added",
        "on: ratio",
        "on: us added",
        "on, beside bar and log: ratio",
        "on, beside bar and log: us added",
        "as it comes: ratio",
        "as it comes: us added",
    ]
    return [
        "## A step",
        "",
        "Off: all checks, and no progress, journal or observer. On: progress on a terminal, journal and an",
        "observer; beside the bare hand-written loop, and beside one that does the same accounting by hand:",
        "a progress bar of rich, and a log in JSON lines, told of the loss every 50 steps. What a run costs",
        "once is not in here. In brackets: 95 % interval of the median. Final weights are bit-identical;",
        "all of these say `fused=False`. As it comes: everything on and nothing said about",
        "the optimizer's form, so that Interlock takes the fused one, beside a hand-written loop that says",
        "nothing either; there the weights agree up to rounding.",
        "",
        *table([*head, "repeats"], rows),
    ]


def _shown(name: str) -> str:
    """The name in a table of times."""
    return f"{name}, beside the line above" if name == COMES else name


def _runs(result: dict[str, Any]) -> list[str]:
    rows = [
        [_shown(name), *(interval(found.get(figure), 2) for figure in ("time", "ratio", "added"))]
        for name, found in result["variants"].items()
    ]
    return ["## A run of one step, in a warm process", "", *table(["", "ms", "ratio", "ms added"], rows)]


def _imports(result: dict[str, Any]) -> list[str]:
    rows = [
        [name, interval(found["time"], 1), interval(found.get("added"), 1), interval(found.get("ratio"), 3)]
        for group in result["groups"]
        for name, found in group["variants"].items()
    ]
    head = ["program", "ms", "ms more than the line above", "ratio to it"]
    return ["## Imports", "", *table(head, rows)]


def _plain(title: str, result: dict[str, Any]) -> list[str]:
    what = (
        f"{result['properties']} properties of {result['lifecycles']} lifecycles. "
        if "properties" in result
        else ""
    )
    what += f"Along a run's {len(result['path'])} transitions. " if "path" in result else ""
    rows = [
        [name, interval(found["time"], 1), spread(found["time"], 1)]
        for name, found in result["variants"].items()
    ]
    return [f"## {title}", "", what.rstrip(), "", *table(["", result["unit"], "middle 80 %"], rows)]


PROGRAM = Program(
    name="core",
    command=COMMAND,
    description=__doc__.split("\n")[0],
    benchmarks=BENCHMARKS,
    packages=("interlock", "torch", "transitions"),
    page=page,
)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
