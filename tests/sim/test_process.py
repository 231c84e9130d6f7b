"""What the simulated device is to a process, and to runs of the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.runs import environment
from tools.small import batches, net, task

import interlock as il
from interlock.backends import simulator
from interlock.backends.sim import SimAdapter
from interlock.backends.simulator import Strike, private


def program(text: str) -> str:
    """What a program prints."""
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_and_describing_registers_nothing() -> None:
    told = program(
        "import torch\nfrom interlock.backends import simulator\n"
        "from interlock.backends.sim import SimAdapter\n"
        "SimAdapter(); SimAdapter.unavailable()\n"
        "print(simulator.installed(), torch._C._get_privateuse1_backend_name())"
    )
    assert told.split() == ["False", "privateuseone"]


def test_where_another_device_has_the_slot_it_is_refused_in_one_sentence() -> None:
    told = program(
        "import torch\ntorch.utils.rename_privateuse1_backend('other')\n"
        "from interlock.backends import simulator\n"
        "try: simulator.install()\nexcept Exception as error: print(type(error).__name__, error)"
    )
    assert told.startswith("DeviceUnavailable")
    assert "'other' has taken it" in told
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in told


def test_it_may_be_registered_after_a_backward_pass_on_the_host() -> None:
    told = program(
        "import torch\nx = torch.ones(3, requires_grad=True); (x * 2).sum().backward()\n"
        "from interlock.backends import simulator\nsimulator.install()\n"
        "y = torch.ones(3, device='sim', requires_grad=True); (y * 2).sum().backward()\n"
        "import threading\nnames = []\n"
        "y.register_hook(lambda g: names.append(threading.current_thread().name))\n"
        "(g,) = torch.autograd.grad((y * 3).sum(), y)\nprint(y.grad.tolist(), g.tolist(), names)"
    )
    assert told.strip() == "[2.0, 2.0, 2.0] [3.0, 3.0, 3.0] ['MainThread']"


def test_an_old_torch_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert private.too_old() == "it needs torch 2.10 or newer, and this is 2.9.1+cpu"
    monkeypatch.setattr(torch, "__version__", "2.13.0a0+git")
    assert private.too_old() == ""


def test_an_old_torch_is_told_by_a_run_before_anything_of_it_fails() -> None:
    told = program(
        "import torch\ntorch.__version__ = '2.9.1'\n"
        "del torch._C._acc\n"  # which 2.9 does not have
        "import interlock as il\n"
        "net, sgd = torch.nn.Linear(2, 2), lambda m: torch.optim.SGD(m.parameters(), 0.1)\n"
        "task = il.Task(model=lambda: net, optimizer=sgd, loss=lambda m, b: m(b).sum())\n"
        "try: outcome = il.Engine('sim').start(task, [torch.ones(1, 2)]).wait(60); error = outcome.error\n"
        "except Exception as raised: error = raised\n"
        "print(type(error).__name__, error)"
    )
    assert told.startswith("DeviceUnavailable")
    assert "it needs torch 2.10 or newer, and this is 2.9.1" in told


def test_the_compiler_is_refused_for_it_and_works_for_the_host() -> None:
    told = program(
        "import torch\nfrom interlock.backends import simulator\nsimulator.install()\n"
        "x = torch.ones(2, device='sim')\n"
        "try: torch.compile(lambda t: t.sin() + 1)(x)\nexcept Exception as error: print(error)\n"
        "print(torch.compile(lambda t: t.cos() + 1)(torch.zeros(2)).tolist())\n"
        "print(torch.compile(lambda t: t + 1, backend='eager')(x).device)"
    )
    assert "inductor, makes no code for the simulated device" in told
    assert told.split("\n")[-3:-1] == ["[2.0, 2.0]", "sim:0"]


def test_a_sparse_gradient_is_refused_where_it_is_made() -> None:
    told = program(
        "import torch\nfrom interlock.backends import simulator\nsimulator.install()\n"
        "table = torch.nn.Embedding(10, 4, sparse=True).to('sim')\n"
        "try: table(torch.tensor([1, 2], device='sim')).sum().backward()\n"
        "except simulator.Refusal as error: print(error)"
    )
    assert "an embedding with sparse=False" in told


def test_a_run_that_loses_the_device_touches_it_no_more_and_the_next_is_refused() -> None:
    try:
        with simulator.striking(Strike("operator", 3, "loses", match="addmm")):
            outcome = il.Engine(SimAdapter()).start(task(), batches(4)).wait(60)
        assert outcome.status == "failed"
        assert not outcome.residue.known
        assert simulator.touched() == ()
        again = il.Engine(SimAdapter()).start(task(), batches(4)).wait(60)
        assert isinstance(again.error, il.errors.DeviceLost)
        assert simulator.touched() == ()
    finally:
        simulator.replug()
    assert il.Engine(SimAdapter()).start(task(), batches(4)).wait(60).ok


def test_a_run_without_room_says_what_was_held_and_leaves_nothing() -> None:
    before = simulator.memory.allocated
    with simulator.capacity(before + 700):
        outcome = il.Engine(SimAdapter()).start(task(), batches(4)).wait(60)
    assert isinstance(outcome.error, torch.OutOfMemoryError)
    notes = " ".join(getattr(outcome.error, "__notes__", ()))
    assert "held on sim:0 when its memory ran out" in notes
    assert outcome.residue.bytes == 0
    assert simulator.memory.allocated == before


@pytest.mark.parametrize("parameters", ["kept", "replaced"])
def test_a_run_trains_to_the_bits_of_the_host(parameters: str) -> None:
    here = il.Engine("cpu").fit(task(), batches(6), epochs=2)
    there = il.Engine(SimAdapter(parameters)).fit(task(), batches(6), epochs=2)
    assert here.model is not None
    assert there.model is not None
    for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_a_task_keeps_is_left_with_owner_and_place() -> None:
    kept: list[Any] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        kept.append(value.detach())
        return value

    with simulator.stacks():
        outcome = il.Engine(SimAdapter()).fit(task(model=net, loss=loss), batches(2))
    left = outcome.residue.leftovers
    assert len(left) == 2
    assert any("kept" in owner for owner in left[0].owners), left[0].owners
    assert any("test_process.py" in place for place in left[0].stack)
    kept.clear()


DDP = """
import sys, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from interlock.backends import simulator

simulator.install()
dist.init_process_group("gloo")
rank = dist.get_rank()

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def train(model, device):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(6, 4).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

host, there = build(), build()
train(host, "cpu")
with simulator.parameters("kept"):
    there.to("sim")
    wrapped = DistributedDataParallel(there)
    train(wrapped, "sim")
    same = all(torch.equal(a, b.cpu()) for a, b in zip(host.parameters(), there.parameters()))
    there.to("cpu")
    buckets = simulator.memory.allocated
    del wrapped
    import gc; gc.collect()
    sys.stdout.write(f"ddp {same} {buckets > 0} {simulator.memory.allocated}\\n")
    sys.stdout.flush()
    sharded = build().to("sim")
    fully_shard(sharded, mesh=init_device_mesh("sim", (2,)))
    train(sharded, "sim")
    whole = [p.full_tensor().cpu() for p in sharded.parameters()]
    close = all(torch.allclose(a, b) for a, b in zip(host.parameters(), whole))
    sys.stdout.write(f"fsdp2 {close}\\n")
    sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_ddp_and_fsdp2_train_on_it_over_gloo(tmp_path: Path) -> None:
    file = tmp_path / "ddp.py"
    file.write_text(DDP)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(line for line in done.stdout.splitlines() if line.startswith(("ddp", "fsdp2")))
    assert told == ["ddp True True 0"] * 2 + ["fsdp2 True"] * 2
