"""What of a run stands on the device, and how it comes home with every identity kept.

The `Registry` walks modules and optimizers; it never keeps a weak reference to a tensor (that
blocks `torch.utils.swap_tensors`). Before placement it notes which object stands in which slot
(module and attribute); so ties are known, and where placement makes new Parameters the original
objects go back into their slots at the end, with the trained values: whoever held
`model.weight` before the run holds the trained one after it.

Homecoming copies everything first and commits everything then. Copies may block and run under a
deadline; commits are assignments on the host, and can be repeated after an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.backends.adapter import Adapter

from .batches import convert, tensors


@dataclass(frozen=True)
class Slot:
    """One place in a module where a tensor stands.

    Attributes:
        owner: The module.
        attribute: Its name there.
        table: The module's dictionary it stands in: parameters, buffers, or plain attributes.
        name: The full dotted name, for messages.
    """

    owner: nn.Module
    attribute: str
    table: str
    name: str

    @property
    def value(self) -> Any:
        """What stands there now."""
        return getattr(self.owner, self.table)[self.attribute]

    def put(self, value: Any) -> None:
        """Let another object stand there."""
        getattr(self.owner, self.table)[self.attribute] = value


_BASE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


def slots(model: nn.Module) -> Iterator[Slot]:
    """Every slot of a model: parameters, buffers, and plain attributes that contain tensors.

    Tied tensors appear once for each slot in which they stand.
    """
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for table in ("_parameters", "_buffers"):
            for attribute, value in list(getattr(module, table).items()):
                if value is not None:
                    yield Slot(module, attribute, table, dot + attribute)
        for attribute, value in list(vars(module).items()):
            if attribute not in _BASE and any(True for _ in tensors(value)):
                yield Slot(module, attribute, "__dict__", dot + attribute)


class Registry:
    """The tensors of one run.

    Args:
        model: On the host, before placement.
        adapter: The backend.
    """

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        self.model = model
        self.optimizers: list[Optimizer] = []
        self.identity_lost: list[str] = []
        self._adapter = adapter
        self._originals = {slot.name: slot.value for slot in self._tensors_of(model)}
        self._home: dict[int, torch.Tensor] = {}
        self._placed: list[torch.Tensor] = []
        self.ties = _ties(self._originals)

    @staticmethod
    def _tensors_of(model: nn.Module) -> Iterator[Slot]:
        return (slot for slot in slots(model) if slot.table != "__dict__")

    def after_placement(self) -> None:
        """Tie again what was tied, and note which new object stands for which original one."""
        for group in self.ties:
            first = None
            for slot in self._tensors_of(self.model):
                if slot.name in group:
                    first = slot.value if first is None else first
                    slot.put(first)
        for slot in self._tensors_of(self.model):
            original = self._originals.get(slot.name)
            if original is not None and slot.value is not original:
                self._home[id(slot.value)] = original
                self._placed.append(slot.value)

    @property
    def replaced(self) -> dict[int, torch.Tensor]:
        """id of a placed tensor -> the original that it stands for (only where they differ)."""
        return self._home

    def original_names(self) -> dict[int, str]:
        """id of an original tensor -> its name, for recognising optimizers built too early."""
        return {id(tensor): name for name, tensor in self._originals.items()}

    # -- the model ----------------------------------------------------------------------------

    def copy_model(self) -> dict[int, torch.Tensor]:
        """id of each resident tensor of the model -> its copy on the host. Changes nothing."""
        copies: dict[int, torch.Tensor] = {}
        for slot in slots(self.model):
            for tensor in tensors(slot.value):
                if id(tensor) not in copies and self._adapter.resident(tensor):
                    copies[id(tensor)] = self._adapter.fetch(tensor)
        return copies

    def commit_model(self, copies: dict[int, torch.Tensor]) -> None:
        """Let the copies take the place of what stands on the device, in the original objects."""
        targets: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for slot in list(slots(self.model)):
                here = slot.value
                if slot.table == "__dict__":
                    if copies:
                        slot.put(convert(here, lambda t: copies.get(id(t), t)))
                    continue
                target = targets.get(id(here))
                if target is None:
                    target = targets[id(here)] = self._settle(slot, here, copies.get(id(here)))
                if target is not here:
                    slot.put(target)
        self._rebind(targets)
        self._forget_placed()

    def _settle(self, slot: Slot, here: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
        """The object that stands at home for `here`, with its values."""
        target = self._home.get(id(here), here)
        here.grad = None
        if copy is None:
            copy = here.data if target is not here else None
        if copy is not None:
            try:
                target.data = copy
            except RuntimeError:
                # Another dtype or layout than the original's: it cannot hold these values.
                target = nn.Parameter(copy, here.requires_grad) if slot.table == "_parameters" else copy
                self.identity_lost.append(slot.name)
        target.grad = None
        if isinstance(here, nn.Parameter) and target.is_leaf:
            target.requires_grad_(here.requires_grad)
        return target

    def _rebind(self, targets: dict[int, torch.Tensor]) -> None:
        for optimizer in self.optimizers:
            rebind(optimizer, targets)

    def discard_model(self) -> None:
        """Drop the model's device memory without copying it."""
        with torch.no_grad():
            for slot in list(slots(self.model)):
                here = slot.value
                if slot.table == "__dict__":
                    slot.put(convert(here, lambda t: torch.empty(0) if self._adapter.resident(t) else t))
                elif self._adapter.resident(here):
                    here.grad = None
                    home = self._home.get(id(here))
                    if home is None:
                        here.data = torch.empty(0, dtype=here.dtype)
                    else:
                        slot.put(home)
        self._rebind(dict(self._home))
        self._forget_placed()

    def keep_model(self) -> None:
        """Leave the model where it stands; only the registry's own references go."""
        for slot in self._tensors_of(self.model):
            slot.value.grad = None
        self._forget_placed()

    def _forget_placed(self) -> None:
        self._home.clear()
        self._placed.clear()
        self._originals.clear()

    # -- the optimizers -----------------------------------------------------------------------

    def copy_state(self) -> dict[int, torch.Tensor]:
        """id of each resident tensor of state and groups -> its copy on the host."""
        copies: dict[int, torch.Tensor] = {}
        for tensor in self._state_tensors():
            if id(tensor) not in copies and self._adapter.resident(tensor):
                copies[id(tensor)] = self._adapter.fetch(tensor)
        return copies

    def commit_state(self, copies: dict[int, torch.Tensor]) -> None:
        """Let the copies take the place of the state on the device; drop all gradients."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                _replace_values(state, copies)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
                _replace_values(group, copies, but="params")
        for parameter in self.model.parameters():
            parameter.grad = None

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            yield from tensors(list(optimizer.state.values()))
            for group in optimizer.param_groups:
                yield from tensors({k: v for k, v in group.items() if k != "params"})

    def forget_state(self) -> None:
        """Drop the host's references to state and gradients, for a device that cannot be touched."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.commit_state({})

    def forget_model(self) -> None:
        """Put the originals back where placement replaced them, without touching the device."""
        for slot in list(self._tensors_of(self.model)):
            here = slot.value
            here.grad = None
            home = self._home.get(id(here))
            if home is not None:
                slot.put(home)
        self._rebind(dict(self._home))
        self._forget_placed()

    # -- what is left -------------------------------------------------------------------------

    def remaining(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(path, tensor) of each tensor of model and optimizers that still stands on the device."""
        for slot in slots(self.model):
            for tensor in tensors(slot.value):
                if self._adapter.resident(tensor):
                    yield f"model.{slot.name}", tensor
        for tensor in self._state_tensors():
            if self._adapter.resident(tensor):
                yield "optimizer.state", tensor


def rebind(optimizer: Optimizer, targets: dict[int, torch.Tensor]) -> None:
    """Let an optimizer hold other objects for its parameters: groups, and the keys of its state.

    Args:
        optimizer: Changed in place.
        targets: id of a parameter held now -> the parameter to hold instead.
    """
    for group in optimizer.param_groups:
        group["params"] = [targets.get(id(p), p) for p in group["params"]]
    moved = {targets.get(id(p), p): state for p, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(moved)


def _replace_values(mapping: Any, copies: dict[int, torch.Tensor], but: str = "") -> None:
    for key, value in mapping.items():
        if key != but:
            new = convert(value, lambda t: copies.get(id(t), t))
            if new is not value:
                mapping[key] = new


def _ties(originals: dict[str, torch.Tensor]) -> tuple[frozenset[str], ...]:
    names: dict[int, list[str]] = {}
    for name, tensor in originals.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(frozenset(group) for group in names.values() if len(group) > 1)
