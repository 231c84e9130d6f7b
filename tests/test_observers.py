"""CSV and TensorBoard: what was told is what others read back; nothing of others is touched."""

from __future__ import annotations

import builtins
import csv
import errno
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from interlock import Engine, Outcome, Task
from interlock.errors import MissingExtra, ObserverWarning, TaskError
from interlock.events import Closed, Event, Note, PhaseChanged, Report
from interlock.observers import FIXED, CsvWriter, TensorBoard

Rows = list[dict[str, str]]


def rows_of(path: Path) -> Rows:
    """As anybody would read it; a row of another length than the header is found."""
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in found)
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def report(step: int, **metrics: float) -> Report:
    return Report(step, step // 10, metrics, step / 2)


def fitted(*observers: Any, runs: int = 1, **settings: Any) -> list[Outcome]:
    engine = Engine("cpu", observers=observers, report_every=2)
    task = Task(
        model=lambda: nn.Linear(2, 1),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1),
        loss=lambda m, b: m(b).square().mean(),
        **settings,
    )
    data = [torch.ones(2, 2)] * 4
    return [engine.fit(task, data, validate=data, epochs=2) for _ in range(runs)]


# -- CSV ----------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.sampled_from(["loss", "val_loss", "a,b", 'say "a"', "a\nb", "a\r", "é", "", " x ", *FIXED]),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
)
METRICS = st.dictionaries(NAMES, st.floats(), max_size=4)
TOLD = st.lists(st.tuples(st.integers(0, 2), METRICS), max_size=8)


@given(TOLD, st.data())
def test_what_is_read_back_is_what_was_told(told: list[tuple[int, dict[str, float]]], data: Any):
    """Some runs one after the other, each perhaps by a new writer that appends."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.csv"
        writer = CsvWriter(path)
        expected, last, run = [], 0, 0
        for step, (which, metrics) in enumerate(told):
            if which != last:
                writer.on_end(0)
                last, run = which, 0
                if data.draw(st.booleans()):
                    writer = CsvWriter(path, existing="append")
            run = run or max((row["run"] for row in expected), default=0) + 1
            writer(Report(step, step, metrics, 0.25))
            own = {f"metric {name}" if name in FIXED else name: value for name, value in metrics.items()}
            expected.append({"run": run, "step": step, "epoch": step, "seconds": 0.25, **own})
        found = rows_of(path)
        assert [list(row)[:4] for row in found] == [list(FIXED)] * len(told)
        read = [{name: float(cell) for name, cell in row.items() if cell} for row in found]
        assert repr([sorted(row.items()) for row in read]) == repr(
            [sorted((name, float(value)) for name, value in row.items()) for row in expected]
        )
        assert names(Path(folder)) == ["run.csv"]


@given(st.lists(METRICS, max_size=5), st.integers(0, 10_000))
def test_cut_anywhere_in_the_last_row_the_others_are_there_and_it_goes_on(
    told: list[dict[str, float]], cut: int
):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.csv"
        writer = CsvWriter(path)
        for step, metrics in enumerate(told):
            writer(Report(step, 0, metrics, 0.0))
        before = rows_of(path)
        # A last row whose metrics are known: it is appended, and may so be torn.
        whole = path.stat().st_size
        writer(Report(len(told), 0, told[-1] if told else {}, 0.0))
        os.truncate(path, whole + cut % (path.stat().st_size - whole))
        again = CsvWriter(path, existing="append")
        assert rows_of(path) == before
        again(Report(99, 0, {}, 0.0))
        assert [row["step"] for row in rows_of(path)] == [row["step"] for row in before] + ["99"]


def test_the_file_of_a_run_has_its_reports(tmp_path: Path):
    (outcome,) = fitted(CsvWriter(tmp_path / "run.csv"))
    found = rows_of(tmp_path / "run.csv")
    assert list(found[0]) == ["run", "step", "epoch", "seconds", "loss", "val_loss"]
    assert len(found) == len(outcome.reports)
    for row, told in zip(found, outcome.reports, strict=True):
        assert {n: float(v) for n, v in row.items() if v and n not in FIXED} == dict(told.metrics)
        assert (row["run"], int(row["step"]), int(row["epoch"])) == ("1", told.step, told.epoch)


def test_an_engine_used_again_counts_runs(tmp_path: Path):
    one, other = fitted(CsvWriter(tmp_path / "run.csv"), runs=2)
    found = [row["run"] for row in rows_of(tmp_path / "run.csv")]
    assert found == ["1"] * len(one.reports) + ["2"] * len(other.reports)
    fitted(CsvWriter(tmp_path / "run.csv", existing="append"))
    assert rows_of(tmp_path / "run.csv")[-1]["run"] == "3"


def test_runs_at_the_same_time_lose_no_row_and_are_told_apart(tmp_path: Path):
    writer = CsvWriter(tmp_path / "run.csv")
    barrier = threading.Barrier(4)

    def tell(own: int) -> None:
        barrier.wait()
        for step in range(25):
            writer(Report(step, own, {"loss": own, f"metric{step % 5}{own}": 1.0}, 0.0))
        writer.on_end(0)

    threads = [threading.Thread(target=tell, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows_of(tmp_path / "run.csv")
    assert len({(row["run"], row["epoch"]) for row in found}) == 4
    assert {row["run"] for row in found} == {"1", "2", "3", "4"}
    for run in "1234":
        assert [int(row["step"]) for row in found if row["run"] == run] == list(range(25))


def test_a_file_of_earlier_runs_is_refused_appended_to_or_replaced(tmp_path: Path):
    path = tmp_path / "run.csv"
    CsvWriter(path)
    CsvWriter(path)(report(1, loss=1.0))  # one without a row is no earlier run
    with pytest.raises(TaskError, match="rows of earlier runs"):
        CsvWriter(path)
    CsvWriter(path, existing="append")(report(2, loss=2.0))
    assert [(row["run"], row["step"]) for row in rows_of(path)] == [("1", "1"), ("2", "2")]
    CsvWriter(path, existing="replace")(report(3))
    assert path.read_text() == "run,step,epoch,seconds\n1,3,0,1.5\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"import this\n", "not of a CsvWriter"),
        (b"step,epoch\n1,2\n", "not of a CsvWriter"),
        (b"run,step,epoch,seconds", "not of a CsvWriter"),
        (b"\xff\xfe\x00\n", "not of a CsvWriter"),
        (b"\n", "not of a CsvWriter"),
        (b"run,step,epoch,seconds\n1,2\n", "was changed since"),
        (b"run,step,epoch,seconds\none,2,3,4\n", "was changed since"),
    ],
)
@pytest.mark.parametrize("existing", ["refuse", "append", "replace"])
def test_a_file_of_others_is_never_touched(tmp_path: Path, content: bytes, says: str, existing: Any):
    path = tmp_path / "run.csv"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=says):
        CsvWriter(path, existing=existing)
    assert path.read_bytes() == content
    assert names(tmp_path) == ["run.csv"]


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path):
    with pytest.raises(TaskError, match="is no file"):
        CsvWriter(tmp_path)
    with pytest.raises(TaskError, match="cannot be written"):
        CsvWriter(tmp_path / "missing" / "run.csv")
    with pytest.raises(TaskError, match="pass 'refuse', 'append' or 'replace'"):
        CsvWriter(tmp_path / "run.csv", existing="overwrite")  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_a_link_stays_one_and_rights_stay(tmp_path: Path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "run.csv")
    writer = CsvWriter(tmp_path / "link.csv")
    (tmp_path / "run.csv").chmod(0o600)
    writer(report(1, loss=1.0))
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "run.csv").stat().st_mode & 0o777 == 0o600
    assert len(rows_of(tmp_path / "run.csv")) == 1


@pytest.mark.parametrize("change", ["append", "remove", "replace"])
def test_a_file_changed_by_others_is_left_alone(tmp_path: Path, change: str):
    path = tmp_path / "run.csv"
    writer = CsvWriter(path)
    writer(report(1, loss=1.0))
    if change == "append":
        path.write_text(path.read_text() + "theirs\n")
    elif change == "remove":
        path.unlink()
    else:
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
    before = path.read_bytes() if path.exists() else None
    for new in ({}, {"new": 1.0}):
        with pytest.raises(TaskError, match="changed by somebody else"):
            writer(report(2, **new))
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_full_disk_costs_the_row_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run.csv"
    writer = CsvWriter(path)
    writer(report(1, loss=1.0))
    whole, write = path.read_bytes(), os.write

    def half(file: int, data: bytes) -> int:
        write(file, data[:3])
        raise OSError(errno.ENOSPC, "no space")

    def none(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="no space"):
            writer(report(2, loss=2.0))
    assert path.read_bytes() == whole
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", none)
        with pytest.raises(OSError, match="no space"):
            writer(report(3, new=2.0))
    assert path.read_bytes() == whole
    assert names(tmp_path) == ["run.csv"]
    writer(report(4, new=3.0))
    assert [(row["step"], row["loss"], row["new"]) for row in rows_of(path)] == [
        ("1", "1.0", ""),
        ("4", "", "3.0"),
    ]


KILLED = """
import os, sys
from interlock.events import Report
from interlock.observers import CsvWriter
writer, calls = CsvWriter(sys.argv[1]), 0
def dies(name):
    function = getattr(os, name)
    def call(*arguments):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os._exit(9)
        return function(*arguments)
    setattr(os, name, call)
for name in ("write", "fsync", "replace", "open", "close"):
    dies(name)
for step in range(6):
    writer(Report(step, 0, {f"m{step // 2}": float(step)}, 0.0))
"""


def test_killed_between_any_two_calls_the_file_reads_and_goes_on(tmp_path: Path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    folder = str(Path(sys.modules["interlock"].__file__ or "").parents[1])
    environment = {**os.environ, "PYTHONPATH": folder}
    children = [
        subprocess.Popen([sys.executable, str(program), str(tmp_path / f"{n}.csv"), str(n)], env=environment)
        for n in (1, 2, 3, 6, 9, 12)
    ]
    assert [child.wait(60) for child in children] == [9] * len(children)
    lengths = set()
    for n in (1, 2, 3, 6, 9, 12):
        path = tmp_path / f"{n}.csv"
        found = rows_of(path)
        assert [int(row["step"]) for row in found] == list(range(len(found)))
        lengths.add(len(found))
        CsvWriter(path, existing="append")(report(50, new=1.0))
        assert [row["run"] for row in rows_of(path)] == ["1"] * len(found) + [str(1 + bool(found))]
    assert len(lengths) > 1


def test_a_failing_writer_fails_no_run(tmp_path: Path):
    writer = CsvWriter(tmp_path / "run.csv")
    (tmp_path / "run.csv").unlink()
    with pytest.warns(ObserverWarning, match="changed by somebody else"):
        (outcome,) = fitted(writer)
    assert outcome.ok
    assert any("observer CsvWriter raised" in note for note in outcome.notes)


def test_a_metric_named_like_a_column_has_one_of_its_own(tmp_path: Path):
    told = {"step": 2.0, "metric step": 3.0, "metric metric step": 4.0, "metric loss": 5.0}
    CsvWriter(tmp_path / "run.csv")(Report(1, 0, told, 0.0))
    (row,) = rows_of(tmp_path / "run.csv")
    assert row["step"] == "1"
    assert [row[f"metric {name}"] for name in list(told)[:3]] == ["2.0", "3.0", "4.0"]
    assert row["metric loss"] == "5.0"


def test_the_reader_finds_a_row_of_another_length(tmp_path: Path):
    """The planted fault: a row that was appended before its column came."""
    path = tmp_path / "run.csv"
    CsvWriter(path)(report(1, loss=1.0))
    for row in ("1,2,0,0.0\n", "1,2,0,0.0,1.0,2.0\n"):
        path.write_text(path.read_text().splitlines()[0] + "\n" + row)
        with pytest.raises(AssertionError):
            rows_of(path)
        with pytest.raises(TaskError, match="was changed since"):
            CsvWriter(path, existing="append")


@pytest.mark.torchless
def test_csv_and_stop_rules_need_no_torch(tmp_path: Path):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from interlock.events import Report\n"
        "from interlock.observers import CsvWriter\n"
        "from interlock.stopping import EarlyStopping\n"
        "told = Report(1, 0, {'loss': 1.0}, 0.0)\n"
        "CsvWriter(sys.argv[1])(told)\n"
        "EarlyStopping('loss').begin()(told)\n"
    )
    folder = str(Path(sys.modules["interlock"].__file__ or "").parents[1])
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run.csv")],
        env={**os.environ, "PYTHONPATH": folder},
        check=True,
        timeout=60,
    )
    assert rows_of(tmp_path / "run.csv")[0]["loss"] == "1.0"


# -- TensorBoard --------------------------------------------------------------------------------


@pytest.fixture
def reader() -> Iterator[Any]:
    """TensorBoard's own reader of a folder, all events of it."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )

    def read(folder: Path) -> Any:
        found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        return found.Reload()

    return read


def texts(found: Any, name: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(f"{name}/text_summary")]


def test_the_event_files_of_a_run_have_its_reports_its_path_and_its_outcome(tmp_path: Path, reader: Any):
    (outcome,) = fitted(TensorBoard(tmp_path / "runs"))
    found = reader(tmp_path / "runs" / "run-1")
    for name in ("loss", "val_loss"):
        told = [(r.step, r.metrics[name]) for r in outcome.reports if name in r.metrics]
        read = [(event.step, event.value) for event in found.Scalars(name)]
        assert read == [(step, pytest.approx(value)) for step, value in told]
    assert [event.value for event in found.Scalars("epoch")] == [r.epoch for r in outcome.reports]
    phases = texts(found, "phase")
    assert [n for n, _ in phases] == list(range(1, len(phases) + 1))
    assert phases[0][1].startswith("`created --")
    assert phases[-1][1].endswith("--> closed`")
    assert texts(found, "outcome")[0][1].startswith("finished, clean, 8 steps")


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, reader: Any):
    (tmp_path / "run-2").mkdir()
    observer = TensorBoard(tmp_path)
    fitted(observer, runs=2)
    fitted(TensorBoard(tmp_path))
    assert names(tmp_path) == ["run-1", "run-2", "run-3", "run-4"]
    assert names(tmp_path / "run-2") == []
    assert all(len(reader(tmp_path / f"run-{n}").Scalars("val_loss")) == 2 for n in (1, 3, 4))


EVENTS: list[Event] = [
    PhaseChanged(1, "acquire", "created", "acquiring", (), (), 0.0),
    Note("first"),
    Report(3, 0, {"loss": math.nan, "grad_norm": 2.0}, 0.5),
    Note("second"),
]


def test_without_an_outcome_the_files_are_complete_too(tmp_path: Path, reader: Any):
    observer = TensorBoard(tmp_path)
    for event in EVENTS:
        observer(event)
    observer.on_end(0)
    observer.on_end(0)
    found = reader(tmp_path / "run-1")
    assert math.isnan(found.Scalars("loss")[0].value)
    assert [(e.step, e.value) for e in found.Scalars("grad_norm")] == [(3, 2.0)]
    assert texts(found, "note") == [(1, "first"), (2, "second")]


def test_nothing_comes_after_the_outcome(tmp_path: Path, reader: Any):
    observer = TensorBoard(tmp_path)
    closed = Closed("finished", "clean", 0, "", 3, 0.5)
    for event in (*EVENTS, closed, closed, Note("third")):
        observer(event)
    observer.on_end(0)
    observer(Note("of another run"))
    observer.on_end(0)
    assert names(tmp_path) == ["run-1", "run-2"]
    assert len(texts(reader(tmp_path / "run-1"), "outcome")) == 1
    assert texts(reader(tmp_path / "run-2"), "note") == [(1, "of another run")]


def test_runs_at_the_same_time_are_told_apart(tmp_path: Path, reader: Any):
    observer = TensorBoard(tmp_path)
    barrier = threading.Barrier(3)

    def tell(own: int) -> None:
        barrier.wait()
        for step in range(10):
            observer(report(step, loss=float(own)))
        observer.on_end(0)

    threads = [threading.Thread(target=tell, args=(own,)) for own in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [[e.value for e in reader(tmp_path / f"run-{n}").Scalars("loss")] for n in (1, 2, 3)]
    assert sorted(values) == [[float(own)] * 10 for own in range(3)]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, reader: Any):
    (tmp_path / "file").touch()
    with pytest.raises(TaskError, match="cannot be made"):
        TensorBoard(tmp_path / "file")


def test_without_the_package_it_says_which_extra_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    imported = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtra, match=r'pip install "interlock\[tensorboard\]"'):
        TensorBoard(tmp_path / "runs")
    assert names(tmp_path) == []
