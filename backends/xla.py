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
from .device import WithGenerator, message_of, tensors_on
from .monitors import XLA

DEAD = re.compile(r"Core halted unexpectedly|Accelerator device halted prematurely")
"""What a dead TPU says, and nothing else: a device that is taken for dead costs the weights of the run."""
_UNSEEN = "a graph that holds it alone, so its size is not known: at least this"
_DUE = 2
"""So many steps may need programs of their own: the first update makes the optimizer's state."""


class XlaAdapter(WithGenerator):
    """Trains on the XLA device of this process: a TPU where there is one, else the CPU.

    Args:
        spmd: Spread batches over all devices of this host by their first dimension; parameters stand on
            each. It changes how torch_xla works for the rest of the process.
    """

    name: ClassVar[str] = "xla"
    monitor: ClassVar[Monitor] = XLA
    lazy: ClassVar[bool] = True
    alone: ClassVar[bool] = True
    """What is traced is cut for the whole process: a second run's half-traced step would be cut with it."""

    calls: xla_calls.Calls

    def __init__(self, *, spmd: bool = False) -> None:
        super().__init__(torch.device("xla", 0))
        self.calls = xla_calls.Calls(spmd)
        self._before = xla_calls.Counted(0, 0, 0.0, 0)
        self._first = 0
        """The number of the first tensor that is of the run, and not of before."""
        self._stood = 0
        """How many of before Python knew on the device when it was taken."""
        self._account = _Account()
        self._told = False
        """Whether the account of the last run was asked for: the next one begins anew."""

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
        for tensor in tensors_on(self) if leftover.key is not None else ():
            if self.calls.number(tensor) == leftover.key:
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

    def remarks(self) -> tuple[str, ...]:
        """On what it ran; how many programs were compiled, in which steps; what cut them in two."""
        self._told = True
        return self._account.remarks()

    # -- the hooks ------------------------------------------------------------------------------

    def _take(self) -> DeviceFacts:
        facts = self.calls.begin()
        self._before = self.calls.counted()
        self._first = self.calls.next_number()
        self._stood = len(self._known(before=True)) if self._before.live else 0
        if self._told:
            self._account, self._told = _Account(), False
        self._account.take(facts.name, self._before)
        return facts

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.there(tensor)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.calls.home(tensor)

    def _cut(self, step: int) -> None:
        self._refuse_lost()
        self.calls.cut()
        if self.calls.programs() != self._account.programs:
            self._account.compiled(step, self.calls.counted())

    def _wait(self) -> None:
        # It cuts, too, which moves the generator on: a run that is paused goes on to draw what it would have.
        state = self.calls.random_state()
        self.calls.wait()
        self.calls.set_random_state(state)

    @property
    def allocated(self) -> int:
        """Bytes of the tensors that were made since this adapter last acquired its device, and are alive.

        Slow: all objects of the process are looked at. What only an autograd graph holds is not among them.
        """
        return sum(left.nbytes for left in self._known()) if xla_calls.initialised() else 0

    def _known(self, before: bool = False) -> list[Leftover]:
        """The tensors on the device that Python knows, each once: of the run, or of before."""
        found: dict[int, Leftover] = {}
        for tensor in tensors_on(self):
            number = self.calls.number(tensor)
            if (number < self._first) == before:
                nbytes, shape = tensor.numel() * tensor.element_size(), list(tensor.shape)
                found.setdefault(number, Leftover(nbytes, f"a tensor of shape {shape}", key=number))
        return [found[number] for number in sorted(found)]

    def _measure(self) -> tuple[Leftover, ...] | None:
        counted = self.calls.counted()
        self._account.give_back(counted)
        now = counted.live
        # Of those that stood there before, some may have gone meanwhile, which hides as many new ones.
        gone = self._stood - len(self._known(before=True)) if self._stood else 0
        new = now - (self._before.live - gone)
        # What a graph of before held, and holds no longer, is not known to have gone, and may hide new ones;
        # but those that Python knows are surely of the run.
        if new <= 0 and not self._before.live:
            return ()
        left = self._known()
        unseen = max(new - len(left), 0)
        return (*left, *(Leftover(1, _UNSEEN) for _ in range(unseen)))

    def _give_back(self) -> None:
        self._stood = 0


class _Account:
    """What one run had compiled and read, over all times that it had the device."""

    def __init__(self) -> None:
        self._device = ""
        self._total = xla_calls.Counted(0, 0, 0.0, 0)
        self._before = self._total
        self._steps: dict[int, float] = {}
        """Step, from 1 (0: an evaluation) -> seconds that its new programs took to compile."""
        self._spent = 0.0
        self.programs = 0
        """Programs of the process when it was looked at last."""

    def take(self, device: str, before: xla_calls.Counted) -> None:
        """The device was taken."""
        self._device, self._before = device, before
        self.programs, self._spent = before.programs, before.seconds

    def compiled(self, step: int, now: xla_calls.Counted) -> None:
        """A step, or an evaluation, had programs compiled."""
        self._steps[step] = self._steps.get(step, 0.0) + now.seconds - self._spent
        self.programs, self._spent = now.programs, now.seconds

    def give_back(self, now: xla_calls.Counted) -> None:
        """The device is given back, perhaps not for the last time."""
        total, before = self._total, self._before
        self._total = xla_calls.Counted(
            live=0,
            programs=total.programs + now.programs - before.programs,
            seconds=total.seconds + now.seconds - before.seconds,
            reads=total.reads + now.reads - before.reads,
        )
        self._before = now

    def remarks(self) -> tuple[str, ...]:
        """For the notes of an outcome."""
        total = self._total
        if not self._device:
            return ()
        found = [f"ran as {self._device}"]
        if total.programs:
            found.append(f"XLA compiled {total.programs} programs in {total.seconds:.1f} s")
        late = [step for step in self._steps if step > _DUE]
        if late:
            seconds = sum(self._steps[step] for step in late)
            found.append(
                f"XLA compiled programs as late as in step {_listed(late)}, for {seconds:.1f} s: a batch of "
                "another shape (pad or drop the last one of an epoch), the rest of a window, a learning rate "
                "that became 0 or 1, or adopted parameters make a step another program"
            )
        if total.reads:
            found.append(
                f"values were read from XLA, or computed on the host in its place, {total.reads} times "
                "(`.item()`, `float()`, an `if`, `nonzero`): in a step each of them cuts its program in two"
            )
        return tuple(found)


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
