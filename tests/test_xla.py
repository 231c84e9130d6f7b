"""The backends `xla` and `tpu` where neither can run, and the engine's part of a lazy device.

What a real XLA device does is in tests/xla (`make test-xla`), what can be said of a TPU in tests/sim.
"""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.runs import environment
from tools.small import batches, failed, finished, left_clean, loss_of, net, task, values
from torch.utils._python_dispatch import TorchDispatchMode

import interlock as il
from interlock import progress
from interlock.backends import tpu, xla_calls
from interlock.backends.adapter import Adapter, DeviceFacts
from interlock.backends.contract import AdapterContract
from interlock.backends.double import ReplacingDouble
from interlock.backends.errors import DeviceInUse, DeviceUnavailable
from interlock.backends.monitors import XLA
from interlock.backends.registry import AUTO, adapter_class, monitor
from interlock.backends.tpu import TpuAdapter
from interlock.backends.xla import XlaAdapter
from interlock.backends.xla_calls import Counted
from interlock.cli import main
from interlock.driver import Position
from interlock.holding import Holding
from interlock.program import step_program
from interlock.specs import TRAINING, check, compose
from interlock.steps.accumulate import Accumulate
from interlock.steps.clip import ClipNorm

# Where they cannot run


def test_the_registry_has_them_and_auto_takes_neither() -> None:
    assert adapter_class("xla") is XlaAdapter
    assert adapter_class("tpu") is TpuAdapter
    assert not {"xla", "tpu"} & set(AUTO)
    assert monitor("tpu").name == "tpu"
    for name in ("xla", "tpu"):
        assert check(compose(TRAINING, monitor(name))).proved


@pytest.mark.parametrize(
    ("spec", "installed", "torch_version", "says"),
    [
        (None, "", "2.13.0", "not installed"),
        (True, "2.9.0", "2.9.1+cpu", ""),
        (True, "2.9.0", "2.13.0", "torch-xla 2.9.0 needs torch 2.9, and this is torch 2.13.0"),
        (True, None, "2.13.0", ""),  # built from source
    ],
)
def test_xla_says_why_it_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, spec: Any, installed: str | None, torch_version: str, says: str
) -> None:
    def version(_: str) -> str:
        if installed is None:
            raise xla_calls.PackageNotFoundError
        return installed

    monkeypatch.setattr(xla_calls, "find_spec", lambda _: spec)
    monkeypatch.setattr(xla_calls, "version", version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    assert says in XlaAdapter.unavailable()
    assert bool(XlaAdapter.unavailable()) == bool(says)


@pytest.mark.parametrize(
    ("spec", "torch_version", "loaded", "sees", "says"),
    [
        (None, "2.13.0", False, False, "not installed"),
        (True, "2.9.1", False, False, "needs torch 2.11 or newer"),
        (True, "2.13.0", False, False, "was not loaded"),
        (True, "2.13.0", True, False, "sees no TPU"),
        (True, "2.13.0", True, True, ""),
    ],
)
def test_tpu_says_why_it_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, spec: Any, torch_version: str, loaded: bool, sees: bool, says: str
) -> None:
    monkeypatch.setattr(tpu, "find_spec", lambda _: spec)
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: sees)
    if loaded:
        monkeypatch.setattr(torch, "tpu", SimpleNamespace(), raising=False)
    assert says in TpuAdapter.unavailable()
    assert bool(TpuAdapter.unavailable()) == bool(says)


def test_the_tpus_generator_is_asked_by_what_torch_tpu_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `get_rng_state` raises on this torch, for whoever is not torch itself."""
    generator = torch.Generator()
    theirs = SimpleNamespace(default_generators=(generator,))
    monkeypatch.setattr(torch, "get_device_module", lambda device: theirs)
    calls = tpu.Calls()
    calls.seed(3)
    assert generator.initial_seed() == 3
    before = calls.random_state()
    drawn = torch.rand(2, generator=generator)
    calls.set_random_state(before)
    assert torch.equal(torch.rand(2, generator=generator), drawn)


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_without_it_a_run_is_refused_with_the_reason(name: str) -> None:
    reason = adapter_class(name).unavailable()
    if not reason:
        pytest.skip(f"{name} can run here")
    outcome = il.Engine(name).start(task(), batches(1)).wait(60)
    assert reason in str(failed(outcome, DeviceUnavailable, "acquiring"))


def test_describing_proving_and_drawing_them_imports_neither(capsys: pytest.CaptureFixture[str]) -> None:
    body = """
import json, sys
from interlock.cli import main
for name in ("xla", "tpu"):
    main(["check", "--backend", name])
    main(["graph", "--backend", name, "-o", "/dev/null", "--format", "dot"])
main(["doctor"])
import interlock as il
for name in ("xla", "tpu"):
    il.Engine(name)
for name in ("cpu", "cuda", "mps", "double", "sim"):
    from interlock.backends.registry import adapter_class
    adapter_class(name)
theirs = ("torch_xla", "_XLAC", "torch_tpu")
print(json.dumps([name for name in sys.modules if name.partition(".")[0] in theirs]))
"""
    done = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_doctor_says_of_both_whether_they_are_there_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    for name in ("xla", "tpu"):
        assert rows[name]["adapter"]
        assert rows[name]["proved"]
        assert rows[name]["why"] == adapter_class(name).unavailable()


# What the adapter decides, with answers in the place of torch_xla


class Answers:
    """Counts as torch_xla would, and has no device."""

    spmd = False

    def __init__(self) -> None:
        self.now = Counted(0, 10, 1.0, 0)

    def begin(self) -> DeviceFacts:
        return DeviceFacts(torch.device("xla", 0), "XLA on CPU")

    def counted(self) -> Counted:
        return self.now

    def programs(self) -> int:
        return self.now.programs

    def next_number(self) -> int:
        return 1

    def cut(self) -> None:
        return

    def random_state(self) -> int:
        return 5

    def set_random_state(self, state: int) -> None:
        assert state == 5

    def wait(self) -> None:
        return

    def compile(self, seconds: float) -> None:
        self.now = Counted(self.now.live, self.now.programs + 1, self.now.seconds + seconds, self.now.reads)


def measured(*compiled: int, cuts: int = 10, reads: int = 0) -> tuple[str, ...]:
    """The remarks of a run in which programs were compiled in these steps."""
    adapter, answers = XlaAdapter(), Answers()
    adapter.calls = answers  # type: ignore[assignment]
    adapter._take()
    for cut in range(1, cuts + 1):
        if cut in compiled:
            answers.compile(0.5)
        adapter.cut(cut)
    answers.compile(0.25)
    adapter.cut()  # an evaluation's is due whenever it comes
    answers.now = Counted(0, answers.now.programs, answers.now.seconds, reads)
    assert adapter._measure() == ()
    return adapter.remarks()


def test_compilations_are_counted_and_late_ones_explained() -> None:
    assert measured(1, 2) == ("ran as XLA on CPU", "XLA compiled 3 programs in 1.2 s")
    several = measured(1, 2, 4, 5, 6, 7, 8, 9)
    assert "as late as in step 4, 5, 6, 7, 8 and 1 more, for 3.0 s" in several[2]


def test_what_was_compiled_before_a_pause_counts_as_well() -> None:
    adapter, answers = XlaAdapter(), Answers()
    adapter.calls = answers  # type: ignore[assignment]
    adapter._take()
    answers.compile(1.0)
    adapter.cut(1)
    assert adapter._measure() == ()
    adapter._take()  # the device was lent out, and is taken again
    answers.compile(2.0)
    adapter.cut(2)
    assert adapter._measure() == ()
    assert "XLA compiled 2 programs in 3.0 s" in adapter.remarks()
    adapter._take()  # by another run
    assert adapter._measure() == ()
    assert adapter.remarks() == ("ran as XLA on CPU",)


def test_values_that_were_read_are_counted() -> None:
    assert "in its place, 7 times" in measured(1, reads=7)[-1]


def test_what_nobody_can_see_is_left_of_an_unknown_size() -> None:
    adapter, answers = XlaAdapter(), Answers()
    adapter.calls = answers  # type: ignore[assignment]
    answers.now = Counted(4, 10, 1.0, 0)
    adapter._take()
    assert adapter._measure() == ()
    answers.now = Counted(6, 10, 1.0, 0)
    left = adapter._measure()
    assert left is not None
    assert [one.nbytes for one in left] == [1, 1]
    assert "graph" in left[0].origin


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (RuntimeError("INTERNAL: Core halted unexpectedly: INTERNAL: Accelerator device halted"), True),
        (RuntimeError("UNAVAILABLE: Socket closed"), False),  # a loader's, perhaps
        (RuntimeError("cannot lock /data/shard-3: device or resource busy"), False),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"), False),
        (RuntimeError("mm(): cannot matrix-multiply tensors"), False),
        (ValueError("Core halted unexpectedly"), False),
    ],
)
def test_a_dead_tpu_is_known_by_what_it_says(error: Exception, dead: bool) -> None:
    assert bool(XlaAdapter().loss(error)) == dead
    assert bool(TpuAdapter().loss(error)) == dead


# The engine on a device that only traces


class Lazy(ReplacingDouble):
    """A double on which a value may be read after a cut only, before anything else is computed."""

    name = "lazy double"
    monitor = XLA
    lazy = True

    def __init__(self) -> None:
        super().__init__()
        self.traced = False
        self.read_early: list[str] = []
        self.cuts = 0
        self.steps: list[int] = []

    def session(self) -> Any:
        return _Tracing(self)

    def _cut(self, step: int) -> None:
        self.cuts += 1
        self.steps.append(step)
        self.traced = False

    def _sync(self) -> None:
        self.traced = False

    def read(self, tensors: Any) -> list[float]:
        assert not self.traced
        with torch._C._DisableTorchDispatch():
            return [float(tensor) for tensor in tensors]


class _Tracing(TorchDispatchMode):
    """Notes what is computed with tensors of the device, and what reads one."""

    def __init__(self, adapter: Lazy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._adapter = adapter

    def __enter__(self) -> Any:
        self._adapter.ledger.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._adapter.ledger.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        adapter = self._adapter
        given = [one for one in args if isinstance(one, torch.Tensor)]
        there = any(adapter.resident(tensor) for tensor in given)
        if there and "_local_scalar_dense" in str(func):
            adapter.read_early.append(str(func))
        if there and "detach" not in str(func):
            adapter.traced = True
        return func(*args, **(kwargs or {}))


class TestLazy(AdapterContract):
    tolerance = 0.0

    def make_adapter(self) -> Adapter:
        return Lazy()


@pytest.mark.parametrize("window", [1, 3])
def test_nothing_is_read_in_a_step_and_each_micro_batch_is_cut(window: int) -> None:
    adapter = Lazy()
    options: list[Any] = [ClipNorm(1.0), *([Accumulate(window)] if window > 1 else [])]
    what = task(
        options=options,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        metrics=lambda model, batch: {"right": (model(batch[0]).argmax(1) == batch[1]).float().mean()},
    )
    outcome = il.Engine(adapter, report_every=2).fit(what, batches(4 * window), validate=batches(2), epochs=2)
    left_clean(outcome)
    assert adapter.read_early == []
    first = 1  # of what the optimizer function may have computed
    assert adapter.cuts == first + 2 * (4 * window + 2)
    assert adapter.steps[first : first + window + 1] == [1] * window + [2]
    assert {"loss", "grad_norm", "val_loss", "val_right"} <= set(outcome.metrics)


def test_a_loss_that_is_no_number_is_found_right_after_the_first_step() -> None:
    adapter = Lazy()
    outcome = (
        il.Engine(adapter)
        .start(task(loss=lambda model, batch: loss_of(model, batch) * float("nan")), batches(2))
        .wait(60)
    )
    failed(outcome, il.errors.NonFiniteLoss)
    assert adapter.cuts == 2  # before the first step, and after it
    assert adapter.read_early == []


def test_the_program_of_a_lazy_device_ends_each_micro_batch_with_a_cut() -> None:
    assert "sync()" in step_program(XLA).source
    inner = step_program(XLA, options=[Accumulate(2)]).source
    assert inner.count("sync()") == 2  # within the loop, and after the update


def test_steps_by_hand_are_cut_before_the_next_forward_pass_and_at_the_end() -> None:
    told: list[tuple[str, int]] = []
    adapter = Lazy()

    def step(step: il.Stepper, batch: Any) -> torch.Tensor:
        step.zero()
        loss = torch.zeros(())
        for part in range(2):
            model = step.model
            told.append((f"forward {part}", adapter.cuts))
            loss = loss_of(model, (batch[0][part::2], batch[1][part::2]))
            step.backward(loss)
        step.update()
        told.append(("updated", adapter.cuts))
        return loss

    outcome = il.Engine(adapter).fit(task(step=step, loss=None), batches(2, 4))
    left_clean(outcome)
    assert told == [
        *(("forward 0", 0), ("forward 1", 1), ("updated", 1)),
        *(("forward 0", 2), ("forward 1", 3), ("updated", 3)),
    ]
    here = il.Engine("cpu").fit(task(step=step, loss=None, model=net), batches(2, 4)).model
    assert here is not None
    trained = values(finished(outcome))
    assert all(torch.equal(trained[name], tensor) for name, tensor in values(here).items())


def test_a_forward_pass_without_a_look_at_the_model_is_cut_as_well() -> None:
    adapter = Lazy()

    def step(step: il.Stepper, batch: Any) -> torch.Tensor:
        model = step.model
        step.zero()
        for _ in range(3):
            loss = loss_of(model, batch)
            step.backward(loss)
        step.update()
        return loss

    left_clean(il.Engine(adapter).fit(task(step=step, loss=None), batches(1)))
    assert adapter.cuts == 3


def test_in_a_snapshot_a_compilation_is_told_from_the_users_code() -> None:
    seen: list[str] = []

    class Slow(Lazy):
        def _cut(self, step: int) -> None:
            super()._cut(step)
            seen.append(run.snapshot().doing)

    run = il.Engine(Slow()).start(task(), batches(2))
    left_clean(run.wait(60))
    assert all("compiling, or beginning a program, for " in one for one in seen)
    assert len(seen) == 3


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_update_is_done_when_its_program_was_begun_and_not_before(tmp_path: Path, by_hand: bool) -> None:
    class Fails(Lazy):
        def _cut(self, step: int) -> None:
            if step == 3:
                raise RuntimeError("planted: the program cannot be compiled")
            super()._cut(step)

    def step(step: il.Stepper, batch: Any) -> torch.Tensor:
        step.zero()
        loss = loss_of(step.model, batch)
        step.backward(loss)
        step.update()
        return loss

    what = task(step=step, loss=None) if by_hand else task()
    keep = il.Checkpoints(tmp_path)
    outcome = il.Engine(Fails()).start(what, batches(5), checkpoints=keep).wait(60)
    failed(outcome, RuntimeError)
    assert ("updating", "fail") in [(entry.source, entry.event) for entry in outcome.history]
    assert "rescue" not in [entry.event for entry in outcome.history]
    assert outcome.steps == 2


def test_a_rescue_runs_what_was_traced_first(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if adapter.cuts == 4:
            raise ValueError("planted")
        return loss_of(model, batch)

    adapter = Lazy()
    keep = il.Checkpoints(tmp_path)
    outcome = il.Engine(adapter).start(task(loss=loss), batches(5), checkpoints=keep).wait(60)
    failed(outcome, ValueError)
    events = [entry.event for entry in outcome.history]
    assert "rescued" in events
    assert adapter.cuts == 5
    assert adapter.read_early == []


def test_gradients_of_a_broken_off_step_are_dropped_before_the_device_is_waited_for() -> None:
    seen: list[bool] = []

    class Waits(Lazy):
        def _sync(self) -> None:
            seen.append(any(parameter.grad is not None for parameter in model.parameters()))
            super()._sync()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss_of(model, batch).backward()
        raise ValueError("planted")

    model = net()
    failed(il.Engine(Waits()).start(task(model=model, loss=loss), batches(1)).wait(60), ValueError)
    assert seen == [False]


def test_a_second_run_at_the_same_time_is_refused_where_work_is_cut_for_the_whole_process() -> None:
    other = XlaAdapter()
    with pytest.raises(DeviceInUse, match="cannot share it"):
        _both_take(other, XlaAdapter())


def _both_take(one: XlaAdapter, other: XlaAdapter) -> None:
    for adapter in (one, other):
        adapter.calls = Answers()  # type: ignore[assignment]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(XlaAdapter, "unavailable", classmethod(lambda _: ""))
            one.acquire()
            other.acquire()
    finally:
        one.free()


def test_a_checkpoint_of_a_device_without_a_generator_can_be_resumed_on_one_with(tmp_path: Path) -> None:
    class Random(ReplacingDouble):
        def random_state(self) -> torch.Tensor | None:
            return torch.zeros(3)

    for first, second in ((ReplacingDouble, Random), (Random, ReplacingDouble)):
        folder = il.Checkpoints(tmp_path / first.__name__, every_epochs=1)
        il.Engine(first()).fit(task(), batches(2), checkpoints=folder)
        outcome = il.Engine(second()).fit(task(), batches(2), epochs=2, checkpoints=folder, resume=True)
        left_clean(outcome)
        assert outcome.steps == 4
        assert any("of another kind of device" in note for note in outcome.notes)


def test_the_progress_says_that_it_compiles_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Slow(Lazy):
        def _cut(self, step: int) -> None:
            super()._cut(step)
            if step == 2:
                run.position.cutting -= 72.5  # as if it had begun then
                lines.append("  ".join(shown._parts(1, None)))
                shown._say(0, 1)

    monkeypatch.setattr(progress, "_live", lambda render: None)
    monkeypatch.setattr(progress.Progress, "_line", lambda self, text: lines.append(text))
    session = SimpleNamespace(
        position=Position(), plan=None, driver=SimpleNamespace(phase="training"), task=task(), served=None
    )
    monkeypatch.setattr(progress, "_length", lambda session: 0)
    shown = progress.Progress(session, 1)  # type: ignore[arg-type]
    run = session
    adapter = Slow()
    holding = SimpleNamespace(_position=run.position, _adapter=adapter)
    for step in (0, 1):
        run.position.step = step
        Holding._cut(holding, step + 1)  # type: ignore[arg-type]
    shown.stop()
    assert [line for line in lines if "compiling 1:12" in line] == lines[-2:]
    assert run.position.cutting == 0.0


def test_exit_policies_where_placement_makes_new_parameters() -> None:
    for policy in ("keep", "discard"):
        adapter = Lazy()
        outcome = il.Engine(adapter, exit=policy).fit(task(), batches(2))  # type: ignore[arg-type]
        left_clean(outcome)


def test_the_extras_are_not_installed_here_by_accident() -> None:
    """Otherwise the tests above would skip what they are for."""
    found = importlib.machinery.PathFinder.find_spec("torch_xla")
    assert (found is None) == ("not installed" in XlaAdapter.unavailable())
