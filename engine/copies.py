"""Finds who copies device tensors by the back door: `copy.deepcopy`, `pickle`, `torch.save`.

Such a copy of a module, an optimizer or a cache of tensors takes device memory a second time, or hands
it to another process, without any operator of the program saying so.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeAlias

import torch

from .owners import owner_of
from .references import locals_of, own_part, reached_from
from .standing import on_device, over

Device: TypeAlias = "str | torch.device | Callable[[torch.Tensor], bool] | None"

_METHODS = ("__deepcopy__", "__reduce_ex__")
_METHODS_OF_STORAGE = ("__deepcopy__", "__reduce__")
_DEPTH = 12
_SKIPPED = ("copy", "pickle", "_pickle", "copyreg", "interlock.copies")
"""Modules whose frames are the copying itself."""


@dataclass(frozen=True)
class Copy:
    """One copy of one tensor, or of a storage by itself.

    Attributes:
        kind: What copied it.
        path: Where it stood in the object that was copied, such as `local 'model' of save
            (train.py:8).encoder.weight`.
        shape: Of the tensor; of a storage its bytes.
        dtype: Its type, such as `torch.float32`.
        device: Where it stands.
        nbytes: Bytes of its elements.
        stack: `file:line in function`, innermost first, from the call that copied on.
        thread: The thread that copied.
    """

    kind: Literal["deepcopy", "pickle", "torch.save"]
    path: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    nbytes: int
    stack: tuple[str, ...]
    thread: str

    def __str__(self) -> str:
        what = f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype} on {self.device}"
        lines = [f"{self.kind} of {what}, {self.nbytes} bytes: {self.path}"]
        lines += [("  at " if at == 0 else "  from ") + place for at, place in enumerate(self.stack)]
        return "\n".join(lines)


class Copies:
    """What was copied within `trace_copies`, in order; it may be read meanwhile."""

    def __init__(self) -> None:
        self._found: list[Copy] = []

    def __iter__(self) -> Iterator[Copy]:
        return iter(tuple(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, at: int) -> Copy:
        return self._found[at]

    def __str__(self) -> str:
        if not self._found:
            return "no tensor was copied"
        total = sum(copy.nbytes for copy in self)
        return "\n".join([f"{len(self)} tensor(s) were copied, {total} bytes:", *map(str, self)])

    def _add(self, copy: Copy) -> None:
        self._found.append(copy)


class _Tracer:
    """One `trace_copies` that is under way."""

    def __init__(self, counts: Callable[[torch.Tensor], bool]) -> None:
        self.counts = counts
        self.copies = Copies()


_lock = threading.RLock()
_tracers: list[_Tracer] = []
_patched: list[tuple[type, str, object, object]] = []
"""Class, method, what it was, what it is now: while anybody traces."""
_parts: dict[int, int] = {}
"""Tensors that are part of a parameter which was reported already, with their memory."""
_busy = threading.local()


@contextmanager
def trace_copies(device: Device = None) -> Iterator[Copies]:
    """Report each deep copy and each pickling of a tensor that happens within, on any thread.

    A tensor that other processes get by shared memory (a queue of `torch.multiprocessing`) is not copied and
    not reported; nor is `copy.copy`, which shares the memory.

    Args:
        device: Which tensors: by default those on any device other than the host; "all", or a device or its
            type, or a function from the tensor to a bool.

    Returns:
        The copies, which remain after the block.
    """
    tracer = _Tracer(_predicate(device))
    with _lock:
        if not _tracers:
            _patch()
        _tracers.append(tracer)
    try:
        yield tracer.copies
    finally:
        with _lock:
            _tracers.remove(tracer)
            if not _tracers:
                _restore()


def _predicate(device: Device) -> Callable[[torch.Tensor], bool]:
    if device is None:
        return on_device
    if device == "all":
        return lambda _: True
    if isinstance(device, (str, torch.device)):
        wanted = torch.device(device)
        return lambda one: one.device.type == wanted.type and wanted.index in (None, one.device.index)
    return device


def _patch() -> None:
    # A storage has these from the base of all storages.
    base = torch.UntypedStorage.__mro__[-2]
    todo: list[type] = [torch.Tensor, base]
    while todo:
        kind = todo.pop()
        todo += type.__subclasses__(kind)
        for name in _METHODS if issubclass(kind, torch.Tensor) else _METHODS_OF_STORAGE:
            old = vars(kind).get(name)
            if isinstance(old, types.FunctionType) and all(
                kind is not done or name != m for done, m, *_ in _patched
            ):
                new = _traced(old, name)
                setattr(kind, name, new)
                _patched.append((kind, name, old, new))


def _restore() -> None:
    _parts.clear()
    while _patched:
        kind, name, old, new = _patched.pop()
        # Somebody else may have patched it meanwhile: theirs calls ours, which then only calls on.
        if vars(kind).get(name) is new:
            setattr(kind, name, old)


def _traced(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def traced(copied: Any, *args: Any, **kwargs: Any) -> Any:
        under_way: set[int] = _busy.__dict__.setdefault("copied", set())
        # A subclass's method calls that of its base, a deep copy may go by way of pickling, and that of a
        # tensor goes on to its storage.
        if id(copied) in under_way or (under_way and isinstance(copied, torch.UntypedStorage)):
            return method(copied, *args, **kwargs)
        under_way.add(id(copied))
        try:
            known = _parts.pop(id(copied), None)
            if known is None or known != _memory(copied):
                _record(copied, name)
            made = method(copied, *args, **kwargs)
            if name == "__reduce_ex__" and isinstance(copied, torch.nn.Parameter):
                # It is pickled as a plain tensor over the same memory, which comes next.
                parts = made[1] if isinstance(made, tuple) and len(made) > 1 else ()
                _parts.update((id(one), _memory(one)) for one in parts if isinstance(one, torch.Tensor))
            return made
        finally:
            under_way.discard(id(copied))

    return traced


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError, NotImplementedError):
        return int(tensor.untyped_storage()._cdata)
    return 0


def _record(copied: Any, name: str) -> None:
    tensor = copied if isinstance(copied, torch.Tensor) else over(copied, torch)
    if tensor is None:
        return
    with _lock:
        asked = [tracer for tracer in _tracers if tracer.counts(tensor)]
    if not asked:
        return
    kind, roots, user = _where(name)
    if kind is None:
        return
    made = Copy(
        kind=kind,
        path=_path(copied, roots),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        device=str(tensor.device),
        nbytes=tensor.numel() * tensor.element_size(),
        stack=own_part(user),
        thread=threading.current_thread().name,
    )
    for tracer in asked:
        tracer.copies._add(made)


_Kind: TypeAlias = Literal["deepcopy", "pickle", "torch.save"]


def _where(name: str) -> tuple[_Kind | None, list[tuple[str, object]], tuple[str, ...]]:
    """What copies, the objects that it may have been called with, each with its name, and the stack."""
    kind: _Kind = "deepcopy" if name == "__deepcopy__" else "pickle"
    # From `_record`'s caller on, which is the method that was replaced.
    frame: types.FrameType | None = sys._getframe(3)
    top: types.FrameType | None = None
    if frame is not None and frame.f_code.co_name == "copy" and _module(frame) == "copy":
        return None, [], ()
    outermost: object = None
    stack: list[str] = []
    while frame is not None:
        module, function = _module(frame), frame.f_code.co_name
        if module == "torch.serialization" and function == "save":
            kind, top, outermost = "torch.save", None, dict(locals_of(frame)).get("obj")
        elif module == "copy" and function == "deepcopy" and kind == "deepcopy":
            top, outermost = None, dict(locals_of(frame)).get("x")
        elif module.partition(".")[0] != "torch" and module not in _SKIPPED and top is None:
            top = frame
        frame = frame.f_back
    frame = top
    roots = locals_of(top) if top is not None else []
    where = ""
    if top is not None:
        where = f" of {top.f_code.co_qualname} ({top.f_code.co_filename}:{top.f_lineno})"
    while frame is not None and len(stack) < _DEPTH:
        stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        frame = frame.f_back
    # What was copied is often a variable of the caller; if so, by that name.
    named = [(f"local '{name}'{where}", value) for name, value in roots]
    if outermost is not None:
        same = [(label, value) for label, value in named if value is outermost]
        return kind, same or [(f"the {type(outermost).__name__} that was copied", outermost)], tuple(stack)
    return kind, named, tuple(stack)


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _path(copied: Any, roots: list[tuple[str, object]]) -> str:
    found = [
        reached_from(root, [value], {id(copied)}).get(id(copied), "") if value is not copied else root
        for root, value in roots
    ]
    shortest = min(filter(None, found), key=len, default="")
    if shortest:
        return shortest
    owner = owner_of([copied], time.monotonic() + _SECONDS)
    # What only the copying itself has at hand has no name.
    return owner.path if owner.held == "named" else f"the {type(copied).__name__} that was copied"


_SECONDS = 1.0
"""For the search for the owner of one tensor that stands nowhere in what the caller has."""
