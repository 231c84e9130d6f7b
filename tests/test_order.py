"""Placed before optimized: a wrong optimizer or loss is refused by name, a right one trains to the bit.

Every check runs on the CPU, where placement keeps the Parameters, and on the replacing double, where it makes
new ones. Each kind of fault is planted in `WRONG`; with its check taken out the same fault passes unseen, so
it is that check that finds it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tools.small import (
    BACKENDS,
    NAMES,
    Net,
    batches,
    failed,
    finished,
    left_clean,
    loss_of,
    net,
    run,
    same,
    seeded,
    sgd,
    task,
    values,
)
from torch import nn
from torch.optim import SGD

import interlock as il
from interlock import errors, facts
from interlock.backends.double import ReplacingDouble
from interlock.fused import fuse
from interlock.options import Options

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


# The bug of the seeds


def test_without_an_engine_the_bug_is_alive() -> None:
    """By hand on the double, the optimizer built before placement: nothing trains, nobody says so."""
    model, device = net(), ReplacingDouble()
    optimizer = sgd(model)
    device.place(model)
    before = values(model)
    losses = []
    for batch in batches() * 3:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = values(model)
    assert all(torch.equal(after[name], before[name]) for name in NAMES)
    assert losses[:6] == losses[6:12] == losses[12:]


def test_the_engine_refuses_it() -> None:
    model = net()
    early = sgd(model)
    before = values(model)
    error = failed(run("double", task(model=model, optimizer=lambda _: early)), il.errors.StaleParameter)
    assert error.parameters == NAMES
    assert "it would train nothing" in str(error)
    assert same(values(model), before)


def test_on_the_cpu_the_same_optimizer_is_right() -> None:
    """Placement keeps the objects there: what was captured earlier is what trains."""
    model = net()
    early = list(model.parameters())
    before = values(model)
    trained = finished(run("cpu", task(model=model, optimizer=lambda _: SGD(early, 0.1))))
    assert trained is model
    assert all(now is then for now, then in zip(model.parameters(), early, strict=True))
    assert not any(torch.equal(values(model)[name], before[name]) for name in NAMES)


# Wrong optimizers and losses, and the check that finds each


@dataclass(frozen=True)
class Wrong:
    """A task that must be refused.

    Attributes:
        changes: What is wrong with it, made anew for each use.
        error: What it must be refused with.
        check: The function of `interlock.facts` that does it.
        says: What the message must contain.
        parameters: Whom the error must name.
        phase: Where it must strike.
        backends: Where it is wrong.
    """

    changes: Callable[[], dict[str, Any]]
    error: type[errors.InterlockError]
    check: str
    says: str
    parameters: tuple[str, ...] | None = None
    phase: str = "optimizing"
    backends: tuple[str, ...] = BACKENDS


def over(parameters: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """An optimizer over these parameters of the placed model."""
    return {"optimizer": lambda model: SGD(parameters(model), 0.1)}


def over_early() -> dict[str, Any]:
    model = net()
    early = list(model.parameters())
    return {"model": model, "optimizer": lambda _: SGD(early, 0.1)}


def over_a_copy() -> dict[str, Any]:
    return over(lambda model: copy.deepcopy(model).parameters())


def over_an_own_copy() -> dict[str, Any]:
    mine = net()
    return over(lambda _: mine.parameters())


def over_replaced_before() -> dict[str, Any]:
    """Captured, then replaced in the model by hand, then given to the engine."""
    model = net()
    early = list(model.parameters())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return {"model": model, **over(lambda now: [*list(now.parameters())[:2], early[2], now.head.bias])}


def replaced_while_building() -> dict[str, Any]:
    def optimizer(model: Net) -> torch.optim.Optimizer:
        made = sgd(model)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return made

    return {"optimizer": optimizer}


def one_twice() -> dict[str, Any]:
    def optimizer(model: Net) -> torch.optim.Optimizer:
        made = sgd(model)
        made.param_groups[0]["params"].append(model.head.bias)
        return made

    return {"optimizer": optimizer}


def one_in_two_groups() -> dict[str, Any]:
    def optimizer(model: Net) -> torch.optim.Optimizer:
        made = sgd(model)
        made.param_groups.append({**made.param_groups[0], "params": [model.body.weight]})
        return made

    return {"optimizer": optimizer}


def with_foreign() -> dict[str, Any]:
    other = nn.Parameter(torch.zeros(7))
    return over(lambda model: [*model.parameters(), other])


def loss_from(function: Callable[[nn.Module, Any], Any]) -> dict[str, Any]:
    return {"loss": function}


def with_unconnected_loss() -> dict[str, Any]:
    return loss_from(lambda _, batch: loss_of(net(3), batch))


def without_head() -> dict[str, Any]:
    return {
        "loss": lambda model, batch: model.body(batch[0]).sum(),
        "optimizer": lambda model: SGD(
            [{"params": model.body.parameters()}, {"params": model.head.parameters()}], 0.1
        ),
    }


def from_optimizer(made: Callable[[nn.Module], Any]) -> dict[str, Any]:
    return {"optimizer": made}


WRONG = {
    "built before placement": Wrong(
        over_early,
        errors.StaleParameter,
        "check_optimizers",
        "as before placement, which made new parameters: it would train nothing",
        NAMES,
        backends=("double",),
    ),
    "over a copy": Wrong(over_a_copy, errors.ForeignParameter, "check_optimizers", "like copies of", NAMES),
    "over a model of its own": Wrong(
        over_an_own_copy, errors.ForeignParameter, "check_optimizers", "like copies of", NAMES
    ),
    "over a parameter replaced before the run": Wrong(
        over_replaced_before,
        errors.ForeignParameter,
        "check_optimizers",
        "copies of 'head.weight'",
        ("head.weight",),
    ),
    "over a parameter replaced while building": Wrong(
        replaced_while_building,
        errors.ForeignParameter,
        "check_optimizers",
        "when the optimizer was built: the optimizer holds what looks like copies of 'head.weight'",
        ("head.weight",),
    ),
    "one missing": Wrong(
        lambda: over(lambda model: list(model.parameters())[:3]),
        errors.MissingParameter,
        "check_optimizers",
        "no optimizer holds 'head.bias'",
        ("head.bias",),
    ),
    "one foreign": Wrong(
        with_foreign,
        errors.ForeignParameter,
        "check_optimizers",
        "parameters of something else, at 'optimizer 0, group 0, position 4'",
        ("optimizer 0, group 0, position 4",),
    ),
    "one twice in a group": Wrong(
        one_twice, errors.DuplicateParameter, "check_optimizers", "'head.bias' twice", ("head.bias",)
    ),
    "one in two groups": Wrong(
        one_in_two_groups,
        errors.DuplicateParameter,
        "check_optimizers",
        "group 1, position 0",
        ("body.weight",),
    ),
    "no optimizer": Wrong(
        lambda: from_optimizer(lambda _: None),
        errors.TaskError,
        "as_optimizers",
        "None: is a `return` missing?",
    ),
    "an empty list": Wrong(
        lambda: from_optimizer(lambda _: []), errors.TaskError, "as_optimizers", "and returned []"
    ),
    "several": Wrong(
        lambda: from_optimizer(lambda model: [sgd(model.body), sgd(model.head)]),
        errors.TaskError,
        "as_optimizers",
        "returned [SGD, SGD]",
    ),
    "no optimizer but a scheduler": Wrong(
        lambda: from_optimizer(lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1)),
        errors.TaskError,
        "as_optimizers",
        "returned StepLR",
    ),
    "one that needs a closure": Wrong(
        lambda: from_optimizer(lambda model: torch.optim.LBFGS(model.parameters())),
        errors.TaskError,
        "as_optimizers",
        "LBFGS.step() needs closure",
    ),
    "no scheduler": Wrong(
        lambda: {"scheduler": lambda _: None}, errors.TaskError, "check_scheduler", "is a `return` missing?"
    ),
    "a scheduler of another optimizer": Wrong(
        lambda: {"scheduler": lambda _: torch.optim.lr_scheduler.StepLR(sgd(net()), 1)},
        errors.TaskError,
        "check_scheduler",
        "of another optimizer",
    ),
    "a scheduler that needs a metric": Wrong(
        lambda: {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
        errors.TaskError,
        "check_scheduler",
        "ReduceLROnPlateau.step() needs metrics",
    ),
    "a loss that is a number": Wrong(
        lambda: loss_from(lambda model, batch: loss_of(model, batch).item()),
        errors.LossError,
        "check_loss",
        "and is float: return the tensor itself",
        phase="training",
    ),
    "no loss": Wrong(
        lambda: loss_from(lambda model, batch: None),
        errors.LossError,
        "check_loss",
        "and is NoneType: is a `return` missing?",
        phase="training",
    ),
    "a loss per sample": Wrong(
        lambda: loss_from(lambda model, batch: model(batch[0]).sum(1)),
        errors.LossError,
        "check_loss",
        "has shape [5]: reduce it",
        phase="training",
    ),
    "a loss of one dimension": Wrong(
        lambda: loss_from(lambda model, batch: loss_of(model, batch).reshape(1)),
        errors.LossError,
        "check_loss",
        "has shape [1]",
        phase="training",
    ),
    "a loss without a graph": Wrong(
        lambda: loss_from(lambda model, batch: loss_of(model, batch).detach()),
        errors.LossError,
        "check_loss",
        "has no graph, so nothing would train",
        phase="training",
    ),
    "a loss computed without gradients": Wrong(
        lambda: loss_from(torch.no_grad()(loss_of)),
        errors.LossError,
        "check_loss",
        "no graph",
        phase="training",
    ),
    "a loss of another model": Wrong(
        with_unconnected_loss,
        errors.NoGradient,
        "check_gradients",
        "The loss is not connected to them",
        NAMES,
        phase="training",
    ),
    "a group without any gradient": Wrong(
        without_head,
        errors.NoGradient,
        "check_gradients",
        "no parameter of optimizer 0, group 1 received a gradient in the first backward pass",
        ("head.weight", "head.bias"),
        phase="training",
    ),
    "NaN at once": Wrong(
        lambda: loss_from(lambda model, batch: loss_of(model, batch) * math.nan),
        errors.NonFiniteLoss,
        "check_finite",
        "the loss of step 1 is nan",
        phase="training",
    ),
}
CASES = [pytest.param(b, w, id=f"{name}-{b}") for name, w in WRONG.items() for b in w.backends]


@pytest.mark.parametrize(("backend", "wrong"), CASES)
def test_what_is_wrong_is_refused_by_name(backend: str, wrong: Wrong) -> None:
    outcome = run(backend, task(**wrong.changes()))
    error = failed(outcome, wrong.error, wrong.phase)
    assert wrong.says in str(error)
    if wrong.parameters is not None:
        assert error.parameters == wrong.parameters
    assert outcome.steps == 0


def unchecked(*arguments: Any, **named: Any) -> Any:
    """In place of a check: what it returns where it is asked for something, and no error."""
    if arguments and isinstance(arguments[0], nn.Module):
        return (1, 1)
    made = arguments[0] if arguments else None
    return dict(enumerate(made)) if isinstance(made, (list, tuple)) else {"optimizer": made}


@pytest.mark.parametrize(("backend", "wrong"), CASES)
def test_without_its_check_it_is_not(backend: str, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a check that does nothing. So the refusal above is that check's."""
    module = "facts" if hasattr(facts, wrong.check) else "wiring"
    monkeypatch.setattr(f"interlock.{module}.{wrong.check}", unchecked)
    monkeypatch.setattr("interlock.owners.SECONDS", 0.0)  # what is left then, and why, is no matter here
    outcome = run(backend, task(**wrong.changes()))
    found = type(outcome.error) is wrong.error and wrong.says in str(outcome.error)
    assert not found or outcome.steps > 0  # by a later check, after updates


@on_each_backend
def test_a_refused_task_leaves_the_model_as_it_was(backend: str) -> None:
    model = net()
    before, held = values(model), list(model.parameters())
    outcome = run(backend, task(model=model, optimizer=lambda m: SGD(list(m.parameters())[:3], 0.1)))
    failed(outcome, errors.MissingParameter, "optimizing")
    assert all(now is then for now, then in zip(model.parameters(), held, strict=True))
    assert same(values(model), before)


@on_each_backend
def test_torch_refuses_some_itself_and_the_error_is_the_same_object(backend: str) -> None:
    raised: list[BaseException] = []

    def optimizer(model: Net) -> torch.optim.Optimizer:
        try:
            return SGD([{"params": model.parameters()}, {"params": [model.head.bias]}], 0.1)
        except ValueError as error:
            raised.append(error)
            raise

    outcome = run(backend, task(optimizer=optimizer))
    assert failed(outcome, ValueError, "optimizing") is raised[0]


def test_an_optimizer_in_place_of_a_function() -> None:
    with pytest.raises(errors.TaskError, match=r"a SGD, built already.*pass a function") as caught:
        task(optimizer=sgd(net()))
    assert "optimizer=lambda model:" in str(caught.value)
    with pytest.raises(errors.TaskError, match="the class AdamW, which takes parameters and not a model"):
        task(optimizer=torch.optim.AdamW)


@on_each_backend
def test_one_optimizer_in_a_list_is_one_optimizer(backend: str) -> None:
    finished(run(backend, task(optimizer=lambda model: [sgd(model)])))


# Between the optimizer's building and the first step


def drop_last(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def add_foreign(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})


def replace_head(model: Net, optimizer: torch.optim.Optimizer | None = None) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def add_layer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.extra = nn.Linear(2, 2)


@on_each_backend
@pytest.mark.parametrize(
    ("tamper", "kind", "parameters"),
    [
        (drop_last, errors.MissingParameter, ("head.bias",)),
        (add_layer, errors.MissingParameter, ("extra.weight", "extra.bias")),
        (add_foreign, errors.ForeignParameter, ("optimizer 0, group 1, position 0",)),
        (replace_head, errors.ReplacedParameter, ("head.weight",)),
    ],
)
def test_a_change_before_the_first_step_is_found_before_it(
    backend: str, tamper: Any, kind: Any, parameters: tuple[str, ...]
) -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(sgd(model))
        return made[0]

    model = net()
    before = values(model)
    created = il.Engine(backend).open(task(model=model, optimizer=optimizer))

    def drive() -> None:
        with created:
            placed = created.place()
            place = placed.model
            training = placed.optimize().train()
            tamper(place, made[0])
            training.step(batches()[0])

    with pytest.raises(kind, match="before the first step") as caught:
        drive()
    assert caught.value.parameters == parameters
    assert created.outcome is not None
    left_clean(created.outcome)
    assert created.outcome.steps == 0
    after = values(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


# In mid-run


@on_each_backend
@pytest.mark.parametrize(("every", "found_after"), [(1, 3), (5, 5), (50, 6)])
def test_the_users_loss_replaces_a_parameter(backend: str, every: int, found_after: int) -> None:
    """The bound that the documents state: the next report, which the end of an epoch is too."""
    steps = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:
            replace_head(model)
        return loss_of(model, batch)

    outcome = run(backend, task(loss=loss), report_every=every, epochs=2)
    error = failed(outcome, errors.ReplacedParameter, "training")
    assert error.parameters == ("head.weight",)
    assert str(error).startswith("at a report: 'head.weight' of the model was replaced")
    assert outcome.steps == found_after


@on_each_backend
def test_the_metrics_hook_replaces_a_parameter(backend: str) -> None:
    def metrics(model: Any, batch: Any) -> dict[str, float]:
        replace_head(model)
        return {}

    outcome = run(backend, task(metrics=metrics), validate=batches(1), epochs=2)
    error = failed(outcome, errors.ReplacedParameter, "training")
    assert str(error).startswith("after 'validated': 'head.weight'")
    assert outcome.steps == 6
    assert [entry.event for entry in outcome.history].count("validated") == 1


@on_each_backend
def test_a_parameter_is_replaced_between_two_epochs(backend: str) -> None:
    class Loader:
        def __init__(self) -> None:
            self.model: Any = None
            self.rounds = 0

        def __iter__(self) -> Iterator[Any]:
            self.rounds += 1
            if self.rounds == 2:
                replace_head(self.model)
            yield from batches()

    loader = Loader()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        loader.model = model
        return sgd(model)

    outcome = run(backend, task(optimizer=optimizer), loader, epochs=3, report_every=4)
    failed(outcome, errors.ReplacedParameter, "training")
    loader.model = None
    assert outcome.steps == 10  # the first report of the second epoch


@on_each_backend
@pytest.mark.parametrize("end", ["finish", "stop", "validate", "with"])
def test_by_handles_it_is_found_at_the_next_report_or_phase(backend: str, end: str) -> None:
    created = il.Engine(backend, report_every=100).open(task())

    def drive() -> None:
        with created:
            placed = created.place()
            model = placed.model
            training = placed.optimize().train()
            training.step(batches()[0])
            replace_head(model)  # type: ignore[arg-type]
            training.step(batches()[1])
            if end == "validate":
                training.validate(batches(1))
            elif end != "with":
                getattr(training, end)()

    with pytest.raises(errors.ReplacedParameter, match=r"'head.weight'"):
        drive()
    assert created.outcome is not None
    assert created.outcome.status == "failed"
    assert created.outcome.steps == 2


@on_each_backend
def test_by_handles_reports_come_at_the_same_steps_as_in_fit(backend: str) -> None:
    with il.Engine(backend, report_every=2).open(task(model=net())) as created:
        training = created.place().optimize().train()
        for batch in batches(5):
            training.step(batch)
        by_hand = training.finish()
    fitted = il.Engine(backend, report_every=2).fit(task(model=net()), batches(5))
    told = [[(report.step, report.metrics) for report in outcome.reports] for outcome in (by_hand, fitted)]
    assert told[0] == told[1]
    assert [step for step, _ in told[0]] == [2, 4, 5]


@on_each_backend
def test_unfreezing_in_mid_run_is_a_missing_parameter(backend: str) -> None:
    def build() -> Net:
        model = net()
        model.body.requires_grad_(False)
        return model

    def loss(model: Any, batch: Any) -> torch.Tensor:
        model.body.requires_grad_(True)
        return loss_of(model, batch)

    frozen_left_out = {
        "optimizer": lambda model: SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    }
    finished(run(backend, task(model=build, **frozen_left_out)))
    outcome = run(backend, task(model=build, loss=loss, **frozen_left_out))
    assert failed(outcome, errors.MissingParameter).parameters == ("body.weight", "body.bias")


def test_the_documents_state_the_bound() -> None:
    for text in (il.Engine.__doc__, Options.__doc__):
        assert text is not None
        words = " ".join(text.split())
        assert "report_every: Steps between two reports" in words
        assert "bound within which a" in words
        assert "replaced" in words


# Warnings, not errors


@on_each_backend
def test_a_frozen_parameter_in_the_optimizer_is_a_warning_that_names_it(backend: str) -> None:
    def build() -> Net:
        model = net()
        model.head.bias.requires_grad_(False)
        return model

    with pytest.warns(errors.FrozenParameterWarning, match=r"'head.bias'") as caught:
        outcome = il.Engine(backend).fit(task(model=build), batches())
    assert len([w for w in caught if w.category is errors.FrozenParameterWarning]) == 1
    assert not any(name in str(caught[0].message) for name in NAMES[:3])
    model = finished(outcome)
    assert torch.equal(model.head.bias, net().head.bias)


@on_each_backend
def test_a_parameter_without_a_gradient_is_a_warning_that_names_it(backend: str) -> None:
    def loss(model: Net, batch: Any) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(model.body(batch[0])), model.head.weight).square().mean()

    with pytest.warns(errors.UnusedParameterWarning, match=r"1 of 4 .*'head.bias'"):
        outcome = il.Engine(backend).fit(task(loss=loss), batches())
    finished(outcome)
    assert "3 of 4 parameters received a gradient in the first step" in outcome.notes
    assert "3 of 4 parameters changed in the first update" in outcome.notes


@on_each_backend
def test_a_right_task_gives_no_warning_and_says_what_changed(backend: str) -> None:
    outcome = il.Engine(backend).fit(task(), batches())  # warnings are errors here
    assert "4 of 4 parameters received a gradient in the first step" in outcome.notes
    assert "4 of 4 parameters changed in the first update" in outcome.notes
    assert len(outcome.notes) == 2


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("small", [0, facts.SMALL])
def test_what_changed_is_told_for_each_dtype(
    backend: str, dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "SMALL", small)

    def build() -> nn.Module:
        return seeded(lambda: nn.Linear(4, 3, dtype=dtype))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0].to(dtype)).abs().square().mean()

    outcome = run(backend, task(model=build, loss=loss))
    finished(outcome)
    assert "2 of 2 parameters changed in the first update" in outcome.notes


@pytest.mark.parametrize("small", [0, facts.SMALL])
def test_a_fingerprint_sees_the_imaginary_part(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SMALL", small)  # smaller tensors are copied, larger ones summed up
    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    before = facts.fingerprints(model)
    assert facts.changed(before, model) == (0, 1)
    with torch.no_grad():
        model.weight.copy_(model.weight.conj().resolve_conj())  # the same real parts, the same norm
    assert facts.changed(before, model) == (1, 1)


# Losses that are not finite


@on_each_backend
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("bad", "every", "found_after"), [(1, 3, 0), (2, 3, 3), (4, 3, 6), (5, 100, 6)])
def test_the_first_step_whose_loss_is_not_finite_is_named(
    backend: str, value: float, bad: int, every: int, found_after: int
) -> None:
    steps = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        real = loss_of(model, batch)
        return real + value if steps >= bad else real

    outcome = run(backend, task(loss=loss), report_every=every)
    error = failed(outcome, errors.NonFiniteLoss, "training")
    assert error.step == bad
    assert math.isnan(error.value) if math.isnan(value) else error.value == value
    assert f"the loss of step {bad} is {value}" in str(error)
    assert "nonfinite='ignore'" in str(error)
    assert outcome.steps == found_after


@on_each_backend
@pytest.mark.parametrize("bad", [1, 4])
def test_it_can_be_ignored(backend: str, bad: int) -> None:
    steps = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        real = loss_of(model, batch)
        return real + math.inf if steps == bad else real

    outcome = run(backend, task(loss=loss), nonfinite="ignore", report_every=3)
    finished(outcome)
    assert [math.isfinite(report.metrics["loss"]) for report in outcome.reports] == [bad != 1, bad != 4]


# Ties


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, once more as a member of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight
        self.twin = nn.ParameterList([self.embed.weight, nn.Parameter(torch.ones(5))])
        self.plain = [self.embed.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x) * self.twin[1]) + self.plain[0].sum()


def tied_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def tokens() -> list[torch.Tensor]:
    return seeded(lambda: [torch.randint(0, 7, (4,)) for _ in range(5)])


@on_each_backend
def test_tied_weights_stay_tied_from_placement_to_homecoming(backend: str) -> None:
    def of(model: Any) -> list[int]:
        return [id(t) for t in (model.embed.weight, model.out.weight, model.twin[0], model.plain[0])]

    seen: list[int] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        seen.append(len(set(of(model))))
        return SGD(model.parameters(), 0.01)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(set(of(model))))
        return tied_loss(model, batch)

    model = seeded(Tied)
    weight, plain = model.embed.weight, model.plain
    what = il.Task(model=model, optimizer=optimizer, loss=loss)
    finished(run(backend, what, tokens()))
    assert len(seen) == 6
    assert set(seen) == {1}
    assert set(of(model)) == {id(weight)}
    assert model.plain is plain
    assert len(list(model.parameters())) == 2
    by_hand = seeded(Tied)
    train_by_hand(by_hand, SGD(by_hand.parameters(), 0.01), tokens(), loss=tied_loss)
    assert same(values(by_hand), values(model))


@on_each_backend
def test_a_tie_that_breaks_in_mid_run_is_found(backend: str) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        model.out.weight = nn.Parameter(model.out.weight.detach().clone(), requires_grad=False)
        return tied_loss(model, batch)

    what = il.Task(model=lambda: seeded(Tied), optimizer=lambda m: SGD(m.parameters(), 0.1), loss=loss)
    error = failed(run(backend, what, tokens()), errors.BrokenTie, "training")
    assert error.parameters == ("embed.weight", "out.weight", "twin.0")


# The same to the bit as a loop by hand


class Rich(nn.Module):
    """Weights of two dimensions only, which is what every optimizer takes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8, bias=False)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.body(x))))


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(3).long().clamp(max=10)).sum(1)


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Any],
    *,
    epochs: int = 1,
    scheduler: Any = None,
    every: str = "step",
    loss: Any = loss_of,
) -> list[float]:
    """The loop that everybody writes, with the optimizer in the form that the engine takes; the losses."""
    fuse(optimizer)
    losses = []
    for _ in range(epochs):
        for batch in data:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            if scheduler is not None and every == "step":
                scheduler.step()
            losses.append(value.item())
        if scheduler is not None and every == "epoch":
            scheduler.step()
    return losses


def of_torch() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer that torch has."""
    found = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }


def on_the_device_of(model: nn.Module, value: float) -> torch.Tensor:
    """A number as a tensor beside the model (the double counts what is made from what stands on it)."""
    return next(model.parameters()).detach().sum() * 0 + value


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{
        name: lambda model, kind=kind: kind(model.parameters(), lr=0.01)
        for name, kind in of_torch().items()
        if name != "LBFGS"  # refused: see WRONG
    },
    "SGD with momentum": lambda model: SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True),
    "Adagrad, eager state": lambda model: torch.optim.Adagrad(
        model.parameters(), 0.01, initial_accumulator_value=0.5
    ),
    "AdamW, amsgrad": lambda model: torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.01, foreach=True),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
    "AdamW, the rate a tensor": lambda model: torch.optim.AdamW(
        model.parameters(), on_the_device_of(model, 0.01), foreach=False
    ),
    "AdamW, two groups": lambda model: torch.optim.AdamW(
        [
            {"params": model.body.parameters(), "weight_decay": 0.1},
            {"params": model.head.parameters(), "lr": 0.02},
        ],
        0.01,
    ),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ExponentialLR(o, 0.9), torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2)]
    ),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


def compare_with_by_hand(
    backend: str,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    build: type[nn.Module] = Rich,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    every: str = "step",
) -> None:
    """Asserts that the engine trains as the loop by hand does: parameters, state, rates, losses."""
    data, epochs = batches(5), 2
    mine = seeded(build)
    made = optimizer(mine)
    by_hand = seeded(
        lambda: train_by_hand(
            mine, made, data, epochs=epochs, scheduler=scheduler and scheduler(made), every=every
        )
    )
    model = seeded(build)
    what = task(model=model, optimizer=optimizer, scheduler=scheduler, scheduler_every=every)
    outcome = seeded(lambda: il.Engine(backend, report_every=1).fit(what, data, epochs=epochs))
    finished(outcome)
    assert same(values(model), values(mine))
    assert outcome.optimizer is not None
    assert same(outcome.optimizer.state_dict(), made.state_dict())
    assert [report.metrics["loss"] for report in outcome.reports] == by_hand


@on_each_backend
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_trains_as_by_hand(backend: str, name: str) -> None:
    build = Sparse if name == "SparseAdam" else Rich
    compare_with_by_hand(backend, OPTIMIZERS[name], build)


@on_each_backend
@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW, two groups", "AdamW, the rate a tensor"])
def test_each_scheduler_moves_as_by_hand(backend: str, name: str, scheduler: str, every: str) -> None:
    compare_with_by_hand(backend, OPTIMIZERS[name], scheduler=SCHEDULERS[scheduler], every=every)


@on_each_backend
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Muon"}))  # it is slow, and once is enough
def test_each_optimizer_moves_with_a_scheduler_as_by_hand(backend: str, name: str) -> None:
    build = Sparse if name == "SparseAdam" else Rich
    compare_with_by_hand(backend, OPTIMIZERS[name], build, SCHEDULERS["StepLR"])


@pytest.mark.parametrize("method", ["zero_grad", "step"])
def test_the_comparison_finds_a_step_that_does_not_do_all(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: an engine whose step leaves something out, or does it twice."""
    from interlock.work import Work

    begin = Work._begin_stepping

    def wrong(self: Work, *arguments: Any) -> Any:
        (optimizer,) = self.optimizers
        right = getattr(optimizer, method)
        setattr(optimizer, method, (lambda: None) if method == "zero_grad" else (lambda: (right(), right())))
        try:
            return begin(self, *arguments)
        finally:
            delattr(optimizer, method)

    monkeypatch.setattr(Work, "_begin_stepping", wrong)
    with pytest.raises(AssertionError):
        compare_with_by_hand("cpu", sgd)


def test_the_comparison_finds_an_engine_that_draws_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = facts.fingerprints

    def wrong(*arguments: Any) -> Any:
        torch.rand(1)
        return fingerprints(*arguments)

    monkeypatch.setattr(facts, "fingerprints", wrong)
    with pytest.raises(AssertionError):
        compare_with_by_hand("cpu", sgd)


def test_of_all_optimizers_of_torch_only_one_is_refused() -> None:
    assert set(of_torch()) - set(OPTIMIZERS) == {"LBFGS"}


def test_warnings_are_errors_in_these_tests() -> None:
    """Or the tests that expect none would pass whatever happens."""
    with pytest.raises(errors.FrozenParameterWarning):
        warnings.warn("planted", errors.FrozenParameterWarning, stacklevel=1)
