"""The interface of a backend: what an adapter does for a run, in the order in which a run asks.

The public methods are the guarded calls that the engine makes and that the fault injector
intercepts; adapters override the private hooks behind them. Calls are made by the thread that runs the
lifecycle; but where there is a device (`copies`), those on the way out - `fetch`, `leftovers`, `free`,
releases and actions that have a deadline - are made on a thread of their own, so that one that never
returns blocks nobody.

An adapter freezes what it knows of its device in `acquire`, and is never asked for it again: no
device query after release. Importing, describing and constructing one initialises no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from interlock.specs import Monitor


@dataclass(frozen=True)
class Leftover:
    """One block of device memory that outlived the run.

    Attributes:
        nbytes: Its size in bytes.
        origin: The operation that made it, as far as the backend knows.
        owners: Paths of references that hold it, outermost first (a report fills them in).
        stack: Where it was made, innermost first, as `file:line in function`; empty where nobody noted it.
        key: By which the adapter finds it again, for `holders`.
    """

    nbytes: int
    origin: str
    owners: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
    key: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of a device, frozen when it was acquired."""

    device: torch.device
    name: str
    facts: dict[str, str] = field(default_factory=dict)


class Adapter:
    """Base of all backends. The defaults describe a device that is the host itself.

    Attributes:
        name: How users call it; the entry point's name for third parties.
        monitor: What it adds to the lifecycles.
        copies: Whether there is a device beside the host. Then `fetch` copies, and might block: the
            engine calls it on a thread of its own, under a deadline. If not, nothing is ever
            `resident`.
        lazy: Whether work is only traced until the program is cut. Then reading a value in between is a
            program of its own, to be compiled, and the engine reads after a cut only.
    """

    name: ClassVar[str]
    monitor: ClassVar[Monitor]
    copies: ClassVar[bool] = False
    lazy: ClassVar[bool] = False

    # -- asked before a run; nothing is initialised ------------------------------------------

    @classmethod
    def unavailable(cls) -> str:
        """Why this backend cannot run here, in a few words; empty if it can."""
        return ""

    # -- the run ------------------------------------------------------------------------------

    def acquire(self) -> DeviceFacts:
        """Take the device. May be called again after `free` (suspend and resume)."""
        return self._acquire()

    def place(self, model: nn.Module) -> None:
        """Move every parameter and buffer of a model to the device, tensor by tensor through `move`.

        Parameters may be replaced by new ones, and ties lost; the engine ties them again.
        """
        self._place(model)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; the tensor itself if it is there already."""
        return self._move(tensor)

    def sync(self) -> None:
        """Wait for all work queued on the device; errors of that work are raised here."""
        self._sync()

    def feed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of a batch on the device: as `move`, unless batches are spread over several devices."""
        return self.move(tensor)

    def cut(self, step: int = 0) -> None:
        """End the program traced so far, and let the device begin with it; waits for nothing.

        Called after each micro-batch where the monitor's step automata speak of `sync`, and after each
        batch of an evaluation or a prediction on a device that is `lazy`.

        Args:
            step: That the micro-batch belongs to, from 1; 0 for one of an evaluation or a prediction.
        """
        self._cut(step)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """The values of scalars on the device, in one go: for reports, after a cut.

        Args:
            tensors: Without dimensions.
        """
        return read_together(tensors)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host of a tensor on the device. Changes nothing that anybody can see."""
        return self._fetch(tensor)

    def resident(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor occupies device memory. Asks the tensor only, never the device."""
        return False

    def leftovers(self) -> tuple[Leftover, ...] | None:
        """Device memory of this run that is still alive; `None` if the backend cannot tell."""
        return self._leftovers()

    def holders(self, leftover: Leftover) -> Iterable[object]:
        """The live tensors over a leftover, from which the engine looks for owners."""
        return ()

    def free(self) -> None:
        """Give the device back. Idempotent; also called when `acquire` failed half way."""
        self._free()

    def forget(self) -> None:
        """The run has given the device up, since it could not be given back. Calls nothing on it."""
        return

    def releases(self) -> Mapping[str, Callable[[], None]]:
        """Resource -> how this backend gives it back: idempotent, also for what is half there.

        The engine knows how model and optimizer come home; a backend says it for the device, and
        for each resource that its monitor adds.
        """
        return {"device": self.free}

    def actions(self) -> Mapping[str, Callable[[nn.Module | None], None]]:
        """In-flight phase that the monitor adds -> what is done in it (with the model, if there is one)."""
        return {}

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's own random generator, on the host; `None` if it has none."""
        return None

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Let the device's generator go on from a state that `random_state` returned."""
        return

    def seed(self, seed: int) -> None:
        """Seed the device's own random generator, if it has one.

        Args:
            seed: From 0.
        """
        return

    # -- classification and context -----------------------------------------------------------

    def explain(self, error: BaseException, parts: Mapping[str, Iterable[torch.Tensor]] | None = None) -> str:
        """What is worth knowing about an error, such as what was held when the memory ran out.

        Args:
            error: As raised.
            parts: Name -> the tensors of that part of the run.

        Returns:
            A note for the error; empty if there is nothing to say.
        """
        return ""

    def remarks(self) -> tuple[str, ...]:
        """What is worth saying at the end of a run about what the device did. Asks the device nothing."""
        return ()

    def is_loss_of_device(self, error: BaseException) -> bool:
        """Whether the error says that the device is dead, so that nothing may touch it again."""
        return False

    def session(self) -> AbstractContextManager[object]:
        """Entered by the thread that runs the lifecycle, around everything it does."""
        return nullcontext()

    # -- hooks ----------------------------------------------------------------------------------

    def _acquire(self) -> DeviceFacts:
        return DeviceFacts(torch.device("cpu"), "host")

    def _place(self, model: nn.Module) -> None:
        model._apply(self.move)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _sync(self) -> None:
        return None

    def _cut(self, step: int) -> None:
        return None

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def _leftovers(self) -> tuple[Leftover, ...] | None:
        return ()

    def _free(self) -> None:
        return None


def read_together(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The values of scalars; of those that stand on one device by one copy."""
    if len({tensor.device for tensor in tensors}) != 1:
        return [float(tensor) for tensor in tensors]
    values: list[float] = torch.stack(list(tensors)).tolist()
    return values
