"""Measures Interlock beside five other libraries: costs, failures, wrongly built jobs.

    make bench-peers                              python benchmarks/run_peers.py --help

It needs an environment with all of them, which `make bench-peers` builds in `.venv-peers` from
`benchmarks/peers/constraints.txt`. Each library is used as its own documentation shows.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from bench.command import Benchmark, Program
from bench.report import header, interval, number, table

COMMAND = "make bench-peers ARGS=--write"

NAMES = {
    "hand": "by hand",
    "ignite": "Ignite",
    "fabric": "Fabric",
    "accelerate": "Accelerate",
    "accelerate-freed": "Accelerate, free_memory in a finally",
    "lightning": "Lightning",
    "transformers": "transformers' Trainer",
    "interlock": "Interlock, fit",
    "interlock-run": "Interlock, start",
}
"""Short name -> name in `peers/libraries.py`, which cannot be imported here: it needs torch."""

VARIANTS = ("accelerate-freed", "interlock-run")
"""Those that differ from another one only in what is held after a failure."""

PLAIN, COMES = "by hand, AdamW without a word", "Interlock, as it comes"
"""As in `bench/steps.py`: the two that are held against each other and nothing else."""

MISTAKES = {
    "early": "optimizer built before a placement that replaces Parameters",
    "foreign": "optimizer over a copy's parameters",
    "missing": "a parameter that no optimizer holds",
    "frozen": "a frozen parameter in the optimizer",
    "replaced": "a parameter replaced in mid-run",
    "detached": "a loss that is not connected to the model",
    "nan": "NaN loss",
    "hasty": "update before any backward pass",
    "twice": "two updates for one backward pass",
    "unzeroed": "gradients never zeroed",
    "again": "a second run on the same handle",
}
"""Mistake of `peers/wiring.py` -> what it is, for the page."""

QUICK = {"seconds": 0.5, "least": 2}
STEP_TENSORS = {"batch", "output", "loss"}


def _step(workload: str, kind: str, seconds: float) -> Benchmark:
    return Benchmark(
        f"step-{workload}-{kind}",
        f"cost of a step: {workload}, batches from a {kind}",
        "peers.costs:step_cost",
        {"workload": workload, "kind": kind, "seconds": seconds, "least": 8, "shrink": 1},
        {**QUICK, "shrink": 10},
    )


def _cells(kind: str, what: str, short: str) -> Benchmark:
    return Benchmark(
        f"{kind}-{short}", f"{what}: {NAMES[short]}", f"peers.{kind}:{kind}", {"library": NAMES[short]}, {}
    )


BENCHMARKS = (
    *(_step("tiny", kind, 45) for kind in ("list", "loader")),
    *(_step("digits", kind, 40) for kind in ("list", "loader")),
    *(_step("transformer", kind, 45) for kind in ("list", "loader")),
    Benchmark(
        "one-step",
        "cost of a run: one step, in a warm process",
        "peers.costs:run_cost",
        {"seconds": 25, "least": 20},
        QUICK,
    ),
    Benchmark(
        "import",
        "time of the imports, beside torch",
        "peers.costs:import_cost",
        {"seconds": 40, "least": 3},
        {"seconds": 0.1, "least": 1},
    ),
    *(_cells("failures", "after an exception", short) for short in NAMES),
    *(_cells("wiring", "wrongly built jobs", short) for short in NAMES if short not in VARIANTS),
)


def page(data: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = data["results"]
    lines = header("Interlock beside other libraries", COMMAND, data["machine"])
    if steps := [result for name, result in results.items() if name.startswith("step-")]:
        lines += _steps(steps)
    if "one-step" in results:
        lines += _runs(results["one-step"])
    if "import" in results:
        lines += _imports(results["import"])
    if failures := _of(results, "failures-"):
        lines += _failures(failures)
    if wiring := _of(results, "wiring-"):
        lines += _wiring(wiring)
    return "\n".join(lines)


def _of(results: dict[str, Any], kind: str) -> dict[str, Any]:
    """Library -> result, of one kind of benchmark."""
    return {NAMES[name.removeprefix(kind)]: found for name, found in results.items() if name.startswith(kind)}


def _steps(results: list[dict[str, Any]]) -> list[str]:
    names = list(results[0]["variants"])
    rows = []
    for name in names:
        cells = [result["variants"][name] for result in results]
        shown = [
            interval(c["ratio"], 3) if "ratio" in c else f"{number(c['time']['median'], 0)} us" for c in cells
        ]
        added = cells[0].get("added")
        rows.append([_shown(name), *shown, interval(added, 1)])
    heads = [f"{result['workload']}, {result['batches']}" for result in results]
    return [
        "## A step, as a multiple of the hand-written loop's",
        "",
        "Interleaved; what a run costs once is not in here. In brackets: 95 % interval of the median. Final",
        "weights: bit-identical in every row but the last. All but the last two name the optimizer's plain",
        "form (`fused=False`). In these nothing is said, as people write it; Interlock then takes the fused",
        "form, its weights are those of the line above up to rounding, and it is that line's multiple.",
        "",
        *table(["", *heads, f"{heads[0]}: us added"], rows),
    ]


def _shown(name: str) -> str:
    """The name in a table of times."""
    return f"{name}, beside the line above" if name == COMES else name


def _runs(result: dict[str, Any]) -> list[str]:
    rows = [
        [_shown(name), interval(found["time"], 2), interval(found.get("ratio"), 2)]
        for name, found in result["variants"].items()
    ]
    return [
        "## A run of one step, in a warm process",
        "",
        "Model, optimizer and the library's own objects are built in each run; Interlock's engine is built",
        "once, as it is meant to be.",
        "",
        *table(["", "ms", "ratio"], rows),
    ]


def _imports(result: dict[str, Any]) -> list[str]:
    rows = [
        [name, interval(found["time"], 0), interval(found.get("ratio"), 2)]
        for group in result["groups"]
        for name, found in group["variants"].items()
    ]
    return ["## Import, as a multiple of torch's", "", *table(["", "ms", "ratio"], rows)]


def _failures(results: dict[str, Any]) -> list[str]:
    rows = []
    for name, result in results.items():
        cells = result["cells"]
        others = sorted({c["caught"] for c in cells} - {"original"})
        again = sorted({c["again"] for c in cells} - {"trains"})
        rows.append(
            [
                name,
                str(len(cells)),
                _count(cells, lambda c: not STEP_TENSORS & {*c["held"]}),
                _count(cells, lambda c: "gradient" not in c["held"]),
                _count(cells, lambda c: not c["held"]),
                _count(cells, lambda c: not c["handle"]),
                _count(cells, lambda c: c["caught"] == "original") + _but(others),
                _count(cells, lambda c: c["again"] == "trains") + _but(again),
            ]
        )
    head = [
        "",
        "cells",
        "batch, output, loss freed",
        "gradients freed",
        "everything freed",
        "everything freed, exception dropped",
        "caller gets the original exception",
        "handle can run again",
    ]
    return [
        "## After an exception",
        "",
        "A cell is one of three exceptions (RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt) at one",
        "place where user code is called: data, forward, backward, update, validation, and, where there is",
        "one, a callback and the optimizer's function. Held: the library's handle and the exception object.",
        "Freed: no storage is alive by weak reference, the garbage collector not having run.",
        "",
        *table(head, rows),
        "Ignite's handle holds the user's step function, and that holds model and optimizer; the handle of",
        "transformers is a Trainer that was given the model. The handle of Interlock's `start` is the run,",
        'whose outcome offers both to the caller. So none of the three can ever be "everything freed".',
        "",
    ]


def _count(cells: list[dict[str, Any]], test: Any) -> str:
    return str(sum(1 for cell in cells if test(cell)))


def _but(others: list[str]) -> str:
    return f" (else {', '.join(others)})" if others else ""


def _wiring(results: dict[str, Any]) -> list[str]:
    rows = [[what, *(found[key] for found in results.values())] for key, what in MISTAKES.items()]
    return [
        "## Wrongly built jobs",
        "",
        "Replacing placement: `torch.__future__.set_overwrite_module_params_on_conversion(True)` on the CPU,",
        "which is what happens on XLA; for Interlock its replacing double. Lightning's documentation builds",
        "the optimizer after placement, so there the mistake is the user's; that of Fabric and of Accelerate",
        "builds it before, and that of transformers shows both. The order of a step can be wrong where the",
        "user writes the step: in a loop of one's own, in Ignite's step function, with Lightning's manual",
        "optimization, in the `step` of Interlock's task.",
        "",
        *table(["", *results], rows),
    ]


PROGRAM = Program(
    name="peers",
    command=COMMAND,
    description=__doc__.split("\n")[0],
    benchmarks=BENCHMARKS,
    packages=("interlock", "torch", "lightning", "accelerate", "pytorch-ignite", "transformers"),
    page=page,
)


def main() -> int:
    """The exit status; 2 where the other libraries are missing."""
    missing = [
        name for name in ("accelerate", "ignite", "lightning", "transformers") if find_spec(name) is None
    ]
    if missing:
        print(f"not installed here: {', '.join(missing)}. Use `make bench-peers`", file=sys.stderr)
        return 2
    return PROGRAM.run()


if __name__ == "__main__":
    sys.exit(main())
