"""The fault sweep: every fault at every point of a small run of a task, each judged.

    from interlock.sweep import sweep

    report = sweep(task, backend="double", quick=True)
    print(report)
    assert report.ok

An undisturbed run enumerates the points: each passage of each hook of the task, each call of the backend, and
on the simulated device each operation. Then each of them is struck, by a run of its own, and it is looked at
what is left: `sweep_judge` has the promises. After each struck run comes another one that nothing disturbs,
on the same device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from interlock.backends.adapter import Adapter
from interlock.backends.registry import adapter_class

from .errors import SweepError, UnknownCell
from .options import ExitPolicy
from .sweep_cell import tried
from .sweep_enumerate import enumerated, one_cell
from .sweep_points import (
    LAYERS,
    START,
    Cell,
    InjectedFault,
    Point,
    Settings,
    cells_at,
    fingerprint,
    quick_cells,
)
from .sweep_report import SweepReport, Verdict, counted, verdict_of
from .sweep_run import Bench
from .sweep_show import Shown
from .sweep_state import State
from .task import Data, Task

__all__ = [
    "Cell",
    "InjectedFault",
    "Point",
    "Settings",
    "SweepError",
    "SweepReport",
    "UnknownCell",
    "Verdict",
    "enumerate_points",
    "sweep",
]

RUNS = 2.5
"""What a cell takes, in undisturbed runs: one that is struck, one after it, and judging both."""
Backend = str | type[Adapter] | Callable[[], Adapter]


def sweep(
    task: Task,
    data: Any = None,
    *,
    backend: Backend = "auto",
    validate: Iterable[Any] | None = None,
    exit: ExitPolicy = "offload",  # noqa: A002 - the engine's word
    batches: int = 2,
    epochs: int = 1,
    checkpoints: bool = False,
    quick: bool = False,
    layers: Sequence[str] = LAYERS,
    seed: int = 0,
    deadline: float = 0.5,
    patience: float = 60.0,
    state: str | Path | None = None,
    only: str | None = None,
    progress: bool | None = None,
    on_cell: Callable[[Verdict, int, int], object] | None = None,
    repeat: Callable[[str], str] | None = None,
    tell: Callable[[str], object] | None = None,
) -> SweepReport:
    """Strike a small run of a task at every point, with every fault that means anything there.

    Args:
        task: What is trained. Its data is read once, and its loaders are not part of what is struck.
        data: Batches, or `Data`; the task's own if left out.
        backend: A name, or what makes an adapter: its class, or a function without arguments.
        validate: Batches to validate on, of which the first is used; `data` may have them.
        exit: What becomes of the model in the runs that are struck.
        batches: Steps of an epoch.
        epochs: Of each run.
        checkpoints: Each run saves into a temporary folder, and rescues when it fails.
        quick: Of each kind of point only the first, the middle and the last passage.
        layers: Where faults are injected: `hook`, `backend`, `device`.
        seed: Of the runs, and of the choice for `quick`.
        deadline: Seconds after which the engine gives up a call of the backend that blocks.
        patience: Seconds after which a run counts as hanging.
        state: A file to keep the verdicts in; a sweep that was interrupted goes on from there.
        only: The id of one cell, which alone is tried; `state` is left alone.
        progress: A progress bar on the standard error stream; by default where that is a terminal.
        on_cell: Called after each cell with its verdict, its number from 1, and how many there are.
        repeat: Makes a command that tries one cell again, from the cell's id; by default Python code.
        tell: Told, before the first fault, how many there are and about how long they will take.

    Returns:
        The report; `report.ok` says whether all is well.

    Raises:
        SweepError: The undisturbed run fails, or the state file is of another sweep.
        UnknownCell: There is no cell `only`.
        TaskError: The task has no data, or a setting is wrong.
    """
    began = time.monotonic()
    bench = _bench(
        task,
        data,
        validate,
        backend,
        exit,
        batches,
        epochs,
        checkpoints,
        quick,
        layers,
        seed,
        deadline,
        patience,
    )
    settings = bench.settings
    found = enumerated(bench)
    points, reference = found.points, found.reference
    chosen = quick_cells(points, seed) if quick else cells_at(points)
    cells = [Cell(START, "nothing"), *chosen]
    if only is not None:
        cells = one_cell(only, cells, points)
        state = None
    mark = fingerprint(task.name, settings, points)
    kept = State(state, task.name, settings, mark)
    again_by = repeat or _code(task, settings)
    if tell is not None:
        todo = sum(cell.id not in kept.known for cell in cells)
        tell(f"{counted(todo, 'fault')} to try, about {_span(todo * RUNS * found.seconds)}")
    verdicts: list[Verdict] = []
    hanging = ""
    with Shown(progress, len(cells), f"{task.name} on {settings.backend}") as shown:
        for number, cell in enumerate(cells, 1):
            verdict = kept.known.get(cell.id)
            if verdict is None and hanging:
                why = f"not tried: the run of '{hanging}' still hangs in this process"
                verdict = verdict_of(cell, "undetermined", [why], again_by(cell.id), 0.0)
            elif verdict is None:
                verdict, hangs = tried(bench, cell, reference, again_by(cell.id))
                hanging = cell.id if hangs else ""
                kept.add(verdict)
            verdicts.append(verdict)
            shown.step(verdict)
            if on_cell is not None:
                on_cell(verdict, number, len(cells))
    seconds = time.monotonic() - began
    return SweepReport(task.name, settings, mark, len(points), tuple(verdicts), found.notes, seconds)


def enumerate_points(
    task: Task,
    data: Any = None,
    *,
    backend: Backend = "auto",
    validate: Iterable[Any] | None = None,
    exit: ExitPolicy = "offload",  # noqa: A002 - the engine's word
    batches: int = 2,
    epochs: int = 1,
    checkpoints: bool = False,
    layers: Sequence[str] = LAYERS,
    seed: int = 0,
) -> tuple[Point, ...]:
    """Every point of a small run of a task, in the order in which it passes them. Arguments as for `sweep`.

    Raises:
        SweepError: The undisturbed run fails.
    """
    bench = _bench(
        task, data, validate, backend, exit, batches, epochs, checkpoints, False, layers, seed, 0.5, 60.0
    )
    return enumerated(bench).points


# Preparing


def _bench(
    task: Task,
    data: Any,
    validate: Any,
    backend: Backend,
    exit: str,  # noqa: A002 - the engine's word
    batches: int,
    epochs: int,
    checkpoints: bool,
    quick: bool,
    layers: Sequence[str],
    seed: int,
    deadline: float,
    patience: float,
) -> Bench:
    make = _maker(backend)
    if exit not in get_args(ExitPolicy):
        raise SweepError(f"exit must be one of {', '.join(get_args(ExitPolicy))}, got {exit!r}")
    unknown = [layer for layer in layers if layer not in LAYERS]
    if unknown or not layers:
        raise SweepError(f"layers must be some of {', '.join(LAYERS)}, got {list(layers)}")
    counts: dict[str, Any] = {"batches": batches, "epochs": epochs}  # they come from anywhere
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SweepError(f"{name} must be a whole number of at least 1, got {value!r}")
    if not 0 < deadline < patience:
        raise SweepError(f"deadline must lie between 0 and the patience, {patience!r} s, and is {deadline!r}")
    loaded = task.load() if data is None else data if isinstance(data, Data) else Data(data)
    held_out = loaded.validate if validate is None else validate
    train = list(islice(iter(loaded.train), batches * task.window))
    if not train:
        raise SweepError(f"the data of task '{task.name}' gave no batch: a sweep needs one at least")
    checked = None if held_out is None else list(islice(iter(held_out), 1))
    settings = Settings(
        backend=make().name,
        exit=exit,
        batches=batches,
        epochs=epochs,
        validates=bool(checked),
        checkpoints=checkpoints,
        quick=quick,
        layers=tuple(layer for layer in LAYERS if layer in layers),
        seed=seed,
        deadline=deadline,
        patience=patience,
    )
    return Bench(task, train, checked or None, make, settings)


def _maker(backend: Backend) -> Callable[[], Adapter]:
    if isinstance(backend, Adapter):
        raise SweepError(
            "each run of a sweep needs an adapter of its own: pass the backend's name, its class, or a "
            "function that makes one, and not an adapter that exists already"
        )
    return adapter_class(backend) if isinstance(backend, str) else backend


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _code(task: Task, settings: Settings) -> Callable[[str], str]:
    def code(cell: str) -> str:
        given = {
            "backend": settings.backend,
            "exit": settings.exit,
            "batches": settings.batches,
            "epochs": settings.epochs,
            "checkpoints": settings.checkpoints,
            "seed": settings.seed,
            "only": cell,
        }
        words = ", ".join(f"{name}={value!r}" for name, value in given.items())
        name = task.name if task.name.isidentifier() else "task"
        return f"print(interlock.sweep.sweep({name}, data, {words}))"

    return code
