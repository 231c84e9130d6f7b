"""`trace_copies` reports each deep copy and pickling, with where the tensor stood, and leaves no trace."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

from interlock.backends.double import ReplacingDouble
from interlock.copies import Copies, trace_copies


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 2, bias=False))
        self.register_buffer("mean", torch.zeros(3))
        self.cache = {"seen": [torch.ones(5)]}


def paths(copies: Copies) -> set[str]:
    return {one.path.partition(")")[2] for one in copies}


STORAGE = torch.UntypedStorage.__mro__[-2]
PATCHED = [
    (kind, name) for kind in (torch.Tensor, nn.Parameter) for name in ("__deepcopy__", "__reduce_ex__")
] + [(STORAGE, "__deepcopy__"), (STORAGE, "__reduce__")]


def methods() -> list[Any]:
    return [vars(kind)[name] for kind, name in PATCHED]


@pytest.fixture(autouse=True)
def methods_as_before() -> Any:
    before = methods()
    yield
    assert all(old is new for old, new in zip(before, methods(), strict=True))


def test_a_deep_copy_of_a_module_is_reported_with_the_paths_inside_it() -> None:
    net = Net()
    with trace_copies("all") as copies:
        other = copy.deepcopy(net)
    assert isinstance(other, Net)
    assert paths(copies) == {".body.0.weight", ".mean", ".cache['seen'][0]"}
    weight = next(one for one in copies if one.path.endswith("weight"))
    assert weight.path.startswith("local 'net' of test_a_deep_copy_of_a_module_is_reported")
    assert (weight.kind, weight.shape, weight.dtype, weight.device) == (
        "deepcopy",
        (2, 3),
        "torch.float32",
        "cpu",
    )
    assert weight.nbytes == 24
    assert "test_copies.py" in weight.stack[0]
    assert weight.thread == threading.current_thread().name
    assert "3 tensor(s) were copied, 56 bytes:" in str(copies)


def test_a_deep_copy_of_what_has_no_name_is_reported_too() -> None:
    with trace_copies("all") as copies:
        copy.deepcopy([Net()])
    assert {one.path for one in copies} >= {"the list that was copied[0].body.0.weight"}


def test_the_state_of_an_optimizer_is_found() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net.body(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with trace_copies("all") as copies:
        copy.deepcopy(optimizer)
    assert paths(copies) == {".state (a key)", ".state[<Parameter>]['momentum_buffer']"}
    assert all(len(one.stack) == 1 for one in copies)  # without the frames of pytest


@pytest.mark.parametrize("dump", [pickle.dumps, lambda thing: pickle._dumps(thing)])  # type: ignore[attr-defined]
def test_pickling_is_reported(dump: Any) -> None:
    net = Net()
    with trace_copies("all") as copies:
        dump(net)
    assert {one.kind for one in copies} == {"pickle"}
    assert sorted(one.path.partition(")")[2] for one in copies) == [
        ".body.0.weight",
        ".cache['seen'][0]",
        ".mean",
    ]


def test_saving_is_reported() -> None:
    net = Net()
    with trace_copies("all") as copies:
        torch.save(net.state_dict(), io.BytesIO())
    assert {one.kind for one in copies} == {"torch.save"}
    assert {one.path for one in copies} == {
        "the OrderedDict that was copied['body.0.weight']",
        "the OrderedDict that was copied['mean']",
    }
    assert "test_copies.py" in copies[0].stack[0]


@pytest.mark.parametrize(
    ("how", "kind"), [(copy.deepcopy, "deepcopy"), (pickle.dumps, "pickle")], ids=["deepcopy", "pickle"]
)
def test_a_storage_by_itself_is_reported_and_that_of_a_tensor_once(how: Any, kind: str) -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    with trace_copies("all") as copies:
        how(storage)
        how(tensor)
    assert [(one.kind, one.nbytes, one.shape) for one in copies] == [(kind, 12, (12,)), (kind, 12, (3,))]
    assert copies[0].path.startswith("local 'storage' of test_a_storage_by_itself_is_reported")
    with trace_copies(lambda one: one.device.type == "meta") as nothing:
        how(storage)
    assert len(nothing) == 0


def test_what_has_no_name_is_called_what_it_is() -> None:
    net = Net()
    with trace_copies("all") as copies:
        pickle.dumps(net.mean.detach())
    assert [one.path for one in copies] == ["the Tensor that was copied"]


def test_what_shares_memory_or_is_an_operator_is_no_copy() -> None:
    tensor = torch.ones(3)
    with trace_copies("all") as copies:
        copy.copy(tensor)
        tensor.clone()
        copy.deepcopy({"no": "tensor"})
    assert len(copies) == 0
    assert str(copies) == "no tensor was copied"


def test_only_the_devices_that_are_asked_for() -> None:
    host, device = Net(), ReplacingDouble()
    moved = device.move(torch.ones(7))
    with trace_copies() as nothing, trace_copies(device.resident) as found, trace_copies("cpu") as both:
        copy.deepcopy([host.mean, moved])
    assert len(nothing) == 0
    assert [one.shape for one in found] == [(7,)]
    assert len(both) == 2


def test_nested_and_on_several_threads() -> None:
    tensor = torch.ones(3)
    entered, leave = threading.Event(), threading.Event()
    there: list[Copies] = []

    def other() -> None:
        with trace_copies("all") as copies:
            there.append(copies)
            entered.set()
            leave.wait(30)
            copy.deepcopy(tensor)

    thread = threading.Thread(target=other, name="other")
    with trace_copies("all") as outer:
        thread.start()
        entered.wait(30)
        with trace_copies("all") as inner:
            copy.deepcopy(tensor)
        copy.deepcopy(tensor)
    assert (len(outer), len(inner), len(there[0])) == (2, 1, 2)
    # The other thread goes on, although the one that began first is through.
    leave.set()
    thread.join()
    assert len(there[0]) == 3
    assert there[0][2].thread == "other"
    assert len(outer) == 2


def test_an_error_within_leaves_no_trace() -> None:
    def fails() -> None:
        with trace_copies("all"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    before = methods()
    assert not any(hasattr(method, "__wrapped__") for method in before)


def test_a_method_that_somebody_else_replaced_meanwhile_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(3)
    tracing = trace_copies("all")
    with monkeypatch.context() as patch:
        copies = tracing.__enter__()
        ours = torch.Tensor.__deepcopy__

        def theirs(self: torch.Tensor, memo: Any) -> Any:
            return ours(self, memo)

        patch.setattr(torch.Tensor, "__deepcopy__", theirs)
        tracing.__exit__(None, None, None)
        assert torch.Tensor.__deepcopy__ is theirs
        assert torch.equal(copy.deepcopy(tensor), tensor)
        assert len(copies) == 0
        original = ours.__wrapped__
    torch.Tensor.__deepcopy__ = original


def test_copies_are_true_copies() -> None:
    net = Net()
    with trace_copies("all"):
        other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    for mine, its in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, its)
        assert mine is not its
