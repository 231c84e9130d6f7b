"""Finds who holds a tensor: the path of references from a root, for a report on what was left.

Slow (it asks the garbage collector for referrers), and called only when something *is* left. Nothing is
collected, and no code of the objects on the way is run.
"""

from __future__ import annotations

import contextvars
import gc
import math
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from .references import gradient_of, local, locals_of, render
from .standing import known_tensors, torch_module

if TYPE_CHECKING:
    from interlock.backends.adapter import Adapter, Leftover

__all__ = ["Owner", "describe_owner", "locals_of", "owner_of", "with_owners"]

DEPTH = 12
BREADTH = 64
"""Owners of one level that are followed further: each asks for a look at every object of the process."""
SECONDS = 2.0
"""For all leftovers of a run together: a report must not hold up the end that it reports on."""

NOT_FOUND = "an owner that was not found"
BY_TOOL = "(by the test tool) "
_TOOLS = ("_pytest", "pluggy", "hypothesis", "unittest", "xdist")
"""Packages whose running functions have the objects of a test in variables of their own."""


@dataclass(frozen=True)
class Owner:
    """Who holds a thing.

    Attributes:
        path: In words.
        held: `named` by something with a name; by a reference `cycle` and nothing else; `unseen`: by
            something that Python's collector cannot see, such as C++; `unknown`: the search was cut off.
        root: The part of the path that has a name: `global train.model`.
    """

    path: str
    held: Literal["named", "cycle", "unseen", "unknown"]
    root: str = ""


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
        # All of them first: what looks for them holds them while it looks.
        tensors = list(adapter.holders(leftover))
        while tensors:
            box = [tensors.pop()]
            key = id(box[0])
            if key not in told:
                told[key] = owner_of(box, until, own=[box, tensors]).path
            held.append(told[key])
        # The simplest first: in which order tensors are found is up to the collector.
        found.append(replace(leftover, owners=tuple(sorted(dict.fromkeys(held), key=len))))
    return tuple(found)


def describe_owner(thing: object, until: float = math.inf) -> str:
    """A shortest path of references to an object from something with a name.

    Args:
        thing: Usually a tensor.
        until: When to give up, by `time.monotonic()`.

    Returns:
        Such as `global train.history[3]`, `global train.report (closure variable 'seen' of report)[0]` or
        `local 'loss' of evaluate (train.py:12)`; if nothing with a name was found, the longest path
        that leads there: `a Net.seen[0]`.
    """
    box = [thing]
    return owner_of(box, until, own=[box]).path


def owner_of(
    box: list[Any],
    until: float = math.inf,
    *,
    own: Sequence[object] = (),
    passed_over: Callable[[str], bool] = lambda _: False,
    way: list[object] | None = None,
) -> Owner:
    """Who holds an object.

    To tell a reference cycle from a reference out of Python's sight, references are counted. So the
    caller must hold the object in containers only: in no variable of its own.

    Args:
        box: A list of one, the object.
        until: When to give up, by `time.monotonic()`.
        own: The caller's containers: no owners, and their references count as nothing.
        passed_over: Says of a path that it is told only if there is no other one.
        way: Where to put the objects of the path, from the first that the named one refers to.
    """
    search = _Search(box, [*own, box])
    other = ""
    chain: list[object] = []
    for root, chain in search.paths(until):
        path = render(root, chain)
        if not passed_over(path) and not path.startswith(BY_TOOL):
            if way is not None:
                way.extend(chain)
            return Owner(path, "named", root)
        other = other or path
    if other:
        return Owner(other, "named")
    # Counted before anything is put in words: reading an object's attributes may give it a dictionary.
    chain = []
    outside = search.complete and search.held_from_outside()
    path = search.longest() or NOT_FOUND
    if not search.complete:
        return Owner(path, "unknown")
    return Owner(path, "unseen" if outside else "cycle")


class _Search:
    """Breadth first, from an object to what refers to it; see `owner_of`."""

    def __init__(self, box: list[Any], own: Sequence[object]) -> None:
        self.complete = False
        """Whether all that refers to the object, by any number of steps, was looked at."""
        self._last: int | None = None
        self._own = list({id(one): one for one in own}.values())
        self._objects: dict[int, Any] = {id(one): one for one in box}
        self._toward: dict[int, int] = {}
        """An owner's id -> the id of what it refers to, one step nearer to the object."""
        self._cut = False

    def paths(self, until: float) -> Iterator[tuple[str, list[object]]]:
        """Paths from something with a name, the shortest first: that name, and the objects after it."""
        level = list(self._objects)
        skipped = {id(one) for one in (self._own, *self._own, self._objects, self._toward)}
        skipped |= {id(self), id(vars(self)), *_running_ids()}
        steps = 0
        while level and steps < DEPTH and time.monotonic() < until:
            yield from self._named_by_variables(level)
            above: list[int] = []
            for key, target in self._owners(level, skipped):
                root = _root(self._objects[key], self._objects[target])
                if root:
                    # Its own name ends the path there; what refers to a module or a class is no owner.
                    skipped.add(key)
                    start = key if isinstance(self._objects[key], type) else target
                    if start == key:
                        self._toward[key] = target
                    yield root, self._chain(start)
                    self._objects.pop(key, None)
                elif len(above) < BREADTH:
                    self._toward[key] = target
                    above.append(key)
                else:
                    self._objects.pop(key, None)
                    self._cut = True
            steps += not above or any(type(self._objects[key]) is not types.TracebackType for key in above)
            level = above
            outside = (key for key in level if not _of_engine(self._objects[key]))
            plain = (key for key in outside if type(self._objects[key]) is not types.FrameType)
            self._last = next(plain, self._last)
        self.complete = not level and not self._cut

    def held_from_outside(self) -> bool:
        """Whether anything but the objects found refers to one of them; only if the search was complete."""
        objects = self._objects
        inside = dict.fromkeys(objects, 0)
        for holder in (*objects.values(), *self._own):
            for one in gc.get_referents(holder):
                if id(one) in inside:
                    inside[id(one)] += 1
        holder = one = None
        # Held by the dictionary and by the call.
        return any(sys.getrefcount(objects[key]) - 2 > count for key, count in inside.items())

    def _owners(self, level: list[int], skipped: set[int]) -> list[tuple[int, int]]:
        """Ids of what refers to the objects of a level, each with the id of one that it refers to."""
        wanted = set(level)
        found = []
        for owner in gc.get_referrers(*[self._objects[key] for key in level]):
            if id(owner) in skipped or id(owner) in self._objects:
                continue
            target = next((id(one) for one in gc.get_referents(owner) if id(one) in wanted), None)
            if target is not None:
                self._objects[id(owner)] = owner
                found.append((id(owner), target))
        # What C++ holds, on behalf of a leaf, the collector does not see.
        tensors = [key for key in level if _is_tensor(self._objects[key])]
        for owner in known_tensors(torch_module()) if tensors else ():
            if id(owner) not in self._objects:
                gradient = id(gradient_of(owner))
                if gradient in tensors:
                    self._objects[id(owner)] = owner
                    found.append((id(owner), gradient))
        return found

    def _named_by_variables(self, level: list[int]) -> Iterator[tuple[str, list[object]]]:
        for root, key in _of_running({key: self._objects[key] for key in level}):
            yield root, self._chain(key)
        for name, key in [(one.name, id(value)) for one, value in contextvars.copy_context().items()]:
            if key in level:
                yield f"context variable '{name}'", self._chain(key)

    def _chain(self, key: int) -> list[object]:
        """From an owner down to the object."""
        chain = [self._objects[key]]
        while key in self._toward:
            key = self._toward[key]
            chain.append(self._objects[key])
        return chain

    def longest(self) -> str:
        """The longest path that leads to the object, from no matter what."""
        return "" if self._last is None else render("", self._chain(self._last))


def _is_tensor(thing: object) -> bool:
    torch = torch_module()
    return torch is not None and torch.Tensor in type(thing).__mro__


def _frames() -> Iterator[types.FrameType]:
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


def _running_ids() -> set[int]:
    return {id(frame) for frame in _frames()}


def _of_running(level: dict[int, object]) -> list[tuple[str, int]]:
    """Local variables of functions that are running: the collector knows nothing of these."""
    found = []
    for frame in _frames():
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module == "interlock":
            continue
        by = BY_TOOL if module in _TOOLS else ""
        known = _module_of(frame.f_globals) if frame.f_locals is frame.f_globals else ""
        found += [
            (f"global {known}.{name}" if known else by + local(name, frame), id(value))
            for name, value in locals_of(frame)
            if id(value) in level
        ]
    return sorted(found, key=lambda entry: entry[0].startswith(BY_TOOL))


def _of_engine(owner: object) -> bool:
    """Whether it is a part of the run itself, which lets go of everything at its end."""
    where = getattr(owner if isinstance(owner, types.FunctionType) else type(owner), "__module__", None)
    return isinstance(where, str) and where.partition(".")[0] == "interlock"


def _root(owner: object, target: object) -> str:
    """The name of an owner that ends the search; empty for one that does not."""
    if type(owner) is dict:
        module = _module_of(owner)
        names = [str(key) for key, value in owner.items() if value is target] if module else ()
        return f"global {module}.{names[0]}" if names else ""
    if isinstance(owner, type):
        name = _importable(owner)
        return f"class {name}" if name and type(target) is dict else ""
    return ""


def _module_of(namespace: dict[Any, Any]) -> str:
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return str(name) if module is not None and vars(module) is namespace else ""


def _importable(kind: type) -> str:
    """The name of a class that its module has; empty for one that only its instances know."""
    found: object = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return f"{kind.__module__}.{kind.__qualname__}" if found is kind else ""
