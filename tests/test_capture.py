"""A run that is captured, rebuilt and restored goes on bit for bit as the one that never stopped."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils._python_dispatch import TorchDispatchMode

from interlock.backends.double import ReplacingDouble
from interlock.capture import capture, class_of, describe, is_of_class
from interlock.checkpoint import CheckpointMismatch
from interlock.residency import Registry
from interlock.restoring import restore
from interlock.store import Store


class Norm(nn.Module):
    """As batch normalisation: with statistics that it keeps, and that decide what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("tracked", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.tracked += 1
            with torch.no_grad():
                self.running_mean += (x.mean(0) - self.running_mean) / self.tracked
        return (x - self.running_mean.clone()) * self.weight + self.bias


class Net(nn.Module):
    """Tied weights, dropout, batch statistics, buffers that are not persistent, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.norm = Norm()
        self.frozen = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)
        self.out.weight = self.into.weight
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.calls = 0
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.cache = x.detach().mean(0) * self.calls
        return self.out(self.frozen(self.drop(self.norm(self.into(x)))) + 0.01 * self.seen)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Parts(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any


def host(tensor: torch.Tensor) -> torch.Tensor:
    """What `Adapter.fetch` does on the CPU: an alias."""
    return tensor.detach()


def taken(parts: Parts, **more: Any) -> dict[str, Any]:
    return capture(parts.model, [parts.optimizer], [parts.scheduler], fetch=host, **more)


def put(state: Any, parts: Parts, **more: Any) -> None:
    restore(state, parts.model, [parts.optimizer], [parts.scheduler], **more)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def different(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two states differ, to the bit and the type."""
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} / {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
        return [] if same else [f"{where}: {one} / {other}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{where}: {list(one)} / {list(other)}"]
        return [line for key in one for line in different(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} / {len(other)} items"]
        return [
            line
            for i, pair in enumerate(zip(one, other, strict=True))
            for line in different(*pair, f"{where}[{i}]")
        ]
    return [] if one == other or (one != one and other != other) else [f"{where}: {one!r} / {other!r}"]


def train(parts: Parts, steps: range) -> None:
    for step in steps:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        if random.random() < 0.5:
            x = x + float(np.random.rand())

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            parts.optimizer.zero_grad()
            loss = parts.model(x).square().mean()
            loss.backward()
            return loss

        loss = parts.optimizer.step(closure)
        if isinstance(parts.scheduler, lrs.ReduceLROnPlateau):
            parts.scheduler.step(loss.detach())
        else:
            parts.scheduler.step()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AMSGrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "NumPy's lr": lambda p: torch.optim.AdamW(p, np.float64(0.01)),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.05, total_steps=40, cycle_momentum=False),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=1.0),
}


def built(seed: int, optimizer: str, scheduler: str, groups: bool) -> Parts:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net()
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if groups and optimizer != "LBFGS":
        trained = [{"params": trained[:1], "weight_decay": 0.0}, {"params": trained[1:]}]
    made = OPTIMIZERS[optimizer](trained)
    return Parts(model, made, SCHEDULERS[scheduler](made))


CHOICES = {
    "optimizer": st.sampled_from(list(OPTIMIZERS)),
    "scheduler": st.sampled_from(list(SCHEDULERS)),
    "groups": st.booleans(),
}


@given(**CHOICES, before=st.integers(0, 5), after=st.integers(0, 4))
def test_it_goes_on_bit_for_bit(
    optimizer: str, scheduler: str, groups: bool, before: int, after: int
) -> None:
    parts = built(1, optimizer, scheduler, groups)
    train(parts, range(before))
    state = taken(parts)
    then = copy.deepcopy(state)
    train(parts, range(before, before + after))
    end = taken(parts)
    assert different(state, then) == []  # it holds the values of the moment at which it was taken

    read = through_a_file(state)
    resumed = built(2, optimizer, scheduler, groups)
    identities = [id(p) for p in resumed.model.parameters()]
    put(read, resumed)
    assert different(taken(resumed), then) == []
    train(resumed, range(before, before + after))
    assert different(taken(resumed), end) == []
    assert [id(p) for p in resumed.model.parameters()] == identities
    assert different(read, then) == []  # nothing of it was kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name: str) -> None:
    test_it_goes_on_bit_for_bit.hypothesis.inner_test(name, "StepLR", True, 4, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_scheduler(name: str) -> None:
    test_it_goes_on_bit_for_bit.hypothesis.inner_test("Adam", name, False, 4, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["parameters", "buffers", "optimizers", "schedulers", "random", "modules"])
def test_a_part_that_is_not_restored_would_be_seen(part: str) -> None:
    """The planted fault: one part is that of another moment."""
    parts = built(1, "Adam", "StepLR", False)
    train(parts, range(2))
    early = taken(parts)
    train(parts, range(2, 4))
    state = taken(parts)
    train(parts, range(4, 6))
    end = taken(parts)
    resumed = built(2, "Adam", "StepLR", False)
    put({**state, part: early[part]}, resumed)
    train(resumed, range(4, 6))
    assert different(taken(resumed), end) != []


# What changed in mid-run


def test_groups_that_were_added_and_layers_that_were_thawed_come_back() -> None:
    def thaw(parts: Parts) -> None:
        parts.model.frozen.requires_grad_(True)
        parts.optimizer.add_param_group({"params": [parts.model.frozen.weight], "lr": 0.003})
        parts.optimizer.param_groups[0]["params"].insert(1, parts.model.frozen.bias)

    def on(parts: Parts, steps: range) -> None:
        for step in steps:
            parts.optimizer.zero_grad()
            parts.model(torch.full((3, 4), float(step)) + torch.eye(3, 4)).square().mean().backward()
            parts.optimizer.step()

    one = built(1, "Adam", "StepLR", True)
    on(one, range(2))
    thaw(one)
    on(one, range(2, 4))
    state = through_a_file(taken(one))
    on(one, range(4, 7))

    other = built(2, "Adam", "StepLR", True)
    put(state, other)
    assert [len(g["params"]) for g in other.optimizer.param_groups] == [2, 4, 1]
    assert other.model.frozen.weight.requires_grad
    on(other, range(4, 7))
    assert different(taken(other), taken(one)) == []


def test_fewer_groups_than_there_are_is_an_error() -> None:
    state = taken(built(1, "Adam", "StepLR", False))
    other = built(2, "Adam", "StepLR", True)
    with pytest.raises(CheckpointMismatch, match="has 2 groups, and had 1"):
        put(state, other)


def test_flags_of_modules_come_back() -> None:
    one = built(1, "Adam", "StepLR", False)
    one.model.norm.eval()
    other = built(2, "Adam", "StepLR", False)
    put(taken(one), other)
    assert [m.training for m in other.model.modules()] == [m.training for m in one.model.modules()]


def test_moments_finer_than_their_parameter_keep_their_bits() -> None:
    """torch casts them to the parameter's type when they are loaded."""

    def fresh() -> Parts:
        model = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.Adam(model.parameters())
        return Parts(model, optimizer, lrs.StepLR(optimizer, 2))

    one = fresh()
    for p in one.model.parameters():
        one.optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    other = fresh()
    put(taken(one), other)
    assert different(taken(other)["optimizers"], taken(one)["optimizers"]) == []


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and shares its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                slow = state.setdefault("slow", p.detach().clone())
                if state["n"] % 2 == 0:
                    p.data.copy_(slow.lerp_(p.detach(), 0.5))
        return loss


def test_an_optimizer_that_wraps_another_still_shares_its_groups() -> None:
    def wrapped(seed: int) -> Parts:
        parts = built(seed, "Adam", "StepLR", True)
        optimizer = Lookahead(parts.optimizer)
        return Parts(parts.model, optimizer, lrs.StepLR(optimizer, 2))

    one, other = wrapped(1), wrapped(2)
    train(one, range(3))
    state = through_a_file(taken(one))
    train(one, range(3, 8))
    put(state, other)
    assert other.optimizer.param_groups is other.optimizer.inner.param_groups
    train(other, range(3, 8))
    assert different(taken(other), taken(one)) == []
    assert other.optimizer.inner.param_groups[0]["lr"] == one.optimizer.inner.param_groups[0]["lr"] < 0.01


class Keeping(torch.optim.SGD):
    """Loads its state into the containers that it has."""

    def load_state_dict(self, state_dict: Any) -> None:
        for group, new in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in new.items() if key != "params"})
        held = [p for group in self.param_groups for p in group["params"]]
        self.state.update({held[i]: value for i, value in state_dict["state"].items()})


def test_an_optimizer_that_loads_in_place_keeps_what_it_loaded() -> None:
    def fresh(seed: int) -> Parts:
        parts = built(seed, "SGD", "StepLR", False)
        trained = [p for p in parts.model.parameters() if p.requires_grad]
        optimizer = Keeping(trained, 0.01, momentum=0.9)
        return Parts(parts.model, optimizer, lrs.StepLR(optimizer, 2))

    one, other = fresh(1), fresh(2)
    train(one, range(3))
    state = through_a_file(taken(one))
    put(state, other)
    assert different(taken(other), taken(one)) == []


class Strange(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {"mine": 1}


def test_an_optimizer_whose_state_has_no_groups_is_refused() -> None:
    parts = built(1, "SGD", "StepLR", False)
    with pytest.raises(CheckpointMismatch, match="has a state_dict without 'state'"):
        taken(parts._replace(optimizer=Strange(parts.model.parameters(), 0.1)))


def test_an_optimizer_of_another_model_is_refused() -> None:
    parts = built(1, "SGD", "StepLR", False)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(CheckpointMismatch, match=r"group 0, holds 1 tensor\(s\) not of the model"):
        taken(parts._replace(optimizer=foreign))


# What else decides the future


class Counter:
    def __init__(self) -> None:
        self.state: Any = {"n": 0, "mean": torch.zeros(2)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_a_task_names_besides() -> None:
    parts = built(1, "SGD", "StepLR", False)
    counter, generator = Counter(), torch.Generator().manual_seed(5)
    counter.state = {"n": 3, "mean": torch.ones(2)}
    state = through_a_file(taken(parts, extra={"counter": counter, "loader": generator}))
    expected = torch.rand(3, generator=generator)
    again, another = Counter(), torch.Generator().manual_seed(6)
    put(state, parts, extra={"counter": again, "loader": another})
    assert again.state["n"] == 3
    assert torch.equal(again.state["mean"], torch.ones(2))
    assert torch.equal(torch.rand(3, generator=another), expected)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, np.ones(2), np.float32(1), frozenset("a"), Counter()],
    ids=lambda v: type(v).__name__,
)
def test_what_would_need_code_to_read_is_refused_when_it_is_captured(value: Any) -> None:
    counter = Counter()
    counter.state = {"list": [1, value]}
    with pytest.raises(CheckpointMismatch, match=r"'mine', at 'list', at 1 is a .*keep numbers"):
        taken(built(1, "SGD", "StepLR", False), extra={"mine": counter})


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="has no state_dict and load_state_dict"):
        taken(built(1, "SGD", "StepLR", False), extra={"mine": 3})


def test_the_manifest_is_plain_and_says_what_trains(tmp_path: Path) -> None:
    parts = built(1, "tensor lr", "StepLR", True)
    train(parts, range(2))
    state = taken(parts)
    store = Store(tmp_path / "checkpoints")
    saved = store.write(state, {"step": 2, "epoch": 1, "boundary": "step", **describe(state)})
    try:
        assert saved.about["ties"] == [["into.weight", "out.weight"]]
        assert saved.about["requires_grad"]["frozen.weight"] is False
        assert saved.about["parameters"]["into.weight"] == {"shape": [4, 4], "dtype": "float32"}
        assert [g["params"][0] for g in saved.about["optimizers"][0]["groups"]] == [
            "into.weight",
            "into.bias",
        ]
        other = built(2, "tensor lr", "StepLR", True)
        lr = other.optimizer.param_groups[0]["lr"]
        put(store.read(saved), other)
        assert other.optimizer.param_groups[0]["lr"] is lr
        assert different(taken(other), state) == []
    finally:
        store.close()


# What does not fit


def spoilt(change: Callable[[Any], object]) -> Iterator[str]:
    parts = built(1, "Adam", "StepLR", False)
    train(parts, range(2))
    state = taken(parts)
    other = built(2, "Adam", "StepLR", False)
    before = taken(other)
    change(state)
    with pytest.raises(CheckpointMismatch) as caught:
        put(state, other)
    assert different(taken(other), before) == []  # nothing was changed
    yield from caught.value.problems


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s["parameters"].pop("into.weight"),
            "parameter 'into.weight' is there, and was not saved",
        ),
        (
            lambda s: s["parameters"].update(more=torch.ones(1)),
            "parameter 'more' was saved, and is not there",
        ),
        (
            lambda s: s["parameters"].update({"into.bias": torch.ones(5)}),
            "was float32[5], and is float32[4]",
        ),
        (
            lambda s: s["parameters"].update({"into.bias": torch.ones(4).double()}),
            "was float64[4], and is float32[4]",
        ),
        (lambda s: s["buffers"].pop("norm.running_mean"), "buffer 'norm.running_mean' is there"),
        (lambda s: s["transient"].update(more=None), "buffer 'more' was saved, and the model has none"),
        (lambda s: s["ties"].clear(), "'into.weight', 'out.weight' are one tensor, and were not"),
        (lambda s: s["ties"].append(["a", "b"]), "'a', 'b' were one tensor, and are not now"),
        (lambda s: s["training"].update(more=True), "module 'more' was saved"),
        (
            lambda s: s["optimizers"][0].update({"class": "X"}),
            "optimizer '0' was a X, and is a torch.optim.adam.Adam",
        ),
        (
            lambda s: s["optimizers"][0]["groups"][0]["params"].remove("into.bias"),
            "optimizer 0, group 0, holds 'into.bias', which were not in it",
        ),
        (
            lambda s: s["optimizers"][0]["groups"][0]["params"].append("gone"),
            "optimizer 0 held 'gone', which the model does not have",
        ),
        (lambda s: s["schedulers"].clear(), "scheduler '0' is there, and was not saved"),
        (lambda s: s["extra"].update(scaler={"class": "X"}), "extra 'scaler' was saved"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changed(change: Callable[[Any], object], said: str) -> None:
    assert [problem for problem in spoilt(change) if said in problem] != []


def test_all_that_does_not_fit_is_named_at_once() -> None:
    def change(state: Any) -> None:
        state["parameters"].pop("into.weight")
        state["ties"].clear()
        state["schedulers"].clear()

    assert len(list(spoilt(change))) == 3


# On a device


def placed(seed: int, kind: str = "Adam") -> tuple[ReplacingDouble, Parts]:
    adapter = ReplacingDouble()
    torch.manual_seed(seed)
    model = Net()
    registry = Registry(model, adapter)
    adapter.acquire()
    with adapter.session():
        adapter.place(model)
        registry.after_placement()
        optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    return adapter, Parts(model, optimizer, lrs.StepLR(optimizer, 2))


def on(adapter: ReplacingDouble, parts: Parts, steps: range) -> None:
    with adapter.session():
        for step in steps:
            x = adapter.move(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
            parts.optimizer.zero_grad()
            parts.model(x).square().mean().backward()
            parts.optimizer.step()
            parts.scheduler.step()
        parts.optimizer.zero_grad()


def test_on_the_replacing_double(tmp_path: Path) -> None:
    """Nothing of a checkpoint stays on the device, and what is restored stands where a run's own does."""

    def saved(adapter: ReplacingDouble, parts: Parts) -> dict[str, Any]:
        before = adapter.allocated
        with adapter.session():
            state = capture(parts.model, [parts.optimizer], [parts.scheduler], fetch=adapter.fetch)
        assert adapter.allocated == before
        return state

    adapter, parts = placed(1)
    on(adapter, parts, range(3))
    held = adapter.allocated
    store = Store(tmp_path / "checkpoints")
    written = store.write(saved(adapter, parts), {"step": 3, "epoch": 1, "boundary": "step"})
    assert adapter.allocated == held
    on(adapter, parts, range(3, 5))

    other, resumed = placed(2)
    state = store.read(written)
    store.close()
    with other.session():
        restore(state, resumed.model, [resumed.optimizer], [resumed.scheduler])
    assert other.allocated == held
    for p, values in resumed.optimizer.state.items():
        assert other.resident(p)
        assert other.resident(values["exp_avg"])
        assert not other.resident(values["step"])
    on(other, resumed, range(3, 5))
    assert different(saved(other, resumed), saved(adapter, parts)) == []


class Peak(TorchDispatchMode):
    """The most that the double's device held after any operation."""

    def __init__(self, adapter: ReplacingDouble) -> None:
        super().__init__()
        self.adapter, self.most = adapter, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, self.adapter.allocated)
        return out


@pytest.mark.parametrize("kind", ["Adam", "AMSGrad", "Adagrad", "momentum"])
def test_restoring_needs_no_more_of_the_device_than_the_run(kind: str) -> None:
    """Adagrad makes its state when it is built: that must go before the saved one comes."""
    adapter, parts = placed(1, kind)
    on(adapter, parts, range(2))
    held = adapter.allocated
    with adapter.session():
        state = capture(parts.model, [parts.optimizer], [parts.scheduler], fetch=adapter.fetch)
    other, resumed = placed(2, kind)
    with other.session(), Peak(other) as peak:
        restore(state, resumed.model, [resumed.optimizer], [resumed.scheduler])
    assert other.allocated == held
    assert peak.most <= held


def test_needing_more_would_be_seen() -> None:
    """The planted fault: the usual way, which loads the whole state beside what a new optimizer has."""
    adapter, parts = placed(1, "Adagrad")
    on(adapter, parts, range(2))
    held = adapter.allocated
    state = parts.optimizer.state_dict()
    other, _ = placed(2, "Adagrad")
    with other.session(), Peak(other) as peak:
        moved = [other.move(v["sum"].clone()) for v in state["state"].values()]
        torch.ones_like(moved[0])
    assert peak.most > held


def test_a_class_is_the_same_in_a_program_and_imported():
    class Own:
        """One of a user's."""

    kind = f"{Own.__qualname__}"
    assert is_of_class(Own(), class_of(Own()))
    assert is_of_class(Own(), f"__main__.{kind}")
    assert not is_of_class(Own(), f"elsewhere.{kind}")
    assert not is_of_class(Own(), "__main__.Other")
