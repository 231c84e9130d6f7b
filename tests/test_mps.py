"""The `mps` adapter: what it decides, on any machine; what it does, where there is an Apple GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.pretended import LEDGER, PretendedMps
from tools.small import batches, net, task
from torch import nn

import interlock as il
from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract
from interlock.backends.errors import DeviceUnavailable
from interlock.backends.monitors import CUDA
from interlock.backends.mps import MpsAdapter, out_of_memory
from interlock.backends.registry import AUTO, adapter_class, monitor
from interlock.specs import TRAINING, compose

METAL = torch.backends.mps.is_available()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestPretended(AdapterContract):
    def make_adapter(self) -> Adapter:
        return PretendedMps()


@pytest.mark.skipif(not METAL, reason="no Apple GPU")
class TestMps(AdapterContract):
    def make_adapter(self) -> Adapter:
        return MpsAdapter()


def test_the_registry_has_it_and_auto_does_not_take_it() -> None:
    assert adapter_class("mps") is MpsAdapter
    assert "mps" not in AUTO


def test_its_lifecycle_is_that_of_cuda_under_its_own_name() -> None:
    assert monitor("mps") is MpsAdapter.monitor
    assert monitor("mps").name == "mps"
    mine, theirs = compose(TRAINING, monitor("mps")), compose(TRAINING, CUDA)
    assert set(mine.transitions) == set(theirs.transitions)


@pytest.mark.parametrize(
    ("built", "there", "says"),
    [(False, False, "built without Metal"), (True, False, "needs macOS 14"), (True, True, "")],
)
def test_it_says_why_it_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, built: bool, there: bool, says: str
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    assert says in MpsAdapter.unavailable()
    assert bool(MpsAdapter.unavailable()) == bool(says)


@pytest.mark.skipif(METAL, reason="there is an Apple GPU")
def test_without_one_a_run_is_refused_with_the_reason() -> None:
    outcome = il.Engine("mps").start(task(), batches()).wait(60)
    assert (outcome.status, outcome.verdict) == ("failed", "clean")
    assert type(outcome.error) is DeviceUnavailable
    assert MpsAdapter.unavailable() in str(outcome.error)


class Sticky(PretendedMps):
    """Keeps the last tensor that was moved."""

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept = super()._there(tensor)
        return self.kept


def test_what_is_left_is_told_with_its_owner_and_what_stood_there_is_not() -> None:
    mine = PretendedMps().answers.placed(torch.zeros(300))
    adapter = Sticky()
    outcome = il.Engine(adapter).start(task(), batches()).wait(60)
    assert outcome.residue.bytes == adapter.kept.untyped_storage().nbytes()
    (owner,) = outcome.residue.leftovers[0].owners
    assert "local 'adapter' of" in str(owner)
    assert str(owner).endswith(").kept")
    assert "mine" not in str(owner)
    assert LEDGER.has(mine)
    del adapter.kept
    assert il.Engine(PretendedMps()).fit(task(), batches()).residue.bytes == 0


def test_what_no_tensor_stands_over_is_unknown() -> None:
    """The allocator's total has grown, and nothing is found: nobody can tell whose it is."""
    adapter = PretendedMps()
    with adapter.session():
        adapter.acquire()
        held = adapter.move(torch.ones(10)).untyped_storage()
        assert held.nbytes() == 40
        assert adapter.leftovers() is None
        del held
        assert adapter.leftovers() == ()
        adapter.free()


def test_beside_another_run_what_is_left_is_unknown() -> None:
    other, adapter = PretendedMps(), Sticky()
    with other.session():
        other.acquire()
        assert not il.Engine(adapter).start(task(), batches()).wait(60).residue.known
        other.free()
    del adapter.kept


def test_out_of_memory_is_explained_by_what_was_held() -> None:
    adapter = PretendedMps()
    error = RuntimeError("MPS backend out of memory (MPS allocated: 18.13 GB, max allowed: 18.13 GB)")
    assert adapter.explain(error) == ""
    with adapter.session():
        adapter.acquire()
        model: nn.Module = net()
        adapter.place(model)
        told = adapter.explain(error, {"parameters": model.parameters()})
        assert "parameters 268 bytes, all else" in told
        assert adapter.explain(ValueError("another")) == ""
        del model
        adapter.free()


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("another"), False),
        (ValueError("MPS backend out of memory"), False),
        (RuntimeError(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, exhausted: bool) -> None:
    assert out_of_memory(error) is exhausted
    assert not MpsAdapter().is_loss_of_device(error)


def test_random_state() -> None:
    adapter: Any = PretendedMps()
    assert adapter.random_state() is None
    with torch.random.fork_rng():
        adapter.acquire()
        state = adapter.random_state()
        drawn = torch.rand(3)
        adapter.set_random_state(None)
        adapter.set_random_state(state)
        assert torch.equal(torch.rand(3), drawn)
        adapter.free()
