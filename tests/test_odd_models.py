"""Models, optimizers, losses and data that are not as usual: brought home, or refused clearly."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from tools.small import batches, engine, failed, finished, left_clean, loss_of, net, run, sgd, task
from torch import nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import interlock as il
from interlock import errors
from interlock.backends.double import ReplacingDouble
from interlock.batches import convert, held, replace_in
from interlock.owners import describe_owner

ON = pytest.mark.parametrize("backend", ["cpu", "double"])


def nested(depth: int) -> tuple[Any, ...]:
    """Tuples in tuples."""
    found: tuple[Any, ...] = ()
    for _ in range(depth):
        found = (found, 1)
    return found


def with_attribute(value: Any) -> Callable[[], nn.Module]:
    """Builds a net that has another attribute."""

    def build() -> nn.Module:
        model = net()
        model.__dict__["other"] = value
        return model

    return build


# -- what cannot be walked, and what is walked once -----------------------------------------------


@ON
@pytest.mark.parametrize("kind", ["dead proxy", "deep"])
def test_an_attribute_that_cannot_be_looked_into_abandons_nothing(backend: str, kind: str) -> None:
    gone = net()
    value = weakref.proxy(gone) if kind == "dead proxy" else nested(3000)
    del gone
    finished(run(backend, task(model=with_attribute(value))))


@dataclasses.dataclass(eq=False)
class Node:
    """One of a graph in which each refers to all others."""

    value: torch.Tensor
    others: list[Node] = dataclasses.field(default_factory=list)


def graph(count: int) -> list[Node]:
    """A complete graph."""
    nodes = [Node(torch.ones(1)) for _ in range(count)]
    for node in nodes:
        node.others = [other for other in nodes if other is not node]
    return nodes


def dag(depth: int) -> list[Any]:
    """A list that stands twice in a list, which stands twice in a list, and so on."""
    found: list[Any] = [torch.ones(1)]
    for _ in range(depth):
        found = [found, found]
    return found


@pytest.mark.parametrize("build", [lambda: graph(30), lambda: dag(60)])
def test_a_graph_is_walked_in_linear_time(build: Callable[[], Any]) -> None:
    begun = time.monotonic()
    data = build()
    assert held(data)
    convert(data, lambda tensor: tensor + 1)
    replace_in(data, lambda tensor: tensor + 1)
    assert all(tensor.item() == 2 for tensor in held(data))
    assert time.monotonic() - begun < 5


def test_what_stands_twice_is_one_afterwards() -> None:
    inner = [torch.ones(1)]
    moved = convert({"a": inner, "b": (inner,)}, lambda tensor: tensor + 1)
    assert moved["a"] is moved["b"][0]
    assert moved["a"] is not inner


def test_a_graph_in_an_attribute_comes_home() -> None:
    nodes = graph(6)
    model = with_attribute(nodes)()
    nodes[0].value = model.body.weight  # type: ignore[union-attr, assignment]
    finished(run("double", task(model=model)))
    assert nodes[1].others[0].value is model.body.weight  # type: ignore[union-attr]


# -- lazy modules ---------------------------------------------------------------------------------


@ON
def test_a_lazy_model_is_refused_by_name(backend: str) -> None:
    error = failed(run(backend, task(model=lambda: nn.Sequential(nn.LazyLinear(3)))), errors.TaskError)
    assert "'0.weight'" in str(error)
    assert "one forward pass" in str(error)


@ON
def test_a_lazy_module_that_comes_in_mid_run_abandons_nothing(backend: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        model.late = nn.LazyLinear(3)
        return loss_of(model, batch)

    left_clean(run(backend, task(loss=loss)))


# -- optimizers -----------------------------------------------------------------------------------


def test_an_optimizer_without_its_groups_is_refused() -> None:
    class Bare(Optimizer):
        def __init__(self, parameters: Any) -> None:
            pass

    error = failed(run("double", task(optimizer=lambda m: Bare(m.parameters()))), errors.TaskError)
    assert "super().__init__" in str(error)


class Lookahead(Optimizer):
    """Wraps another; shares its groups, and has a state of its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Steps what is inside."""
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of what is inside."""
        self.optimizer.zero_grad(set_to_none)


class Sharing(Lookahead):
    """Shows the state of what is inside as its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.state = inner.state


@pytest.mark.parametrize("kind", [Lookahead, Sharing])
def test_an_optimizer_inside_an_optimizer_comes_home(kind: type[Lookahead]) -> None:
    outcome = run("double", task(optimizer=lambda m: kind(Adam(m.parameters()))))
    finished(outcome)
    wrapper: Any = outcome.optimizer
    assert outcome.model is not None
    parameters = list(outcome.model.parameters())
    for optimizer in (wrapper, wrapper.optimizer):
        held_now = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in held_now] == [id(p) for p in parameters]
        assert {id(key) for key in optimizer.state} == {id(p) for p in parameters}
    assert (wrapper.state is wrapper.optimizer.state) == (kind is Sharing)


def test_deques_and_sets_come_home() -> None:
    class Seeing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.seen: deque[torch.Tensor] = deque(maxlen=2)
            self.all: set[torch.Tensor] = {self.weight}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.seen.append(out.detach())
            self.all.add(out.detach())
            return out

    model: Any = finished(run("double", task(model=Seeing)))
    assert len(model.seen) == 2
    assert model.weight in model.all
    assert len(model.all) == 7


# -- two runs -------------------------------------------------------------------------------------


def test_a_parameter_is_in_one_run_at_a_time() -> None:
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    other.weight = one.weight
    inside, go_on = threading.Event(), threading.Event()

    def slow(model: nn.Module, batch: Any) -> Any:
        inside.set()
        go_on.wait(10)
        return loss_of(model, batch)

    first = engine("cpu").start(task(model=one, loss=slow), batches())
    try:
        assert inside.wait(10)
        error = failed(run("cpu", task(model=other)), errors.RunInUse)
        assert "'weight'" in str(error)
    finally:
        go_on.set()
    finished(first.wait(30))
    finished(run("cpu", task(model=other)))


# -- losses and metrics ---------------------------------------------------------------------------


@ON
def test_a_metric_called_loss_is_refused(backend: str) -> None:
    what = task(metrics=lambda model, batch: {"loss": 1.0})
    error = failed(run(backend, what, validate=batches(2)), errors.TaskError)
    assert "'loss'" in str(error)


def test_a_parameter_that_went_to_the_host_is_found() -> None:
    def loss(model: Any, batch: Any) -> Any:
        model.head.weight.data = torch.zeros(3, 8)
        return loss_of(model, batch)

    error = failed(run("double", task(loss=loss)), errors.MisplacedState)
    assert error.parameters == ("head.weight",)


class Turning:
    """A loss that is something else from the third step on."""

    def __init__(self, into: Callable[[torch.Tensor], Any]) -> None:
        self.into = into
        self.count = 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.count += 1
        loss = loss_of(model, batch)
        return loss if self.count < 3 else self.into(loss)


@ON
@pytest.mark.parametrize(
    ("into", "says"),
    [
        (lambda loss: None, "NoneType"),
        (lambda loss: loss.reshape(1), "shape [1]"),
        (lambda loss: loss.repeat(2), "shape [2]"),
        (lambda loss: loss.detach(), "no graph"),
    ],
)
def test_a_loss_that_turns_into_something_else(backend: str, into: Any, says: str) -> None:
    error = failed(run(backend, task(loss=Turning(into))), errors.LossError)
    assert says in str(error)
    assert "step 3" in str(error)


@ON
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_within_no_grad_says_so(backend: str, mode: Any) -> None:
    with mode(), pytest.raises(errors.LossError, match=mode.__name__):
        engine(backend).fit(task(), batches())


def test_numbers_of_numpy_are_metrics() -> None:
    numpy = pytest.importorskip("numpy")
    what = task(metrics=lambda model, batch: {"one": numpy.float32(1)})
    assert run("cpu", what, validate=batches(2)).metrics["val_one"] == 1.0


def test_metrics_without_validation_data_are_noted() -> None:
    what = task(metrics=lambda model, batch: {"one": 1.0})
    told = "metrics were never computed: no validation data"
    assert told in run("cpu", what).notes
    assert told not in run("cpu", what, validate=batches(1)).notes


# -- data -----------------------------------------------------------------------------------------

X, Y = torch.randn(12, 4), torch.randint(0, 3, (12,))


@pytest.mark.parametrize("data", [X, nn.Parameter(X), TensorDataset(X, Y)])
@pytest.mark.parametrize("way", ["fit", "validate", "data"])
def test_what_gives_no_batches_is_refused(data: Any, way: str) -> None:
    calls = {
        "fit": lambda: engine("cpu").fit(task(), data),
        "validate": lambda: engine("cpu").fit(task(), batches(), validate=data),
        "data": lambda: engine("cpu").fit(task(data=lambda: data)),
    }
    with pytest.raises(errors.TaskError, match="DataLoader"):
        calls[way]()


def test_a_pair_of_tensors_is_no_data() -> None:
    with pytest.raises(errors.TaskError, match="two tensors"):
        engine("cpu").fit(task(data=lambda: (X, Y)))


def test_a_loader_is_data() -> None:
    finished(run("cpu", task(), DataLoader(TensorDataset(X, Y), batch_size=4), epochs=2))


def test_data_may_be_passed_whole() -> None:
    outcome = engine("cpu").fit(task(), il.Data(batches(3), batches(1)))  # type: ignore[arg-type]
    assert outcome.steps == 3
    assert "val_loss" in outcome.metrics


class Rewinding(Iterator[Any]):
    """An iterator that starts anew."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def __iter__(self) -> Rewinding:
        self.left = list(batches(3))
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class Once(Rewinding):
    """One that does not."""

    def __iter__(self) -> Once:
        return self


@pytest.mark.parametrize("build", [lambda: iter(batches()), lambda: (b for b in batches()), Once])
def test_an_iterator_is_refused_for_two_epochs(build: Callable[[], Any]) -> None:
    with pytest.raises(errors.DataError, match="it is an iterator"):
        engine("cpu").fit(task(), build(), epochs=2)
    with pytest.raises(errors.DataError, match="validation"):
        engine("cpu").fit(task(), batches(), validate=build(), epochs=2)


def test_an_iterator_is_data_for_one_epoch_and_one_that_rewinds_for_more() -> None:
    assert run("cpu", task(), iter(batches(4))).steps == 4
    assert run("cpu", task(), Rewinding(), epochs=2).steps == 6


# -- owners, adapters, functions ------------------------------------------------------------------


def test_an_owner_without_a_name_is_described_as_far_as_it_is_known() -> None:
    class Holder:
        def __init__(self) -> None:
            self.held = deque([torch.ones(1)])

    # Only the list of weak references knows it: nothing with a name leads there.
    holder = Holder()
    holder.held.append(holder)  # type: ignore[arg-type]
    thing = weakref.ref(holder.held[0])
    del holder
    found = describe_owner_of(thing)
    assert "Holder" in found
    assert "held" in found


def describe_owner_of(reference: Any) -> str:
    """Without a local variable of this module that holds the thing meanwhile."""
    return describe_owner(reference())


@pytest.mark.parametrize(("method", "name"), [("actions", "placing"), ("releases", "model")])
def test_a_backend_may_not_take_what_is_the_engines(method: str, name: str) -> None:
    class Greedy(ReplacingDouble):
        name: ClassVar[str] = "greedy"

    def more(self: Any) -> Mapping[str, Any]:
        return {**getattr(ReplacingDouble, method)(self), name: lambda *_: None}

    setattr(Greedy, method, more)
    with pytest.raises(errors.TaskError, match=f"'{name}'"):
        il.Engine(Greedy()).fit(task(), batches())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": nn.MSELoss()}, "criterion(m(b[0]), b[1])"),
        ({"loss": lambda batch: None}, "loss(model, batch)"),
        ({"metrics": lambda model, batch, more: {}}, "metrics(model, batch)"),
        ({"optimizer": lambda: None}, "optimizer(model)"),
        ({"scheduler": lambda: None}, "scheduler(optimizer)"),
        ({"data": lambda folder: []}, "data()"),
        ({"batch_size": lambda: 1}, "batch_size(batch)"),
        ({"model": nn.Linear}, "without arguments"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.TaskError) as caught:
        task(**changes)
    assert says in str(caught.value)


def test_functions_that_take_anything_are_accepted() -> None:
    task(loss=lambda *_: None, metrics=lambda model, batch, more=1: {}, optimizer=lambda m, lr=0.1: sgd(m))
