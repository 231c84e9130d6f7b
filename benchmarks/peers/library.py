"""What a library is to the probe, and the step that its user writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .probe import Probe

LOOP = ("data", "forward", "backward", "update", "validation")
"""Where every job can fail."""

ORDERS = ("hasty", "twice", "unzeroed")
"""Mistakes in the order of a step: an update before any backward, two for one backward, never zeroing."""


class Library(ABC):
    """One library.

    Attributes:
        name: For people.
        places: Where user code that it calls can fail.
        writes_steps: Whether its user can write zeroing, backward and update, and so misplace them.
    """

    name: ClassVar[str]
    places: ClassVar[tuple[str, ...]] = LOOP
    writes_steps: ClassVar[bool] = True

    @abstractmethod
    def handle(self, probe: Probe) -> Any:
        """What the user keeps."""

    @abstractmethod
    def run(self, handle: Any, probe: Probe) -> None:
        """Train for an epoch, then validate."""


def own_step(
    probe: Probe,
    model: nn.Module,
    batch: Any,
    zero: Callable[[], object],
    backward: Callable[[torch.Tensor], object],
    update: Callable[[], object],
) -> torch.Tensor:
    """A step as its user writes it: in order, unless that is the mistake.

    Args:
        probe: Says what the mistake is.
        model: Trains.
        batch: One.
        zero: Drops the gradients, as this library wants it called.
        backward: Of the loss.
        update: Of the optimizer.

    Returns:
        The loss.
    """
    if probe.mistake != "unzeroed":
        zero()
    loss = probe.loss(model, batch)
    if probe.mistake == "hasty":
        update()
    backward(loss)
    if probe.mistake != "hasty":
        update()
    if probe.mistake == "twice":
        update()
    return loss
