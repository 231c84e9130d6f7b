"""What a user sets and sees of checkpoints: the setting, a saved one, the errors. It loads no torch.

`store.py` writes, finds, reads and prunes them; `capture.py` makes a state of a run, and `restoring.py`
puts it back.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from interlock.specs.errors import InterlockError

FORMAT = 1
"""What this version writes, and the newest that it can read."""
DIGEST = 2 * hashlib.sha256().digest_size
"""The length of the marker's text, which is the checksum of the manifest."""
MANIFEST, STATE, MARKER = "manifest.json", "state.pt", "complete"
LOWER = re.compile(r"loss|error", re.IGNORECASE)


class CheckpointError(InterlockError):
    """A checkpoint cannot be written, found, read, or used; the message says what to do instead."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is not as it was written, or never was complete.

    Attributes:
        path: The file or directory that is wrong.
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        super().__init__(
            f"the checkpoint cannot be used: {path} {problem}. "
            "Restore an earlier one, and remove this directory"
        )


class CheckpointMismatch(CheckpointError):
    """What was saved and what there is now do not fit together. Nothing has been changed.

    Attributes:
        problems: One sentence for each.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{what}, {len(self.problems)} problem(s):\n{lines}")


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run saves what decides its future.

    Attributes:
        folder: Where to; a folder for checkpoints alone, made if it is not there.
        every_epochs: Save after each that many epochs; `None` for not at all.
        every_steps: Save after each that many updates; `None` for not at all.
        keep: How many of the last ones stay.
        rescue: Save also when the run fails at a moment at which the state is whole.
        best: The name of a validation metric: the best one by it stays beside the last ones.
        lower_is_better: Of that metric. Need not be said where its name has "loss" or "error" in it.

    Raises:
        CheckpointError: Naming everything that is wrong.
    """

    folder: str | Path
    every_epochs: int | None = 1
    every_steps: int | None = None
    keep: int = 3
    rescue: bool = True
    best: str | None = None
    lower_is_better: bool | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise CheckpointError(f"checkpoints cannot be kept like that:\n{lines}")

    def _problems(self) -> Iterator[str]:
        setting: Any = self
        if not isinstance(setting.folder, (str, Path)) or not str(setting.folder):
            yield f"folder is {self.folder!r}: pass the path of a folder"
        for name in ("every_epochs", "every_steps"):
            value = getattr(self, name)
            if value is not None and not counts(value):
                yield f"{name} is {value!r}: pass a whole number of at least 1, or None"
        if not counts(setting.keep):
            yield f"keep is {self.keep!r}: pass a whole number of at least 1"
        if not isinstance(setting.rescue, bool):
            yield f"rescue is {self.rescue!r}: pass True or False"
        if self.every_epochs is None and self.every_steps is None and self.rescue is False:
            yield "nothing is ever saved: pass every_epochs=, every_steps= or rescue=True"
        if setting.lower_is_better not in (None, True, False):
            yield f"lower_is_better is {self.lower_is_better!r}: pass True, False, or leave it out"
        if setting.best is not None and (not isinstance(setting.best, str) or not setting.best):
            yield f"best is {self.best!r}: pass the name of a validation metric"
        elif self.best is None and self.lower_is_better is not None:
            yield "lower_is_better says nothing without best=, the name of a metric"
        elif self.best is not None and self.lower_is_better is None and not LOWER.search(self.best):
            yield (
                f"best='{self.best}' does not say which way is better: pass lower_is_better=True or "
                "lower_is_better=False"
            )

    @property
    def lower(self) -> bool:
        """Whether the lower value of the metric is the better one."""
        return True if self.lower_is_better is None else self.lower_is_better


def counts(value: object) -> bool:
    """Whether a setting is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        path: Its directory.
        step: How many updates had been made.
        epoch: In which epoch, as the run counts them.
        boundary: Whether it was saved between two epochs or between two updates of one.
        metrics: The validation's, as of that moment.
        about: The whole manifest.
    """

    path: Path
    step: int
    epoch: int
    boundary: Literal["epoch", "step"]
    metrics: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """Its place in the order of writing."""
        return int(self.path.name.partition("-")[0])


def look(path: str | Path) -> Saved:
    """Read what a checkpoint says of itself, and nothing more of it.

    Args:
        path: Its directory.

    Raises:
        CheckpointDamaged: It is none, is not complete, or its manifest is not as it was written.
    """
    path = Path(path)
    marker, manifest = path / MARKER, path / MANIFEST
    try:
        promised = marker.read_bytes()
        data = manifest.read_bytes()
    except OSError as error:
        missing = Path(error.filename or path)
        raise CheckpointDamaged(missing, "is not there: the writer was killed, or this is none") from error
    if len(promised) != DIGEST:
        raise CheckpointDamaged(marker, "is cut short: the writer was killed before the checkpoint counted")
    if hashlib.sha256(data).hexdigest().encode() != promised:
        raise CheckpointDamaged(manifest, f"is not what {MARKER} says: it was cut short or changed")
    about = json.loads(data)
    metrics = {name: float(value) for name, value in about.get("metrics", {}).items()}
    return Saved(path, about["step"], about["epoch"], about["boundary"], metrics, about)
