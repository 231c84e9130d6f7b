"""The adapters keep their contract; and the contract catches adapters that do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from interlock.backends.adapter import Adapter, DeviceFacts
from interlock.backends.contract import AdapterContract
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.specs import TRAINING, Automaton, Kind, Monitor, Phase, check, compose
from interlock.specs.lifecycles import USES, fault_edges, flight, needs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each new thread would else start OpenMP's pool anew, which takes ten times as long as the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestCpu(AdapterContract):
    def make_adapter(self) -> Adapter:
        return CpuAdapter()


class TestDouble(AdapterContract):
    def make_adapter(self) -> Adapter:
        return ReplacingDouble()


class Forgetful(ReplacingDouble):
    """Its device can be taken once at a time, and it forgets to give it back."""

    taken: dict[str, bool]

    def _acquire(self) -> DeviceFacts:
        if self.taken["now"]:
            raise RuntimeError("the device is taken")
        self.taken["now"] = True
        return super()._acquire()


class Releaseless(ReplacingDouble):
    """Does not say how its device is given back."""

    def releases(self) -> dict[str, Any]:
        return {}


class Garbling(ReplacingDouble):
    """What it fetches is not what was there."""

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(super()._fetch(tensor))


class Sticky(ReplacingDouble):
    """Keeps the last tensor that was placed."""

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept = super()._move(tensor)
        return self.kept


class Wiping(ReplacingDouble):
    """Wipes what it was given when it is freed, also what was to be kept."""

    def _acquire(self) -> DeviceFacts:
        self.given: list[torch.Tensor] = []
        return super()._acquire()

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = super()._move(tensor)
        if isinstance(tensor, nn.Parameter):
            self.given.append(moved.detach())
        return moved

    def _free(self) -> None:
        for tensor in vars(self).get("given", []):
            tensor.zero_()
        self.given = []


def warmed(*row: str) -> Monitor:
    """Of a device that is warmed up once, after a model was placed; with its row of the table."""
    phase = Phase("warming", Kind.FLIGHT, "warmed", "kernels are compiled")
    moves = {("cold", "warm"): "warm", ("warm", "optimize"): "warm", ("warm", "serve"): "warm"}
    begin = (*needs("device", "model"), *USES)
    return Monitor(
        "warm",
        "a device that is warmed up",
        automata=(Automaton("once", "cold", moves),),
        phases=(phase,),
        transitions=(
            *flight("warm", "placed", "warming", "warmed", "placed", begin=begin),
            *fault_edges((phase,)),
        ),
        table={"placed": row},
    )


class Warmed(CpuAdapter):
    """Its monitor thinks of training only."""

    monitor = warmed("warm", "optimize")


class WarmedForBoth(CpuAdapter):
    """Its monitor names what each lifecycle goes on with."""

    monitor = warmed("warm", "optimize", "serve")


CALLS = "test_free_is_idempotent test_device_facts"
RUNS = "test_a_run_trains test_the_model_comes_home_as_the_objects_it_was test_exit_policies"
AGAIN = "test_a_second_run_is_as_good_as_the_first test_every_single_fault_leads_to_a_clean_end"
VALUES = "test_move_and_fetch test_place test_a_run_trains"


@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        (Forgetful, f"{CALLS} {AGAIN}"),
        (Releaseless, f"test_it_says_how_what_its_monitor_adds_is_done_and_given_back {RUNS} {AGAIN}"),
        (Garbling, VALUES),
        (Sticky, f"{RUNS} {AGAIN}"),
        (Wiping, "test_exit_policies"),
    ],
)
def test_a_broken_adapter_is_caught(broken: type[Adapter], caught: str):
    taken: dict[str, bool] = {}

    class Planted(AdapterContract):
        def make_adapter(self) -> Adapter:
            adapter: Any = broken()
            adapter.taken = taken
            return adapter

    failed = {}
    for name in dir(Planted):
        if name.startswith("test_"):
            taken["now"] = False
            try:
                getattr(Planted(), name)()
            except (Exception, pytest.fail.Exception) as error:
                failed[name] = error
    assert set(caught.split()) <= set(failed)
    assert "test_its_lifecycles_are_proved" not in failed


def contract_of(kind: type[Adapter]) -> AdapterContract:
    class Of(AdapterContract):
        def make_adapter(self) -> Adapter:
            return kind()

    return Of()


def test_the_lifecycle_that_is_not_proved_is_named() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        contract_of(Warmed).test_its_lifecycles_are_proved()
    told = str(caught.value)
    assert "inference on warm: refuted (32 of 33 properties proved" in told
    assert "no answer in 'placed'" in told
    assert "--warm--> warming --warmed--> placed" in told
    assert "training" not in told


def test_a_row_that_names_what_each_lifecycle_goes_on_with_is_proved_for_both() -> None:
    contract_of(WarmedForBoth).test_its_lifecycles_are_proved()


def test_a_report_prints_what_was_found_of_which_lifecycle() -> None:
    report = check(compose(TRAINING, CpuAdapter.monitor))
    count = len(report.verdicts)
    size = f"{count} of {count} properties proved, {report.configurations} configurations"
    assert str(report) == f"training on cpu: proved ({size})"
    bare = check(replace(TRAINING, properties=()))
    assert str(bare).startswith("training: undetermined (it has no property to prove, ")
