"""Puts a captured state back into the parts of a run: first everything is verified, then it is committed.

Parameters keep their identity and their place: values are copied into them, one tensor at a time, so
that the device never holds more than the run itself needs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .capture import buffers, class_of, is_of_class, names_of, ties, with_extra_state
from .checkpoint import CheckpointMismatch
from .residency import family


def restore(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Bring the parts of a run to where they were when the state was captured.

    All of them exist already, built as they were built then. Groups that were added since, and parameters
    that joined one, are added here by name. Learning rate functions of schedulers are code, and are not
    saved: those of the schedulers that are passed in count.

    Args:
        state: As captured, or as read by `Store.read`. Nothing of it is kept.
        model: As placed.
        optimizers: As built from it; those that they wrap are included.
        schedulers: As built from them.
        extra: The same names as when it was captured.

    Raises:
        CheckpointMismatch: They do not fit; names everything that does not. Nothing has been changed.
    """
    extra = extra or {}
    optimizers = family(optimizers)
    problems = [
        *_misfit_of_model(state, model),
        *_misfit_of_optimizers(state["optimizers"], optimizers, model),
        *_misfit_of_parts("scheduler", dict(enumerate(state["schedulers"])), dict(enumerate(schedulers))),
        *_misfit_of_parts("extra", state["extra"], extra),
    ]
    if problems:
        raise CheckpointMismatch("the checkpoint does not fit what is to be restored", problems)
    with torch.no_grad():
        _put_model(state, model)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            _put_optimizer(optimizer, saved, model)
    for part, saved in (
        *zip(schedulers, state["schedulers"], strict=True),
        *((extra[name], saved) for name, saved in state["extra"].items()),
    ):
        if isinstance(part, torch.Generator):
            part.set_state(saved["state"].clone())
        else:
            part.load_state_dict(_copied(saved["state"]))
    _put_random(state["random"])  # last: what came before may have drawn numbers


# -- verifying ----------------------------------------------------------------------------------


def _misfit_of_model(state: Mapping[str, Any], model: nn.Module) -> Iterator[str]:
    yield from _misfit_of_tensors("parameter", state["parameters"], dict(model.named_parameters()))
    yield from _misfit_of_tensors("buffer", state["buffers"], dict(buffers(model, persistent=True)))
    slots = dict(buffers(model, persistent=False))
    for name in state["transient"]:
        if name not in slots:
            yield f"buffer '{name}' was saved, and the model has none: register it, if only as None"
    now = {frozenset(group) for group in ties(model)}
    then = {frozenset(group) for group in state["ties"]}
    for group in sorted(map(sorted, then - now)):
        yield f"{_list(group)} were one tensor, and are not now: tie them again in the model function"
    for group in sorted(map(sorted, now - then)):
        yield f"{_list(group)} are one tensor, and were not: untie them, or build the model as it was"
    yield from _misfit_of_names("module", state["training"], dict(model.named_modules()))
    yield from _misfit_of_names("extra state of module", state["modules"], dict(with_extra_state(model)))


def _misfit_of_tensors(kind: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    yield from _misfit_of_names(kind, saved, present)
    for name in saved:
        if name in present:
            then, now = _form(saved[name]), _form(present[name])
            if then != now:
                yield f"{kind} '{name}' was {then}, and is {now}: build the model as it was"


def _misfit_of_names(kind: str, saved: Mapping[Any, Any], present: Mapping[Any, Any]) -> Iterator[str]:
    for name in saved:
        if name not in present:
            yield f"{kind} '{name}' was saved, and is not there: build the run as it was"
    for name in present:
        if name not in saved:
            yield f"{kind} '{name}' is there, and was not saved: build the run as it was"


def _misfit_of_parts(kind: str, saved: Mapping[Any, Any], present: Mapping[Any, Any]) -> Iterator[str]:
    yield from _misfit_of_names(kind, saved, present)
    for name in saved:
        if name in present and not is_of_class(present[name], saved[name]["class"]):
            yield f"{kind} '{name}' was a {saved[name]['class']}, and is a {class_of(present[name])}"


def _misfit_of_optimizers(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Optimizer], model: nn.Module
) -> Iterator[str]:
    names = names_of(model)
    then, now = dict(enumerate(saved)), dict(enumerate(present))
    yield from _misfit_of_parts("optimizer", then, now)
    for i, optimizer in now.items():
        groups = then[i]["groups"] if i in then else []
        if i in then and len(optimizer.param_groups) > len(groups):
            yield (
                f"optimizer {i} has {len(optimizer.param_groups)} groups, and had {len(groups)}: "
                "build it as it was when the run began"
            )
        for j, (group, was) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
            held = {names.get(id(p), "a tensor that is not the model's") for p in group["params"]}
            surplus = held - set(was["params"])
            if surplus:
                yield f"optimizer {i}, group {j}, holds {_list(sorted(surplus))}, which were not in it"
        unknown = [name for was in groups for name in was["params"] if name not in names.values()]
        if unknown:
            yield f"optimizer {i} held {_list(unknown)}, which the model does not have"


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "empty"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + more


# -- committing ---------------------------------------------------------------------------------


def _put_model(state: Mapping[str, Any], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(state["parameters"][name])
        parameter.requires_grad_(state["requires_grad"][name])
    for name, buffer in buffers(model, persistent=True):
        if buffer is not None:
            buffer.copy_(state["buffers"][name])
    here = next(model.parameters(), None)
    present = dict(buffers(model, persistent=False))
    for name, saved in state["transient"].items():
        buffer = present[name]
        if buffer is not None and saved is not None and _form(buffer) == _form(saved):
            buffer.copy_(saved)
        else:  # a cache, say, which grows with use
            path, _, attribute = name.rpartition(".")
            like = here if buffer is None else buffer
            model.get_submodule(path)._buffers[attribute] = None if saved is None else _beside(saved, like)
    for name, module in model.named_modules():
        module.training = state["training"][name]
    for name, module in with_extra_state(model):
        module.set_extra_state(_copied(state["modules"][name]))


def _put_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], model: nn.Module) -> None:
    by_name = dict(model.named_parameters())
    optimizer.state.clear()  # what a new one has there would be on the device beside what comes
    _match_groups(optimizer, saved["groups"], by_name)
    tensors = [
        {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]
    index: dict[str, int] = {}
    groups, state = [], dict(_copied(saved["other"]))
    for group in saved["groups"]:
        settings = {key: _copied(value) for key, value in group.items() if key != "params"}
        for name in group["params"]:
            index.setdefault(name, len(index))
            if name in saved["state"]:
                on_host = not (group.get("capturable") or group.get("fused"))
                state[index[name]] = _placed(saved["state"][name], by_name[name], on_host)
        groups.append({**settings, "params": [index[name] for name in group["params"]]})
    was_state, was_groups, was_each = optimizer.state, optimizer.param_groups, list(optimizer.param_groups)
    optimizer.load_state_dict({**_copied(saved["own"]), "state": state, "param_groups": groups})
    for name, i in index.items():
        if name in saved["state"]:
            parameter = by_name[name]
            optimizer.state[parameter] = _uncast(state[i], optimizer.state[parameter])
    for group, kept in zip(optimizer.param_groups, tensors, strict=True):
        for key, tensor in kept.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key] = tensor.copy_(group[key])  # others may hold it, and it stands where it should
    # torch made new containers; an optimizer that wraps this one, or is wrapped, shares the earlier ones.
    for group, new in zip(was_each, list(optimizer.param_groups), strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    if optimizer.state is not was_state:
        was_state.clear()
        was_state.update(optimizer.state)
    was_groups[:] = was_each
    optimizer.state, optimizer.param_groups = was_state, was_groups


def _match_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], by_name: Mapping[str, nn.Parameter]
) -> None:
    """Give the optimizer the groups that it had, in their order."""
    for group, was in zip(optimizer.param_groups, saved, strict=False):
        group["params"][:] = [by_name[name] for name in was["params"]]
        if "param_names" in group and "param_names" in was:
            group["param_names"] = list(was["param_names"])
    for was in saved[len(optimizer.param_groups) :]:
        parameters: list[Any] = [by_name[name] for name in was["params"]]
        if "param_names" in was:
            parameters = list(zip(was["param_names"], parameters, strict=True))
        settings = {key: _copied(value) for key, value in was.items() if key not in ("params", "param_names")}
        optimizer.add_param_group({"params": parameters, **settings})
    optimizer.state.clear()  # an eager optimizer made some for the new groups


def _placed(value: Any, parameter: torch.Tensor, on_host: bool, key: object = None) -> Any:
    """State as torch's own policy places it: `step` on the host unless compiled in, all else beside."""
    if isinstance(value, torch.Tensor):
        return value.clone() if key == "step" and on_host else _beside(value, parameter)
    if isinstance(value, dict):
        return type(value)({name: _placed(item, parameter, on_host, name) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)([_placed(item, parameter, on_host) for item in value])
    return value


def _beside(value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A copy that stands where another tensor stands, made from it as an optimizer makes its state."""
    if like is None or value.layout is not torch.strided:
        return value.clone() if like is None else value.to(like.device, copy=True)
    made = like.detach().new_empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return made.copy_(value)


def _uncast(placed: Any, loaded: Any) -> Any:
    """What torch loaded, but with the numbers as saved: it casts them to the parameter's type."""
    if isinstance(placed, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == placed.dtype else placed
    if isinstance(placed, dict) and isinstance(loaded, dict):
        return {**loaded, **{key: _uncast(item, loaded.get(key)) for key, item in placed.items()}}
    if isinstance(placed, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(placed)([_uncast(one, other) for one, other in zip(placed, loaded, strict=True)])
    return placed


def _copied(value: Any) -> Any:
    """The same, with tensors of its own: whoever loads a state may go on changing it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({key: _copied(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)([_copied(item) for item in value])
    return value


def _put_random(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"].clone())
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in saved:
        kind, words, position, has_gauss, cached = saved["numpy"]
        words = numpy.array(words.tolist(), dtype=numpy.uint32)
        numpy.random.set_state((kind, words, position, has_gauss, cached))
