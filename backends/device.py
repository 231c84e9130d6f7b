"""What adapters of a device beside the host have in common: one run each, the latch of lost devices.

The adapter of such a device says how the device is taken, copied to, waited for, measured and given
back; the checks around that stand here. Nothing here calls a device: what is asked of a tensor or of
an exception is known on the host.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import nn

from .adapter import Adapter, DeviceFacts, Leftover
from .errors import DeviceInUse, DeviceLost, DeviceUnavailable

_lost: dict[torch.device, str] = {}
"""Device -> what killed it. A process cannot get such a device back, so nothing is ever taken out."""
_here: dict[torch.device, weakref.WeakSet[DeviceAdapter]] = {}
"""Device -> the adapters of this process that have it now."""
_lock = threading.Lock()


class DeviceAdapter(Adapter):
    """Base of the adapters of devices that have a memory of their own.

    Args:
        device: Which one; nothing is initialised.
    """

    copies: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    """Whether two runs of one process cannot have the device at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._taken = False
        self._beside = False
        """Whether another run of this process had the device, too, at any time since `acquire`."""

    # -- to be said by each ---------------------------------------------------------------------

    def _take(self) -> DeviceFacts:
        raise NotImplementedError

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor without a graph."""
        raise NotImplementedError

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        """A complete copy in plain host memory of a tensor without a graph."""
        raise NotImplementedError

    def _wait(self) -> None:
        raise NotImplementedError

    def _measure(self) -> tuple[Leftover, ...] | None:
        raise NotImplementedError

    def _give_back(self) -> None:
        raise NotImplementedError

    def loss(self, error: BaseException) -> str:
        """Why this one error, looked at alone, means that the device is dead; empty if it does not."""
        return ""

    # -- what the engine asks -------------------------------------------------------------------

    @property
    def lost(self) -> str:
        """What killed the device in this process; empty while it lives."""
        return _lost.get(self.device, "")

    def resident(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor stands on this device; another device of the same kind does not count."""
        return tensor.device == self.device

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """None, unless the adapter knows where the leftover stands."""
        return ()

    def actions(self) -> Mapping[str, Callable[[nn.Module | None], None]]:
        """The queue of the device is waited for, in mid-run and before anything moves home."""
        return {"syncing": lambda _: self.sync(), "flushing": lambda _: self.sync()}

    def is_loss_of_device(self, error: BaseException) -> bool:
        """Whether the error, or one that it came from, says that the device is dead.

        If so that is remembered for the whole process: from then on every adapter refuses the device.
        """
        for one in causes(error):
            if issubclass(type(one), DeviceLost):
                return True
            reason = self.loss(one)
            if reason:
                with _lock:
                    _lost.setdefault(self.device, reason)
                return True
        return False

    def explain(self, error: BaseException, parts: Mapping[str, Iterable[torch.Tensor]] | None = None) -> str:
        """What is worth adding to an error that came from the device: a note for its reader.

        Must be asked before the error's frames are cleared, while what they hold is still there.

        Args:
            error: Any.
            parts: Name -> tensors of the run, such as `parameters`, for a report on what was held.

        Returns:
            The note; empty if there is nothing to say.
        """
        return ""

    # -- the hooks ------------------------------------------------------------------------------

    def _acquire(self) -> DeviceFacts:
        self._refuse_lost()
        why = self.unavailable()
        if why:
            raise DeviceUnavailable(
                f"backend '{self.name}' cannot be used here: {why}. Choose another one: 'auto' takes the "
                "best that is there, 'cpu' always works"
            )
        with _lock:
            if self._taken:
                raise DeviceInUse(
                    f"this adapter of backend '{self.name}' is in another run, which has not given the "
                    "device back. Name the backend instead of passing an adapter, or make one for each run"
                )
            others = _here.setdefault(self.device, weakref.WeakSet())
            if self.alone and others:
                raise DeviceInUse(
                    f"another run of this process has the device of backend '{self.name}', and cannot share "
                    "it: wait until it has ended, or pause it with `run.pause(release=True)`"
                )
            self._beside = bool(others)
            for other in others:
                other._beside = True
            others.add(self)
            # Before anything is initialised: `free` must give back what is half there, too.
            self._taken = True
        return self._take()

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.resident(tensor):
            return tensor
        self._refuse_lost()
        with torch.no_grad():
            moved = self._there(tensor.detach())
        return moved.requires_grad_(tensor.requires_grad) if tensor.is_leaf else moved

    def _sync(self) -> None:
        self._refuse_lost()
        self._wait()

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self._refuse_lost()
        return self._home(tensor.detach())

    def _leftovers(self) -> tuple[Leftover, ...] | None:
        return None if self.lost else self._measure()

    def _free(self) -> None:
        if not self._taken:
            return
        if not self.lost:
            self._give_back()
        with _lock:
            _here[self.device].discard(self)
            self._taken = False

    def forget(self) -> None:
        """Other runs may have the device, as far as this adapter goes."""
        with _lock:
            _here.get(self.device, weakref.WeakSet()).discard(self)
            self._taken = False

    def _alone(self) -> bool:
        """Whether no other run of this process has the device now."""
        with _lock:
            return all(other is self for other in _here.get(self.device, ()))

    def _refuse_lost(self) -> None:
        if self.lost:
            raise DeviceLost(
                f"device '{self.device}' was lost in this process ({self.lost}), and nothing touches it any "
                "more. Start a new process, or go on with backend 'cpu'"
            )


class WithGenerator(DeviceAdapter):
    """Base of the adapters of devices that have a random generator of their own.

    Attributes:
        calls: What is asked of the device; of its generator by `random_state`, `set_random_state`, `seed`.
    """

    calls: Any

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's generator, on the host; `None` while no device is acquired."""
        if not self._taken:
            return None
        self._refuse_lost()
        state: torch.Tensor = self.calls.random_state()
        return state

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Let the device's generator go on from a state that `random_state` gave."""
        self._refuse_lost()
        if state is not None:
            self.calls.set_random_state(state)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        self._refuse_lost()
        self.calls.seed(seed)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that it came from: causes, contexts, members of groups, each once.

    Read past the exception's own class, which is the user's and may raise.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [_CAUSE.__get__(one), _CONTEXT.__get__(one)]
        if issubclass(type(one), BaseExceptionGroup):
            todo += _MEMBERS.__get__(one)


_CAUSE = vars(BaseException)["__cause__"]
_CONTEXT = vars(BaseException)["__context__"]
_ARGS = vars(BaseException)["args"]
_MEMBERS = vars(BaseExceptionGroup)["exceptions"]


def message_of(error: BaseException) -> str:
    """The text that an exception was made with, whatever its class makes of `str`."""
    args = _ARGS.__get__(error)
    return args[0] if args and type(args[0]) is str else ""


_KINDS = (torch.Tensor, nn.Parameter)


def tensors_on(adapter: Adapter) -> Iterator[torch.Tensor]:
    """The tensors that Python knows of and that stand on the device of an adapter.

    Slow: it looks at every object of the process. Subclasses of `Tensor` are left alone, since asking
    them may run code of their own.
    """
    for thing in gc.get_objects():
        if stands_on(adapter, thing):
            yield thing


def stands_on(adapter: Adapter, thing: Any) -> bool:
    """Whether any object at all is a tensor on the device of an adapter.

    The process may have tensors of kinds that the adapter never met, such as sparse ones, which have no
    storage: what cannot be asked does not stand there.
    """
    if type(thing) not in _KINDS:  # nearly all of them
        return False
    try:
        return adapter.resident(thing)
    except (RuntimeError, NotImplementedError):
        return False


def bytes_of(adapter: Adapter, tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that tensors take on the device of an adapter; memory in common counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # A sparse tensor has no one storage; it counts as nothing rather than ending a report.
        with suppress(RuntimeError, NotImplementedError):
            if adapter.resident(tensor):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def amount(nbytes: int) -> str:
    """A number of bytes in words: `1.5 GiB`."""
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def forget_loss(device: torch.device) -> None:
    """Let a device be taken again: for a simulated one in whose place a new one was put."""
    with _lock:
        _lost.pop(device, None)
