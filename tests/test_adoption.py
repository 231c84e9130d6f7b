"""Adoption: what trains changes in mid-run where that is declared, and is an error where it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.runs import environment
from tools.small import (
    BACKENDS,
    WITH_KEEPING,
    batches,
    engine,
    failed,
    finished,
    left_clean,
    loss_of,
    run,
    same,
    task,
)
from torch import nn

import interlock as il
from interlock import errors
from interlock.store import Store

EXAMPLE = Path(__file__).parents[1] / "examples" / "thaw.py"
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
FEW = settings(max_examples=max(10, settings().max_examples // 3))


class Deep(nn.Module):
    """Three layers; the first two may be frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return out


def frozen() -> Deep:
    """Only the head trains."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = Deep()
    model.one.requires_grad_(False)
    model.two.requires_grad_(False)
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.02),
    "fused": lambda p: torch.optim.AdamW(p, 0.02, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 0.02, foreach=True, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def change_of(layer: str, thaws: bool) -> Callable[[Any, Any], None]:
    """Thaw a layer into a group of its own; or freeze it again, where it stays in its group."""

    def change(model: Any, optimizer: Any) -> None:
        part = getattr(model, layer)
        part.requires_grad_(thaws)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [p for p in part.parameters() if id(p) not in held]
        if thaws and new:
            optimizer.add_param_group({"params": new, "lr": 0.03})

    return change


def by_hand(optimizer: str, adopt: dict[int, Any], epochs: int) -> Deep:
    """The plain loop that does the same."""
    model = frozen()
    made = OPTIMIZERS[optimizer](trainable(model))
    for epoch in range(epochs):
        if epoch in adopt:
            adopt[epoch](model, made)
        for batch in batches(4):
            made.zero_grad()
            loss_of(model, batch).backward()
            made.step()
    return model


# Declared


@FEW
@given(
    backend=st.sampled_from(WITH_KEEPING),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    changes=st.dictionaries(st.integers(0, 3), st.tuples(st.sampled_from(["one", "two"]), st.booleans())),
)
def test_adoption_is_what_a_plain_loop_would_do(
    backend: str, optimizer: str, changes: dict[int, tuple[str, bool]]
):
    adopt = {epoch: change_of(*change) for epoch, change in changes.items()}
    what = task(model=frozen, optimizer=lambda m: OPTIMIZERS[optimizer](trainable(m)), adopt=adopt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.FrozenParameterWarning)  # told of each that freezes
        outcome = run(backend, what, batches(4), epochs=4)
    trained = finished(outcome)
    plain = by_hand(optimizer, adopt, 4)
    fused_by_default = optimizer in ("SGD", "momentum", "AdamW", "Adagrad")
    for name, value in plain.state_dict().items():
        if fused_by_default:  # a fused update rounds otherwise than the plain loop's default one
            torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(trained.state_dict()[name], value), name
    assert [p.requires_grad for p in trained.parameters()] == [p.requires_grad for p in plain.parameters()]
    events = [entry.event for entry in outcome.history]
    assert events.count("adopt") == len([epoch for epoch in adopt if epoch < 4])


@pytest.mark.parametrize("backend", WITH_KEEPING)
def test_by_handles(backend: str):
    what = task(model=frozen, optimizer=lambda m: OPTIMIZERS["foreach"](trainable(m)))
    with engine(backend).open(what) as created:
        training = created.place().optimize().train()
        for epoch in range(3):
            if epoch == 1:
                training.adopt(change_of("two", True))
            for batch in batches(4):
                training.step(batch)
        outcome = training.finish()
    assert same(
        finished(outcome).state_dict(), by_hand("foreach", {1: change_of("two", True)}, 3).state_dict()
    )


@on_each_backend
def test_several_optimizers_are_passed_by_name(backend: str):
    seen: list[Any] = []

    def step(step: Any, batch: Any) -> torch.Tensor:
        for name in step:
            step[name].zero()
            loss = loss_of(step.model, batch)
            step[name].backward(loss)
            step[name].update()
        return loss

    def change(model: Any, optimizers: Any) -> None:
        seen.append(sorted(optimizers))
        change_of("two", True)(model, optimizers["b"])

    what = task(
        model=frozen,
        loss=None,
        step=step,
        adopt={1: change},
        optimizer=lambda m: {
            "a": torch.optim.SGD([m.head.weight], 0.1),
            "b": torch.optim.SGD([m.head.bias], 0.1),
        },
    )
    outcome = run(backend, what, batches(4), epochs=2)
    finished(outcome)
    assert seen == [["a", "b"]]
    assert len(outcome.optimizers["b"].param_groups) == 2


# Wrongly declared


def leave_out(model: Any, optimizer: Any) -> None:
    model.two.requires_grad_(True)


def foreign(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def duplicate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(model.head.weight)


def replace(model: Any, optimizer: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def nothing_trains(model: Any, optimizer: Any) -> None:
    raise ValueError("not ready to thaw")


WRONG: list[tuple[Any, type[BaseException], tuple[str, ...]]] = [
    (leave_out, errors.MissingParameter, ("two.weight", "two.bias")),
    (foreign, errors.ForeignParameter, ()),
    (duplicate, errors.DuplicateParameter, ("head.weight",)),
    (replace, errors.PlacementError, ("head.weight",)),
    (nothing_trains, ValueError, ()),
]


@pytest.mark.parametrize(("change", "kind", "names"), WRONG, ids=[change.__name__ for change, _, _ in WRONG])
@pytest.mark.parametrize("drive", ["task", "handle"])
@on_each_backend
def test_a_wrong_adoption_is_an_error_that_names_what_is_wrong(
    backend: str, drive: str, change: Any, kind: type[BaseException], names: tuple[str, ...], tmp_path: Path
):
    what = task(model=frozen, optimizer=lambda m: OPTIMIZERS["momentum"](trainable(m)))
    if drive == "task":
        kept = il.Checkpoints(tmp_path)
        what = task(model=frozen, optimizer=what.optimizer, adopt={1: change})
        outcome = engine(backend).start(what, batches(3), epochs=2, checkpoints=kept).wait(60)
    else:
        with pytest.raises(kind), engine(backend).open(what) as created:  # noqa: PT012
            training = created.place().optimize().train()
            training.step(batches()[0])
            training.adopt(change)
        assert created.outcome is not None
        outcome = created.outcome
    left_clean(outcome)
    assert outcome.status == "failed"
    assert isinstance(outcome.error, kind)
    assert outcome.failure is not None
    assert outcome.failure.phase == "adopting"
    assert set(names) <= set(getattr(outcome.error, "parameters", names))
    if drive == "task":  # half adopted is not whole: nothing more was saved
        assert [saved.boundary for saved in Store(tmp_path).all()] == ["epoch"]


# Undeclared


def quietly(what: str) -> Callable[[Any, Any], None]:
    """What a hook may do behind the engine's back."""

    def change(model: Any, optimizer: Any) -> None:
        if what == "thaw":
            model.one.requires_grad_(True)
        elif what == "freeze":
            model.head.bias.requires_grad_(False)
        elif what == "group":
            model.two.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.two.parameters())})
        else:
            optimizer.add_param_group({"params": [model.two.weight]})

    return change


@pytest.mark.parametrize(
    ("what", "kind", "names"),
    [
        ("thaw", errors.MissingParameter, {"one.weight", "one.bias"}),
        ("freeze", errors.UndeclaredChange, {"head.bias"}),
        ("group", errors.UndeclaredChange, {"two.weight", "two.bias"}),
        ("held", errors.UndeclaredChange, {"two.weight"}),
    ],
)
@pytest.mark.parametrize("at", [2, 5])
@on_each_backend
def test_an_undeclared_change_is_an_error(backend: str, what: str, kind: Any, names: set[str], at: int):
    made: list[Any] = []
    count = 0

    def optimizer(model: Any) -> Any:
        made.append(torch.optim.SGD(trainable(model), 0.1))
        return made[0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == at:
            quietly(what)(model, made[0])
        return loss_of(model, batch)

    outcome = run(backend, task(model=frozen, optimizer=optimizer, loss=loss), batches(6), report_every=2)
    error = failed(outcome, kind)
    assert set(error.parameters) == names
    assert kind is not errors.UndeclaredChange or "Task(adopt={epoch: function})" in str(error)
    assert at <= outcome.steps <= at + 2


# The example


def test_the_example_killed_while_it_thaws_ends_with_the_same_bits(tmp_path: Path):
    """With -9, in the middle of the fourth epoch, when one of its two parts is thawed."""
    fit = "import interlock as il, thaw; from interlock.checkpoint import Checkpoints as C; import os, sys\n"
    code = f"{fit}il.Engine('cpu').fit(thaw.task, checkpoints=C(sys.argv[1]), resume=True)"
    dies = (
        f"{fit}plain, left = thaw.task.loss, [80]\n"
        "def loss(net, batch):\n    left[0] -= net.training\n"
        f"    return plain(net, batch) if left[0] else os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "from dataclasses import replace\n"
        "il.Engine('cpu').fit(replace(thaw.task, loss=loss), checkpoints=C(sys.argv[1]))"
    )

    def child(source: str, folder: str) -> subprocess.Popen[bytes]:
        env = environment()
        env["PYTHONPATH"] = os.pathsep.join([str(EXAMPLE.parent), env["PYTHONPATH"]])
        return subprocess.Popen([sys.executable, "-c", source, str(tmp_path / folder)], env=env)

    whole, killed = child(code, "whole"), child(dies, "killed")
    assert killed.wait(100) == -signal.SIGKILL
    newest = Store(tmp_path / "killed").all()[-1]
    assert newest.epoch == 3
    assert len(newest.about["optimizers"][0]["groups"]) == 2
    assert child(code, "killed").wait(100) == 0
    assert whole.wait(100) == 0
    ends = [Store(tmp_path / name).all()[-1] for name in ("whole", "killed")]
    assert [end.epoch for end in ends] == [6, 6]
    assert ends[0].metrics == ends[1].metrics
    one, other = (Store(end.path.parent).read(end) for end in ends)
    assert len(one["optimizers"][0]["groups"]) == 3
    # Not the process's random numbers, which begin anywhere: this run draws from generators of its own.
    assert same({**one, "random": None}, {**other, "random": None})
