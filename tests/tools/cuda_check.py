"""Everything that needs an NVIDIA GPU, in one run of less than ten minutes: `make test-cuda`.

    python tests/tools/cuda_check.py [--page FILE]     default: docs/evidence/cuda-DATE.md

It needs torch, transitions, pytest and hypothesis, no network, and neither an installed Interlock nor `make`.
Where there is no GPU it says why, runs nothing, writes nothing, and exits with 0. Otherwise it runs the
contract, the faults and the benchmark, each with a time limit of its own, writes what came out to a dated
page, and exits with 1 if any of it failed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "transitions", "pytest", "hypothesis")
IN_ALL = 570.0
"""Seconds for everything together."""
KEPT = 60
"""Lines of each part's output that go to the page: the last ones."""

INI = f"""
[pytest]
pythonpath = {ROOT / "tests"}
addopts = -ra --import-mode=importlib -p no:cacheprovider --durations=5
markers =
    nightly: not run here
    spin: not run here
    torchless: not run here
    cuda: what is run here
"""
"""Of our own: the project's settings need plug-ins that a bare machine may lack."""


@dataclass(frozen=True)
class Part:
    """One thing to run.

    Attributes:
        name: For the page.
        words: The command, after the interpreter.
        seconds: After which it is ended, and has failed.
    """

    name: str
    words: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Ran:
    """How a part went."""

    part: Part
    how: str
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        """Whether it ended in time, and well."""
        return self.how == "passed"


def parts(ini: Path) -> tuple[Part, ...]:
    """What is run, in order: what a failure would make worthless comes first."""
    test = ("-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), str(ROOT / "tests" / "test_cuda.py"))
    return (
        Part("contract", (*test, "-m", "cuda", "-k", "TestCuda"), 180),
        Part("on the device", (*test, "-m", "cuda", "-k", "not TestCuda"), 150),
        Part("a fault at every point", (*test, "-k", "test_a_fault_at_every_point"), 150),
        Part("benchmark", (str(Path(__file__)), "--bench", "cuda"), 90),
    )


def missing() -> list[str]:
    """Packages that are needed, and are not here."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def reason() -> str:
    """Why there is nothing to run; empty if there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    from interlock.backends.cuda import CudaAdapter

    return CudaAdapter.unavailable()


def facts() -> dict[str, str]:
    """What it was run on."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"capability {properties.major}.{properties.minor}, {torch.cuda.device_count()} to be seen",
        "CUDA": f"{torch.version.cuda}, the driver's is {torch._C._cuda_getDriverVersion()}",  # type: ignore[attr-defined]
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        **{name: _version(name) for name in NEEDED},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "no version"


def run(part: Part, environment: dict[str, str], left: float) -> Ran:
    """Run a part, no longer than its limit and than what is left of the time for all."""
    limit = min(part.seconds, max(left, 1.0))
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            status = subprocess.run(
                [sys.executable, *part.words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=limit,
                env=environment,
                cwd=ROOT,
            ).returncode
            how = "passed" if status == 0 else f"FAILED, exit status {status}"
        except subprocess.TimeoutExpired:
            how = f"FAILED, ended after {limit:.0f} s"
        seconds = time.monotonic() - begun
        output.seek(0)
        return Ran(part, how, seconds, output.read())


def page(date: str, about: dict[str, str], ran: Sequence[Ran]) -> str:
    """The page of evidence."""
    lines = [f"# On an NVIDIA GPU, {date}", "", "Written by `make test-cuda`.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items()), ""]
    lines += ["| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {one.part.name} | {one.how} | {one.seconds:.0f} |" for one in ran]
    for one in ran:
        kept = one.output.replace(str(ROOT), ".").rstrip().splitlines()[-KEPT:]
        lines += ["", f"## {one.part.name[0].upper()}{one.part.name[1:]}", "", "```text", *kept, "```"]
    return "\n".join(lines) + "\n"


# The package where it is not installed


def view(folder: Path) -> Path:
    """Lay the sources out as the installed package is, in a folder to import from."""
    shutil.copytree(ROOT / "engine", folder / "interlock")
    for name in ("backends", "specs"):
        shutil.copytree(ROOT / name, folder / "interlock" / name)
    return folder


# The benchmark


def bench(device: str, seconds: float = 15.0, shrink: int = 1) -> list[dict[str, Any]]:
    """The cost of a step beside a loop written by hand, on a device.

    Args:
        device: `cuda`, or `cpu` to try it out.
        seconds: For each of the models.
        shrink: Divides the number of steps, for a quick look.
    """
    import torch

    steps, timing, workloads = map(_of_benchmarks, ("steps", "timing", "workloads"))
    # Weights are compared to the bit: atomics in the backward pass of convolutions would change them.
    torch.backends.cudnn.deterministic = True
    ways = functools.partial(_ways, device)
    tiny = workloads.WORKLOADS["tiny"]
    digits = replace(workloads.WORKLOADS["digits"], samples=_images)
    return [
        steps.measure_steps(ways, work, "list", shrink, timing.Budget(seconds, 3), lambda _: None)
        for work in (tiny, digits)
    ]


def _of_benchmarks(name: str) -> Any:
    """A module of the benchmarks, whose folder is no package of ours."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"bench.{name}")


def _images(count: int) -> Any:
    """As large as the digits, which come with a package that may be missing here."""
    import torch

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


def _ways(device: str, work: Any, folder: Path) -> dict[str, Callable[[Iterable[Any]], Any]]:
    import torch

    import interlock as il

    workloads = _of_benchmarks("workloads")
    every: int = workloads.REPORT_EVERY

    # Chosen, so that both have the same: Interlock takes the fused form where nobody chose.
    def optimizer(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def by_hand(batches: Iterable[Any]) -> Any:
        model = work.build().to(device)
        update, losses = optimizer(model), []
        for batch in batches:
            update.zero_grad()
            loss = work.loss(model, tuple(tensor.to(device, non_blocking=True) for tensor in batch))
            loss.backward()
            update.step()
            losses.append(loss.detach())
            if len(losses) == every:
                workloads.mean_of(losses)
                losses = []
        return model.cpu()

    task = il.Task(model=work.build, optimizer=optimizer, loss=work.loss)
    bare = il.Engine(device, report_every=every)
    full = il.Engine(device, report_every=every, journal=folder / "run.jsonl", observers=[_observer])
    return {
        "by hand": by_hand,
        "Interlock": lambda batches: bare.fit(task, batches).model,
        "Interlock, journal and observer": lambda batches: full.fit(task, batches).model,
    }


def _observer(event: object) -> None:
    """Does as little as an observer can."""


def show(results: Sequence[dict[str, Any]]) -> None:
    """The figures, for the page."""
    for result in results:
        print(f"{result['workload']}, {result['steps']} steps, {result['unit']}")
        for name, figures in result["variants"].items():
            print(f"  {name}: {json.dumps(figures)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="run what needs an NVIDIA GPU, and write a dated page")
    parser.add_argument("--page", type=Path, help="where to write (default: docs/evidence/cuda-DATE.md)")
    parser.add_argument(
        "--bench", metavar="DEVICE", help="only the benchmark, and its figures to the terminal"
    )
    parser.add_argument(
        "--quick", action="store_true", help="with --bench: that it works, not how fast it is"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        if importlib.util.find_spec("interlock") is None:
            path.insert(0, str(view(folder / "package")))
            sys.path.insert(0, path[0])
        if options.bench:
            show(bench(options.bench, 0.1, 10) if options.quick else bench(options.bench))
            return 0
        return check(options.page, folder, {**os.environ, "PYTHONPATH": os.pathsep.join(path)})


def check(target: Path | None, folder: Path, environment: dict[str, str]) -> int:
    """Run all parts and write the page; the exit status."""
    lacking = missing()
    if "transitions" not in lacking and (why := reason()):
        print(f"nothing was run: {why}")
        return 0
    if lacking:
        print(f"nothing was run, these packages are missing: {', '.join(lacking)}", file=sys.stderr)
        return 1
    ini = folder / "pytest.ini"
    ini.write_text(INI, encoding="utf-8")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    about, ran, until = facts(), [], time.monotonic() + IN_ALL
    for part in parts(ini):
        ran.append(run(part, environment, until - time.monotonic()))
        print(f"{part.name}: {ran[-1].how}, {ran[-1].seconds:.0f} s", flush=True)
        if not ran[-1].passed:
            print(ran[-1].output)
    target = target or ROOT / "docs" / "evidence" / f"cuda-{date}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(date, about, ran), encoding="utf-8")
    print(f"written: {target}")
    return 0 if all(one.passed for one in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
