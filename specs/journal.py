"""The journal of a run: what its lines are, how it is read, and how it is replayed on the spec.

A journal is JSON lines, written one complete line at a time, so that what a killed run leaves is
readable up to its last moment. The first line is the header, then comes one line per transition:

    {"interlock":1,"kind":"header","spec":"training on cpu","spec_hash":"5d...","backend":"cpu",...}
    {"kind":"transition","n":1,"event":"acquire","source":"created","phase":"acquiring","held":["device"],...}

Lines of the kinds `report` and `note` may stand between them. The last line is the `outcome`; after it
may only come a note that says how many events the writer lost. Transitions that happen in
every step (`Transition.fast`) are not journaled one by one; one appears where the engine caught up
with it, right before a fault inside of it.

`replay` fires the events on a fresh slot of the spec: the proof is about the spec, and this is what
connects it with what a run really did, afterwards and on any machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checker import Result
from .errors import IllegalTransition, JournalError
from .machine import Entry, Slot, lifecycle
from .model import Spec, Status

VERSION = 1
KINDS = ("transition", "report", "note", "outcome")
"""What a line after the header can be."""

BEGINNING = b'{"interlock":'
"""How every journal begins, whatever may be wrong with the rest of it."""

CLEAN, ABANDONED = "clean", "abandoned"
STATUSES = ("finished", "stopped", "failed", "cancelled")
"""What an outcome may say of a run."""

_FAULTS: Mapping[str, frozenset[str]] = {
    "failed": frozenset({"fail", "lose", "peer_fail", "abandon"}),
    "cancelled": frozenset({"interrupt", "lose"}),
}
"""Status -> the transitions of which one has to be there for it."""

_LONGEST = 1e12  # seconds; what is longer is a number that float does not hold, or no time


# Writing


def header(spec: Spec, *, lifecycle: str, backend: str, run: str, **more: Any) -> str:
    """The first line of a journal.

    Args:
        spec: The composed spec that the run executes; its name and hash are written.
        lifecycle: `training`, `inference`, or the name of a user's own.
        backend: The backend's name.
        run: The run's id.
        more: Anything else that is worth keeping, such as versions.

    Returns:
        The line, with its newline.
    """
    names = {
        "spec": spec.name,
        "spec_hash": spec.hash,
        "lifecycle": lifecycle,
        "backend": backend,
        "run": run,
    }
    return _line({"interlock": VERSION, "kind": "header", **names, **more})


def transition_line(entry: Entry, n: int, spec: Spec, t0: float) -> str:
    """The line of one transition.

    Args:
        entry: What the slot returned.
        n: Number of the line among the transitions of this journal, from 1.
        spec: The spec of the slot.
        t0: `time.monotonic()` at the start of the run.

    Returns:
        The line, with its newline.
    """
    return _line(
        {
            "kind": "transition",
            "n": n,
            "event": entry.event,
            "source": entry.source,
            "phase": entry.phase,
            "held": list(_held(spec, entry.config.statuses)),
            "ended": [list(end) for end in entry.ended],
            "t": max(0.0, round(entry.at - t0, 6)),
        }
    )


def record(kind: str, **fields: Any) -> str:
    """A line of another kind: `report`, `note` or `outcome`.

    Values that JSON does not have are written as text: a loss may well be `nan`.

    Raises:
        ValueError: The kind is none of these.
    """
    if kind not in KINDS[1:]:
        raise ValueError(f"kind is '{kind}', must be one of {', '.join(KINDS[1:])}")
    return _line({"kind": kind, **fields})


def _line(data: dict[str, Any]) -> str:
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"), default=str)
    return text + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _held(spec: Spec, statuses: Sequence[Status]) -> tuple[str, ...]:
    pairs = zip(spec.resources, statuses, strict=True)
    return tuple(name for name, status in pairs if status is not Status.ABSENT)


# Reading


@dataclass(frozen=True)
class Step:
    """A transition as a journal tells it. The attributes are those of the line, `line` its number."""

    line: int
    n: int
    event: str
    source: str
    phase: str
    held: tuple[str, ...]
    ended: tuple[tuple[str, str], ...]
    t: float


@dataclass(frozen=True)
class Journal:
    """A journal that has been read.

    Attributes:
        source: Where it came from, for messages.
        header: The first line.
        steps: The transitions, in order.
        others: (line number, data) of the lines of other kinds.
        torn: Whether the last line is incomplete and was left out: the writer was killed in it.
    """

    source: str
    header: dict[str, Any]
    steps: tuple[Step, ...]
    others: tuple[tuple[int, dict[str, Any]], ...] = ()
    torn: bool = False


def read_journal(source: Path | str | Iterable[str]) -> Journal:
    """Read a journal.

    Args:
        source: A file's path, or the lines.

    Returns:
        The journal. An incomplete last line is left out and `torn` is set: that is what a killed
        writer leaves behind.

    Raises:
        JournalError: It is empty, no text, has no header or one of another version, or a line other
            than the last is not a complete line of a journal. The line is named.
        OSError: The file cannot be read.
    """
    if isinstance(source, (str, Path)):
        name, raw = str(source), Path(source).read_bytes().split(b"\n")
        complete = raw[-1] == b""
        raw = raw[:-1] if complete else raw
    else:
        name, raw = "journal", [line.encode("utf-8", "surrogatepass") for line in source]
        complete = bool(raw) and raw[-1].endswith(b"\n")
    if not raw:
        raise JournalError(name, 0, "it is empty: not even a header was written")
    first = _header(name, raw[0], torn=len(raw) == 1 and not complete)
    steps: list[Step] = []
    others: list[tuple[int, dict[str, Any]]] = []
    for number, text in enumerate(raw[1:], start=2):
        try:
            data = _object(name, number, text)
        except JournalError:
            if number == len(raw) and not complete:
                return Journal(name, first, tuple(steps), tuple(others), torn=True)
            raise
        kind = data.get("kind")
        if kind not in KINDS:
            raise JournalError(name, number, f"its kind is {kind!r}, must be one of {', '.join(KINDS)}")
        if kind == "transition":
            steps.append(_step(name, number, data))
        else:
            others.append((number, data))
    return Journal(name, first, tuple(steps), tuple(others))


def path_of(journal: Journal) -> tuple[tuple[str, str, str], ...]:
    """The (source, event, dest) of each transition, as drawings take them."""
    return tuple((step.source, step.event, step.phase) for step in journal.steps)


def _object(name: str, number: int, raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise JournalError(name, number, "it is not text (UTF-8)") from error
    except (ValueError, RecursionError) as error:
        raise JournalError(name, number, f"it is not JSON: {_excerpt(raw)}") from error
    if not isinstance(data, dict):
        raise JournalError(name, number, f"it is not a JSON object: {_excerpt(raw)}")
    return data


def _header(name: str, raw: bytes, *, torn: bool) -> dict[str, Any]:
    no_header = "not a journal of Interlock, its header is missing"
    try:
        data = _object(name, 1, raw)
    except JournalError as error:
        if torn and raw.startswith(BEGINNING):
            raise JournalError(name, 1, "the header is incomplete: the writer was killed in it") from error
        raise JournalError(name, 1, f"{no_header}; {error.problem}") from error
    if data.get("kind") != "header" or "interlock" not in data:
        raise JournalError(name, 1, f"{no_header}; there is {_excerpt(raw)}")
    version = data["interlock"]
    if type(version) is not int or version != VERSION:
        raise JournalError(name, 1, f"its version is {version!r}; this Interlock reads version {VERSION}")
    names = ("spec", "spec_hash", "lifecycle", "backend", "run")
    missing = [key for key in names if not isinstance(data.get(key), str)]
    if missing:
        raise JournalError(name, 1, f"the header lacks {', '.join(missing)} (text)")
    return data


def _step(name: str, number: int, data: dict[str, Any]) -> Step:
    """The data of a transition's line, each field checked for its type."""

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    n, t, held, ended = (data.get(key) for key in ("n", "t", "held", "ended"))
    wrong = [key for key in ("event", "source", "phase") if not isinstance(data.get(key), str)]
    wrong += [] if type(n) is int else ["n"]
    wrong += [] if isinstance(t, (int, float)) and not isinstance(t, bool) and 0 <= t < _LONGEST else ["t"]
    wrong += [] if texts(held) else ["held"]
    pairs = isinstance(ended, list) and all(texts(end) and len(end) == 2 for end in ended)
    wrong += [] if pairs else ["ended"]
    if wrong:
        problem = f"a transition whose {', '.join(wrong)} is missing or of another type"
        raise JournalError(name, number, problem)
    return Step(
        line=number,
        n=data["n"],
        event=data["event"],
        source=data["source"],
        phase=data["phase"],
        held=tuple(data["held"]),
        ended=tuple((resource, how) for resource, how in data["ended"]),
        t=float(data["t"]),
    )


def _excerpt(raw: bytes, width: int = 60) -> str:
    text = raw.decode("utf-8", "replace")
    return repr(text if len(text) <= width else f"{text[:width]}...")


# Replaying


@dataclass(frozen=True)
class Replay:
    """What came of replaying a journal on a spec.

    Attributes:
        result: `proved`: each line is what the spec does, the run closed, and its outcome says no
            more than that. `refuted`: a line is not. `undetermined`: the run did not close, its
            outcome is missing or told of by no transition, or it ran on another spec.
        finding: Why it is not proved; empty if it is.
        line: The line of the first difference; 0 if there is none.
        steps: How many transitions were replayed without a difference.
        phase: The phase after those.
        ending: For a run that closed: `clean`, or `abandoned` if something was given up.
        held: What was held after the last of these.
        ended: (resource, how) of each ending.
        status: How the run ended, as its outcome says; empty without one.
        residue: Bytes left on the device, as its outcome says, which no replay can judge; `None` if
            unknown or not told.
    """

    result: Result
    finding: str
    line: int
    steps: int
    phase: str
    ending: str = ""
    held: tuple[str, ...] = ()
    ended: tuple[tuple[str, str], ...] = field(default=())
    status: str = ""
    residue: int | None = None

    @property
    def holds(self) -> bool:
        """Whether it is proved."""
        return self.result is Result.PROVED

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        left = "unknown" if self.residue is None else f"{self.residue} bytes"
        told = f"; outcome: {self.status}, residue {left}" if self.status else ""
        close = f", closed, {self.ending}{told}" if self.ending else ""
        return f"{self.result}: {where}{self.finding or f'{self.steps} transitions{close}'}"


def replay(journal: Journal, spec: Spec) -> Replay:
    """Fire the events of a journal on a fresh slot of a spec, and compare what each line says.

    Phase, held resources and endings are compared, the order of the lines (`n`, `source`), and that
    time does not run backwards. The outcome has to be the last line, and to say of the run what its
    transitions do. What else the header says of the run (`run`, `lifecycle`, `backend`)
    are labels, which no replay can judge.

    A journal of another spec, by hash, is never proved nor refuted, as the run was not bound by this
    spec: the finding says so first, and then whether its events would have been legal here.

    Args:
        journal: What `read_journal` returned.
        spec: The composed spec of the run's lifecycle and backend.

    Returns:
        The result, with the first difference.
    """
    slot = lifecycle(spec).slot()
    line, difference, done = 0, "", 0
    last = 0.0
    for step in journal.steps:
        difference = _difference(slot, step, done + 1, last)
        if difference:
            line = step.line
            break
        done, last = done + 1, step.t
    closed = slot.state == spec.terminal and not difference
    result = Result.REFUTED if difference else Result.PROVED if closed else Result.UNDETERMINED
    finding = difference or ("" if closed else _unclosed(journal, slot))
    outcome = next((data for _, data in journal.others if data["kind"] == "outcome"), {})
    problem = None if difference else _of_outcome(journal, slot)
    if problem is not None:
        result, (line, finding) = Result.REFUTED, problem
    elif closed and (finding := _untold(journal, outcome)):
        result = Result.UNDETERMINED
    if journal.header["spec_hash"] != spec.hash:
        result = Result.UNDETERMINED
        finding = _other_spec(journal, spec, f"line {line}: {difference}" if difference else finding)
    elif journal.header["spec"] != spec.name:
        result, line = Result.REFUTED, 1
        finding = f"the header names '{journal.header['spec']}', but its hash is that of '{spec.name}'"
    ending = ABANDONED if any(how == "abandoned" for _, how in slot.ended) else CLEAN
    return Replay(
        result,
        finding,
        line,
        done,
        slot.state,
        ending if closed else "",
        slot.held,
        slot.ended,
        outcome.get("status", "") if closed and problem is None else "",
        outcome.get("residue") if closed and problem is None else None,
    )


def _difference(slot: Slot, step: Step, n: int, last: float) -> str:
    """Fire one event; what differs from the line, or the empty string."""
    if step.n != n:
        return f"it has number {step.n}, expected was {n}: lines are missing, repeated or in another order"
    if step.source != slot.state:
        return f"'{step.event}' leaves '{step.source}', but the run is in '{slot.state}'"
    if step.t < last:
        return f"it happened at {step.t} s, before the line above it at {last} s"
    try:
        entry = slot.fire(step.event)
    except IllegalTransition as error:
        return str(error)
    told_and_found = (
        ("phase", step.phase, entry.phase),
        ("held", step.held, slot.held),
        ("ended", step.ended, entry.ended),
    )
    for what, told, found in told_and_found:
        if told != found:
            return f"'{step.event}' with {what} {_shown(told)}; the spec says {_shown(found)}"
    return ""


def _of_outcome(journal: Journal, slot: Slot) -> tuple[int, str] | None:
    """The line at which an outcome contradicts the transitions, or stands where none may; and why."""
    told = [number for number, data in journal.others if data["kind"] == "outcome"]
    if not told:
        return None
    if len(told) > 1:
        return told[1], "a second outcome: a run has one"
    (end,) = told
    after = [step.line for step in journal.steps if step.line > end]
    after += [n for n, data in journal.others if n > end and not _counts_losses(data)]
    if after:
        return min(after), "it comes after the outcome, which has to be the last line"
    problem = _of_status(dict(journal.others)[end], journal, slot)
    return (end, f"the outcome {problem}") if problem else None


def _counts_losses(data: dict[str, Any]) -> bool:
    return data["kind"] == "note" and type(data.get("lost")) is int


def _of_status(outcome: dict[str, Any], journal: Journal, slot: Slot) -> str:
    """What an outcome says that the transitions do not; or the empty string."""
    status, verdict, residue, error = (outcome.get(k) for k in ("status", "verdict", "residue", "error"))
    if status not in STATUSES:
        return f"has the status {status!r}, must be one of {', '.join(STATUSES)}"
    if not (residue is None or (type(residue) is int and residue >= 0)):
        return f"has the residue {residue!r}, must be a number of bytes, or null"
    if not isinstance(error, str) or bool(error) != (status in _FAULTS):
        return f"says '{status}' with the error {error!r}"
    if slot.state != slot.lifecycle.spec.terminal:
        return ""  # undetermined anyway: it was given up
    ending = ABANDONED if any(how == "abandoned" for _, how in slot.ended) else CLEAN
    if verdict != ending:
        return f"says {verdict!r}, but by the transitions it is '{ending}'"
    events = {step.event for step in journal.steps}
    faults = sorted(events & frozenset[str]().union(*_FAULTS.values()))
    if faults and status not in _FAULTS:
        return f"says '{status}', but there was a fault: {', '.join(faults)}"
    if (
        status not in _FAULTS
        and "finish" in slot.lifecycle.spec.events
        and ("finish" in events) != (status == "finished")
    ):
        return f"says '{status}', but the run did {'' if 'finish' in events else 'not '}finish"
    return ""


def _untold(journal: Journal, outcome: dict[str, Any]) -> str:
    """Why a run that closed is not proved all the same; or the empty string."""
    if not outcome:
        return "the run closed, but its outcome is missing: its writer was killed, or lost events"
    status = outcome["status"]
    if status in _FAULTS and not any(step.event in _FAULTS[status] for step in journal.steps):
        return f"its outcome says '{status}', and no transition tells of that"
    return ""


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(" ".join(v) if isinstance(v, tuple) else str(v) for v in value) or "nothing"
    return f"'{value}'"


def _unclosed(journal: Journal, slot: Slot) -> str:
    torn = ", its last line incomplete" if journal.torn else ""
    held = f"still held: {', '.join(slot.held)}" if slot.held else "nothing was held"
    return f"the run did not close: it ends in '{slot.state}'{torn} (killed? still running?); {held}"


def _other_spec(journal: Journal, spec: Spec, finding: str) -> str:
    told = f"'{journal.header['spec']}' (hash {journal.header['spec_hash']})"
    events = finding or "its events are legal here too"
    return f"the run was bound by another spec, {told}, not '{spec.name}' (hash {spec.hash}); {events}"
