"""The `tpu` adapter with the simulated device in the place of the TPU, in both ways to place Parameters.

What torch answers for any device of its kind (copies, placement, what a tensor is) is real here; the TPU
itself, its queue, its generator and torch_tpu are not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tools.small import batches, left_clean, task

import interlock as il
from interlock.backends import simulator
from interlock.backends.adapter import Adapter
from interlock.backends.contract import AdapterContract
from interlock.backends.device import forget_loss
from interlock.backends.errors import DeviceLost
from interlock.backends.simulator.device import hold, let_go
from interlock.backends.tpu import Calls, TpuAdapter


class Answers(Calls):
    """The device is the simulated one, which has no generator of its own and no queue for torch."""

    device = torch.device("privateuseone", 0)

    def synchronize(self) -> None:
        simulator.synchronize()

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


class OnSim(TpuAdapter):
    """Takes the simulated device."""

    parameters = "replaced"

    def __init__(self) -> None:
        super().__init__()
        self.calls = Answers()
        self.device = torch.device("sim", 0)

    @classmethod
    def unavailable(cls) -> str:
        return simulator.unavailable()

    def _take(self) -> Any:
        hold(self.parameters, self)
        return super()._take()

    def _free(self) -> None:
        super()._free()
        let_go(self)


class KeepingOnSim(OnSim):
    parameters = "kept"


class TestReplacing(AdapterContract):
    tolerance = 0.0

    def make_adapter(self) -> Adapter:
        return OnSim()


class TestKeeping(AdapterContract):
    tolerance = 0.0

    def make_adapter(self) -> Adapter:
        return KeepingOnSim()


@pytest.mark.parametrize("adapter", [OnSim, KeepingOnSim])
def test_what_is_left_is_told_with_its_owner(adapter: type[OnSim]) -> None:
    held: list[torch.Tensor] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        held[:] = [batch[0] * 2]
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    before = torch.ones(3, device="sim")
    outcome = il.Engine(adapter()).start(task(loss=loss), batches(2)).wait(60)
    assert outcome.residue.bytes == held[0].nbytes
    assert "held" in str(outcome.residue)
    held.clear()
    left_clean(il.Engine(adapter()).fit(task(), batches(2)))
    assert before.sum() == 3


def test_a_dead_tpu_is_left_alone_and_refused_to_later_runs() -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("INTERNAL: Core halted unexpectedly: planted")

    try:
        outcome = il.Engine(OnSim()).start(task(loss=loss), batches(2)).wait(60)
        assert not outcome.residue.known
        assert isinstance(il.Engine(OnSim()).start(task(), batches(2)).wait(60).error, DeviceLost)
        del outcome
    finally:
        forget_loss(torch.device("sim", 0))
