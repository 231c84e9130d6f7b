"""The `cuda` adapter: what it decides, on any machine; what it does, where there is an NVIDIA GPU.

Where there is none, `tools.pretended` answers the calls, and the tests marked `cuda` are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools import cuda_check, lives
from tools.aftermath import aftermath
from tools.lives import ERRORS, Life, live, points_of, without_collector
from tools.pretended import LEDGER, PretendedCuda, segment
from tools.runs import TASK, command, environment
from tools.small import batches, net, same, task, values
from torch import nn

import interlock as il
from interlock.backends import device
from interlock.backends.adapter import Adapter, Leftover
from interlock.backends.contract import AdapterContract
from interlock.backends.cuda import LOSSES, CudaAdapter, out_of_memory
from interlock.backends.cuda_calls import HUGE, TINY, Calls, way_of
from interlock.backends.cuda_memory import LISTED, blocks, held_report, since
from interlock.backends.errors import DeviceInUse, DeviceLost, DeviceUnavailable
from interlock.backends.faults import inject
from interlock.backends.registry import adapter_class

GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What the first use of a GPU opens stays open until the process ends, and is nobody's leak."""
    if GPU:
        il.Engine("cuda").fit(task(), batches())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def latch() -> Iterator[None]:
    """A device that a test pretends to have lost is there again for the next test."""
    before = dict(device._lost)
    yield
    device._lost.clear()
    device._lost.update(before)


def accelerator_error(code: int | None, text: str = "CUDA error: device-side assert triggered") -> Exception:
    """As PyTorch raises it."""
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


def cuda_error(text: str) -> Exception:
    """As `torch.cuda.check_error` raises it; its constructor asks CUDA for the text."""
    error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)
    RuntimeError.__init__(error, text)
    return error


class TestPretended(AdapterContract):
    def make_adapter(self) -> Adapter:
        return PretendedCuda()


@pytest.mark.cuda
class TestCuda(AdapterContract):
    def make_adapter(self) -> Adapter:
        return CudaAdapter()


# Before a run


def child(script: str) -> str:
    """What a Python of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_describing_it_initialises_nothing() -> None:
    script = """
import torch
from interlock.backends.registry import AUTO, adapter_class, monitor
for name in ("cuda", "mps"):
    adapter = adapter_class(name)()
    print(adapter.name, monitor(name).name, repr(adapter.unavailable())[:1], adapter.device)
    adapter.actions(), adapter.releases(), adapter.random_state()
    with adapter.session():
        adapter.free()
adapter_class("auto")
print(torch.cuda.is_initialized())
"""
    assert child(script).splitlines() == ["cuda cuda ' cuda:0", "mps mps ' mps:0", "False"]


def test_the_registry_knows_no_numbers_but_says_how() -> None:
    assert adapter_class("cuda") is CudaAdapter
    with pytest.raises(il.errors.UnknownName, match=r"CUDA_VISIBLE_DEVICES, or pass .*CudaAdapter\(1\)"):
        adapter_class("cuda:1")


@pytest.mark.parametrize("index", [-1, 1.0, "cuda:1", None, True])
def test_an_index_is_a_whole_number(index: Any) -> None:
    with pytest.raises(DeviceUnavailable, match="is 0, 1, "):
        CudaAdapter(index)


def test_auto_takes_the_best_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaAdapter, "unavailable", classmethod(lambda cls: ""))
    assert il.Engine("auto").backend == "cuda"
    monkeypatch.setattr(CudaAdapter, "unavailable", classmethod(lambda cls: "broken"))
    assert il.Engine("auto").backend == "cpu"


@pytest.mark.parametrize(
    ("compiled", "forked", "count", "says"),
    [
        (False, False, 0, "built without CUDA: install a build with CUDA"),
        (True, True, 1, "start it with the method 'spawn'"),
        (True, False, 0, "no NVIDIA GPU with a driver, or CUDA_VISIBLE_DEVICES hides it"),
        (True, False, 2, ""),
    ],
)
def test_it_says_why_it_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, forked: bool, count: int, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: compiled)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: forked)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert CudaAdapter.unavailable().endswith(says)
    assert bool(CudaAdapter.unavailable()) == bool(says)


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_a_run_is_refused_with_the_reason() -> None:
    outcome = il.Engine("cuda").start(task(), batches()).wait(60)
    assert (outcome.status, outcome.verdict, outcome.residue.bytes) == ("failed", "clean", 0)
    assert type(outcome.error) is DeviceUnavailable
    assert str(outcome.error).startswith("backend 'cuda' cannot be used here: ")
    assert CudaAdapter.unavailable() in str(outcome.error)
    assert "'cpu' always works" in str(outcome.error)


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_the_command_line_says_so(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(TASK)
    done = command("fit", "train.py:task", "--backend", "cuda", "--no-progress", cwd=tmp_path)
    assert done.returncode == 1
    assert "backend 'cuda' cannot be used here" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there_is_refused() -> None:
    outcome = il.Engine(PretendedCuda(2)).start(task(), batches()).wait(60)
    assert type(outcome.error) is DeviceUnavailable
    assert "no device 'cuda:2': 2 can be seen" in str(outcome.error)


# How tensors travel


@pytest.mark.parametrize(
    ("tensor", "way"),
    [
        (torch.zeros(TINY // 4), "queue"),
        (torch.zeros(TINY // 4 + 1), "stage"),
        (nn.Parameter(torch.zeros(TINY)), "stage"),
        (torch.zeros(HUGE + 1, dtype=torch.int8), "wait"),
        (torch.zeros(512, 512).t(), "wait"),
        (torch.zeros(1).expand(TINY), "wait"),
        (torch.zeros(8, 8).t(), "wait"),
        (torch.zeros(TINY, dtype=torch.complex64).conj(), "wait"),
        (torch.zeros(TINY).to_sparse(), "wait"),
        (torch.zeros(4, device="meta"), "wait"),
        (torch.nn.Buffer(torch.zeros(4)), "queue"),
        (type("Mine", (torch.Tensor,), {})([1.0]), "wait"),
        (torch.empty(0), "queue"),
    ],
    ids=str,
)
def test_the_way_of_a_tensor(tensor: torch.Tensor, way: str) -> None:
    assert way_of(tensor.detach()) == way


def test_pinned_memory_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert way_of(torch.zeros(2 * HUGE, dtype=torch.int8)) == "queue"


def test_where_no_memory_can_be_locked_a_plain_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        raise accelerator_error(2, "CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    calls = Calls(0)
    calls.device = torch.device("cpu")
    source = torch.arange(float(TINY))
    assert torch.equal(calls.copy(source, "stage"), source)


def test_it_knows_its_own_device_only() -> None:
    adapter, here = CudaAdapter(1), torch.device
    for place in (here("cuda", 0), here("cpu"), here("meta")):
        assert not adapter.resident(type("At", (), {"device": place})())  # type: ignore[arg-type]
    assert adapter.resident(type("At", (), {"device": here("cuda", 1)})())  # type: ignore[arg-type]


# What is left


SNAPSHOT = [
    {
        "device": 0,
        "address": 140234,
        "total_size": 2097152,
        "allocated_size": 1536,
        "active_size": 2048,
        "requested_size": 1200,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": 140234,
                "size": 512,
                "requested_size": 200,
                "state": "active_allocated",
                "frames": [],
            },
            {"address": 140746, "size": 512, "requested_size": 500, "state": "active_awaiting_free"},
            {
                "address": 141258,
                "size": 1024,
                "requested_size": 1000,
                "state": "active_allocated",
                "frames": [
                    {"filename": "??", "line": 0, "name": "malloc"},
                    {"filename": "/lib/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
                    {"filename": "/home/me/train.py", "line": 12, "name": "loss"},
                ],
            },
            {"address": 142282, "size": 2095104, "requested_size": 0, "state": "inactive", "frames": []},
        ],
    },
    {**segment(0, 999424, 4096), "segment_pool_id": (1, 0)},
    segment(1, 5000, 700),
]
"""In the format of `torch.cuda.memory_snapshot()`: blocks in use, awaiting another stream, and free; a
private pool; another device."""


def test_a_snapshot_tells_what_is_in_use() -> None:
    found = blocks(SNAPSHOT, 0)
    assert {at: block.nbytes for at, block in found.items()} == {140234: 200, 141258: 1000, 999424: 4096}
    assert found[141258].origin == "loss (/home/me/train.py:12)"
    assert found[140234].origin == "an allocation since the run began"
    assert "private pool" in found[999424].origin
    assert found[140234].has(140234 + 511)
    assert not found[140234].has(140234 + 512)
    assert list(blocks(SNAPSHOT, 1)) == [5000]
    # Earlier releases have no address in the blocks.
    bare = [
        {**one, "blocks": [{k: v for k, v in block.items() if k != "address"} for block in one["blocks"]]}
        for one in SNAPSHOT
    ]
    assert blocks(bare, 0) == found


SIZES = st.dictionaries(st.integers(0, 99).map(lambda slot: slot * 4096), st.integers(1, 4096), max_size=60)


@given(before=SIZES, after=SIZES)
def test_leftovers_are_what_was_not_there_before(before: dict[int, int], after: dict[int, int]) -> None:
    snapshots = [[segment(0, at, size) for at, size in sizes.items()] for sizes in (before, after)]
    first, then = (blocks(snapshot, 0) for snapshot in snapshots)
    new = since(first, then)
    expected = {at: size for at, size in after.items() if before.get(at) != size}
    assert sum(block.nbytes for block in new) == sum(expected.values())
    assert len(new) == min(len(expected), LISTED + 1)
    listed = new[:LISTED]
    assert all(expected[block.address] == block.nbytes for block in listed)
    assert [block.nbytes for block in listed] == sorted(expected.values(), reverse=True)[:LISTED]


class Sticky(PretendedCuda):
    """Keeps the last tensor that was moved."""

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept = super()._there(tensor)
        return self.kept


def test_what_is_left_is_told_with_its_owner() -> None:
    adapter = Sticky()
    outcome = il.Engine(adapter).start(task(), batches(size=600)).wait(60)
    assert outcome.residue.bytes == adapter.kept.untyped_storage().nbytes()
    assert [type(left).__name__ for left in outcome.residue.leftovers] == ["Block"]
    (owner,) = outcome.residue.leftovers[0].owners
    assert "local 'adapter' of" in str(owner)
    assert str(owner).endswith(").kept")
    del adapter.kept
    assert not LEDGER.live()


@pytest.mark.parametrize("kind", [PretendedCuda, pytest.param(CudaAdapter, marks=pytest.mark.cuda)])
def test_the_allocator_sees_what_hooks_leave_and_who_holds_it(kind: type[CudaAdapter]) -> None:
    held: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held.append(batch[0].repeat(100, 1))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    outcome = il.Engine(kind()).start(task(loss=loss), batches()).wait(60)
    assert outcome.residue.bytes == sum(tensor.nbytes for tensor in held)
    assert "held" in str(outcome.residue.leftovers[0].owners)
    held.clear()
    assert il.Engine(kind()).fit(task(), batches()).residue.bytes == 0


def test_what_stood_there_before_is_not_of_the_run() -> None:
    earlier = PretendedCuda()
    mine = earlier.answers.placed(torch.zeros(3000))
    outcome = il.Engine(PretendedCuda()).start(task(), batches()).wait(60)
    assert (outcome.residue.known, outcome.residue.bytes) == (True, 0)
    assert LEDGER.has(mine)


@pytest.mark.parametrize("sticky", [False, True])
def test_beside_another_run_what_is_left_is_unknown_and_nothing_is_nothing(sticky: bool) -> None:
    """The allocator does not say whose a block is."""
    other = PretendedCuda()
    adapter = Sticky() if sticky else PretendedCuda()
    with other.session():
        other.acquire()
        began = len(adapter.answers.made)
        outcome = il.Engine(adapter).start(task(), batches()).wait(60)
        assert outcome.status == "finished"
        assert outcome.residue.known is not sticky
        assert (
            "clear_workspaces" not in adapter.answers.made[began:]
        )  # the other might be about to use its own
        other.free()
    assert "clear_workspaces" in other.answers.made


def test_an_adapter_serves_one_run_at_a_time() -> None:
    adapter = PretendedCuda()
    with adapter.session():
        adapter.acquire()
        with pytest.raises(DeviceInUse, match="or make one for each run"):
            adapter.acquire()
        adapter.free()
        adapter.acquire()
        adapter.free()


def test_workspaces_are_cleared_before_measuring_and_caches_when_the_device_is_given_back() -> None:
    adapter = PretendedCuda()
    il.Engine(adapter).fit(task(), batches())
    made = [call for call in adapter.answers.made if call not in ("copy", "home", "current", "current again")]
    assert made == [
        *("facts", "clear_workspaces", "segments"),
        "synchronize",
        *("clear_workspaces", "segments"),
        *("clear_workspaces", "clear_caches"),
    ]
    assert adapter.answers.made[-1] == "current again"


# The loss of the device


class Hostile(RuntimeError):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no")


def caused(error: BaseException, by: str) -> BaseException:
    outer = ValueError("what a hook made of it")
    if by == "group":
        return ExceptionGroup("several", [outer, ExceptionGroup("inner", [error])])  # type: ignore[list-item]
    setattr(outer, f"__{by}__", error)
    return outer


@pytest.mark.parametrize("by", ["itself", "cause", "context", "group"])
@pytest.mark.parametrize("code", [2, 1, 46, 100, 801, *LOSSES])
def test_the_code_tells_a_loss(latch: None, code: int, by: str) -> None:
    error: BaseException = accelerator_error(code, "CUDA error: whatever it says")
    error = error if by == "itself" else caused(error, by)
    adapter = CudaAdapter(7)
    assert adapter.is_loss_of_device(error) is (code in LOSSES)
    assert adapter.lost == LOSSES.get(code, "")
    assert CudaAdapter(7).lost == adapter.lost
    assert CudaAdapter(6).lost == ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (accelerator_error(None), "device-side assert triggered"),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"),
            "illegal",
        ),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), "device-side"),
        (RuntimeError("CUDA driver error: unspecified launch failure"), "unspecified"),
        (Hostile("CUDA error: misaligned address"), "misaligned"),
        (cuda_error("device-side assert triggered (710)"), "device-side"),
        (cuda_error("out of memory (2)"), ""),
        (RuntimeError("CUDA error: out of memory"), ""),
        (RuntimeError("CUDA error: invalid device ordinal"), ""),
        (RuntimeError("the text 'device-side assert triggered' alone"), ""),
        (RuntimeError(), ""),
        (RuntimeError(710), ""),
        (ValueError("CUDA error: device-side assert triggered"), ""),
        (KeyboardInterrupt("CUDA error: device-side assert triggered"), ""),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ""),
        (torch.OutOfMemoryError("CUDA error: device-side assert triggered"), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_the_text_tells_a_loss_where_there_is_no_code(latch: None, error: BaseException, reason: str) -> None:
    adapter = CudaAdapter(7)
    assert adapter.loss(error).find(reason) >= 0
    assert adapter.is_loss_of_device(error) is bool(reason)


def lost_run(adapter: PretendedCuda, nth: int = 2, **settings: Any) -> il.Outcome:
    """A run whose device dies in the nth loss."""
    count = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == nth:
            adapter.answers.dead = True
            raise accelerator_error(710)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return il.Engine(adapter, **settings).start(task(loss=loss), batches()).wait(60)


@pytest.mark.parametrize("policy", ["offload", "keep", "discard"])
def test_after_a_loss_no_call_is_made_and_later_runs_are_refused(latch: None, policy: str) -> None:
    adapter = PretendedCuda()
    outcome = lost_run(adapter, exit=policy)
    assert outcome.status == "failed"
    assert type(outcome.error) is torch.AcceleratorError
    assert outcome.errors == ()  # the pretended device raises at any call
    assert [entry.event for entry in outcome.history if entry.event == "lose"] == ["lose"]
    assert outcome.history[-1].phase == "closed"
    assert not outcome.residue.known
    assert adapter.leftovers() is None
    adapter.free()
    for refused in (
        adapter.sync,
        lambda: adapter.move(torch.zeros(1)),
        lambda: adapter.fetch(torch.zeros(1)),
    ):
        with pytest.raises(DeviceLost, match="device-side assert triggered"):
            refused()
    with pytest.raises(DeviceLost, match="Start a new process"):
        adapter.set_random_state(None)
    later = il.Engine(PretendedCuda()).start(task(), batches()).wait(60)
    assert type(later.error) is DeviceLost
    assert later.history[-1].phase == "closed"
    assert il.Engine(PretendedCuda(1)).fit(task(), batches()).ok
    assert il.Engine("cpu").fit(task(), batches()).ok


class Unaware(PretendedCuda):
    """Does not see that its device is lost."""

    def loss(self, error: BaseException) -> str:
        return ""


def test_a_call_after_a_loss_would_be_caught(latch: None) -> None:
    outcome = lost_run(Unaware())
    assert any("asked of a device that is lost" in failure.message for failure in outcome.errors) or (
        "asked of a device that is lost" in str(outcome.error)
    )


def test_out_of_memory_loses_nothing() -> None:
    adapter = PretendedCuda()
    calls = iter([False, True])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    outcome = il.Engine(adapter).start(task(loss=loss), batches()).wait(60)
    assert (outcome.status, outcome.verdict, outcome.residue.bytes) == ("failed", "clean", 0)
    assert outcome.residue.known
    assert not adapter.lost
    assert il.Engine(adapter).fit(task(), batches()).ok


def test_out_of_memory_is_explained_by_what_was_held() -> None:
    adapter = PretendedCuda()
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert adapter.explain(error) == ""  # nothing is acquired: nothing is asked
    with adapter.session():
        adapter.acquire()
        model = net()
        adapter.place(model)
        state = adapter.move(torch.zeros(1 << 20))
        parts = {"parameters": [*model.parameters()], "optimizer state": [state, state.view(2, -1)]}
        told = adapter.explain(caused(error, "cause"), parts)
        assert adapter.explain(ValueError("another")) == ""
        assert "held on cuda:0 when its memory ran out: 4.0 MiB in use" in told
        assert "parameters 268 bytes, optimizer state 4.0 MiB, all else (activations, batches" in told
        assert told.splitlines()[2].endswith("workspaces) 8 bytes")  # the buffer
        assert "largest blocks: 4.0 MiB" in told
        assert "1.0 GiB of 2.0 GiB free" in told

        def broken() -> Any:
            raise RuntimeError("cannot be asked")

        adapter.answers.segments = broken  # type: ignore[method-assign]
        assert adapter.explain(error, parts) == ""
        del adapter.answers.segments
        adapter.free()


def test_a_loss_is_explained_without_asking(latch: None) -> None:
    adapter = PretendedCuda()
    with adapter.session():
        adapter.acquire()
        adapter.answers.dead = True
        error = accelerator_error(710)
        assert adapter.is_loss_of_device(error)
        assert "CUDA_LAUNCH_BLOCKING=1" in adapter.explain(error)
    LEDGER.__exit__(None, None, None)  # the pretended device's context, which is not left after a loss


def test_the_report_names_fragments() -> None:
    cached = segment(0, 0, 1 << 30, "inactive")
    text = held_report("cuda:0", [*SNAPSHOT, cached], 0, (1 << 20, 1 << 31), {}, 200)
    assert "expandable_segments" in text
    assert "in use before the run began 200 bytes" in text
    assert "expandable_segments" not in held_report("cuda:0", SNAPSHOT[1:], 0, (1 << 20, 1 << 31), {}, 0)


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (torch.OutOfMemoryError("x"), True),
        (accelerator_error(2), True),
        (accelerator_error(710), False),
        (accelerator_error(None), False),
        (MemoryError(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, exhausted: bool) -> None:
    assert out_of_memory(error) is exhausted


# Context, random numbers, whole lives


def test_the_session_begins_with_the_device_and_ends_with_the_thread_as_it_was() -> None:
    adapter = PretendedCuda()
    with adapter.session():
        assert not torch._C._len_torch_dispatch_stack()
        adapter.acquire()
        assert torch._C._len_torch_dispatch_stack() == 1
    assert not torch._C._len_torch_dispatch_stack()
    depths = []

    def another() -> None:
        with adapter.session():
            depths.append(torch._C._len_torch_dispatch_stack())

    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
    assert depths == [1]
    adapter.free()


def test_random_state() -> None:
    adapter = PretendedCuda()
    assert adapter.random_state() is None
    with torch.random.fork_rng(), adapter.session():
        adapter.acquire()
        state = adapter.random_state()
        drawn = torch.rand(3)
        adapter.set_random_state(None)
        adapter.set_random_state(state)
        assert torch.equal(torch.rand(3), drawn)
        adapter.free()


LIVES = (
    Life(backend="cuda", validate=False, epochs=1),
    Life(backend="cuda", given=True, drive="start", optimizer="momentum", scheduler="", epochs=1),
    Life(backend="cuda", exit="discard", drive="handles", scheduler="", validate=False),
)


def broken(life: Life, *strikes: Any) -> list[str]:
    with without_collector():
        return aftermath(life, live(life, *strikes))


@pytest.mark.parametrize("life", LIVES, ids=str)
def test_a_fault_at_every_point(monkeypatch: pytest.MonkeyPatch, life: Life, record_property: Any) -> None:
    """As for the other backends; on the GPU where there is one."""
    monkeypatch.setitem(lives.BACKENDS, "cuda", CudaAdapter if GPU else PretendedCuda)
    monkeypatch.setattr(lives, "_weigh", weigh)
    assert broken(life) == []
    kinds = tuple(ERRORS)
    strikes = [replace(point, error=kinds[i % len(kinds)]) for i, point in enumerate(points_of(life))]
    record_property(f"points struck ({life})", len(strikes))
    assert len(strikes) > 50
    assert {str(strike): lines for strike in strikes if (lines := broken(life, strike))} == {}


def weigh(points: lives.Points) -> None:
    """As `lives._weigh`, for weights that may stand on a GPU."""
    plain = points.at

    def at(where: str, moment: str, near: Any = None, spoil: Any = None) -> None:
        plain(where, moment, near, spoil)
        if (where, moment) == ("step", "after"):
            points.weights.append({"last": near.detach().cpu().numpy().tobytes()})

    points.at = at  # type: ignore[method-assign]


# On a GPU


@pytest.mark.cuda
def test_a_device_side_assert_is_a_loss_and_the_process_goes_on() -> None:
    """In a process of its own, whose device is gone afterwards."""
    script = """
import torch, interlock as il
from tools.small import batches, task
from torch.nn import functional
def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1] + 100)
outcome = il.Engine("cuda").start(task(loss=loss), batches()).wait(60)
print(outcome.status, outcome.history[-1].phase, outcome.residue.known, type(outcome.error).__name__)
print([entry.event for entry in outcome.history if entry.event == "lose"], len(outcome.errors))
print(type(il.Engine("cuda").start(task(), batches()).wait(60).error).__name__)
print(il.Engine("cpu").fit(task(), batches()).ok)
"""
    assert child(script).splitlines()[-4:] == [
        "failed closed False AcceleratorError",
        "['lose'] 0",
        "DeviceLost",
        "True",
    ]


@pytest.mark.cuda
def test_out_of_memory_on_a_gpu_is_survived_and_leaves_nothing() -> None:
    adapter = CudaAdapter()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        huge = torch.empty(1 << 48, dtype=torch.int8, device=batch[0].device)
        return model(batch[0]).sum() + huge.sum()  # type: ignore[no-any-return]

    outcome = il.Engine(adapter).start(task(loss=loss), batches()).wait(60)
    assert type(outcome.error) is torch.OutOfMemoryError
    assert (outcome.verdict, outcome.residue.known, outcome.residue.bytes) == ("clean", True, 0)
    assert il.Engine(adapter).fit(task(), batches()).ok


@pytest.mark.cuda
def test_every_way_arrives_whole() -> None:
    """And the source may be changed, or freed, as soon as the call is back."""
    adapter = CudaAdapter()
    with adapter.session():
        adapter.acquire()
        for size in (1, TINY // 4, TINY, HUGE // 4, HUGE // 4 + 1):
            for source in (torch.arange(float(size)), torch.arange(float(size)).pin_memory()):
                expected = source.clone()
                moved = adapter.move(source)
                if not source.is_pinned():
                    source.fill_(-1)
                del source
                assert torch.equal(adapter.fetch(moved), expected)
        del moved
        adapter.free()


@pytest.mark.cuda
def test_the_random_state_of_a_gpu() -> None:
    adapter = CudaAdapter()
    with adapter.session():
        adapter.acquire()
        state = adapter.random_state()
        assert state is not None
        assert state.device.type == "cpu"
        drawn = torch.rand(3, device=adapter.device).cpu()
        adapter.set_random_state(state)
        assert torch.equal(torch.rand(3, device=adapter.device).cpu(), drawn)
        adapter.free()


@pytest.mark.cuda
def test_two_runs_on_a_gpu_are_equal_to_the_bit() -> None:
    first, second = (il.Engine("cuda").fit(task(), batches()) for _ in range(2))
    assert first.model is not None
    assert second.model is not None
    assert same(values(first.model), values(second.model))


def test_a_leftover_that_stands_nowhere_has_no_holders() -> None:
    assert list(CudaAdapter().holders(Leftover(5, "elsewhere"))) == []
    assert list(inject(PretendedCuda()).holders(Leftover(5, "elsewhere"))) == []


# The script for a machine that has a GPU


def check_script(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """`cuda_check.py`, in a process of its own."""
    return subprocess.run(
        [sys.executable, cuda_check.__file__, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment(**({"PYTHONPATH": path} if path else {})),
    )


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_the_script_says_why_it_did_nothing_and_writes_nothing(tmp_path: Path) -> None:
    done = check_script("--page", str(tmp_path / "page.md"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"nothing was run: {CudaAdapter.unavailable()}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_script_finds_the_package_where_it_is_not_installed(tmp_path: Path) -> None:
    cuda_check.view(tmp_path)
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import interlock.backends.cuda
print(interlock.backends.cuda.__file__)
"""
    assert child(script).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("script", "seconds", "how"),
    [
        ("print('fine')", 50.0, "passed"),
        ("print('fine', flush=True); raise SystemExit(3)", 50.0, "FAILED, exit status 3"),
        ("import time; print('fine', flush=True); time.sleep(60)", 1.0, "FAILED, ended after 1 s"),
    ],
)
def test_a_part_of_the_script_ends_in_time_and_is_told(script: str, seconds: float, how: str) -> None:
    part = cuda_check.Part("a part", ("-c", script), seconds)
    ran = cuda_check.run(part, environment(), 100.0)
    assert (ran.how, ran.output.strip(), ran.passed) == (how, "fine", how == "passed")
    page = cuda_check.page("2000-01-01", {"device": "none"}, [ran])
    assert f"| a part | {how} |" in page
    assert "## A part\n\n```text\nfine\n```" in page


def test_the_parts_of_the_script_fit_into_ten_minutes_and_select_tests(tmp_path: Path) -> None:
    parts = cuda_check.parts(tmp_path / "pytest.ini")
    assert sum(part.seconds for part in parts) <= cuda_check.IN_ALL < 600
    (tmp_path / "pytest.ini").write_text(cuda_check.INI)
    (part,) = (part for part in parts if part.name == "a fault at every point")
    done = cuda_check.run(replace(part, words=(*part.words, "--collect-only", "-q")), environment(), 100.0)
    assert done.passed, done.output
    assert "3/" in done.output.splitlines()[-1]


def test_the_benchmark_of_the_script_trains_the_same_by_hand_and_with_interlock() -> None:
    done = check_script("--bench", "cpu", "--quick")
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines() if line[0] != " "] == ["tiny", "digits"]
    assert "Interlock, journal and observer" in done.stdout
