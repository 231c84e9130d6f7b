"""What a suite watches a run through: the calls of its backend, and what a process has once.

`Watch` makes an adapter one that notes what it is asked in an order in which nobody may ask it, strikes
where a fault was drawn, and can be told that its device is lost. `Process` reads what a run must leave
as it was; both only look, and repair nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from interlock.backends import faults
from interlock.backends.adapter import Adapter, DeviceFacts, Leftover
from interlock.backends.device import tensors_on
from interlock.backends.faults import Fault, inject

ERRORS: dict[str, type[BaseException]] = {
    "RuntimeError": RuntimeError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
}
"""What a fault raises, by name."""
FAULT_CALLS = (*(call for call in faults.CALLS if call != "cut"), "update")
"""Where a fault strikes: a call that every backend gets, or the update of the optimizer."""


class Lost(Exception):
    """By this error the device of a run is lost."""


class RunFault(NamedTuple):
    """Where a fault strikes a run.

    Attributes:
        call: One of `FAULT_CALLS`.
        moment: `before` or `after`.
        nth: Which call, counted from 1.
        error: A key of `ERRORS`.
        times: How many calls from there on.
    """

    call: str
    moment: str
    nth: int
    error: str
    times: int


class _Watched(Adapter):
    """Mixed in before the adapter's own class, and before the fault injector."""

    watch: Watch

    def acquire(self) -> DeviceFacts:
        self.watch.asked("acquire")
        self.watch.taken = True
        return super().acquire()

    def place(self, model: nn.Module) -> None:
        self.watch.asked("place")
        super().place(model)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.watch.asked("move")
        return super().move(tensor)

    def cut(self, step: int = 0) -> None:
        self.watch.asked("cut")
        super().cut(step)

    def sync(self) -> None:
        self.watch.asked("sync")
        super().sync()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.watch.asked("fetch")
        return super().fetch(tensor)

    def leftovers(self) -> tuple[Leftover, ...] | None:
        self.watch.asked("leftovers")
        return super().leftovers()

    def random_state(self) -> torch.Tensor | None:
        self.watch.asked("random_state")
        return super().random_state()

    def set_random_state(self, state: torch.Tensor | None) -> None:
        self.watch.asked("set_random_state")
        super().set_random_state(state)

    def free(self) -> None:
        self.watch.asked("free")
        super().free()
        self.watch.taken = False

    def is_loss_of_device(self, error: BaseException) -> bool:
        if isinstance(error, Lost) or super().is_loss_of_device(error):
            self.watch.lost = True
        return self.watch.lost


class Watch:
    """Looks at what one adapter is asked for, from run to run.

    Attributes:
        adapter: The one that was given, of a subclass now.
        copies: Whether it has a device beside the host.
        taken: Whether its device was acquired, and not given back.
        lost: Whether it was lost.
        wrong: What it was asked when nobody might ask, in words.
        calls: How often it was asked anything.

    Args:
        adapter: Not in use.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.copies = adapter.copies
        self.taken = self.lost = False
        self.wrong: list[str] = []
        self.calls = 0
        faulty: Any = inject(adapter)
        faulty.__class__ = type(f"Watched{type(faulty).__name__}", (_Watched, type(faulty)), {})
        faulty.watch = self
        self.adapter: Any = faulty

    def asked(self, call: str) -> None:
        """Note a call."""
        self.calls += 1
        if self.lost:
            self.wrong.append(f"'{call}' was called although the device is lost")
        elif call == "free" and not self.taken:
            self.wrong.append("the device was given back twice")
        elif call != "acquire" and not self.taken:
            self.wrong.append(f"'{call}' was called although the device was given back")

    def begin(self, fault: RunFault | None, make: Callable[[str], BaseException]) -> None:
        """Begin a run: what struck the last one does not strike it.

        Args:
            fault: What strikes this one.
            make: Makes the error of a name, and notes that it struck.
        """
        self.wrong, self.taken, self.calls = [], False, 0
        self.adapter.counts = {}
        self.adapter.faults = ()
        if fault is not None and fault.call in faults.CALLS:
            call, moment, nth, error, times = fault
            self.adapter.faults = (Fault(call, moment, nth, lambda: make(error), times),)

    def resident(self) -> int:
        """Bytes of tensors on the device, by the device's own account where it keeps one.

        Without one, all objects of the process are looked at, which is slow.
        """
        if not self.copies:
            return 0
        allocated = getattr(self.adapter, "allocated", None)
        if isinstance(allocated, int):
            return allocated
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_on(self.adapter)}
        return sum(sizes.values())


class Process:
    """What a process has once, as it is now."""

    def __init__(self) -> None:
        self.threads = {thread.ident for thread in threading.enumerate()}
        self.switches = _switches()

    def differs(self) -> Iterator[str]:
        """In what the process is other than it was then; a thread that is about to end is waited for."""
        now = _switches()
        for name, before in self.switches.items():
            if now[name] != before:
                yield f"{name} was {before}, and is {now[name]}"
        for thread in threading.enumerate():
            if thread.ident not in self.threads and thread is not threading.current_thread():
                thread.join(1.0)
                if thread.is_alive():
                    yield f"a thread of the run is still alive: {thread.name}"

    def put_back(self) -> None:
        """Set the switches as they were, so that one test that failed does not make others fail."""
        before: dict[str, Any] = self.switches
        torch.set_default_dtype(before["the default dtype"])
        torch.use_deterministic_algorithms(before["'deterministic algorithms'"])
        torch.set_grad_enabled(before["'gradients enabled'"])
        torch.set_num_threads(before["the number of threads of an operator"])
        torch.__future__.set_overwrite_module_params_on_conversion(before["'overwrite parameters'"])
        torch.__future__.set_swap_module_params_on_conversion(before["'swap parameters'"])


def _switches() -> dict[str, object]:
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "'deterministic algorithms'": torch.are_deterministic_algorithms_enabled(),
        "'gradients enabled'": torch.is_grad_enabled(),
        "'inference mode'": torch.is_inference_mode_enabled(),
        "'anomaly detection'": torch.is_anomaly_enabled(),
        "'autocast on cpu'": torch.is_autocast_enabled("cpu"),
        "'autocast on cuda'": torch.is_autocast_enabled("cuda"),
        "the number of threads of an operator": torch.get_num_threads(),
        "'overwrite parameters'": torch.__future__.get_overwrite_module_params_on_conversion(),
        "'swap parameters'": torch.__future__.get_swap_module_params_on_conversion(),
        "the number of dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
