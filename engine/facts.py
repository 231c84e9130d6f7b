"""Facts that are observed during a run, not assumed: who holds which parameter, what trains.

Each check compares identities and raises a typed error that names parameters. They are cheap (a
dictionary look-up per parameter) and run when the optimizer is built, before the first step, after each
validation, checkpoint, adoption and suspension, at each report, and before the run ends well. So an
undeclared change in mid-run is found at the next of these, not at once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import (
    BrokenTie,
    DuplicateParameter,
    EvaluationModeWarning,
    ForeignParameter,
    FrozenParameterWarning,
    LossError,
    MisplacedState,
    MissingParameter,
    NoGradient,
    NonFiniteLoss,
    PlacementError,
    ReplacedParameter,
    StaleParameter,
    UndeclaredChange,
    UnusedParameterWarning,
)

Look = Callable[[torch.Tensor], torch.Tensor]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_HOW = (
    "build it in the task's `optimizer` function, from the model that is passed in: "
    "`optimizer=lambda model: torch.optim.AdamW(model.parameters())`"
)


def holders(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[int, tuple[torch.Tensor, str]]:
    """id of each parameter an optimizer holds -> (it, where).

    Args:
        optimizers: As built.
        names: id -> name of the model's parameters, for the message.

    Returns:
        Each parameter once.

    Raises:
        DuplicateParameter: One stands in two places.
    """
    found: dict[int, tuple[torch.Tensor, str]] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                where = f"optimizer {i}, group {j}, position {k}"
                if id(parameter) in found:
                    name = names.get(id(parameter), where)
                    raise DuplicateParameter(
                        f"the optimizer holds '{name}' twice, and would change it twice an update: at "
                        f"{found[id(parameter)][1]}, and at {where}. Put each parameter into one group, once",
                        [name],
                    )
                found[id(parameter)] = (parameter, where)
    return found


class Agreement(NamedTuple):
    """What trains, as it was when the optimizer was built or parameters were adopted last.

    Attributes:
        due: ids of the parameters that require gradients.
        held: ids of the parameters that an optimizer holds.
    """

    due: frozenset[int]
    held: frozenset[int]


def agreed(model: nn.Module, optimizers: Sequence[Optimizer]) -> Agreement | None:
    """What trains now, if it is in order: quicker than `check_optimizers`, since it is asked at each report.

    Args:
        model: As placed.
        optimizers: As built.

    Returns:
        `None` if `check_optimizers` would raise something.
    """
    mine: set[int] = set()
    due: set[int] = set()
    modules, seen = [model], {id(model)}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                mine.add(id(parameter))
                if parameter.requires_grad:
                    due.add(id(parameter))
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    once = set(held)
    if len(once) == len(held) and due <= once <= mine:
        return Agreement(frozenset(due), frozenset(once))
    return None


def check_agreement(model: nn.Module, before: Agreement, now: Agreement | None, when: str) -> None:
    """Nothing trains, or stopped to train, that nobody declared.

    Args:
        model: As placed.
        before: As agreed.
        now: As found.
        when: For messages.

    Raises:
        UndeclaredChange: Naming the parameters.
    """
    if now is None or now == before:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    changed = sorted(names.get(key, "?") for key in (before.due ^ now.due) | (before.held ^ now.held))
    raise UndeclaredChange(
        f"{when}: {some(changed)} began or ceased to train since the optimizer was built (requires_grad, or "
        "its groups, were changed in mid-run), which no checkpoint would know of. Declare it: "
        "`Task(adopt={epoch: function})`, or `training.adopt(function)` of a phase handle",
        changed,
    )


def check_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    originals: Mapping[int, str],
    *,
    when: str,
    known: Mapping[int, str] | None = None,
) -> None:
    """Every trainable parameter is in exactly one optimizer, and none holds a foreign one.

    Args:
        model: As placed.
        optimizers: As built.
        originals: id -> name of the tensors that stood in the model before placement.
        when: For messages: "when the optimizer was built".
        known: id -> name of the model's parameters at the first check; `None` at the first check
            itself, where a frozen parameter is worth a warning.

    Raises:
        StaleParameter: The optimizer holds what placement has replaced.
        ReplacedParameter: It holds what was replaced since the first check.
        ForeignParameter: It holds what never was the model's.
        MissingParameter: A trainable parameter is in no optimizer.
        DuplicateParameter: One is there twice.
    """
    mine = {id(p): name for name, p in model.named_parameters()}
    held = holders(optimizers, mine)
    foreign = {key: where for key, (_, where) in held.items() if key not in mine}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if foreign:
        raise _of_foreign(model, held, foreign, originals, known or {}, when)
    if missing:
        how = (
            "Add it to a group, or set requires_grad=False, before the optimizer is built, on what should "
            "not train"
            if known is None
            else "What begins to train in mid-run is declared, and added to a group: "
            "`Task(adopt={epoch: function})` with `optimizer.add_param_group({'params': [...]})` in it"
        )
        raise MissingParameter(
            f"{when}: no optimizer holds {some(missing)}, so it would never train. {how}", missing
        )
    if known is None:
        _warn_of_frozen([mine[key] for key, (p, _) in held.items() if not p.requires_grad])


def _of_foreign(
    model: nn.Module,
    held: Mapping[int, tuple[torch.Tensor, str]],
    foreign: Mapping[int, str],
    originals: Mapping[int, str],
    known: Mapping[int, str],
    when: str,
) -> PlacementError:
    """The error for parameters that an optimizer holds and the model does not have."""
    stale = [originals[key] for key in foreign if key in originals and key not in known]
    if stale:
        return StaleParameter(
            f"{when}: the optimizer holds {some(stale)} as before placement, which made new parameters: it "
            f"would train nothing. It was built too early; {_HOW}",
            stale,
        )
    replaced = [known[key] for key in foreign if key in known]
    if replaced:
        return ReplacedParameter(
            f"{when}: {some(replaced)} of the model was replaced or removed since the optimizer was built, "
            "which holds the earlier object: what stands there now would never train. Change a parameter's "
            "values in place (`with torch.no_grad(): parameter.copy_(...)`); to train other parameters, "
            "start a new run",
            replaced,
        )
    copied = _copied(held, foreign, model)
    what = f"what looks like copies of {some(copied)}" if copied else "parameters of something else"
    return ForeignParameter(
        f"{when}: the optimizer holds {what}, at {some(foreign.values())}: the model that is trained does "
        f"not have them; {_HOW}",
        copied or list(foreign.values()),
    )


def _warn_of_frozen(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            "the optimizer holds frozen parameters (requires_grad=False), which it will not change: "
            f"{some(names)}. Leave them out of its groups, or unfreeze them before it is built",
            FrozenParameterWarning,
            stacklevel=2,
        )


def _copied(held: Mapping[int, tuple[torch.Tensor, str]], foreign: Any, model: nn.Module) -> list[str]:
    """Names of the model's parameters of which the foreign ones look like copies."""
    unclaimed = {name: p for name, p in model.named_parameters() if id(p) not in held}
    names = []
    for key in foreign:
        tensor = held[key][0]
        for name, parameter in unclaimed.items():
            if tensor.shape == parameter.shape and tensor.dtype == parameter.dtype:
                names.append(name)
                del unclaimed[name]
                break
        else:
            return []
    return names


def check_state(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Each state tensor of a parameter's shape stands where the parameter stands.

    Args:
        optimizers: As built, with those that they wrap.
        model: Whose parameters they hold, for their names.

    Raises:
        MisplacedState: Naming the parameters.
    """
    wrong: dict[str, str] = {}
    for optimizer in optimizers:
        states: dict[Any, Any] = optimizer.state
        for parameter, state in states.items():
            if not isinstance(parameter, torch.Tensor) or not isinstance(state, Mapping):
                continue  # an optimizer's own book-keeping, which is not a parameter's
            for key, value in state.items():
                if _misplaced(value, parameter):
                    names = {id(p): name for name, p in model.named_parameters()}
                    name = names.get(id(parameter), "?")
                    wrong[name] = f"{name} ({key} on {value.device}, the parameter on {parameter.device})"
    if wrong:
        raise MisplacedState(
            f"optimizer state stands on another device than its parameter: {some(wrong.values())}. Load or "
            "make state after the model is placed",
            list(wrong),
        )


def _misplaced(value: Any, parameter: torch.Tensor) -> bool:
    # A number such as `step` may stand on the host; what has the parameter's shape may not.
    if not isinstance(value, torch.Tensor) or value.device == parameter.device:
        return False
    return bool(value.ndim) and value.shape == parameter.shape


def check_resident(model: nn.Module, went: Collection[str], resident: Callable[[torch.Tensor], bool]) -> None:
    """Each trainable parameter still stands on the device that it was placed on.

    Args:
        model: As placed.
        went: Names of the parameters that placement brought there.
        resident: Whether a tensor stands there.

    Raises:
        MisplacedState: Naming the parameters.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel())
    away = [name for name, p in trained if name in went and not resident(p)]
    if away:
        raise MisplacedState(
            f"{some(away)} of the model was placed on the device, and stands elsewhere now: its `.data` was "
            "replaced by a tensor of the host. Change values in place (`with torch.no_grad(): "
            "parameter.copy_(...)`), or make the new tensor with `device=parameter.device`",
            away,
        )


def check_ties(model: nn.Module, ties: Sequence[frozenset[str]]) -> None:
    """What was one tensor before placement is still one.

    Raises:
        BrokenTie: Naming the parameters.
    """
    if not ties:
        return
    now = dict(model.named_parameters(remove_duplicate=False))
    now.update(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    for group in ties:
        if len({id(now[name]) for name in group if name in now}) > 1:
            raise BrokenTie(
                f"{some(sorted(group))} were one parameter when the model was placed, and are separate now: "
                "each would train apart. Keep them tied, or untie them before the run",
                sorted(group),
            )


def check_loss(loss: Any) -> None:
    """A loss is a scalar tensor with a graph.

    Raises:
        LossError: Saying what it is instead.
    """
    if not isinstance(loss, torch.Tensor):
        hint = "is a `return` missing?" if loss is None else "return the tensor itself, not `.item()` of it"
        raise LossError(f"the loss must be a scalar tensor, and is {type(loss).__name__}: {hint}")
    if loss.numel() != 1 or loss.ndim:
        raise LossError(
            f"the loss must be a scalar, and has shape {list(loss.shape)}: reduce it, by `.mean()` for "
            "instance"
        )
    if not loss.requires_grad and not torch.is_grad_enabled():
        by = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise LossError(
            "the loss has no graph, so nothing would train: gradients are switched off here, by "
            f"torch.{by}() around the call of `fit` or by the loss function itself. Train outside of it"
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss has no graph, so nothing would train: it was computed without gradients (detach, "
            "no_grad, .item(), argmax), or from no parameter that has requires_grad"
        )


def check_finite(loss: torch.Tensor, step: int) -> None:
    """Raises `NonFiniteLoss` if the loss of a step (from 1) is NaN or infinite."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NonFiniteLoss(step, value)


def check_mode(model: nn.Module) -> None:
    """Warns, with `EvaluationModeWarning`, if the model as a whole is in evaluation mode.

    Single submodules may be, on purpose (frozen batch normalisation): the engine changes no mode.
    """
    if not model.training and any(p.requires_grad for p in model.parameters()):
        warnings.warn(
            "the model is in evaluation mode and will be trained like that: dropout is off, and batch "
            "normalisation keeps its statistics. Call `model.train()` before the run, unless this is meant",
            EvaluationModeWarning,
            stacklevel=2,
        )


def check_gradients(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[int, int]:
    """After the first backward pass: no parameter group is without any gradient.

    Returns:
        (parameters with a gradient, trainable parameters).

    Raises:
        NoGradient: Naming the parameters of the group.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    without: list[str] = []
    trainable = 0
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            params = [p for p in group["params"] if p.requires_grad]
            empty = [names.get(id(p), "?") for p in params if p.grad is None]
            trainable += len(params)
            without += empty
            if params and len(empty) == len(params):
                raise NoGradient(
                    f"no parameter of optimizer {i}, group {j} received a gradient in the first backward "
                    f"pass: {some(empty)}. The loss is not connected to them: it was computed from "
                    "something else (another model?), or the graph was cut (`detach`, `no_grad`, `.data`)",
                    empty,
                )
    if without:
        warnings.warn(
            f"{len(without)} of {trainable} trainable parameters received no gradient in the first step: "
            f"{some(without)}. If they are not meant to be used, leave them out or freeze them",
            UnusedParameterWarning,
            stacklevel=2,
        )
    return trainable - len(without), trainable


SMALL = 65_536
"""Elements up to which a parameter is copied for comparison, which is quicker then, and exact."""


def fingerprints(model: nn.Module, look: Look = _as_it_is) -> dict[str, torch.Tensor]:
    """name -> what changes when the values of a trainable parameter do.

    A copy of a small parameter; of a large one two numbers, which change practically always.

    Args:
        model: As placed.
        look: Takes a tensor to where it can be computed with.
    """
    with torch.no_grad():
        return {
            name: _fingerprint(look(p.detach()))
            for name, p in model.named_parameters()
            if p.requires_grad and p.numel()
        }


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.numel() <= SMALL:
        return values.clone()
    if values.is_complex():
        values = torch.view_as_real(values)
    # In double precision, or the change of few values among many would drown; not all devices have it.
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    flat = values.reshape(-1)
    if flat.dtype.itemsize == 1:
        flat = flat.to(wide)  # eight-bit numbers have no arithmetic
    return torch.stack([flat.sum(dtype=wide), torch.linalg.vector_norm(flat, dtype=wide)])


def changed(before: Mapping[str, torch.Tensor], model: nn.Module, look: Look = _as_it_is) -> tuple[int, int]:
    """(parameters whose fingerprint changed, parameters looked at)."""
    after = fingerprints(model, look)
    same = sum(name in after and torch.equal(after[name], value) for name, value in before.items())
    return len(before) - same, len(before)


def some(names: Any, limit: int = 5) -> str:
    """At most `limit` names, and how many more there are."""
    names = [str(name) for name in names]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{name}'" for name in names[:limit]) + more
