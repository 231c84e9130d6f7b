"""Lending the device in mid-run: what is needed to go on where a run was suspended.

Suspended, a run has nothing on the device: model and optimizer state came home as they do at the end, but
the optimizer lives on, bound to the parameters on the host. Resumed, the model is placed anew; where
placement made new Parameters the optimizer follows to them, and its state goes back to where it stood.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from interlock.backends.adapter import Adapter

from .residency import Registry, rebind, replace_in_optimizer


@dataclass
class Resting:
    """What stood on the device when a run was suspended.

    Attributes:
        state: Host copies of the optimizers' tensors that stood there, by id.
    """

    state: dict[int, torch.Tensor] = field(default_factory=dict)

    def note(self, copies: dict[int, torch.Tensor]) -> None:
        """Remember the copies that took the place of tensors on the device."""
        self.state.update({id(copy): copy for copy in copies.values()})


def place_again(registry: Registry, adapter: Adapter, resting: Resting) -> None:
    """Place a model anew, and let its optimizers follow.

    Args:
        registry: Of the model as it stands on the host, with its optimizers; not placed yet.
        adapter: Acquired.
        resting: As noted when the run was suspended.
    """
    model: nn.Module = registry.model
    before = {id(p): p for p in model.parameters()}  # kept alive, so that ids stay theirs
    adapter.place(model)
    registry.after_placement()
    placed = registry.placed_for(before.values())
    states: dict[int, Any] = {}
    # All of it first: whoever walks through what an optimizer keeps passes over what cannot be replaced.
    moved = {key: adapter.move(tensor) for key, tensor in resting.state.items()}
    for optimizer in registry.family():
        if placed:
            rebind(optimizer, placed, states)
        if moved:
            replace_in_optimizer(optimizer, lambda tensor: moved.get(id(tensor), tensor))
