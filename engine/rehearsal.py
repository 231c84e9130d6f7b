"""Rehearses a task on the simulated device: what would go wrong on a real one is found for nothing.

A watched run, an exit under each policy, an evaluation, a checkpoint and its restoring, and then the fault
sweep. All with a few batches of the task's own data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from interlock.backends import simulator
from interlock.backends.sim import SimAdapter

from .errors import TaskError
from .options import ExitPolicy
from .rehearsal_parts import POLICIES, Parts, Tell
from .rehearsal_report import Finding, Rehearsal
from .rehearsal_watch import mapped
from .sweep import SweepReport, Verdict, sweep
from .task import Data, Task

OnCell = Callable[[ExitPolicy, int, int], object]


def rehearse(
    task: Task,
    data: Any = None,
    *,
    steps: int = 3,
    quick: bool = True,
    parameters: str = "replaced",
    checkpoints: bool = True,
    seed: int = 0,
    only: str | None = None,
    exits: Sequence[ExitPolicy] | None = None,
    state: str | Path | None = None,
    repeat: Callable[[str, ExitPolicy], str] | None = None,
    progress: bool | None = None,
    strict: bool = False,
    on_cell: OnCell | None = None,
    tell: Tell = lambda _: None,
) -> Rehearsal:
    """Carry a task out on the simulated device, and look for what would go wrong on a real one.

    Args:
        task: What to train. A model that was given is copied for each run.
        data: Batches or `Data`; the task's own if left out.
        steps: Of the watched run, and of an epoch of the others; those that faults strike take 2 at most.
        quick: Strike only some passages of each kind of point, with one exit policy; else all, with each.
        parameters: What placement does to them: `replaced`, as on XLA, or `kept`, as on CUDA.
        checkpoints: Also save and go on from a checkpoint, in a temporary folder.
        seed: Of all runs.
        only: The id of one cell of the fault sweep, which alone is tried.
        exits: With which exit policies faults are injected; by default `offload` if `quick`, else all.
        state: Folder in which the sweep's verdicts are kept, so that it can go on after an interruption.
        repeat: Makes a command that tries one cell again, from its id and the exit policy.
        progress: A progress bar for the sweep; by default where the standard error stream is a terminal.
        strict: Fail also for what is merely worth a look.
        on_cell: Called after each fault with the exit policy, its number from 1, and how many there are.
        tell: Told what is done next.

    Returns:
        What was found; `ok` says whether all is well.

    Raises:
        DeviceUnavailable: There can be no simulated device in this process.
        TaskError: The task has no data.
        UnknownCell: There is no cell `only`.
    """
    began = time.monotonic()
    simulator.install()
    parts = Parts(task, _few(task, data, steps), partial(SimAdapter, parameters), seed, tell)
    found = Rehearsal(task.name)
    if only is None:
        found = parts.watched()
        more: list[Finding] = []
        if not found.problems:
            more = [*parts.policies(), *parts.evaluation(), *(parts.restore() if checkpoints else [])]
        found = replace(found, findings=(*found.findings, *more, *parts.foreign()))
    sweeps: list[SweepReport] = []
    if found.problems:
        # Each fault would lead to the same again, and say nothing more.
        text = "no fault was injected: mend the problems above first, which a run without any has"
        found = replace(found, findings=(*found.findings, Finding("faults", True, text, "faults")))
    else:
        struck = replace(mapped(task) if parts.places or only is not None else task, compile=False)

        def swept(policy: ExitPolicy) -> SweepReport:
            return sweep(
                struck,
                parts.data,
                backend=partial(SimAdapter, parameters),
                exit=policy,
                batches=min(steps, 2),
                checkpoints=checkpoints and not quick,
                quick=quick and only is None,
                seed=seed,
                only=only,
                state=_file(state, policy, parameters),
                repeat=None if repeat is None else partial(_again, repeat, policy),
                progress=progress,
                on_cell=None if on_cell is None else partial(_count, on_cell, policy),
                tell=partial(_tell, tell, policy),
            )

        sweeps = [swept(policy) for policy in exits or (POLICIES[:1] if quick or only else POLICIES)]
    notes = (NOT_STRUCK,) if sweeps and quick and checkpoints and only is None else ()
    return replace(
        found,
        findings=tuple(sorted(found.findings, key=lambda finding: not finding.problem)),
        sweeps=tuple(sweeps),
        seconds=time.monotonic() - began,
        parts=tuple(parts.done),
        notes=notes,
        strict=strict,
    )


NOT_STRUCK = "no fault struck the saving of a checkpoint, or a failed run's rescue: --full strikes them"


def _tell(tell: Tell, policy: ExitPolicy, text: str) -> None:
    tell(f"faults, exit {policy}: {text}")


def _count(on_cell: OnCell, policy: ExitPolicy, _: Verdict, number: int, total: int) -> None:
    on_cell(policy, number, total)


def _file(state: str | Path | None, policy: ExitPolicy, parameters: str) -> Path | None:
    """The file of one sweep's verdicts. Those of the other placement say nothing about this one."""
    if state is None:
        return None
    return Path(state) / f"{policy}{'' if parameters == 'replaced' else f'-{parameters}'}.jsonl"


def _again(repeat: Callable[[str, ExitPolicy], str], policy: ExitPolicy, cell: str) -> str:
    return repeat(cell, policy)


def _few(task: Task, data: Any, steps: int) -> Data:
    given = data
    if given is None:
        if task.data is None:
            raise TaskError(f"task '{task.name}' has no data to rehearse with: pass some, or give it `data=`")
        given = task.data()
    if not isinstance(given, Data):
        given = Data(*given) if isinstance(given, tuple) and len(given) == 2 else Data(given)
    train = list(islice(given.train, steps * task.window))
    if not train:
        raise TaskError(f"the data of task '{task.name}' has no batch in it")
    return Data(train, list(islice(given.validate, 1)) if given.validate is not None else None)
