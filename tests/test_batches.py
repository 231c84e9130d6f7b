"""Batches of any nesting: kept structure and types, each tensor moved once, nothing else touched."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.small import BACKENDS, Net, finished, loss_of, net, sgd
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import interlock as il
from interlock import batches as walk
from interlock.backends.double import ReplacingDouble

Pair = namedtuple("Pair", "x y")


class Typed(NamedTuple):
    """A namedtuple with a default."""

    x: Any
    y: Any = None


@dataclasses.dataclass
class Plain:
    """A field that its constructor does not take, and one computed from the others at first."""

    x: Any
    y: Any
    made: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.made = "made once"


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be set."""

    x: Any
    y: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    """Has no dictionary."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    """Neither."""

    x: Any
    y: Any


class OwnList(list):  # type: ignore[type-arg]
    """A list whose constructor asks for something else."""

    def __init__(self, source: str, items: Any) -> None:
        super().__init__(items)
        self.source = source


class OwnTuple(tuple):  # type: ignore[type-arg]
    """A tuple whose constructor asks for something else."""

    def __new__(cls, x: Any, y: Any, source: str) -> OwnTuple:
        made = super().__new__(cls, (x, y))
        made.source = source  # type: ignore[attr-defined]
        return made


class OwnDict(dict):  # type: ignore[type-arg]
    """A dictionary with an attribute, and keys as attributes."""

    def __init__(self, source: str, **items: Any) -> None:
        super().__init__(items)
        self.source = source


class OwnMapping(Mapping):  # type: ignore[type-arg]
    """A mapping that is no dictionary."""

    def __init__(self, inner: Mapping[str, Any]) -> None:
        self.inner = dict(inner)

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def _defaulting(x: Any, y: Any) -> Any:
    return defaultdict(list, x=x, y=y)


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "defaultdict": _defaulting,
    "MappingProxyType": lambda x, y: MappingProxyType({"x": x, "y": y}),
    "own dict": lambda x, y: OwnDict("here", x=x, y=y),
    "own mapping": lambda x, y: OwnMapping({"x": x, "y": y}),
    "list": lambda x, y: [x, y],
    "own list": lambda x, y: OwnList("here", [x, y]),
    "tuple": lambda x, y: (x, y),
    "own tuple": lambda x, y: OwnTuple(x, y, "here"),
    "namedtuple": Pair,
    "NamedTuple": Typed,
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slots dataclass": Slotted,
    "frozen slots dataclass": FrozenSlotted,
}
"""Each makes a container of two parts."""

each_kind = pytest.mark.parametrize("kind", KINDS)


def parts(container: Any) -> list[Any]:
    """The content of a container, independently of the code under test."""
    if isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, (list, tuple)):
        return list(container)
    return [getattr(container, f.name) for f in dataclasses.fields(container)]


def contains(data: Any) -> bool:
    """Whether something is a container of one of the kinds."""
    return isinstance(data, (Mapping, list, tuple)) or dataclasses.is_dataclass(data)


def leaves(data: Any) -> list[Any]:
    """The leaves of a nesting, in order."""
    return [leaf for part in parts(data) for leaf in leaves(part)] if contains(data) else [data]


def shape(data: Any) -> Any:
    """The types of a nesting, keys and own attributes included; of leaves, the objects but for tensors."""
    if isinstance(data, torch.Tensor):
        return "tensor"
    if not contains(data):
        return id(data)
    keys = tuple(data) if isinstance(data, Mapping) else None
    own = getattr(data, "source", None), getattr(data, "default_factory", None)
    return (type(data), keys, own, [shape(part) for part in parts(data)])


def wrong(before: Any, function: Callable[[Any, Any], Any] = walk.convert) -> list[str]:
    """What a conversion by `function` gets wrong."""
    kept_shape, kept_leaves = shape(before), leaves(before)
    moved: list[torch.Tensor] = []
    made: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        made[id(tensor)] = tensor + 1
        return made[id(tensor)]

    after = function(before, move)
    found = []
    here = [leaf for leaf in kept_leaves if isinstance(leaf, torch.Tensor)]
    if Counter(map(id, moved)) != Counter({id(t): 1 for t in here}):
        found.append("a tensor was not moved exactly once")
    if shape(after) != kept_shape:
        found.append("structure, types or other leaves changed")
    expected = [made.get(id(leaf), leaf) for leaf in kept_leaves]
    if [id(leaf) for leaf in leaves(after)] != [id(leaf) for leaf in expected]:
        found.append("a leaf is not what the move made of it")
    if shape(before) != kept_shape or list(map(id, leaves(before))) != list(map(id, kept_leaves)):
        found.append("the input changed")
    return found


ONE = torch.arange(6.0).reshape(3, 2)
LEAVES = st.one_of(
    st.builds(lambda n: torch.zeros(n, 2), st.integers(0, 3)),
    st.just(ONE),  # may stand in several places
    st.sampled_from([None, "text", b"bytes", 3, 2.5, True, range(3), object()]),
)
NESTINGS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda kind, x, y: KINDS[kind](x, y), st.sampled_from(sorted(KINDS)), inner, inner
    ),
    max_leaves=8,
)


@each_kind
def test_each_kind_is_kept(kind: str) -> None:
    assert wrong(KINDS[kind](torch.ones(2), None)) == []
    assert wrong(KINDS[kind]("text", KINDS[kind](ONE, ONE))) == []


@given(NESTINGS)
def test_any_nesting_is_kept(data: Any) -> None:
    assert wrong(data) == []


@given(NESTINGS)
def test_without_a_change_it_is_the_same_object(data: Any) -> None:
    assert walk.convert(data, lambda tensor: tensor) is data


def in_place(data: Any, function: walk.Function) -> Any:
    return walk.replace_in(data, function)


def twice(data: Any, function: walk.Function) -> Any:
    return walk._walk(data, function, {})


def unused(data: Any, function: walk.Function) -> Any:
    """Moves, and forgets what came of it."""
    walk.convert(data, function)
    return data


def plainly(data: Any, function: walk.Function) -> Any:
    """As many loops by hand do: dictionaries become `dict`, sequences become `list`."""
    if isinstance(data, Mapping):
        return {key: plainly(value, function) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [plainly(item, function) for item in data]
    return function(data) if isinstance(data, torch.Tensor) else data


@pytest.mark.parametrize(
    ("fault", "data", "says"),
    [
        (in_place, {"x": ONE}, "the input changed"),
        (twice, [ONE, ONE], "a tensor was not moved exactly once"),
        (plainly, Pair(torch.ones(1), None), "structure, types or other leaves changed"),
        (unused, [ONE], "a leaf is not what the move made of it"),
    ],
)
def test_a_wrong_walk_is_found(fault: Any, data: Any, says: str) -> None:
    """Planted: each of the four comparisons finds what it is for."""
    assert says in wrong(data, fault)


def test_what_contains_itself_ends() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert walk.convert(loop, lambda tensor: tensor + 1)[1] is loop


def test_a_default_factory_and_other_objects_pass() -> None:
    other = UserList([ONE])
    made = walk.convert(_defaulting(ONE, other), lambda tensor: tensor + 1)
    assert made["y"] is other
    assert made["new"] == []


def test_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(1), torch.ones(2)], enforce_sorted=False)
    moved = walk.convert({"p": packed}, lambda tensor: tensor.clone())["p"]
    assert type(moved) is PackedSequence
    assert moved.data is not packed.data
    assert moved.batch_sizes is packed.batch_sizes
    assert walk.size(packed) == 3
    assert walk.describe(packed) == "PackedSequence(float32[6])"


@each_kind
def test_size_is_the_first_dimension_of_the_first_tensor(kind: str) -> None:
    assert walk.size(KINDS[kind]("text", torch.ones(7, 2))) == 7
    assert walk.size(KINDS[kind](torch.tensor(1.0), KINDS[kind](torch.ones(0, 2), torch.ones(5)))) == 0
    assert walk.size(KINDS[kind](None, "text")) == 1


def test_describe_shows_shapes_and_no_values() -> None:
    data = {
        "x": torch.ones(32, 64),
        "secret": "password",
        "y": [Pair(torch.zeros(2, dtype=torch.long), None)],
    }
    text = walk.describe(data)
    assert text == "{'x': float32[32, 64], 'secret': str, 'y': [(int64[2], NoneType)]}"
    assert walk.describe(Frozen(torch.ones(1), 3)) == "Frozen(x=float32[1], y=int)"
    assert walk.describe(list(range(9))) == "[" + "int, " * 8 + "...]"
    assert walk.describe([[[[[1]]]]]) == "[[[list]]]"


@given(NESTINGS)
def test_any_nesting_has_a_size_and_a_description(data: Any) -> None:
    first = next((leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)
    assert walk.size(data) == (1 if first is None else len(first))
    assert "\n" not in walk.describe(data)


# Through the engine


def seen_by_a_loss(kind: str, adapter: Any) -> list[Any]:
    """Trains on batches of a kind: for each step, the batch's type and whether its tensors are resident."""
    seen = []

    def loss(model: Net, batch: Any) -> torch.Tensor:
        first = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        seen.append((type(batch), [adapter.resident(tensor) for tensor in first]))
        return loss_of(model, (first[0], first[1]))

    data = [KINDS[kind](torch.ones(5, 4), torch.zeros(5, dtype=torch.long)) for _ in range(2)]
    finished(il.Engine(adapter).start(il.Task(model=net, optimizer=sgd, loss=loss), data).wait(60))
    assert not any(
        adapter.resident(leaf) for batch in data for leaf in leaves(batch) if torch.is_tensor(leaf)
    )
    return seen


@each_kind
def test_the_loss_sees_them_on_the_device(kind: str) -> None:
    expected = (type(KINDS[kind](None, None)), [True, True])
    assert seen_by_a_loss(kind, ReplacingDouble()) == [expected] * 2


def test_batches_left_on_the_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an engine that moves nothing."""
    monkeypatch.setattr("interlock.holding.convert", lambda batch, move: batch)
    assert seen_by_a_loss("dict", ReplacingDouble()) == [(dict, [False, False])] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_takes_a_mapping(backend: str) -> None:
    class Own(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"loss": loss_of(super().forward, (x, y))}  # type: ignore[arg-type]

    task = il.Task(model=Own, optimizer=sgd)
    data = [KINDS["UserDict"](torch.ones(5, 4), torch.zeros(5, dtype=torch.long))]
    finished(il.Engine(backend).start(task, data).wait(60))
