"""What people have comes in by `bring`: it trains as by hand, to the bit, and keeps nothing of the run.

The parts with the real Lightning and with transformers are skipped where those are not installed; what they
show is shown with modules of the same shape everywhere.
"""

from __future__ import annotations

import gc
import inspect
import json
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tools.modules import HOOKS, NOT_OURS, Labelled, accuracy, classifier, pair_of_nets
from tools.small import (
    BACKENDS,
    batches,
    engine,
    failed,
    finished,
    left_clean,
    net,
    run,
    same,
    seeded,
    values,
)
from torch import nn

import interlock as il
from interlock import bringing_emulation, errors
from interlock import bringing_table as table
from interlock.bringing import Brought, bring
from interlock.fused import fuse

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def installed(name: str) -> Any:
    """A package, imported before any test looks at the process; `None` where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return __import__(name)
        except ImportError:
            return None


lightning = installed("lightning.pytorch")
transformers = installed("transformers")
installed(
    "accelerate.scheduler"
)  # which transformers loads at its first model, and which adds a filter of warnings
needs_lightning = pytest.mark.skipif(lightning is None, reason="lightning is not installed")
needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")
BASES = [
    pytest.param(nn.Module, id="nn.Module"),
    pytest.param(lightning and lightning.pytorch.LightningModule, id="Lightning", marks=needs_lightning),
]
on_each_base = pytest.mark.parametrize("base", BASES)


def quietly(module: Any, **more: Any) -> Brought:
    return bring(module, quiet=True, **more)


def built(changes: dict[str, Any], base: type[nn.Module] = nn.Module) -> Any:
    """A classifier with some methods exchanged or added."""
    return seeded(type("Changed", (classifier(base),), changes))


# It trains as by hand


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.01)


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def warm(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    first, then = schedulers.ConstantLR(optimizer, 0.3, 2), schedulers.ExponentialLR(optimizer, 0.5)
    return schedulers.SequentialLR(optimizer, [first, then], [2])


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)


def by_hand(model: Any, make: Any, schedule: Any, every: str, data: Any, held_out: Any, epochs: int) -> Any:
    """The loop that everybody writes; the validation metrics of each epoch."""
    optimizer = make(model)
    fuse(optimizer)
    scheduler = schedule(optimizer) if schedule else None
    seen = []
    for _ in range(epochs):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler and every == "step":
                scheduler.step()
        sizes = [len(y) for _, y in held_out]
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), y).item() for x, y in held_out]
            right = [accuracy(model(x), y).item() for x, y in held_out]
        means = [
            sum(v * n for v, n in zip(found, sizes, strict=True)) / sum(sizes) for found in (losses, right)
        ]
        seen.append(dict(zip(("val_loss", "val_acc"), means, strict=True)))
        if scheduler and every == "epoch":
            scheduler.step(*[means[0]] if schedule is plateau else [])
    return seen


@on_each_backend
@on_each_base
@given(
    make=st.sampled_from([sgd, adamw]),
    schedule=st.sampled_from([None, decay, warm, plateau]),
    every=st.sampled_from(["step", "epoch"]),
    epochs=st.integers(1, 3),
)
def test_trains_as_by_hand_to_the_bit(
    backend: str, base: Any, make: Any, schedule: Any, every: str, epochs: int
) -> None:
    every = "epoch" if schedule is plateau else every

    def configure_optimizers(self: Any) -> Any:
        optimizer = make(self)
        if schedule is None:
            return optimizer
        found = {"scheduler": schedule(optimizer), "interval": every, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": found}

    changes = {"configure_optimizers": configure_optimizers}
    data, held_out = batches(3), [*batches(1, 3, seed=5), *batches(1, 6, seed=6)]
    theirs, ours = built(changes), built(changes, base)
    seen = by_hand(theirs, make, schedule, every, data, held_out, epochs)
    outcome = run(backend, quietly(ours), data, validate=held_out, epochs=epochs)
    assert finished(outcome) is ours
    assert same(values(ours), values(theirs))
    reported = [report.metrics for report in outcome.reports if "val_loss" in report.metrics]
    assert reported == [pytest.approx(metrics, rel=1e-6) for metrics in seen]


@on_each_backend
@on_each_base
def test_manual_optimization_trains_as_by_hand_to_the_bit(backend: str, base: Any) -> None:
    ours, theirs = seeded(pair_of_nets(base)), seeded(pair_of_nets())
    assert finished(run(backend, quietly(ours), batches())) is ours
    one = torch.optim.SGD(theirs.one.parameters(), 0.1)
    two = torch.optim.Adam(theirs.two.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(one, 2, 0.5)
    fuse(one), fuse(two)
    for x, y in batches():
        for mine, optimizer in ((theirs.one, one), (theirs.two, two)):
            loss = F.cross_entropy(theirs.two(torch.tanh(theirs.one(x))), y)
            optimizer.zero_grad()
            gradients = torch.autograd.grad(loss, list(mine.parameters()))
            for parameter, gradient in zip(mine.parameters(), gradients, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
    assert same(values(ours), values(theirs))


@on_each_backend
def test_an_optimizer_that_evaluates_the_loss_itself(backend: str) -> None:
    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    ours, theirs = (built({"configure_optimizers": configure_optimizers}) for _ in range(2))
    outcome = run(backend, quietly(ours), batches(2))
    finished(outcome)
    optimizer = theirs.configure_optimizers()
    for x, y in batches(2):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(theirs(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert same(values(ours), values(theirs))


@on_each_backend
def test_a_model_that_computes_its_loss(backend: str) -> None:
    ours, theirs = seeded(Labelled), seeded(Labelled)
    data = [{"x": x, "labels": y} for x, y in batches()]
    outcome = run(backend, quietly(ours, optimizer=torch.optim.AdamW, lr=0.01), data, validate=data)
    assert finished(outcome) is ours
    assert outcome.metrics["val_loss"] > 0
    optimizer = torch.optim.AdamW(theirs.parameters(), 0.01)
    fuse(optimizer)
    for batch in data:
        optimizer.zero_grad()
        theirs(**batch).loss.backward()
        optimizer.step()
    assert same(values(ours), values(theirs))


@on_each_backend
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, nn.CrossEntropyLoss(), F.cross_entropy])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"x": x}])
def test_a_pair_trains_as_by_hand_to_the_bit(backend: str, criterion: Any, wrap: Callable[..., Any]) -> None:
    ours, theirs = net(), net()
    data = [(wrap(x), y) for x, y in batches()]
    brought = quietly((ours, criterion), optimizer=torch.optim.SGD, lr=0.1, options=[il.ClipNorm(0.5)])
    assert finished(run(backend, brought, data)) is ours
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    fuse(optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    assert same(values(ours), values(theirs))


@needs_transformers
@on_each_backend
def test_a_model_of_transformers(backend: str) -> None:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ours, theirs = (seeded(lambda: transformers.BertForSequenceClassification(config)) for _ in range(2))
    for model in (ours, theirs):
        model.train()
    data = seeded(
        lambda: [
            {"input_ids": torch.randint(0, 30, (3, 7)), "labels": torch.randint(0, 2, (3,))} for _ in range(4)
        ]
    )
    outcome = run(backend, quietly(ours, optimizer=torch.optim.AdamW, lr=1e-3), data, validate=data)
    assert finished(outcome) is ours
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3)
    fuse(optimizer)
    for batch in data:
        optimizer.zero_grad()
        theirs(**batch).loss.backward()
        optimizer.step()
    assert same(values(ours), values(theirs))


# The hooks


def noting(names: Any, said: list[str]) -> dict[str, Any]:
    """Hooks that note their names."""

    def hook(name: str) -> Any:
        def noted(self: Any, *arguments: Any, **_: Any) -> Any:
            said.append(name)
            return arguments[0] if name == "on_after_batch_transfer" else None

        return noted

    return {name: hook(name) for name in names}


ONCE = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
STEP = ["on_after_batch_transfer", "on_train_batch_start", *ONCE, "on_train_batch_end"]
CHECK = ["on_after_batch_transfer", "on_validation_batch_start", "on_validation_batch_end"]
EPOCH = ["on_train_epoch_start", *STEP, *STEP, *CHECK]
ORDER = [
    *("prepare_data", "setup", "configure_model", "on_fit_start", "on_train_start"),
    *(*EPOCH, *EPOCH),
]


@on_each_base
def test_hooks_are_called_in_the_order_of_lightning(base: Any) -> None:
    said: list[str] = []
    module = built(noting(table.CALLED, said), base)
    finished(run("cpu", quietly(module), batches(2), validate=batches(1), epochs=2))
    assert said == ORDER


@needs_lightning
def test_lightning_itself_calls_them_in_that_order_and_trains_the_same(tmp_path: Any) -> None:
    said: list[str] = []
    base = lightning.pytorch.LightningModule
    theirs, ours = built(noting(table.CALLED, said), base), built({}, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.pytorch.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        loaders = [torch.utils.data.DataLoader(data, batch_size=None) for data in (batches(2), batches(1))]
        trainer.fit(theirs, *loaders)
    assert said == ORDER
    outcome = run("cpu", quietly(ours), batches(2), validate=batches(1), epochs=2)
    finished(outcome)
    for name, value in values(theirs).items():
        assert torch.allclose(values(ours)[name], value, atol=1e-6), name  # theirs is not fused
    assert outcome.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)


def test_hooks_are_called_in_manual_optimization() -> None:
    said: list[str] = []
    kind = pair_of_nets()
    for name, hook in noting(table.CALLED, said).items():
        setattr(kind, name, hook)
    finished(run("cpu", quietly(seeded(kind)), batches(1)))
    of_one = ["on_before_backward", "on_after_backward", "on_before_optimizer_step"]
    assert said == [
        *ORDER[: ORDER.index("on_before_zero_grad")],
        *(["on_before_zero_grad", *of_one] * 2),
        "on_train_batch_end",
    ]


@pytest.mark.parametrize("name", [name for name in HOOKS if name not in NOT_OURS])
def test_each_name_is_in_one_column(name: str) -> None:
    assert len(table.columns_of(name)) == 1


def test_what_the_table_says_is_emulated_is_there() -> None:
    assert bringing_emulation.NAMESPACE.keys() == table.GIVEN.keys()


@needs_lightning
def test_the_names_are_those_of_lightning() -> None:
    core = lightning.pytorch.LightningModule
    hooks = lightning.pytorch.core.hooks
    there = {
        name
        for kind in (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert there <= set(HOOKS)
    assert [name for name in HOOKS if not hasattr(core, name)] == []


@pytest.mark.parametrize("name", sorted(table.NO_PLACE))
def test_a_hook_that_would_never_be_called_is_found(name: str) -> None:
    module = built({name: lambda self, *arguments: None})
    with pytest.raises(errors.TaskError, match=f"{name} would never be called") as found:
        quietly(module)
    assert f"waive=['{name}']" in str(found.value)
    waived = quietly(module, waive=[name])
    assert waived.table.names("never called") == (name,)
    assert f"waived: {table.NO_PLACE[name]}" in str(waived.table)


def test_a_hook_on_the_module_itself_is_found() -> None:
    module = built({})
    module.on_train_end = print
    with pytest.raises(errors.TaskError, match="on_train_end would never be called"):
        quietly(module)


def test_what_fit_calls_nowhere_needs_no_waiver() -> None:
    brought = quietly(built({name: lambda self, *arguments: None for name in table.ELSEWHERE}))
    assert set(brought.table.names("never called")) == set(table.ELSEWHERE)


def test_a_waiver_for_nothing_is_refused() -> None:
    with pytest.raises(errors.TaskError, match="'on_fit_end' is waived and needs no waiver"):
        quietly(built({}), waive=["on_fit_end"])
    with pytest.raises(errors.TaskError, match="has no hooks"):
        quietly((net(), F.cross_entropy), optimizer=sgd, waive="on_fit_end")


@needs_lightning
def test_what_lightning_defines_in_a_module_of_its_own_is_seen() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    found = quietly(seeded(BoringModel)).table
    assert set(found.names("used")) >= {"training_step", "configure_optimizers", "train_dataloader"}
    assert "test_step" in found.names("never called")
    outcome = engine("cpu").fit(quietly(seeded(BoringModel)), batches_of_32())
    assert outcome.optimizers["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)


def batches_of_32() -> list[torch.Tensor]:
    return seeded(lambda: [torch.randn(2, 32) for _ in range(3)])


# The table


@on_each_base
def test_the_table(base: Any, capsys: pytest.CaptureFixture[str]) -> None:
    brought = bring(built({"on_train_start": lambda self: None, "test_step": print}, base))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{brought.table}\n"
    assert isinstance(brought, il.Task)
    plain = json.loads(json.dumps(brought.table.as_dict()))
    assert plain["module"] == "Changed"
    assert list(plain["used"]) == ["forward", "training_step", "validation_step", "configure_optimizers"]
    assert list(plain["emulated"]) == ["on_train_start", "log", "log_dict", "current_epoch", "global_step"]
    assert list(plain["never called"]) == ["test_step"]
    assert plain["waived"] == []
    columns = {
        line.index(row.note) for line, row in zip(said.err.splitlines()[1:], brought.table.rows, strict=True)
    }
    assert len(columns) == 1


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quietly(built({}))
    assert capsys.readouterr().err == ""


# Nothing stays


def look(module: nn.Module) -> dict[str, Any]:
    """What a module has, by identity."""
    return {"class": type(module), **{name: id(value) for name, value in vars(module).items()}}


class Broken(Exception):
    """Raised by a test."""


def breaks(*_: Any) -> Any:
    raise Broken


ENDS = {
    "finished": {},
    "training_step": {
        "training_step": lambda self, batch, number: self.log("x", self(batch[0]).sum()) or breaks()
    },
    "validation_step": {"validation_step": breaks},
    "on_after_backward": {"on_after_backward": breaks},
    "on_train_batch_end": {"on_train_batch_end": breaks},
}


@on_each_backend
@on_each_base
@pytest.mark.parametrize("end", ENDS)
def test_the_module_is_as_it_was(backend: str, base: Any, end: str) -> None:
    module = built(ENDS[end], base)
    before = look(module)
    brought = quietly(module)
    assert look(module) == before
    outcome = run(backend, brought, validate=batches(1))
    assert look(module) == before
    if end == "finished":
        finished(outcome)
    else:
        failed(outcome, Broken)
    with pytest.raises((AttributeError, RuntimeError, errors.TaskError)):
        _ = module.trainer
    again = run(backend, quietly(module), validate=batches(1))  # it may be brought again
    assert again.status == outcome.status
    left_clean(again)


def test_what_is_left_on_a_module_is_seen() -> None:
    module = built({})
    before = look(module)
    module.left = 1
    assert look(module) != before
    del module.left
    module.hits = list(module.hits)
    assert look(module) != before


@on_each_backend
def test_a_refused_optimizer_with_a_scheduler_leaves_nothing(backend: str) -> None:
    made: list[weakref.ref[Any]] = []

    def configure_optimizers(self: Any) -> Any:
        parameters = list(self.parameters())[: 2 if made else None]
        optimizer = torch.optim.SGD(parameters, 0.1)
        made.append(weakref.ref(optimizer))
        return [optimizer], [warm(optimizer)]

    brought = quietly(built({"configure_optimizers": configure_optimizers}))
    failed(run(backend, brought), errors.MissingParameter, "optimizing")
    assert [ref() for ref in made] == [None, None]
    assert brought.table.module == "Changed"  # it lives, and does not keep the optimizer


def test_an_optimizer_that_the_module_keeps_is_not_kept_from_before_placement() -> None:
    def configure_optimizers(self: Any) -> Any:
        self.mine = torch.optim.SGD(self.parameters(), 0.1)
        return self.mine

    module = built({"configure_optimizers": configure_optimizers})
    quietly(module)
    assert "mine" not in vars(module)


def test_everything_is_freed_by_reference_counting() -> None:
    gc.collect()
    gc.disable()
    try:
        module = built({})
        held = weakref.ref(module)
        outcome = run("double", quietly(module), validate=batches(1))
        finished(outcome)
        optimizer = weakref.ref(outcome.optimizers["optimizer"])
        del module, outcome
        assert held() is None
        assert optimizer() is None
    finally:
        gc.enable()


def test_a_class_that_an_interrupt_has_left_is_put_back() -> None:
    module = built({})
    own = type(module)
    step = own.training_step
    left: list[Any] = []
    own.training_step = lambda self, *arguments: left.append(type(self)) or step(self, *arguments)
    finished(run("cpu", quietly(module), batches(1)))
    assert left[0] is not own
    module.__class__ = left[0]
    quietly(module)
    assert type(module) is own


def test_two_runs_at_once_are_refused() -> None:
    module = built({})
    brought = quietly(module)
    with engine("cpu").open(brought) as created:
        created.place()
        with pytest.raises(errors.RunInUse):
            quietly(module)
        failed(run("cpu", brought), errors.RunInUse)
    finished(run("cpu", quietly(module)))


# What configure_optimizers returns


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


def with_scheduler(model: Any, **settings: Any) -> Any:
    optimizer = optimizer_of(model)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay(optimizer), **settings}}


FORMS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "optimizer": (optimizer_of, 0.1),
    "list": (lambda m: [optimizer_of(m)], 0.1),
    "tuple": (lambda m: (optimizer_of(m),), 0.1),
    "two lists": (lambda m: [[o := optimizer_of(m)], [decay(o)]][0:2], 0.1 * 0.7**2),
    "two lists, no scheduler": (lambda m: ([optimizer_of(m)], []), 0.1),
    "two lists, configuration": (
        lambda m: ([o := optimizer_of(m)], [{"scheduler": decay(o), "interval": "step"}]),
        0.1 * 0.7**6,
    ),
    "dictionary": (lambda m: {"optimizer": optimizer_of(m)}, 0.1),
    "dictionary, scheduler": (
        lambda m: {"optimizer": (o := optimizer_of(m)), "lr_scheduler": decay(o)},
        0.049,
    ),
    "dictionary, configuration": (lambda m: with_scheduler(m, interval="step", name="x"), 0.1 * 0.7**6),
    "tuple of dictionaries": (lambda m: (with_scheduler(m, strict=True),), 0.049),
}


@on_each_backend
@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_is_documented(backend: str, form: str) -> None:
    returned, rate = FORMS[form]
    outcome = run(backend, quietly(built({"configure_optimizers": returned})), batches(3), epochs=2)
    finished(outcome)
    assert outcome.optimizers["optimizer"].param_groups[0]["lr"] == pytest.approx(rate)


def plateau_of(model: Any, **settings: Any) -> Any:
    optimizer = optimizer_of(model)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau(optimizer), **settings}}


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters())


REFUSED: dict[str, tuple[Callable[[Any], Any], bool, str]] = {
    "None": (lambda m: None, False, "returned None, so nothing would train"),
    "nothing": (lambda m: [], False, "with nothing where a torch.optim.Optimizer is due"),
    "foreign": (lambda m: [optimizer_of(m), 3], False, "with int where"),
    "several": (lambda m: [optimizer_of(m), optimizer_of(m)], False, "returned 2 optimizers"),
    "no optimizer": (lambda m: {"lr_scheduler": 1}, False, "has no 'optimizer'"),
    "misspelt": (lambda m: {"optimizer": optimizer_of(m), "schedule": 1}, False, r"also has \['schedule'\]"),
    "no scheduler": (lambda m: ([optimizer_of(m)], [{"interval": "step"}]), False, "has no 'scheduler'"),
    "setting": (lambda m: with_scheduler(m, often=2), False, r"has \['often'\], which mean nothing"),
    "interval": (lambda m: with_scheduler(m, interval="day"), False, "must be 'step' or 'epoch'"),
    "frequency": (lambda m: with_scheduler(m, frequency=2), False, "'frequency' of ExponentialLR is 2"),
    "two schedulers": (
        lambda m: ([o := optimizer_of(m)], [decay(o), decay(o)]),
        False,
        "of an optimizer that has one already",
    ),
    "foreign scheduler": (
        lambda m: ([optimizer_of(m)], [decay(optimizer_of(m))]),
        False,
        "of none of its optimizers",
    ),
    "not a scheduler": (lambda m: ([optimizer_of(m)], [3]), False, "which has no `step`"),
    "monitor": (plateau_of, False, "say which by 'monitor'"),
    "each step": (lambda m: plateau_of(m, monitor="x", interval="step"), False, "not known after each step"),
    "plateau by hand": (lambda m: plateau_of(m, monitor="x"), True, "not known within a step"),
    "closure by hand": (lbfgs, True, "evaluates the loss itself"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_before_placement(case: str) -> None:
    returned, manual, says = REFUSED[case]
    changes = {"configure_optimizers": returned, "automatic_optimization": not manual}
    with pytest.raises(errors.TaskError, match=says):
        quietly(built(changes))


def test_another_form_on_the_placed_model_is_refused() -> None:
    calls: list[int] = []

    def configure_optimizers(self: Any) -> Any:
        calls.append(1)
        return optimizer_of(self) if len(calls) == 1 else with_scheduler(self)

    brought = quietly(built({"configure_optimizers": configure_optimizers}))
    assert "the same kind of thing each time" in str(failed(run("double", brought), errors.TaskError))


# What the steps do


def step_that(*does: Callable[[Any, Any], Any]) -> dict[str, Any]:
    def training_step(self: Any, batch: Any, number: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        for one in does:
            one(self, loss)
        return loss

    return {"training_step": training_step}


WRONG_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "None": ({"training_step": lambda self, batch: None}, "returned None, to leave the batch out"),
    "no loss": ({"training_step": lambda self, batch: {"logits": 1}}, "a mapping without 'loss'"),
    "number": ({"training_step": lambda self, batch: 1.0}, "it returned float"),
    "skip": ({"on_train_batch_start": lambda self, batch, number: -1}, "returned -1"),
    "twice": (step_that(*[lambda m, v: m.log("a", v)] * 2), "'a' was logged twice"),
    "shape": (step_that(lambda m, v: m.log("a", torch.zeros(2))), r"got shape \[2\]"),
    "kind": (step_that(lambda m, v: m.log("a", "b")), "got str"),
    "metric": (
        step_that(lambda m, v: m.log("a", Largest())),
        "got Largest: log what it returns for this batch",
    ),
    "no name": (step_that(lambda m, v: m.log(1, 2)), "takes a name first"),
    "reduced": (step_that(lambda m, v: m.log("a", v, reduce_fx="max")), "averaged, and nothing else"),
    "weight": (step_that(lambda m, v: m.log("a", v, batch_size=-1)), "a whole number from 0"),
    "other loss": (step_that(lambda m, v: m.log("loss", v * 2)), "log it under another name"),
    "trainer": (step_that(lambda m, v: m.trainer.max_epochs), r"`self.trainer.max_epochs` is not emulated"),
    "optimizers": (step_that(lambda m, v: m.optimizers()), "is for manual optimization"),
    "nothing logged": ({"validation_step": lambda self, batch: None}, "validation_step logged nothing"),
    "one name": (
        {"validation_step": lambda self, batch: self.log("acc", 1) or self.log("val_acc", 1)},
        "are one name in validation",
    ),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_a_step_that_cannot_be_used(case: str) -> None:
    changes, says = WRONG_STEPS[case]
    error = failed(run("double", quietly(built(changes)), validate=batches(1)), errors.TaskError)
    assert says.replace("\\", "") in str(error)


def test_what_a_module_asks_of_itself() -> None:
    seen: list[Any] = []

    def asks(self: Any, _: Any) -> None:
        trainer = self.trainer
        seen.append((self.device.type, self.global_rank, self.local_rank, trainer.is_global_zero))
        seen.append((trainer.current_epoch, trainer.global_step, trainer.training, trainer.validating))
        self.print("said", end="")

    outcome = run("cpu", quietly(built(step_that(asks))), batches(2))
    finished(outcome)
    assert seen[::2] == [("cpu", 0, 0, True)] * 2
    assert seen[1::2] == [(0, 0, True, False), (0, 1, True, False)]


def test_a_loss_in_a_mapping_and_logged_as_loss() -> None:
    def training_step(self: Any, batch: Any) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("number", 2)
        return {"loss": loss, "more": 1}

    outcome = run("double", quietly(built({"training_step": training_step})))
    finished(outcome)
    assert set(outcome.metrics) == {"loss", "number"}
    assert outcome.metrics["number"] == 2


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4))
def test_validation_weighs_by_batch_size(sizes: list[tuple[int, int]]) -> None:
    weights = iter([weight for _, weight in sizes])

    def validation_step(self: Any, batch: Any) -> None:
        value = batch[0].mean()
        self.log("val_loss", value)
        self.log("other", value, batch_size=next(weights))

    data = [batches(1, size, seed=size)[0] for size, _ in sizes]
    outcome = run("cpu", quietly(built({"validation_step": validation_step})), batches(1), validate=data)
    if not any(weight for _, weight in sizes):
        failed(outcome, errors.DataError)
        return
    finished(outcome)
    means = [x.mean().item() for x, _ in data]
    for name, place in (("val_loss", 0), ("val_other", 1)):
        total = sum(size[place] for size in sizes)
        wanted = sum(mean * size[place] for mean, size in zip(means, sizes, strict=True)) / total
        assert outcome.metrics[name] == pytest.approx(wanted, rel=1e-5, abs=1e-7)


class Largest:
    """A metric object, as those of torchmetrics are."""

    def __init__(self) -> None:
        self.reset()

    def __call__(self, values: torch.Tensor) -> Largest:
        self.found = max(self.found, values.max().item())
        return self

    def compute(self) -> float:
        return self.found

    def reset(self) -> None:
        self.found = -1e9


@on_each_backend
def test_each_validation_begins_anew(backend: str) -> None:
    numbers: list[int] = []
    largest = Largest()

    def validation_step(self: Any, batch: Any, number: int) -> None:
        numbers.append(number)
        self.log("largest", largest(batch[0]))

    brought = quietly(built({"validation_step": validation_step}))
    data = batches(2)
    outcome = run(backend, brought, data, validate=data, epochs=2)
    finished(outcome)
    alone = [engine(backend).evaluate(brought, data[:1])["largest"] for _ in range(2)]
    assert numbers == [0, 1, 0, 1, 0, 0]
    assert outcome.metrics["val_largest"] == max(x.max().item() for x, _ in data)
    assert alone == [data[0][0].max().item()] * 2


def test_the_data_of_the_module() -> None:
    changes = {"train_dataloader": lambda self: batches(2), "val_dataloader": lambda self: batches(1)}
    outcome = engine("cpu").fit(quietly(built(changes), epochs=2))
    assert outcome.steps == 4
    assert "val_acc" in outcome.metrics
    several = {"train_dataloader": lambda self: [torch.utils.data.DataLoader(batches(2))] * 2}
    with pytest.raises(errors.TaskError, match="train_dataloader returned several loaders"):
        engine("cpu").fit(quietly(built(several)))


def test_validation_data_without_a_validation_step() -> None:
    kind = classifier()
    del kind.validation_step
    error = failed(run("cpu", quietly(seeded(kind)), validate=batches(1)), errors.TaskError)
    assert "has no validation_step" in str(error)
    metrics = quietly(seeded(kind), metrics=lambda model, batch: {"acc": accuracy(model(batch[0]), batch[1])})
    assert "val_acc" in run("cpu", metrics, validate=batches(1)).metrics


# Manual optimization that goes wrong


def by_itself(does: Callable[[Any, Any, Any], Any]) -> dict[str, Any]:
    def training_step(self: Any, batch: Any) -> None:
        does(self, self.optimizers(), F.cross_entropy(self(batch[0]), batch[1]))

    return {"training_step": training_step, "automatic_optimization": False}


def all_of(*_: Any) -> None:
    """Does the calls that its arguments have done."""


WRONG_ORDERS: dict[str, tuple[Callable[[Any, Any, Any], Any], type[Exception], str]] = {
    "no backward": (lambda m, o, v: all_of(o.zero_grad(), o.step()), errors.IllegalTransition, "update"),
    "twice": (
        lambda m, o, v: all_of(o.zero_grad(), m.manual_backward(v), o.step(), o.step()),
        errors.IllegalTransition,
        "update",
    ),
    "zeroed in between": (
        lambda m, o, v: all_of(o.zero_grad(), m.manual_backward(v), o.zero_grad()),
        errors.IllegalTransition,
        "zero",
    ),
    "past the handle": (
        lambda m, o, v: all_of(o.zero_grad(), m.manual_backward(v), o.optimizer.step()),
        errors.DirectUpdate,
        "past the step handle",
    ),
    "closure": (lambda m, o, v: o.step(lambda: v), errors.TaskError, "step(closure) cannot be checked"),
    "no loss": (lambda m, o, v: None, errors.TaskError, "neither returned a loss nor called"),
    "by value": (lambda m, o, v: m.clip_gradients(o, 1.0, "value"), errors.TaskError, "clips by 'norm'"),
    "another's": (
        lambda m, o, v: m.toggle_optimizer(3),
        errors.TaskError,
        "int is no optimizer of this module",
    ),
    "detached": (
        lambda m, o, v: all_of(o.zero_grad(), m.manual_backward(v.detach())),
        errors.LossError,
        "graph",
    ),
}


@on_each_backend
@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_a_wrong_order_in_manual_optimization(backend: str, case: str) -> None:
    does, kind, says = WRONG_ORDERS[case]
    assert says in str(failed(run(backend, quietly(built(by_itself(does)))), kind, "training"))


LEGAL = {
    ("clean", "zero"): "clean",
    ("clean", "backward"): "gathered",
    ("gathered", "backward"): "gathered",
    ("gathered", "step"): "spent",
    ("spent", "zero"): "clean",
}
"""State of an optimizer's gradients, and what is done -> its state then; everything else is illegal."""


@given(st.lists(st.sampled_from(["zero", "backward", "step"]), min_size=1, max_size=6))
def test_manual_optimization_goes_as_far_as_its_order_is_legal(words: list[str]) -> None:
    done: list[str] = []

    def training_step(self: Any, batch: Any) -> Any:
        loss = torch.zeros(())
        for word in words:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            optimizer = self.optimizers()
            {"zero": optimizer.zero_grad, "step": optimizer.step}.get(
                word, lambda loss=loss: self.manual_backward(loss)
            )()
            done.append(word)
        return loss

    module = built({"training_step": training_step, "automatic_optimization": False})
    outcome = run("cpu", quietly(module), batches(1))
    state, legal = "clean", 0
    for word in words:
        state = LEGAL.get((state, word), "")
        if not state:
            break
        legal += 1
    assert done == words[:legal]
    if legal < len(words):
        failed(outcome, errors.IllegalTransition, "training")
    else:
        finished(outcome)


@on_each_backend
def test_toggled_parameters_train_again_after_a_fault(backend: str) -> None:
    kind = pair_of_nets()

    def training_step(self: Any, batch: Any) -> None:
        with self.toggled_optimizer(self.optimizers()[1]):
            assert [p.requires_grad for p in self.parameters()] == [False, False, True, True]
        self.toggle_optimizer(self.optimizers()[0])
        raise Broken

    kind.training_step = training_step
    module = seeded(kind)
    failed(run(backend, quietly(module)), Broken)
    assert all(p.requires_grad for p in module.parameters())


def test_of_which_optimizer_is_asked() -> None:
    kind = pair_of_nets()
    kind.training_step = lambda self, batch: self.manual_backward(self.two(self.one(batch[0])).sum())
    assert "for which optimizer?" in str(failed(run("cpu", quietly(seeded(kind))), errors.TaskError))


def test_a_handle_is_of_its_step() -> None:
    kept: list[Any] = []

    def training_step(self: Any, batch: Any) -> Any:
        kept.append(self.optimizers())
        kept[0].zero_grad()
        self.manual_backward(loss := F.cross_entropy(self(batch[0]), batch[1]))
        kept[0].step()
        return loss

    finished(
        run(
            "cpu",
            quietly(built({"training_step": training_step, "automatic_optimization": False})),
            batches(1),
        )
    )
    for does in (kept[0].step, kept[0].zero_grad, lambda: kept[0].param_groups):
        with pytest.raises(errors.StaleHandle, match="of one step"):
            does()


# What cannot be brought


CANNOT: dict[str, tuple[Callable[[], Any], str]] = {
    "plain": (lambda: quietly(net()), "is no shape that bring knows"),
    "function": (lambda: quietly(net), "a pair of a module and a criterion, and got"),
    "class": (lambda: quietly(nn.Linear), "got the class Linear"),
    "no optimizer": (lambda: quietly(Labelled()), "does not say how it is optimized"),
    "built optimizer": (lambda: quietly(Labelled(), optimizer=sgd(net())), "optimizer is a SGD"),
    "option": (lambda: quietly(Labelled(), optimizer=torch.optim.SGD, rate=1), "SGD cannot be built with"),
    "field": (lambda: quietly(Labelled(), optimizer=sgd, lr=1), "are no fields of a task"),
    "criterion": (
        lambda: quietly((net(), nn.CrossEntropyLoss(torch.ones(3))), optimizer=sgd),
        "has tensors of its own",
    ),
    "no criterion": (lambda: quietly((net(), 3), optimizer=sgd), "criterion is a int"),
    "two optimizers": (lambda: quietly(built({}), optimizer=sgd), "let one of the two say"),
    "loss": (lambda: quietly(built({}), loss=F.cross_entropy), "loss: that is what"),
    "options": (lambda: quietly(built({}), options=[il.ClipNorm(1.0)]), "options are woven"),
    "hooks and closure": (
        lambda: quietly(built({"configure_optimizers": lbfgs, "on_after_backward": breaks})),
        "on_after_backward of Changed would never be called",
    ),
    "scheduler": (lambda: quietly(built({}), scheduler=decay), "scheduler: that is what"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_brought(case: str) -> None:
    does, says = CANNOT[case]
    with pytest.raises(errors.TaskError, match=says):
        does()


def test_batches_that_do_not_fit() -> None:
    labelled = quietly(Labelled(), optimizer=torch.optim.SGD, lr=0.1)
    assert "as keywords" in str(failed(run("cpu", labelled), errors.TaskError))
    unlabelled = [{"x": x} for x, _ in batches()]
    assert "do the batches have labels" in str(failed(run("cpu", labelled, unlabelled), errors.TaskError))
    pair = quietly((net(), F.cross_entropy), optimizer=sgd)
    assert "batches (inputs, targets)" in str(
        failed(run("cpu", pair, [x for x, _ in batches()]), errors.TaskError)
    )
