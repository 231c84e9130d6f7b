"""What must be true of the results of a struck run: the model, its weights, the optimizer, the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .batches import held
from .residency import slots
from .sweep_case import Case
from .sweep_digests import Digests, different, form_of, groups_of, states_of, trained_of, weights_of


def model_home(case: Case) -> Iterator[str]:
    """Where the exit policy says, without gradients, trainable, bound to its optimizer."""
    outcome, adapter = case.outcome, case.seen.adapter
    model, how = outcome.model, case.endings.get("model")
    if case.exit == "discard":
        if model is not None:
            yield "the model was to be discarded, and the outcome has one"
        return
    if how in ("released", "transferred") and model is None and case.came("placed"):
        yield f"the model was {how}, and the outcome has none"
    if model is None or how == "abandoned":
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    away = [name for name, tensor in tensors.items() if adapter.resident(tensor) != (how == "transferred")]
    if away and (how != "transferred" or case.seen.copies):
        yield f"not where it should be: {', '.join(away[:4])}"
    if any(parameter.grad is not None for parameter in model.parameters()):
        yield "a parameter has kept its gradient"
    for optimizer in outcome.optimizers.values():
        yield from _bound(optimizer, model, adapter)


def _bound(optimizer: torch.optim.Optimizer, model: nn.Module, adapter: Any) -> Iterator[str]:
    mine = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
        yield "the optimizer holds parameters that are not the model's"
    tensors = [value for state in optimizer.state.values() for value in held(state)]
    if any(adapter.resident(tensor) for tensor in tensors):
        yield "the optimizer's state stands on the device"


def weights_whole(case: Case) -> Iterator[str]:
    """The weights are those of the undisturbed run, at its end or after as many updates, to the bit."""
    outcome = case.outcome
    if outcome.steps > case.reference.steps:
        yield f"the outcome says {outcome.steps} steps, the undisturbed run takes {case.reference.steps}"
    if outcome.model is None or case.endings.get("model") not in ("released", "transferred"):
        return
    if case.whole and outcome.steps != case.reference.steps:
        yield f"it took {outcome.steps} steps, the undisturbed run {case.reference.steps}"
        return
    due = _due(case)
    if due is not None and (other := different(trained_of(outcome.model, {}), _parameters(due))):
        yield f"other weights than {_after(case)}: {other}"
    elif case.whole and (other := different(weights_of(outcome.model), case.reference.weights)):
        yield f"other weights than the undisturbed run's: {other}"


def _after(case: Case) -> str:
    return f"the undisturbed run's after {case.seen.updates[1]} update(s)"


def _due(case: Case) -> Digests | None:
    """What a run that failed should have trained to; `None` if that is not known, as in mid-update."""
    begun, made = case.seen.updates
    known = case.reference.updates
    # A late error is of an operation that may not have done its work; which one it was, nobody says.
    if begun != made or made >= len(known) or case.cell.fault == "late":
        return None
    return known[made]


def _parameters(due: Digests) -> dict[str, str]:
    return {name: digest for name, digest in due.items() if name.startswith("parameter ")}


def as_built(case: Case) -> Iterator[str]:
    """A run that took all its steps has the modules, modes and trainable parameters that it should have."""
    model = case.outcome.model
    if not case.whole or model is None or case.endings.get("model") not in ("released", "transferred"):
        return
    form, reference = form_of(model), case.reference
    built = {name: form.get(name, "gone") for name in reference.built}
    if other := different(built, reference.built):
        yield f"other than when the optimizer was built: {other}"
    elif other := different(form, reference.form):
        yield f"other than the undisturbed run's: {other}"


def optimizer_whole(case: Case) -> Iterator[str]:
    """What the optimizer knows is as in the undisturbed run, at its end or after as many updates."""
    outcome, endings = case.outcome, case.endings
    homes = ("model", "optimizer")
    if case.exit != "offload" or outcome.model is None or any(endings.get(n) != "released" for n in homes):
        return
    due = _due(case)
    # One that was never built, or refused, is no part of the outcome.
    if due is not None and (outcome.optimizers or case.came("optimized")):
        known = {name: digest for name, digest in due.items() if not name.startswith("parameter ")}
        if other := different(states_of(outcome.model, outcome.optimizers), known):
            yield f"other than {_after(case)}: {other}"
            return
    if case.whole and (other := different(knowledge(outcome), case.reference.optimizers)):
        yield f"other than the undisturbed run's: {other}"


def knowledge(outcome: Any) -> dict[str, str]:
    """What the optimizers of an outcome know, with their settings."""
    return {**states_of(outcome.model, outcome.optimizers), **groups_of(outcome.optimizers)}


def rescued(case: Case) -> Iterator[str]:
    """A run that failed where its state was whole has saved, and what it saved is that state."""
    point = case.cell.point
    if not case.came("rescue"):
        if case.checkpoints and point.failed:
            yield "the run failed where its state was whole, and saved nothing"
        return
    if not case.came("rescued"):
        if point.layer == "hook":  # and so nothing struck the rescue itself
            yield "nothing struck the last checkpoint, and it was not saved"
        return
    saved = case.seen.saved
    if saved is None or isinstance(saved, str):
        yield f"the run says that it saved, and that cannot be read back: {saved or 'nobody looked'}"
        return
    step, trained = saved
    if step != case.outcome.steps:
        yield f"the last checkpoint is of step {step}, and the run came to {case.outcome.steps}"
        return
    due = _due(case)
    if due is not None and (other := different(trained, due)):
        yield f"the last checkpoint has another state than the undisturbed run at step {step}: {other}"


def may_stay(case: Case) -> bool:
    """Whether the model may stand on the device: it was kept there, or could not be brought home."""
    return case.endings.get("model") in ("transferred", "abandoned") and case.outcome.model is not None


def standing(adapter: Any, model: nn.Module) -> int:
    """Bytes on the device that a model holds, the graphs of tensors among its attributes included."""
    tensors = [tensor for slot in slots(model) for tensor in held(slot.value)]
    tensors += [kept for tensor in tensors for kept in _of_graph(tensor)]
    there = [tensor for tensor in tensors if adapter.resident(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values())


def _of_graph(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that the graph of a tensor keeps: its leaves, and what was saved for the backward pass."""
    todo, met = [tensor.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in met:
            continue
        met.add(node)
        todo += [before for before, _ in node.next_functions]
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                with suppress(RuntimeError):  # it was freed after the backward pass
                    raw = getattr(node, name)
                    kept = [getattr(one, "data", None) for one in (raw if isinstance(raw, tuple) else (raw,))]
                    yield from (one for one in kept if isinstance(one, torch.Tensor))
