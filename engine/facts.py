"""Facts that are observed during a run, not assumed: who holds which parameter, what trains.

Each check compares identities and raises a typed error that names parameters. They are cheap (a
dictionary look-up per parameter) and run when the optimizer is built, before the first step,
after each change of phase, and at each report. So an undeclared change in mid-run is found at
the next of these, not at once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import (
    BrokenTie,
    DuplicateParameter,
    ForeignParameter,
    FrozenParameterWarning,
    LossError,
    MisplacedState,
    MissingParameter,
    NoGradient,
    NonFiniteLoss,
    ReplacedParameter,
    StaleParameter,
    TaskError,
    UnusedParameterWarning,
)

_HOW = "build it in the task's `optimizer` function from the model that is passed in"


def holders(optimizers: Sequence[Optimizer]) -> dict[int, tuple[torch.Tensor, str]]:
    """id of each parameter an optimizer holds -> (it, where).

    Raises:
        DuplicateParameter: One stands in two places.
    """
    found: dict[int, tuple[torch.Tensor, str]] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                where = f"optimizer {i}, group {j}, position {k}"
                if id(parameter) in found:
                    raise DuplicateParameter(
                        f"one parameter stands in two places: {found[id(parameter)][1]}, and {where}", [where]
                    )
                found[id(parameter)] = (parameter, where)
    return found


def check_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    originals: Mapping[int, str],
    *,
    when: str,
    built: bool = False,
) -> None:
    """Every trainable parameter is in exactly one optimizer, and none holds a foreign one.

    Args:
        model: As placed.
        optimizers: As built.
        originals: id -> name of the tensors that stood in the model before placement.
        when: For messages: "when the optimizer was built".
        built: Whether this is the first check, where a frozen parameter is worth a warning.

    Raises:
        StaleParameter, ForeignParameter, MissingParameter, DuplicateParameter,
        ReplacedParameter: Naming the parameters.
    """
    held = holders(optimizers)
    mine = {id(p): name for name, p in model.named_parameters()}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    foreign = {key: where for key, (_, where) in held.items() if key not in mine}
    missing = [name for key, name in trainable.items() if key not in held]
    if foreign and not built:
        raise ReplacedParameter(
            f"{when}: the model no longer has the parameter(s) at {_some(foreign.values())}"
            + (f"; untrained instead: {_some(missing)}" if missing else "")
            + ". They were replaced in mid-run: change parameters in place, or by declared adoption",
            missing,
        )
    stale = [originals[key] for key in foreign if key in originals]
    if stale:
        raise StaleParameter(
            f"{when}: the optimizer holds {_some(stale)} as they were before placement replaced them; it would "
            f"train nothing. It was built too early: {_HOW}",
            stale,
        )
    if foreign:
        copied = _copied(held, foreign, model)
        kind = f"copies of {_some(copied)}" if copied else "parameters of something else"
        raise ForeignParameter(
            f"{when}: the optimizer holds {kind}, at {_some(foreign.values())}; {_HOW}",
            copied or list(foreign.values()),
        )
    if missing:
        raise MissingParameter(
            f"{when}: no optimizer holds {_some(missing)}, so they would never train; add them to a group, or "
            "set requires_grad=False on what should not train",
            missing,
        )
    if built:
        frozen = [mine[key] for key, (p, _) in held.items() if not p.requires_grad]
        if frozen:
            warnings.warn(
                f"the optimizer holds frozen parameters, which it will not change: {_some(frozen)}",
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


def as_optimizers(built: Any) -> tuple[Optimizer, ...]:
    """What an optimizer function returned, as a tuple of one or more optimizers.

    Raises:
        TaskError: It is something else.
    """
    found = tuple(built) if isinstance(built, (list, tuple)) else (built,)
    bad = [o for o in found if not isinstance(o, Optimizer)]
    if bad or not found:
        what = type(bad[0]).__name__ if bad else "nothing"
        raise TaskError(f"the task's optimizer function returned {what}, not a torch.optim.Optimizer")
    if len(found) > 1:
        raise TaskError(
            "the task's optimizer function returned several optimizers; the generated step drives one: put "
            "their parameters into groups of one optimizer"
        )
    return found


def check_state(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Each state tensor of a parameter's shape stands where the parameter stands.

    Raises:
        MisplacedState: Naming the parameters.
    """
    wrong = [
        names.get(id(parameter), "?") + f" ({key} on {value.device}, the parameter on {parameter.device})"
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.ndim
        and value.device != parameter.device
    ]
    if wrong:
        raise MisplacedState(f"optimizer state stands on the wrong device: {_some(wrong)}", wrong)


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
            raise BrokenTie(f"tied before, separate now: {_some(sorted(group))}", sorted(group))


def check_loss(loss: Any) -> None:
    """The first loss is a scalar tensor with a graph, and finite.

    Raises:
        LossError, NonFiniteLoss: Saying what it is instead.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"the loss must be a tensor, got {type(loss).__name__}: return the loss itself")
    if loss.numel() != 1 or loss.ndim:
        raise LossError(
            f"the loss must be a scalar, got shape {list(loss.shape)}: reduce it, with .mean() for instance"
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
                    f"no parameter of optimizer {i}, group {j} received a gradient: {_some(empty)}. The loss is "
                    "not connected to them: it was computed from something else, or the graph was cut"
                )
    if without:
        warnings.warn(
            f"{len(without)} of {trainable} trainable parameters received no gradient in the first step: "
            f"{_some(without)}",
            UnusedParameterWarning,
            stacklevel=2,
        )
    return trainable - len(without), trainable


def fingerprints(model: nn.Module) -> dict[str, torch.Tensor]:
    """name -> two numbers per trainable parameter that change when its values do (practically)."""
    found = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and p.numel():
                flat = p.detach().reshape(-1)
                norm = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
                found[name] = torch.stack([flat.sum(dtype=norm.dtype), norm])
    return found


def changed(before: Mapping[str, torch.Tensor], model: nn.Module) -> tuple[int, int]:
    """(parameters whose fingerprint changed, parameters looked at)."""
    after = fingerprints(model)
    same = sum(name in after and torch.equal(after[name], value) for name, value in before.items())
    return len(before) - same, len(before)


def _some(names: Any, limit: int = 5) -> str:
    """At most `limit` names, and how many more there are."""
    names = [str(name) for name in names]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{name}'" for name in names[:limit]) + more
