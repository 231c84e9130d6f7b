"""Journals survive a kill, and a replay believes none of their lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from interlock.backends.monitors import MONITORS
from interlock.specs import INFERENCE, TRAINING, Result, Slot, Spec, compose, lifecycle
from interlock.specs.drawing import mermaid
from interlock.specs.errors import JournalError
from interlock.specs.journal import (
    Journal,
    header,
    path_of,
    read_journal,
    record,
    replay,
    transition_line,
)

COMPOSED = {c.name: c for s in (TRAINING, INFERENCE) for m in MONITORS.values() for c in (compose(s, m),)}
SPEC = COMPOSED["training on cpu"]
WHOLE = (
    "acquire acquired place placed optimize optimized train update fail "
    "offload drop dropped home homed measure measured free freed close"
)
PROVED = "proved: 19 transitions, closed, clean; outcome: failed, residue 0 bytes"
GIVEN_UP = WHOLE.replace("home homed", "home fail home abandon")


def slot_of(spec: Spec, events: str) -> Slot:
    slot = lifecycle(spec).slot()
    for event in events.split():
        slot.fire(event)
    return slot


def outcome_of(slot: Slot, **changes: object) -> str:
    """The outcome's line that an engine would have written of a slot, with some fields changed."""
    events = {entry.event for entry in slot.history}
    status = "finished" if "finish" in events else "stopped"
    status = "cancelled" if events & {"interrupt"} else status
    status = "failed" if events & {"fail", "lose", "peer_fail", "abandon"} else status
    fields = {
        "status": status,
        "verdict": "abandoned" if "abandoned" in dict(slot.ended).values() else "clean",
        "residue": 0,
        "error": "ValueError: no" if status in ("failed", "cancelled") else "",
        "steps": 3,
        "t": 9.0,
    }
    return record("outcome", **{**fields, **changes})


def journal_of(slot: Slot) -> list[str]:
    """The lines of the journal that an engine would have written of a slot: with an outcome if it closed."""
    lines = transitions_of(slot)
    return [*lines, outcome_of(slot)] if slot.state == slot.lifecycle.spec.terminal else lines


def transitions_of(slot: Slot) -> list[str]:
    """The header and the transitions."""
    spec = slot.lifecycle.spec
    lifecycle_name, _, backend = spec.name.partition(" on ")
    lines = [header(spec, lifecycle=lifecycle_name, backend=backend, run="r1")]
    entries = [entry._replace(at=100 + n / 8) for n, entry in enumerate(slot.history)]
    return lines + [transition_line(entry, n, spec, 100) for n, entry in enumerate(entries[1:], start=1)]


def lines_of(events: str, spec: Spec = SPEC) -> list[str]:
    return journal_of(slot_of(spec, events))


def edited(lines: list[str], number: int, **fields: object) -> list[str]:
    """The lines with fields of one of them, counted from 1, changed."""
    data = json.loads(lines[number - 1]) | fields
    return [*lines[: number - 1], json.dumps(data) + "\n", *lines[number:]]


@st.composite
def walks(draw: st.DrawFn, *, closed: bool = False) -> Slot:
    """A slot after a random run; `closed` follows the continuation table to the end."""
    spec = COMPOSED[draw(st.sampled_from(sorted(COMPOSED)))]
    slot = lifecycle(spec).slot()
    for _ in range(draw(st.integers(0, 25))):
        if not slot.legal:
            break
        slot.fire(draw(st.sampled_from(slot.legal)))
    while closed and slot.state != spec.terminal:
        phase = spec.phase[slot.state]
        ways = [slot.next(frozenset()) if phase.kind == "exit" else phase.done or "fail"]
        slot.fire(next(event for event in ways if event))
    return slot


# What is written


def test_the_lines_are_these() -> None:
    lines = lines_of("acquire acquired offload free fail")
    assert json.loads(lines[0]) == {
        "interlock": 1,
        "kind": "header",
        "spec": "training on cpu",
        "spec_hash": SPEC.hash,
        "lifecycle": "training",
        "backend": "cpu",
        "run": "r1",
    }
    assert json.loads(lines[-1]) == {
        "kind": "transition",
        "n": 5,
        "event": "fail",
        "source": "freeing",
        "phase": "offloaded",
        "held": ["device"],
        "ended": [],
        "t": 0.625,
    }
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)


def test_a_record_holds_what_json_does_not() -> None:
    line = record("report", loss=float("nan"), path=Path("a"), nested=[{"x": float("-inf")}], text="a\nb")
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "kind": "report",
        "loss": "nan",
        "path": "a",
        "nested": [{"x": "-inf"}],
        "text": "a\nb",
    }


def test_a_record_of_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of report, note, outcome"):
        record("transition", n=1)


# What is read


@given(slot=walks())
def test_round_trip(slot: Slot) -> None:
    journal = read_journal(journal_of(slot))
    assert [(s.event, s.source, s.phase, s.ended) for s in journal.steps] == [
        (e.event, e.source, e.phase, e.ended) for e in slot.history[1:]
    ]
    assert not journal.torn
    assert path_of(journal) == tuple((e.source, e.event, e.phase) for e in slot.history[1:])
    mermaid(slot.lifecycle.spec, path_of(journal))


def test_from_a_file_with_other_lines_between(tmp_path: Path) -> None:
    lines = lines_of(WHOLE)
    lines[3:3] = [record("note", text="é"), record("report", loss=0.5)]
    file = tmp_path / "run.jsonl"
    file.write_text("".join(lines))
    journal = read_journal(file)
    assert [data["kind"] for _, data in journal.others] == ["note", "report", "outcome"]
    assert [number for number, _ in journal.others] == [4, 5, len(lines)]
    assert replay(journal, SPEC).holds
    assert read_journal(str(file)).steps == journal.steps


@given(slot=walks(), data=st.data())
def test_a_writer_killed_at_any_byte_leaves_a_journal(slot: Slot, data: st.DataObject) -> None:
    text = "".join(transitions_of(slot)).encode()
    first = text.index(b"\n") + 1
    cut = data.draw(st.integers(first, len(text)))
    journal = read_journal(line.decode() for line in text[:cut].splitlines(keepends=True))
    complete = text[:cut].count(b"\n") - 1
    assert len(journal.steps) in (complete, complete + 1)  # the newline may be all that is missing
    assert journal.torn == (len(journal.steps) == complete and text[cut - 1 : cut] != b"\n")
    assert replay(journal, slot.lifecycle.spec).result is not Result.REFUTED


def test_a_torn_line_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    text = "".join(lines_of("acquire acquired place"))
    file.write_text(text[:-20])
    journal = read_journal(file)
    assert journal.torn
    assert [step.event for step in journal.steps] == ["acquire", "acquired"]
    file.write_bytes(text[:-20].encode() + bytes(40))  # as some file systems leave a file after a power cut
    assert read_journal(file).steps == journal.steps


@pytest.mark.parametrize(
    ("raw", "line", "says"),
    [
        (b"", 0, "it is empty"),
        (b"\n", 1, "not a journal of Interlock"),
        (b"hello\n", 1, "its header is missing; it is not JSON: 'hello'"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", 1, "its header is missing; it is not text"),
        (b'{"event":"x"}\n', 1, "its header is missing; there is "),
        (b'{"interlock":2,"kind":"header"}\n', 1, "its version is 2; this Interlock reads version 1"),
        (b'{"interlock":true,"kind":"header"}\n', 1, "its version is True"),
        (
            b'{"interlock":1,"kind":"header","run":"a"}\n',
            1,
            "the header lacks spec, spec_hash, lifecycle, backend",
        ),
        (b'{"interlock":1,"kind":"hea', 1, "the header is incomplete"),
        (b"[1]\n", 1, "it is not a JSON object"),
        (b"HEADERnonsense\n", 2, "it is not JSON"),
        (b"HEADER\n", 2, "it is not JSON"),
        (b"HEADER\xff\n", 2, "it is not text"),
        (b"HEADER[" + b"[" * 100_000 + b"\n", 2, "it is not JSON"),
        (b'HEADER{"kind":"dance"}\n', 2, "its kind is 'dance'"),
        (b"HEADERHEADER", 2, "its kind is 'header'"),
        (b'HEADER{"kind":"note"}\nnonsense\n{"kind":"note"}\n', 3, "it is not JSON"),
        (b'HEADER{"kind":"transition"}\n', 2, "whose event, source, phase, n, t, held, ended is missing"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, raw: bytes, line: int, says: str) -> None:
    file = tmp_path / "a"
    file.write_bytes(raw.replace(b"HEADER", lines_of("")[0].encode()))
    with pytest.raises(JournalError) as caught:
        read_journal(file)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"{file}, line {line}: " if line else f"{file}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", v) for v in (None, "1", 1.0, True)],
        *[(f, v) for f in ("event", "source", "phase") for v in (None, 1, ["a"])],
        *[("held", v) for v in (None, "device", [1], {})],
        *[("ended", v) for v in (None, ["model"], [["model"]], [["model", 1]], {"a": "b"})],
        *[("t", v) for v in (None, "0", -1, True, float("nan"), float("inf"), 10**400)],
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    lines = edited(lines_of("acquire acquired"), 2, **{field: value})
    with pytest.raises(
        JournalError, match=f"line 2: a transition whose {field} is missing or of another type"
    ):
        read_journal(lines)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_journal(tmp_path / "gone")


# What a replay finds


@given(slot=walks(closed=True))
def test_a_genuine_closed_run_is_proved(slot: Slot) -> None:
    found = replay(read_journal(journal_of(slot)), slot.lifecycle.spec)
    assert (found.result, found.finding, found.line) == (Result.PROVED, "", 0)
    assert found.steps == len(slot.history) - 1
    assert found.ending == ("abandoned" if "abandoned" in dict(slot.ended).values() else "clean")
    assert found.ended == slot.ended
    assert found.held == ()


def test_clean_and_abandoned() -> None:
    assert str(replay(read_journal(lines_of(WHOLE)), SPEC)) == PROVED
    found = replay(read_journal(lines_of(GIVEN_UP)), SPEC)
    assert (found.holds, found.ending) == (True, "abandoned")
    assert ("model", "abandoned") in found.ended


@given(slot=walks())
def test_a_run_that_did_not_close_is_undetermined(slot: Slot) -> None:
    assume(slot.state != slot.lifecycle.spec.terminal)
    found = replay(read_journal(journal_of(slot)), slot.lifecycle.spec)
    assert (found.result, found.ending, found.phase, found.held) == (
        Result.UNDETERMINED,
        "",
        slot.state,
        slot.held,
    )
    assert found.finding.startswith(
        f"the run did not close: it ends in '{slot.state}' (killed? still running?)"
    )


def test_a_killed_run_says_what_was_held() -> None:
    lines = lines_of(" ".join(WHOLE.split()[:7]))
    found = replay(read_journal([*lines, '{"kind":"tra']), SPEC)
    assert str(found) == (
        "undetermined: the run did not close: it ends in 'training', its last line incomplete "
        "(killed? still running?); still held: device, model, optimizer"
    )


@pytest.mark.parametrize(
    ("number", "fields", "says"),
    [
        (2, {"n": 2}, "it has number 2, expected was 1"),
        (3, {"source": "created"}, "'acquired' leaves 'created', but the run is in 'acquiring'"),
        (3, {"event": "placed"}, "event 'placed' is not legal in phase 'acquiring'"),
        (3, {"event": "begin"}, "event 'begin' is not legal"),
        (3, {"phase": "placed"}, "'acquired' with phase 'placed'; the spec says 'acquired'"),
        (3, {"held": []}, "'acquired' with held nothing; the spec says device"),
        (5, {"held": ["model", "device"]}, "with held model, device; the spec says device, model"),
        (13, {"ended": []}, "'dropped' with ended nothing; the spec says optimizer released"),
        (13, {"ended": [["optimizer", "abandoned"]]}, "the spec says optimizer released"),
        (9, {"t": 0}, "it happened at 0.0 s, before the line above it"),
        (1, {"spec": "training on cuda"}, "the header names 'training on cuda', but its hash is that of"),
    ],
)
def test_a_changed_field_is_found_at_its_line(number: int, fields: dict, says: str) -> None:
    lines = lines_of(WHOLE)
    found = replay(read_journal(edited(lines, number, **fields)), SPEC)
    assert (found.result, found.line) == (Result.REFUTED, number)
    assert says in found.finding


@pytest.mark.parametrize("number", [2, 7, 12, 19])
def test_a_missing_repeated_or_swapped_line_is_found(number: int) -> None:
    lines = lines_of(WHOLE)
    at = number - 1
    missing = [*lines[:at], *lines[at + 1 :]]
    repeated = [*lines[:number], *lines[at:]]
    swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
    for tampered, line in ((missing, number), (repeated, number + 1), (swapped, number)):
        found = replay(read_journal(tampered), SPEC)
        assert (found.result, found.line) == (Result.REFUTED, line)


def test_a_line_after_the_end_is_found() -> None:
    lines = transitions_of(slot_of(SPEC, WHOLE))
    more = edited(lines, len(lines), n=20, event="close", source="closed")[-1]
    found = replay(read_journal([*lines, more]), SPEC)
    assert (found.result, found.line, found.ending) == (Result.REFUTED, 21, "")


WORDS = sorted(
    {w for c in COMPOSED.values() for w in (*c.events, *c.phase, *c.resources)}
    | {"", "released", "abandoned"}
)
VALUES = {
    "n": st.integers(-1, 40),
    "event": st.sampled_from(WORDS),
    "source": st.sampled_from(WORDS),
    "phase": st.sampled_from(WORDS),
    "held": st.lists(st.sampled_from(["device", "model", "optimizer", "group"]), max_size=4),
    "ended": st.lists(
        st.tuples(
            st.sampled_from(["device", "model", "optimizer"]),
            st.sampled_from(["released", "abandoned", "transferred"]),
        ),
        max_size=2,
    ),
    "t": st.floats(0, 10),
    "kind": st.sampled_from(["note", "report", "outcome", "header", "dance"]),
}
HEADER = {
    "interlock": st.integers(0, 3),
    "kind": st.sampled_from(["transition", "note"]),
    "spec": st.sampled_from(sorted(COMPOSED)),
    "spec_hash": st.sampled_from([c.hash for c in COMPOSED.values()] + ["0" * 16]),
}


@given(slot=walks(closed=True), data=st.data())
def test_one_changed_field_is_never_believed(slot: Slot, data: st.DataObject) -> None:
    """It is refuted at its line or the next, or not readable, or means the same run."""
    spec, lines = slot.lifecycle.spec, journal_of(slot)
    last = len(lines) - 1  # of the transitions; after it comes the outcome
    number = data.draw(st.integers(1, last), label="line")
    fields = HEADER if number == 1 else VALUES
    key = data.draw(st.sampled_from(sorted(fields)), label="field")
    value = data.draw(fields[key], label="value")
    old = json.loads(lines[number - 1])[key]
    assume(json.loads(json.dumps(value)) != old)
    lines = edited(lines, number, **{key: value})
    if (refused_at := line_of_refusal(lines)) is not None:
        assert refused_at == number
        return
    found = replay(read_journal(lines), spec)
    if key == "kind" and value == "outcome":
        assert found.result is Result.REFUTED
    elif key == "spec_hash" or (key == "kind" and number == last):
        assert found.result is Result.UNDETERMINED
    elif found.result is Result.REFUTED:
        # A time too late, and a line that is no transition any more, show at the line after it.
        late = key == "kind" or (key == "t" and value > old)
        assert found.line == number + late
    else:
        # Another fault may lead through the same phases, but then it is not what the outcome tells of.
        assert found.holds or (key == "event" and "no transition tells of that" in found.finding)
        assert key == "t" or (key == "event" and means_the_same(slot, number - 2, value))


def line_of_refusal(lines: list[str]) -> int | None:
    try:
        read_journal(lines)
    except JournalError as error:
        return error.line
    return None


def means_the_same(slot: Slot, index: int, event: str) -> bool:
    """Whether another event at one place leads a run through the same configurations."""
    events = [entry.event for entry in slot.history[1:]]
    events[index] = event
    other = slot_of(slot.lifecycle.spec, " ".join(events))
    told = [(e.phase, e.ended) for e in slot.history]
    return told == [(e.phase, e.ended) for e in other.history]


def test_a_journal_of_another_spec_is_undetermined() -> None:
    other = COMPOSED["training on cuda"]
    found = replay(read_journal(lines_of(WHOLE)), other)
    assert found.result is Result.UNDETERMINED
    assert found.finding.startswith(
        f"the run was bound by another spec, 'training on cpu' (hash {SPEC.hash}), "
        f"not 'training on cuda' (hash {other.hash}); line 12: event 'drop' is not legal"
    )
    assert found.line == 12


def test_the_same_events_on_a_changed_spec_are_undetermined_too() -> None:
    renamed = SPEC.extend(name="training on cpu, mine")
    found = replay(read_journal(lines_of(WHOLE)), renamed)
    assert (found.result, found.steps) == (Result.UNDETERMINED, 19)
    assert found.finding.endswith("its events are legal here too")


def test_an_empty_run_is_undetermined() -> None:
    found = replay(read_journal(lines_of("")), SPEC)
    assert found.result is Result.UNDETERMINED
    assert found.finding.endswith("nothing was held")
    assert isinstance(read_journal(lines_of("")), Journal)


# The outcome

NICE = WHOLE.replace("update fail", "update updated finish")


def told(events: str, *after: str, **changes: object) -> tuple[Result, int, str]:
    """What is found of a run whose outcome is changed, or that has more lines after it."""
    slot = slot_of(SPEC, events)
    found = replay(read_journal([*transitions_of(slot), outcome_of(slot, **changes), *after]), SPEC)
    return found.result, found.line, found.finding


@pytest.mark.parametrize(
    ("events", "changes", "says"),
    [
        (NICE, {"status": "stopped"}, "says 'stopped', but the run did finish"),
        (
            NICE.replace("finish", "stop"),
            {"status": "finished"},
            "says 'finished', but the run did not fini",
        ),
        (WHOLE, {"status": "finished", "error": ""}, "says 'finished', but there was a fault: fail"),
        (WHOLE, {"status": "stopped", "error": ""}, "says 'stopped', but there was a fault: fail"),
        (WHOLE, {"error": ""}, "says 'failed' with the error ''"),
        (NICE, {"error": "ValueError: no"}, "says 'finished' with the error 'ValueError: no'"),
        (NICE, {"status": "perfect"}, "has the status 'perfect'"),
        (NICE, {"status": ["finished"]}, "has the status"),
        (NICE, {"verdict": "abandoned"}, "says 'abandoned', but by the transitions it is 'clean'"),
        (GIVEN_UP, {"verdict": "clean"}, "says 'clean', but by the transitions it is 'abandoned'"),
        (NICE, {"verdict": None}, "says None"),
        (NICE, {"residue": -1}, "has the residue -1"),
        (NICE, {"residue": "none"}, "has the residue 'none'"),
    ],
)
def test_an_outcome_that_contradicts_the_run_is_refuted(events: str, changes: dict, says: str) -> None:
    result, line, finding = told(events, **changes)
    assert (result, line) == (Result.REFUTED, len(events.split()) + 2)
    assert says in finding


@pytest.mark.parametrize(
    ("events", "changes"),
    [(NICE, {"status": "failed", "error": "E: no"}), (WHOLE, {"status": "cancelled"})],
)
def test_an_outcome_of_which_no_transition_tells_is_undetermined(events: str, changes: dict) -> None:
    result, _, finding = told(events, **changes)
    assert result is Result.UNDETERMINED
    assert "no transition tells of that" in finding


def test_a_run_that_closed_without_an_outcome_is_undetermined() -> None:
    found = replay(read_journal(transitions_of(slot_of(SPEC, NICE))), SPEC)
    assert found.result is Result.UNDETERMINED
    assert "its outcome is missing" in found.finding


def test_the_outcome_is_the_one_last_line() -> None:
    slot = slot_of(SPEC, NICE)
    head, *steps = transitions_of(slot)
    end = outcome_of(slot)
    assert told(NICE, record("note", text="3 events are not there", lost=3))[0] is Result.PROVED
    assert told(NICE, end)[:2] == (Result.REFUTED, 23)
    assert told(NICE, record("note", text="more"))[:2] == (Result.REFUTED, 23)
    assert told(NICE, record("report", step=1))[:2] == (Result.REFUTED, 23)
    early = replay(read_journal([head, *steps[:-1], end, steps[-1]]), SPEC)
    assert (early.result, early.line) == (Result.REFUTED, 22)


def test_the_residue_is_told() -> None:
    slot = slot_of(SPEC, NICE)
    for residue, says in ((512, "residue 512 bytes"), (None, "residue unknown")):
        found = replay(read_journal([*transitions_of(slot), outcome_of(slot, residue=residue)]), SPEC)
        assert found.holds
        assert str(found).endswith(f"closed, clean; outcome: finished, {says}")


# Without torch

REPLAY = """
import sys
sys.modules["torch"] = None
from interlock.backends.monitors import MONITORS
from interlock.specs import TRAINING, compose
from interlock.specs.journal import read_journal, replay
print(replay(read_journal(sys.argv[1]), compose(TRAINING, MONITORS["cpu"])))
"""


@pytest.mark.torchless
def test_a_replay_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("".join(lines_of(WHOLE)))
    command = [sys.executable, "-c", REPLAY, str(tmp_path / "run.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{PROVED}\n"
