"""Files that survive a kill or a power cut: written through to the disk, renamed when whole, locked.

What the files mean does not belong here: checkpoints say that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class Recorder:
    """A file to write to, which counts and hashes what was meant to be written.

    An error of the disk is kept for `finish`, and not raised inside `write`: what calls that may be
    compiled code, which a Python error cannot always pass.

    Args:
        path: A new file.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes) -> int:
        """Take more bytes."""
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
            self._hash.update(view)
            self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: `finish` does it."""

    def finish(self) -> str:
        """Write everything through to the disk.

        Returns:
            The SHA-256 of the content.

        Raises:
            OSError: It could not be written.
        """
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file, whatever became of it."""
        # What is still buffered is written by closing, and fails again if it failed before.
        with suppress(OSError):
            self._file.close()


def write_through(path: Path, data: bytes) -> None:
    """Write a small new file, and have it on the disk before this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have a folder's entries on the disk; nothing where the system cannot do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_folder(folder: Path, hidden: Path) -> None:
    """Remove a folder so that a kill in between leaves it whole or under its hidden name.

    Args:
        folder: What to remove; nothing happens if it is not there.
        hidden: A free name beside it.

    Raises:
        OSError: It cannot be removed.
    """
    with suppress(FileNotFoundError):
        folder.rename(hidden)
        sync_folder(hidden.parent)
        shutil.rmtree(hidden)


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Lock:
    """The right to write, for one process or run at a time. It ends with its process.

    Args:
        path: The file that stands for it; made if it is not there, and left there.

    Raises:
        BlockingIOError: Somebody else has it.
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._owner = os.getpid()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _flock(self._file)
        except BaseException:
            os.close(self._file)
            self._file = None
            raise

    def release(self) -> None:
        """Let somebody else have it. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            if os.getpid() == self._owner:
                # Closing alone would not do it: a forked child, such as a loader's worker, has the file too.
                with suppress(ImportError, OSError):
                    import fcntl

                    fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.release()


def _flock(file: int) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # a file system without locks
