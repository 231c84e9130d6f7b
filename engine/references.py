"""How one object refers to another, in words: the parts of a path of references.

Nothing here runs code of the objects that it describes: attributes are read past their classes. Torch
is never loaded; while it is not, there are no tensors.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_LRU = type(functools.lru_cache(len))
_SUSPENDABLE = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_PARTS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module whose entries are read, and written, as its attributes."""
_REACHED = 20_000
"""How many objects are looked at on the way down."""
_PLAIN = (str, bytes, int, float, bool, type(None))


def render(root: str, chain: Sequence[object]) -> str:
    """A path in words.

    Args:
        root: What refers to the first object, such as `global train.model`; empty if nothing with a name.
        chain: The objects of the path, each of which refers to the next one.

    Returns:
        Such as `global train.model.body.weight`, or `a Net.seen[0]` where there is no root.
    """
    text = root or _anonymous(chain[0])
    attributes = False
    at = 0
    while at + 1 < len(chain):
        owner, target = chain[at], chain[at + 1]
        if isinstance(owner, types.FunctionType) and target is owner.__closure__ and at + 2 < len(chain):
            cell = chain[at + 2]
            names = [
                n
                for n, c in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
                if c is cell
            ]
            text += f" (closure variable '{names[0]}' of {owner.__qualname__})"
            attributes = False
            at += 3
            continue
        piece, attributes = _piece(owner, target, attributes)
        text += piece
        at += 1
    return text


def local(name: str, frame: types.FrameType) -> str:
    """A local variable, and where its function stands.

    Args:
        name: The variable's.
        frame: Running, suspended or of a traceback.
    """
    return f"local '{name}' of {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def locals_of(frame: types.FrameType) -> list[tuple[str, object]]:
    """The local variables of a frame, by name; the frame keeps no copy of them because of this.

    Args:
        frame: Running, suspended or of a traceback.
    """
    names: Any = frame.f_locals
    found = list(names.items())
    if isinstance(names, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Before Python 3.13 this is a copy that the frame keeps: a `del` in it would free nothing any more.
        names.clear()
    return found


def namespace_of(thing: object) -> dict[str, Any] | None:
    """The dictionary of an object's own attributes, past its class; `None` if it has none."""
    with suppress(AttributeError):
        found = object.__getattribute__(thing, "__dict__")
        if type(found) is dict:
            return found
    return None


def gradient_of(tensor: Any) -> object:
    """The gradient of a leaf tensor, past its class; `None` if it has none, and of all else."""
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.Tensor not in type(tensor).__mro__:
        return None
    base = torch._C.TensorBase
    with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError, NotImplementedError):
        return base.grad.__get__(tensor) if base.is_leaf.__get__(tensor) else None
    return None


def reached_from(root: str, way: Sequence[object], wanted: set[int]) -> dict[int, str]:
    """Paths to further objects, downward from one that a name refers to: cheap where a search upward is not.

    Args:
        root: The name.
        way: What it refers to, and so on; only the first is begun with.
        wanted: Identities of the objects.

    Returns:
        For those that were reached, by identity.
    """
    objects = {id(way[0]): way[0]}
    above: dict[int, int] = {}
    todo = deque(objects)
    found: dict[int, str] = {}
    while todo and len(found) < len(wanted) and len(objects) < _REACHED:
        key = todo.popleft()
        owner = objects[key]
        if isinstance(owner, (type, types.ModuleType)) or (type(owner) is dict and "__builtins__" in owner):
            continue
        for one in (*gc.get_referents(owner), gradient_of(owner)):
            if id(one) in objects or one is None:
                continue
            objects[id(one)] = one
            above[id(one)] = key
            todo.append(id(one))
            if id(one) in wanted:
                chain = [one]
                while id(chain[0]) in above:
                    chain.insert(0, objects[above[id(chain[0])]])
                found[id(one)] = render(root, chain)
    return found


def own_part(stack: Sequence[str]) -> tuple[str, ...]:
    """The part of a stack that is the program's, without the test tool that called it.

    Args:
        stack: `file:line in function`, innermost first.
    """
    return tuple(itertools.takewhile(lambda place: not any(tool in place for tool in _TOOLS), stack))


_TOOLS = ("/_pytest/", "/pluggy/", "/unittest/")


def _anonymous(thing: object) -> str:
    """What an object is called that nothing with a name refers to."""
    if isinstance(thing, types.FunctionType):
        return f"function {thing.__qualname__}"
    if type(thing) in _SUSPENDABLE:
        return f"a {type(thing).__name__}"
    if isinstance(thing, types.FrameType):
        return "a traceback"
    return f"a {type(thing).__name__}"


def _piece(owner: object, target: object, attributes: bool) -> tuple[str, bool]:
    """How an owner refers to the target, and whether the target's keys read as attributes of the path.

    Args:
        owner: Refers to the target.
        target: What comes next.
        attributes: Whether the owner's own keys read like that.
    """
    kind = type(owner)
    if issubclass(kind, dict):
        found = _in_dictionary(owner, target, attributes)
    elif issubclass(kind, (list, tuple, deque)):
        places = (f"[{at}]" for at, one in enumerate(_sequence(owner)) if one is target)
        found = (next(places, ""), False)
    elif kind in _SUSPENDABLE:
        frame = getattr(owner, _SUSPENDABLE[kind])
        found = (_in_frame(frame, target, f" of a suspended {kind.__name__}"), False)
    elif kind is types.FrameType:
        found = (_in_frame(owner, target, ""), False)
    elif kind in (types.CellType, types.TracebackType, threading.local):
        found = ("", False)
    elif kind is types.FunctionType:
        found = _in_function(owner, target)
    elif kind in (types.ModuleType, type) or issubclass(kind, type):
        found = ("", type(target) is dict)
    elif kind is _LRU and target is not namespace_of(owner):
        found = (" (its cache of results)", False)
    elif issubclass(kind, (set, frozenset)):
        found = (" (a member)", False)
    else:
        found = _in_instance(owner, target)
    return found


def _sequence(owner: Any) -> list[object]:
    # Past a subclass's own iteration, which may run anything.
    base: Any = next(kind for kind in (list, tuple, deque) if isinstance(owner, kind))
    return [*base.__iter__(owner)]


def _in_dictionary(owner: Any, target: object, attributes: bool) -> tuple[str, bool]:
    for key, value in dict.items(owner):
        if value is target:
            if type(key) is weakref.ref and type(target) is dict:
                return " (thread local)", True
            if attributes and type(key) is str:
                return _attribute(key, value)
            return f"[{_shown(key)}]", False
    return " (a key)", False


def _attribute(name: str, value: object) -> tuple[str, bool]:
    if name in _PARTS and type(value) is dict:
        return "", True
    return f".{name}", False


def _shown(key: object) -> str:
    """A key as it is written, where writing it runs nobody's code."""
    if type(key) in _PLAIN:
        text = repr(key)
        return text if len(text) < 80 else text[:77] + "..."
    if type(key) is tuple:
        return f"({', '.join(map(_shown, key))})"
    return f"<{type(key).__name__}>"


def _in_frame(frame: Any, target: object, of: str) -> str:
    if frame is None:
        return f" in what is left{of}"
    names = [name for name, value in locals_of(frame) if value is target]
    return f" -> {local(names[0] if names else '?', frame)}{of}"


def _in_function(owner: Any, target: object) -> tuple[str, bool]:
    if target is owner.__defaults__ or target is owner.__kwdefaults__:
        return f" (default of {owner.__qualname__})", False
    if target is owner.__dict__:
        return "", True
    return f" in {owner.__qualname__}", False


def _in_instance(owner: object, target: object) -> tuple[str, bool]:
    namespace = namespace_of(owner)
    if namespace is target:
        return "", True
    for name, value in (namespace or {}).items():
        if value is target:
            return _attribute(str(name), value)
    for kind in type(owner).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)) and _safe(kind):
                with suppress(AttributeError, RuntimeError, ValueError):
                    if member.__get__(owner) is target:
                        return f".{name}", False
    if target is not None and gradient_of(owner) is target:
        return ".grad", False
    return f" in a {type(owner).__name__}", False


def _safe(kind: type) -> bool:
    """Whether its descriptors only read: those that slots and the interpreter's own classes have."""
    return kind.__module__ in ("builtins", "types", "functools") or "__slots__" in vars(kind)
