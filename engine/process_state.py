"""What a test, or a run, must leave as it was: reads the process's state, compares, repairs nothing.

`snapshot()` before, `snapshot()` after, `differences(before, after)`: one line for each thing that differs;
`settled(before)` first lets what is just ending end. What may differ stands in `ALLOWED`, each entry with its
reason, and in what a caller adds to it; nothing else is forgiven.

Reading loads nothing: the switches of a library are read only where it is loaded.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import process_switches
from .process_switches import handler


@dataclass(frozen=True)
class Allowed:
    """One thing that may differ.

    Attributes:
        what: `environment`, `file`, `process`, `thread`, `signal handler`, `warning filter`, `hook`,
            `interpreter`, `logger`, `numpy`, `torch`, `simulated device`, `current directory`; for what may
            stay on a device, `tensor`.
        pattern: As of a shell, for the thing's name or for the whole line (for a tensor, its owner's path).
        reason: Why nobody is to blame.
    """

    what: str
    pattern: str
    reason: str


ALLOWED = (
    Allowed("environment", "PYTEST_CURRENT_TEST", "pytest names the running test and its stage"),
    Allowed(
        "environment", "TORCHINDUCTOR_CACHE_DIR", "torch sets it, once, when its compiler is first imported"
    ),
    Allowed(
        "environment",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        "torch's compiler sets it, at its first call",
    ),
    Allowed("environment", "KMP_*", "scikit-learn sets two OpenMP switches, once, when it is first imported"),
    *(
        Allowed("environment", name, "torch_xla sets it, once, when it is first imported")
        for name in (
            "GRPC_VERBOSITY",
            "PJRT_DEVICE",
            "PJRT_DYNAMIC_PLUGINS",
            "TF_CPP_MIN_LOG_LEVEL",
            "TPU_*",
            "XLA_FLAGS",
        )
    ),
    Allowed("file", "*/.hypothesis/*", "Hypothesis keeps its database of examples"),
    Allowed(
        "process", "*multiprocessing.resource_tracker*", "one for each process, by design, until its end"
    ),
    Allowed("file", "<resource tracker>", "the pipe to the process above"),
    Allowed(
        "signal handler",
        "SIGCHLD: * became <function _set_SIGCHLD_handler*",
        "torch's loader watches its workers; set once, with the first worker, on the main thread",
    ),
    *(
        Allowed("logger", f"{name}: set to *", "torch sets up its logs when a part of it is first imported")
        for name in ("torch*", "strobelight*", "c10d*")
    ),
    Allowed("logger", "torch.__trace*", "torch's compiler takes its first handler off when it first traces"),
    Allowed("warning filter", "*numpy.* size changed*", "numpy, when first imported"),
    Allowed("warning filter", "*numpy.exceptions.RankWarning*", "numpy, when first imported"),
    Allowed("warning filter", "*torch::jit::fuser::cuda*", "torch, when first imported"),
    Allowed("warning filter", "*torch.jit._trace.TracerWarning*", "torch, when first imported"),
    Allowed("warning filter", "*SymPyDeprecationWarning*", "sympy, when torch first imports it"),
    Allowed("warning filter", "*transitions version*", "transitions, when first imported"),
    Allowed("warning filter", "*urllib3.exceptions.*", "urllib3, when torch_xla first imports it"),
    Allowed("warning filter", "*requests.exceptions.*", "requests, when torch_xla first imports it"),
    Allowed("warning filter", "*SpecialFunctionWarning*", "scipy, when first imported"),
    Allowed("warning filter", "*matrix subclass*", "scipy, when first imported"),
)


@dataclass(frozen=True)
class State:
    """One reading of the process. Of a library that is not loaded there is None."""

    threads: dict[int, threading.Thread]
    processes: dict[int, str]
    files: Counter[str]
    environment: dict[str, str]
    signals: dict[str, Any]
    hooks: dict[str, Any]
    filters: list[Any]
    directory: str
    modules: frozenset[str]
    interpreter: dict[str, Any] = field(default_factory=dict)
    loggers: dict[str, Hashable] = field(default_factory=dict)
    numpy: dict[str, Hashable] | None = None
    torch: dict[str, Hashable] | None = None
    simulator: dict[str, Hashable] | None = None


def snapshot(watched: Sequence[str] = ()) -> State:
    """Reads the state now.

    Args:
        watched: Names of packages of which no module may be loaded meanwhile.
    """
    return State(
        threads={id(thread): thread for thread in threading.enumerate()},
        processes=_children(),
        files=_files(),
        environment=dict(os.environ),
        signals=_signals(),
        hooks={"sys.excepthook": sys.excepthook, "threading.excepthook": threading.excepthook},
        filters=list(warnings.filters),
        directory=_directory(),
        modules=frozenset(
            name for name in (sys.modules if watched else ()) if name.partition(".")[0] in watched
        ),
        interpreter=process_switches.interpreter(),
        loggers=process_switches.loggers(),
        numpy=process_switches.of_numpy(),
        torch=process_switches.of_torch(),
        simulator=process_switches.of_simulator(),
    )


def differences(before: State, after: State, allowed: Sequence[Allowed] = ALLOWED) -> list[str]:
    """One line for each difference that `allowed` does not name; empty when the process is as it was.

    Args:
        before: A reading.
        after: A later one.
        allowed: What may differ.
    """
    found = [
        *_threads(before, after),
        *_mapping("process", before.processes, after.processes, show=lambda pid, name: f"{pid} ({name})"),
        *_counts(before, after),
        *_mapping("environment", before.environment, after.environment),
        *_mapping("signal handler", before.signals, after.signals),
        *_mapping("hook", before.hooks, after.hooks),
        *_filters(before, after),
        *_mapping("current directory", {"": before.directory}, {"": after.directory}),
        *(
            _Difference("module", name, f"module loaded: {name}")
            for name in sorted(after.modules - before.modules)
        ),
        *_mapping("interpreter", before.interpreter, after.interpreter),
        *_mapping("logger", before.loggers, after.loggers),
        *(
            one
            for what, old, new in (
                ("numpy", before.numpy, after.numpy),
                ("torch", before.torch, after.torch),
                ("simulated device", before.simulator, after.simulator),
            )
            for one in _mapping(what, old or new or {}, new or {})
        ),
    ]
    lines = [one.line for one in found if not any(one.matches(entry) for entry in allowed)]
    filters = any(one.what == "warning filter" for one in found)
    if not filters and len(before.filters) != len(after.filters):
        lines.append(f"warning filters: {len(before.filters)} became {len(after.filters)}")
    return lines


def settled(
    before: State,
    seconds: float = 0.5,
    allowed: Sequence[Allowed] = ALLOWED,
    watched: Sequence[str] = (),
) -> list[str]:
    """The differences that last.

    A thread or child that was joined elsewhere, or told to end, may need a moment to be gone: that is waited
    for, and nothing else is done. What is merely slow to end, beyond that moment, is a difference.

    Args:
        before: A reading.
        seconds: How long to wait for what is ending.
        allowed: What may differ.
        watched: As for `snapshot`.
    """
    deadline = time.monotonic() + seconds
    while found := differences(before, snapshot(watched), allowed):
        if time.monotonic() > deadline or not all(line.startswith(_ENDING) for line in found):
            break
        time.sleep(0.01)
    return found


_ENDING = ("thread started", "process", "file opened")


# Reading


def _children() -> dict[int, str]:
    """Child processes with their command lines; empty where the system has no /proc."""
    found: dict[int, str] = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [int(word) for word in listing.read_text().split()]
        except OSError:  # that thread ended since the listing
            continue
        for pid in pids:
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:  # it ended, and was waited for, since the listing
                continue
            found[pid] = command.strip() or "ended, and never waited for"
    return found


def _files() -> Counter[str]:
    """How many descriptors are open on each target; empty where the system has no /proc."""
    folder = Path("/proc/self/fd")
    targets: Counter[str] = Counter()
    tracker = _tracker_descriptor()
    for link in folder.iterdir() if folder.is_dir() else ():
        try:
            target = str(link.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        targets["<resource tracker>" if int(link.name) == tracker else target] += 1
    return targets


def _tracker_descriptor() -> int | None:
    module = sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else getattr(module._resource_tracker, "_fd", None)


def _signals() -> dict[str, Any]:
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    return {getattr(number, "name", f"signal {number}"): handler(number) for number in numbers}


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "one that was deleted"


# Comparing


@dataclass(frozen=True)
class _Difference:
    """One, before it is known whether it is allowed."""

    what: str
    name: str
    line: str
    change: str = ""

    def matches(self, entry: Allowed) -> bool:
        texts = {self.name, self.line, self.change}
        return entry.what == self.what and any(fnmatch.fnmatchcase(text, entry.pattern) for text in texts)


def _threads(before: State, after: State) -> list[_Difference]:
    started = [thread for key, thread in after.threads.items() if before.threads.get(key) is not thread]
    ended = [thread for key, thread in before.threads.items() if after.threads.get(key) is not thread]
    return [
        _Difference("thread", thread.name, f"{change}: {thread!r}")
        for change, threads in (
            ("thread started and still alive", started),
            ("thread of before is gone", ended),
        )
        for thread in threads
    ]


def _mapping(
    what: str,
    before: dict[Any, Any],
    after: dict[Any, Any],
    show: Callable[[Any, Any], str] = lambda key, _: str(key),
) -> list[_Difference]:
    found = []
    for key in sorted({*before, *after}, key=str):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if old is new or old == new:
            continue
        if old is _ABSENT:
            change = "new" if what == "process" else f"set to {new!r}"
        elif new is _ABSENT:
            change = "gone" if what == "process" else f"removed, was {old!r}"
        else:
            change = f"{old!r} became {new!r}"
        name = show(key, old if new is _ABSENT else new)
        line = f"{name}: {change}"
        found.append(_Difference(what, name, f"{what} {line}" if name else f"{what}{line}", line))
    return found


_ABSENT: Any = object()


def _counts(before: State, after: State) -> list[_Difference]:
    return [
        _Difference("file", name, f"{change}: {name}" + (f" ({count} times)" if count > 1 else ""))
        for change, extra in (
            ("file opened and not closed", after.files - before.files),
            ("file of before is closed", before.files - after.files),
        )
        for name, count in extra.items()
    ]


def _filters(before: State, after: State) -> list[_Difference]:
    added = [item for item in after.filters if item not in before.filters]
    removed = [item for item in before.filters if item not in after.filters]
    return [
        _Difference("warning filter", "", f"warning filter {change}: {item!r}")
        for change, items in (("added", added), ("removed", removed))
        for item in items
    ]
