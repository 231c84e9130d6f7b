"""Optimizers in their fused form: where torch has one and nobody chose, and then just as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.small import BACKENDS, batches, finished, loss_of, net, run, same, seeded, sgd, task, values
from torch import nn, optim
from torch.optim import Optimizer

from interlock.fused import fuse, settle

# -- what is drawn --------------------------------------------------------------------------------


class Own(optim.AdamW):
    """Of a subclass nobody knows what its update does."""


KINDS: dict[str, type[Optimizer]] = {
    name: getattr(optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adamax", "RAdam", "ASGD", "Rprop")
} | {"Own": Own}
HAVE = ("SGD", "Adam", "AdamW")
"""Adagrad has one too, and is left: its state exists as soon as it is built."""

CHOICES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "foreach": {"foreach": True},
    "no foreach": {"foreach": False},
    "differentiable": {"differentiable": True},
    "fused": {"fused": True},
    "not fused": {"fused": False},
    "capturable": {"capturable": True},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"maximize": True},
        {"weight_decay": 0.1},
    ],
    "Adam": [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True}, {"betas": (0.5, 0.9)}],
}

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "channels last": lambda t: t.clone(memory_format=torch.channels_last),
    "transposed": lambda t: t.clone().transpose(0, 1),
    "with gaps": lambda t: t.clone()[:, ::2],
    "a part": lambda t: t.clone()[:, :1],
    "one of one": lambda t: t.clone()[:1, :1, :1, :1],
    "expanded": lambda t: t[:1].clone().expand(3, 2, 2, 2),
    "empty": lambda t: t.clone()[:0],
}
DENSE = ("contiguous", "channels last", "transposed", "one of one", "empty")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def parameters(layout: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """One of that layout, and a plain one beside it."""

    def make() -> list[nn.Parameter]:
        value = torch.randn(3, 2, 2, 2, dtype=torch.float64).to(dtype)
        return [nn.Parameter(LAYOUTS[layout](value)), nn.Parameter(torch.randn(3).to(dtype))]

    return seeded(make)


def updates(optimizer: Optimizer, trained: list[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters after three updates, with gradients as backward makes them."""
    for number in range(3):
        optimizer.zero_grad()
        weighted = [p * torch.linspace(-1, number, p.numel()).reshape(p.shape).to(p.dtype) for p in trained]
        loss = torch.stack([one.sum() for one in weighted]).sum()
        (loss.real if loss.is_complex() else loss).backward()
        optimizer.step()
    return [p.detach().clone() for p in trained]


def is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") is True for group in optimizer.param_groups)


# -- exactly where ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES)
def test_where_torch_has_one_and_nobody_chose(kind: str, choice: str):
    trained = parameters("contiguous")
    try:
        optimizer = KINDS[kind](trained, lr=0.01, **CHOICES[choice])
    except (TypeError, ValueError, RuntimeError):
        return  # torch itself knows no such choice here
    before = [dict(group) for group in optimizer.param_groups]
    expected = kind in HAVE and choice == "nothing"
    assert fuse(optimizer) is expected
    if expected:
        assert is_fused(optimizer)
        assert optimizer.defaults["fused"] is True
    else:
        assert [dict(group) for group in optimizer.param_groups] == before


@pytest.mark.parametrize("kind", HAVE)
@given(
    layouts=st.lists(st.sampled_from([*LAYOUTS]), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    chosen=st.none() | st.sampled_from(["foreach", "not fused"]),
)
def test_of_parameters_that_the_kernels_can_go_over(
    kind: str, layouts: list[str], dtype: Any, chosen: str | None
):
    """One parameter that has gaps, or one group for which somebody chose, is enough to leave it."""
    groups: list[dict[str, Any]] = [{"params": parameters(layout, dtype)} for layout in layouts]
    if chosen is not None:
        groups[-1] |= CHOICES[chosen]
    optimizer = KINDS[kind](groups, lr=0.01)
    expected = {*layouts} <= {*DENSE} and dtype.is_floating_point and chosen is None
    assert fuse(optimizer) is expected
    assert is_fused(optimizer) is expected


@pytest.mark.parametrize("kind", HAVE)
def test_only_of_new_ones_with_a_number_as_learning_rate(kind: str):
    trained = parameters("contiguous")
    used = KINDS[kind](trained, lr=0.01, **({"momentum": 0.9} if kind == "SGD" else {}))
    updates(used, trained)
    assert not fuse(used)
    assert not fuse(KINDS[kind](trained, lr=torch.tensor(0.01)))


# -- just as torch's own --------------------------------------------------------------------------------


@given(
    pair=st.sampled_from(HAVE).flatmap(lambda kind: st.tuples(st.just(kind), st.sampled_from(MORE[kind]))),
    layout=st.sampled_from(DENSE),
    dtype=st.sampled_from(DTYPES[:-1]),
)
def test_it_computes_what_torchs_own_does(pair: tuple[str, dict[str, Any]], layout: str, dtype: torch.dtype):
    kind, settings = pair
    one, other = parameters(layout, dtype), parameters(layout, dtype)
    ours, theirs = KINDS[kind](one, lr=0.01, **settings), KINDS[kind](other, lr=0.01, fused=True, **settings)
    assert fuse(ours)
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    assert same(updates(ours, one), updates(theirs, other))
    assert same(ours.state_dict(), theirs.state_dict())
    assert ours.__dict__.keys() == theirs.__dict__.keys()


@given(
    kind=st.sampled_from(HAVE),
    layout=st.sampled_from([*LAYOUTS]).filter(lambda layout: layout != "expanded"),
    dtype=st.sampled_from(DTYPES[:2]),
)
def test_it_computes_what_the_plain_form_does(kind: str, layout: str, dtype: torch.dtype):
    one, other = parameters(layout, dtype), parameters(layout, dtype)
    ours, plain = KINDS[kind](one, lr=0.01), KINDS[kind](other, lr=0.01, foreach=False)
    fuse(ours)
    for got, expected in zip(updates(ours, one), updates(plain, other), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_kernels_are_wrong_where_it_is_left():
    """Why layouts are looked at: where this passes no more, they need not be."""
    one, other = parameters("with gaps"), parameters("with gaps")
    fused, plain = optim.SGD(one, lr=0.1, fused=True), optim.SGD(other, lr=0.1, foreach=False)
    assert not torch.allclose(updates(fused, one)[0], updates(plain, other)[0])


# -- in a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_has_its_optimizer_fused(backend: str):
    outcome = run(backend, task())
    finished(outcome)
    assert outcome.optimizer is not None
    assert is_fused(outcome.optimizer)
    assert not settle(outcome.optimizer)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table((x[:, 0] > 0).long()))
        return out


def turned(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss after which the gradient of a weight is laid out otherwise: somebody set it so."""
    weight = model.body.weight
    weight.grad = torch.zeros(weight.shape[::-1]).t()
    return loss_of(model, batch)


def by_hand(step: Any, batch: Any) -> torch.Tensor:
    step.zero()
    loss = loss_of(step.model, batch)
    step.backward(loss)
    step.update()
    return loss


# Torch says itself that the layouts differ, once.
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "how"),
    [(Words, {"loss": loss_of}), (Words, {"step": by_hand}), (net, {"loss": turned})],
    ids=["sparse", "sparse, by hand", "turned"],
)
def test_gradients_that_the_kernels_cannot_go_over(backend: str, model: Any, how: dict[str, Any]):
    outcome = run(backend, task(model=lambda: seeded(model), **how), validate=None)
    trained = finished(outcome)
    assert outcome.optimizer is not None
    assert not is_fused(outcome.optimizer)
    assert same(outcome.optimizer.state_dict(), sgd(trained).state_dict())

    reference = seeded(model)
    optimizer = sgd(reference)
    for batch in batches():
        optimizer.zero_grad()
        how.get("loss", loss_of)(reference, batch).backward()
        optimizer.step()
    assert same(values(trained), values(reference))


def test_a_parameter_that_comes_later_is_looked_at_too():
    first, later = parameters("contiguous"), parameters("with gaps")
    optimizer = optim.SGD(first, 0.1)
    assert fuse(optimizer)
    assert not settle(optimizer)
    optimizer.add_param_group({"params": later})
    assert settle(optimizer)
    assert not settle(optimizer)
    assert optimizer.__dict__.keys() == optim.SGD(first, 0.1).__dict__.keys()


def test_a_users_choice_stays():
    words = Words()
    optimizer = optim.SGD(words.parameters(), 0.1, fused=True)
    words(torch.ones(2, 4)).sum().backward()
    assert not settle(optimizer)
    assert is_fused(optimizer)
