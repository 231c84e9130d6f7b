"""Resuming: a run that was ended anywhere and goes on in fresh objects is, to the bit, the one that was not.

The reports behind it are in the list of cases, section "Resuming"; each test names its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.runs import TASK, environment
from tools.small import BACKENDS, batches, engine, failed, finished, left_clean, loss_of, same, seeded
from tools.small import task as small
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import interlock as il
from interlock.checkpoint import CheckpointDamaged, CheckpointError, CheckpointMismatch, Checkpoints
from interlock.cli import main
from interlock.store import Store

SIZE, BATCH = 14, 3
STEPS = -(-SIZE // BATCH)
"""Batches of an epoch."""


class Struck(Exception):
    """Raised on purpose."""


# What is trained


class Net(nn.Module):
    """Dropout, a normalisation with buffers, a tie; the body may be frozen at first."""

    def __init__(self, dropout: float, tied: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.after = nn.Linear(6, 6)
        if tied:
            self.after.weight = self.middle.weight
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.middle(torch.tanh(self.body(x))))
        out: torch.Tensor = self.head(self.drop(torch.tanh(self.after(hidden))))
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.02),
    "foreach": lambda p: torch.optim.Adam(p, 0.02, foreach=True, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.02), foreach=False),
}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "epoch": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.7),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=1.0),
}


class Recalls:
    """A stop rule that counts the reports it has seen, and ends a run after so many."""

    def __init__(self, many: int) -> None:
        self.many = many

    def begin(self) -> _Recalling:
        return _Recalling(self.many)


class _Recalling:
    def __init__(self, many: int) -> None:
        self.left = many

    def __call__(self, report: Any) -> str | None:
        self.left -= 1
        return "it has seen enough" if self.left == 0 else None

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


@dataclass(frozen=True)
class Variant:
    """A training run as plain data."""

    backend: str = "cpu"
    optimizer: str = "AdamW"
    schedule: str = ""
    accumulate: int = 1
    clip: bool = False
    half: str = ""
    dropout: float = 0.3
    tied: bool = False
    order: str = "default"
    validates: bool = False
    validate_every: int | None = None
    adopts: tuple[int, ...] = ()
    by_hand: bool = False
    patience: int = 0
    report_every: int = 1
    epochs: int = 3

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-STEPS // self.accumulate)


def loader(order: str, seed: int) -> Any:
    """The training data, in another order each epoch."""
    x, y = seeded(lambda: (torch.randn(SIZE, 4), torch.randint(0, 3, (SIZE,))), 5)
    data = TensorDataset(x, y)
    own = torch.Generator().manual_seed(seed)
    if order == "own":
        return DataLoader(data, BATCH, shuffle=True, generator=own)
    if order == "sampler":
        return DataLoader(data, BATCH, sampler=RandomSampler(data, generator=own))
    if order == "default":
        return DataLoader(data, BATCH, shuffle=True)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def by_hand(step: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Two turns, one an optimizer."""
    found = {}
    for name in step:
        turn = step[name]
        turn.zero()
        loss = loss_of(step.model, batch)
        turn.backward(loss)
        turn.update()
        found["loss" if name == "rest" else "first"] = loss
    return found


def unfreeze(epoch: int) -> Callable[[nn.Module, Any], None]:
    """The body at its first call, the tied or free middle at a second one; each a group of its own."""

    def adopt(model: Any, optimizer: Any) -> None:
        part = model.body if not model.body.weight.requires_grad else model.middle
        if part.bias.requires_grad:
            return
        part.requires_grad_(True)
        one = optimizer["rest"] if isinstance(optimizer, dict) else optimizer
        held = {id(p) for group in one.param_groups for p in group["params"]}
        one.add_param_group({"params": [p for p in part.parameters() if id(p) not in held], "lr": 0.01})

    return adopt


def task_of(variant: Variant, seed: int, at: Callable[[], None]) -> il.Task:
    """The task, with a model and an order of the data that follow from the seed."""

    def build() -> nn.Module:
        net = seeded(lambda: Net(variant.dropout, variant.tied), seed)
        if variant.adopts:
            net.body.requires_grad_(False)
            net.middle.bias.requires_grad_(False)
        return net

    def optimizer(model: Any) -> Any:
        make = OPTIMIZERS[variant.optimizer]
        if not variant.by_hand:
            return make([p for p in model.parameters() if p.requires_grad])
        head = {id(p) for p in model.head.parameters()}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in head]
        return {"head": torch.optim.SGD(model.head.parameters(), 0.1, momentum=0.9), "rest": make(rest)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            at()
        return loss_of(model, batch)

    def hand(step: Any, batch: Any) -> Any:
        at()
        return by_hand(step, batch)

    def scheduler(made: Any) -> Any:
        make = SCHEDULES[variant.schedule]
        return {name: make(one) for name, one in made.items()} if variant.by_hand else make(made)

    options: list[il.Option] = [il.Accumulate(variant.accumulate)] if variant.accumulate > 1 else []
    options += [il.ClipNorm(0.2)] if variant.clip else []
    if variant.half:
        # The first scale is too large, so that some updates are skipped, and it grows again soon.
        options += [il.Precision(variant.half, init_scale=2.0**18, growth_interval=2)]  # type: ignore[arg-type]
    return il.Task(
        model=build,
        optimizer=optimizer,
        loss=loss_of if variant.by_hand else loss,
        step=hand if variant.by_hand else None,
        scheduler=scheduler if variant.schedule else None,
        scheduler_every="step" if variant.schedule == "step" else "epoch",
        options=[] if variant.by_hand else options,
        adopt={epoch: unfreeze(epoch) for epoch in variant.adopts},
    )


def go(
    variant: Variant,
    seed: int,
    folder: Path | None = None,
    *,
    die_at: int = 0,
    kill: bool = False,
    **more: Any,
) -> il.Outcome:
    """Train by a variant: from the beginning, or on from what is in the folder.

    Args:
        variant: How.
        seed: Of everything that is not restored.
        folder: For checkpoints.
        die_at: The batch, counted from 1 in this process, before which it ends; 0 for never.
        kill: Whether the whole process ends there.
        more: For `fit`.
    """
    count = 0

    def at() -> None:
        nonlocal count
        count += 1
        if count == die_at:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Struck(f"before batch {count}")

    return (
        engine(variant.backend, seed=seed, report_every=variant.report_every, threads=1)
        .start(
            task_of(variant, seed, at),
            loader(variant.order, seed),
            validate=batches(2) if variant.validates or variant.validate_every else None,
            epochs=variant.epochs,
            validate_every=variant.validate_every,
            stop_when=[Recalls(variant.patience)] if variant.patience else [],
            checkpoints=Checkpoints(folder) if folder is not None else None,
            **more,
        )
        .wait(60)
    )


def reports(outcome: il.Outcome, after: int = 0) -> list[Any]:
    """What was reported of later steps."""
    return [(one.step, one.epoch, dict(one.metrics)) for one in outcome.reports if one.step > after]


def of_run(outcome: il.Outcome) -> dict[str, Any]:
    """All that training has changed."""
    assert outcome.model is not None
    return {
        "status": outcome.status,
        "steps": outcome.steps,
        "model": {name: tensor.clone() for name, tensor in outcome.model.state_dict().items()},
        "trains": {name: p.requires_grad for name, p in outcome.model.named_parameters()},
        "optimizers": {name: one.state_dict() for name, one in outcome.optimizers.items()},
        "metrics": outcome.metrics,
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Which parts are not the same to the bit."""
    return [part for part in one if not same(one[part], other[part])]


@st.composite
def variants(draw: st.DrawFn) -> Variant:
    hand = draw(st.booleans()) and draw(st.booleans())
    every = draw(st.sampled_from([None, None, 3, 4]))
    validates = draw(st.booleans())
    return Variant(
        backend=draw(st.sampled_from(BACKENDS)),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        schedule=draw(st.sampled_from(["", "epoch", "plateau", *([] if hand else ["step"])])),
        accumulate=1 if hand else draw(st.sampled_from([1, 2, 3])),
        clip=draw(st.booleans()),
        half=draw(st.sampled_from(["", "bf16", "fp16"])),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        tied=draw(st.booleans()),
        order=draw(st.sampled_from(["list", "default", "own", "sampler"])),
        validates=validates,
        validate_every=every,
        adopts=draw(st.sampled_from([(), (), (0,), (1,), (2,), (1, 2), (0, 3)])),
        by_hand=hand,
        patience=draw(st.sampled_from([0, 0, 9, 14])),
        report_every=draw(st.sampled_from([1, 1, 2, 50])),
        epochs=draw(st.integers(2, 4)),
    )


FEW = settings(max_examples=max(10, settings().max_examples // 4))


# The same run


@FEW
@given(variant=variants(), data=st.data())
def test_a_resumed_run_is_the_uninterrupted_one(variant: Variant, data: st.DataObject):
    """PL 18098, HF 40691: weights, losses, learning rates and the order of the samples, over several epochs,
    after resuming twice. fairseq2 1346: the scaler's state too."""
    whole = go(variant, 3)
    left_clean(whole)
    assert whole.error is None, whole.failure and whole.failure.traceback
    first = data.draw(st.integers(STEPS + 1, 2 * STEPS), label="dies before batch")
    again = data.draw(st.integers(0, STEPS), label="dies again, so many batches after that epoch began")
    with TemporaryDirectory() as name:
        ended = go(variant, 3, Path(name), die_at=first)
        if ended.error is None:  # the rule ended it before
            assert variant.patience
            assert not differing(of_run(whole), of_run(ended))
            return
        failed(ended, Struck)
        begun = 1
        if again and variant.epochs > 2:
            second = go(variant, 11, Path(name), die_at=STEPS + again, resume=True)
            if second.error is None:
                assert not differing(of_run(whole), of_run(second))
                return
            failed(second, Struck)
            begun = 2
        resumed = go(variant, 99, Path(name), resume=True)
    left_clean(resumed)
    assert resumed.error is None, resumed.failure and resumed.failure.traceback
    assert any(note.startswith("resumed from ") for note in resumed.notes)
    assert not differing(of_run(whole), of_run(resumed))
    # A report covers the steps since the last one; a run that begins with an epoch has the same ones.
    assert same(reports(whole, begun * variant.steps), reports(resumed))


RICH = Variant(schedule="step", half="fp16", clip=True, accumulate=2, adopts=(1,), validates=True)
"""Much of it at once."""


def test_the_comparison_sees_what_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The planted faults: random generators that go on from anywhere, a scaler that begins anew."""
    whole = go(RICH, 3)
    finished(whole)
    assert whole.metrics["skipped_updates"] > 0
    failed(go(RICH, 3, tmp_path, die_at=STEPS + 2), Struck)
    with monkeypatch.context() as patch:
        patch.setattr("interlock.restoring._put_random", lambda _: None)
        spoilt = go(RICH, 99, tmp_path, resume=True)
        finished(spoilt)
    assert {"model", "optimizers"} <= set(differing(of_run(whole), of_run(spoilt)))


@pytest.mark.parametrize(("backend", "last"), [("cpu", STEPS + 1), ("double", 2 * STEPS + 3)])
def test_a_process_that_is_killed_resumes(tmp_path: Path, backend: str, last: int):
    """Nothing is tidied up in a killed process: what stands on the disk is enough."""
    variant = replace(RICH, backend=backend, order="own", patience=30)
    code = f"from {__name__} import *; go({variant}, 3, Path({str(tmp_path)!r}), die_at={last}, kill=True)"
    root = Path(__file__).parents[1]  # this module has the same name there as here
    died = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=root, timeout=100, check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(Store(tmp_path).all()) == (last - 1) // STEPS
    resumed = go(variant, 99, tmp_path, resume=True)
    finished(resumed)
    assert not differing(of_run(go(variant, 3)), of_run(resumed))


@pytest.mark.parametrize("every", [3, 4])
def test_validations_stay_where_they_were(tmp_path: Path, every: int):
    """In steps, which go on over epochs; and a scheduler follows the last value, of an earlier epoch too."""
    variant = Variant(validate_every=every, schedule="plateau", accumulate=2, epochs=4)
    whole = go(variant, 3)
    failed(go(variant, 3, tmp_path, die_at=2 * STEPS + 1), Struck)
    resumed = go(variant, 99, tmp_path, resume=True)
    assert reports(resumed)
    assert same(reports(whole, 2 * variant.steps), reports(resumed))
    assert not differing(of_run(whole), of_run(resumed))


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [4],
        ),
    ],
    ids=["lambda", "cosine", "sequence"],
)
def test_a_scheduler_moves_adopted_groups_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: Callable[[Any], Any]
):
    monkeypatch.setitem(SCHEDULES, "step", scheduler)
    variant = Variant(schedule="step", adopts=(1,), optimizer="SGD")
    whole = go(variant, 3)
    finished(whole)
    rates = [group["lr"] for group in whole.optimizer.param_groups]  # type: ignore[union-attr]
    assert len(rates) == 2
    assert rates[1] != 0.01
    failed(go(variant, 3, tmp_path, die_at=2 * STEPS + 2), Struck)
    resumed = go(variant, 99, tmp_path, resume=True)
    finished(resumed)
    assert not differing(of_run(whole), of_run(resumed))


def test_max_steps_counts_what_was_trained_before(tmp_path: Path):
    failed(go(Variant(), 3, tmp_path, die_at=STEPS + 2), Struck)
    for most in (STEPS, STEPS + 1, 2 * STEPS + 2):
        resumed = go(Variant(), 3, tmp_path, resume=True, max_steps=most)
        finished(resumed)
        assert resumed.steps == most
        if most == 2 * STEPS + 2:
            assert same(of_run(go(Variant(), 3, max_steps=most))["model"], of_run(resumed)["model"])


def test_a_run_that_is_complete_has_nothing_left_to_do(tmp_path: Path):
    done = go(Variant(), 3, tmp_path)
    again = go(Variant(), 99, tmp_path, resume=True)
    finished(again)
    assert again.steps == done.steps
    assert not differing({k: v for k, v in of_run(done).items() if k != "metrics"}, of_run(again))
    longer = go(Variant(epochs=4), 99, tmp_path, resume=True)
    assert not differing(of_run(go(Variant(epochs=4), 3)), of_run(longer))


def test_gradients_that_wait_at_the_end_of_an_epoch_are_no_place_to_go_on_from(tmp_path: Path):
    """A hand-written step may update after each second batch; an epoch has an odd number of them."""

    def second(step: Any, batch: Any) -> torch.Tensor:
        if step.number % 2:
            step.zero()
        loss = loss_of(step.model, batch)
        step.backward(loss)
        if not step.number % 2:
            step.update()
        return loss

    what = small(step=second, loss=None)
    outcome = engine("cpu").fit(what, batches(3), epochs=3, checkpoints=Checkpoints(tmp_path, keep=9))
    assert [(saved.step, saved.boundary) for saved in Store(tmp_path).all()] == [
        (3, "step"),
        (6, "epoch"),
        (9, "step"),
    ]
    assert sum("gradients wait" in note for note in outcome.notes) == 2


# What is restored, and what is not


def test_nothing_is_restored_unasked(tmp_path: Path):
    """PL 19827: a checkpoint that lies there is no request to use it."""
    failed(go(Variant(), 3, tmp_path, die_at=STEPS + 2), Struck)
    anew = go(Variant(), 3, tmp_path)
    assert not differing(of_run(go(Variant(), 3)), of_run(anew))
    assert not any(entry.event == "restore" for entry in anew.history)
    resumed = go(Variant(), 3, tmp_path, resume=True)
    assert [entry.event for entry in resumed.history].count("restore") == 1


@pytest.mark.parametrize("resume", [True, None])
def test_without_any_checkpoint_a_run_begins_at_the_beginning(tmp_path: Path, resume: bool | None):
    fresh = go(Variant(), 3, tmp_path / "new", resume=resume)
    assert not differing(of_run(go(Variant(), 3)), of_run(fresh))


def test_the_last_ones_stay_and_the_best_one(tmp_path: Path):
    kept = Checkpoints(tmp_path, keep=2, best="val_loss")
    data = batches(4)
    outcome = engine("cpu").fit(small(), data, validate=batches(2, seed=8), epochs=6, checkpoints=kept)
    values = [one.metrics["val_loss"] for one in outcome.reports if "val_loss" in one.metrics]
    best = 1 + values.index(min(values))
    assert [saved.epoch for saved in Store(tmp_path).all()] == sorted({best, 5, 6})
    assert outcome.checkpoint == Store(tmp_path).all()[-1].path


def test_saved_by_steps(tmp_path: Path):
    kept = Checkpoints(tmp_path, every_epochs=None, every_steps=4, keep=9)
    engine("cpu").fit(small(), batches(6), epochs=2, checkpoints=kept)
    assert [(s.step, s.epoch, s.boundary) for s in Store(tmp_path).all()] == [
        (4, 0, "step"),
        (8, 1, "step"),
        (12, 1, "step"),
    ]


# Rescue


def striking(where: str, nth: int) -> il.Task:
    """A task that fails at the nth forward pass, backward pass, or half done in an update."""
    count = 0

    def due() -> bool:
        nonlocal count
        count += 1
        return count == nth

    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if where == "update" and due():
                self.param_groups[0]["params"][0].data.add_(100.0)
                raise Struck("half done")
            return super().step(closure)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if where == "forward" and due():
            raise Struck("in the forward pass")
        found = loss_of(model, batch)
        if where == "backward":
            found.register_hook(lambda _: _raise() if due() else None)
        return found

    return small(loss=loss, optimizer=lambda m: Half(m.parameters(), 0.1))


def _raise() -> None:
    raise Struck("in the backward pass")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("where", "saves"), [("forward", True), ("backward", True), ("update", False)])
@pytest.mark.parametrize("rescue", [True, False])
def test_a_failed_run_saves_only_a_whole_state(
    tmp_path: Path, backend: str, where: str, saves: bool, rescue: bool
):
    kept = Checkpoints(tmp_path, rescue=rescue)
    run = engine(backend).start(striking(where, 9), batches(6), epochs=3, checkpoints=kept)
    outcome = run.wait(60)
    failed(outcome, Struck)
    found = [(saved.step, saved.boundary) for saved in Store(tmp_path).all()]
    assert found == [(6, "epoch"), *([(8, "step")] if saves and rescue else [])]
    weights = {name: p.clone() for name, p in outcome.model.named_parameters()}  # type: ignore[union-attr]
    last = Store(tmp_path).read(Store(tmp_path).all()[-1])["parameters"]
    assert same({name: p.detach() for name, p in weights.items()}, last) == (saves and rescue)


def test_a_cancelled_run_saves_too(tmp_path: Path):
    box: list[il.Run] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if box:
            box[0].cancel()
        return loss_of(model, batch)

    run = engine("cpu").start(small(loss=loss), batches(), epochs=10**6, checkpoints=Checkpoints(tmp_path))
    box.append(run)
    assert run.wait(60).status == "cancelled"
    assert Store(tmp_path).all()[-1].step == run.step


# Refused


class Untouched(il.Adapter):
    """A backend that nobody may take."""

    name = "untouched"
    monitor = il.Engine("cpu")._class.monitor

    def _acquire(self) -> Any:
        raise AssertionError("the device was taken")


def test_one_of_the_middle_of_an_epoch_is_refused_before_anything_is_taken(tmp_path: Path):
    failed(go(Variant(), 3, tmp_path, die_at=STEPS + 3), Struck)
    first, rescued = Store(tmp_path).all()
    with pytest.raises(CheckpointError, match="in the middle of epoch 2") as told:
        il.Engine(Untouched()).start(small(), batches(), resume=rescued.path)
    assert first.path.name in str(told.value)
    with pytest.raises(CheckpointError, match=r"pass `checkpoints=Checkpoints\(folder\)`"):
        il.Engine(Untouched()).start(small(), batches(), resume=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        il.Engine(Untouched()).start(small(), batches(), resume=tmp_path / "nowhere")
    resumed = go(Variant(), 99, tmp_path / "another", resume=first.path)
    assert not differing(of_run(go(Variant(), 3)), of_run(resumed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_newest_one_is_named(tmp_path: Path, backend: str):
    go(Variant(), 3, tmp_path)
    newest = Store(tmp_path).all()[-1].path
    state = newest / "state.pt"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    error = failed(go(Variant(backend=backend, epochs=4), 3, tmp_path, resume=True), CheckpointDamaged)
    assert str(newest) in str(error)
    assert "Restore an earlier one" in str(error)


def test_one_that_never_was_complete_is_passed_over(tmp_path: Path):
    go(Variant(), 3, tmp_path)
    (Store(tmp_path).all()[-1].path / "complete").unlink()
    resumed = go(Variant(), 99, tmp_path, resume=True)
    finished(resumed)
    assert not differing(of_run(go(Variant(), 3)), of_run(resumed))


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": lambda: nn.Sequential(nn.Linear(4, 3))},
    "shape": {"model": lambda: nn.Linear(4, 5)},
    "optimizer": {"optimizer": lambda m: torch.optim.Adam(m.parameters(), 0.1)},
    "scheduler": {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3)},
    "scaler": {"options": [il.Precision("fp16")]},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("other", OTHERS)
def test_another_run_than_the_saved_one_is_refused_and_ends_clean(tmp_path: Path, backend: str, other: str):
    kept = Checkpoints(tmp_path, rescue=False)
    engine(backend).fit(small(), batches(), checkpoints=kept)
    outcome = (
        engine(backend)
        .start(small(**OTHERS[other]), batches(), epochs=2, checkpoints=kept, resume=True)
        .wait(60)
    )
    error = failed(outcome, CheckpointMismatch, "restoring")
    assert error.problems
    # The folder is free again, and what was there goes on.
    assert engine(backend).fit(small(), batches(), epochs=2, checkpoints=kept, resume=True).steps == 12


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path):
    kept = Checkpoints(tmp_path)
    box: list[il.Outcome] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not box:
            box.append(engine("double").start(small(), batches(), checkpoints=kept).wait(60))
        return loss_of(model, batch)

    engine("double").fit(small(loss=loss), batches(), checkpoints=kept)
    error = failed(box[0], CheckpointError)
    assert "acquire" not in [entry.event for entry in box[0].history]
    assert str(tmp_path) in str(error)
    engine("double").fit(small(), batches(), checkpoints=kept)


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    run = engine("double").start(small(), batches(), checkpoints=Checkpoints(tmp_path / "file"))
    error = failed(run.wait(60), CheckpointError)
    assert str(tmp_path / "file") in str(error)
    assert run.step == 0


@pytest.mark.parametrize("nth", [1, 2])
def test_a_write_that_fails_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
):
    plain, count = Store.write, 0

    def write(store: Store, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count >= nth:
            raise OSError(28, "No space left on device")
        return plain(store, *args)

    monkeypatch.setattr(Store, "write", write)
    outcome = engine("double").start(small(), batches(), epochs=4, checkpoints=Checkpoints(tmp_path)).wait(60)
    left_clean(outcome)
    assert outcome.status == "failed"
    assert isinstance(outcome.error, OSError)
    assert len(Store(tmp_path).all()) == nth - 1


# By the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_line_saves_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fit", "train.py:task", "--epochs", "2", "--checkpoints", "kept", "--json"]) == 0
    assert [saved.epoch for saved in Store(folder / "kept").all()] == [1, 2]
    assert main(["fit", "train.py:task", "--epochs", "3", "--checkpoints", "kept", "--resume", "--json"]) == 0
    assert [saved.step for saved in Store(folder / "kept").all()] == [6, 12, 18]
    capsys.readouterr()
    assert main(["fit", "train.py:task", "--resume"]) != 0
    assert "checkpoints" in capsys.readouterr().err
