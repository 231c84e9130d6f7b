"""Writes the journal of a run while it goes on: JSON lines that a killed process leaves readable.

`interlock.specs.journal` says what the lines are, and reads and replays them. Here they get to the
disk: one unbuffered write a line, so that at most the last one can be torn. Transitions are taken
from the run's own history and not from the events, so none is missing where events were lost.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.specs import journal as lines
from interlock.specs.errors import JournalError

from .events import Closed, Event, Note, PhaseChanged, Report

if TYPE_CHECKING:
    from interlock.specs import Slot

    from .session import Session


class JournalWriter:
    """An observer that writes the journal of one run.

    The header is written at once, so a file that cannot be written is found before the run begins.
    After the run the writer holds nothing of it.

    Args:
        path: The file. It is started anew; a file that is not a journal is never overwritten.
        session: The run.
        backend: The backend's name.

    Raises:
        JournalError: The file cannot be written, is something else than a journal, or is being
            written by another run. Nothing is left behind.
    """

    def __init__(self, path: str | Path, session: Session, backend: str) -> None:
        self.path = Path(path)
        self._slot: Slot | None = session.driver.slot
        self._written = 0
        spec = session.driver.spec
        from . import __version__

        torch = sys.modules.get("torch")
        header = lines.header(
            spec,
            lifecycle=spec.name.partition(" on ")[0],
            backend=backend,
            run=session.id,
            task=session.task.name,
            exit=session.options.exit,
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
            pid=os.getpid(),
            versions={
                "interlock": __version__,
                "python": platform.python_version(),
                "torch": str(getattr(torch, "__version__", "")),
            },
        )
        self._owner = os.getpid()
        self._file: int | None = _started(self.path, header.encode())

    def __call__(self, event: Event) -> None:
        """Write the line of an event, and those of all transitions up to now that are not written yet.

        Raises:
            OSError: The disk is full, or similar. Nothing more is written: the journal is torn, and
                says nothing wrong.
        """
        self._catch_up(event.n if isinstance(event, PhaseChanged) else self._written)
        match event:
            case Report(step, epoch, metrics, seconds):
                self._write(
                    lines.record("report", step=step, epoch=epoch, metrics=dict(metrics), t=round(seconds, 6))
                )
            case Note(text):
                self._write(lines.record("note", text=text))
            case Closed() if self._slot is not None:
                self._catch_up()
                self._slot = None  # nothing comes after the outcome, not even another one
                self._write(
                    lines.record(
                        "outcome",
                        status=event.status,
                        verdict=event.verdict,
                        residue=event.residue,
                        error=event.error,
                        steps=event.steps,
                        t=round(event.seconds, 6),
                    )
                )

    def on_end(self, lost: int) -> None:
        """Complete and close the file.

        Args:
            lost: How many events this observer lost; the journal says so.
        """
        try:
            self._catch_up()
            if lost:
                text = (
                    f"{lost} event(s) are not in this journal: writing was too slow; no transition is missing"
                )
                self._write(lines.record("note", text=text, lost=lost))
        finally:
            self._close()

    def _catch_up(self, to: int | None = None) -> None:
        """Write the lines of the transitions up to number `to`, or of all there are."""
        if self._slot is None or self._file is None:
            return
        history = self._slot.history
        spec, begun = self._slot.lifecycle.spec, history[0].at
        last = len(history) - 1 if to is None else to
        while self._written < last:
            n = self._written + 1
            self._write(lines.transition_line(history[n], n, spec, begun))
            self._written = n

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            _write_all(self._file, line.encode())
        except BaseException:
            self._close()  # a line after half a line would make both unreadable
            raise

    def _close(self) -> None:
        file, self._file, self._slot = self._file, None, None
        if file is not None:
            if os.getpid() == self._owner:
                # Closing alone would not do it: a forked child, such as a loader's worker, has the file too.
                _unlock(file)
            os.close(file)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._close()


def refuse_unwritable(path: str | Path) -> None:
    """Find out, without touching it, whether a journal could be written to a file.

    Raises:
        JournalError: It could not: saying why and what to do.
    """
    path = Path(path)
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        kind = None
    except OSError as error:
        raise _unwritable(path, error) from error
    if kind is None:
        if not path.parent.is_dir():
            raise JournalError(
                str(path), 0, f"there is no folder '{path.parent}': make it, or choose another file"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise JournalError(
                str(path), 0, f"the folder '{path.parent}' cannot be written to: choose another file"
            )
        return
    if stat.S_ISDIR(kind):
        raise JournalError(str(path), 0, "it is a folder: name a file in it")
    if not os.access(path, os.W_OK):
        raise JournalError(str(path), 0, "it is write-protected: choose another file")
    if stat.S_ISREG(kind):
        _refuse_another_kind(path)


def _refuse_another_kind(path: Path) -> None:
    """A slip of the tongue, such as `--journal train.py`, must not cost a file."""
    with path.open("rb") as file:
        beginning = file.read(len(lines.BEGINNING))
    if not lines.BEGINNING.startswith(beginning):
        raise JournalError(str(path), 0, "the file is there, and is no journal: it is not overwritten")


def _started(path: Path, header: bytes) -> int:
    """Open a journal anew and write its header; undone if that fails half way."""
    refuse_unwritable(path)
    new = not path.exists()
    file = None
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _lock(file, path)
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.ftruncate(file, 0)
        _write_all(file, header)
    except BaseException as error:
        if file is not None:
            os.close(file)
            if new:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise
    return file


def _lock(file: int, path: Path) -> None:
    """Two runs that write to one file would spoil both journals; a lock ends with its process."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(
            str(path), 0, "another run is writing it: give each run a file of its own"
        ) from None
    except OSError:
        return  # a file system without locks


def _unlock(file: int) -> None:
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _unwritable(path: Path, error: OSError) -> JournalError:
    return JournalError(
        str(path), 0, f"it cannot be written ({error.strerror or error}): choose another file"
    )
