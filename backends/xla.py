"""XLA through torch_xla: a lazy device, on a TPU or, for tests, on the host's CPU.

Operations are only traced; a *cut* compiles what was traced since the last one into a program and has it
run. So each micro-batch's program is cut where it ends, once more before anything moves home, and no value
is read in between. Placement makes new Parameters. Everything that is asked of torch_xla stands in
`xla_calls.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from interlock.specs import Monitor

from . import xla_calls
from .adapter import DeviceFacts, Leftover
from .device import DeviceAdapter, message_of, tensors_on
from .monitors import XLA

DEAD = re.compile(
    r"Core halted unexpectedly|Accelerator device halted prematurely|device or resource busy|"
    r"UNAVAILABLE: (?:Socket closed|Connection reset|TPU)|TPU initialization failed"
)
"""What a dead TPU says; later calls fail as well."""
_UNSEEN = "a graph that holds it alone, so its size is not known: at least this"
_DUE = 2
"""So many micro-batches may need programs of their own: the first update makes the optimizer's state."""


class XlaAdapter(DeviceAdapter):
    """Trains on the XLA device of this process: a TPU where there is one, else the CPU.

    Args:
        spmd: Spread batches over all devices of this host by their first dimension; parameters stand on
            each. It changes how torch_xla works for the rest of the process.
    """

    name: ClassVar[str] = "xla"
    monitor: ClassVar[Monitor] = XLA
    lazy: ClassVar[bool] = True

    def __init__(self, *, spmd: bool = False) -> None:
        super().__init__(torch.device("xla", 0))
        self.calls = xla_calls.Calls(spmd)
        self._before = xla_calls.Counted(0, 0, 0.0, 0)
        self._first = 0
        """The number of the first tensor that is of the run, and not of before."""
        self._stood = 0
        """How many of before Python knew on the device when it was taken."""
        self._cuts = 0
        self._compiled: list[int] = []
        """The micro-batches of training after which programs were compiled."""
        self._programs = 0
        self._remarks: tuple[str, ...] = ()

    @classmethod
    def unavailable(cls) -> str:
        """Why torch_xla cannot be used here; imports nothing of it."""
        return xla_calls.unavailable()

    def session(self) -> AbstractContextManager[object]:
        """The backward pass is traced on the run's own thread.

        Autograd counts devices when it first runs in a process, and ends in an internal error for those that
        came later; so a process could not train on the CPU first. The threads would gain nothing either:
        what is traced waits for no device.
        """
        return _OneThread()

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """Found by walking all tensors; those that only an autograd graph holds are not among them."""
        if isinstance(leftover, _Left):
            for tensor in tensors_on(self):
                if self.calls.number(tensor) == leftover.number:
                    yield tensor

    def loss(self, error: BaseException) -> str:
        """By the text of a `RuntimeError`: torch_xla has no class of its own."""
        found = DEAD.search(message_of(error)) if issubclass(type(error), RuntimeError) else None
        return found[0] if found else ""

    def feed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of a batch, spread over all devices where there are several."""
        if not self.calls.spmd or self.resident(tensor):
            return self.move(tensor)
        self._refuse_lost()
        return self.calls.spread(tensor.detach())

    def read(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """By one copy; stacking them on the device would be a program for each number of them."""
        self._refuse_lost()
        return self.calls.read(tensors) if tensors else []

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's generator as eight bytes; `None` while no device is acquired."""
        if not self._taken:
            return None
        self._refuse_lost()
        return torch.tensor(list(self.calls.random_state().to_bytes(8, "little")), dtype=torch.uint8)

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Let the device's generator go on from a state that `random_state` gave."""
        self._refuse_lost()
        if state is not None:
            self.calls.set_random_state(int.from_bytes(bytes(state.tolist()), "little"))

    def seed(self, seed: int) -> None:
        """Seed the device's generator, which `torch.manual_seed` leaves alone."""
        self._refuse_lost()
        self.calls.set_random_state(seed)

    def remarks(self) -> tuple[str, ...]:
        """How many programs were compiled, when and for how long, and what cut them in two."""
        return self._remarks

    # -- the hooks ------------------------------------------------------------------------------

    def _take(self) -> DeviceFacts:
        facts = self.calls.begin()
        self._before = self.calls.counted()
        self._first = self.calls.next_number()
        self._stood = len(self._known(before=True)) if self._before.live else 0
        self._cuts, self._compiled, self._programs = 0, [], self._before.programs
        self._remarks = ()
        return facts

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.there(tensor)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.home(tensor)

    def _cut(self, serving: bool) -> None:
        self._refuse_lost()
        self.calls.cut()
        self._cuts += not serving
        programs = self.calls.programs()
        if programs != self._programs:
            self._programs = programs
            if not serving:
                self._compiled.append(self._cuts)

    def _wait(self) -> None:
        self.calls.wait()

    @property
    def allocated(self) -> int:
        """Bytes of the tensors that were made since this adapter last acquired its device, and are alive.

        Slow: all objects of the process are looked at. What only an autograd graph holds is not among them.
        """
        return sum(left.nbytes for left in self._known()) if xla_calls.initialised() else 0

    def _known(self, before: bool = False) -> list[_Left]:
        """The tensors on the device that Python knows, each once: of the run, or of before."""
        found: dict[int, _Left] = {}
        for tensor in tensors_on(self):
            number = self.calls.number(tensor)
            if (number < self._first) == before:
                found.setdefault(number, _Left.of(number, tensor))
        return [found[number] for number in sorted(found)]

    def _measure(self) -> tuple[Leftover, ...] | None:
        self._remark()
        now = self.calls.counted().live
        # Of those that stood there before, some may have gone meanwhile, which hides as many new ones.
        gone = self._stood - len(self._known(before=True)) if self._stood else 0
        new = now - (self._before.live - gone)
        if new <= 0:
            return ()
        if self._beside:
            return None
        left = self._known()
        unseen = max(new - len(left), 0)
        return (*left, *(Leftover(1, _UNSEEN) for _ in range(unseen)))

    def _give_back(self) -> None:
        self._stood = 0

    def _remark(self) -> None:
        done = self.calls.counted()
        programs = done.programs - self._before.programs
        if not programs:
            return
        found = [f"XLA compiled {programs} programs in {done.seconds - self._before.seconds:.1f} s"]
        late = [cut for cut in self._compiled if cut > _DUE]
        if late:
            found.append(
                f"of these some late, after micro-batches {_listed(late)} of {self._cuts}: a batch of "
                "another shape is a program of its own. Pad or drop the last batch of an epoch (drop_last)"
            )
        reads = done.reads - self._before.reads
        if reads:
            found.append(
                f"values were read from XLA one by one {reads} times (`.item()`, `float()`, an `if`): in a "
                "step each of them cuts its program in two"
            )
        self._remarks = tuple(found)


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more


class _OneThread:
    """Not by torch's own manager, which switches when it is made, and not when it is entered."""

    def __enter__(self) -> None:
        self._before = torch.autograd.is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_multithreading_enabled(self._before)


class _Left(Leftover):
    """A tensor that was left, by its number."""

    number: int

    @classmethod
    def of(cls, number: int, tensor: torch.Tensor) -> _Left:
        left = cls(tensor.numel() * tensor.element_size(), f"a tensor of shape {list(tensor.shape)}")
        object.__setattr__(left, "number", number)
        return left
