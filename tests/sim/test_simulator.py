"""The simulated device as a PyTorch device: what it does as CUDA does, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import interlock as il
from interlock.backends import simulator
from interlock.backends.simulator import Strike, private
from interlock.backends.simulator.plans import Plan


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


def test_it_has_no_generator_of_its_own_and_draws_from_the_default_one_of_the_host() -> None:
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator(device="sim")
    torch.manual_seed(3)
    drawn = torch.randn(3, device="sim")
    torch.manual_seed(3)
    assert torch.equal(drawn.cpu(), torch.randn(3))


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


# Mixed with what is not of the device


def test_a_number_on_the_host_is_taken_exactly_where_cuda_takes_it() -> None:
    torchgen = pytest.importorskip("torchgen")
    listed = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = {
        entry.partition("(")[0]: "device_check: NoCheck" in entry
        for entry in listed.read_text().split("\n- func: ")[1:]
    }
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    wrong = []
    for short, operator in private.operators():
        arguments = operator._schema.arguments
        tensors = [str(a.type) for a in arguments if "Tensor" in str(a.type)]
        alone = len(tensors) < 2 and "List" not in "".join(tensors)
        if short not in entries or alone or any(a.is_out for a in arguments) or "nested" in short:
            continue
        if any(word in short for word in ("_validate_compressed", "slice_inverse", "_scaled_dot_product")):
            continue  # views and private parts, that are given one device by whoever calls them
        if any(private.has_kernel(f"aten::{short}", key) for key in keys):
            found = Plan(operator).numbers
            if found != entries[short]:
                wrong.append((short, found))
    assert len(entries) > 2000
    assert wrong == []


def _sum_to_host() -> Any:
    return torch.sum(there(3), 0, out=torch.zeros(()))


REFUSED: dict[str, Callable[[], Any]] = {
    "values for a mask": lambda: there(4).__setitem__(torch.ones(4, device="sim") > 0, torch.ones(4)),
    "values for indices": lambda: there(4).__setitem__(torch.tensor([0, 1]), torch.ones(2)),
    "one value for indices": lambda: there(4).index_put_((torch.tensor([0]),), torch.ones(1)),
    "written to": lambda: torch.zeros(()).add_(torch.ones((), device="sim")),
    "out": _sum_to_host,
    "index": lambda: there(5).index_select(0, torch.tensor(1)),
    "target": lambda: F.cross_entropy(there(2), torch.tensor(1)),
    "stacked": lambda: torch.stack([torch.ones((), device="sim"), torch.ones(())]),
    "clamped by": lambda: torch.clamp(there(2), min=torch.tensor(0.0)),
    "listed": lambda: torch._foreach_add_([torch.ones((), device="sim"), torch.ones(())], 1.0),
    "shape only, a factor": lambda: there(2, 4) @ torch.ones(4, 3, device="meta"),
    "shape only, a layer": lambda: nn.Linear(4, 3, bias=False, device="meta")(there(2, 4)),
    "shape only, a kernel": lambda: F.conv1d(there(1, 2, 4), torch.ones(2, 2, 1, device="meta")),
    "shape only, a target": lambda: F.mse_loss(there(2, 4), torch.ones(2, 4, device="meta")),
    "shape only, one of some": lambda: torch.cat([there(4), torch.ones(4, device="meta")]),
}


@pytest.mark.parametrize("mix", REFUSED)
def test_what_cuda_does_not_take_from_elsewhere_is_refused(mix: str) -> None:
    with pytest.raises(RuntimeError, match=r"on the same device|not on the expected device"):
        REFUSED[mix]()


TAKEN: dict[str, Callable[[str], torch.Tensor]] = {
    "factor": lambda d: torch.tensor(2.0) * torch.ones(2, device=d),
    "value for indices": lambda d: torch.zeros(4, device=d).index_put_(
        (torch.tensor([0]),), torch.tensor(3.0)
    ),
    "value in brackets for a mask": lambda d: torch.zeros(4, device=d).index_put_(
        (torch.ones(4, device=d) > 0,), torch.ones(1)
    ),
    "filled": lambda d: torch.zeros(4, device=d).masked_fill(torch.ones(4, device=d) > 0, torch.tensor(2.0)),
    "chosen": lambda d: torch.where(torch.ones(4, device=d) > 0, torch.tensor(2.0), torch.zeros(4, device=d)),
    "added": lambda d: torch._foreach_add([torch.ones(2, device=d)], torch.tensor(2.0))[0],
}


@pytest.mark.parametrize("take", TAKEN)
def test_what_cuda_takes_from_the_host_is_taken(take: str) -> None:
    assert torch.equal(TAKEN[take]("sim").cpu(), TAKEN[take]("cpu"))


def test_only_the_shape_of_a_tensor_goes_to_meta() -> None:
    assert there(2, 3).to("meta").shape == (2, 3)
    with pytest.raises(NotImplementedError, match="no data"):
        there(2).copy_(torch.ones(2, device="meta"))


# What is changed in place


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "_foreach_add_": lambda x: torch._foreach_add_([x], 1.0),
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], [2.0]),
    "_foreach_zero_": lambda x: torch._foreach_zero_([x]),
    "_foreach_copy_": lambda x: torch._foreach_copy_([x], [x.detach().clone()]),
    "_foreach_addcdiv_": lambda x: torch._foreach_addcdiv_([x], [x.detach().exp()], [x.detach().exp()]),
    "add_": lambda x: x.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_what_was_changed_since_gives_no_gradient(change: str, device: str) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    loss = (w * w.exp()).sum()
    with torch.no_grad():
        before = w._version
        CHANGES[change](w)
        assert w._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_scaler_changes_gradients_visibly() -> None:
    gradient = there(3)
    infinite, scale = torch.zeros((), device="sim"), torch.ones((), device="sim")
    before = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], infinite, scale)
    assert gradient._version > before


def _resized(device: str) -> list[Any]:
    x = torch.arange(4.0, device=device)
    view = x[:2]
    x.resize_(100)
    view.add_(5)
    x[50] = 7.0
    grown = x.view(10, 10)[5, 0]
    again = torch.empty(0, device=device).set_(view.untyped_storage(), 0, (100,), (1,))
    y = torch.arange(6.0, device=device).view(2, 3).t()
    channels = torch.zeros(48, device=device).resize_(1, 3, 4, 4, memory_format=torch.channels_last)
    out, part = torch.zeros(2, device=device), torch.zeros(0, device=device)
    part.set_(out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a result is resized
        torch.arange(5, dtype=torch.float32, out=out)
    part.add_(10)
    sizes = [t.untyped_storage().nbytes() for t in (x, view, out, part)]
    told = [x[:4].tolist(), grown.item(), again[50].item(), out.tolist(), sizes]
    return [*told, y.resize_(3, 2).stride(), channels.stride(), copy.deepcopy(view).tolist()]


def test_what_is_resized_goes_on_sharing_its_memory() -> None:
    before = simulator.memory.allocated
    assert _resized("sim") == _resized("cpu")
    assert simulator.memory.allocated == before
    x = torch.ones(4, device="sim")
    view = x[1:]
    x.resize_(8)
    assert simulator.memory.allocated == before + 32
    del x
    assert (view + 1).tolist() == [2.0] * 3
    assert simulator.memory.allocated == before + 32


def test_what_is_resized_is_saved_whole() -> None:
    x = torch.arange(4.0, device="sim")
    view, file = x[1:], io.BytesIO()
    x.resize_(64)
    x[1] = 9.0
    torch.save(view, file)
    file.seek(0)
    assert torch.load(file, map_location="cpu", weights_only=True).tolist() == [9.0, 2.0, 3.0]


def test_there_may_be_no_room_to_grow() -> None:
    x, before = torch.ones(4, device="sim"), simulator.memory.allocated
    with simulator.capacity(before + 8):
        for grow in (lambda: x.resize_(100), lambda: x.untyped_storage().resize_(400)):
            with pytest.raises(torch.OutOfMemoryError):
                grow()
    assert (x.tolist(), x.untyped_storage().nbytes()) == ([1.0] * 4, 16)
    assert simulator.memory.allocated == before


def test_memory_that_was_given_back_is_not_read() -> None:
    x = torch.ones(4, device="sim")
    x.add_(1)
    x.untyped_storage().resize_(0)
    for read in (lambda: x + 1, lambda: x.cpu(), lambda: x[1:] * 2):
        with pytest.raises(RuntimeError, match="resize it again"):
            read()
    x.untyped_storage().resize_(16)
    assert x.fill_(3).tolist() == [3.0] * 4


def test_a_peak_may_be_reached_by_growing() -> None:
    x = torch.ones(4, device="sim")
    with simulator.memory.watched() as memory:
        x.untyped_storage().resize_(160)
        assert memory.at_peak is not None
        assert max(block.nbytes for block in memory.at_peak) == 160


# Drawing


@pytest.mark.parametrize("seed", ["manual_seed", "manual_seed_all"])
def test_it_draws_the_same_after_the_same_seed(seed: str) -> None:
    def drawn() -> list[float]:
        getattr(torch.sim, seed)(3)
        found: list[float] = torch.rand(3, device="sim").tolist()
        return found

    assert drawn() == drawn()
    assert torch.sim.initial_seed() == 3
    (states,) = (torch.sim.get_rng_state_all(),)
    first = torch.rand(3, device="sim").tolist()
    torch.sim.set_rng_state_all(states)
    assert torch.rand(3, device="sim").tolist() == first
    with simulator.foreign("map"):
        torch.cuda.manual_seed_all(3)
        assert torch.rand(3, device="cuda").tolist() == drawn()
    assert torch.sim.seed() != 3


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.randn(3, device="sim", generator=g),
        lambda g: torch.zeros(3, device="sim").normal_(generator=g),
        lambda g: torch.multinomial(torch.ones(3, device="sim"), 1, generator=g),
    ],
)
def test_it_draws_from_no_generator_of_the_host_that_is_named(draw: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        draw(torch.Generator())


# What `torch.cuda` has


def test_memory_is_told_as_cuda_tells_it() -> None:
    x = there(256)
    stats = torch.sim.memory_stats()
    nested = torch.sim.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"] >= x.nbytes
    assert str(stats["allocated_bytes.all.current"]) in torch.sim.memory_summary()
    assert sum(one["allocated_size"] for one in torch.sim.memory_snapshot()) == simulator.memory.allocated
    assert torch.sim.OutOfMemoryError is torch.OutOfMemoryError


def test_there_is_a_total_of_memory_and_no_less_than_nothing_is_free() -> None:
    x = there(256)
    free, total = torch.sim.mem_get_info()
    assert 0 < free == total - simulator.memory.allocated
    with simulator.capacity(x.nbytes // 2):
        assert torch.sim.mem_get_info() == (0, 512)


def test_a_loss_that_is_unsafe_in_low_precision_is_refused_as_on_cuda() -> None:
    probability, target = torch.full((3,), 0.5, device="sim"), torch.ones(3, device="sim")
    with torch.autocast("sim", dtype=torch.float16):
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(probability, target)
        with torch.autocast("sim", enabled=False):
            assert F.binary_cross_entropy(probability, target).item() > 0


# Strikes that overlap


def late(match: str) -> Strike:
    return Strike("operator", 1, "late", match=match)


def test_an_inner_block_leaves_the_error_of_the_outer_one() -> None:
    x = torch.ones(2, device="sim")
    with simulator.striking(late("mul")):
        x * 2
        with simulator.striking(Strike("operator", 1, match="sub")):
            pass
        with pytest.raises(simulator.SimulatedFault):
            simulator.synchronize()


def test_several_late_errors_come_out_one_after_the_other() -> None:
    x = torch.ones(2, device="sim")
    first, second = late("mul"), Strike("operator", 1, "late", match="add", error=KeyError)
    with simulator.striking(first, second):
        x * 2 + 1
        with pytest.raises(simulator.SimulatedFault):
            simulator.synchronize()
        assert (first.unheard, type(second.unheard)) == (None, KeyError)
        with pytest.raises(KeyError):
            simulator.synchronize()
        simulator.synchronize()


def test_an_error_that_nothing_waited_for_ends_with_its_block_and_is_kept() -> None:
    strike = late("mul")
    with simulator.striking(strike):
        torch.ones(2, device="sim") * 2
    simulator.synchronize()
    assert isinstance(strike.unheard, simulator.SimulatedFault)


def test_blocks_that_overlap_lose_no_strike() -> None:
    x = torch.ones(2, device="sim")
    first = simulator.striking(Strike("operator", 1, match="sub"))
    second = simulator.striking(Strike("operator", 1, match="add"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as one of two threads would
    x - 1
    with pytest.raises(simulator.SimulatedFault):
        x + 1
    second.__exit__(None, None, None)
    x + 1
    assert not simulator.faults.hot


def test_a_strike_counts_from_the_beginning_of_its_block() -> None:
    x, strike = torch.ones(2, device="sim"), Strike("operator", 2, match="add")
    for _ in range(2):
        with simulator.striking(strike):
            x + 1
            with pytest.raises(simulator.SimulatedFault):
                x + 1
    with simulator.striking(strike), pytest.raises(simulator.StrikeMisused, match="in force already"):
        simulator.striking(strike).__enter__()


@pytest.mark.parametrize("how", ["fails", "half"])
def test_growing_is_an_allocation_and_can_be_struck(how: str) -> None:
    x, before = torch.ones(4, device="sim"), simulator.memory.allocated
    for grow in (lambda: x.resize_(100), lambda: x.untyped_storage().resize_(400)):
        strike = Strike("allocation", 1, how)
        with simulator.striking(strike), pytest.raises(simulator.SimulatedFault):
            grow()
        assert strike.struck == 1
        assert (x.tolist(), simulator.memory.allocated) == ([1.0] * 4, before)
    with (
        simulator.striking(Strike("operator", 1, how, match="resize_")),
        pytest.raises(simulator.SimulatedFault),
    ):
        x.resize_(100)
    assert (x.tolist(), simulator.memory.allocated) == ([1.0] * 4, before)


ASKED: dict[str, Callable[[torch.Tensor], object]] = {
    "resize_": lambda x: x.resize_(8),
    "set_": lambda x: x.set_(x.untyped_storage(), 0, (1,), (1,)),
    "UntypedStorage.resize_": lambda x: x.untyped_storage().resize_(0),
    "UntypedStorage": lambda x: torch.UntypedStorage(8, device="sim"),
    "view": lambda x: x[1:],
    "empty_cache": lambda x: torch.sim.empty_cache(),
    "ipc_collect": lambda x: torch.sim.ipc_collect(),
    "memory_snapshot": lambda x: torch.sim.memory_snapshot(),
    "memory_summary": lambda x: torch.sim.memory_summary(),
    "mem_get_info": lambda x: torch.sim.mem_get_info(),
    "Event.record": lambda x: torch.sim.Event().record(),
    "Event.query": lambda x: torch.sim.Event().query(),
    "Event.wait": lambda x: torch.sim.Event().wait(),
    "Stream.query": lambda x: torch.sim.current_stream().query(),
    "Stream.wait_stream": lambda x: torch.sim.current_stream().wait_stream(None),
    "Stream.record_event": lambda x: torch.sim.current_stream().record_event(),
}


@pytest.mark.parametrize("call", ASKED)
def test_whatever_is_asked_of_a_lost_device_is_refused_and_listed(call: str) -> None:
    x = torch.ones(2, device="sim")
    simulator.faults.lose("pulled")
    try:
        with pytest.raises(simulator.SimulatedLoss):
            ASKED[call](x)
        assert len(simulator.touched()) == 1
    finally:
        simulator.replug()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: Strike("nowhere"),
        lambda: Strike("sync", how="blocks"),
        lambda: simulator.draw(1, dict.fromkeys(simulator.POINTS, 0)),
        lambda: simulator.foreign("ignore").__enter__(),
        lambda: simulator.parameters("lost").__enter__(),
    ],
)
def test_misuse_is_an_error_of_the_family(misuse: Callable[[], object]) -> None:
    with pytest.raises(il.errors.InterlockError):
        misuse()


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


HARD_CODED: dict[str, Callable[[], Any]] = {
    "Tensor.pin_memory": lambda: torch.ones(2).pin_memory(),
    "pin_memory=True in ones": lambda: torch.ones(2, pin_memory=True),
    "torch.cuda.FloatTensor": lambda: torch.cuda.FloatTensor([1.0, 1.0]),
    "Tensor.type('torch.cuda.FloatTensor')": lambda: torch.ones(2).type("torch.cuda.FloatTensor"),
    "a device by its number in to": lambda: torch.ones(2).to(0),
    "a device by its number in ones": lambda: torch.ones(2, device=0),
    "device 'cuda' in to": lambda: torch.ones(2).to("cuda"),
    "torch.cuda.memory_summary": lambda: torch.cuda.memory_summary(),
    "torch.cuda.memory_allocated": lambda: torch.cuda.memory.memory_allocated(),
    "torch.cuda.nvtx.range_push": lambda: torch.cuda.nvtx.range_push("here"),
}


@pytest.mark.parametrize("what", HARD_CODED)
def test_each_way_to_name_cuda_is_mapped_and_told(what: str) -> None:
    with simulator.foreign("map") as found:
        made = HARD_CODED[what]()
    assert [place.what for place in found] == [what]
    assert "test_simulator.py:" in found[0].where
    if isinstance(made, torch.Tensor):
        assert made.tolist() == [1.0, 1.0]
        assert made.is_pinned() or made.device.type == "sim"


HELD = torch.cuda.synchronize
NOWHERE: dict[str, Callable[[], Any]] = {
    "a generator on 'cuda'": lambda: torch.Generator(device="cuda"),
    "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "what only CUDA has": lambda: HELD(),
}


@pytest.mark.parametrize("how", ["map", "refuse"])
@pytest.mark.parametrize("what", NOWHERE)
def test_what_cannot_be_mapped_is_refused_with_file_and_line(what: str, how: str) -> None:
    with (
        simulator.foreign(how) as found,
        pytest.raises(simulator.ForeignDevice, match=r"test_simulator\.py:"),
    ):
        NOWHERE[what]()
    assert [place.what for place in found] == [what]


def on_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_other_threads_are_mapped_or_refused_with_file_and_line() -> None:
    with simulator.foreign("map") as found:
        assert on_another_thread(lambda: torch.ones(2).cuda()).device.type == "sim"
        with pytest.raises(simulator.ForeignDevice, match=r"test_simulator\.py:"):
            on_another_thread(lambda: torch.ones(2, device="cuda"))
    assert [place.what for place in found] == ["Tensor.cuda", "what only CUDA has"]


def test_what_is_deprecated_is_told_where_it_is_called() -> None:
    with simulator.foreign("map") as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.amp.GradScaler()
    assert "test_simulator.py:" in found[0].where


def test_pinned_batches_are_told() -> None:
    with simulator.foreign("map") as found:
        batches = torch.utils.data.DataLoader([torch.ones(2)], pin_memory=True)
        assert [batch.is_pinned() for batch in batches] == [True]
    assert [place.what for place in found] == ["Tensor.pin_memory"]
    assert "test_simulator.py:" in found[0].where


def test_blocks_may_be_nested_and_overlap_on_threads() -> None:
    cuda = dict(vars(torch.cuda))
    entered, leave = threading.Event(), threading.Event()
    second: list[Any] = []

    def stay() -> None:
        with simulator.foreign("map") as found:
            second.append(found)
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=stay)
    with simulator.foreign("map") as first:
        thread.start()
        assert entered.wait(30)
        torch.ones(2).cuda()
    torch.ones(2).cuda()  # as the other block wants it
    leave.set()
    thread.join()
    assert (len(first), len(second[0])) == (1, 2)
    with simulator.foreign("map") as one, simulator.foreign("map") as other:
        torch.zeros(1, device="cuda")
    assert one == other != []
    assert dict(vars(torch.cuda)) == cuda


def test_blocks_do_not_contradict_each_other() -> None:
    with simulator.foreign("map"), pytest.raises(il.errors.DeviceInUse, match="mapped by one block"):
        simulator.foreign("refuse").__enter__()
    assert torch.cuda.is_available() is False


def test_a_block_that_cannot_begin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pinned = dict(vars(torch.cuda)), torch.Tensor.pin_memory
    monkeypatch.delattr(torch.amp.grad_scaler.GradScaler, "__init__")
    with pytest.raises(KeyError):
        simulator.foreign("map").__enter__()
    assert dict(vars(torch.cuda)) == cuda
    assert torch.Tensor.pin_memory is pinned
    assert "cuda" not in vars(torch.Tensor)
    monkeypatch.undo()
    with simulator.foreign("map") as found:
        torch.ones(1).cuda()
    assert len(found) == 1
