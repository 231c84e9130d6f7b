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

from .references import gradient_of, locals_of, reached_from, render
from .roots import BY_TOOL, by_engine, frames, of_engine, passing, root_of
from .roots import of_running as _of_running
from .standing import Held, known_tensors, standing, torch_module

if TYPE_CHECKING:
    from interlock.backends.adapter import Adapter, Leftover

__all__ = ["Finder", "Owner", "describe_owner", "locals_of", "owner_of", "with_owners"]

DEPTH = 12
BREADTH = 64
"""Owners of one level that are followed further: each asks for a look at every object of the process."""
SECONDS = 2.0
"""For all leftovers of a run together: a report must not hold up the end that it reports on."""

NOT_FOUND = "an owner that was not found"


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
    """The leftovers, each with who holds the memory of it; those that something with a name holds come first.

    Args:
        leftovers: As the backend reported them.
        adapter: Finds the tensors.
    """
    from interlock.backends.device import stands_on  # loads torch

    until = time.monotonic() + SECONDS
    # Held meanwhile: so the adapter finds among all tensors also those that Python had none of.
    pieces = standing(lambda one: stands_on(adapter, one))
    finder = Finder(pieces.values(), until, own=[pieces])
    told: dict[int, list[Owner]] = {}
    # What a graph keeps is the slowest to search for, and follows from what holds the graph.
    for one in sorted(pieces.values(), key=lambda one: one.graph is not None):
        told[id(one)] = list(finder.owners_of(one))
    found = []
    for leftover in leftovers:
        tensors = {id(tensor) for tensor in adapter.holders(leftover)}
        over = [one for one in pieces.values() if any(id(tensor) in tensors for tensor in one.tensors)]
        # Of a backend that cannot tell its blocks apart, what has the size of the block.
        over = [one for one in over if one.nbytes == leftover.nbytes] or over
        # The simplest first: in which order tensors are found is up to the collector.
        held = sorted({owner for one in over for owner in told[id(one)]}, key=_simplest)
        paths = tuple(dict.fromkeys(owner.path for owner in held))
        worst = held[0] if held else Owner(NOT_FOUND, "unknown")
        named = tuple(path for path in paths if path != NOT_FOUND) or paths
        found.append((_simplest(worst)[0], replace(leftover, owners=named)))
    return tuple(one for _, one in sorted(found, key=lambda entry: entry[0]))


def _simplest(owner: Owner) -> tuple[int, int, str]:
    indirect = 1 if owner.path.startswith((_SAVED, _GRADIENT)) else 0
    return (indirect if owner.held == "named" else 2, len(owner.path), owner.path)


class Finder:
    """Searches for the owners of several pieces of memory, and asks for each thing once.

    Args:
        pieces: All that is searched for.
        until: When to give up, by `time.monotonic()`.
        own: Containers of the caller's that hold them meanwhile, besides those of the pieces.
        passed_over: As for `owner_of`.
    """

    def __init__(
        self,
        pieces: Iterable[Held],
        until: float,
        own: Sequence[object] = (),
        passed_over: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._until = until
        self._passed_over = passed_over
        held = [*pieces]
        boxes = [one.tensors for one in held]
        self._own = [*own, held, *held, boxes, *boxes, *map(vars, held)]
        self._wanted = {id(thing) for box in boxes for thing in box}
        self._paths: dict[int, Owner] = {}

    def owners_of(self, one: Held) -> Iterator[Owner]:
        """Who holds a storage: a tensor's owner, a graph of autograd, the leaf of a gradient.

        Args:
            one: One of the pieces.

        Returns:
            Those with a name; if there is none, one without.
        """
        found = Owner(NOT_FOUND, "unseen")
        named = False
        if one.bare:
            yield self._search([one.storage])
            return
        for place in range(0 if one.only_saved else min(_VIEWS, len(one.tensors))):
            # A view may have a name where its base has none.
            found = self._search(one.tensors[place : place + 1])
            if found.held == "named":
                named = True
                yield found
        if named:
            return
        if one.graph is not None:
            graph = self._search([one.graph])
            found = replace(graph, path=f"{_SAVED}{one.saved_by} in the graph of {graph.path}")
        elif one.leaf_saved is not None:
            graph = self._search([one.leaf_saved])
            found = replace(graph, path=f"{_GRADIENT}a parameter in the graph of {graph.path}")
        yield found

    def _search(self, box: list[Any]) -> Owner:
        """Of the one object in a box; and of all others that are found on the way down to it."""
        key = id(box[0])
        if key not in self._paths:
            way: list[object] = []
            passed, own = self._passed_over, [*self._own, box]
            found = owner_of(box, self._until, own=own, passed_over=passed, way=way)
            self._paths[key] = found
            if way:
                below = reached_from(found.root, way, self._wanted - set(self._paths))
                self._paths.update((one, Owner(path, "named")) for one, path in below.items())
        return self._paths[key]


_VIEWS = 4
"""How many tensors over one storage are asked for a name."""
_SAVED, _GRADIENT = "saved by ", "the gradient of "


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
    # What an error's frames hold goes with the error: so, first, what holds it besides.
    search = _Search(box, [*own, box], until, errors=False)
    found, chain, told = _named(search, passed_over)
    if told or not search.errors_met:
        _put(way, chain if told else ())
        return found or search.verdict()
    plain = search.longest(of_program=True)
    search = _Search(box, [*own, box], until)
    traced, chain, told = _named(search, passed_over)
    if traced and told and not (plain and by_engine(chain)):
        _put(way, chain)
        return traced
    if plain and not found:
        return Owner(plain, "unknown")
    chain = []
    return found or traced or search.verdict()


def _put(way: list[object] | None, chain: Sequence[object]) -> None:
    if way is not None:
        way.extend(chain)


def _named(search: _Search, passed_over: Callable[[str], bool]) -> tuple[Owner | None, list[object], bool]:
    """The first path from something with a name, its objects, and whether it is one not to be passed over."""
    other: Owner | None = None
    for root, chain in search.paths():
        path = render(root, chain)
        if not passed_over(path) and not path.startswith((BY_TOOL, "global _pytest.")):
            return Owner(path, "named", root), chain, True
        other = other or Owner(path, "named")
    return other, [], False


class _Search:
    """Breadth first, from an object to what refers to it; see `owner_of`."""

    def __init__(self, box: list[Any], own: Sequence[object], until: float, errors: bool = True) -> None:
        self._until = until
        self._errors = errors
        self.errors_met = False
        """Whether there were tracebacks, or frames, that it was told not to follow."""
        self._complete = False
        """Whether all that refers to the object, by any number of steps, was looked at."""
        self._last: int | None = None
        self._instance: int | None = None
        self._own = list({id(one): one for one in own}.values())
        self._objects: dict[int, Any] = {id(one): one for one in box}
        self._toward: dict[int, int] = {}
        """An owner's id -> the id of what it refers to, one step nearer to the object."""
        self._cut = False

    def paths(self) -> Iterator[tuple[str, list[object]]]:
        """Paths from something with a name, the shortest first: that name, and the objects after it."""
        level = list(self._objects)
        skipped = {id(one) for one in (self._own, *self._own, self._objects, self._toward)}
        skipped |= {id(self), id(vars(self)), *_running_ids()}
        steps = 0
        while level and steps < DEPTH and time.monotonic() < self._until:
            yield from self._named_by_variables(level)
            above: list[int] = []
            for key, target in self._owners(level, skipped):
                root = root_of(self._objects[key], self._objects[target])
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
            outside = [key for key in level if not of_engine(self._objects[key])]
            self._last = next((key for key in outside if not passing(self._objects[key])), self._last)
            own = (key for key in outside if type(self._objects[key]).__module__ != "builtins")
            self._instance = next((key for key in own if self._of_program(key)), self._instance)
        self._complete = not level and not self._cut

    def verdict(self) -> Owner:
        """What is known of an object that nothing with a name holds."""
        # Counted before anything is put in words: reading an object's attributes may give it a dictionary.
        outside = self._complete and self._held_from_outside()
        path = self.longest() or NOT_FOUND
        if not self._complete:
            return Owner(path, "unknown")
        return Owner(path, "unseen" if outside else "cycle")

    def _held_from_outside(self) -> bool:
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
            if not self._errors and type(owner) in (types.FrameType, types.TracebackType):
                if not self.errors_met:
                    self.errors_met = True
                    self._until = min(self._until, time.monotonic() + SECONDS / 2)
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

    def longest(self, of_program: bool = False) -> str:
        """The longest path that leads to the object: from an object of the program's, or no matter what."""
        start = self._instance
        if start is None and not of_program:
            start = self._last
        return "" if start is None else render("", self._chain(start))

    def _of_program(self, key: int) -> bool:
        return not any(passing(one) or of_engine(one) for one in self._chain(key))


def _is_tensor(thing: object) -> bool:
    torch = torch_module()
    return torch is not None and torch.Tensor in type(thing).__mro__


def _running_ids() -> set[int]:
    return {id(frame) for frame in frames()}
