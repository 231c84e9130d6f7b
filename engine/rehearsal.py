"""Rehearses a task on the simulated device: what would go wrong on a real one is found for nothing.

A watched run, an exit under each policy, an evaluation, a checkpoint and its restoring, and then the fault
sweep. All with a few batches of the task's own data.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlock.backends import simulator
from interlock.backends.sim import SimAdapter

from .checkpoint import Checkpoints
from .copies import trace_copies
from .engine import Engine
from .errors import TaskError
from .options import ExitPolicy
from .outcome import Outcome
from .rehearsal_report import Finding, Rehearsal
from .rehearsal_watch import ENGINE, Transfer, Watch, fresh, mapped
from .session import carry_out
from .sweep import sweep
from .task import Data, Task

POLICIES: tuple[ExitPolicy, ...] = ("offload", "keep", "discard")
Tell = Callable[[str], object]


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
    tell: Tell = lambda _: None,
) -> Rehearsal:
    """Carry a task out on the simulated device, and look for what would go wrong on a real one.

    Args:
        task: What to train. A model that was given is copied for each run.
        data: Batches or `Data`; the task's own if left out.
        steps: Of the watched run; as many batches are read.
        quick: Strike only some passages of each kind of point, with one exit policy; else all, with each.
        parameters: What placement does to them: `replaced`, as on XLA, or `kept`, as on CUDA.
        checkpoints: Also save and go on from a checkpoint, in a temporary folder.
        seed: Of all runs.
        only: The id of one cell of the fault sweep, which alone is tried.
        exits: With which exit policies faults are injected; by default `offload` if `quick`, else all.
        state: Folder in which the sweep's verdicts are kept, so that it can go on after an interruption.
        repeat: Makes a command that tries one cell again, from its id and the exit policy.
        progress: A progress bar for the sweep; by default where the standard error stream is a terminal.
        tell: Told what is done next.

    Returns:
        What was found; `ok` says whether all is well.

    Raises:
        DeviceUnavailable: There can be no simulated device in this process.
        TaskError: The task has no data.
    """
    began = time.monotonic()
    simulator.install()
    stage = _Stage(task, _few(task, data, steps), partial(SimAdapter, parameters), seed, tell)
    found = stage.watched() if only is None else Rehearsal(task.name)
    if any(finding.kind == "foreign" for finding in found.findings) or only is not None:
        stage.task = mapped(stage.task)
    if only is None and not _spoilt(found):
        more = [*stage.policies(), *stage.evaluation(), *(stage.restore() if checkpoints else [])]
        found = replace(found, findings=(*found.findings, *more))
    sweeps = []
    if _spoilt(found):
        # Each fault would lead to the same again, and say nothing more.
        told = "no fault was injected: mend the problems above first, which a run without any has"
        found = replace(found, findings=(*found.findings, Finding("faults", True, told)))
    else:
        for policy in exits or (POLICIES[:1] if quick or only else POLICIES):
            tell(f"faults, exit {policy}")
            kept = Path(state) / f"{policy}.jsonl" if state is not None else None
            sweeps.append(
                sweep(
                    replace(stage.task, compile=False),
                    stage.data,
                    backend=stage.adapter,
                    exit=policy,
                    batches=min(steps, 2),
                    checkpoints=checkpoints and not quick,
                    quick=quick and only is None,
                    seed=seed,
                    only=only,
                    state=kept,
                    repeat=None if repeat is None else partial(_again, repeat, policy),
                    progress=progress,
                )
            )
    findings = tuple(sorted(found.findings, key=lambda finding: not finding.problem))
    return replace(found, findings=findings, sweeps=tuple(sweeps), seconds=time.monotonic() - began)


def _again(repeat: Callable[[str, ExitPolicy], str], policy: ExitPolicy, cell: str) -> str:
    return repeat(cell, policy)


def _spoilt(found: Rehearsal) -> bool:
    return any(finding.problem for finding in found.findings)


def _few(task: Task, data: Any, steps: int) -> Data:
    given = data
    if given is None:
        if task.data is None:
            raise TaskError(f"task '{task.name}' has no data to rehearse with: pass some, or give it `data=`")
        given = task.data()
    if not isinstance(given, Data):
        given = Data(*given) if isinstance(given, tuple) and len(given) == 2 else Data(given)
    train = list(islice(given.train, steps))
    if not train:
        raise TaskError(f"the data of task '{task.name}' has no batch in it")
    return Data(train, list(islice(given.validate, 1)) if given.validate is not None else None)


class _Stage:
    """The runs of one rehearsal."""

    def __init__(
        self, task: Task, data: Data, adapter: Callable[[], SimAdapter], seed: int, tell: Tell
    ) -> None:
        self.task = task
        self.data = data
        self.adapter = adapter
        self._seed = seed
        self._tell = tell

    def _run(self, task: Task, *, epochs: int = 1, policy: ExitPolicy = "offload", **more: Any) -> Outcome:
        engine = Engine(self.adapter(), exit=policy, seed=self._seed, report_every=1)
        run = engine.start(task, self.data.train, validate=self.data.validate, epochs=epochs, **more)
        return run.wait()

    def watched(self) -> Rehearsal:
        """One run, with everything that can be seen of it."""
        self._tell("a watched run")
        watch, memory = Watch(), simulator.memory
        task = watch.task(self.task)
        with simulator.stacks(), memory.watched(), trace_copies() as copies, simulator.traced(watch):
            engine = Engine(self.adapter(), seed=self._seed, report_every=1)
            # On this thread, since code that names a device of its own is seen on the thread of the block.
            with simulator.foreign("map") as places:
                session = engine._session(task, engine._plan(task, self.data.train, self.data.validate, 1))
                outcome = carry_out(session)
            blocks, peak = memory.at_peak or (), memory.peak
        findings = [*self._of_run(outcome), *_leaks(outcome)]
        findings += [Finding("copy", False, f"{one}") for one in copies]
        findings += [
            Finding("foreign", False, f"{place}: it names a device of its own; take that of model or batch")
            for place in places
        ]
        transfers = watch.transfers()
        findings += _of_transfers(transfers)
        findings += _of_parameters(watch, outcome.model) if outcome.steps else []
        if self.task.compile:
            told = "the task is rehearsed without `compile`: nothing is compiled for the simulated device"
            findings.append(Finding("compile", False, told))
        return Rehearsal(
            self.task.name, outcome.steps, tuple(findings), tuple(transfers), peak, watch.at_peak(blocks)
        )

    def _of_run(self, outcome: Outcome) -> list[Finding]:
        if outcome.status == "finished" and outcome.ok:
            return []
        told = outcome.failure.traceback if outcome.failure else str(outcome)
        return [Finding("order", True, f"the run ended as '{outcome.status}':\n{told.rstrip()}")]

    def policies(self) -> list[Finding]:
        """A run with each exit policy ends well, and where it says."""
        found = []
        for policy in POLICIES:
            self._tell(f"exit {policy}")
            before = simulator.memory.allocated
            outcome = self._run(replace(self.task, model=fresh(self.task), compile=False), policy=policy)
            if outcome.status != "finished" or not outcome.ok or outcome.residue.bytes != 0:
                found.append(Finding("policy", True, f"exit {policy}: {outcome}, residue {outcome.residue}"))
            del outcome
            left = simulator.memory.allocated - before
            if left:
                blocks = "; ".join(map(str, simulator.memory.live()[-3:]))
                found.append(
                    Finding("policy", True, f"exit {policy}: {left} bytes stay afterwards: {blocks}")
                )
        return found

    def evaluation(self) -> list[Finding]:
        """An evaluation, where the task has something to evaluate."""
        task = replace(self.task, model=fresh(self.task), compile=False)
        if self.data.validate is None or (task.loss is None and task.metrics is None):
            return []
        self._tell("an evaluation")
        before = simulator.memory.allocated
        try:
            Engine(self.adapter(), seed=self._seed).evaluate(task, self.data.validate)
        except Exception as error:
            return [Finding("evaluation", True, f"the evaluation fails: {type(error).__name__}: {error}")]
        left = simulator.memory.allocated - before
        return [Finding("evaluation", True, f"{left} bytes stay after an evaluation")] if left else []

    def restore(self) -> list[Finding]:
        """Two epochs in one run, and in two with a checkpoint between them, train to the same weights."""
        self._tell("a checkpoint and its restoring")
        task = replace(self.task, model=fresh(self.task), compile=False)
        straight = self._run(task, epochs=2)
        with tempfile.TemporaryDirectory(prefix="interlock-") as folder:
            settings = Checkpoints(folder)
            first = self._run(task, checkpoints=settings)
            second = self._run(task, epochs=2, checkpoints=settings, resume=True)
        for outcome in (straight, first, second):
            if outcome.status != "finished":
                return [Finding("restore", True, f"a run with a checkpoint fails: {outcome.failure}")]
        apart = _apart(straight.model, second.model)
        if apart:
            told = "two epochs with a checkpoint between them train to other weights than without: "
            return [Finding("restore", False, told + ", ".join(apart[:5]))]
        return []


def _apart(one: nn.Module | None, other: nn.Module | None) -> list[str]:
    if one is None or other is None:
        return ["one of the runs has no model"]
    mine, theirs = one.state_dict(), other.state_dict()
    return [name for name in mine if name not in theirs or not _equal(mine[name], theirs[name])]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return True  # an extra state: what it is, and how it compares, is the module's
    return isinstance(other, torch.Tensor) and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _leaks(outcome: Outcome) -> list[Finding]:
    found = []
    separator = "\n     from "
    for left in outcome.residue.leftovers:
        owners = "; ".join(left.owners[:3]) or "an owner that was not found"
        places = [place for place in left.stack if "/interlock/" not in place] or list(left.stack)
        made = f"\n  made at {separator.join(places[:4])}" if places else ""
        text = f"{left.nbytes} bytes by {left.origin} are left on the device, held by {owners}{made}"
        found.append(Finding("leak", True, text))
    if outcome.residue.bytes and not found:
        found.append(Finding("leak", True, f"left on the device: {outcome.residue}"))
    return found


def _of_transfers(transfers: list[Transfer]) -> list[Finding]:
    found = []
    for transfer in transfers:
        if transfer.direction == "to_host" and transfer.place != ENGINE and ":" in transfer.place:
            told = (
                f"{transfer.place} copies to the host {transfer.per_step:g} times a step: the device waits "
                "there. Keep it on the device (`.detach()`), and read it when metrics are reported"
            )
            found.append(Finding("copy", False, told))
    return found


def _of_parameters(watch: Watch, model: nn.Module | None) -> list[Finding]:
    found = []
    if watch.unused:
        names = ", ".join(sorted(watch.unused)[:8])
        found.append(Finding("parameters", False, f"{len(watch.unused)} never had a gradient: {names}"))
    untrained = watch.untrained(model)
    if untrained:
        told = f"{len(untrained)} of {len(watch.names)} had gradients and did not change: "
        found.append(Finding("parameters", False, told + ", ".join(untrained[:8])))
    return found
