"""Takes from a run, at one moment, everything that decides its future: by name, on the host, as plain data.

`restoring.py` puts it back, and `checkpoint.py` writes it. Taken are parameters and buffers (those that
are not persistent too), ties, the `requires_grad` and `training` flags, the extra state of modules,
optimizers with their groups, schedulers, random generators, and what a task names besides. Not taken
are other attributes of modules: a counter that is a plain number is a buffer's business.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .checkpoint import CheckpointMismatch
from .residency import family

Fetch = Callable[[torch.Tensor], torch.Tensor]

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size,
)  # fmt: skip
"""What can be read back without running code of the file."""


def capture(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    *,
    fetch: Fetch,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Take the state of a run as it is now; what is trained afterwards does not change it.

    Args:
        model: As placed.
        optimizers: As built; those that they wrap are included.
        schedulers: As built; each has `state_dict` and `load_state_dict`.
        fetch: Brings a tensor to the host: `Adapter.fetch`. It may return an alias.
        extra: Name -> what else decides the future: a `torch.Generator`, or an object with `state_dict`
            and `load_state_dict` that keeps plain data and tensors.

    Returns:
        Tensors on the host and plain data, as `Store.write` takes it and `restore` gives it back.

    Raises:
        CheckpointMismatch: Something in it cannot be saved; names all of that.
    """
    taker = _Taker(fetch)
    names = names_of(model)
    state = {
        "parameters": {name: taker.tensor(p) for name, p in model.named_parameters()},
        "buffers": {name: taker.plain(b, f"buffer '{name}'") for name, b in buffers(model, persistent=True)},
        "transient": {
            name: taker.plain(b, f"buffer '{name}'") for name, b in buffers(model, persistent=False)
        },
        "ties": ties(model),
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "modules": {
            name: taker.plain(module.get_extra_state(), f"the extra state of module '{name}'")
            for name, module in with_extra_state(model)
        },
        "optimizers": [
            taker.optimizer(one, f"optimizer {i}", names) for i, one in enumerate(family(optimizers))
        ],
        "schedulers": [taker.stateful(one, f"scheduler {i}") for i, one in enumerate(schedulers)],
        "extra": {name: taker.stateful(one, f"'{name}'") for name, one in (extra or {}).items()},
        "random": _random(),
    }
    if taker.problems:
        raise CheckpointMismatch("the state cannot be saved", taker.problems)
    return state


def describe(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of a state: names, shapes, ties, what trains and in which group. Plain data.

    Args:
        state: As captured.
    """
    tensors = {**state["parameters"], **state["buffers"]}
    groups = [
        [{key: _shown(value) for key, value in group.items()} for group in optimizer["groups"]]
        for optimizer in state["optimizers"]
    ]
    return {
        "parameters": {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in tensors.items()
            if tensor is not None
        },
        "ties": state["ties"],
        "requires_grad": state["requires_grad"],
        "optimizers": [
            {"class": optimizer["class"], "groups": some}
            for optimizer, some in zip(state["optimizers"], groups, strict=True)
        ],
        "schedulers": [scheduler["class"] for scheduler in state["schedulers"]],
    }


def names_of(model: nn.Module) -> dict[int, str]:
    """id -> name of the parameters, of a tied one the first."""
    return {id(p): name for name, p in model.named_parameters()}


def buffers(model: nn.Module, *, persistent: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The buffers by name, tied ones once; also those that stand empty."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if (name not in module._non_persistent_buffers_set) is persistent and id(buffer) not in seen:
                if buffer is not None:
                    seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def ties(model: nn.Module) -> list[list[str]]:
    """The groups of names under which one parameter or buffer stands."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that say that they have state beside parameters and buffers."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def class_of(thing: object) -> str:
    """A class's full name, by which a saved part is compared with the present one."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def is_of_class(thing: object, name: str) -> bool:
    """Whether a part is of the class that a saved one was of.

    A program that is started as a file has its classes in `__main__`, and in a module when it is imported,
    as `interlock fit` does: these are the same.
    """
    kind = type(thing)
    module = name.removesuffix(f".{kind.__qualname__}")
    return name == class_of(thing) or (module != name and "__main__" in (module, kind.__module__))


class _Taker:
    """Copies to the host, and collects what cannot be saved."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.problems: list[str] = []

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host that nobody else has."""
        with torch.no_grad():
            copy = self._fetch(tensor).detach()
            if copy.layout is not torch.strided or tensor.layout is not torch.strided:
                return copy.clone()
            if copy.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                return copy.clone()
        return copy

    def plain(self, value: Any, where: str) -> Any:
        """A copy of nested data; what could not be read back without running code is a problem."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if kind in _PLAIN:
            return value
        if kind in (dict, OrderedDict, Counter):
            bad = [key for key in value if type(key) not in _PLAIN]
            if bad:
                self._refuse(bad[0], f"a key of {where}")
            return kind({key: self.plain(item, f"{where}, at {key!r}") for key, item in value.items()})
        if kind in (list, tuple, set):
            return kind([self.plain(item, f"{where}, at {i}") for i, item in enumerate(value)])
        number = _of_numpy(value)
        if number is None:
            self._refuse(value, where)
        return number

    def optimizer(self, optimizer: Optimizer, where: str, names: Mapping[int, str]) -> dict[str, Any]:
        """Groups and state by the names of parameters."""
        dictionary = optimizer.state_dict()
        if not {"state", "param_groups"} <= set(dictionary):
            self.problems.append(
                f"{where}, a {type(optimizer).__name__}, has a state_dict without 'state' and 'param_groups' "
                "and cannot be saved by name: leave `state_dict` as it is in torch's optimizers"
            )
            return {}
        by_index: dict[Any, str] = {}
        groups = []
        for i, (group, packed) in enumerate(
            zip(optimizer.param_groups, dictionary["param_groups"], strict=True)
        ):
            held = [names.get(id(p), "") for p in group["params"]]
            if not all(held):
                self.problems.append(f"{where}, group {i}, holds {held.count('')} tensor(s) not of the model")
            by_index.update(zip(packed["params"], held, strict=True))
            settings = {key: value for key, value in packed.items() if key != "params"}
            groups.append({"params": held, **self.plain(settings, f"{where}, group {i}")})
        own = {key: value for key, value in dictionary.items() if key not in ("state", "param_groups")}
        return {
            "class": class_of(optimizer),
            "groups": groups,
            "state": {
                name: self.plain(dictionary["state"][key], f"{where}, the state of '{name}'")
                for key, name in by_index.items()
                if key in dictionary["state"]
            },
            "other": {
                key: self.plain(value, f"{where}, its state {key!r}")
                for key, value in dictionary["state"].items()
                if key not in by_index
            },
            "own": self.plain(own, where),
        }

    def stateful(self, thing: Any, where: str) -> dict[str, Any]:
        """Its class and its state."""
        if isinstance(thing, torch.Generator):
            return {"class": class_of(thing), "state": thing.get_state().clone()}
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            self.problems.append(
                f"{where}, a {type(thing).__name__}, has no state_dict and load_state_dict: give it both"
            )
            return {}
        return {"class": class_of(thing), "state": self.plain(thing.state_dict(), where)}

    def _refuse(self, value: object, where: str) -> None:
        self.problems.append(
            f"{where} is a {class_of(value)}, which is not read back, since that could run code of the file: "
            "keep numbers, strings, lists, dictionaries and tensors there"
        )


def _of_numpy(value: Any) -> Any:
    """A number of NumPy's as the same number of Python's; `None` if it is none, or would not be the same."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.float64, numpy.integer, numpy.bool_)):
        return None
    return value.item()


def _random() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.tensor([int(key) for key in keys], dtype=torch.int64)
        state["numpy"] = [str(kind), words, int(position), int(has_gauss), float(cached)]
    return state


def _shown(value: Any) -> Any:
    """A value of a group as JSON can have it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
