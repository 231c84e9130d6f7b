"""How runs are to be carried out: the settings that the engine freezes and hands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .leases import ProcessSettings, WhenTaken

ExitPolicy = Literal["offload", "keep", "discard"]
Nonfinite = Literal["error", "ignore"]


@dataclass(frozen=True)
class Options:
    """How a run is to be carried out; the same for every task.

    Attributes:
        exit: What becomes of the model: home, kept on the device, or discarded.
        deadline: Seconds that each backend call on the way out may take.
        report_every: Steps between two reports; also the bound within which a parameter that is
            replaced in mid-run, or a loss that is not finite, is found.
        nonfinite: What a NaN or infinite loss is: an `error`, or something to `ignore`.
        process: What the run wants of what a process has once: seed, determinism, dtype, threads.
        when_taken: Whether it waits, or is refused, while another run has another value of those.
        keep_frames: Leave the frames of a failed run's traceback alone, for a debugger.
    """

    exit: ExitPolicy = "offload"
    deadline: float = 30.0
    report_every: int = 50
    nonfinite: Nonfinite = "error"
    keep_frames: bool = False
    process: ProcessSettings = field(default_factory=ProcessSettings)
    when_taken: WhenTaken = "wait"
