"""The checkpoints of one folder: written, found, read and pruned, so that a kill never mixes or loses any.

A checkpoint is a directory of its own. It is written under a hidden name, written through to the disk,
renamed, and only then marked as complete: a kill at any moment leaves the earlier ones as they were and
nothing that looks complete and is not. What killed writers left is cleared away by the next one that
writes there, never by one that reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from .checkpoint import (
    DIGEST,
    FORMAT,
    MANIFEST,
    MARKER,
    STATE,
    CheckpointDamaged,
    CheckpointError,
    Saved,
    counts,
    look,
)
from .durable import Lock, Recorder, remove_folder, sha256, sync_folder, write_through

OWN = ".interlock-checkpoints"
"""The file that says what a folder is for; whoever writes there has it locked."""
_NAME = re.compile(r"(?P<number>\d{6,})-step-\d+-(epoch|step)")
_HIDDEN = re.compile(r"\.(writing|removing)-\d{6,}-step-\d+-(epoch|step)")


class Store:
    """The checkpoints of one folder.

    Reading needs no lock and changes nothing. Whoever writes has the folder to himself, from the first
    `write`, `prune` or `claim` until `close`.

    Args:
        folder: Where they are.
        keep: How many of the last ones `prune` leaves.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if not counts(keep):
            raise CheckpointError(f"keep is {keep!r}: pass a whole number of at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._lock: Lock | None = None

    # -- reading --------------------------------------------------------------------------------

    def all(self) -> tuple[Saved, ...]:
        """The complete ones, in the order of writing; that is by step, unless a run went back and on."""
        return tuple(saved for saved in self._looked() if isinstance(saved, Saved))

    def damaged(self) -> tuple[CheckpointDamaged, ...]:
        """Those that were complete once, and whose manifest is not as it was written."""
        found = (one for one in self._looked() if isinstance(one, CheckpointDamaged))
        return tuple(error for error in found if error.path.name == MANIFEST)

    def newest(self) -> Saved | None:
        """The one that was written last; `None` if there is none."""
        return max(self.all(), key=lambda saved: saved.number, default=None)

    def best(self, metric: str, *, lower_is_better: bool) -> Saved | None:
        """The best one by a metric, the earlier of equals; `None` if none has a number there."""
        sign = 1 if lower_is_better else -1
        ranked = [saved for saved in self.all() if math.isfinite(saved.metrics.get(metric, math.nan))]
        return min(ranked, key=lambda saved: sign * saved.metrics[metric], default=None)

    def read(self, saved: Saved) -> dict[str, Any]:
        """The state that was saved, on the host; no code of the file is run.

        Args:
            saved: As found by `all`, `newest` or `look`.

        Raises:
            CheckpointDamaged: A file of it is not as it was written; names it.
            CheckpointError: A newer version of Interlock wrote it.
        """
        import torch

        written = saved.about["format"]
        if written > FORMAT:
            raise CheckpointError(
                f"{saved.path} has format {written}, and this version reads up to {FORMAT}: install "
                f"interlock {saved.about['versions']['interlock']} or newer"
            )
        look(saved.path)  # it may have changed since it was found
        for name, facts in saved.about["files"].items():
            file = saved.path / name
            try:
                size = file.stat().st_size
                if size != facts["size"]:
                    raise CheckpointDamaged(file, f"has {size} bytes and was written with {facts['size']}")
                if sha256(file) != facts["sha256"]:
                    raise CheckpointDamaged(file, "has other content than was written: its checksum differs")
            except OSError as error:
                raise CheckpointDamaged(file, f"cannot be read ({error.strerror or error})") from error
        # Mapped: what is restored is copied from the file tensor by tensor, never all in memory at once.
        file = saved.path / STATE
        try:
            state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
        except (UnpicklingError, RuntimeError) as error:
            raise CheckpointDamaged(file, "is not plain data and tensors, and is not read") from error
        return state

    def _looked(self) -> Iterator[Saved | CheckpointDamaged]:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
            for path in sorted(names, key=_number):
                try:
                    yield look(path)
                except CheckpointDamaged as damage:
                    yield damage

    # -- writing --------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take the folder for writing, make it if need be, and clear away what killed writers left.

        Raises:
            CheckpointError: It is another run's now, holds something else, or cannot be written to.
        """
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            there = {path.name for path in self.folder.iterdir()}
            if there and OWN not in there:
                raise CheckpointError(
                    f"the folder {self.folder} holds something else, such as '{min(there)}': name a folder "
                    "of its own for checkpoints, which may be new"
                )
            self._lock = Lock(self.folder / OWN)
            self._clear_leftovers()
        except BlockingIOError:
            raise CheckpointError(
                f"another run writes its checkpoints into {self.folder}: give each run a folder of its own"
            ) from None
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise

    def close(self) -> None:
        """Let others write there. Checkpoints can still be read."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def write(self, state: Mapping[str, Any], about: Mapping[str, Any]) -> Saved:
        """Write a checkpoint; it counts when this returns, and not at all if this raises.

        Args:
            state: As captured: tensors on the host and plain data.
            about: What the manifest is to say; of plain data, with `step`, `epoch` and `boundary`.

        Raises:
            CheckpointError: It cannot be written (the disk is full, ...). Earlier ones are as they were.
        """
        self.claim()
        number = 1 + max((_number(path) for path in self.folder.glob("[0-9]*-*")), default=0)
        name = f"{number:06d}-step-{about['step']}-{about['boundary']}"
        hidden, final = self.folder / f".writing-{name}", self.folder / name
        try:
            self._clear_leftovers()
            hidden.mkdir()
            size, digest = self._write_state(state, hidden / STATE)
            described = manifest(about, {STATE: {"size": size, "sha256": digest}})
            write_through(hidden / MANIFEST, described)
            sync_folder(hidden)
            hidden.rename(final)
            sync_folder(self.folder)
            write_through(final / MARKER, hashlib.sha256(described).hexdigest().encode())
            sync_folder(final)
        except BaseException as error:
            with suppress(OSError):
                remove_folder(final, self.folder / f".removing-{name}")
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise
        return look(final)

    def prune(
        self, *, best: str | None = None, lower_is_better: bool = True, since: int = 0
    ) -> tuple[Saved, ...]:
        """Remove all but the last `keep` ones and the best one.

        Args:
            best: The metric that says which that is; `None` for none.
            lower_is_better: Of that metric.
            since: Those up to this number stay in any case: they are another run's.

        Returns:
            What was removed.

        Raises:
            CheckpointError: Something cannot be removed, or the folder cannot be claimed.
        """
        self.claim()
        spared = self.best(best, lower_is_better=lower_is_better) if best else None
        mine = [saved for saved in self.all() if saved.number > since]
        old = [saved for saved in mine[: -self.keep] if spared is None or saved.path != spared.path]
        for saved in old:
            self._remove(saved.path)
        return tuple(old)

    def _write_state(self, state: Mapping[str, Any], path: Path) -> tuple[int, str]:
        import torch

        file = Recorder(path)
        try:
            torch.save(dict(state), file)  # type: ignore[arg-type]
            digest = file.finish()
        finally:
            file.close()
        return file.size, digest

    def _clear_leftovers(self) -> None:
        """Remove what is of no use: under our own hidden names, or renamed and never marked."""
        for path in list(self.folder.iterdir()):
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path)
            elif _NAME.fullmatch(path.name) and path.is_dir() and _never_marked(path):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            remove_folder(path, self.folder / f".removing-{path.name}")
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint cannot be written to or removed from {self.folder} ({error.strerror or error}): "
            "make room there, or choose another folder. Those that are complete are as they were"
        )


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match["number"]) if match else 0


def _never_marked(path: Path) -> bool:
    """Whether the writer of a checkpoint was killed before, or while, it marked it as complete."""
    marker = path / MARKER
    return not marker.exists() or marker.stat().st_size < DIGEST


def manifest(about: Mapping[str, Any], files: Mapping[str, Any]) -> bytes:
    """The manifest of a checkpoint as it stands in its file.

    Args:
        about: As passed to `Store.write`.
        files: Name -> size and checksum.
    """
    import torch

    from . import __version__

    metrics = {name: _number_or_word(value) for name, value in about.get("metrics", {}).items()}
    whole = {
        "format": FORMAT,
        "versions": {
            "interlock": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "pid": os.getpid(),
        **about,
        "metrics": metrics,
        "files": files,
    }
    return json.dumps(whole, indent=1).encode()


def _number_or_word(value: float) -> float | str:
    """JSON has no word for what is not a number; Python's `float` takes it as a string."""
    return float(value) if math.isfinite(value) else str(float(value))
