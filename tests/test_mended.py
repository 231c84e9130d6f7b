"""Faults that were found by trying, each as the shortest program that showed it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.runs import environment
from tools.small import Net, batches, engine, finished, left_clean, loss_of, net, sgd, task
from torch import nn

import interlock as il
from interlock.backends.faults import Fault
from interlock.events import Bus

both = pytest.mark.parametrize("backend", ["cpu", "double"])


@both
def test_a_model_that_refuses_evaluation_mode_is_left_as_it_was(backend: str) -> None:
    class Stubborn(Net):
        def train(self, mode: bool = True) -> Stubborn:
            super().train(mode)
            if not mode:
                raise KeyboardInterrupt
            return self

    model = Stubborn()
    with pytest.raises(KeyboardInterrupt):
        engine(backend).fit(task(model=model), batches(), validate=batches(1))
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()


@both
@pytest.mark.parametrize("release", [False, True])
def test_a_stop_rule_is_heard_while_a_pause_is_asked_for(backend: str, release: bool) -> None:
    runs: list[il.Run] = []
    started = threading.Event()

    class AtFour:
        def begin(self) -> Any:
            def judge(report: Any) -> str | None:
                if report.step == 4:
                    runs[0].pause(release=release)
                    return "enough"
                return None

            return judge

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        started.wait(30)
        return loss_of(model, batch)

    runs.append(engine(backend, report_every=1).start(task(loss=loss), batches(8), stop_when=[AtFour()]))
    started.set()
    outcome = runs[0].wait(60)
    assert (outcome.status, outcome.steps) == ("stopped", 4)
    assert "asked to stop: enough" in outcome.notes


def test_validation_draws_nothing_from_the_training() -> None:
    def drawn(metrics: Any) -> list[float]:
        found: list[float] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            found.append(random.random())
            return loss_of(model, batch)

        random.seed(3)
        checked = {"validate": batches(1), "validate_every": 2} if metrics else {}
        given = task(loss=loss, metrics=metrics, validates_loss=False)
        finished(engine("cpu").fit(given, batches(6), **checked))
        return found

    assert drawn(lambda model, batch: {"x": random.random()}) == drawn(None)


def test_a_handle_that_is_dropped_unused_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    before = threading.active_count()
    journal = tmp_path / "run.jsonl"
    il.Engine("cpu", journal=journal, observers=[lambda event: None]).open(task())
    assert threading.active_count() == before
    assert not journal.exists()


@both
def test_by_handles_epochs_end_as_in_fit(backend: str) -> None:
    def thaw(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.body.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.body.parameters())})

    def build() -> Net:
        model = net()
        model.body.requires_grad_(False)
        return model

    given = task(
        model=build,
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        scheduler_every="epoch",
        adopt={1: thaw},
    )
    fitted = engine(backend).fit(given, batches(3), epochs=2)
    with engine(backend).open(given) as created:
        training = created.place().optimize().train()
        for batch in batches(3):
            training.step(batch)
        training.next_epoch()
        for batch in batches(3):
            training.step(batch)
        training.next_epoch()
        outcome = training.finish()
    assert fitted.model is not None
    assert outcome.model is not None
    pairs = zip(fitted.model.parameters(), outcome.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@both
def test_a_window_by_handles_is_a_list_of_batches(backend: str) -> None:
    refused = pytest.raises(il.errors.DataError, match="takes a list of batches, and was given a tuple")
    with refused, engine(backend).open(task(options=[il.Accumulate(2)])) as created:
        created.place().optimize().train().step(batches(1)[0])


def test_what_is_never_adopted_is_said() -> None:
    outcome = engine("cpu").fit(task(adopt={5: lambda model, optimizer: None}), batches(), epochs=2)
    assert any("nothing is adopted before epoch [5]" in note for note in outcome.notes)


@pytest.mark.parametrize("wrong", [{"call": "plce"}, {"call": "place", "moment": "half"}])
def test_a_fault_that_would_never_strike_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="would never strike"):
        Fault(**wrong)


def test_the_time_limit_leaves_no_thread_when_its_start_is_cut_short() -> None:
    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "begin" and "interlock" in frame.f_code.co_filename and event == "line":
            raise KeyboardInterrupt
        return trace

    before, own = threading.active_count(), sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            il.Engine("cpu").fit(task(optimizer=sgd), batches(), max_time=60)
    finally:
        sys.settrace(own)
    assert threading.active_count() == before


def test_runs_that_start_together_in_a_fresh_process_load_the_compiler_once() -> None:
    program = """
import torch, interlock as il
from torch import nn
task = il.Task(
    model=lambda: nn.Linear(4, 1),
    optimizer=lambda m: torch.optim.Adam(m.parameters()),
    loss=lambda m, b: m(b).square().mean(),
)
batches = [torch.ones(8, 4)] * 3
runs = [il.Engine("cpu", deterministic=bool(i % 2) or None).start(task, batches) for i in range(4)]
print([run.wait(100).status for run in runs], il.Engine("cpu").fit(task, batches).status)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment(),
    )
    assert done.stdout.strip() == f"{['finished'] * 4} finished", done.stderr


def test_a_seeded_run_in_a_hook_of_a_seeded_run_does_not_wait_for_itself() -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
        il.Engine("cpu", seed=9).fit(task(), batches(1))
        return {}

    with pytest.raises(il.errors.RunInUse, match="would wait for itself"):
        il.Engine("cpu", seed=1).fit(task(metrics=metrics), batches(1), validate=batches(1))


def test_what_an_inner_function_closes_over_goes_with_the_error() -> None:
    class Context:
        pass

    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        kept = Context()
        kept.loss = loss_of(model, batch)  # type: ignore[attr-defined]

        def inner() -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 3:
                raise ValueError("boom")
            return kept.loss  # type: ignore[attr-defined, no-any-return]

        return inner()

    outcome = engine("double").start(task(loss=loss), batches()).wait(60)
    assert isinstance(outcome.error, ValueError)
    assert outcome.residue.bytes == 0


def test_a_model_with_a_hook_is_freed_with_the_error_kept() -> None:
    seen: list[Any] = []
    calls = [0]

    class Failing(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 3:
                raise ValueError("boom")
            return super().forward(inputs)

    def build() -> nn.Module:
        model = Failing()
        model.register_forward_hook(lambda module, given, made: None)
        seen.append(weakref.ref(model))
        return model

    outcome = engine("cpu", exit="discard").start(task(model=build), batches()).wait(60)
    error = outcome.error
    del outcome
    assert isinstance(error, ValueError)
    assert seen[0]() is None


def test_a_run_that_a_rule_ended_stays_ended(tmp_path: Path) -> None:
    def again() -> il.Outcome:
        return engine("cpu", seed=3).fit(
            task(),
            batches(),
            validate=batches(1),
            epochs=9,
            stop_when=[il.StopAt("val_loss", 1e9)],
            checkpoints=il.Checkpoints(tmp_path),
            resume=True,
        )

    first, second = again(), again()
    assert (first.status, second.status) == ("stopped", "stopped")
    assert first.steps == second.steps


def test_of_several_optimizers_each_gets_its_own_gradients_only() -> None:
    def step(step: il.Stepper, batch: Any) -> torch.Tensor:
        body, head = step["body"], step["head"]
        body.zero()
        head.zero()
        loss = loss_of(step.model, batch)
        body.backward(loss)
        assert all(p.grad is None for p in step.model.head.parameters())  # type: ignore[union-attr]
        body.update()
        return loss

    def both_of(model: Any) -> dict[str, torch.optim.Optimizer]:
        return {"body": sgd(model.body), "head": sgd(model.head)}

    outcome = engine("cpu").fit(task(step=step, optimizer=both_of), batches())
    assert any("optimizer 'head' made no update" in note for note in outcome.notes)


def test_the_weights_of_a_checkpoint_load_into_a_model(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.norm = nn.BatchNorm1d(4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.two(self.norm(self.one(inputs)))
            return found

    outcome = engine("double").fit(
        task(model=Tied, optimizer=sgd), batches(), checkpoints=il.Checkpoints(tmp_path)
    )
    assert outcome.checkpoint is not None
    assert outcome.model is not None
    for place in (outcome.checkpoint, tmp_path):
        model = Tied()
        model.load_state_dict(il.weights_of(place))
        pairs = zip(model.state_dict().values(), outcome.model.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(il.errors.CheckpointError):
        il.weights_of(tmp_path / "none")


def test_a_scheduler_of_epochs_waits_for_the_first_real_update() -> None:
    """Found by the long tier: torch warns where a scheduler moves before its optimizer did."""
    given = task(
        options=[il.Precision("fp16", init_scale=1e30)],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        scheduler_every="epoch",
    )
    outcome = engine("cpu").fit(given, batches(2), epochs=2)
    assert outcome.metrics["skipped_updates"] == 4
    assert outcome.optimizer is not None
    assert outcome.optimizer.param_groups[0]["lr"] == 0.1


def test_an_interrupt_while_observers_end_costs_them_no_event() -> None:
    """Python 3.11 takes a thread for ended if an interrupt lands in its `join`, although it runs."""
    seen: list[Any] = []
    bus = Bus()

    let_go = threading.Event()

    def slow(event: Any) -> None:
        let_go.wait(60)
        seen.append(event)

    bus.subscribe(slow)
    for number in range(5):
        bus.publish(il.Note(str(number)))
    shot = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def finish() -> None:
        shot.start()
        bus.finish(60)

    # A process that was started in the background may have been told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            finish()
    finally:
        signal.signal(signal.SIGINT, before)
        let_go.set()
    shot.join()
    bus.finish(20)
    assert len(seen) == 5
    assert bus.failed == []


@both
def test_a_snapshot_that_a_hook_takes_pins_nothing(backend: str) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        assert "in step" in started.snapshot().doing
        return loss_of(model, batch)

    started = il.Engine(backend).start(task(loss=loss), batches(2))
    left_clean(started.wait(60))
