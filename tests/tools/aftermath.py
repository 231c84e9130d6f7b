"""What must be true once a run is over, however it ended: compares, and repairs nothing.

`aftermath(life, ended)` gives one line for each promise that was broken; none means that all were kept.
Each promise is one function, so that a planted fault can be shown to be caught by the one meant for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from interlock.backends.double import ReplacingDouble
from interlock.evidence import graph
from tools.lives import Ended, Life, Net, reference, state_of

Promise = Callable[[Life, Ended, tuple[str, ...]], Iterator[str]]


def aftermath(
    life: Life, ended: Ended, abandoned: tuple[str, ...] = (), *, but: tuple[Promise, ...] = ()
) -> list[str]:
    """Every broken promise, one line each.

    Args:
        life: As it was to go.
        ended: As it went.
        abandoned: The resources that may, and must, have been given up.
        but: Promises that do not apply.
    """
    kept = (promise for promise in PROMISES if promise not in but)
    return [line for promise in kept for line in promise(life, ended, abandoned)]


def the_run_is_closed(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """Phase `closed`, nothing held, nothing on the release stack, no thread of the run."""
    if ended.slot is None:
        yield "there was no run at all"
        return
    if ended.slot.state != "closed":
        yield f"phase is '{ended.slot.state}', not 'closed'"
    if ended.slot.held:
        yield f"still held: {ended.slot.held}"
    if ended.stacked:
        yield f"still on the release stack: {ended.stacked}"


def each_resource_ends_once(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """Whatever was acquired ended exactly once, and as it should."""
    if ended.slot is None:
        return
    acquired = {
        effect.resource
        for entry in ended.slot.history[1:]
        for _, effect in ended.slot.lifecycle.rules[entry.source][entry.event].effects
        if effect.verb == "acquires"
    }
    endings = [name for name, _ in ended.slot.ended]
    if sorted(endings) != sorted(acquired):
        yield f"acquired {sorted(acquired)}, ended {sorted(endings)}"
    given_up = tuple(name for name, how in ended.slot.ended if how == "abandoned")
    if sorted(given_up) != sorted(abandoned):
        yield f"abandoned {given_up}, expected {abandoned}"
    if ended.outcome is not None and sorted(ended.outcome.abandoned) != sorted(abandoned):
        yield f"the outcome says abandoned {ended.outcome.abandoned}, expected {abandoned}"


def the_first_error_reaches_the_caller(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """The same object, with the others attached; and none where none struck."""
    struck = ended.struck
    if not struck:
        if ended.error is not None and not life.request[0]:
            yield f"nothing struck, and the caller got {ended.error!r}"
        return
    if ended.error is not struck[0]:
        yield f"the caller got {type(ended.error)}, first struck was {type(struck[0])}"
    yield from _attached(ended, struck)
    outcome = ended.outcome
    if outcome is not None:
        soft = not isinstance(struck[0], Exception)
        if outcome.status != ("cancelled" if soft else "failed"):
            yield f"status is {outcome.status} after {type(struck[0]).__name__}"
        if outcome.error is not struck[0]:
            yield "the outcome has another error than the first"
        if outcome.ok:
            yield "the outcome says ok although an error struck"


def _attached(ended: Ended, struck: list[BaseException]) -> Iterator[str]:
    names = [_name(error) for error in struck[1:]]
    if ended.outcome is not None:
        kept = [failure.type for failure in ended.outcome.errors]
        lost = [name for name in names if name not in kept]
        if lost:
            yield f"later errors are not in the outcome: {lost}, which has {kept}"
    if type(struck[0]).__name__ != "Frozen":
        notes = " ".join(getattr(struck[0], "__notes__", []))
        lost = [type(error).__name__ for error in struck[1:] if type(error).__name__ not in notes]
        if lost:
            yield f"later errors are not noted on the first: {lost}"


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def nothing_is_left_on_the_device(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """By the double's own ledger, while the caller keeps the error; and by what the outcome says."""
    if life.remembers and "model" in abandoned and isinstance(ended.adapter, ReplacingDouble):
        # The model still has what it remembers, with the graph of that: then the outcome must say so.
        outcome = ended.outcome
        if outcome is not None and outcome.residue.known and outcome.residue.bytes != ended.adapter.allocated:
            yield f"the outcome says {outcome.residue.bytes} bytes, there are {ended.adapter.allocated}"
        return
    kept = 0
    if ended.slot is not None and ("model", "transferred") in ended.slot.ended and ended.model is not None:
        kept = _resident(ended.adapter, ended.model)
    if isinstance(ended.adapter, ReplacingDouble) and ended.adapter.allocated != kept:
        left = [f"{nbytes} bytes of {origin}" for _, nbytes, origin in ended.adapter.ledger.live()]
        yield f"{ended.adapter.allocated} bytes on the device, {kept} may be: {left[:8]}"
    outcome = ended.outcome
    if outcome is None:
        return
    if outcome.residue.bytes:
        yield f"the outcome says residue {outcome.residue}"
    asked = any(entry.event == "measured" for entry in outcome.history)
    placed = any(entry.event == "place" for entry in outcome.history)
    if outcome.residue.known != (asked or not placed):
        yield f"residue known is {outcome.residue.known}, but it was {'' if asked else 'never '}measured"


def _resident(adapter: Any, model: nn.Module) -> int:
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers())
        if adapter.resident(t)
    }
    return sum(storages.values())


def nothing_of_a_step_is_alive(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """Batches, outputs, losses, gradients: dead, although the caller keeps the error."""
    if life.remembers and "model" in abandoned:
        return  # what the model remembers is alive with it
    alive = [tensor for ref in ended.points.seen if (tensor := ref()) is not None and tensor.numel()]
    if alive:
        yield f"{len(alive)} tensors of the steps are alive, such as one of shape {list(alive[0].shape)}"


def the_run_is_freed(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """The session, and a model that the run built and nobody was given, die by reference counts alone."""
    if ended.session is not None and ended.session() is not None and life.drive != "handles":
        yield "the session is still alive"
    if ended.built is not None and ended.model is None and ended.built() is not None:
        yield "the model that the run built is still alive"


def the_model_is_home(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """On the host, its objects those of before, ties tied, gradients gone, bound to its optimizer."""
    model = ended.model
    if model is None or ended.slot is None:
        return
    how = dict(ended.slot.ended).get("model")
    if how == "transferred":
        return
    if _resident(ended.adapter, model) and how != "abandoned":
        yield "the model stands on the device"
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in ended.parameters.items():
        if now.get(name) is not tensor:
            yield f"'{name}' is another object than before the run"
    if life.tied and isinstance(model, Net) and model.third.weight is not model.second.weight:
        yield "tied weights are separate"
    if any(p.grad is not None for p in model.parameters()):
        yield "a parameter has kept its gradient"
    if not all(p.requires_grad for p in model.parameters()):
        yield "a parameter does not train any more"
    if not all(module.training for module in model.modules()):
        yield "a module is not in training mode any more"
    if ended.outcome is not None and ended.outcome.optimizer is not None:
        yield from _bound(ended.outcome.optimizer, model, ended.adapter)


def _bound(optimizer: torch.optim.Optimizer, model: nn.Module, adapter: Any) -> Iterator[str]:
    mine = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if {id(p) for p in held} != mine:
        yield "the optimizer holds other parameters than the model"
    if not {id(p) for p in optimizer.state} <= mine:
        yield "the optimizer's state belongs to other parameters"
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    if any(adapter.resident(t) for t in tensors):
        yield "the optimizer's state stands on the device"


def the_weights_are_right(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """Those after the updates that were complete, to the bit; untouched ones if there was none."""
    if not isinstance(ended.model, Net) or life.exit == "discard" or "model" in abandoned:
        return
    expected = reference(life)
    if ended.error is None and not life.request[0] and state_of(ended.model) != expected.final:
        yield "the final state differs from the undisturbed run's"
    if any((strike.where, strike.moment) == ("step", "half") for strike in ended.points.strikes):
        return
    updates = ended.points.counts["step", "after"]
    if updates:
        *_, last = ended.model.parameters()
        if last.detach().numpy().tobytes() != expected.weights[updates - 1]:
            yield f"the weights are not those after {updates} updates"


def the_history_is_legal(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """Replayed on a fresh slot, the events lead through the same phases; observers saw them all."""
    if ended.slot is None:
        return
    fresh = ended.slot.lifecycle.slot()
    for entry in ended.slot.history[1:]:
        if entry.event not in fresh.legal:
            yield f"'{entry.event}' was not legal in '{fresh.state}'"
            return
        fresh.fire(entry.event)
    if fresh.config != ended.slot.config:
        yield "the replayed history ends elsewhere"
    changes = [event for event in ended.events if type(event).__name__ == "PhaseChanged"]
    if life.observed and [c.event for c in changes] != [e.event for e in ended.slot.history[1:]]:
        yield f"observers were told {len(changes)} of {len(ended.slot.history) - 1} transitions"


def errors_are_what_they_were(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """The graph of the first error is finite, and still prints."""
    for error in ended.struck[:1]:
        if len(list(graph(error))) > 50:
            yield "the error's graph has grown without bound"


def the_process_is_as_it_was(life: Life, ended: Ended, abandoned: tuple[str, ...]) -> Iterator[str]:
    """Threads, children, files, signal handlers, torch's switches and the backend's context."""
    yield from ended.process
    if torch._C._len_torch_dispatch_stack():
        yield "the backend's context was not left"


PROMISES: tuple[Promise, ...] = (
    the_process_is_as_it_was,
    the_run_is_closed,
    each_resource_ends_once,
    the_first_error_reaches_the_caller,
    nothing_is_left_on_the_device,
    nothing_of_a_step_is_alive,
    the_run_is_freed,
    the_model_is_home,
    the_weights_are_right,
    the_history_is_legal,
    errors_are_what_they_were,
)
