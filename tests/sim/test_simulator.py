"""The simulated device as a PyTorch device: what it does as CUDA does, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from interlock.backends import simulator
from interlock.backends.simulator import Strike


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def there(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="sim")


# A device like others


def test_copies_of_modules_stand_on_the_device_and_share_nothing() -> None:
    model = net().to("sim")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].weight.device == torch.device("sim", 0)
        assert other[0].weight.data_ptr() != model[0].weight.data_ptr()
        assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("where", [None, "cpu", "sim", "sim:0"])
def test_what_is_saved_is_loaded_where_it_is_asked_for(where: str | None) -> None:
    model, file = net().to("sim"), io.BytesIO()
    base = there(4, 4)
    torch.save({**model.state_dict(), "base": base, "view": base[1:]}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where, weights_only=True)
    assert loaded["0.weight"].device.type == ("sim" if where is None else where.partition(":")[0])
    assert torch.equal(loaded["0.weight"].cpu(), model[0].weight.cpu())
    assert loaded["view"].untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()


def test_what_is_saved_is_mapped_from_its_file(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", mmap=True, map_location="sim", weights_only=True)
    assert loaded["0.weight"].device.type == "sim"
    assert torch.equal(loaded["0.weight"].cpu(), net()[0].weight)


def test_it_has_no_generator_of_its_own_and_draws_from_one_of_the_host() -> None:
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator(device="sim")
    drawn = torch.randn(3, device="sim", generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(3)))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda z: z.conj().t(),
    "row": lambda z: z.conj()[1],
    "reshaped": lambda z: z.conj().view(4, 3),
    "imaginary": lambda z: z.conj().imag.t(),
    "expanded": lambda z: z.conj()[None].expand(2, 3, 4),
    "parted": lambda z: torch.cat(z.conj().chunk(2, 1)),
    "multiplied": lambda z: z.mH @ z,
    "in place": lambda z: z.clone().conj().t().mul_(2j),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_conjugates_are_read_as_conjugates(view: str) -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    expected = VIEWS[view](z).resolve_conj().resolve_neg()
    found = VIEWS[view](z.to("sim"))
    assert torch.equal(found.resolve_conj().resolve_neg().cpu(), expected)


def test_a_result_with_gaps_may_be_written_to_a_tensor_that_is_too_small() -> None:
    a, b = torch.randn(5, 3), torch.randn(5, 2)
    before = simulator.memory.allocated
    found = torch.linalg.lstsq(a.to("sim"), b.to("sim")).solution
    assert torch.allclose(found.cpu(), torch.linalg.lstsq(a, b).solution, atol=1e-5)
    del found
    assert simulator.memory.allocated == before


def test_a_number_that_torch_had_made_a_tensor_is_one_again() -> None:
    x, index = torch.randn(3, 3), torch.tensor([[0, 2], [1, 1], [2, 0]])
    found = torch.take_along_dim(x.to("sim").requires_grad_(), index.to("sim"), 1)
    found.sum().backward()
    assert torch.equal(found.detach().cpu(), torch.take_along_dim(x, index, 1))


def test_it_can_be_the_device_of_a_block() -> None:
    with torch.device("sim"):
        layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    assert layer(x).device.type == "sim"


def test_indices_may_stand_on_the_host_and_nothing_else() -> None:
    x = torch.arange(12.0, device="sim").view(3, 4)
    index = torch.tensor([0, 2])
    assert torch.equal(x[index].cpu(), torch.arange(12.0).view(3, 4)[index])
    x[index, 1] = torch.tensor(9.0)
    x[x > 10] = 0
    assert x.sum().item() == 0 + 9 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 + 0
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        torch.randn(3)[torch.tensor([0], device="sim")]


@pytest.mark.parametrize(
    "mix",
    [
        lambda: nn.Linear(4, 4).to("sim")(torch.randn(2, 4)),
        lambda: nn.Linear(4, 4)(there(2, 4)),
        lambda: F.cross_entropy(there(2, 4), torch.tensor([0, 1])),
        lambda: torch.cat([torch.ones(2), there(2)]),
        lambda: torch.where(there(2) > 0, torch.ones(2), there(2)),
    ],
)
def test_tensors_of_two_devices_are_not_mixed(mix: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix()


def test_a_number_on_the_host_may_be_mixed_with_anything() -> None:
    assert (torch.tensor(2.0) * there(2)).device.type == "sim"


def test_there_is_one_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="sim:1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lowers_products_and_keeps_losses(dtype: torch.dtype) -> None:
    model, x = net().to("sim"), there(8, 8)
    with torch.autocast("sim", dtype=dtype):
        out = model(x)
        loss = F.cross_entropy(out, torch.zeros(8, dtype=torch.long, device="sim"))
    loss.backward()
    assert (out.dtype, loss.dtype, model[0].weight.grad.dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("work", "dtype"),
    [
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.bfloat16),
        (lambda x: F.rms_norm(x.bfloat16(), (4,)), torch.float32),
        (lambda x: torch.logsumexp(x.bfloat16(), 0), torch.float32),
        (lambda x: torch.addcmul(x, x.bfloat16(), x.bfloat16()), torch.float32),
        (lambda x: torch.addcmul(x.bfloat16(), x.bfloat16(), x.bfloat16()), torch.bfloat16),
        (lambda x: x.double() @ x.double(), torch.float64),
    ],
)
def test_autocast_takes_the_dtype_that_it_takes_on_accelerators(work: Any, dtype: torch.dtype) -> None:
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert work(there(4, 4)).dtype == dtype


def test_a_scaler_skips_a_step_that_is_not_finite() -> None:
    model = net().to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
    scaler.scale(model(there(8, 8)).sum() * float("inf")).backward()
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, before)
    assert scaler.get_scale() == 512.0


def _lstm() -> torch.Tensor:
    out, _ = nn.LSTM(4, 6, 2, batch_first=True).to("sim")(there(2, 5, 4))
    return out


def _gru() -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(there(2, 5, 4), torch.tensor([5, 3]), batch_first=True)
    return nn.GRU(4, 6, batch_first=True).to("sim")(packed)[0].data


def _attention() -> torch.Tensor:
    return nn.TransformerEncoderLayer(16, 4, batch_first=True).to("sim")(there(2, 5, 16))


def _bag() -> torch.Tensor:
    starts = torch.tensor([0, 2], device="sim")
    return nn.EmbeddingBag(10, 4).to("sim")(torch.tensor([1, 2, 3], device="sim"), starts)


def _recomputed() -> torch.Tensor:
    x = there(8, 8).requires_grad_()
    return torch.utils.checkpoint.checkpoint(net().to("sim"), x, use_reentrant=False)


def _saved_on_host() -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net().to("sim")(there(8, 8))


def _jvp() -> torch.Tensor:
    model = net().to("sim").eval()
    return torch.func.jvp(model, (there(2, 8),), (there(2, 8),))[1]


def _fourier() -> torch.Tensor:
    x = there(8).requires_grad_()
    y = torch.fft.rfft(x)
    assert torch.allclose(torch.fft.irfft(y, 8), x, atol=1e-5)
    return torch.view_as_real(y.conj().resolve_conj())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch, within itself
@pytest.mark.parametrize("work", [_lstm, _gru, _attention, _bag, _recomputed, _saved_on_host, _jvp, _fourier])
def test_what_models_are_made_of_has_gradients_there(work: Callable[[], torch.Tensor]) -> None:
    out = work()
    assert out.device.type == "sim"
    if out.requires_grad:
        out.sum().backward()
    assert bool(out.isfinite().all())


def test_metadata_that_changes_in_place_is_followed() -> None:
    x = torch.arange(6.0, device="sim").view(2, 3)
    x.t_()
    assert (x.shape, x.stride()) == ((3, 2), (1, 3))
    x.unsqueeze_(0)
    x.squeeze_(0)
    out = torch.empty(0, device="sim")
    torch.add(torch.ones(5, device="sim"), 1, out=out)
    assert out.tolist() == [2.0] * 5
    y = torch.ones(2, 3, device="sim")
    y.resize_(4, 4)
    assert y[0].tolist() == [1.0] * 4


def test_pinned_memory_is_marked() -> None:
    assert torch.randn(3).pin_memory().is_pinned()
    assert not torch.randn(3).is_pinned()


def test_threads_may_work_on_it_at_once() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                a = there(16, 16).requires_grad_()
                (a @ a).relu().sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# Parameters


@pytest.mark.parametrize("how", ["kept", "replaced"])
def test_placement_keeps_parameters_or_replaces_them(how: str) -> None:
    model = nn.Linear(3, 3)
    before = model.weight
    with simulator.parameters(how):
        model.to("sim")
    assert (model.weight is before) == (how == "kept")
    assert model.weight.device.type == "sim"


def test_an_early_optimizer_trains_nothing_where_they_are_replaced() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.to("sim")
    before = model.weight.detach().clone()
    model(there(2, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)


# The same bits, and every byte


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "single": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


class Attending(nn.Module):
    """A block of a transformer over an embedding that is also its head."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(20, 16)
        self.qkv, self.o, self.ln = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        x = self.e(i)
        q, k, v = (t.view(*t.shape[:2], 4, 4).transpose(1, 2) for t in self.qkv(self.ln(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return F.dropout(x + self.o(mixed), 0.1) @ self.e.weight.T


def trained(kind: str, optimizer: str, device: str) -> tuple[nn.Module, Any, list[float]]:
    torch.manual_seed(0)
    if kind == "attention":
        model: nn.Module = Attending()
        data = [(torch.randint(0, 20, (4, 9)), torch.randint(0, 20, (4, 9))) for _ in range(4)]
    else:
        conv = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(8 * 36, 5), nn.Dropout(0.1))
        data = [(torch.randn(6, 3, 12, 12), torch.randint(0, 5, (6,))) for _ in range(4)]
    model.to(device)
    chosen = OPTIMIZERS[optimizer](list(model.parameters()))
    losses = []
    for x, y in data:
        out = model(x.to(device))
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.to(device).reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    return model, chosen, losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["convolution", "attention"])
def test_a_training_has_the_bits_of_the_host_and_every_byte_is_counted(kind: str, optimizer: str) -> None:
    host, _, losses = trained(kind, optimizer, "cpu")
    with simulator.parameters("kept"):
        before = simulator.memory.allocated
        model, chosen, ours = trained(kind, optimizer, "sim")
        assert ours == losses
        for name, tensor in host.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), tensor), name
        state = [t for s in chosen.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        stand = [*model.parameters(), *model.buffers(), *(t for t in state if t.device.type == "sim")]
        assert simulator.memory.allocated - before == sum(t.nbytes for t in stand)
        del stand, state, tensor
        model.to("cpu")
        chosen.state.clear()
        assert simulator.memory.allocated == before


def test_a_block_says_by_what_and_for_whom_and_where_it_was_made() -> None:
    with simulator.owner("me"), simulator.stacks():
        x = there(4)
    block = simulator.block_of(x)
    assert block is not None
    assert (block.nbytes, block.owner) == (16, "me")
    assert "test_simulator.py" in block.stack[0]
    assert simulator.block_of(torch.ones(2)) is None
    assert torch.sim.memory_allocated() == simulator.memory.allocated
    y = there(4)
    plain = simulator.block_of(y)
    assert plain is not None
    assert (plain.owner, plain.stack) == ("", ())


def test_views_share_a_block_and_storages_shrink() -> None:
    x = there(4, 4)
    before = simulator.memory.allocated
    assert simulator.block_of(x[1:]) == simulator.block_of(x)
    assert simulator.memory.allocated == before
    x.untyped_storage().resize_(0)
    assert simulator.memory.allocated == before - 64


def test_blocks_may_die_while_they_are_listed() -> None:
    before = gc.get_threshold()
    gc.set_threshold(1)  # a collection at every chance
    try:
        for _ in range(50):
            cycle: list[Any] = [there(1)]
            cycle.append(cycle)
            del cycle
            simulator.memory.live()
    finally:
        gc.set_threshold(*before)
        gc.collect()


def test_memory_is_short_and_told_as_cuda_tells_it() -> None:
    before = simulator.memory.allocated
    with simulator.capacity(before + 3 * 1024):
        kept = torch.empty(512, device="sim")
        with pytest.raises(torch.OutOfMemoryError, match=r"SIM out of memory\. Tried to allocate 2\.00 KiB"):
            kept + 1
        assert simulator.memory.allocated == before + 2048
    assert torch.empty(1024, device="sim").numel() == 1024


def test_memory_that_was_not_written_may_be_poisoned() -> None:
    with simulator.poisoned():
        assert bool(torch.empty(3, device="sim").isnan().all())


# Faults


def test_an_operator_fails_before_it_does_anything() -> None:
    x = torch.ones(4, device="sim")
    with simulator.striking(Strike("operator", 1, match="add_")) as (strike,):
        with pytest.raises(simulator.SimulatedFault):
            x.add_(1)
        assert strike.struck == 1
    assert x.tolist() == [1.0] * 4


def test_an_operator_is_half_done() -> None:
    x = torch.ones(4, device="sim")
    with (
        simulator.striking(Strike("operator", 1, "half", match="add_")),
        pytest.raises(simulator.SimulatedFault),
    ):
        x.add_(1)
    assert x.tolist() == [2.0, 2.0, 1.0, 1.0]
    many = [torch.ones(1, device="sim") for _ in range(4)]
    strike = Strike("operator", 1, "half", match="_foreach_add_")
    with simulator.striking(strike), pytest.raises(simulator.SimulatedFault):
        torch._foreach_add_(many, 1.0)
    assert [t.item() for t in many] == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("point", ["to_device", "to_host", "on_device"])
def test_a_copy_is_half_done(point: str) -> None:
    devices = {"to_device": ("cpu", "sim"), "to_host": ("sim", "cpu"), "on_device": ("sim", "sim")}
    here, target = devices[point]
    source, goal = torch.ones(4, device=here), torch.zeros(4, device=target)
    with simulator.striking(Strike(point, 1, "half")), pytest.raises(simulator.SimulatedFault):
        goal.copy_(source)
    assert goal.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_an_asynchronous_error_comes_out_at_the_next_wait() -> None:
    x = torch.ones(2, device="sim")
    with simulator.striking(Strike("operator", 1, "late", match="mul")):
        y = x * 2
        z = y + 1
        with pytest.raises(simulator.SimulatedFault):
            simulator.synchronize()
        assert z.tolist() == [3.0, 3.0]


PASSED: dict[str, Callable[[], object]] = {
    "operator": lambda: torch.ones(4, device="sim").add_(1),
    "to_device": lambda: torch.ones(4).to("sim"),
    "to_host": lambda: torch.ones(4, device="sim").cpu(),
    "on_device": lambda: torch.ones(4, device="sim").copy_(torch.ones(4, device="sim")),
    "allocation": lambda: torch.ones(4, device="sim"),
    "sync": simulator.synchronize,
}


def _passed_and_waited_for(point: str) -> None:
    PASSED[point]()
    simulator.synchronize()
    simulator.synchronize()  # where the first is what is struck, it comes out here


@pytest.mark.parametrize("how", simulator.HOWS)
@pytest.mark.parametrize("point", simulator.POINTS)
def test_every_point_can_be_struck_in_every_way(point: str, how: str) -> None:
    release = threading.Event()
    release.set()
    strike = Strike(point, 1, how, seconds=0.0, release=release)
    raises = {"fails": simulator.SimulatedFault, "half": simulator.SimulatedFault}
    expected = {**raises, "loses": simulator.SimulatedLoss}.get(how)
    try:
        with simulator.striking(strike):
            if expected is not None:
                with pytest.raises(expected):
                    PASSED[point]()
            elif how == "late":
                with pytest.raises(simulator.SimulatedFault):
                    _passed_and_waited_for(point)
            else:
                PASSED[point]()
        assert strike.struck == 1
    finally:
        simulator.replug()
    PASSED[point]()


def test_a_slow_strike_takes_its_time() -> None:
    x = torch.ones(2, device="sim")
    with simulator.striking(Strike("operator", 1, "slow", match="add_", seconds=0.05)):
        began = time.monotonic()
        x.add_(1)
    assert time.monotonic() - began >= 0.05
    assert x.tolist() == [2.0, 2.0]


def test_a_strike_blocks_until_it_is_released() -> None:
    release, done = threading.Event(), threading.Event()
    x = torch.ones(2, device="sim")

    def work() -> None:
        x.add_(1)
        done.set()

    with simulator.striking(Strike("operator", 1, "blocks", match="add_", release=release)):
        thread = threading.Thread(target=work)
        thread.start()
        assert not done.wait(0.05)
        release.set()
        assert done.wait(30)
        thread.join()
    assert x.tolist() == [2.0, 2.0]


def test_a_lost_device_answers_nothing_until_another_is_there() -> None:
    x = torch.ones(2, device="sim")
    try:
        with simulator.striking(Strike("operator", 1, "loses")), pytest.raises(simulator.SimulatedLoss):
            x + 1
        assert simulator.lost()
        assert simulator.touched() == ()
        for call in (lambda: x + 1, x.cpu, simulator.synchronize, torch.sim.memory_allocated):
            with pytest.raises(simulator.SimulatedLoss):
                call()
        assert len(simulator.touched()) == 4
    finally:
        simulator.replug()
    assert (x + 1).tolist() == [2.0, 2.0]


def test_a_fault_is_drawn_by_a_seed() -> None:
    with simulator.counted() as counts:
        net().to("sim")(there(2, 8)).sum().backward()
    drawn = [simulator.draw(seed, counts) for seed in range(40)]
    again = [simulator.draw(seed, counts) for seed in range(40)]
    assert [str(one) for one in drawn] == [str(one) for one in again]
    assert len({one.point for one in drawn}) > 2
    assert all(1 <= one.nth <= counts[one.point] for one in drawn)


@pytest.mark.parametrize(
    "words", [{"point": "nowhere"}, {"point": "sync", "how": "badly"}, {"point": "sync", "nth": 0}]
)
def test_a_strike_that_would_never_strike_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="would never strike"):
        Strike(**words)


# What it refuses


def test_sparse_tensors_are_refused() -> None:
    for make in (lambda: there(2, 2).to_sparse(), lambda: torch.eye(2).to_sparse().to("sim")):
        with pytest.raises(simulator.Refusal, match="sparse=False"):
            make()


# Foreign code


def test_code_that_names_cuda_is_mapped_and_told() -> None:
    with simulator.foreign("map") as found:
        x = torch.ones(2).cuda()
        y = torch.zeros(2, device="cuda") + x.to("cuda:0")
        layer = nn.Linear(2, 2).cuda()
        torch.cuda.synchronize()
        assert torch.cuda.is_available()
        assert x.is_cuda
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert layer(y[None]).dtype == torch.bfloat16
    assert {one.device.type for one in (x, y, layer.weight)} == {"sim"}
    assert all("test_simulator.py:" in place.where for place in found), found
    told = " ".join(place.what for place in found)
    assert all(word in told for word in ("Tensor.cuda", "torch.cuda.synchronize", "autocast('cuda')"))
    assert not torch.cuda.is_available()


def test_or_refused_with_file_and_line() -> None:
    with (
        simulator.foreign("refuse") as found,
        pytest.raises(simulator.ForeignDevice, match=r"test_simulator\.py:"),
    ):
        torch.ones(2).cuda()
    assert len(found) == 1
