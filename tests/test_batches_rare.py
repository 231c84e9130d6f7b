"""Batches of rare kinds: what a shallow copy shares, what cannot be rebuilt, what torch itself returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from interlock import batches
from interlock.batches import convert, describe, replace_in, tensors

X = torch.arange(6.0).reshape(3, 2)


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


class Wrapped(MutableMapping[str, Any]):
    """Mutable, with an inner dictionary, which a shallow copy shares."""

    def __init__(self, inner: Any) -> None:
        self.inner = dict(inner)

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Strict(Wrapped):
    """A constructor that asks for more."""

    def __init__(self, inner: Any, *, why: str) -> None:
        super().__init__(inner)


class Liar(Wrapped):
    """A constructor that takes a mapping and makes something else of it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(dict.fromkeys(inner, 0) if inner.get("x") is not X else inner)


def check_input_unchanged(by: Callable[..., Any]) -> None:
    data = Wrapped({"x": X, "n": 1})
    new = by(data, twice)
    assert type(new) is Wrapped
    assert torch.equal(new["x"], X * 2)
    assert new["n"] == 1
    assert data["x"] is X


def test_what_a_shallow_copy_shares_is_not_written_to() -> None:
    check_input_unchanged(convert)


def test_a_write_to_a_shallow_copy_is_found() -> None:
    """Planted: as the walk did it at first."""

    def shallow(data: Any, function: batches.Function) -> Any:
        clone = copy.copy(data)
        for key in clone:
            clone[key] = convert(clone[key], function)
        return clone

    with pytest.raises(AssertionError):
        check_input_unchanged(shallow)


class Fewer(Wrapped):
    """A constructor that takes a mapping and keeps less of it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner if inner.get("x") is X else {})


class Number(Wrapped):
    """A class that makes something else."""

    def __new__(cls, inner: Any) -> Any:
        return super().__new__(cls) if inner.get("x") is X else 3


@pytest.mark.parametrize(
    "data",
    [
        Strict({"x": X, "n": 1}, why="more"),
        Liar({"x": X, "n": 1}),
        Fewer({"x": X, "n": 1}),
        Number({"x": X, "n": 1}),
    ],
)
def test_a_mapping_that_cannot_be_rebuilt_gives_way_to_a_dictionary(data: Any) -> None:
    new = convert(data, twice)
    assert type(new) is dict
    assert list(new) == ["x", "n"]
    assert torch.equal(new["x"], X * 2)
    assert data["x"] is X
    assert convert(data, lambda tensor: tensor) is data


def test_a_list_or_dictionary_that_cannot_be_copied_gives_way_to_a_plain_one() -> None:
    class Names(list[Any]):
        def __copy__(self) -> Any:
            raise TypeError("not me")

    class Entries(dict[str, Any]):
        def __copy__(self) -> Any:
            return self

    items, entries = Names([X, 1]), Entries(x=X)
    assert type(convert(items, twice)) is list
    assert type(convert(entries, twice)) is dict
    assert torch.equal(convert(entries, twice)["x"], X * 2)
    assert entries["x"] is X
    assert items[0] is X


def test_a_namedtuple_with_a_constructor_of_its_own() -> None:
    class Pair(NamedTuple):
        x: Any
        y: Any

    class Odd(Pair):
        def __new__(cls, both: Any) -> Odd:
            return super().__new__(cls, both, "made")

    new = convert(Odd(X), twice)
    assert type(new) is Odd
    assert torch.equal(new.x, X * 2)
    assert new.y == "made"


def test_what_torch_itself_returns() -> None:
    found = torch.max(X, 1)
    new = convert(found, twice)
    assert type(new) is type(found)
    assert torch.equal(new.values, found.values * 2)
    assert torch.equal(new.indices, found.indices * 2)


@dataclass
class Scaled:
    """A field that no constructor sets, one that is never set, and a variable of the constructor only."""

    x: Any
    scale: InitVar[float] = 1.0
    scaled: Any = field(init=False)
    later: Any = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.scaled = self.x * scale


def test_fields_that_a_constructor_does_not_set() -> None:
    data = Scaled(X, 3.0)
    new = convert(data, twice)
    assert type(new) is Scaled
    assert torch.equal(new.x, X * 2)
    assert torch.equal(new.scaled, X * 6)
    assert not hasattr(new, "later")
    assert data.x is X
    assert describe(data) == "Scaled(x=float32[3, 2], scaled=float32[3, 2])"


def test_a_module_in_a_batch_is_no_container() -> None:
    @dataclass(eq=False)
    class Module(torch.nn.Module):
        weight: Any = field(init=False)

        def __post_init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    module = Module()
    assert convert([module, X], twice)[0] is module
    assert len(list(tensors([module, X]))) == 1


def test_a_tensor_in_two_places_is_moved_once_and_stays_one() -> None:
    """Labels that are the inputs, as language models have them."""
    calls: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor.clone()

    new = convert({"input_ids": X, "labels": X, "mask": X + 1}, move)
    assert len(calls) == 2
    assert new["input_ids"] is new["labels"]


def test_in_place_lists_and_dictionaries_keep_their_identity() -> None:
    inner: list[Any] = [X, (X,)]
    data: dict[str, Any] = {"a": inner, "b": {"c": X}}
    inside = data["b"]
    inner.append(inner)
    assert replace_in(data, twice) is data
    assert data["a"] is inner
    assert data["b"] is inside
    assert all(torch.equal(t, X * 2) for t in (inner[0], inner[1][0], inside["c"]))


def test_an_error_of_the_mover_passes_as_the_same_object() -> None:
    failing = RuntimeError("no memory")

    def move(tensor: torch.Tensor) -> torch.Tensor:
        raise failing

    with pytest.raises(RuntimeError) as caught:
        convert({"a": [X]}, move)
    assert caught.value is failing
