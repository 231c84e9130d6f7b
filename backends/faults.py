"""The adapter-level fault injector: makes one backend call fail, before it does its work or after.

`faulty(adapter_class, fault)` returns an adapter of a subclass whose public calls count
themselves. "Half done" means inside: after the first of the tensors that `place`, or a
homecoming, handles one by one. The same injector works on every adapter, since all of them move
tensors through `move` and `fetch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .adapter import Adapter, DeviceFacts, Leftover

CALLS = ("acquire", "place", "move", "cut", "sync", "fetch", "leftovers", "free")
"""The calls that can be made to fail."""
MOMENTS = ("before", "after")


@dataclass
class Fault:
    """Where to fail, and how.

    Attributes:
        call: One of `CALLS`.
        moment: `before` or `after` the call does its work. Half done inside a call of several steps is a
            fault in the n-th `move` or `fetch` inside it.
        nth: Which call of that name, counted from 1.
        error: Makes the exception to raise.
        times: For how many calls from the n-th on (2 makes the second attempt fail as well).
        block: Instead of raising, block until this event is set.

    Raises:
        ValueError: There is no such call or moment, so it would never strike.
    """

    call: str
    moment: str = "before"
    nth: int = 1
    error: Callable[[], BaseException] = lambda: RuntimeError("injected")
    times: int = 1
    block: threading.Event | None = None
    struck: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.call not in CALLS or self.moment not in MOMENTS:
            raise ValueError(
                f"a fault {self.moment!r} {self.call!r} would never strike: the calls are "
                f"{', '.join(CALLS)}, the moments {' and '.join(MOMENTS)}"
            )


class _Faulty(Adapter):
    """Mixed in before the adapter's own class."""

    faults: tuple[Fault, ...]
    counts: dict[str, int]

    def _strike(self, call: str, moment: str, count: int) -> None:
        for fault in self.faults:
            if fault.call == call and fault.moment == moment and fault.nth <= count < fault.nth + fault.times:
                fault.struck += 1
                if fault.block is not None:
                    fault.block.wait()
                else:
                    raise fault.error()

    def _call(self, call: str, *args: Any) -> Any:
        self.counts[call] = count = self.counts.get(call, 0) + 1
        self._strike(call, "before", count)
        result = getattr(super(), call)(*args)
        self._strike(call, "after", count)
        return result

    def acquire(self) -> DeviceFacts:
        return self._call("acquire")  # type: ignore[no-any-return]

    def place(self, model: nn.Module) -> None:
        self._call("place", model)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._call("move", tensor)  # type: ignore[no-any-return]

    def cut(self, step: int = 0) -> None:
        self._call("cut", step)

    def sync(self) -> None:
        self._call("sync")

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._call("fetch", tensor)  # type: ignore[no-any-return]

    def leftovers(self) -> tuple[Leftover, ...] | None:
        return self._call("leftovers")  # type: ignore[no-any-return]

    def free(self) -> None:
        self._call("free")


def faulty(adapter_class: type[Adapter], *faults: Fault) -> Adapter:
    """An adapter of a subclass of `adapter_class` in which the faults strike.

    Args:
        adapter_class: Any adapter that can be made without arguments.
        faults: Independent of each other; the first one that matches a call strikes.

    Returns:
        The adapter; its `counts` say how often each call was made, so that a first run without
        faults enumerates every point at which one can be placed.
    """
    return inject(adapter_class(), *faults)


def inject(made: Adapter, *faults: Fault) -> Adapter:
    """The same for an adapter that was made already, and that is changed by it.

    Args:
        made: Not in use.
        faults: As for `faulty`.
    """
    adapter: Any = made
    namespace: dict[str, Any] = {"copies": True, "name": made.name}
    adapter.__class__ = type(f"Faulty{type(made).__name__}", (_Faulty, type(made)), namespace)
    adapter.faults = faults
    adapter.counts = {}
    return adapter  # type: ignore[no-any-return]
