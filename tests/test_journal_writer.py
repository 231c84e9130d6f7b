"""The journal while it is written: complete lines, nothing lost, nothing overwritten, nothing pinned."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from interlock import Engine, Outcome, Task
from interlock.backends.monitors import CPU
from interlock.errors import JournalError, ObserverWarning
from interlock.events import Closed, Note, PhaseChanged, Report
from interlock.journal import JournalWriter, refuse_unwritable
from interlock.specs import TRAINING, Result, compose, lifecycle
from interlock.specs.journal import path_of, read_journal, replay

SPEC = compose(TRAINING, CPU)


def task(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1),
        "loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
    }
    return Task(**{**parts, **changes})


def batches(count: int = 5) -> list[Any]:
    return [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(count)]


def fitted(path: Path, **settings: Any) -> Outcome:
    return Engine("cpu", journal=path, **settings).fit(task(), batches(), validate=batches(2), epochs=2)


class Fake(SimpleNamespace):
    """Unlike its base, it can be referred to weakly."""


def fake(fired: tuple[str, ...] = ()) -> Any:
    """What a writer asks of a session, around a slot that is driven by hand."""
    slot = lifecycle(SPEC).slot()
    for event in fired:
        slot.fire(event)
    return Fake(
        driver=SimpleNamespace(slot=slot, spec=SPEC),
        id="0123456789ab",
        task=SimpleNamespace(name="fake"),
        options=SimpleNamespace(exit="offload"),
    )


def changed(session: Any, n: int) -> PhaseChanged:
    entry = session.driver.slot.history[n]
    return PhaseChanged(n, entry.event, entry.source, entry.phase, (), entry.ended, 0.0)


BEGINNING = ("acquire", "acquired", "place", "placed", "optimize", "optimized", "train")


def test_the_journal_of_a_run_is_proved_and_is_its_path(tmp_path: Path):
    outcome = fitted(tmp_path / "run.jsonl", report_every=2)
    journal = read_journal(tmp_path / "run.jsonl")
    assert replay(journal, SPEC).holds
    assert path_of(journal) == outcome.path
    kinds = [data["kind"] for _, data in journal.others]
    assert kinds.count("report") == len(outcome.reports)
    assert kinds.count("note") == len(outcome.notes)
    assert kinds[-1] == "outcome"
    assert journal.others[-1][1]["status"] == "finished"
    assert journal.header["backend"] == "cpu"
    assert journal.header["versions"]["torch"] == str(torch.__version__)


def test_the_journal_of_a_failed_run_is_proved_and_has_its_error(tmp_path: Path):
    bad = [*batches(3), (torch.randn(8, 5), torch.zeros(8).long())]
    run = Engine("cpu", journal=tmp_path / "run.jsonl").start(task(), bad)
    outcome = run.wait(30)
    assert outcome.status == "failed"
    journal = read_journal(tmp_path / "run.jsonl")
    assert replay(journal, SPEC).holds
    assert path_of(journal) == outcome.path
    assert "RuntimeError" in journal.others[-1][1]["error"]


def test_cut_anywhere_it_is_a_journal_of_a_run_that_did_not_close(tmp_path: Path):
    fitted(tmp_path / "run.jsonl")
    whole = (tmp_path / "run.jsonl").read_bytes()
    cut = tmp_path / "cut.jsonl"
    header = whole.index(b"\n") + 1
    closing = whole.index(b'"phase":"closed"')
    for length in [*range(header, closing, 97), header, closing]:
        cut.write_bytes(whole[:length])
        assert replay(read_journal(cut), SPEC).result is Result.UNDETERMINED


def test_each_line_is_on_the_disk_when_its_event_has_been_seen(tmp_path: Path):
    session = fake(BEGINNING)
    writer = JournalWriter(tmp_path / "run.jsonl", session, "cpu")
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1
    for n in range(1, len(BEGINNING) + 1):
        writer(changed(session, n))
        assert (tmp_path / "run.jsonl").read_text().count("\n") == 1 + n
    writer(Note("a remark"))
    assert (tmp_path / "run.jsonl").read_text().endswith('"text":"a remark"}\n')
    writer.on_end(0)


def test_lost_events_lose_no_transition_and_are_counted(tmp_path: Path):
    session = fake(BEGINNING)
    writer = JournalWriter(tmp_path / "run.jsonl", session, "cpu")
    writer(changed(session, 4))
    writer(Report(1, 0, {"loss": float("nan")}, 0.5))
    writer.on_end(12)
    journal = read_journal(tmp_path / "run.jsonl")
    assert [step.event for step in journal.steps] == list(BEGINNING)
    assert journal.others[0][1]["metrics"] == {"loss": "nan"}
    assert journal.others[-1][1]["lost"] == 12


def test_it_is_complete_though_not_even_the_last_event_came(tmp_path: Path):
    session = fake((*BEGINNING, "finish", "offload"))
    JournalWriter(tmp_path / "run.jsonl", session, "cpu").on_end(1)
    assert len(read_journal(tmp_path / "run.jsonl").steps) == len(BEGINNING) + 2


def test_after_the_run_it_holds_nothing_of_it(tmp_path: Path):
    session = fake(BEGINNING)
    writer = JournalWriter(tmp_path / "run.jsonl", session, "cpu")
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert gone() is None
    finally:
        gc.enable()
    writer(Closed("finished", "clean", 0, "", 7, 1.0))
    writer.on_end(0)
    assert vars(writer) == {
        "path": tmp_path / "run.jsonl",
        "_owner": os.getpid(),
        "_slot": None,
        "_written": 7,
        "_file": None,
    }
    writer.on_end(0)
    writer(Note("too late"))


def test_a_new_run_starts_the_file_anew(tmp_path: Path):
    fitted(tmp_path / "run.jsonl")
    first = read_journal(tmp_path / "run.jsonl").header["run"]
    Engine("cpu", journal=tmp_path / "run.jsonl").fit(task(), batches(1))
    second = read_journal(tmp_path / "run.jsonl")
    assert second.header["run"] != first
    assert replay(second, SPEC).holds


def test_what_is_left_of_a_killed_run_may_be_overwritten(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    for left in ("", '{"interl', '{"interlock":1,"kind":"hea'):
        path.write_text(left)
        refuse_unwritable(path)


def test_two_runs_do_not_write_into_one_file(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    first = JournalWriter(path, fake(), "cpu")
    with pytest.raises(JournalError, match="another run is writing it"):
        JournalWriter(path, fake(), "cpu")
    first.on_end(0)
    assert read_journal(path).header["run"] == "0123456789ab"


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    first = JournalWriter(path, fake(), "cpu")
    go, tell = os.pipe()
    child = os.fork()
    if not child:
        # As a loader's worker that outlives the run; what it does to its own copy is no end of the run.
        try:
            first.on_end(0)
            os.close(tell)
            os.read(go, 1)
        finally:
            os._exit(0)
    try:
        os.close(go)
        with pytest.raises(JournalError, match="another run is writing it"):
            JournalWriter(path, fake(), "cpu")
        first.on_end(0)
        JournalWriter(path, fake(), "cpu").on_end(0)
    finally:
        os.close(tell)
        os.waitpid(child, 0)


def test_there_is_one_outcome(tmp_path: Path):
    # An interrupt may have a run tell its end twice.
    writer = JournalWriter(tmp_path / "run.jsonl", fake(BEGINNING), "cpu")
    for _ in range(2):
        writer(Closed("finished", "clean", 0, "", 7, 1.0))
    writer.on_end(0)
    kinds = [data["kind"] for _, data in read_journal(tmp_path / "run.jsonl").others]
    assert kinds == ["outcome"]


UNWRITABLE = {
    "no folder": ("missing/run.jsonl", "no folder"),
    "a folder": ("folder", "it is a folder"),
    "another file": ("train.py", "not overwritten"),
    "below a file": ("train.py/run.jsonl", "cannot be written"),
    "a read-only system": ("/proc/run.jsonl", "/proc"),
    "a full disk": ("/dev/full", "No space left"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_an_unwritable_journal_is_told_before_anything_begins(tmp_path: Path, case: str):
    name, says = UNWRITABLE[case]
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("print('precious')\n")
    before = sorted(tmp_path.rglob("*"))
    built: list[int] = []
    engine = Engine("cpu", journal=tmp_path / name)
    with pytest.raises(JournalError, match=says):
        engine.start(task(model=lambda: built.append(1) or nn.Linear(4, 2)), batches())
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "train.py").read_text() == "print('precious')\n"
    assert not built


@pytest.mark.parametrize("exists", [True, False])
def test_write_protection_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool):
    # Asked for and not tried: tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    if exists:
        (tmp_path / "run.jsonl").touch()
    with pytest.raises(JournalError, match=r"write-protected|cannot be written to"):
        refuse_unwritable(tmp_path / "run.jsonl")


def test_a_disk_that_fills_up_tears_the_journal_and_not_the_run(tmp_path: Path):
    session = fake(BEGINNING)
    writer = JournalWriter(tmp_path / "run.jsonl", session, "cpu")
    writer(changed(session, 3))
    full = os.open("/dev/full", os.O_WRONLY)
    assert writer._file is not None
    os.dup2(full, writer._file)
    os.close(full)
    with pytest.raises(OSError, match="No space left"):
        writer(changed(session, 4))
    writer(changed(session, 5))
    writer.on_end(0)
    assert replay(read_journal(tmp_path / "run.jsonl"), SPEC).result is Result.UNDETERMINED


def test_an_observer_that_raises_is_reported_and_the_run_goes_on(tmp_path: Path):
    seen: list[object] = []

    def angry(event: object) -> None:
        seen.append(event)
        raise ValueError("no")

    with pytest.warns(ObserverWarning, match="ValueError: no"):
        outcome = fitted(tmp_path / "run.jsonl", observers=[angry])
    assert outcome.ok
    assert isinstance(seen[-1], Closed)
    assert any("angry raised" in note for note in outcome.notes)


def test_an_observer_that_blocks_stalls_nothing_and_ends_when_it_may():
    let, ended = threading.Event(), threading.Event()

    class Blocked:
        def __call__(self, event: object) -> None:
            let.wait(60)

        def on_end(self, lost: int) -> None:
            self.lost = lost
            ended.set()

    blocked = Blocked()
    run = Engine("cpu", report_every=1).start(task(), batches(40), epochs=5)
    run.subscribe(blocked, capacity=3)
    outcome = run.wait(30)
    assert outcome.ok
    assert any("Blocked is blocked" in note for note in outcome.notes)
    let.set()
    assert ended.wait(10)
    assert blocked.lost > 0


def test_lines_are_json_that_any_reader_takes(tmp_path: Path):
    fitted(tmp_path / "run.jsonl")
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
