"""A canary for each private call of torch that the simulated device rests on."""

from __future__ import annotations

import ast
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from interlock.backends import simulator
from interlock.backends.simulator import private

SIM = "sim"


def test_the_slot_has_our_name() -> None:
    assert private.slot() == simulator.NAME
    assert simulator.unavailable() == ""


def test_a_device_can_be_registered_from_python() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    assert callable(_setup_privateuseone_for_python_backend)
    assert torch.sim.device_count() == 1


def test_a_storage_stands_over_memory_of_somebody_else() -> None:
    host = torch.arange(4.0)
    made = private.storage_over(host.data_ptr(), torch.device(SIM, 0), 16)
    assert (made.device, made.nbytes(), made.data_ptr()) == (torch.device(SIM, 0), 16, host.data_ptr())


def test_an_empty_tensor_of_the_device_and_put() -> None:
    host = torch.arange(6.0)
    storage = private.storage_over(host.data_ptr(), torch.device(SIM, 0), 24)
    tensor = private.empty_of((0,), torch.float32)
    put = private.put(tensor, storage, 1, (2, 2), (2, 1))
    assert put is tensor
    assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == ((2, 2), (2, 1), 1)
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_operators_are_found_by_name() -> None:
    found = dict(private.operators())
    assert len(found) > 2000
    assert found["add.Tensor"] is torch.ops.aten.add.Tensor
    assert private.operator_of("aten", "no_such_operator") is None


def test_kernels_are_known_by_key() -> None:
    assert private.has_kernel("aten::mm", "CPU")
    assert not private.has_kernel("aten::mm", "QuantizedCPU")


def test_collectives_have_kernels_for_the_host() -> None:
    assert any(name.startswith("allreduce_") for name, _ in private.collectives())


def test_a_block_without_autocast() -> None:
    x = torch.ones(2, 2, device=SIM)
    with torch.autocast(SIM, dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with private.below_autocast():
            assert (x @ x).dtype == torch.float32


def test_storages_are_made_and_grown_without_an_allocator_of_torch() -> None:
    storage = torch.UntypedStorage(8, device=SIM)
    assert (storage.device.type, storage.nbytes()) == (SIM, 8)
    storage.resize_(16)
    assert storage.nbytes() == 16
    assert torch.UntypedStorage(8).nbytes() == 8


def test_the_compiler_asks_for_parts_that_are_there_to_be_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor.codegen import common
    assert callable(common.get_device_op_overrides)
    assert isinstance(common.device_op_overrides_dict, dict)


def test_a_part_is_given_to_the_compiler_for_a_device_that_it_does_not_know() -> None:
    from torch._inductor.codegen import common

    class Part:
        pass

    private.give_compiler_part("planted", Part)
    try:
        assert type(common.get_device_op_overrides("planted")) is Part
        assert type(common.get_device_op_overrides("cpu")) is not Part
    finally:
        del common.device_op_overrides_dict["planted"]


def test_a_tensor_may_be_put_over_no_more_than_its_storage() -> None:
    x = torch.ones(4, device=SIM)
    for size, offset in ((10, 0), (2, 3)):
        with pytest.raises(RuntimeError, match="resize"):
            x.as_strided((size,), (1,), offset)
    assert x.tolist() == [1.0] * 4


def test_kernels_for_shapes_stand_in_a_file_of_their_own() -> None:
    assert Path(private.META_KERNELS).is_file()
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(2, 2, device=SIM) @ torch.ones(2, 2, device="meta")


def test_a_mode_is_told_when_is_cuda_is_asked() -> None:
    asked: list[Any] = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Asked():
        assert not torch.ones(1).is_cuda
    assert any(func == private.IS_CUDA for func in asked)


def test_everything_that_needs_cuda_comes_to_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Came(Exception):
        pass

    def come() -> None:
        raise Came

    monkeypatch.setattr(torch.cuda, private.LAZY_INIT, come)
    for needs in (torch.cuda.synchronize, lambda: torch.ones(1, device="cuda"), torch.ones(1).cuda):
        with pytest.raises(Came):
            needs()


def test_leaves_of_arguments_are_found_and_changed() -> None:
    tree = ([1, (2,)], {"a": 3})
    assert list(private.leaves_of(tree)) == [1, 2, 3]
    assert private.map_leaves(lambda leaf: leaf + 1, tree) == ([2, (3,)], {"a": 4})


def test_a_view_is_read_as_negative() -> None:
    x = torch.ones(2)
    view = private.negative_view(x)
    assert view.is_neg()
    assert view.tolist() == [-1.0, -1.0]
    assert view.data_ptr() == x.data_ptr()


def test_a_tensor_is_pinned_by_the_method_as_it_is() -> None:
    with simulator.foreign("map"):
        assert private.pinned(torch.ones(2)).is_pinned()


def test_a_backward_pass_runs_where_it_is_called() -> None:
    assert torch.autograd._engine_run_backward.__module__ == private.__name__
    threads: list[str] = []
    x = torch.ones(2, device=SIM, requires_grad=True)
    x.register_hook(lambda gradient: threads.append(threading.current_thread().name))
    (x * 2).sum().backward()
    torch.autograd.grad((x * 2).sum(), x)
    assert threads == [threading.current_thread().name] * 2


def test_storages_are_copied_whole_where_they_have_grown() -> None:
    storage = torch.ones(2, device=SIM).untyped_storage()
    storage.resize_(12)
    assert (storage.nbytes(), storage.cpu().nbytes(), storage.clone().nbytes()) == (12, 12, 12)


def uses_of_private_names(source: str) -> list[str]:
    """What a source takes of torch that has a private name, or stands in a private module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [part for part in (node.module or "").split(".") if part.startswith("_")]
            found += [name.name for name in node.names if name.name.startswith("_")]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.startswith("torch.")]
            found += [name for name in names if "._" in name]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[:2] != "__":
            text = ast.unparse(node)
            if text.startswith("torch.") and not text.startswith("torch.ops."):
                found.append(text)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C.x", ["torch._C"]),
        ("import torch\ntorch.autograd._engine", ["torch.autograd._engine"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from torch import _C", ["_C"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch\ntorch.nn.Linear(1, 1)", []),
    ],
)
def test_a_private_name_is_found(source: str, found: list[str]) -> None:
    assert uses_of_private_names(source) == found


def test_no_other_module_of_the_simulator_takes_private_names() -> None:
    folder = Path(private.__file__).parent
    others = [path for path in folder.glob("*.py") if path.name != "private.py"]
    assert len(others) > 10
    assert {path.name: uses_of_private_names(path.read_text()) for path in others} == {
        path.name: [] for path in others
    }


def test_each_name_of_private_has_a_canary() -> None:
    here = Path(__file__).read_text()
    tree = ast.parse(Path(private.__file__).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {
        n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    elsewhere = {
        "register": "the device is there",
        "too_old": "tests/sim/test_process.py",
        "replace_storage_methods": "its methods are in place",
        "run_backward_where_it_is_called": "its function is in place",
    }
    named = {name for name in names if not name.startswith("_")} - elsewhere.keys()
    assert {name for name in named if f"private.{name}" not in here} == set()
