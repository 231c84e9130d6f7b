"""What must be true once a struck run is over: compares, and repairs nothing.

Each promise is one function, so that a planted fault can be shown to be caught by the one meant for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from interlock.specs.semantics import endings

from .errors import DeadlinePassed
from .evidence import graph
from .sweep_case import Case, Reference
from .sweep_digests import different, form_of, weights_of
from .sweep_points import START
from .sweep_run import Seen
from .sweep_whole import (
    as_built,
    knowledge,
    may_stay,
    model_home,
    optimizer_whole,
    rescued,
    standing,
    weights_whole,
)


def judged(case: Case) -> list[str]:
    """Every broken promise, one line each: `name of the promise: what is wrong`."""
    return [f"{name}: {line}" for name, promise in PROMISES.items() for line in promise(case)]


def closed(case: Case) -> Iterator[str]:
    """Phase `closed`, nothing held, nothing on the release stack."""
    slot = case.seen.slot
    if slot is None:
        yield "there was no run at all"
        return
    if slot.state != slot.lifecycle.spec.terminal:
        yield f"the phase is '{slot.state}'"
    if slot.held:
        yield f"still held: {', '.join(slot.held)}"
    if case.seen.stacked:
        yield f"still on the release stack: {', '.join(case.seen.stacked)}"


def released(case: Case) -> Iterator[str]:
    """Whatever was acquired ended once, and was abandoned only where its release failed twice or blocked."""
    slot = case.seen.slot
    if slot is None:
        return
    acquired = {
        effect.resource
        for entry in case.history
        for _, effect in slot.lifecycle.rules[entry.source][entry.event].effects
        if effect.verb == "acquires"
    }
    endings = [name for name, _ in slot.ended]
    if sorted(endings) != sorted(acquired):
        yield f"acquired {sorted(acquired)}, ended {sorted(endings)}"
    given_up = sorted(name for name, how in slot.ended if how == "abandoned")
    due = sorted(_due(case))
    if given_up != due:
        yield f"abandoned {given_up}, and the faults on the way out account for {due}"
    if given_up and case.cell.fault not in ("twice", "blocks", "loses"):
        yield f"abandoned {given_up} after a single fault"
    if sorted(case.outcome.abandoned) != given_up:
        yield f"the outcome says that {list(case.outcome.abandoned)} were abandoned, the history {given_up}"


def _due(case: Case) -> set[str]:
    """The resources of which two releases failed, or one did not return."""
    ended_by = endings(case.seen.slot.lifecycle.spec) if case.seen.slot is not None else {}
    on_the_way = [entry for entry in case.history if entry.source in ended_by]
    failed = [ended_by[entry.source] for entry in on_the_way if _is_fault(entry.event)]
    late = {ended_by[entry.source] for entry in on_the_way if entry.event == "abandon"}
    due = late | {name for name in failed if failed.count(name) > 1}
    if any(entry.event in ("lose", "write_off") for entry in case.history):
        due |= set(case.endings) - {name for name, how in case.endings.items() if how != "abandoned"}
    return due


def _is_fault(event: str) -> bool:
    return event in ("fail", "interrupt")


def error_kept(case: Case) -> Iterator[str]:
    """The first error is the outcome's, the same object; later ones are attached; none where none struck."""
    outcome, raised = case.outcome, case.seen.raised
    error = outcome.error
    if case.survives:
        if error is not None or outcome.status != "finished":
            yield f"the run is to finish, and is '{outcome.status}': {_told(outcome)}"
        return
    if error is None:
        yield f"the fault struck, and the run is '{outcome.status}' without an error"
        return
    if outcome.failure is None or outcome.failure.type.rpartition(".")[2] != type(error).__name__:
        yield f"the outcome has {error!r}, and its record of it is {outcome.failure!r}"
    if raised:
        if error is not raised[0] and not (case.cell.point.layer == "device" and _within(error, raised[0])):
            yield f"the first error was {raised[0]!r}, and the outcome has {error!r}"
        soft = not isinstance(raised[0], Exception)
        if outcome.status != ("cancelled" if soft else "failed"):
            yield f"the run is '{outcome.status}' after {type(raised[0]).__name__}"
        kept = [failure.type.rpartition(".")[2] for failure in outcome.errors]
        lost = [type(one).__name__ for one in raised[1:] if type(one).__name__ not in kept]
        if lost:
            yield f"later errors are not in the outcome: {lost}; it has {kept}"
    elif case.cell.fault == "blocks" and not isinstance(error, DeadlinePassed):
        yield f"a call did not return before the deadline, and the error is {error!r}"
    elif case.cell.fault == "loses" and not case.seen.adapter.is_loss_of_device(error):
        yield f"the device died, and the error does not say so: {error!r}"
    if case.cell.fault == "blocks" and case.cell.point.failed:
        names = [failure.type.rpartition(".")[2] for failure in outcome.errors]
        if "DeadlinePassed" not in names:
            yield f"that a call did not return is not in the outcome: later errors are {names}"
    if outcome.ok:
        yield "the outcome says ok, although an error struck"


def _within(error: BaseException, first: BaseException) -> bool:
    """Whether the first error is one that another came from: user code may turn one into another."""
    return any(one is first for one in graph(error))


def _told(outcome: Any) -> str:
    return str(outcome.failure) if outcome.failure is not None else "no error"


def device_empty(case: Case) -> Iterator[str]:
    """No byte of the run is on the device, but for a model that is kept; and the outcome says so."""
    outcome, seen = case.outcome, case.seen
    residue = outcome.residue
    lost, measured = case.came("lose"), case.came("measured")
    unmeasured = any(entry.source == "measuring" and entry.event != "measured" for entry in case.history)
    excused = lost or unmeasured or bool(outcome.abandoned)
    if not residue.known and (measured or not excused):
        yield "the residue is unknown, although nothing kept the device from being asked"
    if residue.known and not measured and case.came("place"):
        yield f"the residue is said to be known ({residue}), and the device was never asked"
    # A call that blocks holds what it copies, and the residue says so; once it is let go, nothing is left.
    late = bool(outcome.abandoned) or case.came("rescue")
    holds = case.cell.fault == "blocks" and late and seen.after is not None
    # A model that was given up stands, where placement keeps Parameters, on the device until it is dropped.
    stands = standing(seen.adapter, outcome.model) if may_stay(case) else 0
    given_up = case.endings.get("model") == "abandoned" and residue.bytes == stands
    if residue.bytes and not (holds or given_up):
        yield f"the residue is {residue}"
    if seen.before is None or seen.after is None or lost:
        return
    more = seen.after - seen.before - stands
    if more:
        yield f"{more} bytes more than before the run are on the device"


def dead_left_alone(case: Case) -> Iterator[str]:
    """Once the device is dead, nothing is asked of it, not even how much memory is taken."""
    if case.seen.touched:
        yield f"the device is dead, and was asked for {', '.join(case.seen.touched[:4])}"


def legal_history(case: Case) -> Iterator[str]:
    """Replayed on a fresh slot, the events lead through the same phases."""
    slot = case.seen.slot
    if slot is None:
        return
    fresh = slot.lifecycle.slot()
    for entry in case.history:
        if entry.event not in fresh.legal:
            yield f"'{entry.event}' is not legal in '{fresh.state}'"
            return
        fresh.fire(entry.event)
    if fresh.config != slot.config:
        yield "replayed, the history ends elsewhere"


def process_as_it_was(case: Case) -> Iterator[str]:
    """Threads, children, files, handlers, torch's switches, random generators."""
    point, lines = case.cell.point, case.seen.process
    if (point.name, point.moment, case.cell.fault) == ("free", "before", "twice"):
        # The adapter's own `free` was never called, so what it took of the process is still taken.
        lines = [line for line in lines if line.startswith(("thread", "random generator"))]
    if case.cell.fault == "loses":
        # That is the fault. Whatever else of the device differs is no part of it.
        lines = [line for line in lines if not line.startswith("simulated device lost")]
    yield from lines
    if case.cell.point == START:
        # What a run changes once and for all, no later one changes again.
        yield from (f"{line} (by the first run of all)" for line in case.reference.process)


def again(seen: Seen, reference: Reference) -> Iterator[str]:
    """A second run on the same device finishes, leaves nothing, and trains to the same weights."""
    outcome = seen.outcome
    if seen.error is not None:
        yield f"it did not begin: {type(seen.error).__name__}: {seen.error}"
        return
    if outcome is None:
        return  # it hangs: there is nothing to look at
    if outcome.status != "finished" or outcome.abandoned or outcome.model is None:
        yield f"it is '{outcome.status}', abandoned {list(outcome.abandoned)}: {_told(outcome)}"
        return
    if outcome.residue.bytes != 0:
        yield f"its residue is {outcome.residue}"
    if other := different(weights_of(outcome.model), reference.weights):
        yield f"it trained to other weights: {other}"
    elif other := different(
        {**form_of(outcome.model), **knowledge(outcome)}, {**reference.form, **reference.optimizers}
    ):
        yield f"it ended otherwise: {other}"
    yield from seen.process


Promise = Callable[[Case], Iterator[str]]

PROMISES: Mapping[str, Promise] = {
    "the run is closed": closed,
    "each resource ended once": released,
    "the first error is kept": error_kept,
    "the device is empty": device_empty,
    "a dead device is left alone": dead_left_alone,
    "the model is home": model_home,
    "the weights are whole": weights_whole,
    "the model is as built": as_built,
    "the optimizer is whole": optimizer_whole,
    "the rescue is whole": rescued,
    "the history is legal": legal_history,
    "the process is as it was": process_as_it_was,
}
"""What is checked of a struck run, by name."""
AGAIN = "the next run is as good"
"""What is checked of the run after it."""
