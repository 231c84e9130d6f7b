"""`interlock explain`: what a task will be, before anything of it runs."""

from __future__ import annotations

from argparse import Namespace

from interlock.backends.registry import adapter_class
from interlock.specs import Kind, Lifecycle

from .choices import titled
from .loading import task_from
from .messages import say
from .program import explain, step_program
from .proof import proved
from .task import Task

_BY_HAND = """\
program   the step is written by hand: each call through its handle is checked while it runs, against the
          step protocol of the backend"""
_WIDTH = 104
WISHES = frozenset[str]()
"""A run with the default exit policy has no wish."""


def run_explain(options: Namespace) -> int:
    """Show the task, the plan of its run on a backend with its proof, and the step program."""
    adapter = adapter_class(options.backend)
    monitor = adapter.monitor
    with task_from(options.task) as task:
        program = (
            step_program(monitor, schedule=task.schedules_steps, options=task.options)
            if task.step is None
            else None
        )
        life = proved(monitor)
        spec = life.spec
        say(f"task      {task.name}: {', '.join(_parts(task))}")
        say(f"backend   {titled(adapter.name, monitor.name)}")
        say(f"lifecycle {spec.name} (hash {spec.hash}): {len(spec.properties)} properties proved")
        say()
        say("plan      what a run goes through in which nothing goes wrong:")
        say(_plan(life))
        say()
        say("          a fault anywhere leads to failed, interrupted or device_lost, and from there by the")
        say("          exit table to closed: `interlock graph` draws it")
        say()
        say(explain(program) if program else _BY_HAND)
    return 0


def _parts(task: Task) -> list[str]:
    """What the task gives, by the names of its functions; none of them is called."""
    given = {
        name: getattr(task, name) for name in ("model", "optimizer", "loss", "metrics", "scheduler", "data")
    }
    named = [f"{name} {_name(value)}" for name, value in given.items() if value is not None]
    return [*named, f"{task.epochs} epoch(s)"]


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__).replace("<lambda>", "(a lambda)")


def _plan(life: Lifecycle) -> str:
    """The path of a run of one epoch with validation, as the machine takes it."""
    slot = life.slot()
    words = [slot.state]
    work = iter(("validate", "finish"))
    while slot.state != life.spec.terminal:
        phase = life.spec.phase[slot.state]
        event = phase.done if phase.kind is Kind.FLIGHT else slot.next(WISHES) or next(work)
        words.append(f"--{event}--> {slot.fire(event).phase}")
    return _wrapped(words)


def _wrapped(words: list[str]) -> str:
    rows, row = [], ""
    for word in words:
        if row and len(row) + 1 + len(word) > _WIDTH - 10:
            rows.append(row)
            row = ""
        row = f"{row} {word}" if row else word
    return "\n".join(f"          {text}" for text in [*rows, row])
