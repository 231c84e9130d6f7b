"""A small training job that watches its own tensors and fails where it is told to.

A library is given the pieces - model, optimizer, data, loss - and the probe keeps count: which of the
run's storages are alive (by weak references), and how many updates were made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from bench.workloads import seed
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

STEPS = 4
"""Batches of an epoch."""

STRIKE = 3
"""The time at which a fault strikes, from 1: by then there are gradients and optimizer state."""

STEP_TENSORS = ("batch", "output", "loss")
KINDS = (*STEP_TENSORS, "gradient", "parameter", "optimizer state")


class Probe:
    """One job, and what is known of it.

    Args:
        place: Where it fails: `data`, `forward`, `backward`, `update`, `validation`, ...; empty for never.
        error: What is raised there.
        mistake: What is wrong with the job: see `wiring.py`; empty for nothing.
        keeps: Whether `keep` holds the model, to look at its weights later.
    """

    def __init__(
        self, place: str = "", error: BaseException | None = None, mistake: str = "", keeps: bool = False
    ) -> None:
        self.place = place
        self.error = error
        self.mistake = mistake
        self.updates = 0
        self.model: nn.Module | None = None
        self._keeps = keeps
        self._visits = 0
        self._losses = 0
        self._watched: dict[str, list[StorageWeakRef]] = {kind: [] for kind in KINDS}

    # -- what a library is given ------------------------------------------------------------------

    def build(self) -> nn.Module:
        """The model, with the same weights each time."""
        seed()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        if self.mistake == "frozen":
            model[0].weight.requires_grad_(False)
        for parameter in model.parameters():
            self.watch("parameter", parameter)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, or the wrong one if that is the mistake."""
        self.strike("optimizer", at=1)
        parameters = list(model.parameters())
        if self.mistake == "foreign":
            parameters = list(copy.deepcopy(model).parameters())
        if self.mistake == "missing":
            parameters = parameters[1:]
        return Watched(parameters, self)

    def data(self, place: str = "data") -> Data:
        """Batches that exist only while somebody holds them."""
        return Data(self, place)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        self.strike("forward")
        self._losses += 1
        if self.mistake == "replaced" and self._losses == STRIKE and self.model is not None:
            self._replace(self.model)
        output = model(batch[0])
        if self.place == "backward" and output.requires_grad:
            output.register_hook(self._strike_backward)
        if self.mistake == "detached":  # as where something on the way goes through NumPy
            output = output.detach().requires_grad_()
        loss = functional.cross_entropy(output, batch[1])
        if self.mistake == "nan":
            loss = loss * float("nan")
        self.watch("output", output)
        self.watch("loss", loss)
        return loss

    def _replace(self, model: nn.Module) -> None:
        """Put a new Parameter of the same value in the place of one that trains."""
        old = model.get_parameter("0.weight")
        model.get_submodule("0").weight = nn.Parameter(old.detach().clone())

    def _strike_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.strike("backward")
        return gradient

    def keep(self, model: nn.Module) -> None:
        """Told of the model that trains."""
        if self._keeps:
            self.model = model

    # -- faults -------------------------------------------------------------------------------------

    def strike(self, place: str, at: int = STRIKE) -> None:
        """Raise the error if this is the place, and it is the time."""
        if place == self.place and self.error is not None:
            self._visits += 1
            if self._visits == at:
                raise self.error

    def disarm(self) -> None:
        """No fault from now on, and nothing of it is held."""
        self.place, self.error, self.updates = "", None, 0

    # -- what is alive --------------------------------------------------------------------------------

    def watch(self, kind: str, tensor: torch.Tensor | None) -> None:
        """Take note of a tensor's storage, without holding it."""
        if tensor is not None:
            self._watched[kind].append(StorageWeakRef(tensor.untyped_storage()))

    def alive(self) -> list[str]:
        """The kinds of tensors of which at least one is alive."""
        return [kind for kind, refs in self._watched.items() if any(not ref.expired() for ref in refs)]


class Data:
    """Four batches, made anew for each epoch; nothing here keeps one."""

    def __init__(self, probe: Probe, place: str) -> None:
        self._probe = probe
        self._place = place

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(STEPS):
            self._probe.strike(self._place, at=1 if self._place == "validation" else STRIKE)
            yield self._batch(number)

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        batch = (
            torch.randn(16, 8, generator=generator),
            torch.randint(0, 4, (16,), generator=generator),
        )
        self._probe.watch("batch", batch[0])
        return batch


class Watched(torch.optim.AdamW):
    """AdamW that tells the probe of gradients, state and updates."""

    def __init__(self, parameters: list[nn.Parameter], probe: Probe) -> None:
        super().__init__(parameters, 1e-2, fused=False)
        self._probe = probe

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:  # Lightning computes the loss in here
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._probe.watch("gradient", parameter.grad)
        self._probe.strike("update")
        super().step()
        for state in self.state.values():
            self._probe.watch("optimizer state", state["exp_avg"])
        self._probe.updates += 1
        return loss
