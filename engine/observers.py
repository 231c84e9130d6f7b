"""Observers that write a run's numbers where other programs read them: a CSV file, TensorBoard's event files.

An observer is told nothing of which run an event is of, but each run tells it on a thread of its own: by that
the events of runs that share one are told apart. The journal is the complete record; these are for plotting.
"""

from __future__ import annotations

import csv
import io
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from interlock.specs.errors import MissingExtra

from .durable import sync_folder
from .errors import TaskError
from .events import Closed, Event, Note, PhaseChanged, Report

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Existing = Literal["refuse", "append", "replace"]
"""What becomes of a file of earlier runs."""

FIXED = ("run", "step", "epoch", "seconds")
"""The columns that each file begins with; by them a file is known as one of ours."""
FLUSH_SECONDS = 5
"""How often TensorBoard's files are written."""
_APART = "metric "
"""What is put before the name of a metric that is named like one of these columns."""


class CsvWriter:
    """An observer that writes one row for each report, and one column for each metric.

    The columns are `run` (counted from 1 in the order of first reports), `step`, `epoch` (from 0), `seconds`,
    and then the metrics; a metric that is not in a report has an empty cell. For a metric that was in none so
    far the file is written anew, with one more column, beside the old one, and then replaces it. So whenever
    the process is killed, the file has all rows but at most the last one.

        il.Engine("cpu", observers=[il.CsvWriter("run.csv")])

    Args:
        path: The file. It is made at once.
        existing: What becomes of a file of earlier runs: it is refused, or appended to, counting runs on, or
            replaced. Any other file that is not empty is refused.

    Raises:
        TaskError: The file cannot be written, or is refused; nothing has been changed.
    """

    def __init__(self, path: str | Path, *, existing: Existing = "refuse") -> None:
        if existing not in get_args(Existing):
            raise TaskError(f"existing is {existing!r}: pass 'refuse', 'append' or 'replace'")
        self.path = Path(path)
        # A link goes on being one: what it leads to is replaced.
        self._file = Path(os.path.realpath(path))
        self._here = _Here()
        self._lock = threading.Lock()
        self._runs = 0
        try:
            earlier = self._earlier()
            if earlier and existing == "refuse":
                raise TaskError(
                    f"{path} has rows of earlier runs: choose another file, or pass existing='append' or "
                    "existing='replace'"
                )
            if earlier and existing == "append":
                columns, *rows = earlier
                self._runs = max(int(row[0]) for row in rows)
                self._replace(columns, rows)
            else:
                self._replace(list(FIXED), ())
        except OSError as error:
            why = error.strerror or error
            raise TaskError(f"{path} cannot be written ({why}): choose another file") from error

    def __call__(self, event: Event) -> None:
        """Write the row of a report.

        Raises:
            OSError: The disk is full, or similar. The row is missing, and the file is as it was.
            TaskError: The file was changed by somebody else; nothing is written.
        """
        if isinstance(event, Report):
            with self._lock:
                if self._here.run is None:
                    self._runs += 1
                    self._here.run = self._runs
                self._write(self._here.run, event)

    def on_end(self, lost: int) -> None:
        """What comes after this is another run.

        Args:
            lost: How many events this observer lost; the outcome of the run says so.
        """
        self._here.run = None

    def _write(self, run: int, report: Report) -> None:
        fixed = (run, report.step, report.epoch, round(report.seconds, 6))
        cells: dict[str, Any] = dict(zip(FIXED, fixed, strict=True))
        cells |= {_column(name): repr(float(value)) for name, value in report.metrics.items()}
        self._refuse_changed()
        new = [name for name in cells if name not in self._columns]
        if new:
            rows = [row + [""] * len(new) for row in self._rows()[1:]]
            self._replace([*self._columns, *new], rows)
        self._append(_line(cells.get(name, "") for name in self._columns))

    # -- the file -------------------------------------------------------------------------------

    def _earlier(self) -> list[list[str]]:
        """Columns and rows of the file, without a last row that is torn; empty if it has no row."""
        try:
            kind = self._file.stat()
        except FileNotFoundError:
            return []
        if not stat.S_ISREG(kind.st_mode):
            raise TaskError(f"{self.path} is no file: name one")
        if not kind.st_size:
            return []
        with suppress(UnicodeDecodeError, csv.Error):
            head, *rows = self._rows()
            if tuple(head[: len(FIXED)]) == FIXED:
                if all(len(row) == len(head) and row[0].isdecimal() for row in rows):
                    return [head, *rows] if rows else []
                raise TaskError(f"{self.path} was changed since it was written: choose another file")
        raise TaskError(f"{self.path} is there, and is not of a CsvWriter: choose another file")

    def _rows(self) -> list[list[str]]:
        data = self._file.read_bytes()
        # Only the last row can be torn, and no row has a line break in it: numbers have none.
        whole = data[: data.rfind(b"\n") + 1].decode()
        return list(csv.reader(io.StringIO(whole, newline=""))) or [[]]

    def _replace(self, columns: list[str], rows: Iterable[list[str]]) -> None:
        """Have these columns and rows in the file, all at once."""
        data = "".join(map(_line, (columns, *rows))).encode()
        hidden = self._file.with_name(f".writing-{os.getpid()}-{self._file.name}")
        try:
            with hidden.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(self._file.stat().st_mode))
                here = os.fstat(file.fileno())
            hidden.replace(self._file)
        except BaseException:
            with suppress(OSError):
                hidden.unlink()
            raise
        self._columns, self._is, self._size = columns, (here.st_dev, here.st_ino), len(data)
        sync_folder(self._file.parent)

    def _append(self, line: str) -> None:
        data = line.encode()
        # Opened for each row: between two of them nothing is held that a run would have to let go.
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except BaseException:
            os.ftruncate(file, self._size)  # a row after half a row would make both unreadable
            raise
        finally:
            os.close(file)
        self._size += len(data)

    def _refuse_changed(self) -> None:
        with suppress(FileNotFoundError):
            found = self._file.stat()
            if (found.st_dev, found.st_ino, found.st_size) == (*self._is, self._size):
                return
        raise TaskError(
            f"{self.path} was changed by somebody else meanwhile: give each writer a file of its own"
        )


class _Here(threading.local):
    """What belongs to the run that tells on the present thread."""

    run: int | None = None
    writer: SummaryWriter | None = None
    notes: int = 0
    over: bool = False


def _column(name: str) -> str:
    bare = name
    while bare.startswith(_APART):
        bare = bare.removeprefix(_APART)
    return _APART + name if bare in FIXED else name


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    # Its own line ends are "\r\n": with others it would not quote a "\r" in a name.
    csv.writer(text).writerow(cells)
    return text.getvalue().removesuffix("\r\n") + "\n"


class TensorBoard:
    """An observer that writes the event files of TensorBoard.

    Each run gets a folder of its own, the first free one of `run-1`, `run-2` and so on. Metrics and the epoch
    are scalars over the step; the transitions and the notes are texts, numbered; the outcome is a text. Files
    are written every few seconds, and complete when the run is closed.

        il.Engine("cpu", observers=[il.TensorBoard("runs")])

    Args:
        folder: Where to; it is made at once.

    Raises:
        MissingExtra: The package tensorboard is not installed.
        TaskError: The folder cannot be made.
    """

    def __init__(self, folder: str | Path) -> None:
        _summary_writer()
        self.folder = Path(folder)
        self._here = _Here()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or error
            raise TaskError(f"the folder {folder} cannot be made ({why}): choose another one") from error

    def __call__(self, event: Event) -> None:
        """Write what an event says.

        Raises:
            OSError: The disk is full, or similar.
        """
        here = self._here
        if here.over:
            return  # nothing comes after the outcome, not even another one
        if here.writer is None:
            here.writer = _summary_writer()(str(self._new_folder()), flush_secs=FLUSH_SECONDS)
        match event:
            case Report(step, epoch, metrics):
                for name, value in {"epoch": epoch, **metrics}.items():
                    here.writer.add_scalar(name, float(value), step)
            case PhaseChanged(n):
                here.writer.add_text("phase", f"`{event}`", n)
            case Note(text):
                here.notes += 1
                here.writer.add_text("note", text, here.notes)
            case Closed():
                here.over = True
                here.writer.add_text("outcome", str(event), event.steps)
                self._close()

    def on_end(self, lost: int) -> None:
        """Complete and close the files.

        Args:
            lost: How many events this observer lost; the outcome of the run says so.
        """
        try:
            self._close()
        finally:
            self._here.notes, self._here.over = 0, False

    def _new_folder(self) -> Path:
        """A folder that no other run has, of this process or another."""
        number = 1
        while True:
            folder = self.folder / f"run-{number}"
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
            number += 1

    def _close(self) -> None:
        writer, self._here.writer = self._here.writer, None
        if writer is not None:
            writer.close()


def _summary_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("the TensorBoard observer", "tensorboard", "tensorboard") from error
    return SummaryWriter
