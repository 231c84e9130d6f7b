"""The parts of a rehearsal: a watched run, a run with each exit policy, an evaluation, a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from interlock.backends import simulator
from interlock.backends.sim import SimAdapter

from .checkpoint import Checkpoints
from .copies import trace_copies
from .engine import Engine
from .errors import InterlockError
from .messages import one_error, user_frames
from .options import ExitPolicy
from .outcome import Outcome, held_by
from .rehearsal_report import WATCHED, Finding, Rehearsal
from .rehearsal_watch import ENGINE, Transfer, Watch, fresh
from .session import carry_out
from .sweep_process import reading, seeded, settled
from .task import Data, Task

POLICIES: tuple[ExitPolicy, ...] = ("offload", "keep", "discard")
Tell = Callable[[str], object]


class Parts:
    """Carries the parts of one rehearsal out.

    All on the calling thread, where code that names a device of its own is seen.

    Args:
        task: What is rehearsed.
        data: A few of its batches.
        adapter: Makes an adapter of the simulated device.
        seed: Of all runs.
        tell: Told what is done next.

    Attributes:
        done: The names of those that were carried out.
        places: Where code names a device of its own.
    """

    def __init__(
        self, task: Task, data: Data, adapter: Callable[[], SimAdapter], seed: int, tell: Tell
    ) -> None:
        self.task, self.data = task, data
        self.done: list[str] = []
        self.places: dict[str, None] = {}
        self._adapter, self._seed, self._tell = adapter, seed, tell

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._tell(name)
        self.done.append(name)
        with simulator.foreign("map") as places:
            yield
        self.places |= dict.fromkeys(f"{place}" for place in places)

    def _plain(self) -> Task:
        return replace(self.task, model=fresh(self.task), compile=False)

    def _run(self, task: Task, *, epochs: int = 1, policy: ExitPolicy = "offload", **more: Any) -> Outcome:
        engine = Engine(self._adapter(), exit=policy, seed=self._seed, report_every=1)
        plan = engine._plan(task, self.data.train, self.data.validate, epochs, **more)
        return _uninterrupted(carry_out(engine._session(task, plan)))

    def watched(self) -> Rehearsal:
        """One run, with everything that can be seen of it."""
        watch, memory = Watch(), simulator.memory
        task = watch.task(self.task)
        with seeded(self._seed):
            before = reading()
            with self._part(WATCHED), simulator.stacks(), memory.watched(), trace_copies() as copies:
                engine = Engine(self._adapter(), seed=self._seed, report_every=1)
                session = engine._session(
                    task, engine._plan(task, self.data.train, self.data.validate, epochs=1)
                )
                watch.follow(session.driver)
                with simulator.traced(watch):
                    outcome = _uninterrupted(carry_out(session))
                blocks, peak = memory.at_peak or (), memory.peak
            changed = settled(before)
        findings = [*_of_run(outcome), *_leaks(outcome)]
        if changed:
            findings.append(Finding("process", True, _CHANGED + "\n  ".join(["", *changed])))
        findings += [Finding("copy", False, f"{one}") for one in copies]
        transfers = watch.transfers(outcome.steps)
        findings += _of_transfers(transfers)
        findings += _of_parameters(watch, outcome.model) if outcome.steps else []
        if self.task.compile:
            text = "the task is rehearsed without `compile`: nothing is compiled for the simulated device"
            findings.append(Finding("compile", False, text))
        return Rehearsal(
            self.task.name, outcome.steps, tuple(findings), tuple(transfers), peak, watch.at_peak(blocks)
        )

    def policies(self) -> list[Finding]:
        """A run with each exit policy ends well, and where it says."""
        found = []
        for policy in POLICIES:
            name = f"exit {policy}"
            before = simulator.memory.allocated
            with self._part(name):
                outcome = self._run(self._plain(), policy=policy)
            if outcome.status != "finished" or not outcome.ok or outcome.residue.bytes != 0:
                found.append(Finding("policy", True, f"{_ending(outcome)}, residue {outcome.residue}", name))
            del outcome
            left = simulator.memory.allocated - before
            if left:
                blocks = "; ".join(map(str, simulator.memory.live()[-3:]))
                found.append(Finding("policy", True, f"{left} bytes stay afterwards: {blocks}", name))
        return found

    def evaluation(self) -> list[Finding]:
        """An evaluation, where the task has something to evaluate."""
        if self.data.validate is None or (self.task.loss is None and self.task.metrics is None):
            return []
        name = "an evaluation"
        before = simulator.memory.allocated
        with self._part(name):
            try:
                Engine(self._adapter(), seed=self._seed).evaluate(self._plain(), self.data.validate)
            except Exception as error:
                return [Finding("evaluation", True, f"the evaluation fails: {told(error)}", name)]
        left = simulator.memory.allocated - before
        return [Finding("evaluation", True, f"{left} bytes stay after an evaluation", name)] if left else []

    def restore(self) -> list[Finding]:
        """Epochs in one run, and in two with a checkpoint between them, train to the same weights."""
        name = "a checkpoint and its restoring"
        task = self._plain()
        # As many epochs as it takes to come by each function that adopts, whenever it is due.
        order = {epoch: min(epoch, place) for place, epoch in enumerate(sorted(task.adopt), 1)}
        task = replace(task, adopt={order[epoch]: change for epoch, change in task.adopt.items()})
        epochs = max([2, *(epoch + 1 for epoch in task.adopt)])
        with self._part(name), tempfile.TemporaryDirectory(prefix="interlock-") as folder:
            settings = Checkpoints(folder)
            straight = self._run(task, epochs=epochs)
            first = self._run(task, checkpoints=settings)
            second = self._run(task, epochs=epochs, checkpoints=settings, resume=True)
        for outcome in (straight, first, second):
            if outcome.status != "finished":
                return [Finding("restore", True, f"a run with a checkpoint fails: {_ending(outcome)}", name)]
        apart = _apart(straight.model, second.model)
        if apart:
            text = "epochs with a checkpoint between them train to other weights than without: "
            return [Finding("restore", False, text + ", ".join(apart[:5]), name)]
        return []

    def foreign(self) -> list[Finding]:
        """Where code named a device of its own, in whichever part."""
        more = "it names a device of its own; take that of model or batch"
        return [Finding("foreign", False, f"{place}: {more}") for place in self.places]


_CHANGED = (
    "the run leaves the process another one than it found. What a library does once, when it is first "
    "imported, is not the run's if the task's file imports it:"
)


def _uninterrupted(outcome: Outcome) -> Outcome:
    if isinstance(outcome.error, KeyboardInterrupt):
        raise KeyboardInterrupt
    return outcome


def told(error: BaseException) -> str:
    """An error: what it says, then where in the task it was raised, without the frames of Interlock."""
    return "\n".join([one_error(error), *user_frames(error)])


def _ending(outcome: Outcome) -> str:
    return f"the run ended as '{outcome.status}': {told(outcome.error)}" if outcome.error else f"{outcome}"


def _of_run(outcome: Outcome) -> list[Finding]:
    if outcome.status == "finished" and outcome.ok:
        return []
    ours = outcome.error is None or isinstance(outcome.error, InterlockError)
    return [Finding("order" if ours else "error", True, _ending(outcome))]


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
        places = [place for place in left.stack if "/interlock/" not in place] or list(left.stack)
        made = f"\n  made at {separator.join(places[:4])}" if places else ""
        text = f"{left.nbytes} bytes by {left.origin} are left on the device, {held_by(left.owners)}{made}"
        found.append(Finding("leak", True, text))
    if outcome.residue.bytes and not found:
        found.append(Finding("leak", True, f"left on the device: {outcome.residue}"))
    return found


def _of_transfers(transfers: list[Transfer]) -> list[Finding]:
    found = []
    for transfer in transfers:
        if transfer.direction == "to_host" and transfer.place != ENGINE and ":" in transfer.place:
            often = "once" if transfer.per_step == 1 else f"{transfer.per_step:g} times"
            text = (
                f"{transfer.place} copies to the host {often} a step: the device waits "
                "there. Keep it on the device (`.detach()`), and read it when metrics are reported"
            )
            found.append(Finding("copy", False, text))
    return found


def _of_parameters(watch: Watch, model: nn.Module | None) -> list[Finding]:
    found = []
    if watch.unused:
        names = ", ".join(sorted(watch.unused)[:8])
        found.append(Finding("parameters", False, f"{len(watch.unused)} never had a gradient: {names}"))
    untrained = watch.untrained(model)
    if untrained:
        text = f"{len(untrained)} of {len(watch.names)} had gradients and did not change: "
        found.append(Finding("parameters", False, text + ", ".join(untrained[:8])))
    return found
