"""What comes home, and as which object: who held a tensor before the run holds the trained one after it."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tools.small import (
    NAMES,
    WITH_KEEPING,
    Keeping,
    Net,
    batches,
    engine,
    failed,
    finished,
    left_clean,
    loss_of,
    net,
    run,
    same,
    seeded,
    sgd,
    task,
    values,
)
from torch import nn
from torch.optim import SGD, AdamW

import interlock as il
from interlock import errors, owners, residency
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.fused import fuse
from interlock.owners import describe_owner
from interlock.residency import Registry, rebind, slots

on_each_backend = pytest.mark.parametrize("backend", WITH_KEEPING)


class Many(nn.Module):
    """Everything that a module may hold a tensor in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))])
        self.by_name = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("absent", None)
        self.plain = torch.ones(3)
        self.weights = [self.linear.weight, {"bias": (self.linear.bias,)}]
        self.seen: list[torch.Tensor] = []
        self.last: dict[str, Any] = {}
        self.config = {"name": "many", "sizes": [4, 3]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x)) * self.scales[0] + self.scales[1] + self.by_name["a"] * self.plain
        y = y + self.table + self.weights[0].sum() + self.weights[1]["bias"][0].sum()
        self.seen.append(y.detach())
        self.last["y"] = (y, "with its graph")
        return y


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    fuse(optimizer)  # as the engine does
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def objects(model: nn.Module) -> dict[str, torch.Tensor]:
    """The objects that stand in a model, by name."""
    return {slot.name: slot.value for slot in slots(model) if slot.table != "__dict__"}


def same_objects(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


# Identity


@on_each_backend
@pytest.mark.parametrize("build", [Net, Many])
def test_what_was_held_before_the_run_is_what_is_trained(backend: str, build: type[nn.Module]) -> None:
    model = seeded(build)
    held, before = objects(model), values(model)
    outcome = run(backend, task(model=model), epochs=2)
    assert finished(outcome) is model
    assert same_objects(objects(model), held)
    assert not any("identity lost" in note for note in outcome.notes)
    expected = seeded(build)
    by_hand(expected, sgd(expected), batches() * 2)
    assert same(values(model), values(expected))
    assert not same(values(model), before)


@on_each_backend
def test_a_built_model_is_returned_and_its_first_objects_are_the_trained_ones(backend: str) -> None:
    made: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []

    def build() -> nn.Module:
        model = net()
        made.append((model, objects(model)))
        return model

    outcome = run(backend, task(model=build))
    ((model, held),) = made
    assert finished(outcome) is model
    assert same_objects(objects(model), held)
    expected = net()
    by_hand(expected, sgd(expected), batches())
    assert same(values(model), values(expected))


@on_each_backend
def test_containers_and_plain_attributes_come_home_in_place(backend: str) -> None:
    model = seeded(Many)
    plain, weights, seen, last, config = model.plain, model.weights, model.seen, model.last, model.config
    finished(run(backend, task(model=model)))
    assert model.plain is plain
    assert model.config is config
    assert model.weights is weights
    assert weights[0] is model.linear.weight
    assert weights[1]["bias"][0] is model.linear.bias
    assert model.seen is seen
    assert len(seen) == 6
    assert model.last is last
    if backend != "cpu":
        assert last["y"][0].grad_fn is None  # the graph, which holds device memory, stayed behind
    assert last["y"][1] == "with its graph"


@on_each_backend
def test_a_recurrent_module_goes_on_with_its_own_parameters(backend: str) -> None:
    """It keeps them in a list beside the slots, which must follow them on both ways."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x[:, None])[0][:, 0]

    model = seeded(Recurrent)
    flat = [id(p) for p in model.lstm._flat_weights]
    outcome = run(backend, task(model=model))
    finished(outcome)
    assert [id(p) for p in model.lstm._flat_weights] == flat == [id(p) for p in model.lstm.parameters()]
    expected = seeded(Recurrent)
    optimizer = sgd(expected)
    by_hand(expected, optimizer, batches())
    assert same(values(model), values(expected))
    by_hand(expected, optimizer, batches())
    by_hand(model, outcome.optimizer, batches())
    assert same(values(model), values(expected))


@on_each_backend
def test_a_buffer_with_a_graph_comes_home_without_it(backend: str) -> None:
    """The graph holds what was saved for a backward pass, all of it on the device."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = loss_of(model, batch)
        model.seen = value * 2
        return value

    model = net()
    finished(run(backend, task(model=model, loss=loss)))
    assert model.seen.grad_fn is None
    assert not model.seen.requires_grad


@on_each_backend
def test_freezing_in_mid_run_is_kept(backend: str) -> None:
    def freeze(model: Any, _: Any) -> None:
        model.body.requires_grad_(False)

    model = net()
    with pytest.warns(errors.FrozenParameterWarning, match=r"body\.weight"):
        finished(run(backend, task(model=model, adopt={1: freeze}), epochs=2))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert [p.is_leaf for p in model.parameters()] == [True] * 4


@on_each_backend
def test_no_gradient_stays(backend: str) -> None:
    model = net()
    outcome = run(backend, task(model=model))
    finished(outcome)
    assert all(p.grad is None for p in model.parameters())


# Identity that cannot be kept


@on_each_backend
def test_another_shape_or_dtype_is_kept_in_the_same_object(backend: str) -> None:
    steps = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:
            model.body.weight.data = model.body.weight.detach().double()
            model.body.weight.requires_grad_(True)
            model.seen = model.seen.double()
        return nn.functional.linear(batch[0], model.body.weight.float()).square().mean() + loss_of(
            copy.copy(model.head), (torch.ones(5, 8) * model.body.bias, batch[1])
        )

    model = net()
    weight = model.body.weight
    outcome = run(backend, task(model=model, loss=loss))
    finished(outcome)
    assert model.body.weight is weight
    assert weight.dtype is torch.float64
    lost = [note for note in outcome.notes if "identity lost" in note]
    assert len(lost) == 1
    assert "'seen'" in lost[0]  # assigned by the user: another object than before
    assert "'body.weight'" not in lost[0]


@on_each_backend
@pytest.mark.parametrize("given", [True, False])
def test_a_replaced_parameter_is_named_as_lost(backend: str, given: bool) -> None:
    """And the one that it replaced, which the optimizer holds, comes home too."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return loss_of(model, batch)

    model = net()
    earlier, bias = model.head.weight, model.head.bias
    outcome = run(backend, task(model=model if given else net, loss=loss))
    failed(outcome, errors.ReplacedParameter)
    (lost,) = [note for note in outcome.notes if "identity lost" in note]
    assert "at 'head.weight' of the model" in lost
    assert "does not hold what was trained" in lost
    if given:
        assert model.head.weight is not earlier
        assert model.head.bias is bias


@on_each_backend
def test_another_layout_is_named_as_lost(backend: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("mask", torch.eye(3))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        model.mask = torch.eye(3).to_sparse()
        return loss_of(model.linear, batch)

    model = Table()
    outcome = run(backend, task(model=model, loss=loss))
    finished(outcome)
    assert torch.equal(model.mask.to_dense(), torch.eye(3))
    assert [note for note in outcome.notes if "identity lost: at 'mask' of the model" in note]


# Exit policies


@on_each_backend
@pytest.mark.parametrize("given", [True, False])
def test_keep_passes_the_model_on_where_it_stands(backend: str, given: bool) -> None:
    model = net()
    adapter: Any = {"cpu": CpuAdapter, "double": ReplacingDouble, "keeping": Keeping}[backend]()
    outcome = il.Engine(adapter, exit="keep").fit(task(model=model if given else net), batches())
    assert outcome.model is not None
    assert outcome.residue.bytes == 0
    resident = [adapter.resident(p) for p in outcome.model.parameters()]
    assert resident == [backend != "cpu"] * 4
    assert ("kept" in {entry.event for entry in outcome.history}) is True
    assert all(p.grad is None for p in outcome.model.parameters())
    if backend != "cpu":
        assert "bytes of the model kept on the device" in outcome.residue.by_design
    expected = net()
    by_hand(expected, sgd(expected), batches())
    assert same(values(outcome.model), values(expected))
    if backend == "double" and given:
        (lost,) = [note for note in outcome.notes if "identity lost" in note]
        assert all(f"'{name}'" in lost for name in NAMES)


@on_each_backend
@pytest.mark.parametrize("given", [True, False])
def test_discard_leaves_nothing(backend: str, given: bool) -> None:
    model = net()
    held = objects(model)
    outcome = run(backend, task(model=model if given else net, optimizer=adamw), exit="discard")
    left_clean(outcome)
    assert outcome.status == "finished"
    assert outcome.model is None
    assert outcome.optimizer is None
    assert "discarded" in {entry.event for entry in outcome.history}
    if given:
        assert same_objects(objects(model), held)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), 0.01)


@on_each_backend
@pytest.mark.parametrize("policy", ["offload", "keep", "discard"])
def test_each_policy_leaves_nothing_after_a_failure(backend: str, policy: Any) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        raise KeyError("planted")

    outcome = run(backend, task(model=net, optimizer=adamw, loss=loss), exit=policy)
    assert failed(outcome, KeyError, "training").args == ("planted",)


# The optimizer that is returned


@on_each_backend
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        sgd,
        adamw,
        lambda model: torch.optim.Adagrad(model.parameters(), 0.01, initial_accumulator_value=0.5),
        lambda model: AdamW(model.parameters(), torch.tensor(0.01), foreach=False),
        lambda model: SGD(model.parameters(), 0.01, momentum=0.9),
    ],
)
def test_the_returned_optimizer_goes_on_by_hand_to_the_bit(backend: str, given: bool, make: Any) -> None:
    outcome = run(backend, task(model=net() if given else net, optimizer=make))
    model, optimizer = finished(outcome), outcome.optimizer
    assert optimizer is not None
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    expected = net()
    other = make(expected)
    by_hand(expected, other, batches())
    assert same(values(model), values(expected))
    by_hand(expected, other, batches(seed=5))
    by_hand(model, optimizer, batches(seed=5))
    assert same(values(model), values(expected))
    assert same(optimizer.state_dict(), other.state_dict())


@on_each_backend
def test_the_returned_optimizer_goes_on_in_another_run(backend: str) -> None:
    """Its parameters are the model's own, which a second run finds in it where placement keeps them."""
    first = engine(backend).fit(task(model=net(), optimizer=adamw), batches())
    again = task(model=first.model, optimizer=lambda _: first.optimizer)
    outcome = run(backend, again)
    if backend != "double":
        finished(outcome)
    else:
        assert failed(outcome, errors.StaleParameter).parameters == NAMES


@on_each_backend
def test_a_state_of_ones_own_comes_home_wherever_it_stands(backend: str) -> None:
    """State under keys that are no parameters, nested state, options of groups, attributes, defaults."""

    class Own(SGD):
        def __init__(self, model: nn.Module) -> None:
            self.one = next(model.parameters()).detach().sum() * 0 + 1  # made there, so that it stands there
            super().__init__(model.parameters(), self.one * 0.1)
            self.average = self.one * 3
            self.history: list[torch.Tensor] = []
            self.mine = list(model.parameters())

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["extra"] = {"norms": [self.one + 1]}
                for parameter in group["params"]:
                    self.state[parameter]["deep"] = {"list": [parameter.grad.clone()]}
            self.state["global"] = (self.one + 1)[None]  # type: ignore[index]
            self.state["number"] = 3  # type: ignore[index]
            self.history.append(self.one + 1)
            super().step()

    model = net()
    outcome = run(backend, task(model=model, optimizer=Own))
    finished(outcome)
    optimizer: Any = outcome.optimizer
    assert optimizer.state["number"] == 3
    assert optimizer.state["global"].tolist() == [2]
    assert optimizer.average.item() == 3
    assert all(a is b for a, b in zip(optimizer.mine, model.parameters(), strict=True))
    assert set(map(id, model.parameters())) <= {id(key) for key in optimizer.state}
    assert len(optimizer.history) == 6
    assert optimizer.defaults["lr"] is optimizer.param_groups[0]["lr"]


def test_rebinding_is_whole_or_not_at_all_and_can_be_repeated() -> None:
    model = net()
    optimizer = adamw(model)
    by_hand(model, optimizer, batches(1))
    new = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    before = copy.deepcopy(list(optimizer.state.values()))
    for _ in range(2):
        rebind(optimizer, new)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in new.values()]
        assert [id(p) for p in optimizer.state] == [id(p) for p in new.values()]
        assert same(list(optimizer.state.values()), before)
        assert optimizer.state[nn.Parameter(torch.ones(1))] == {}  # still a defaultdict
        optimizer.state.popitem()


# A placement that is cut short


@pytest.mark.parametrize("moved", [0, 1, 2, 3, 4])
def test_after_a_placement_cut_short_the_objects_are_the_first_ones(moved: int) -> None:
    class Failing(ReplacingDouble):
        name = "failing"
        count = 0

        def _move(self, tensor: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count > moved:
                raise torch.OutOfMemoryError("planted")
            return super()._move(tensor)

    model = seeded(Many)
    held, before, weights = objects(model), values(model), model.weights
    outcome = il.Engine(Failing()).start(task(model=model), batches()).wait(30)
    failed(outcome, torch.OutOfMemoryError, "placing")
    assert same_objects(objects(model), held)
    assert same(values(model), before)
    assert weights[0] is model.linear.weight
    assert not any("identity lost" in note for note in outcome.notes)


# Owners of what is left


def test_what_the_user_holds_is_left_and_named_with_its_owner() -> None:
    """A local variable of the test itself, and a dictionary in one."""
    mine: dict[str, list[torch.Tensor]] = {"losses": []}

    with engine("double").open(task()) as created:
        training = created.place().optimize().train()
        last = training.step(batches()[0])
        mine["losses"].append(training.step(batches()[1]))
        outcome = training.finish()
    assert outcome.residue.bytes == 8
    told = str(outcome.residue)
    assert "held by local 'last' of test_what_the_user_holds_is_left_and_named_with_its_owner" in told
    assert "local 'mine' of test_what_the_user_holds_is_left_and_named_with_its_owner" in told
    assert "['losses'][0]" in told
    gone = weakref.ref(last)
    del last
    assert gone() is None  # the search itself kept nothing


def test_a_search_for_owners_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all objects of the process, and must not hold up the end of a run."""
    looks: list[int] = []

    def referrers(*things: object) -> list[Any]:
        looks.append(len(things))
        return [[thing] for thing in things] * 1000

    monkeypatch.setattr("interlock.owners._of_running", lambda level: "")
    monkeypatch.setattr("interlock.owners.gc.get_referrers", referrers)
    assert describe_owner(torch.ones(1), time.monotonic() - 1) == "an owner that was not found"
    assert looks == []
    describe_owner(torch.ones(1))
    assert len(looks) == owners.DEPTH
    assert max(looks) <= owners.BREADTH


# Two runs of one model


@on_each_backend
@pytest.mark.parametrize("part", [False, True])
def test_a_model_is_in_one_run_at_a_time(backend: str, part: bool) -> None:
    model = net()
    whole = nn.Sequential(model, nn.Identity()) if part else model
    held, inside, go_on = objects(model), threading.Event(), threading.Event()

    def loss(net_: nn.Module, batch: Any) -> torch.Tensor:
        inside.set()
        assert go_on.wait(30)
        return loss_of(net_, batch)

    first = engine(backend).start(task(model=model, loss=loss), batches())
    assert inside.wait(30)
    placed = {name: id(tensor) for name, tensor in objects(model).items()}
    second = run(backend, task(model=whole))
    error = failed(second, errors.RunInUse, "placing")
    assert ("its module '0' is in another run" if part else "it is in another run") in str(error)
    assert "Wait for the other run" in str(error)
    assert second.model is None
    assert {name: id(tensor) for name, tensor in objects(model).items()} == placed  # the first goes on
    go_on.set()
    finished(first.wait(30))
    assert same_objects(objects(model), held)
    finished(run(backend, task(model=whole)))  # free again


@on_each_backend
def test_a_run_on_the_same_model_from_inside_a_hook_is_refused(backend: str) -> None:
    model = net()

    def loss(placed: nn.Module, batch: Any) -> torch.Tensor:
        with pytest.raises(errors.RunInUse):
            engine(backend).fit(task(model=placed), batches())
        return loss_of(placed, batch)

    finished(run(backend, task(model=model, loss=loss), batches(1)))


@on_each_backend
@pytest.mark.parametrize("fails", ["building", "optimizer", "loss", ""])
def test_a_model_is_free_again_however_the_run_ended(backend: str, fails: str) -> None:
    model = net()

    def fail(*_: Any) -> Any:
        raise KeyError(fails)

    parts: dict[str, Any] = {"model": model}
    if fails:
        parts["model" if fails == "building" else fails] = fail
    run(backend, task(**parts))
    finished(run(backend, task(model=model)))
    assert len(residency._claims) == 0


def test_a_claim_holds_nothing() -> None:
    """Neither the model nor the run: both go by reference count."""
    gc.collect()
    gc.disable()
    try:
        model = net()
        residency.claim(model, "a run")
        assert len(residency._claims) == 3
        del model
        assert len(residency._claims) == 0
    finally:
        gc.enable()


# Planted faults


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Exchanges a method of the registry for a wrong one."""
    return lambda name, wrong: monkeypatch.setattr(Registry, name, wrong)


def test_a_registry_that_does_not_recognise_loses_the_identity(plant: Any) -> None:
    plant("_recognise", lambda self: None)
    with pytest.raises(AssertionError):
        test_what_was_held_before_the_run_is_what_is_trained("double", Net)


def test_a_registry_that_forgets_attributes_is_found(plant: Any) -> None:
    plant("_replace_in_attributes", lambda self, function: None)
    with pytest.raises(AssertionError):
        test_containers_and_plain_attributes_come_home_in_place("double")
    with pytest.raises((AssertionError, RuntimeError)):
        test_a_recurrent_module_goes_on_with_its_own_parameters("double")


def test_a_registry_that_forgets_strays_leaves_a_residue(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.owners.SECONDS", 0.0)
    plant("_strays", lambda self: [])
    with pytest.raises(AssertionError, match="bytes"):
        test_a_replaced_parameter_is_named_as_lost("keeping", False)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        (
            "commit_state",
            lambda: test_the_returned_optimizer_goes_on_by_hand_to_the_bit("double", True, adamw),
        ),
        ("discard_model", lambda: test_discard_leaves_nothing("double", False)),
    ],
)
def test_a_registry_that_does_nothing_leaves_a_residue(
    plant: Any, name: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.owners.SECONDS", 0.0)
    plant(name, lambda self, *payload: None)
    with pytest.raises(AssertionError, match="bytes"):
        check()


def test_an_optimizer_that_is_not_rebound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.owners.SECONDS", 0.0)
    monkeypatch.setattr(residency, "rebind", lambda optimizer, targets: None)
    with pytest.raises(AssertionError):
        test_the_returned_optimizer_goes_on_by_hand_to_the_bit("double", True, adamw)


def test_without_claims_two_runs_go_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.phases.claim", lambda model, run: None)
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        _inside_a_hook()


def _inside_a_hook() -> None:
    """As the test above, but its own failure is not lost in the inner run's."""
    model = net()
    seen: list[BaseException] = []

    def loss(placed: nn.Module, batch: Any) -> torch.Tensor:
        try:
            with pytest.raises(errors.RunInUse):
                il.Engine("cpu").fit(task(model=placed), batches())
        except BaseException as error:
            seen.append(error)
        return loss_of(placed, batch)

    run("cpu", task(model=model, loss=loss), batches(1))
    for error in seen:
        raise error
