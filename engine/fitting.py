"""`interlock fit`: carries a task out, then says how it went and holds the journal against the spec."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.specs import Spec
from interlock.specs.journal import Replay, read_journal, replay

from .checkpoint import Checkpoints
from .choices import UsageError, writable
from .graphing import SUFFIXES, drawn, format_of, write
from .journal import refuse_unwritable
from .loading import task_from
from .messages import describe, say, warn
from .signals import Signals, Terminated
from .summary import as_data, show

if TYPE_CHECKING:
    from .engine import Engine
    from .outcome import Outcome
    from .plan import Plan
    from .task import Task

_UNPROVED = "the journal is not what the spec allows"


def run_fit(options: Namespace) -> int:
    """Load the task, train it, report.

    Returns:
        0 if it did what it was asked and its journal is proved, 1 if not; 130 and 143 if a signal
        ended it.
    """
    _refuse_bad_targets(options)
    with Signals() as signals:
        try:
            outcome, spec = _carry_out(options, signals)
        except (KeyboardInterrupt, Terminated):
            # Before the run began: there is nothing to report.
            warn("interlock: interrupted before the run began; nothing was started")
            return 128 + (signals.received or signal.SIGINT)
    found, problems = _afterwards(options, outcome, spec)
    if options.json:
        say(json.dumps(as_data(outcome, options.journal, options.drawing, found), indent=1, default=str))
    else:
        show(outcome, _files(options, found))
    if outcome.error is not None and not isinstance(outcome.error, (KeyboardInterrupt, Terminated)):
        warn(describe(outcome.error))
    for problem in problems:
        warn(f"error: {problem}")
    return _status(outcome, signals, problems)


def _status(outcome: Outcome, signals: Signals, problems: list[str]) -> int:
    if signals.received is not None:
        return 128 + signals.received
    if isinstance(outcome.error, KeyboardInterrupt):  # the task's own
        return 128 + signal.SIGINT
    return 0 if outcome.ok and not problems else 1


def _refuse_bad_targets(options: Namespace) -> None:
    """What cannot be written is found before anything is loaded, not after hours of training.

    Raises:
        InterlockError: Which file, and why.
    """
    if options.resume and options.checkpoints is None:
        raise UsageError("--resume needs --checkpoints DIR, the folder of the checkpoint to go on from")
    if options.journal is not None:
        refuse_unwritable(options.journal)
    drawing: Path | None = options.drawing
    if drawing is None:
        return
    kind = SUFFIXES.get(drawing.suffix.lower())
    if kind not in ("mermaid", "dot", "svg"):
        known = ".svg, .dot, .gv, .mmd or .mermaid"
        raise UsageError(f"'{drawing}': the path that a run takes is drawn to a file ending in {known}")
    writable(drawing)
    if kind == "svg":
        from interlock.specs.svg import lay_out

        lay_out("digraph {}")


def _carry_out(options: Namespace, signals: Signals) -> tuple[Outcome, Spec]:
    from .engine import Engine
    from .leases import ProcessSettings, give_back, take
    from .session import carry_out

    engine = Engine(
        options.backend,
        exit=options.exit,
        deadline=options.deadline,
        seed=options.seed,
        report_every=options.report_every,
        observers=[signals],
        progress=not options.no_progress,
        journal=options.journal,
    )
    signals.watch(engine.life.spec)
    loading = object()
    try:
        # What the task's file draws when it is loaded, and its data, follow the seed as well.
        settings = ProcessSettings(seed=options.seed)
        take(settings, loading, when_taken="refuse", check=lambda: None, name="loading")
        with task_from(options.task) as task:
            # As `Engine.fit` does; but here the outcome of a run that failed is wanted, too.
            session = engine._session(task, _plan(engine, task, options))
            give_back(loading)
            return carry_out(session), engine.life.spec
    finally:
        give_back(loading)


def _plan(engine: Engine, task: Task, options: Namespace) -> Plan:
    limits = {name: getattr(options, name) for name in ("max_steps", "max_time", "limit_batches", "overfit")}
    kept = Checkpoints(options.checkpoints) if options.checkpoints is not None else None
    resume = options.resume or None
    return engine._plan(task, None, None, options.epochs, checkpoints=kept, resume=resume, **limits)


def _afterwards(options: Namespace, outcome: Outcome, spec: Spec) -> tuple[Replay | None, list[str]]:
    """Replay the journal, and draw the path: the replay's result, and what went wrong in this."""
    found, problems = None, []
    if options.journal is not None:
        try:
            found = replay(read_journal(options.journal), spec)
            if not found.holds:
                problems.append(f"{_UNPROVED}: {found}")
        except Exception as error:
            problems.append(f"the journal cannot be replayed: {type(error).__name__}: {error}")
    if options.drawing is not None:
        try:
            write(options.drawing, drawn(format_of(options.drawing), spec, outcome.path))
        except Exception as error:
            problems.append(f"the path cannot be drawn: {type(error).__name__}: {error}")
    return found, problems


def _files(options: Namespace, found: Replay | None) -> Mapping[str, str]:
    files = {}
    if found is not None:
        end = f", {found.finding}" if found.finding else ""
        files["journal"] = f"{options.journal}: replayed, {found.steps} transitions, {found.result}{end}"
    if options.drawing is not None:
        files["drawing"] = f"{options.drawing}: the path taken"
    return files
