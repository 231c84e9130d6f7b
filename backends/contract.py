"""What every adapter promises, as tests: inherit `AdapterContract`, and say how yours is made.

    from interlock.backends.contract import AdapterContract

    class TestMine(AdapterContract):
        def make_adapter(self):
            return MyAdapter()

It needs pytest and the engine, and nothing else needs it. The runs are tiny: a model with tied
weights and a buffer, two batches, a step whose result is the same each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from interlock import Engine, Outcome, Task
from interlock.specs import INFERENCE, TRAINING, Kind, Status, check, compose
from interlock.specs.semantics import endings

from .adapter import Adapter, DeviceFacts
from .faults import CALLS, Fault, inject

MOMENTS = ("before", "after")


class Net(nn.Module):
    """Two layers with one weight, and a buffer that counts."""

    first: nn.Linear
    second: nn.Linear
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                spread = torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter)
                parameter.copy_(spread / (number + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Also counts the rows it has seen."""
        if self.training:
            self.seen += len(x)
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


def _batches() -> list[torch.Tensor]:
    return [torch.linspace(-1.0, 1.0, 12).view(4, 3) * scale for scale in (1.0, 0.5)]


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = (model(batch) - 1.0).square().mean()
    return value


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.05)


def require(condition: object, says: str) -> None:
    """Fail the test that is running unless the condition holds."""
    if not condition:
        pytest.fail(says, pytrace=False)


def state_of(model: nn.Module | None) -> dict[str, torch.Tensor]:
    """A copy of the whole state of a model that is home."""
    if model is None:
        pytest.fail("the outcome has no model", pytrace=False)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


class Injected(Exception):
    """The fault that the contract injects."""


class AdapterContract:
    """The promises of an adapter; pytest collects them from classes that inherit this one.

    Attributes:
        deadline: Seconds for each backend call on the way out; raise it for a slow device.
        tolerance: By how much a weight may differ from that of a run on the host.
    """

    deadline = 30.0
    tolerance = 1e-5

    def make_adapter(self) -> Adapter:
        """A new adapter, on each call."""
        raise NotImplementedError("say how your adapter is made")

    def initialised(self) -> object:
        """What tells whether the device has been initialised in this process; compared by `==`."""
        return torch.cuda.is_initialized()

    # -- helpers ----------------------------------------------------------------------------------

    def faulty(self, *faults: Fault) -> Any:
        """A new adapter in which faults strike; without any it only counts its calls."""
        return inject(self.make_adapter(), *faults)

    def run(self, adapter: Adapter, model: nn.Module | None = None, **settings: Any) -> Outcome:
        """A whole run of the small task."""
        engine = Engine(adapter, deadline=self.deadline, **settings)
        what = Task(model=Net() if model is None else model, optimizer=_adam, loss=_loss)
        return engine.start(what, _batches(), validate=_batches()[:1]).wait(10 * self.deadline)

    def good_run(
        self, adapter: Adapter | None = None, model: nn.Module | None = None, **more: Any
    ) -> Outcome:
        """One that must finish and leave nothing."""
        outcome = self.run(self.make_adapter() if adapter is None else adapter, model, **more)
        told = outcome.failure.traceback if outcome.failure else outcome
        require(outcome.status == "finished", f"a run without a fault did not finish: {told}")
        require(outcome.verdict == "clean", f"it abandoned {outcome.abandoned}")
        require(outcome.residue.bytes == 0, f"it left {outcome.residue}")
        return outcome

    # -- before a run -----------------------------------------------------------------------------

    def test_describing_and_making_one_initialises_nothing(self) -> None:
        """Name, monitor, availability and construction are free."""
        before = self.initialised()
        adapter = self.make_adapter()
        require(isinstance(adapter, Adapter), f"{adapter!r} is no Adapter")
        require(adapter.name, "it has no name")
        require(type(adapter).unavailable() == "", f"it cannot run here: {type(adapter).unavailable()}")
        require(self.initialised() == before, "describing or making it has initialised the device")

    def test_its_lifecycles_are_proved(self) -> None:
        """With its monitor, which is composed with each of them: for training and for inference."""
        reports = [check(compose(spec, self.make_adapter().monitor)) for spec in (TRAINING, INFERENCE)]
        broken = "\n\n".join(str(report) for report in reports if not report.proved)
        require(not broken, f"a lifecycle is not proved with this monitor\n\n{broken}")

    def test_it_says_how_what_its_monitor_adds_is_done_and_given_back(self) -> None:
        """An action for each in-flight phase but those of releases, and a release for each resource."""
        adapter = self.make_adapter()
        composed = compose(TRAINING, adapter.monitor)
        own = {phase.name for phase in adapter.monitor.phases if phase.kind is Kind.FLIGHT}
        idle = (own & set(composed.phase)) - set(adapter.actions()) - set(endings(composed))
        require(not idle, f"`actions()` says nothing for the phases {sorted(idle)}")
        kept = set(composed.resources) - {"model", "optimizer"} - set(adapter.releases())
        require(not kept, f"`releases()` says nothing for the resources {sorted(kept)}")

    # -- the calls --------------------------------------------------------------------------------

    def test_device_facts(self) -> None:
        """`acquire` says what it took, and can be called again after `free`."""
        adapter = self.make_adapter()
        with adapter.session():
            for _ in range(2):
                facts = adapter.acquire()
                require(type(facts) is DeviceFacts, f"`acquire` returned {facts!r}")
                require(facts.name, f"{facts} says too little")
                adapter.free()

    def test_free_is_idempotent(self) -> None:
        """Also where nothing was acquired, and after an `acquire` that failed half way."""
        adapter = self.make_adapter()
        adapter.free()
        with adapter.session():
            adapter.acquire()
            adapter.free()
            adapter.free()
        half = self.faulty(Fault("acquire", "after", error=Injected))
        with half.session():
            with pytest.raises(Injected):
                half.acquire()
            half.free()
            half.free()
        with adapter.session():
            adapter.acquire()
            adapter.free()

    def test_move_and_fetch(self) -> None:
        """There and back: equal to the bit, a copy where it says so, and nothing moves twice."""
        adapter = self.make_adapter()
        examples = {
            "numbers": torch.linspace(-2.0, 2.0, 7),
            "integers": torch.arange(6).view(2, 3),
            "a transposed view": torch.arange(6.0).view(2, 3).t(),
            "nothing": torch.empty(0),
            "a scalar": torch.tensor(1.5),
            "truths": torch.tensor([True, False]),
        }
        with adapter.session():
            adapter.acquire()
            try:
                for name, tensor in examples.items():
                    self._there_and_back(adapter, name, tensor)
                adapter.sync()
            finally:
                adapter.free()

    def _there_and_back(self, adapter: Adapter, name: str, tensor: torch.Tensor) -> None:
        plain = tensor.clone()
        moved = adapter.move(tensor)
        require(adapter.move(moved) is moved, f"{name}: moved again, although it was there")
        require(not adapter.copies or adapter.resident(moved), f"{name}: on the device, but not resident")
        require(not adapter.resident(tensor) or moved is tensor, f"{name}: the host's tensor is resident")
        fetched: list[torch.Tensor] = []
        # The engine fetches on a thread of its own, outside of the session.
        thread = threading.Thread(target=lambda: fetched.append(adapter.fetch(moved)))
        thread.start()
        thread.join(self.deadline)
        require(fetched, f"{name}: `fetch` failed on another thread")
        (home,) = fetched
        require(home.device.type == "cpu", f"{name}: fetched to {home.device}")
        require(not adapter.resident(home), f"{name}: what was fetched is resident")
        require(not home.requires_grad, f"{name}: what was fetched has a graph")
        require((home.dtype, home.shape) == (plain.dtype, plain.shape), f"{name}: became {home.dtype}")
        require(torch.equal(home, plain), f"{name}: came back as {home}, not {plain}")
        if adapter.copies:
            home.zero_()
            with torch.no_grad():
                require(torch.equal(adapter.fetch(moved), plain), f"{name}: what was fetched is no copy")
            require(torch.equal(tensor, plain), f"{name}: the host's tensor was changed")

    def test_place(self) -> None:
        """Every parameter and buffer, with its values and whether it trains; again: no effect."""
        adapter = self.make_adapter()
        model = Net()
        model.first.bias.requires_grad_(False)
        before = state_of(model)
        with adapter.session():
            adapter.acquire()
            try:
                adapter.place(model)
                placed = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                for name, tensor in placed.items():
                    require(not adapter.copies or adapter.resident(tensor), f"'{name}' was not placed")
                    require(torch.equal(adapter.fetch(tensor), before[name]), f"'{name}' has other values")
                trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
                require(not trains.pop("first.bias"), "a frozen parameter trains after `place`")
                require(all(trains.values()), f"parameters are frozen after `place`: {trains}")
                kinds = all(isinstance(p, nn.Parameter) for p in model.parameters())
                require(kinds, "a parameter is no nn.Parameter any more")
            finally:
                adapter.free()

    # -- whole runs -------------------------------------------------------------------------------

    def test_a_run_trains(self) -> None:
        """To the same weights as a run on the host, within the tolerance."""
        trained, start = state_of(self.good_run().model), state_of(Net())
        here = state_of(Engine("cpu").fit(Task(model=Net, optimizer=_adam, loss=_loss), _batches()).model)
        require(not same(trained, start), "nothing was trained")
        for name, tensor in here.items():
            far = float((trained[name] - tensor).abs().max())
            require(far <= self.tolerance, f"'{name}' is {far:g} away from the same run on the host")

    def test_the_model_comes_home_as_the_objects_it_was(self) -> None:
        """Its parameters, buffers and ties; the optimizer is bound to them, with its state."""
        adapter = self.make_adapter()
        model = Net()
        before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        outcome = self.good_run(adapter, model)
        require(outcome.model is model, "the outcome has another model than the task")
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        lost = [name for name in before if after.get(name) is not before[name]]
        require(not lost and len(before) == len(after), f"other objects than before: {lost}")
        require(model.second.weight is model.first.weight, "the tie was lost")
        require(float(model.seen) == 8.0, f"the buffer is {model.seen}, not 8")
        require(not any(adapter.resident(t) for t in after.values()), "a tensor stands on the device")
        require(all(p.grad is None for p in model.parameters()), "a gradient is left")
        require(all(t.device.type == "cpu" for t in after.values()), "a tensor is not on the host")
        optimizer = outcome.optimizer
        require(optimizer is not None, "the outcome has no optimizer")
        if optimizer is not None:
            mine = {id(p) for p in model.parameters()}
            require({id(p) for p in optimizer.state} == mine, "the state belongs to other parameters")
            away = [t for t in _tensors(optimizer) if adapter.resident(t) or t.device.type != "cpu"]
            require(not away, "the optimizer's state is not home")

    def test_exit_policies(self) -> None:
        """`keep` leaves the model there and counts it as meant, `discard` leaves nothing of it."""
        adapter = self.make_adapter()
        kept = Net()
        outcome = self.good_run(adapter, kept, exit="keep")
        require(outcome.model is kept, "`keep` gave another model, or none")
        there = [adapter.resident(parameter) for parameter in kept.parameters()]
        require(all(there) or not adapter.copies, "`keep` did not leave the model there")
        stayed = {name: tensor.to("cpu", copy=True) for name, tensor in state_of(kept).items()}
        require(same(stayed, state_of(self.good_run().model)), "what `keep` left there has other values")
        require(kept.second.weight is kept.first.weight, "the tie was lost")
        model = Net()
        discarded = self.good_run(exit="discard", model=model)
        require(discarded.model is None, "`discard` gave a model")
        ends = [entry.event for entry in discarded.history]
        require("discarded" in ends and "homed" not in ends, f"it went {ends}")
        require(not any(adapter.resident(p) for p in model.parameters()), "the model stands on the device")

    def test_a_second_run_is_as_good_as_the_first(self) -> None:
        """To the bit: with the same adapter, with a new one, and with the model that came home."""
        adapter = self.make_adapter()
        first = state_of(self.good_run(adapter).model)
        for other in (adapter, self.make_adapter()):
            require(same(state_of(self.good_run(other).model), first), "a second run has other weights")
        model = Net()
        self.good_run(adapter, model)
        twice = state_of(self.good_run(adapter, model).model)
        again = Net()
        self.good_run(self.make_adapter(), again)
        require(same(state_of(self.good_run(self.make_adapter(), again).model), twice), "other weights")

    # -- faults -----------------------------------------------------------------------------------

    def points(self) -> Iterator[tuple[str, int, str]]:
        """(call, nth, moment) of every point at which one fault can strike a run."""
        counting = self.faulty()
        self.good_run(counting)
        for call in CALLS:
            for nth in range(1, counting.counts.get(call, 0) + 1):
                for moment in MOMENTS:
                    yield call, nth, moment

    def test_every_single_fault_leads_to_a_clean_end(self) -> None:
        """Closed, the first error kept, nothing held, nothing left; and the next run is as good."""
        good = state_of(self.good_run().model)
        for call, nth, moment in list(self.points()):
            fault = Fault(call, moment, nth, Injected)
            where = f"with a fault {moment} {call} {nth}"
            outcome = self._struck(fault, where)
            require(not outcome.abandoned, f"{where}: abandoned {outcome.abandoned}, at the first failure")
            require(same(state_of(self.good_run().model), good), f"{where}: the next run has other weights")

    def test_a_release_that_fails_twice_is_abandoned_and_named(self) -> None:
        """And everything else is given back."""
        ends = endings(compose(TRAINING, self.make_adapter().monitor))
        abandoned = 0
        for call, nth, moment in list(self.points()):
            if call in ("fetch", "free"):
                fault = Fault(call, moment, nth, Injected, times=2)
                outcome = self._struck(fault, f"with faults {moment} {call} {nth} and {nth + 1}")
                failed = [ends[e.source] for e in outcome.history if e.event == "fail" and e.source in ends]
                # The first may have struck before: where a device is lazy, parameters are fetched to look at.
                due = tuple(name for name in dict.fromkeys(failed) if failed.count(name) == 2)
                require(outcome.abandoned == due, f"{call} {nth}: abandoned {outcome.abandoned}, not {due}")
                require(len(outcome.errors) == 1, f"{call} {nth}: later errors are {outcome.errors}")
                abandoned += len(due)
        require(abandoned > 1, f"two failures in a row were taken for an end {abandoned} times")
        self.good_run()

    def _struck(self, fault: Fault, where: str) -> Outcome:
        outcome = self.run(self.faulty(fault))
        require(fault.struck == fault.times, f"{where}: it struck {fault.struck} times")
        require(isinstance(outcome.error, Injected), f"{where}: the error is {outcome.error!r}")
        require(outcome.status == "failed", f"{where}: {outcome.status}")
        last = outcome.history[-1].config
        require(last.phase == "closed", f"{where}: ended in '{last.phase}'")
        require(set(last.statuses) == {Status.ABSENT}, f"{where}: still held at the end: {last}")
        if not outcome.abandoned:
            require(outcome.residue.known or fault.call == "leftovers", f"{where}: the residue is unknown")
            require(not outcome.residue.bytes, f"{where}: left {outcome.residue}")
        return outcome

    def test_an_interrupt_is_a_cancellation(self) -> None:
        """In whichever call it lands."""
        for call in CALLS:
            interrupt: Callable[[], BaseException] = KeyboardInterrupt
            fault = Fault(call, error=interrupt)
            outcome = self.run(self.faulty(fault))
            if fault.struck:
                told = f"an interrupt in {call}"
                require(isinstance(outcome.error, KeyboardInterrupt), f"{told}: {outcome.error!r}")
                require(outcome.status == "cancelled", f"{told}: {outcome.status}")
                require(outcome.verdict == "clean", f"{told}: abandoned {outcome.abandoned}")


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]
