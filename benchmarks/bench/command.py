"""The command line of both benchmark programs: which benchmarks, for how long, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .isolated import HERE, BenchmarkError, call
from .report import machine, save

RESULTS = HERE / "results"

BUSY = 0.5
"""Load average above which times are worth little: the scheduler then favours who waits more often."""


@dataclass(frozen=True)
class Benchmark:
    """One thing to measure, in a fresh interpreter.

    Attributes:
        name: What `--only` names: this, or a beginning of it.
        what: One line for people.
        target: `module:function`.
        full: Its arguments for figures worth keeping.
        quick: What differs for a quick look.
    """

    name: str
    what: str
    target: str
    full: Mapping[str, Any]
    quick: Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """One of the two commands.

    Attributes:
        name: Of the result files.
        command: As one types it, for the page.
        description: For `--help`.
        benchmarks: In order.
        packages: Whose versions are written down.
        page: Makes the Markdown page of results.
    """

    name: str
    command: str
    description: str
    benchmarks: Sequence[Benchmark]
    packages: Sequence[str]
    page: Callable[[dict[str, Any]], str]

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Measure, show, and write if asked to; the exit status."""
        options = self._parser().parse_args(argv)
        chosen = self._chosen(options.only)
        if not chosen:
            names = ", ".join(benchmark.name for benchmark in self.benchmarks)
            print(f"no benchmark is named {' or '.join(options.only)}; there are: {names}", file=sys.stderr)
            return 2
        if options.write and (options.quick or options.only):
            print("--write keeps complete figures only: leave out --quick and --only", file=sys.stderr)
            return 2
        about = machine(self.packages)
        if about["load"] > BUSY:
            print(
                f"load {about['load']}: other programs are running, and times will be wrong", file=sys.stderr
            )
        begin = time.monotonic()
        try:
            results = measure(chosen, options.quick)
        except BenchmarkError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; nothing was written", file=sys.stderr)
            return 130
        data = {
            "command": self.command,
            "quick": options.quick,
            "seconds": round(time.monotonic() - begin),
            "machine": about,
            "results": results,
        }
        page = self.page(data)
        if options.json:
            print(json.dumps(data, indent=1))
        else:
            console = Console()
            console.print(Markdown(page)) if console.is_terminal else print(page)
        if options.write:
            for path in save(RESULTS, self.name, page, data):
                print(f"wrote {path.relative_to(HERE.parent)}", file=sys.stderr)
        return 0

    def _chosen(self, only: Sequence[str]) -> list[Benchmark]:
        return [b for b in self.benchmarks if not only or any(b.name.startswith(name) for name in only)]

    def _parser(self) -> argparse.ArgumentParser:
        width = max(len(benchmark.name) for benchmark in self.benchmarks) + 1
        lines = "\n".join(f"  {benchmark.name:<{width}} {benchmark.what}" for benchmark in self.benchmarks)
        parser = argparse.ArgumentParser(
            description=self.description,
            epilog=f"benchmarks:\n{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--quick", action="store_true", help="a few repeats of short runs: to see that it works"
        )
        parser.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="NAME",
            help="only benchmarks whose names begin like this; may be repeated",
        )
        parser.add_argument("--json", action="store_true", help="print the results as JSON")
        parser.add_argument(
            "--write",
            action="store_true",
            help=f"write benchmarks/results/{self.name}.md and .json; do it on a quiet machine",
        )
        return parser


def measure(benchmarks: Sequence[Benchmark], quick: bool) -> dict[str, Any]:
    """Name -> what was measured, one benchmark after the other.

    Raises:
        BenchmarkError: One failed; the rest is not measured.
    """
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    results = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for benchmark in benchmarks:
            shown = progress.add_task(benchmark.name, total=1.0)
            arguments = {**benchmark.full, **(benchmark.quick if quick else {})}
            results[benchmark.name] = call(
                benchmark.target, arguments, lambda done, shown=shown: progress.update(shown, completed=done)
            )
            progress.update(shown, completed=1.0)
    return results
