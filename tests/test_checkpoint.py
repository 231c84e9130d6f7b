"""Checkpoints on the disk: found whole or not at all, whoever was killed, whatever became of a file."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools import killed
from tools.killed import about, mixed, state_of

from interlock import durable
from interlock.checkpoint import (
    MANIFEST,
    MARKER,
    STATE,
    CheckpointDamaged,
    CheckpointError,
    Checkpoints,
    Saved,
    look,
)
from interlock.store import OWN, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def write(store: Store, *steps: int) -> list[Saved]:
    return [store.write(state_of(step), about(step)) for step in steps]


def steps(store: Store) -> list[int]:
    return [saved.step for saved in store.all()]


def strange(store: Store) -> list[str]:
    """What is in the folder and is neither complete nor the folder's own."""
    complete = {saved.path.name for saved in store.all()}
    return sorted(path.name for path in store.folder.iterdir() if path.name not in complete | {OWN})


# The setting


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"folder": 3}, "folder is 3"),
        ({"every_epochs": 0}, "every_epochs is 0"),
        ({"every_steps": True}, "every_steps is True"),
        ({"keep": 0}, "keep is 0"),
        ({"rescue": "yes"}, "rescue is 'yes'"),
        ({"every_epochs": None, "rescue": False}, "nothing is ever saved"),
        ({"best": ""}, "best is ''"),
        ({"best": "accuracy"}, "pass lower_is_better="),
        ({"lower_is_better": True}, "says nothing without best="),
        ({"best": "loss", "lower_is_better": "yes"}, "lower_is_better is 'yes'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Checkpoints(**{"folder": "x", **wrong})


def test_all_problems_of_a_setting_are_named_at_once() -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints("", every_epochs=-1, every_steps=0, keep=0, best="accuracy")
    assert str(caught.value).count("\n  - ") == 5


@pytest.mark.parametrize("name", ["loss", "val_loss", "mean_error", "Loss"])
def test_which_way_is_better_is_guessed_only_where_it_is_plain(name: str) -> None:
    assert Checkpoints("x", best=name).lower
    assert not Checkpoints("x", best=name, lower_is_better=False).lower


# Writing and reading


def test_what_was_written_is_read_back(store: Store) -> None:
    (saved,) = write(store, 12)
    assert (saved.step, saved.epoch, saved.boundary, saved.metrics) == (12, 1, "step", {"loss": 6.0})
    assert store.newest() == saved == look(saved.path)
    assert not mixed(store.read(saved), 12)
    assert json.loads((saved.path / MANIFEST).read_text())["versions"]["torch"] == str(torch.__version__)
    assert strange(store) == []


def test_a_metric_that_is_no_number_is_kept_and_never_the_best(store: Store) -> None:
    for step, loss in enumerate((float("nan"), 2.0, float("inf"), float("-inf"))):
        store.write(state_of(step), {**about(step), "metrics": {"loss": loss}})
    assert [str(saved.metrics["loss"]) for saved in store.all()] == ["nan", "2.0", "inf", "-inf"]
    best = store.best("loss", lower_is_better=True)
    assert best is not None
    assert best.step == 1
    assert store.best("another", lower_is_better=True) is None


def test_reading_where_nothing_is(tmp_path: Path) -> None:
    assert Store(tmp_path / "none").all() == ()
    assert Store(tmp_path / "none").newest() is None
    assert not (tmp_path / "none").exists()


def test_the_newest_is_the_one_written_last_also_after_going_back(store: Store) -> None:
    write(store, 10, 20, 30, 11)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 11
    store.prune()
    assert steps(store) == [30, 11]


@given(
    losses=st.lists(st.integers(0, 3), min_size=1, max_size=5), keep=st.integers(1, 3), lower=st.booleans()
)
def test_pruning_leaves_the_last_ones_and_the_best(
    losses: list[int], keep: int, lower: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("pruned"), keep)
    try:
        for step, loss in enumerate(losses):
            store.write({}, {**about(step), "metrics": {"loss": loss}})
            there = losses[: step + 1]
            last = set(range(len(there)))
            last = set(sorted(last)[-keep:])
            before = steps(store)
            store.prune(best="loss", lower_is_better=lower)
            best = min(before, key=lambda i: (losses[i] if lower else -losses[i], i))
            assert steps(store) == sorted({*last, best})
            assert strange(store) == []
    finally:
        store.close()


# Who may write


def test_two_writers_of_one_folder(store: Store) -> None:
    write(store, 1)
    other = Store(store.folder)
    with pytest.raises(CheckpointError, match="another run writes"):
        other.claim()
    assert [saved.step for saved in other.all()] == [1]
    store.close()
    write(other, 2)
    other.close()
    assert steps(store) == [1, 2]


def test_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(CheckpointError, match=r"something else, such as 'train.py'"):
        Store(tmp_path).claim()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    with pytest.raises(CheckpointError, match="cannot be written"):
        Store(tmp_path / "train.py").claim()


def test_a_writer_clears_away_what_is_its_own_and_a_reader_nothing(store: Store) -> None:
    write(store, 1)
    store.close()
    for name in (".writing-000002-step-2-step", ".removing-000001-step-0-epoch", "000003-step-3-step"):
        (store.folder / name).mkdir()
        (store.folder / name / STATE).write_bytes(b"half")
    others = [".writing-notes", "000003-step-3", "notes"]
    for name in others:
        (store.folder / name).mkdir()
    assert steps(Store(store.folder)) == [1]
    assert len(strange(store)) == 6
    store.claim()
    assert strange(store) == others
    assert steps(store) == [1]


def test_a_forked_child_does_not_keep_the_folder(store: Store) -> None:
    """Such as a loader's worker, which has the lock's descriptor too, and outlives the run for a moment."""
    write(store, 1)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    try:
        store.close()
        other = Store(store.folder)
        write(other, 2)
        other.close()
    finally:
        os.close(go)
        os.close(ready)
        os.waitpid(child, 0)
    assert steps(store) == [1, 2]


# What goes wrong while writing


class Full:
    """A disk that is full after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("calls", range(4))
def test_a_full_disk_leaves_the_earlier_ones_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    write(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", Full(calls)(os.fsync))
        # Folders are synced where the system can; files must be: so only those count.
        patch.setattr("interlock.store.sync_folder", lambda _: None)
        if calls < 3:
            with pytest.raises(CheckpointError, match="No space left on device"):
                write(store, 2)
        else:
            write(store, 2)
    assert steps(store) == ([1] if calls < 3 else [1, 2])
    assert strange(store) == []
    write(store, 3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_full_inside_the_state(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, 1)
    recorder = durable.Recorder.__init__

    def full(self: durable.Recorder, path: Path) -> None:
        recorder(self, path)
        self._file.close()
        self._file = Path("/dev/full").open("wb")  # noqa: SIM115 - as the one it stands for

    monkeypatch.setattr(durable.Recorder, "__init__", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(store, 2)
    assert steps(store) == [1]
    assert strange(store) == []


@pytest.mark.parametrize("where", ["write_through", "sync_folder", "manifest"])
def test_an_interrupt_inside_a_write(store: Store, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    write(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(f"interlock.store.{where}", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(store, 2)
    assert steps(store) == [1]
    assert strange(store) == []


def test_what_could_not_be_removed_is_removed_by_the_next_write(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr("interlock.store.manifest", raising(OSError))
        patch.setattr("interlock.store.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(CheckpointError, match="make room there"):
            write(store, 2)
    assert strange(store) == [".writing-000002-step-2-step"]
    write(store, 2)
    assert steps(store) == [1, 2]
    assert strange(store) == []


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def function(*_: Any) -> None:
        raise error

    return function


# What became of the files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "bytes and was written with"),
        (flip, "other content than was written"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_a_spoilt_state_is_found_and_named(store: Store, spoil: Callable[[Path], None], said: str) -> None:
    first, second = write(store, 1, 2)
    spoil(second.path / STATE)
    with pytest.raises(CheckpointDamaged, match=said) as caught:
        store.read(second)
    assert caught.value.path == second.path / STATE
    assert "Restore an earlier one" in str(caught.value)
    assert not mixed(store.read(first), 1)


@pytest.mark.parametrize("spoil", [cut, flip])
def test_a_spoilt_manifest_is_passed_over_and_named(store: Store, spoil: Callable[[Path], None]) -> None:
    first, second = write(store, 1, 2)
    spoil(second.path / MANIFEST)
    assert store.newest() == first
    assert [damage.path for damage in store.damaged()] == [second.path / MANIFEST]
    with pytest.raises(CheckpointDamaged, match="cut short or changed"):
        store.read(second)
    store.close()
    store.claim()
    assert second.path.exists()  # it was complete once: not ours to remove


@pytest.mark.parametrize("spoil", [Path.unlink, cut])
def test_without_its_marker_it_is_none(store: Store, spoil: Callable[[Path], None]) -> None:
    first, second = write(store, 1, 2)
    spoil(second.path / MARKER)
    assert store.newest() == first
    with pytest.raises(CheckpointDamaged):
        look(second.path)
    store.close()
    write(store, 3)
    assert steps(store) == [1, 3]
    assert strange(store) == []


def test_one_of_a_newer_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.store.FORMAT", 2)
    (saved,) = write(store, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, and this version reads up to 1"):
        store.read(saved)


class Runs:
    """What would run code when it is read by plain pickle."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("/never"),)


def test_no_code_of_a_file_is_run(store: Store) -> None:
    saved = store.write({"harmless": Runs()}, about(1))
    with pytest.raises(CheckpointDamaged, match="is not plain data and tensors"):
        store.read(saved)
    assert not Path("/never").exists()


# Killed


class Writers:
    """Forks writers, one at a time, and kills them."""

    def __init__(self, folder: Path, *more: str) -> None:
        command = [sys.executable, killed.__file__, str(folder), *more]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def kill_one(self, after: float) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("next\n")
        child = int(self._process.stdout.readline())
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def spoilt(store: Store, saved: Saved) -> bool:
    try:
        return mixed(store.read(saved), saved.step)
    except CheckpointDamaged:
        return True


def kill(folder: Path, times: int, seed: int, *more: str) -> tuple[list[str], int]:
    """What was found wrong after kills at random moments, and how many struck inside a write."""
    chance = random.Random(seed)
    store, wrong, inside, last = Store(folder), [], 0, 0
    with Writers(folder, *more) as writers:
        for n in range(times):
            end = writers.kill_one(chance.uniform(0.002, 0.06))
            if end != "gone":
                wrong.append(f"{n}: the writer {end}")
            newest = store.newest()
            inside += bool(folder.exists() and strange(store))
            if store.damaged():
                wrong.append(f"{n}: damaged {store.damaged()}")
            if newest is None:
                if last:
                    wrong.append(f"{n}: none is left of those up to step {last}")
                continue
            if newest.step < last:
                wrong.append(f"{n}: went back from step {last} to {newest.step}")
            wrong += [f"{n}: {one.path.name} is spoilt" for one in store.all() if spoilt(store, one)]
            last = newest.step
    store.claim()
    wrong += [f"left: {name}" for name in strange(store)]
    store.close()
    return wrong, inside


def test_killed_inside_writes_tens_of_times(tmp_path: Path, record_property: Any) -> None:
    wrong, inside = kill(tmp_path / "checkpoints", 30, 1)
    record_property("kills inside a write or a removal of a checkpoint", inside)
    assert wrong == []
    assert inside > 3


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_inside_writes_hundreds_of_times(tmp_path: Path, record_property: Any) -> None:
    wrong, inside = kill(tmp_path / "checkpoints", 600, int(time.time()))
    record_property("kills inside a write or a removal of a checkpoint", inside)
    assert wrong == []
    assert inside > 50


def test_a_writer_that_writes_over_the_earlier_one_is_found_out(tmp_path: Path) -> None:
    """The planted fault: kills show what is wrong with it."""
    wrong, _ = kill(tmp_path / "checkpoints", 10, 2, "in place")
    assert any("spoilt" in line or "damaged" in line or "none is left" in line for line in wrong)


def test_a_mixture_is_found_out(store: Store) -> None:
    """The planted fault: a state of another step under a manifest that is right about its bytes."""
    saved = store.write({**state_of(1), "step": 2}, about(2))
    assert spoilt(store, saved)
