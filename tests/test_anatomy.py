"""The table of a model: its text, its sums against torch's own, and that looking at it changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parameter import is_lazy

from interlock.anatomy import WIDTH, describe, examine
from interlock.errors import TaskError


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a module that stands twice, one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.body
        self.empty = None
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.rand(1)
        return {"logits": self.head(self.again(self.body(self.embed(x))))}


ALONE = """\
module   class        own tensors                                                   trainable  frozen  buffers
(model)  Tied         scale scalar                                                                           1
  embed  Embedding    weight 10x4                                                          40
  body   Sequential
    0    Linear       weight 4x4, bias 4                                                   16       4
    1    BatchNorm1d  weight 4, bias 4, running_mean 4, running_var 4, num_batc...          8                9
    2    ReLU
  head   Linear       weight = embed.weight
  again  Sequential   = body

parameters  68: 64 trainable, 4 frozen
buffers     10
stored      76 float32 on cpu: 304 bytes
stored      1 float64 on cpu: 8 bytes
stored      1 int64 on cpu: 8 bytes
tied        head.weight = embed.weight"""

CALLED = """\
module   class       own tensors               output            trainable
(model)  Sequential                            float32[3, 2]
  0      Linear      weight 1200x4, bias 1200  float32[3, 1200]      6,000
  1      Tanh                                  float32[3, 1200]
  2      Linear      weight 2x1200, bias 2     float32[3, 2]         2,402

parameters  8,402: 8,402 trainable, 0 frozen
stored      8,402 float32 on cpu: 32.8 KiB"""


def test_the_text_of_a_small_model():
    assert describe(Tied()) == ALONE


def test_the_text_of_a_small_model_that_was_called():
    model = nn.Sequential(nn.Linear(4, 1200), nn.Tanh(), nn.Linear(1200, 2))
    assert describe(model, torch.zeros(3, 4)) == CALLED


def test_what_is_called_twice_says_so_and_what_is_not_called_says_nothing():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.layer(self.layer(x))]

    outputs = {part.path: part.output for part in examine(Twice(), torch.zeros(1, 2)).parts}
    assert outputs == {"": "[float32[1, 2]]", "layer": "2x float32[1, 2]", "unused": ""}


# -- sums ---------------------------------------------------------------------------------------

LEAVES = st.sampled_from(["linear", "frozen", "norm", "shared", "tied", "relu", "half", "lazy"])
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=8)


def build(tree: Any, shared: nn.Linear) -> nn.Module:
    if isinstance(tree, list):
        return nn.Sequential(*(build(inner, shared) for inner in tree))
    if tree == "shared":
        return shared
    if tree == "lazy":
        return nn.LazyLinear(3)
    if tree in ("norm", "relu"):
        return nn.BatchNorm1d(3) if tree == "norm" else nn.ReLU()
    layer = nn.Linear(3, 3)
    if tree == "frozen":
        layer.requires_grad_(False)
    elif tree == "tied":
        layer.weight = shared.weight
    elif tree == "half":
        layer.half()
    return layer


@given(TREES)
def test_its_sums_are_torchs_own(tree: Any):
    model = build(tree, nn.Linear(3, 3))
    found = examine(model)
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    buffers = list(model.buffers())
    assert sum(part.trainable for part in found.parts) == sum(
        p.numel() for p in parameters if p.requires_grad
    )
    assert sum(part.frozen for part in found.parts) == sum(
        p.numel() for p in parameters if not p.requires_grad
    )
    assert sum(part.buffers for part in found.parts) == sum(b.numel() for b in buffers)
    assert sum(size for _, size in found.stored.values()) == sum(t.nbytes for t in (*parameters, *buffers))
    assert sum(n for n, _ in found.stored.values()) == sum(t.numel() for t in (*parameters, *buffers))
    assert set(found.unshaped) == {name for name, p in model.named_parameters() if is_lazy(p)}
    assert [part.path for part in found.parts if part.same is None] == [n for n, _ in model.named_modules()]
    everywhere = {name for name, _ in model.named_modules(remove_duplicate=False)}
    assert {part.path for part in found.parts} == everywhere
    assert all(model.get_submodule(p.path) is model.get_submodule(p.same) for p in found.parts if p.same)
    assert all(model.get_parameter(one) is model.get_parameter(other) for one, other in found.ties)


@given(TREES)
def test_the_text_is_stable_aligned_and_no_wider_than_it_may_be(tree: Any):
    model = build(tree, nn.Linear(3, 3))
    text = describe(model)
    assert text == describe(copy.deepcopy(model)) == str(examine(model))
    lines = text.splitlines()
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in lines)
    starts = [lines[0].index(name) for name in ("class",)]
    rows = lines[: lines.index("")]
    assert len(rows) == 1 + len(examine(model).parts)
    assert all(row[start - 2 : start] == "  " and row[start] != " " for row in rows for start in starts)


@given(st.lists(st.integers(1, 60), max_size=4), st.integers(1, 40))
def test_long_names_and_deep_models_stay_within_the_width(lengths: list[int], depth: int):
    model: nn.Module = nn.Sequential()
    for n, length in enumerate(lengths):
        model.register_buffer(f"b{n}" + "x" * length, torch.zeros(1))
        model.register_parameter(f"p{n}" + "x" * length, nn.Parameter(torch.empty(1 << 60, device="meta")))
    for _ in range(depth):
        outer = nn.Module()
        outer.add_module("y" * (1 + len(lengths)) * 9, model)
        model = outer
    text = describe(model)
    assert max(map(len, text.splitlines())) <= WIDTH
    for _ in lengths[:1]:
        assert f"{len(lengths) << 60:,}" in text


# -- it changes nothing -------------------------------------------------------------------------


def state_of(model: nn.Module) -> list[Any]:
    """What a description must leave as it was."""
    hooks = [
        (name, list(getattr(module, name)))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")
    ]
    flags = [module.training for module in model.modules()]
    tensors = [(id(t), t._version, t.requires_grad) for t in (*model.parameters(), *model.buffers())]
    return [hooks, flags, tensors, torch.is_grad_enabled(), torch.get_rng_state().tolist()]


def test_the_comparison_finds_what_differs():
    """The planted faults: a hook, a flag, a random number."""
    model = Tied()
    before = state_of(model)
    assert state_of(model) == before
    handle = model.body[2].register_forward_hook(lambda *_: None)
    assert state_of(model) != before
    handle.remove()
    assert state_of(model) == before
    model.body[1].eval()
    assert state_of(model) != before
    model.body[1].train()
    torch.rand(1)
    assert state_of(model) != before


@pytest.mark.parametrize("fault", [None, ValueError, KeyboardInterrupt])
def test_calling_a_model_leaves_it_as_it_was_on_every_exit(fault: type[BaseException] | None):
    model = Tied()
    model.body[1].eval()
    handle = model.head.register_forward_hook(lambda *_: None)
    before = state_of(model)
    if fault is None:
        describe(model, torch.tensor([1, 2]))
    else:

        class Raises(nn.ReLU):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise fault("planted")

        model.body[2] = Raises()
        before = state_of(model)
        with pytest.raises(fault, match="planted"):
            describe(model, torch.tensor([1, 2]))
    assert state_of(model) == before
    handle.remove()


def test_a_module_that_takes_no_hook_leaves_none_on_the_others():
    class Refuses(nn.ReLU):
        def register_forward_hook(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(2, 2), Refuses())
    before = state_of(model)
    with pytest.raises(RuntimeError, match="no hooks here"):
        describe(model, torch.zeros(1, 2))
    assert state_of(model) == before


# -- odd models ---------------------------------------------------------------------------------


def test_a_lazy_model_is_described_and_not_called():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    assert describe(model).splitlines()[2] == "  0      LazyLinear  weight ?, bias ?"
    assert describe(model).splitlines()[-1] == "no shape    0.bias"
    with pytest.raises(TaskError, match=r"'0.weight' has no shape before the model is first called"):
        describe(model, torch.zeros(1, 2))
    assert is_lazy(model[0].weight)
    model(torch.zeros(1, 2))
    assert examine(model, torch.zeros(1, 2)).parts[1].output == "float32[1, 3]"


def test_a_model_on_meta_is_called_there():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.ReLU())
    found = examine(model, torch.zeros(2, 1 << 20))
    assert found.stored == {("float32", "meta"): ((1 << 40) + (1 << 20), 4 * ((1 << 40) + (1 << 20)))}
    assert found.parts[0].output == f"float32[2, {1 << 20}]"
    assert str(found).endswith("on meta: 4.0 TiB")


@pytest.mark.parametrize("inputs", [(torch.ones(1, 2), 3), {"x": torch.ones(1, 2), "n": 3}])
def test_tuples_are_arguments_and_dictionaries_are_named_ones(inputs: Any):
    class Repeat(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x.repeat(n, 1)

    assert examine(Repeat(), inputs).parts[0].output == "float32[3, 2]"


def test_a_model_within_itself_ends():
    model = nn.Sequential(nn.ReLU())
    model[0].owner = model
    assert describe(model).splitlines()[3] == "    owner  Sequential  = (model)"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_described():
    scripted = torch.jit.script(nn.Linear(2, 3))
    model = nn.Sequential(scripted, nn.ReLU())
    found = examine(model, torch.zeros(1, 2))
    assert [part.output for part in found.parts] == ["float32[1, 3]", "", "float32[1, 3]"]
    assert sum(part.trainable for part in found.parts) == 9


@pytest.mark.parametrize(
    ("given", "says"), [(lambda: nn.ReLU(), "call it first"), ("model", "and got str"), (nn.ReLU, "call it")]
)
def test_what_is_no_model_is_refused(given: Any, says: str):
    with pytest.raises(TaskError, match=says):
        describe(given)
