"""Step options: a set is refused with the conflict named, or trains as a plainly right loop does, to the bit.

Lines of the public reports on order that are covered here: a scheduler that moves on although the scaler
skipped the update (`test_schedulers_move_with_real_updates`), clip before unscale and unscale twice (no
program says so: `test_the_comparison_finds_planted_faults` shows that it would be seen), a last, shorter
window weighted wrongly and batches of different token counts averaged as equals
(`test_a_window_is_one_big_batch`).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tools import reference
from tools.small import (
    BACKENDS,
    Net,
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
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, lr_scheduler

import interlock as il
from interlock import errors
from interlock.fused import fuse
from interlock.specs.model import Automaton
from interlock.steps.option import Parts, Running
from interlock.steps.precision import finite
from interlock.weaving import Block, Line, after, before

both = pytest.mark.parametrize("backend", BACKENDS)
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each new thread would else start OpenMP's pool anew, which takes ten times as long as the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Planned(Exception):
    pass


# -- what is drawn --------------------------------------------------------------------------------


def grouped(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    return Adam([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.01, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda m: SGD(m.parameters(), 0.1),
    "momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda m: AdamW(m.parameters(), 0.01),
    "groups": grouped,
    "foreach": lambda m: Adam(m.parameters(), 0.01, foreach=True, amsgrad=True),
    "Adagrad": lambda m: Adagrad(m.parameters(), 0.05),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "epoch": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


def tokens(batch: Batch) -> int:
    """How many labels of a batch count."""
    return int((batch[1] >= 0).sum())


@dataclass(frozen=True)
class Case:
    """A set of options, and what is trained with it."""

    window: int = 1
    by_tokens: bool = False
    clip: float | None = None
    half: str = ""
    init_scale: float = 2.0**16
    growth_interval: int = 2000
    schedule: str = ""
    optimizer: str = "SGD"
    sizes: tuple[int, ...] = (3, 3, 3, 3)
    epochs: int = 1
    validates: bool = False
    order: int = 0
    backend: str = "cpu"

    @property
    def options(self) -> list[il.Option]:
        found: list[il.Option] = []
        if self.window > 1:
            found.append(il.Accumulate(self.window, weigh=tokens if self.by_tokens else None))
        if self.clip is not None:
            found.append(il.ClipNorm(self.clip))
        if self.half:
            half: Any = self.half
            found.append(il.Precision(half, init_scale=self.init_scale, growth_interval=self.growth_interval))
        turn = self.order % max(len(found), 1)
        return found[turn:] + found[:turn]

    @property
    def plan(self) -> reference.Plan:
        settings = {name: getattr(self, name) for name in ("window", "clip", "half", "schedule", "epochs")}
        settings |= {"init_scale": self.init_scale, "growth_interval": self.growth_interval}
        return reference.Plan(**settings, **({"weigh": tokens} if self.by_tokens else {}))

    @property
    def data(self) -> list[Batch]:
        def make() -> list[Batch]:
            found = [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for size in self.sizes]
            for number, (_, labels) in enumerate(found):
                labels[1 : 1 + number % 3] = -100  # padding: it does not count
            return found

        return seeded(make, 7)


CASES = st.builds(
    Case,
    window=st.integers(1, 4),
    by_tokens=st.booleans(),
    clip=st.none() | st.sampled_from([0.1, 1.0, float("inf")]),
    half=st.sampled_from(["", "", "bf16", "fp16", "fp16"]),
    init_scale=st.sampled_from([2.0**8, 2.0**18, 2.0**20]),
    growth_interval=st.sampled_from([1, 2, 2000]),
    schedule=st.sampled_from(["", *SCHEDULERS]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9).map(tuple),
    epochs=st.integers(1, 2),
    validates=st.booleans(),
    order=st.integers(0, 2),
    backend=st.sampled_from(BACKENDS),
)


# -- the comparison ---------------------------------------------------------------------------------


@dataclass
class Seen:
    """All that is compared."""

    weights: Any = None
    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __sub__(self, other: Seen) -> list[str]:
        """In what the two differ."""
        return [name for name, value in vars(self).items() if not same(value, getattr(other, name))]


def noting(
    build: Callable[[nn.Module], Optimizer], rates: list[list[float]]
) -> Callable[[nn.Module], Optimizer]:
    """The optimizer function, noting the learning rates of each update."""

    def optimizer(model: nn.Module) -> Optimizer:
        built = build(model)
        built.register_step_pre_hook(
            lambda one, *_: rates.append([group["lr"] for group in one.param_groups])
        )
        return built

    return optimizer


def by_engine(case: Case, **settings: Any) -> tuple[Seen, il.Outcome]:
    """As the engine trains."""
    seen = Seen()
    what = task(
        optimizer=noting(OPTIMIZERS[case.optimizer], seen.rates),
        options=case.options,
        scheduler=SCHEDULERS.get(case.schedule),
        scheduler_every="step" if case.schedule == "step" else "epoch",
        scheduler_metric="loss",
    )
    looked = batches(2, seed=3) if case.validates else None
    outcome = run(case.backend, what, case.data, epochs=case.epochs, validate=looked, report_every=1)
    seen.weights = values(finished(outcome))
    assert outcome.optimizer is not None
    seen.rates.append([group["lr"] for group in outcome.optimizer.param_groups])
    for report in outcome.reports:
        found = report.metrics
        for name, kept in (
            ("loss", seen.losses),
            ("grad_norm", seen.norms),
            ("skipped_updates", seen.skipped),
            ("scale", seen.scales),
        ):
            kept.extend([found[name]] if name in found else [])
    return seen, outcome


def by_reference(case: Case, fault: reference.Fault = "") -> Seen:
    """As the plain loop trains."""
    seen = Seen()
    model = net()
    optimizer = noting(OPTIMIZERS[case.optimizer], seen.rates)(model)
    fuse(optimizer)
    scheduler = SCHEDULERS[case.schedule](optimizer) if case.schedule else None
    plan = replace(case.plan, fault=fault)
    trained = reference.train(model, loss_of, optimizer, scheduler, case.data, plan)
    seen.rates.append([group["lr"] for group in optimizer.param_groups])
    seen.weights, seen.losses, seen.norms = values(model), trained.losses, trained.norms
    if case.half == "fp16":
        seen.skipped, seen.scales = trained.skipped, trained.scales
    return seen


# A scheduler that moves after each epoch may do so before the first real update: torch warns of that.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@given(case=CASES)
def test_each_set_of_options_trains_as_the_plain_loop(case: Case):
    seen, _ = by_engine(case)
    assert seen - by_reference(case) == []


HARD = Case(
    window=3,
    by_tokens=True,
    clip=0.05,
    half="fp16",
    init_scale=2.0**18,
    growth_interval=3,
    schedule="step",
    optimizer="momentum",
    sizes=(5, 2, 6, 3, 4, 1, 5, 3, 2, 6, 4),
    epochs=2,
    validates=True,
)
"""A set in which each mistake shows."""


@both
def test_all_options_together(backend: str):
    case = replace(HARD, backend=backend)
    seen, outcome = by_engine(case)
    assert seen - by_reference(case) == []
    assert 0 < outcome.metrics["skipped_updates"] < outcome.steps
    assert len(seen.losses) == outcome.steps == 8


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("tail", "losses"),
        ("equal", "losses"),
        ("schedule", "rates"),
        ("clip", "weights"),
        ("twice", "weights"),
    ],
)
def test_the_comparison_finds_planted_faults(fault: reference.Fault, shows: str):
    seen, _ = by_engine(HARD)
    assert shows in seen - by_reference(HARD, fault)


@both
def test_schedulers_move_with_real_updates(backend: str):
    """Not with steps: some of them were skipped, and are counted."""
    case = replace(HARD, backend=backend, optimizer="SGD")
    seen, outcome = by_engine(case)
    real = outcome.steps - int(outcome.metrics["skipped_updates"])
    assert len(seen.rates) == real + 1
    assert seen.rates[-1][0] == pytest.approx(0.1 * 0.8**real)
    assert seen.skipped == sorted(seen.skipped)


# -- what is refused ----------------------------------------------------------------------------------

ONES: dict[str, Callable[[], il.Option]] = {
    "accumulate": lambda: il.Accumulate(2),
    "clip": lambda: il.ClipNorm(1.0),
    "precision": lambda: il.Precision("bf16"),
    "scale": lambda: il.Precision("fp16"),
}


@both
@given(names=st.lists(st.sampled_from([*ONES]), min_size=1, max_size=5))
def test_a_set_with_a_conflict_is_refused_with_the_conflict_named(backend: str, names: list[str]):
    twice = {name for name in names if names.count(name) > 1}
    several = {"precision", "scale"} <= {*names}
    built: list[nn.Module] = []
    what = task(model=lambda: built.append(net()) or built[-1], options=[ONES[name]() for name in names])
    if not twice and not several:
        finished(run(backend, what, batches(4)))
        return
    with pytest.raises(errors.ProgramError) as caught:
        run(backend, what)
    for name in twice:
        assert f"option '{name}' is there twice: give it once" in caught.value.problems
    assert any("one precision is enough" in problem for problem in caught.value.problems) == several
    assert not built


@pytest.mark.parametrize(
    "wrong",
    [
        *(lambda w=w: il.Accumulate(w) for w in (1, 0, -2, 2.0, True, None)),
        lambda: il.Accumulate(2, weigh=3),  # type: ignore[arg-type]
        *(lambda b=b: il.ClipNorm(b) for b in (0, -1.0, float("nan"), "1", None, True)),
        lambda: il.ClipNorm(1.0, norm=0),
        *(lambda p=p: il.Precision(p) for p in ("fp8", None, torch.bfloat16)),
        *(lambda s=s: il.Precision("fp16", init_scale=s) for s in (0, -1.0, float("nan"), "1")),
        *(lambda g=g: il.Precision("fp16", growth_interval=g) for g in (0, 1.5, None)),
    ],
)
def test_a_wrong_setting_is_refused_at_once(wrong: Callable[[], il.Option]):
    with pytest.raises(errors.TaskError, match=r"got|pass a function"):
        wrong()


@both
@pytest.mark.parametrize("weights", [(0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_a_window_that_counts_nothing_is_refused(backend: str, weights: tuple[float, float]):
    given = iter(weights)
    what = task(options=[il.Accumulate(2, weigh=lambda _: next(given))])
    failed(run(backend, what, batches(2)), errors.DataError, "training")


# -- a window is one big batch --------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("count", range(1, 8))
def test_a_window_is_one_big_batch(count: int, window: int, by_tokens: bool):
    """For each (number of batches, window), the last window included, with batches of unequal sizes."""
    case = Case(sizes=(5, 1, 4, 2, 6, 3, 2)[:count])
    data = [(x.double(), y if by_tokens else y.clamp(min=0)) for x, y in case.data]
    found: list[list[torch.Tensor]] = []

    def still(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), 0.0)
        optimizer.register_step_pre_hook(lambda *_: found.append(gradients_of(model)))
        return optimizer

    option = il.Accumulate(window, weigh=tokens if by_tokens else None)
    outcome = run(
        "cpu", task(model=lambda: net().double(), optimizer=still, options=[option]), data, report_every=1
    )
    finished(outcome)

    windows = [data[start : start + window] for start in range(0, count, window)]
    assert len(found) == len(windows) == outcome.steps
    for gradients, report, parts in zip(found, outcome.reports, windows, strict=True):
        model = net().double()
        loss = loss_of(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        loss.backward()
        torch.testing.assert_close(gradients, gradients_of(model), rtol=1e-12, atol=1e-14)
        assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)


# -- an option from outside -------------------------------------------------------------------------------


class Noise(il.Option):
    """Adds noise to the gradients, once in each window, before they are clipped or used."""

    name = "noise"
    events = ("noise",)
    bindings: Mapping[str, str] = {"noise": "noise(): add some to each gradient"}
    follows = frozenset({"scale", "accumulate"})
    automata = (
        Automaton(
            "noise",
            "quiet",
            {
                ("quiet", "backward"): "open",
                ("open", "backward"): "open",
                ("open", "noise"): "noisy",
                ("noisy", "update"): "quiet",
                ("open", "skip"): "quiet",
                ("noisy", "skip"): "quiet",
            },
            "noise once, after the last backward and before the update",
        ),
    )

    def weave(self, program: Block) -> Block:
        return before(program, "update", Line("noise()", ("noise",)))

    def begin(self, parts: Parts) -> Running:
        count: list[int] = []

        def noise() -> None:
            count.append(1)
            for group in parts.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad += 0.25

        return Running({"noise": noise}, metrics=lambda: {"noisy": float(len(count))})


@both
def test_an_option_from_outside(backend: str):
    outcome = run(backend, task(options=[Noise(), il.ClipNorm(1.0), il.Accumulate(2)]), batches(5))
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    fuse(optimizer)
    data = batches(5)
    for window in (data[:2], data[2:4], data[4:]):
        optimizer.zero_grad()
        for batch in window:
            (loss_of(model, batch) * (1 / len(window))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.25
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert same(values(finished(outcome)), values(model))
    assert outcome.metrics["noisy"] == 3


class Late(Noise):
    """Woven in where its own automaton does not allow it."""

    def weave(self, program: Block) -> Block:
        return after(program, "updated", Line("noise()", ("noise",)))


class Silent(Noise):
    """Fires an event that it does not declare."""

    events = ()


class Hidden(Noise):
    """Says that its line fires nothing."""

    def weave(self, program: Block) -> Block:
        return before(program, "update", Line("noise()"))


class Second(Noise):
    """Lets the optimizer update a second time."""

    def weave(self, program: Block) -> Block:
        return before(super().weave(program), "noise", Line("apply()"))


class Forgetful(Noise):
    """Does not give what its lines use."""

    def begin(self, parts: Parts) -> Running:
        return Running()


@both
@pytest.mark.parametrize("lie", [Late, Silent, Hidden, Second])
def test_an_option_that_lies_is_refused_before_the_run(backend: str, lie: type[il.Option]):
    built: list[nn.Module] = []
    with pytest.raises(errors.ProgramError):
        run(backend, task(model=lambda: built.append(net()) or built[-1], options=[lie()]))
    assert not built


@both
def test_an_option_that_gives_too_little_is_refused_before_the_first_step(backend: str):
    error = failed(run(backend, task(options=[Forgetful()])), errors.ProgramError, "optimizing")
    assert "'noise' is not bound: noise(): add some to each gradient" in str(error)


# -- half precision -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("half", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_evaluation_computes_in_the_same_precision(backend: str, half: Any, dtype: torch.dtype):
    seen: list[tuple[bool, torch.dtype]] = []

    class Watched(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append((self.training, out.dtype))
            return out

    def metrics(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"right": (model(batch[0]).argmax(1) == batch[1]).float().mean()}

    what = task(model=Watched, metrics=metrics, options=[il.Precision(half)])
    outcome = run(backend, what, batches(2), validate=batches(1))
    model = finished(outcome)
    assert set(seen) == {(True, dtype), (False, dtype)}
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = F.cross_entropy(model.eval()(batches(1)[0][0]), batches(1)[0][1])
    assert outcome.metrics["val_loss"] == pytest.approx(expected.item(), rel=1e-6)


def autocast_state() -> list[Any]:
    """All that `torch.autocast` changes on this thread; its nesting is read by going one further and back."""
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    kinds = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return [nesting, kinds, torch.is_autocast_cache_enabled()]


@both
@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [Planned, KeyboardInterrupt])
def test_a_fault_inside_of_autocast_leaves_it_as_it_was(backend: str, half: Any, kind: type[BaseException]):
    before = autocast_state()

    def breaks(model: nn.Module, batch: Batch) -> Any:
        assert torch.is_autocast_enabled("cpu")
        raise kind

    with pytest.raises(kind):
        engine(backend).fit(task(loss=breaks, options=[il.Precision(half)]), batches())
    assert autocast_state() == before


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_an_interrupt_in_the_lines_of_autocast_leaves_it_as_it_was(half: Any):
    """At each of its lines, on the way in and out, in training and in validation."""
    what = task(options=[il.Precision(half)])

    def fit(nth: int) -> int:
        """Interrupted at the nth line; how many there are."""
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
            il.Engine("cpu").fit(what, batches(1), validate=batches(1))
        except KeyboardInterrupt:
            assert passed[0] == nth
        finally:
            sys.settrace(before)
        return passed[0]

    before = autocast_state()
    lines = fit(0)
    assert lines > 30
    for nth in range(1, lines + 1):
        fit(nth)
        assert autocast_state() == before, nth


def test_the_private_parts_of_torch_are_what_they_were():
    """A canary: what `finite` reads of the scaler, and the list of devices with fused kernels."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    assert {"cpu", "cuda"} <= {*_get_fused_kernels_supported_devices()}
    for broken in (False, True):
        parameter = nn.Parameter(torch.ones(2))
        optimizer, scaler = SGD([parameter], 0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(parameter.sum() * (float("inf") if broken else 1.0)).backward()
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert list(found) == [torch.device("cpu")]
        assert [one.item() for one in found.values()] == [float(broken)]
        assert finite(scaler, optimizer) is not broken
        scaler.update()
        assert scaler.get_scale() == (1.0 if broken else 2.0)


# -- nothing is left ----------------------------------------------------------------------------------


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


EVERYTHING = replace(HARD, init_scale=2.0**10)
AT = {"the first batch": 1, "the second of a window": 2, "a later window": 8}


@both
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("half", ["", "bf16", "fp16"])
def test_nothing_of_a_step_is_alive_while_the_caller_keeps_its_error(backend: str, at: str, half: str):
    seen: list[weakref.ref[Any]] = []
    calls: list[int] = []

    def breaks(model: nn.Module, batch: Batch) -> Any:
        calls.append(1)
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        twice = [loss * 2]
        seen.extend(map(weakref.ref, (out, loss, *twice)))
        if backend == "double":
            seen.extend(weakref.ref(p) for p in model.parameters())
            seen.extend(weakref.ref(p.grad) for p in model.parameters() if p.grad is not None)
        if len(calls) == AT[at]:
            raise Planned
        return loss

    options = replace(EVERYTHING, half=half).options
    with no_collector():
        outcome = run(backend, task(loss=breaks, options=options, scheduler=SCHEDULERS["step"]), HARD.data)
        error = failed(outcome, Planned, "training")
        assert isinstance(error, Planned)
        assert len(calls) == AT[at]
        assert [one() for one in seen if one() is not None] == []


def test_a_suspended_option_holds_nothing_on_the_device():
    """Norms are numbers by then, and the scaler has no tensors; what is reported and computed is the same."""

    def made(suspends: bool) -> list[Any]:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        parts = Parts(model, optimizer, lambda batch: len(batch[0]), "cpu")
        clip, scale = il.ClipNorm(0.1).begin(parts), il.Precision("fp16", growth_interval=1).begin(parts)
        for batch in batches(4):
            scale.bindings["scale"](loss_of(model, batch)).backward()
            scale.bindings["unscale"]()
            assert scale.bindings["finite"]()
            clip.bindings["clip"]()
            scale.bindings["rescale"]()
            for running in (clip, scale):
                assert running.suspend is not None
                if suspends:
                    running.suspend()
            if suspends:
                assert not clip.bindings["clip"].__self__._norms
                assert scale.bindings["scale"].__self__._scaler._scale is None
        assert clip.metrics is not None
        assert scale.metrics is not None
        return [clip.metrics(), scale.metrics(), gradients_of(model)]

    assert same(made(True), made(False))


def test_many_runs_with_options_stay_flat():
    """30 runs, every third one failing, without the garbage collector."""
    runs, counts = 30, []

    def once(number: int) -> None:
        def loss(model: nn.Module, batch: Batch) -> Any:
            if number % 3 == 0 and torch.is_grad_enabled() and len(batch[0]) == 1:
                raise Planned
            return loss_of(model, batch)

        what = task(
            loss=loss, optimizer=OPTIMIZERS["AdamW"], options=EVERYTHING.options, scheduler=SCHEDULERS["step"]
        )
        outcome = run(BACKENDS[number % 2], what, HARD.data)
        assert (outcome.error is None) == (number % 3 != 0)

    once(0), once(1)
    with no_collector():
        for number in range(runs):
            once(number)
            counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert max(counts) == counts[0], counts
