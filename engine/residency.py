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

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer

from interlock.backends.adapter import Adapter

from .batches import Function, held, replace_in
from .errors import RunInUse


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
_PLAIN = (bool, int, float, str, bytes, type(None))
"""What most other attributes are, and no tensor is in."""


def slots(model: nn.Module) -> Iterator[Slot]:
    """Every slot of a model: parameters, buffers, and plain attributes that contain tensors.

    Tied tensors appear once for each slot in which they stand. An attribute that cannot be looked into (a
    dead weak proxy, a nesting too deep to walk) counts as one without tensors.
    """
    yield from registered(model)
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for attribute, value in list(vars(module).items()):
            if attribute not in _BASE and _held(value):
                yield Slot(module, attribute, "__dict__", dot + attribute)


def _held(value: object) -> list[torch.Tensor]:
    """The tensors of an attribute; none if it cannot be looked into."""
    if type(value) in _PLAIN:
        return []
    try:
        return held(value)
    except Exception:
        return []


def registered(model: nn.Module) -> Iterator[Slot]:
    """The slots of a model's parameters and buffers, but for those that lazy modules have yet to make."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for table in ("_parameters", "_buffers"):
            for attribute, value in list(getattr(module, table).items()):
                if value is not None and not isinstance(value, UninitializedTensorMixin):
                    yield Slot(module, attribute, table, dot + attribute)


def lazy(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that have no shape yet, in lazy modules (`nn.LazyLinear`)."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    if not any(isinstance(tensor, UninitializedTensorMixin) for table in tables for tensor in table.values()):
        return []
    everything = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in everything if isinstance(tensor, UninitializedTensorMixin)]


_claims: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""id of a module -> it. Not by its hash, which may be of its own making, and change, as with torchmetrics."""
_owners: dict[int, object] = {}
"""id of a module -> its run."""
_claimed: dict[int, tuple[torch.Tensor, object]] = {}
"""id of a parameter or buffer -> it (so that it lives, and keeps its id), and its run."""
_claiming = threading.RLock()


def claim(model: nn.Module, run: object) -> None:
    """Take a model, with all its submodules, parameters and buffers, for one run.

    Args:
        model: On the host.
        run: Stands for the run; `unclaim` takes the same object.

    Raises:
        RunInUse: A part of it is in another run. Nothing has been taken.
    """
    with _claiming:
        taken = [name for name, module in model.named_modules() if _owner(module, run) is not run]
        part = f"its module '{taken[0]}'" if taken and taken[0] else "it"
        here = list(registered(model))
        shared = [slot.name for slot in here if _claimed.get(id(slot.value), (None, run))[1] is not run]
        if shared and not taken:
            part = f"its '{shared[0]}', which another model has too,"
        if taken or shared:
            raise RunInUse(
                f"the model cannot be placed: {part} is in another run, which has not closed, and both "
                "would move and change the same parameters. Wait for the other run, or let each build a "
                "model of its own: pass the function that builds it as `model=`"
            )
        for module in model.modules():
            _claims[id(module)] = module
            _owners[id(module)] = run
        _claimed.update({id(slot.value): (slot.value, run) for slot in here})


def _owner(module: nn.Module, run: object) -> object:
    """The run that has a module; `run` itself where none has."""
    return _owners.get(id(module), run) if _claims.get(id(module)) is module else run


def unclaim(run: object) -> None:
    """Let go of what `run` has claimed; nothing happens if that is nothing."""
    with _claiming:
        for key in [key for key, owner in _owners.items() if owner is run]:
            del _owners[key]
            _claims.pop(key, None)
        for key in [key for key, (_, owner) in _claimed.items() if owner is run]:
            del _claimed[key]


class Registry:
    """The tensors of one run.

    Attributes:
        optimizers: As soon as there are any.
        ties: Groups of names that were one tensor before placement.
        went: Names of the parameters that placement has brought to the device.
        identity_lost: Names at which another object stands after homecoming than before the run.

    Args:
        model: On the host, before placement.
        adapter: The backend.
    """

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        self.model = model
        self.optimizers: list[Optimizer] = []
        self.identity_lost: list[str] = []
        self._adapter = adapter
        self._originals = {slot.name: slot.value for slot in registered(model)}
        self._home: dict[int, torch.Tensor] = {}
        self._placed: list[torch.Tensor] = []
        self._recognised = False
        self.ties = _ties(self._originals)
        self.went: frozenset[str] = frozenset()

    def after_placement(self) -> None:
        """Tie again what was tied, and note which new object stands for which original one.

        Plain attributes follow: a list of the model's parameters holds the placed ones meanwhile.
        """
        instead: dict[int, torch.Tensor] = {}
        separate: list[torch.Tensor] = []  # kept alive, so that no other tensor gets one of their ids
        for group in self.ties:
            first = None
            for slot in registered(self.model):
                if slot.name in group:
                    first = slot.value if first is None else first
                    if slot.value is not first:
                        separate.append(slot.value)
                        instead[id(slot.value)] = first
                        slot.put(first)
        self._recognise()
        instead |= {id(self._home[id(tensor)]): tensor for tensor in self._placed if id(tensor) in self._home}
        if instead:
            self._replace_in_attributes(lambda tensor: instead.get(id(tensor), tensor))
        if self._adapter.copies:
            here = self.model.named_parameters()
            self.went = frozenset(name for name, p in here if p.numel() and self._adapter.resident(p))

    def _recognise(self) -> None:
        """Note what stands for which original; also after a placement that was cut short."""
        if self._recognised:
            return
        for slot in registered(self.model):
            original = self._originals.get(slot.name)
            self._placed.append(slot.value)
            if original is not None and slot.value is not original:
                self._home.setdefault(id(slot.value), original)
        self._recognised = True

    def _strays(self) -> list[torch.Tensor]:
        """What was placed, and stands in no slot any more: replaced in mid-run, an optimizer may hold it."""
        here = {id(slot.value) for slot in registered(self.model)}
        return list({id(tensor): tensor for tensor in self._placed if id(tensor) not in here}.values())

    def original_names(self) -> dict[int, str]:
        """id of an original that placement has replaced -> its name: an optimizer over it came too early."""
        replaced = {id(original) for original in self._home.values()}
        return {id(tensor): name for name, tensor in self._originals.items() if id(tensor) in replaced}

    def placed_for(self, originals: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """id of an original that placement has replaced -> what was placed for it."""
        placed = {id(self._home[id(tensor)]): tensor for tensor in self._placed if id(tensor) in self._home}
        return {id(one): placed[id(one)] for one in originals if id(one) in placed}

    # -- the model ----------------------------------------------------------------------------

    def copy_model(self) -> dict[int, torch.Tensor]:
        """id of each resident tensor of the model -> its copy on the host. Changes nothing."""
        copies: dict[int, torch.Tensor] = {}
        if not self._adapter.copies:
            return copies
        for value in (*(slot.value for slot in slots(self.model)), *self._strays()):
            for tensor in _held(value):
                if id(tensor) not in copies and self._adapter.resident(tensor):
                    copies[id(tensor)] = self._adapter.fetch(tensor)
        return copies

    def commit_model(self, copies: dict[int, torch.Tensor]) -> None:
        """Let the copies take the place of what stands on the device, in the original objects."""
        self._recognise()
        targets: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for slot in list(registered(self.model)):
                here = slot.value
                target = targets.get(id(here))
                if target is None:
                    target = targets[id(here)] = self._settle(here, copies.get(id(here)))
                if target is not here:
                    slot.put(target)
            for stray in self._strays():
                if id(stray) not in targets and not self._stands(self._home.get(id(stray))):
                    targets[id(stray)] = self._settle(stray, copies.get(id(stray)))
        self._go_home({**copies, **self._home, **targets})

    def _stands(self, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor stands in a slot."""
        return any(slot.value is tensor for slot in registered(self.model))

    def _settle(self, here: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
        """The object that stands at home for `here`, with its values."""
        target = self._home.get(id(here), here)
        here.grad = None
        if target is here and not here.is_leaf:
            # Computed in the run, and stored: its graph holds other tensors, and must not stay.
            return here.detach() if copy is None else copy
        if copy is None:
            copy = here.data if target is not here else None
        if copy is not None:
            try:
                target.data = copy
            except RuntimeError:
                # Another layout than the original's (sparse, for instance): it cannot hold these values.
                target = nn.Parameter(copy, here.requires_grad) if isinstance(here, nn.Parameter) else copy
        target.grad = None
        if isinstance(here, nn.Parameter) and target.is_leaf:
            target.requires_grad_(here.requires_grad)
        return target

    def _go_home(self, targets: Mapping[int, torch.Tensor]) -> None:
        """What refers to the placed tensors from elsewhere follows; then they are forgotten."""
        moved = {key: target for key, target in targets.items() if id(target) != key}
        if moved:
            self._replace_in_attributes(lambda tensor: moved.get(id(tensor), tensor))
            states: dict[int, Any] = {}
            for optimizer in self.family():
                rebind(optimizer, moved, states)
        self.optimizers = []  # one that was refused may hold foreign tensors, and nobody else holds it
        self._forget_placed()

    def _replace_in_attributes(self, function: Function) -> None:
        for slot in list(slots(self.model)):
            if slot.table == "__dict__":
                here = slot.value
                new = _replaced(here, function)
                if new is not here:
                    slot.put(new)

    def discard_model(self) -> None:
        """Drop the model's device memory without copying it."""
        self._recognise()
        with torch.no_grad():
            for slot in list(registered(self.model)):
                here = slot.value
                slot.put(self._emptied(self._home.get(id(here), here)))
            for stray in self._strays():
                self._emptied(stray)
        self._go_home(dict(self._home))
        self._replace_in_attributes(self._emptied)

    def _emptied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its device memory: the same object, where that can be."""
        tensor.grad = None
        if not self._adapter.resident(tensor):
            return tensor
        if not tensor.is_leaf:
            return torch.empty(0, dtype=tensor.dtype)
        try:
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        except RuntimeError:
            # Where placement makes new Parameters, one cannot be taken home either: whoever else holds it has
            # it without memory, and another one stands in its place.
            tensor.data = tensor.new_empty(0)
            empty = torch.empty(0, dtype=tensor.dtype)
            return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return tensor

    def keep_model(self) -> None:
        """Leave the model where it stands; only the registry's own references go."""
        for slot in registered(self.model):
            slot.value.grad = None
        self._forget_placed()

    def _forget_placed(self) -> None:
        here = {slot.name: slot.value for slot in registered(self.model)}
        self.identity_lost += [
            name for name, original in self._originals.items() if here.get(name) is not original
        ]
        self._home.clear()
        self._placed.clear()
        self._originals.clear()

    # -- the optimizers -----------------------------------------------------------------------

    def copy_state(self) -> dict[int, torch.Tensor]:
        """id of each resident tensor of state and groups -> its copy on the host."""
        copies: dict[int, torch.Tensor] = {}
        if not self._adapter.copies:
            return copies
        for tensor in self.state_tensors():
            if id(tensor) not in copies and self._adapter.resident(tensor):
                copies[id(tensor)] = self._adapter.fetch(tensor)
        return copies

    def commit_state(self, copies: dict[int, torch.Tensor]) -> None:
        """Let the copies take the place of the state on the device; drop all gradients."""
        for optimizer in self.family():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            if copies:
                replace_in_optimizer(optimizer, lambda tensor: copies.get(id(tensor), tensor))
        for parameter in self.model.parameters():
            parameter.grad = None

    def family(self) -> list[Optimizer]:
        """The optimizers, and those inside them."""
        return family(self.optimizers)

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that an optimizer holds, but for the parameters: these are the model's."""
        for optimizer in self.family():
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            parts = [*optimizer.state.values(), *optimizer.param_groups, *_others(optimizer).values()]
            for part in parts:
                yield from (tensor for tensor in _held(part) if id(tensor) not in mine)

    def forget_state(self) -> None:
        """Drop the host's references to state and gradients, for a device that cannot be touched."""
        for optimizer in self.family():
            optimizer.state.clear()
        self.commit_state({})

    def forget_model(self) -> None:
        """Put the originals back where placement replaced them, without touching the device."""
        self._recognise()
        for slot in list(registered(self.model)):
            here = slot.value
            here.grad = None
            home = self._home.get(id(here))
            if home is not None:
                slot.put(home)
        self._go_home(dict(self._home))


def _replaced(value: Any, function: Function) -> Any:
    """As `replace_in`; what cannot be looked into stays as it is."""
    try:
        return replace_in(value, function)
    except Exception:
        return value


def family(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Optimizers, and those that they keep as attributes, in lists and dictionaries too (Lookahead, SAM).

    Args:
        optimizers: As built.

    Returns:
        Each once, whoever wraps before what is wrapped.
    """
    found: dict[int, Optimizer] = {}
    left = list(optimizers)
    while left:
        optimizer = left.pop(0)
        if id(optimizer) in found:
            continue
        found[id(optimizer)] = optimizer
        for value in vars(optimizer).values():
            within = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            left += [one for one in (value, *within) if isinstance(one, Optimizer)]
    return list(found.values())


def _others(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside state and groups: `defaults`, and perhaps more."""
    return {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}


def replace_in_optimizer(optimizer: Optimizer, function: Function) -> None:
    """Replace tensors wherever an optimizer keeps them, but as keys of its state."""
    state: dict[Any, Any] = optimizer.state
    for key, value in list(state.items()):
        new = _replaced(value, function)
        if new is not value:
            state[key] = new
    replace_in(optimizer.param_groups, function)
    for name, value in _others(optimizer).items():
        new = _replaced(value, function)
        if new is not value:
            setattr(optimizer, name, new)


def rebind(
    optimizer: Optimizer, targets: Mapping[int, torch.Tensor], states: dict[int, Any] | None = None
) -> None:
    """Let an optimizer hold other objects for its parameters: groups, and the keys of its state.

    Args:
        optimizer: Changed in place. It can be repeated after an interrupt.
        targets: id of a parameter held now -> the parameter to hold instead.
        states: Remembers what became of each state, for optimizers that have one in common.
    """
    known = {} if states is None else states

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        return targets.get(id(tensor), tensor)

    state: dict[Any, Any] = optimizer.state  # some optimizers have keys that are no tensors
    keys = [swap(key) if isinstance(key, torch.Tensor) else key for key in state]
    if any(new is not old for new, old in zip(keys, state, strict=True)):
        # One assignment: an interrupt finds the state whole, under the old keys or under the new ones.
        _, new_state = known.setdefault(
            id(state), (state, defaultdict(dict, zip(keys, state.values(), strict=True)))
        )
        if "state" in vars(optimizer):  # else it is a property, and shows that of one inside
            optimizer.state = new_state
    replace_in_optimizer(optimizer, swap)


def _ties(originals: dict[str, torch.Tensor]) -> tuple[frozenset[str], ...]:
    names: dict[int, list[str]] = {}
    for name, tensor in originals.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(frozenset(group) for group in names.values() if len(group) > 1)
