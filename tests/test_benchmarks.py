"""The benchmarks' own arithmetic on planted data, and one quick run; no test looks at a time."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[1] / "benchmarks"
PACKAGES = ("bench", "peers")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Loads modules of the package `bench`, or others by a name with a dot; afterwards none is importable."""
    sys.path.insert(0, str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name if "." in name else f"bench.{name}")

    try:
        yield load
    finally:
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]


# -- statistics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [
        ([3.0], 0.5, 3.0),
        ([4.0, 1.0], 0.5, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.25, 2.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_quantiles_interpolate(bench: Any, values: list[float], part: float, expected: float) -> None:
    assert bench("stats").quantile(values, part) == expected


def test_nothing_measured_is_an_error(bench: Any) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        bench("stats").summarize([])


def test_a_summary_is_the_same_each_time_and_holds_the_median(bench: Any) -> None:
    values = [float(number % 17) for number in range(100)]
    summary = bench("stats").summarize(values)
    assert summary == bench("stats").summarize(list(values))
    assert summary.p10 < summary.low <= summary.median <= summary.high < summary.p90
    assert summary.count == 100


def test_one_outlier_moves_no_median(bench: Any) -> None:
    assert bench("stats").summarize([1.0] * 20 + [1000.0]).high == 1.0


def test_variants_are_compared_within_a_repeat(bench: Any) -> None:
    # A machine that gets slower: each ratio is 2 and each difference is small, whatever the machine does.
    timings = {"base": [1.0, 2.0, 4.0], "other": [2.0, 4.0, 8.0]}
    found = bench("stats").compare(timings, "base", scale=10)
    assert found["other"]["ratio"]["median"] == 2.0
    assert found["other"]["ratio"]["p90"] == 2.0
    assert found["other"]["added"]["median"] == 20.0
    assert "ratio" not in found["base"]


# -- timing -----------------------------------------------------------------------------------------------


def test_each_variant_stands_in_each_place_equally_often(bench: Any) -> None:
    names = ["a", "b", "c"]
    orders = [bench("timing").order(names, repeat) for repeat in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    assert {order.index("b") - order.index("a") > 0 for order in orders} == {True, False}


def test_the_budget_is_kept_and_the_least_is_done(bench: Any) -> None:
    calls: list[str] = []
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timing = bench("timing")
    times = timing.interleave(variants, timing.Budget(seconds=1e-9, least=3))
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert calls.count("a") == 4, "one untimed call comes first"
    times = timing.interleave(variants, timing.Budget(seconds=60, most=2))
    assert [len(values) for values in times.values()] == [2, 2]


def test_a_stopwatch_sees_whole_steps_and_no_ends(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    timing = bench("timing")
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    watch = timing.Stopwatch(lambda model, batch: batch, first=3, last=8)

    def run(steps: int) -> None:
        nonlocal now
        now += 100.0  # what a run costs once
        for _ in range(steps):
            watch(None, None)
            now += 2.0
        now += 100.0

    assert watch.timed(lambda: run(8)) == 2.0
    assert watch.timed(lambda: run(8)) == 2.0, "each run begins anew"
    with pytest.raises(RuntimeError, match="7 steps were made, and not 8"):
        watch.timed(lambda: run(7))


# -- what is compared must be the same work ---------------------------------------------------------------


def test_unequal_weights_are_an_error_that_names_the_parameter(bench: Any) -> None:
    workloads = bench("workloads")
    reference, planted = workloads.WORKLOADS["tiny"].build(), workloads.WORKLOADS["tiny"].build()
    workloads.require_equal_weights("planted", planted, reference)
    with torch.no_grad():
        planted[2].bias[0] += 1e-7
    with pytest.raises(workloads.UnequalWeightsError, match=r"planted: '2\.bias'"):
        workloads.require_equal_weights("planted", planted, reference)


def test_weights_up_to_rounding_are_close_and_a_step_left_out_is_not(bench: Any) -> None:
    workloads = bench("workloads")
    work = workloads.WORKLOADS["tiny"]
    batches = list(work.batches(10, "list"))

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    reference = workloads.by_hand(work, batches, make=workloads.wordless)
    rounded = workloads.by_hand(work, batches, make=fused)
    workloads.require_equal_weights("fused", rounded, reference, close=True)
    with pytest.raises(workloads.UnequalWeightsError, match="fused: '0"):
        workloads.require_equal_weights("fused", rounded, reference)
    lazy = workloads.by_hand(work, batches[:-1], make=fused)
    with pytest.raises(workloads.UnequalWeightsError, match="lazy: not what the hand-written loop made"):
        workloads.require_equal_weights("lazy", lazy, reference, close=True)
    with torch.no_grad():
        lazy[0].bias[0] = float("nan")
    with pytest.raises(workloads.UnequalWeightsError, match="off by nan"):
        workloads.require_equal_weights("lazy", lazy, reference, close=True)


def test_what_comes_fused_is_held_against_the_loop_without_a_word_only(bench: Any) -> None:
    steps = bench("steps")
    times = {steps.BASE: [1.0], steps.ON: [2.0], steps.PLAIN: [4.0], steps.COMES: [2.0]}
    found = steps.compared(times, 1.0)
    assert {name: figures["ratio"]["median"] for name, figures in found.items() if "ratio" in figures} == {
        steps.ON: 2.0,
        steps.COMES: 0.5,
    }


def test_everything_on_is_also_held_against_a_loop_that_keeps_the_same_accounts(bench: Any) -> None:
    steps = bench("steps")
    found = steps.compared({steps.BASE: [1.0], steps.LOGGED: [1.5], steps.ON: [2.0]}, 1.0)
    assert found[steps.ON]["added"]["median"] == 1.0
    assert found[steps.ON][f"added beside {steps.LOGGED}"]["median"] == 0.5


def test_the_loop_with_a_bar_and_a_log_trains_the_same(bench: Any, tmp_path: Path) -> None:
    workloads = bench("workloads")
    work = workloads.WORKLOADS["tiny"]
    batches = work.batches(60, "list")
    logged = workloads.by_hand_logged(work, tmp_path, batches)
    workloads.require_equal_weights("logged", logged, workloads.by_hand(work, batches))
    assert len((tmp_path / "by-hand.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("measure", ["measure_steps", "measure_runs"])
def test_a_benchmark_of_unequal_work_measures_nothing(bench: Any, measure: str) -> None:
    steps, workloads = bench("steps"), bench("workloads")

    def ways(work: Any, folder: Path) -> dict[str, Any]:
        def lazy(batches: Any) -> nn.Module:
            return workloads.by_hand(work, list(batches)[:-1])

        return {"by hand": lambda batches: workloads.by_hand(work, batches), "lazy": lazy}

    what = {"kind": "list", "shrink": 10} if measure == "measure_steps" else {}
    threads = torch.get_num_threads()
    try:
        with pytest.raises(workloads.UnequalWeightsError, match="lazy"):
            getattr(steps, measure)(
                ways,
                workloads.WORKLOADS["tiny"],
                budget=bench("timing").Budget(0.01, 1),
                tell=lambda _: None,
                **what,
            )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["tiny", "digits", "transformer"])
def test_a_list_and_a_loader_give_the_same_batches(bench: Any, name: str) -> None:
    work = bench("workloads").WORKLOADS[name]
    pairs = list(zip(work.batches(3, "list"), work.batches(3, "loader"), strict=True))
    assert len(pairs) == 3
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)
    assert work.steps % 50 == 0, "what is timed must hold a whole number of reports"


# -- other libraries, as far as they can be looked at without them ---------------------------------------


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_knows_each_library_and_each_mistake(bench: Any) -> None:
    page, wiring = script("run_peers"), bench("peers.wiring")
    assert {*page.NAMES.values()} == {*wiring.LIBRARIES}
    assert (*page.MISTAKES,) == wiring.MISTAKES
    steps = bench("steps")
    assert (page.PLAIN, page.COMES) == (steps.PLAIN, steps.COMES)


def test_the_page_says_beside_what_each_figure_stands(bench: Any) -> None:
    page, steps = script("run_peers"), bench("steps")
    times = {steps.BASE: [1.0], "Fabric": [3.0], steps.PLAIN: [4.0], steps.COMES: [2.0]}
    found = {"workload": "tiny", "batches": "list", "variants": steps.compared(times, 1.0)}
    wired = dict.fromkeys(page.MISTAKES, "silent: nothing")
    about = {"cpu": "", "cores": 1, "system": "", "python": "", "packages": {}, "date": "", "load": 0}
    results = {"step-tiny-list": found, "wiring-fabric": wired}
    lines = page.page({"machine": about, "results": results}).splitlines()
    assert "| Fabric | 3.000 (3.000 to 3.000) | 2.0 (2.0 to 2.0) |" in lines
    comes = "| Interlock, as it comes, beside the line above | 0.500 (0.500 to 0.500) | -2.0 (-2.0 to -2.0) |"
    assert lines[lines.index(comes) - 1] == "| by hand, AdamW without a word | 4 us |  |"
    assert "| gradients never zeroed | silent: nothing |" in lines


def test_each_mistake_is_one_and_none_passes_in_silence_here(bench: Any) -> None:
    call = bench("isolated").call
    by_hand = call("peers.wiring:wiring", {"library": "by hand"})
    ours = call("peers.wiring:wiring", {"library": "Interlock, fit"})
    mistakes = {*bench("peers.wiring").MISTAKES} - {"again"}
    assert {key for key, what in by_hand.items() if what.startswith("silent: ")} == mistakes
    assert {key for key, what in ours.items() if what.startswith(("error: ", "warning: "))} == mistakes
    assert "silent: 4 of 4 parameters trained" not in by_hand.values(), "that would be no mistake"
    orders = bench("peers.library").ORDERS
    assert {ours[key] for key in orders} == {"error: IllegalTransition"}
    assert by_hand["again"] == ours["again"] == "trains"


def test_after_an_exception_nothing_of_ours_is_held(bench: Any) -> None:
    cells = bench("isolated").call("peers.failures:failures", {"library": "Interlock, fit"})["cells"]
    assert [cell for cell in cells if cell["held"]] == []
    assert {cell["caught"] for cell in cells} == {"original"}
    assert {cell["again"] for cell in cells} == {"trains"}


def test_the_probe_sees_what_a_traceback_holds(bench: Any) -> None:
    by_hand = bench("peers.libraries").LIBRARIES["by hand"]()
    found = bench("peers.failures").cell(by_hand, "update", lambda: RuntimeError("planted"))
    assert found == {
        "caught": "original",
        "held": ["batch", "loss", "gradient", "parameter", "optimizer state"],
        "handle": [],
        "collected": [],
        "again": "trains",
    }


# -- the command ------------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "run.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_quick_run_gives_figures() -> None:
    done = command("--quick", "--only", "transition", "--only", "step-tiny-list", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    step = data["results"]["step-tiny-list"]["variants"]
    assert set(step) == {
        "by hand",
        "Interlock, everything on",
        "Interlock, everything off",
        "by hand, with a bar and a log",
        "by hand, AdamW without a word",
        "Interlock, as it comes",
    }
    assert data["results"]["transition"]["path"][-1] == "close"
    assert "cpu" in data["machine"]


def test_a_failing_benchmark_is_reported(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolated = bench("isolated")
    (tmp_path / "planted.py").write_text("def leave(tell):\n    raise SystemExit('last words')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(isolated.BenchmarkError, match="TypeError"):
        isolated.call("bench.startup:proof", {"seconds": "none"})
    with pytest.raises(isolated.BenchmarkError, match=r"no result:\s+last words"):
        isolated.call("planted:leave", {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "nonsense"], "step-tiny-list"),
        (["--quick", "--write"], "complete figures only"),
        (["--only", "proof", "--write"], "complete figures only"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_the_page_has_what_was_measured(bench: Any) -> None:
    report = bench("report")
    figure = {"median": 1.0, "low": 0.5, "high": -0.0001, "p10": 0, "p90": 2, "count": 3}
    assert report.interval(figure, 2) == "1.00 (0.50 to 0.00)"
    assert report.interval(None, 2) == ""
    assert report.table(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |", ""]
