"""The command line: what can be asked, and how an answer or an error becomes an exit status.

Loading this file loads no torch, and `check`, `graph` and `doctor` work without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from interlock.specs.errors import InterlockError, JournalError, UnknownName

from . import __version__

_STATUS = """
exit status:
  0    it did what was asked; what was checked is proved
  1    it failed: the run, or what was checked is refuted
  2    the command line is wrong, and nothing was begun
  3    undetermined: neither proved nor refuted
  130  ended by SIGINT (Ctrl-C), after everything was released
  143  ended by SIGTERM, after everything was released
"""
_EPILOG = f"""
examples:
  interlock doctor
  interlock check --all
  interlock explain train.py:task
  interlock rehearse train.py:task
  interlock fit train.py:task --epochs 3 --journal run.jsonl --drawing run.svg
  interlock check --journal run.jsonl
  interlock graph --trace run.jsonl -o run.svg
{_STATUS}
Each command has its own --help."""
_FIT = """
A task is an interlock.Task, or a function without arguments that returns one. It has to have data=,
a function that returns the batches. Progress goes to the standard error stream, the summary to the
standard output.

The journal is written while the run goes on and stays readable if the process is killed; afterwards
it is replayed on the spec, and the path taken is drawn.

examples:
  interlock fit train.py:task
  interlock fit experiments.digits:small --backend cpu --epochs 10 --report-every 20
  interlock fit train.py:task --journal run.jsonl --drawing run.svg --json > result.json
"""
_CHECK = """
Without --backend and --spec, both lifecycles are proved for every backend (mps has
those of cuda). A refuted property comes
with a shortest trace that breaks it. With --journal, a run's journal is replayed instead on the
spec that its header names, which is proved, too.

examples:
  interlock check --all
  interlock check --backend cuda --spec training
  interlock check --spec lifecycles.py:mine
  interlock check --journal run.jsonl
"""
_GRAPH = """
Drawings name the spec, its hash, and the options they were made with. --check compares those in a
file (all marked blocks of a Markdown page, or a drawing of its own) with what they should be.

examples:
  interlock graph --backend cuda -o cuda.svg
  interlock graph --trace run.jsonl -o run.svg
  interlock graph --spec inference --format mermaid
  interlock graph --check README.md
"""
_EXPLAIN = """
Shows what a run of the task goes through on a backend, and the step program: its events as a regular
expression, the proof that they keep to the step protocol, and the generated source that will run.
No function of the task is called.

example:
  interlock explain train.py:task --backend cpu
"""
_REHEARSE = """
The task runs on a simulated accelerator, a second PyTorch device in this process, with a few batches of
its own data: watched, then with each exit policy, evaluated, saved and restored, and at last with a fault
at one point after the other, each of which has to lead to a clean end and a next run as good as any.
How many faults there are, and about how long they take, is said before the first one; --full has tens of
times as many, and strikes saving and rescuing, too. The runs that faults strike take 2 steps at most.

It reports what does not keep to the order, what is left on the device, by whom it is held and where it was
made, copies between host and device in each step (an .item() in the loop), memory at its peak by owner, and
parameters that are not trained. Findings marked "look" fail the rehearsal with --strict only.

examples:
  interlock rehearse train.py:task
  interlock rehearse train.py:task --full --state out/rehearsal --report out/rehearsal.xml
  interlock rehearse train.py:task --json > rehearsal.json
"""
_DOCTOR = """
Shows versions, which backends can run here and why others cannot, and whether their monitors are
proved. Initialises no device.
"""
_COMMANDS = {
    "fit": "fitting:run_fit",
    "check": "checking:run_check",
    "graph": "graphing:run_graph",
    "explain": "explaining:run_explain",
    "rehearse": "rehearsing:run_rehearse",
    "doctor": "doctor:run_doctor",
}
_TASK = "FILE_OR_MODULE:TASK"


class _Parser(ArgumentParser):
    """Raises `ValueError` in place of ending the program, where that is asked for."""

    exits = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, _Parser] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As its base, but for mistakes: they are told by the command, with the option that may be meant."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            this = self.commands.get(options.command, self)
            this.error(f"unrecognized arguments: {' '.join(unknown)}{this.meant(unknown)}")
        return options

    def meant(self, words: Sequence[str]) -> str:
        """The known options that come closest to unknown ones, as a question; or nothing."""
        near = [
            found
            for word in words
            if word.startswith("-")
            for found in get_close_matches(word.partition("=")[0], self._option_string_actions, n=1)
        ]
        return f"; did you mean {', '.join(near)}?" if near else ""

    def error(self, message: str) -> NoReturn:
        if self.exits:
            super().error(message)
        raise ValueError(message)


class _Quiet(_Parser):
    exits = False


def parser(*, exits: bool = True) -> ArgumentParser:
    """The parser of the command line.

    Args:
        exits: Whether a mistake prints usage and ends the program, or raises `ValueError`.
    """
    kind = _Parser if exits else _Quiet
    top = kind(
        prog="interlock",
        description="Training runs whose order is proved before they start, and that leave nothing behind.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"interlock {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=kind)

    def command(name: str, summary: str, more: str) -> ArgumentParser:
        top.commands[name] = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=more,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        return top.commands[name]

    _fit(command("fit", "train a task, and show that nothing was left behind", _FIT + _STATUS))
    _check(command("check", "prove lifecycles, or hold a run's journal against them", _CHECK + _STATUS))
    _graph(command("graph", "draw a lifecycle, or the path that a run has taken", _GRAPH))
    explain = command("explain", "show the plan and the step program of a task", _EXPLAIN)
    explain.add_argument("task", metavar=_TASK, help="what to explain")
    explain.add_argument("--backend", default="auto", metavar="B", help="where it would run (default: auto)")
    _rehearse(command("rehearse", "try a task on a simulated accelerator", _REHEARSE + _STATUS))
    doctor = command("doctor", "show what is installed and what can run here", _DOCTOR)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return top


def _fit(this: ArgumentParser) -> None:
    this.add_argument("task", metavar=_TASK, help="what to train: a Task, or a function that returns one")
    this.add_argument("--backend", default="auto", metavar="B", help="where to train (default: auto)")
    this.add_argument("--epochs", type=_count, metavar="N", help="how often (default: as the task says)")
    this.add_argument("--seed", type=_whole, metavar="N", help="seed the random generators for this run")
    this.add_argument("--max-steps", type=_count, metavar="N", help="end after N steps, as finished")
    this.add_argument("--max-time", type=_seconds, metavar="S", help="stop after S seconds")
    this.add_argument("--limit-batches", type=_count, metavar="N", help="use N batches of each pass only")
    this.add_argument(
        "--overfit", type=_count, metavar="N", help="train on the first N batches only: can it learn them?"
    )
    this.add_argument("--checkpoints", type=Path, metavar="DIR", help="save the run there after each epoch")
    this.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of that folder, if there is one",
    )
    this.add_argument("--journal", type=Path, metavar="F", help="write the run's journal to F, as JSON lines")
    this.add_argument(
        "--drawing",
        type=Path,
        metavar="F",
        help="draw the path taken to F, which ends in .svg, .dot, .gv, .mmd or .mermaid",
    )
    this.add_argument(
        "--exit",
        choices=("offload", "keep", "discard"),
        default="offload",
        help="what becomes of the model: home to the host (default), kept on the device, or dropped",
    )
    this.add_argument(
        "--report-every", type=_count, default=50, metavar="N", help="steps between two reports (default: 50)"
    )
    this.add_argument(
        "--deadline",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that each backend call on the way out may take (default: 30)",
    )
    this.add_argument("--no-progress", action="store_true", help="show no progress")
    this.add_argument("--json", action="store_true", help="print the summary as JSON")


def _rehearse(this: ArgumentParser) -> None:
    this.add_argument("task", metavar=_TASK, help="what to rehearse: a Task, or a function that returns one")
    how = this.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="faults at some points of each kind (default)")
    how.add_argument("--full", action="store_true", help="faults at every passage, with every exit policy")
    this.add_argument(
        "--steps", type=_count, default=3, metavar="N", help="steps of the watched run (default: 3)"
    )
    this.add_argument(
        "--parameters",
        choices=("replaced", "kept"),
        default="replaced",
        help="what placement does to them: replaced, as on XLA (default), or kept, as on CUDA",
    )
    this.add_argument("--no-checkpoints", action="store_true", help="do not save and restore")
    this.add_argument("--seed", type=_whole, default=0, metavar="N", help="of all runs (default: 0)")
    this.add_argument(
        "--exit",
        choices=("offload", "keep", "discard"),
        help="inject faults with this exit policy only (default: offload; with --full all three)",
    )
    this.add_argument("--only", metavar="CELL", help="inject one fault only, named as in a report")
    this.add_argument(
        "--state", type=Path, metavar="DIR", help="keep verdicts there, and go on from there if interrupted"
    )
    this.add_argument(
        "--report", type=Path, metavar="F", help="write a report to F, which ends in .json or .xml (JUnit)"
    )
    this.add_argument("--strict", action="store_true", help="fail also for what is merely worth a look")
    this.add_argument("--no-progress", action="store_true", help="show no progress")
    this.add_argument("--json", action="store_true", help="print the report as JSON")


def _check(this: ArgumentParser) -> None:
    this.add_argument("--backend", metavar="B", help="check this backend only")
    this.add_argument("--all", action="store_true", help="check every backend (the default)")
    this.add_argument(
        "--spec", metavar="S", help="training, inference, or FILE_OR_MODULE:SPEC (default: the first two)"
    )
    this.add_argument("--journal", type=Path, metavar="F", help="replay the journal F of a run")
    this.add_argument("--json", action="store_true", help="print JSON")


def _graph(this: ArgumentParser) -> None:
    this.add_argument("--backend", metavar="B", help="for this backend (default: cpu)")
    this.add_argument("--spec", metavar="S", help="training (default), inference, or FILE_OR_MODULE:SPEC")
    this.add_argument(
        "--trace", type=Path, metavar="JOURNAL", help="highlight the path of the run in JOURNAL"
    )
    this.add_argument(
        "--format",
        choices=("mermaid", "dot", "svg", "json", "promela"),
        help="the notation (default: as the name of the output file says, else mermaid)",
    )
    this.add_argument(
        "-o", "--output", type=Path, metavar="F", help="write to F (default: the standard output)"
    )
    file = this.add_mutually_exclusive_group()
    file.add_argument(
        "--check", type=Path, metavar="F", help="find stale drawings in F; exit status 1 if any"
    )
    file.add_argument("--renew", type=Path, metavar="F", help="draw the drawings in F anew")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return number


def _whole(text: str) -> int:
    """A whole number from 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got '{text}'")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        longest = f"{threading.TIMEOUT_MAX:.0f}"
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, up to {longest}, got '{text}'"
        )
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `interlock`; those of the process if left out.

    Returns:
        The exit status.
    """
    top = parser()
    options = top.parse_args(arguments)
    options.words = sys.argv[1:] if arguments is None else list(arguments)
    if options.command is None:
        top.print_help(sys.stderr)
        return 2
    from .messages import OutputLost, to_output, warn

    try:
        status = _run(options)
        with to_output():
            sys.stdout.flush()
    except OutputLost as error:
        # The interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not error.unread:
            warn(f"error: {error}")
        return 1
    return status


def _run(options: Namespace) -> int:
    from .messages import OutputLost, describe, warn

    module, _, function = _COMMANDS[options.command].partition(":")
    try:
        status: int = getattr(import_module(f"interlock.{module}"), function)(options)
        return status
    except KeyboardInterrupt:
        warn("interlock: interrupted")
        return 130
    except SystemExit as error:
        warn(
            f"error: the task ended the program itself, with exit status {error.code!r}, before its run began"
        )
        return 1
    except OutputLost:
        raise
    except Exception as error:
        warn(describe(error))
        return _status_of(error)


def _status_of(error: Exception) -> int:
    """2 where the command line itself is wrong, 1 where something failed that it asked for."""
    from .choices import UsageError
    from .errors import LoadError

    if isinstance(error, LoadError):
        return 1 if error.__cause__ is not None else 2
    return 2 if isinstance(error, (UsageError, UnknownName, JournalError)) else 1


__all__ = ["InterlockError", "main", "parser"]
