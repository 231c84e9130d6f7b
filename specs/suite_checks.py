"""What must be true of a run while it rests, and once it is over: one function for each promise.

Each yields one line for what is broken; nothing is repaired. Where the engine could look itself, it is not
asked: tensors are looked for here, and counted by the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from .model import Status
from .suite_life import LEASES
from .suite_setup import named, tensors_in, tensors_of

if TYPE_CHECKING:
    from interlock import Outcome

    from .suite_life import Life


def promises_at_rest(life: Life) -> Iterator[str]:
    """Of a run that goes on."""
    plain, session = life.plain, life.session
    stacked = session.driver.stack.names
    if set(stacked) != set(plain.held):
        yield f"the release stack has {stacked}, and held is {plain.held}"
    yield from dict.fromkeys(life.watch.wrong)
    model, optimizers = session.work.model, session.work.optimizers
    if plain.statuses.get("model") is Status.WHOLE and model is not None:
        yield from _ties(life, model)
    if model is not None and optimizers and plain.resting:
        yield from _bound(list(optimizers), model)
        yield from _survives(life, sum(len(optimizer.state) for optimizer in optimizers))
    if not plain.held and life.watch.copies and life.model is not None:
        left = life.watch.resident()
        if left:
            yield f"nothing is held in phase '{plain.state}', and {left} bytes are on the device"
        yield from _stands(life, life.model)


def _survives(life: Life, parameters: int) -> Iterator[str]:
    """What an optimizer has learnt of its parameters is not forgotten while the run goes on."""
    if parameters < life.remembered:
        yield f"the optimizer had state for {life.remembered} parameters, and has it for {parameters}"
    life.remembered = parameters


def promises_once_closed(life: Life) -> Iterator[str]:
    """Of a run that is over, whatever ended it."""
    outcome = life.outcome
    if outcome is None:
        yield "the run has no outcome"
        return
    for promise in ONCE_CLOSED:
        yield from promise(life, outcome)


def _is_closed(life: Life, outcome: Outcome) -> Iterator[str]:
    plain, driver = life.plain, life.session.driver
    if plain.state != plain.spec.terminal:
        yield f"the run has an outcome, and ended in '{plain.state}'"
    if plain.held or driver.stack.names:
        yield f"held at the end: {plain.held}; on the release stack: {driver.stack.names}"
    if list(outcome.history) != driver.slot.history:
        yield "the outcome has another history than the run"


def _ended_once(life: Life, outcome: Outcome) -> Iterator[str]:
    ended = [name for name, _ in life.plain.ended]
    if sorted(ended) != sorted(life.plain.acquired):
        yield f"acquired were {life.plain.acquired}, and {ended} ended"
    abandoned = {name for name, how in life.plain.ended if how == "abandoned"}
    if set(outcome.abandoned) != abandoned:
        yield f"the outcome says abandoned {outcome.abandoned}, the plain machine {sorted(abandoned)}"
    if abandoned and not life.watch.lost and len(life.struck) < 2:
        yield f"{sorted(abandoned)} abandoned, after {len(life.struck)} fault(s)"


def _errors(life: Life, outcome: Outcome) -> Iterator[str]:
    first = life.struck[0] if life.struck else None
    if outcome.error is not first:
        yield f"the outcome's error is {outcome.error!r}, and the first that struck {first!r}"
    if len(outcome.errors) != max(len(life.struck) - 1, 0):
        yield f"{len(life.struck)} errors struck, and the outcome has {len(outcome.errors)} later ones"
    if first is None:
        finished = any(entry.event == "finish" for entry in outcome.history)
        expected = "finished" if finished else "stopped"
    else:
        expected = "failed" if isinstance(first, Exception) else "cancelled"
    if outcome.status != expected:
        yield f"the status is {outcome.status}, and should be {expected}"


def _left_nothing(life: Life, outcome: Outcome) -> Iterator[str]:
    residue, struck = outcome.residue, life.fault is not None and bool(life.struck)
    measured = any(entry.event == "measured" for entry in outcome.history)
    if measured and not residue.known and not struck:
        yield "the device was measured, and the residue is unknown"
    if life.watch.lost or not life.watch.copies:
        return
    kept = _bytes(life, life.model) if _ended(life, "transferred") and life.model is not None else 0
    left = life.watch.resident()
    given_up = _ended(life, "abandoned")
    if given_up and residue.known and residue.bytes != left:
        yield f"the outcome says that {residue.bytes} bytes are left, and there are {left}"
    if not given_up and left != kept:
        yield f"{left} bytes are on the device, and {kept} may be"
    if not given_up and residue.bytes:
        yield f"the outcome says that it left {residue}"


def _ended(life: Life, how: str) -> bool:
    return ("model", how) in life.plain.ended


def _model_home(life: Life, outcome: Outcome) -> Iterator[str]:
    model = life.model
    if model is None:
        return
    discards = life.exit == "discard"
    if outcome.model is not (None if discards or not _ever(life, "model") else model):
        yield f"the outcome's model is {type(outcome.model).__name__}, not the one of the run"
    if any(parameter.grad is not None for parameter in model.parameters()):
        yield "a parameter has kept its gradient"
    if _ended(life, "transferred"):
        away = [name for name, t in named(model).items() if t.numel() and not life.watch.adapter.resident(t)]
        if life.watch.copies and away:
            yield f"the model was kept on the device, and {away} are not there"
        yield from _ties(life, model)
        return
    yield from _stands(life, model)
    now = {name: p.requires_grad for name, p in model.named_parameters()}
    if now != life.trains:
        yield f"what trains has changed: {sorted(set(now.items()) ^ set(life.trains.items()))}"


def _ever(life: Life, resource: str) -> bool:
    return resource in life.plain.acquired


def _stands(life: Life, model: nn.Module) -> Iterator[str]:
    """At home: the same objects as before the run, nothing of it on the device, ties tied."""
    now = named(model)
    other = [name for name, tensor in life.originals.items() if now.get(name) is not tensor]
    if other or len(now) != len(life.originals):
        yield f"other objects than before the run: {other}"
    yield from _ties(life, model)
    if life.watch.lost or _ended(life, "abandoned"):
        return
    away = [name for name, tensor in tensors_of(model) if life.watch.adapter.resident(tensor)]
    if away:
        yield f"on the device, and should be at home: {away}"


def _ties(life: Life, model: nn.Module) -> Iterator[str]:
    now, before = named(model), life.originals
    names: dict[int, str] = {}
    for name, tensor in before.items():
        first = names.setdefault(id(tensor), name)
        if now.get(name) is not now.get(first):
            yield f"'{first}' and '{name}' were one tensor, and are two"


def _bytes(life: Life, model: nn.Module) -> int:
    storages = [t.untyped_storage() for _, t in tensors_of(model) if life.watch.adapter.resident(t)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _optimizer_home(life: Life, outcome: Outcome) -> Iterator[str]:
    model = outcome.model
    if life.exit != "offload" or model is None or life.watch.lost:
        return
    optimizers = list(outcome.optimizers.values())
    yield from _bound(optimizers, model)
    if any(how == "abandoned" for _, how in life.plain.ended):
        return
    for optimizer in optimizers:
        parts = [*optimizer.state.values(), *optimizer.param_groups, optimizer.defaults]
        if any(life.watch.adapter.resident(t) for part in parts for t in tensors_in(dict(part))):
            yield "a tensor of the optimizer's state is on the device"


def _bound(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> Iterator[str]:
    mine = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held <= mine:
            yield "the optimizer holds parameters that are not the model's"
        if not {id(key) for key in optimizer.state} <= mine:
            yield "the optimizer's state belongs to parameters that are not the model's"


def _weights(life: Life, outcome: Outcome) -> Iterator[str]:
    """To the bit those of an undisturbed run of as many steps, unless an update was cut short."""
    if outcome.steps != life.steps:
        yield f"the outcome counts {outcome.steps} steps, and {life.steps} were taken"
    cut_short = any(entry.source == "updating" and entry.event != "updated" for entry in outcome.history)
    model, gone = outcome.model, _ended(life, "abandoned") or _ended(life, "transferred")
    if cut_short or model is None or gone or not _whole(life) or life.watch.lost:
        return
    expected = life.setup.expected(life.steps, **LEASES[life.lease])
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            far = (value - expected[name]).abs().max().item() if value.numel() else 0.0
            if not far <= life.setup.tolerance:
                yield f"'{name}' is {far:g} away from an undisturbed run of {life.steps} steps"
        elif isinstance(value, torch.Tensor) and not torch.equal(value, expected[name]):
            yield f"'{name}' is other than after an undisturbed run of {life.steps} steps"


def _whole(life: Life) -> bool:
    """Whether no call of the task's own was cut short in the middle: a buffer may have moved on."""
    return not (life.fault is not None and life.fault.call == "update" and life.struck)


def _process(life: Life, _: Outcome) -> Iterator[str]:
    yield from life.process.differs()
    if "seed" in LEASES[life.lease] and not torch.equal(torch.get_rng_state(), life.random):
        yield "the random generator, which the run had on lease, is not as it was"
    torch.set_rng_state(life.random)


def _device(life: Life, _: Outcome) -> Iterator[str]:
    yield from dict.fromkeys(life.watch.wrong)
    last = dict(life.plain.ended).get("device")  # it ends once for each time that it is taken
    if life.watch.taken and not life.watch.lost and last == "released":
        yield "the device is said to be released, and was never given back"


def _handles(life: Life, _: Outcome) -> Iterator[str]:
    for event in ("place", "optimize", "train", "update", "finish", "validate"):
        yield from life.stale(event)


ONCE_CLOSED: tuple[Callable[[Life, Outcome], Iterator[str]], ...] = (
    _is_closed,
    _ended_once,
    _errors,
    _left_nothing,
    _model_home,
    _optimizer_home,
    _weights,
    _process,
    _device,
    _handles,
)
"""What is looked at once a run is over."""
