"""A canary for each private call of torch that the simulated device rests on."""

from __future__ import annotations

import warnings

import pytest
import torch

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
