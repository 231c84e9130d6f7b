"""Where a search for an owner ends: names of modules, classes and running functions, and whose they are."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from .references import local, locals_of

BY_TOOL = "(by the test tool) "
_TOOLS = ("_pytest", "pluggy", "hypothesis", "unittest", "xdist")
"""Packages whose running functions have the objects of a test in variables of their own."""


def frames() -> Iterator[types.FrameType]:
    """All functions that are running, on any thread."""
    frame: types.FrameType | None = None
    tops = [*sys._current_frames().values()]
    try:
        while tops:
            frame = tops.pop()
            while frame is not None:
                yield frame
                frame = frame.f_back
    finally:
        # One of them is that of whoever asks, which would keep itself, and all that it looks at.
        del frame, tops


def of_running(level: dict[int, object]) -> list[tuple[str, int]]:
    """Local variables of functions that are running: the collector knows nothing of these."""
    found = []
    for frame in frames():
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module == "interlock":
            continue
        by = BY_TOOL if module in _TOOLS else ""
        known = module_of(frame.f_globals) if frame.f_locals is frame.f_globals else ""
        found += [
            (f"global {known}.{name}" if known else by + local(name, frame), id(value))
            for name, value in locals_of(frame)
            if id(value) in level
        ]
    return sorted(found, key=lambda entry: entry[0].startswith(BY_TOOL))


def passing(thing: object) -> bool:
    """Whether it is there while something runs, and says nothing of who holds what it refers to."""
    kind = type(thing)
    return kind in (types.FrameType, types.TracebackType) or kind.__name__.endswith("_iterator")


def of_engine(owner: object) -> bool:
    """Whether it is a part of the run itself, which lets go of everything at its end."""
    where = getattr(owner if isinstance(owner, types.FunctionType) else type(owner), "__module__", None)
    return isinstance(where, str) and where.partition(".")[0] == "interlock"


def by_engine(chain: Sequence[object]) -> bool:
    """Whether a path goes through a function of the run itself.

    Args:
        chain: The objects of the path.
    """
    frames = (one for one in chain if isinstance(one, types.FrameType))
    return any(str(one.f_globals.get("__name__", "")).partition(".")[0] == "interlock" for one in frames)


def root_of(owner: object, target: object) -> str:
    """The name of an owner that ends the search; empty for one that does not."""
    if type(owner) is dict:
        module = module_of(owner)
        names = [str(key) for key, value in owner.items() if value is target] if module else ()
        return f"global {module}.{names[0]}" if names else ""
    if isinstance(owner, type):
        name = _importable(owner)
        return f"class {name}" if name and type(target) is dict else ""
    return ""


def module_of(namespace: dict[Any, Any]) -> str:
    """The module whose names these are; empty for any other dictionary."""
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return str(name) if module is not None and vars(module) is namespace else ""


def _importable(kind: type) -> str:
    """The name of a class that its module has; empty for one that only its instances know."""
    found: object = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return f"{kind.__module__}.{kind.__qualname__}" if found is kind else ""
