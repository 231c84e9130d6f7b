"""Finds who holds a tensor: the path of references from a root, for a report on what was left.

Slow (it asks the garbage collector for referrers), and called only when something *is* left.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
import time
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from interlock.backends.adapter import Adapter, Leftover

DEPTH = 8
BREADTH = 64
"""Owners of one level that are followed further: each asks for a look at every object of the process."""
SECONDS = 2.0
"""For all leftovers of a run together: a report must not hold up the end that it reports on."""


def with_owners(leftovers: Iterable[Leftover], adapter: Adapter) -> tuple[Leftover, ...]:
    """The leftovers, each with the reference paths of the tensors over it.

    Args:
        leftovers: As the backend reported them.
        adapter: Finds the tensors.
    """
    until = time.monotonic() + SECONDS
    told: dict[int, str] = {}
    found = []
    for leftover in leftovers:
        held = []
        for tensor in adapter.holders(leftover):
            if id(tensor) not in told:
                told[id(tensor)] = describe_owner(tensor, until)
            held.append(told[id(tensor)])
        found.append(replace(leftover, owners=tuple(dict.fromkeys(held))))
    return tuple(found)


def describe_owner(thing: object, until: float = math.inf) -> str:
    """A shortest path of references to an object from something with a name.

    Args:
        thing: Usually a tensor.
        until: When to give up, by `time.monotonic()`.

    Returns:
        Such as `module train.history[3]` or `local 'loss' of evaluate (train.py:12)`; if nothing with a
        name was found, the longest path that leads there: `.seen of a Net[0]`.
    """
    longest = ""
    seen = {id(thing), id(sys._getframe())}
    level: dict[int, tuple[object, str]] = {id(thing): (thing, "")}
    for _ in range(DEPTH):
        if not level or time.monotonic() > until:
            break
        targets = [target for target, _ in level.values()]
        above: dict[int, tuple[object, str]] = {}
        own = {id(level), id(targets), id(above), *map(id, level.values())}
        running = _of_running(level)
        if running:
            return running
        for owner in gc.get_referrers(*targets):
            if id(owner) in seen or id(owner) in own:
                continue
            seen.add(id(owner))
            for target in gc.get_referents(owner):
                if id(target) not in level:
                    continue
                path = level[id(target)][1]
                root = _root(owner, target)
                if root:
                    return root + path
                step = _step(owner, target)
                if step is not None and len(above) < BREADTH:
                    above[id(owner)] = (owner, step + path)
        level = above
        outside = (path for one, path in level.values() if not _of_engine(one) and " in a frame" not in path)
        longest = next(outside, longest)
    return longest.strip() or "an owner that was not found"


def _of_running(level: dict[int, tuple[object, str]]) -> str:
    """A local variable of a function that is running, on any thread: the collector knows nothing of these."""
    frame: types.FrameType | None = None
    tops = [*sys._current_frames().values()]
    try:
        while tops:
            frame = tops.pop()
            while frame is not None:
                if frame.f_globals.get("__name__", "").partition(".")[0] != "interlock":
                    for name, value in locals_of(frame):
                        if id(value) in level:
                            return _local(name, frame) + level[id(value)][1]
                frame = frame.f_back
        return ""
    finally:
        # One of them is this very frame, which would keep itself, and all that it looked at.
        del frame, tops


def locals_of(frame: types.FrameType) -> list[tuple[str, object]]:
    """The local variables of a frame, by name; the frame keeps no copy of them because of this.

    Args:
        frame: Running, or of a traceback.
    """
    names: Any = frame.f_locals
    found = list(names.items())
    if isinstance(names, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Before Python 3.13 this is a copy that the frame keeps: a `del` in it would free nothing any more.
        names.clear()
    return found


def _of_engine(owner: object) -> bool:
    """Whether it is a part of the run itself, which lets go of everything at its end."""
    where = getattr(owner if isinstance(owner, types.FunctionType) else type(owner), "__module__", None)
    return isinstance(where, str) and where.partition(".")[0] == "interlock"


def _local(name: str, frame: types.FrameType) -> str:
    return f"local '{name}' of {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _root(owner: object, target: object) -> str:
    """The name of an owner that ends the search; empty for one that does not."""
    if isinstance(owner, types.FrameType):
        names = [name for name, value in locals_of(owner) if value is target]
        own = owner.f_globals.get("__name__", "").partition(".")[0] == "interlock"
        return _local(names[0], owner) if names and not own else ""
    if isinstance(owner, dict):
        module = _module_of(owner)
        if module:
            names = [str(key) for key, value in owner.items() if value is target]
            return f"global {module}.{names[0]}" if names else ""
    return ""


def _module_of(namespace: dict[Any, Any]) -> str:
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return str(name) if module is not None and vars(module) is namespace else ""


def _step(owner: object, target: object) -> str | None:
    """How an owner refers to the target; `None` for what is no path to follow."""
    if isinstance(owner, dict):
        return next((f"[{key!r}]" for key, value in owner.items() if value is target), None)
    if isinstance(owner, (list, tuple, deque)):
        return next((f"[{i}]" for i, value in enumerate(owner) if value is target), None)
    if isinstance(owner, types.CellType):
        return " (closure)"
    if isinstance(owner, types.FunctionType):
        return f" in {owner.__qualname__}"
    if isinstance(owner, (types.ModuleType, type)):
        return None
    if isinstance(owner, BaseException):
        return f".{type(owner).__name__}"
    names = [name for name, value in getattr(owner, "__dict__", {}).items() if value is target]
    return f".{names[0]} of a {type(owner).__name__}" if names else f" in a {type(owner).__name__}"
