"""Evaluation and prediction: right results, nothing on the device afterwards, and no trace in the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.small import (
    BACKENDS,
    WITH_KEEPING,
    Keeping,
    batches,
    engine,
    finished,
    loss_of,
    net,
    same,
    seeded,
    task,
)
from torch import nn

import interlock as il
from interlock.backends.adapter import Adapter
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import CALLS, Fault, inject
from interlock.errors import DataError, TaskError

ADAPTERS: dict[str, type[Adapter]] = {"cpu": CpuAdapter, "double": ReplacingDouble, "keeping": Keeping}
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
FEW = settings(max_examples=max(10, settings().max_examples // 3))


class Struck(Exception):
    """Raised on purpose."""


class Net(nn.Module):
    """Dropout and a normalisation: both do otherwise in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(torch.tanh(self.norm(self.body(x)))))
        return out


def made(flags: tuple[bool, ...] = ()) -> Net:
    """A net whose modules are in training mode as the flags say."""
    model = seeded(Net, 3)
    for module, training in zip(model.modules(), flags, strict=False):
        module.training = training
    return model


def accuracy(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def traces(model: nn.Module) -> dict[str, Any]:
    """All that an evaluation must leave as it was, of the model and of the process."""
    return {
        "flags": [module.training for module in model.modules()],
        "values": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "ids": [id(p) for p in (*model.parameters(), *model.buffers())],
        "grad": [p.grad is None for p in model.parameters()],
        "trains": [p.requires_grad for p in model.parameters()],
        "enabled": torch.is_grad_enabled(),
        "random": torch.get_rng_state(),
    }


def by_hand(model: nn.Module, data: list[Any]) -> dict[str, float]:
    """The means over samples, in a plain loop."""
    was = [module.training for module in model.modules()]
    model.eval()
    loss, right, count = 0.0, 0.0, 0
    with torch.no_grad():
        for x, y in data:
            out = model(x)
            loss += F.cross_entropy(out, y).item() * len(x)
            right += (out.argmax(1) == y).float().mean().item() * len(x)
            count += len(x)
    for module, training in zip(model.modules(), was, strict=True):
        module.training = training
    return {"loss": loss / count, "accuracy": right / count}


# Results


@FEW
@given(
    backend=st.sampled_from(WITH_KEEPING),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    flags=st.tuples(*[st.booleans()] * 5),
    enabled=st.booleans(),
)
def test_evaluation_is_the_plain_loop_and_leaves_no_trace(
    backend: str, sizes: list[int], flags: tuple[bool, ...], enabled: bool
):
    """A short last batch counts for its samples only."""
    data = [batches(1, size, seed=i)[0] for i, size in enumerate(sizes)]
    model = made(flags)
    adapter: Any = ADAPTERS[backend]()
    with torch.set_grad_enabled(enabled):
        before = traces(model)
        found = il.Engine(adapter).evaluate(model, data, loss=loss_of, metrics=accuracy)
        assert same(before, traces(model))
        outputs = il.Engine(adapter).predict(model, [x for x, _ in data])
        assert same(before, traces(model))
        assert found == pytest.approx(by_hand(model, data), rel=1e-6)
    model.eval()
    with torch.no_grad():
        assert all(torch.equal(out, model(x)) for out, (x, _) in zip(outputs, data, strict=True))
    assert not any(out.requires_grad for out in outputs)
    if isinstance(adapter, ReplacingDouble):
        assert adapter.allocated == 0


@dataclass
class Named:
    """An output with a name."""

    out: Any
    text: str


@on_each_backend
def test_outputs_come_home_in_any_nesting(backend: str):
    adapter: Any = ADAPTERS[backend]()

    def output(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        return {
            "one": [out, (out * 2, 3)],
            "two": Named(out.sum(), "sum"),
            "size": len(batch[0]),
            "none": None,
        }

    found = il.Engine(adapter).predict(made(), batches(3), output=output)
    model = made().eval()
    for one, (x, _) in zip(found, batches(3), strict=True):
        out = model(x).detach()
        assert torch.equal(one["one"][0], out)
        assert torch.equal(one["one"][1][0], out * 2)
        assert one["one"][1][1] == 3
        assert torch.equal(one["two"].out, out.sum())
        assert (one["size"], one["none"], one["two"].text) == (len(x), None, "sum")
        tensors = [one["one"][0], one["one"][1][0], one["two"].out]
        assert not any(adapter.resident(tensor) for tensor in tensors)
    assert backend == "cpu" or adapter.allocated == 0


class Gathers:
    """As the metrics of torchmetrics are: gathers over batches, is asked once, and is reset."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.resets = 0

    def update(self, size: int) -> None:
        self.seen.append(size)

    def compute(self) -> torch.Tensor:
        return torch.tensor(float(sum(self.seen)))

    def reset(self) -> None:
        self.seen, self.resets = [], self.resets + 1


@pytest.mark.parametrize("fails", [False, True])
@on_each_backend
def test_objects_that_gather_are_asked_once_and_always_reset(backend: str, fails: bool):
    gathers, count = Gathers(), 0

    def metrics(model: Any, batch: Any) -> Any:
        nonlocal count
        count += 1
        gathers.update(len(batch[0]))
        if fails and count == 3:
            raise Struck
        return {"samples": gathers}

    if fails:
        with pytest.raises(Struck):
            engine(backend).evaluate(task(metrics=metrics), batches(4))
    else:
        for _ in range(2):
            assert engine(backend).evaluate(task(metrics=metrics), batches(4, 5))["samples"] == 20.0
    assert gathers.seen == []
    assert gathers.resets == (1 if fails else 2)


# Inside of training


@pytest.mark.parametrize("options", [[], [il.Accumulate(2), il.ClipNorm(0.3)], [il.Precision("fp16")]])
@pytest.mark.parametrize("every", [None, 1, 2])
@on_each_backend
def test_a_validation_in_mid_run_disturbs_nothing(backend: str, every: int | None, options: Any):
    def draws(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        torch.rand(7)
        return {"drawn": torch.rand(())}

    def trained(**how: Any) -> Any:
        what = task(model=made, options=options, metrics=draws)
        run = engine(backend, seed=3, threads=1).start(what, batches(6), epochs=2, **how)
        return finished(run.wait(60)).state_dict()

    assert same(trained(), trained(validate=batches(3, seed=4), validate_every=every))


# Faults


def serve(kind: str, adapter: Any, model: nn.Module, struck: Any = None) -> Any:
    """An evaluation or a prediction, whose own function may raise at its third batch."""
    count = 0

    def passes() -> None:
        nonlocal count
        count += 1
        if struck is not None and count == 3:
            raise struck

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        passes()
        return loss_of(net, batch)

    def output(net: nn.Module, batch: Any) -> Any:
        out = net(batch[0])
        passes()
        return out

    if kind == "evaluate":
        return il.Engine(adapter).evaluate(model, batches(4), loss=loss, metrics=accuracy)
    return il.Engine(adapter).predict(model, batches(4), output=output)


@pytest.mark.parametrize("error", [Struck, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["evaluate", "predict"])
@on_each_backend
def test_a_fault_anywhere_leaves_nothing_and_puts_everything_back(
    backend: str, kind: str, error: type[BaseException]
):
    flags = (True, False, True, True, False)
    plain = inject(ADAPTERS[backend]())
    serve(kind, plain, made(flags))
    faults = [
        Fault(call, moment, nth)
        for call in CALLS
        for nth in range(1, plain.counts.get(call, 0) + 1)  # type: ignore[attr-defined]
        for moment in ("before", "after")
    ]
    assert len(faults) > 10
    wrong = []
    for fault in [*faults, None]:
        raised, model = error("here"), made(flags)
        adapter: Any = ADAPTERS[backend]()
        if fault is not None:
            fault.error = lambda raised=raised: raised  # type: ignore[misc]
            adapter = inject(adapter, fault)
        before = traces(model)
        try:
            serve(kind, adapter, model, raised if fault is None else None)
            wrong.append(f"{fault}: nothing was raised")
        except BaseException as caught:
            if caught is not raised:
                wrong.append(f"{fault}: {caught!r}")
        if not same(before, traces(model)):
            wrong.append(f"{fault}: another model")
        if isinstance(adapter, ReplacingDouble) and adapter.allocated:
            wrong.append(f"{fault}: {adapter.allocated} bytes are left")
    assert wrong == []


# Refused


class Fails:
    """Batches of which the second cannot be had."""

    def __iter__(self) -> Iterator[Any]:
        yield batches()[0]
        raise OSError("gone")


@on_each_backend
@pytest.mark.parametrize(
    ("what", "data", "kind", "said"),
    [
        (task(), [], DataError, "gave no batch"),
        (task(), Fails(), OSError, "gone"),
        (task(), 3, TaskError, "something to iterate over"),
        (task(), torch.zeros(3), TaskError, "DataLoader"),
        (task(), [(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))], DataError, "has any sample"),
        (task(), None, TaskError, "has no "),
        (task(metrics=lambda m, b: 3), batches(), TaskError, "dictionary of named scalars"),
        (task(metrics=lambda m, b: {"loss": 1.0}), batches(), TaskError, "must not return 'loss'"),
        (task(metrics=lambda m, b: {"a": torch.zeros(3)}), batches(), TaskError, "'a' must be a number"),
        (task(batch_size=lambda b: -1), batches(), TaskError, "whole number from 0"),
        ("no task", batches(), TaskError, "expected an interlock.Task or a model"),
    ],
)
def test_what_cannot_be_evaluated_is_told(backend: str, what: Any, data: Any, kind: Any, said: str):
    adapter: Any = ADAPTERS[backend]()
    with pytest.raises(kind, match=said):
        il.Engine(adapter).evaluate(what, data)
    assert backend == "cpu" or adapter.allocated == 0


def test_a_list_is_no_input_by_itself():
    with pytest.raises(TaskError, match="pass `output=lambda model, batch"):
        engine("double").predict(made(), batches())


def test_the_exit_policy_holds_for_inference_too():
    model, adapter = made(), ReplacingDouble()
    il.Engine(adapter, exit="keep").predict(model, [x for x, _ in batches()])
    assert all(adapter.resident(p) for p in model.parameters())
    again = il.Engine(adapter).predict(model, [batches()[0][0]])
    assert not any(adapter.resident(p) for p in model.parameters())
    assert torch.equal(again[0], made().eval()(batches()[0][0]).detach())
    assert math.isfinite(float(again[0].sum()))


@on_each_backend
def test_a_metric_of_torchmetrics_itself(backend: str):
    """In `make test-peers`, whose environment has it."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    accuracy = torchmetrics.MeanMetric()

    def metrics(model: Any, batch: Any) -> Any:
        accuracy.update((model(batch[0]).argmax(1) == batch[1]).float().cpu())
        return {"accuracy": accuracy}

    found = [engine(backend).evaluate(task(metrics=metrics), batches(3)) for _ in range(2)]
    model, right = net(), 0
    for inputs, targets in batches(3):
        right += int((model(inputs).argmax(1) == targets).sum())
    share = right / sum(len(inputs) for inputs, _ in batches(3))
    assert [one["accuracy"] for one in found] == pytest.approx([share, share])
