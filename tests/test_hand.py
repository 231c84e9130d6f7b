"""Steps that are written by hand: each order of calls, what goes past the handle, and what it leaves.

Lines of the public reports on order that are covered here: clip before unscale and unscale twice (each a
typed error, `test_a_call_out_of_order_changes_nothing`), a scheduler that moves after a skipped update
(`schedule` after `skip` is among the same pairs), the weights of a last, shorter window
(`test_a_window_over_several_calls`).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.small import (
    BACKENDS,
    batches,
    engine,
    failed,
    finished,
    loss_of,
    net,
    run,
    same,
    seeded,
    task,
    values,
)
from torch import nn
from torch.amp import autocast_mode

import interlock as il
from interlock import errors
from interlock.fused import fuse
from interlock.specs.protocol import STEP, State
from interlock.steps.precision import autocast_state

both = pytest.mark.parametrize("backend", BACKENDS)


class Planned(Exception):
    pass


# -- each call, wherever a run of calls may lead --------------------------------------------------

CALLS: dict[str, tuple[str, ...]] = {
    "zero": ("zero",),
    "backward": ("forward", "backward"),
    "scaled backward": ("forward", "scale", "backward"),
    "unscale": ("unscale",),
    "clip": ("clip",),
    "update": ("update", "apply", "updated"),
    "minimize": ("zero", "forward", "backward", "update", "apply", "updated"),
    "skip": ("skip",),
    "schedule": ("schedule",),
}


def after(state: State, call: str) -> State | None:
    """The state that a call leads to, by the table of the protocol."""
    here: State | None = state
    for event in CALLS[call]:
        here = STEP.after(here, event) if here is not None else None
    return here


def reachable() -> dict[State, tuple[str, ...]]:
    """Each state that calls can lead to, with the shortest way there."""
    ways: dict[State, tuple[str, ...]] = {STEP.start: ()}
    todo = deque(ways)
    while todo:
        state = todo.popleft()
        for call in CALLS:
            there = after(state, call)
            if there is not None and there not in ways:
                ways[there] = (*ways[state], call)
                todo.append(there)
    return ways


WAYS = reachable()
PAIRS = [pytest.param(s, c, id=f"{', '.join(WAYS[s]) or 'nothing'} then {c}") for s in WAYS for c in CALLS]
LEGAL = [p for p in PAIRS if after(*p.values) is not None]
ILLEGAL = [p for p in PAIRS if after(*p.values) is None]


class Caller:
    """Makes calls by name, with all that they need."""

    def __init__(self, step: Any, batch: Any) -> None:
        self.step, self.batch = step, batch
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss(self) -> torch.Tensor:
        return loss_of(self.step.model, self.batch)

    def __call__(self, call: str) -> None:
        match call:
            case "backward":
                self.step.backward(self.loss())
            case "scaled backward":
                self.step.backward(self.loss(), scaler=self.scaler)
            case "unscale":
                assert self.step.unscale(self.scaler)
                self.scaler.update()
            case "clip":
                self.step.clip(1.0)
            case "minimize":
                self.step.minimize(self.loss)
            case _:
                getattr(self.step, call)()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def all_of(step: Any) -> Any:
    """Everything that a call may change."""
    (turn,) = step._hand.turns.values()
    held = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in step.model.parameters()]
    state = turn._optimizer.state_dict()
    copied = {"groups": state["param_groups"], "state": values_in(state["state"])}
    scheduler = step._hand.schedulers["optimizer"].state_dict()["last_epoch"]
    return [held, copied, scheduler, step._hand.position.updating, turn._checker.phase]


def values_in(state: dict[Any, Any]) -> Any:
    return {i: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for i, s in state.items()}


@both
@pytest.mark.parametrize(("state", "call"), ILLEGAL)
def test_a_call_out_of_order_changes_nothing(backend: str, state: State, call: str):
    """An update without gradients or a second one, clip before unscale, unscale twice, and all the others."""
    seen: list[str] = []

    def step(step: Any, batch: Any) -> Any:
        caller = Caller(step, batch)
        for one in WAYS[state]:
            caller(one)
        before = all_of(step)
        try:
            caller(call)
        except il.IllegalTransition:
            assert same(all_of(step), before)
            seen.append("refused")
            raise

    error = failed(run(backend, task(step=step, optimizer=momentum, scheduler=decay)), il.IllegalTransition)
    assert seen == ["refused"]
    assert error.event == call.removeprefix("scaled ")
    legal = {name.removeprefix("scaled ") for name in CALLS if after(state, name) is not None}
    assert error.legal == tuple(sorted(legal))
    assert any(hint in str(error) for hint in hints(state, call)), str(error)
    assert "interlock: in the hand-written step, on optimizer 'optimizer'" in error.__notes__


def hints(state: State, call: str) -> list[str]:
    """What the table says of the event that is refused, of each automaton that refuses it."""
    for event in CALLS[call]:
        there = STEP.after(state, event)
        if there is None:
            refusing = [
                a
                for a, here in zip(STEP.automata, state, strict=True)
                if event in a.alphabet and (here, event) not in a.moves
            ]
            return [STEP.hints[a.name, event] for a in refusing]
        state = there
    raise AssertionError("nothing is refused")


@pytest.mark.parametrize(("state", "call"), LEGAL)
def test_a_call_in_order_is_let_pass(state: State, call: str):
    def step(step: Any, batch: Any) -> Any:
        caller = Caller(step, batch)
        for one in (*WAYS[state], call):
            caller(one)
        return caller.loss()

    finished(run("cpu", task(step=step, optimizer=momentum, scheduler=decay), batches(1)))


def test_the_pairs_are_many_and_of_both_kinds():
    assert len(ILLEGAL) > len(LEGAL) > len(CALLS)
    assert {call for p in ILLEGAL for call in p.values[1:]} == set(CALLS)
    assert {call for p in LEGAL for call in p.values[1:]} == set(CALLS)


SAYS = {
    "update": (
        "event 'update' is not legal in phase 'clean' (gradients is 'clean', must be gathered or ready: one "
        "update needs at least one forward and backward of its own). Legal here: backward, minimize, zero."
    ),
    "scaled backward, clip": (
        "event 'clip' is not legal in phase 'gathered (scaling scaled)' (scaling is 'scaled', must be plain "
        "or unscaled: unscale before clipping: scaled gradients have another norm). Legal here: backward, "
        "skip, unscale."
    ),
    "scaled backward, unscale, unscale": (
        "event 'unscale' is not legal in phase 'ready (scaling unscaled)' (gradients is 'ready', must be "
        "gathered: unscale after the last backward, before clip and update; scaling is 'unscaled', must be "
        "scaled: unscale once, and only what was scaled). Legal here: clip, skip, update."
    ),
    "backward, skip, schedule": (
        "event 'schedule' is not legal in phase 'spent' (schedule is 'waiting', must be due: schedule once, "
        "after a real update and before the next forward). Legal here: minimize, zero."
    ),
}


@pytest.mark.parametrize("calls", SAYS)
def test_what_a_refusal_says(calls: str):
    def step(step: Any, batch: Any) -> Any:
        caller = Caller(step, batch)
        for one in calls.split(", "):
            caller(one)

    assert str(failed(run("cpu", task(step=step, scheduler=decay)), il.IllegalTransition)) == SAYS[calls]


# -- what it computes -----------------------------------------------------------------------------


def plain(step: Any, batch: Any) -> Any:
    step.zero()
    loss = loss_of(step.model, batch)
    step.backward(loss)
    step.clip(1.0)
    step.update()
    return loss


@both
def test_by_hand_is_what_the_engine_does_itself(backend: str):
    hand = run(backend, task(step=plain, optimizer=momentum), epochs=2)
    own = run(backend, task(options=[il.ClipNorm(1.0)], optimizer=momentum), epochs=2)
    assert same(values(finished(hand)), values(finished(own)))
    assert [r.metrics["loss"] for r in hand.reports] == [r.metrics["loss"] for r in own.reports]


def test_scaling_by_hand_is_what_the_engine_does_itself():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    skipped = []

    def step(step: Any, batch: Any) -> Any:
        step.zero()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(step.model, batch)
        step.backward(loss, scaler=scaler)
        if step.unscale(scaler):
            step.clip(1.0)
            step.update()
            step.schedule()
        else:
            step.skip()
            skipped.append(step.number)
        scaler.update()
        return loss

    common = {"optimizer": momentum, "scheduler": decay}
    own = task(options=[il.Precision("fp16", init_scale=2.0**24), il.ClipNorm(1.0)], **common)
    one, other = run("cpu", task(step=step, **common), batches(20)), run("cpu", own, batches(20))
    assert same(values(finished(one)), values(finished(other)))
    assert 0 < len(skipped) == other.metrics["skipped_updates"] < 20


@both
def test_an_optimizer_with_a_closure(backend: str):
    asked: list[int] = []

    def step(step: Any, batch: Any) -> Any:
        def loss() -> torch.Tensor:
            asked.append(step.number)
            return loss_of(step.model, batch)

        return step.minimize(loss)

    lbfgs = task(step=step, optimizer=lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4))
    outcome = run(backend, lbfgs, batches(3))

    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for batch in batches(3):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert same(values(finished(outcome)), values(model))
    assert len(asked) > 3


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@both
@pytest.mark.parametrize("validates", [False, True])
def test_a_window_over_several_calls(backend: str, validates: bool):
    """An update for each three calls; validation in the middle of a window disturbs nothing."""

    def step(step: Any, batch: Any) -> Any:
        if step.number % 3 == 1:
            step.zero()
        loss = loss_of(step.model, batch)
        step.backward(loss / 3)
        if step.number % 3 == 0:
            step.update()
        return loss

    data, looked = batches(4), batches(2, seed=5) if validates else None
    what = task(model=Drop, step=step, optimizer=momentum)
    outcome = seeded(lambda: run(backend, what, data, epochs=3, validate=looked))
    assert ("val_loss" in outcome.metrics) == validates

    def reference() -> nn.Module:
        model = Drop()
        optimizer = momentum(model)
        fuse(optimizer)
        for number, batch in enumerate([*data, *data, *data], 1):
            (loss_of(model, batch) / 3).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return model

    assert same(values(finished(outcome)), values(seeded(reference)))


def test_what_is_returned_beside_the_loss_is_averaged():
    def step(step: Any, batch: Any) -> Any:
        return {
            "loss": plain(step, batch),
            "number": step.number,
            "as_tensor": torch.tensor(float(step.number)),
        }

    outcome = run("cpu", task(step=step), batches(6), report_every=4)
    finished(outcome)
    assert [r.metrics["number"] for r in outcome.reports] == [2.5, 5.5]
    assert [r.metrics["as_tensor"] for r in outcome.reports] == [2.5, 5.5]


def test_what_is_returned_is_numbers_once_the_run_is_suspended():
    def step(step: Any, batch: Any) -> Any:
        loss = plain(step, batch)
        step._hand.read()
        assert all(type(one) is float for found in step._hand._values.values() for one in found)
        return {"loss": loss, "number": torch.tensor(float(step.number))}

    outcome = run("cpu", task(step=step), batches(6), report_every=4)
    finished(outcome)
    assert [r.metrics["number"] for r in outcome.reports] == [2.5, 5.5]


# -- several optimizers -----------------------------------------------------------------------------


def two(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "body": torch.optim.SGD(model.body.parameters(), 0.1),
        "head": torch.optim.Adam(model.head.parameters(), 0.01),
    }


@both
def test_each_optimizer_has_its_turn(backend: str):
    """The first update of one finds no gradients of the other: that is no error."""

    def step(step: Any, batch: Any) -> Any:
        assert list(step) == ["body", "head"]
        hidden = torch.tanh(step.model.body(batch[0]))
        step["body"].zero()
        step["body"].backward(hidden.square().mean())
        step["body"].update()
        step["head"].zero()
        loss = F.cross_entropy(step.model.head(hidden.detach()), batch[1])
        step["head"].backward(loss)
        step["head"].update()
        return loss

    outcome = run(backend, task(step=step, optimizer=two))
    finished(outcome)
    assert list(outcome.optimizers) == ["body", "head"]
    told = "2 of 2 parameters of optimizer '{}' received a gradient in the first step"
    assert told.format("body") in outcome.notes
    assert told.format("head") in outcome.notes


def test_the_loss_of_the_second_optimizer_must_reach_its_parameters():
    def step(step: Any, batch: Any) -> Any:
        loss = step.model.body(batch[0]).square().mean()
        step["body"].backward(loss)
        step["body"].update()
        step["head"].backward(step.model.body(batch[0]).mean())
        step["head"].update()

    error = failed(run("cpu", task(step=step, optimizer=two)), errors.NoGradient)
    assert error.parameters == ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            lambda step: step.zero(),
            "`step.zero` of which optimizer? There are 'body', 'head': write `step['body'].zero`",
        ),
        (lambda step: step["haed"], "there is no optimizer 'haed'; there are 'body', 'head'"),
        (
            lambda step: step["head"].schedule(),
            "optimizer 'head' has no scheduler: let the task's `scheduler`",
        ),
    ],
)
def test_which_optimizer_is_meant(wrong: Callable[[Any], Any], told: str):
    error = failed(run("cpu", task(step=lambda step, _: wrong(step), optimizer=two)), errors.TaskError)
    assert str(error).startswith(told)


# -- what goes past the handle ------------------------------------------------------------------------


@both
def test_an_update_past_the_handle_is_refused(backend: str):
    kept: list[torch.optim.Optimizer] = []

    def build(model: nn.Module) -> torch.optim.Optimizer:
        kept.append(torch.optim.SGD(model.parameters(), 0.1))
        return kept[0]

    def step(step: Any, batch: Any) -> Any:
        step.backward(loss_of(step.model, batch))
        before = values(step.model)
        try:
            kept[0].step()
        finally:
            assert same(values(step.model), before)

    outcome = run(backend, task(step=step, optimizer=build))
    failed(outcome, errors.DirectUpdate)
    kept[0].step()  # the caller's again
    assert not kept[0]._optimizer_step_pre_hooks


def test_an_update_inside_of_minimize_is_refused():
    def step(step: Any, batch: Any) -> Any:
        (turn,) = step._hand.turns.values()

        def loss() -> torch.Tensor:
            turn._optimizer.step()
            return loss_of(step.model, batch)

        step.minimize(loss)

    failed(run("cpu", task(step=step)), errors.DirectUpdate)


@pytest.mark.parametrize(
    "use",
    [
        lambda kept: kept.zero(),
        lambda kept: kept.model,
        lambda kept: kept["optimizer"],
        lambda kept: kept.minimize(lambda: torch.zeros(())),
    ],
)
def test_a_kept_handle_is_stale(use: Callable[[Any], Any]):
    kept: list[Any] = []
    turns: list[Any] = []
    refused: list[Exception] = []

    def step(step: Any, batch: Any) -> Any:
        kept.append(step)
        turns.append(step["optimizer"])
        return plain(step, batch)

    def metrics(model: Any, batch: Any) -> dict[str, float]:
        with pytest.raises(errors.StaleHandle) as caught:
            use(kept[0])
        refused.append(caught.value)
        return {"one": 1.0}

    finished(run("cpu", task(step=step, metrics=metrics), validate=batches(1)))
    assert len(refused) == 1
    with pytest.raises(errors.StaleHandle, match="and nowhere else"):
        use(kept[0])
    with pytest.raises(errors.StaleHandle, match="and nowhere else"):
        turns[0].update()


# -- faults -------------------------------------------------------------------------------------------


class Half(torch.optim.SGD):
    """Changes one parameter, and breaks."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise Planned


def half(model: nn.Module) -> torch.optim.Optimizer:
    return Half(model.parameters(), 0.1)


def minimizing(step: Any, batch: Any) -> Any:
    return step.minimize(lambda: loss_of(step.model, batch))


@both
@pytest.mark.parametrize("step", [plain, minimizing])
def test_a_fault_inside_of_an_update_counts_as_one(backend: str, step: Any):
    hand = run(backend, task(step=step, optimizer=half))
    own = run(backend, task(optimizer=half))
    failed(hand, Planned, "training")
    failed(own, Planned, "training")
    assert hand.path == own.path
    assert updating(hand)


def updating(outcome: il.Outcome) -> bool:
    return ("updating", "fail") in {(source, event) for source, event, _ in outcome.path}


@both
@pytest.mark.parametrize("nth", [1, 2])
def test_a_fault_before_the_first_change_is_in_no_update(backend: str, nth: int):
    """The first time that the loss is asked for nothing has changed yet; from then on it may have."""

    def step(step: Any, batch: Any) -> Any:
        calls: list[int] = []

        def loss() -> torch.Tensor:
            calls.append(1)
            if len(calls) == nth:
                raise Planned
            return loss_of(step.model, batch)

        step.minimize(loss)

    outcome = run(backend, task(step=step, optimizer=lambda m: torch.optim.LBFGS(m.parameters())))
    failed(outcome, Planned)
    assert updating(outcome) == (nth == 2)


class Deaf(torch.optim.SGD):
    """Never asks for the loss."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


@both
def test_an_optimizer_that_never_asks_for_the_loss(backend: str):
    outcome = run(backend, task(step=minimizing, optimizer=lambda m: Deaf(m.parameters(), 0.1)))
    error = failed(outcome, errors.LossError)
    assert str(error) == (
        "Deaf changed its parameters without asking for the loss: use `backward` and `update` with it"
    )
    assert updating(outcome)


@pytest.mark.parametrize(
    ("returned", "kind", "told"),
    [
        (None, errors.LossError, "and returned NoneType"),
        (1.0, errors.LossError, "and returned float"),
        ({"accuracy": 1.0}, errors.LossError, "and returned a mapping without 'loss'"),
        ({"loss": torch.zeros(()), "name": "x"}, errors.TaskError, "'name', which the task's step function"),
    ],
)
def test_what_a_step_must_return(returned: Any, kind: type[Exception], told: str):
    def step(step: Any, batch: Any) -> Any:
        plain(step, batch)
        return returned

    assert told in str(failed(run("cpu", task(step=step)), kind))


@pytest.mark.parametrize("loss", [None, torch.zeros(()), torch.zeros(2, requires_grad=True)])
def test_what_a_gradient_can_be_computed_of(loss: Any):
    failed(run("cpu", task(step=lambda step, _: step.backward(loss))), errors.LossError)


# -- nothing is left ------------------------------------------------------------------------------------


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@both
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_nothing_of_a_step_outlives_the_run(backend: str, fails: bool, asks: bool):
    """Also while the caller keeps the error, and without the garbage collector."""
    seen: list[weakref.ref[Any]] = []

    def step(step: Any, batch: Any) -> Any:
        def loss_here() -> torch.Tensor:
            out = step.model(batch[0])
            loss = F.cross_entropy(out, batch[1])
            hidden = [out * 2]
            seen.extend(map(weakref.ref, (out, loss, *hidden, step, step._hand, step["optimizer"])))
            if fails and asks:
                raise Planned
            return loss

        if asks:
            return {"loss": step.minimize(loss_here), "kept": torch.zeros(())}
        loss = loss_here()
        step.backward(loss)
        if fails:
            raise Planned
        step.skip()
        step.zero()
        return {"loss": loss, "kept": loss * 2}

    with no_collector():
        lbfgs = {"optimizer": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=1)} if asks else {}
        outcome = engine(backend).start(task(step=step, **lbfgs), batches(1)).wait(60)
        error = outcome.error
        assert isinstance(error, Planned) == fails
        assert len(seen) == 6
        # The handle itself is what the task's own function closes over there; nothing hangs on it any more.
        gone = seen[:3] if fails and asks else seen
        assert [one() for one in gone] == [None] * len(gone)


def in_autocast(step: Any, batch: Any) -> torch.Tensor:
    step.zero()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(step.model, batch)
    step.backward(loss)
    step.update()
    return loss


def test_an_interrupt_in_autocast_of_a_hand_written_step_leaves_it_as_it_was():
    def fit(nth: int) -> int:
        passed = [0]

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != autocast_mode.__file__:
                return None
            if event == "line":
                passed[0] += 1
                if passed[0] == nth:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            il.Engine("cpu").fit(task(step=in_autocast), batches(1))
        except KeyboardInterrupt:
            assert passed[0] == nth
        finally:
            sys.settrace(before)
        return passed[0]

    before = autocast_state("cpu")
    lines = fit(0)
    assert lines > 30
    for nth in range(1, lines + 1):
        fit(nth)
        assert autocast_state("cpu") == before, nth
