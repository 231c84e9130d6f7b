"""SIGINT, SIGTERM and SIGKILL to the command line, in real processes, at several moments of a run."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tools.runs import COMMAND, TASK, begun, command, environment

from interlock import signals
from interlock.backends.monitors import CPU
from interlock.events import PhaseChanged
from interlock.signals import Signals, Terminated
from interlock.specs import TRAINING, compose
from interlock.specs.journal import read_journal, replay

SPEC = compose(TRAINING, CPU)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TASK)
    return tmp_path


def started(folder: Path, moment: str, *more: str) -> subprocess.Popen[str]:
    words = ("fit", f"{folder}/train.py:task", "--journal", f"{folder}/run.jsonl", "--no-progress", *more)
    return begun(*words, moment=moment)


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [
        ("import", signal.SIGINT, 130),
        ("placing", signal.SIGTERM, 143),
        ("training", signal.SIGINT, 130),
        ("training", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_the_run_in_order(folder: Path, moment: str, number: int, status: int):
    child = started(folder, moment, "--json")
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == status, err
    assert "Traceback" not in err
    if moment == "import":
        assert "nothing was started" in err
        assert not (folder / "run.jsonl").exists()
        assert not out
        return
    result = json.loads(out)
    assert (result["status"], result["verdict"]) == ("cancelled", "clean")
    assert result["residue"]["bytes"] == 0
    replayed = replay(read_journal(folder / "run.jsonl"), SPEC)
    assert replayed.holds
    assert replayed.ending == "clean"
    assert {"interrupted", "homing"} <= result["phases"].keys() or moment == "placing"


def test_signals_during_the_teardown_do_not_lose_it(folder: Path):
    # The release hangs for a moment only.
    (folder / "train.py").write_text(TASK.replace("time.sleep(30)", "time.sleep(2)"))
    child = started(folder, "teardown")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        time.sleep(0.3)
        child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 143, err
    assert err.count("the run is ending already") == 3
    assert "finished, clean" in out
    journal = read_journal(folder / "run.jsonl")
    assert replay(journal, SPEC).holds
    assert not [step for step in journal.steps if step.event in ("interrupt", "fail", "abandon")]


def test_what_a_killed_run_leaves_is_undetermined_and_says_what_was_held(folder: Path):
    child = started(folder, "training")
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    done = command("check", "--journal", folder / "run.jsonl")
    assert done.returncode == 3
    assert "ends in 'training'" in done.stdout
    assert "still held: device, model, optimizer" in done.stdout
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"train.py", "run.jsonl"}


def test_the_terminal_comes_back_after_ctrl_c(folder: Path):
    master, slave = pty.openpty()
    words = [*COMMAND, "fit", f"{folder}/train.py:task"]
    env = environment(HANG="training", TERM="xterm", COLUMNS="100")
    child = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    shown = b""
    sent = False
    end = time.monotonic() + 60
    while time.monotonic() < end:
        ready, _, _ = select.select([master], [], [], 0.5)
        if ready:
            try:
                data = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
        if not sent and b"AT training" in shown:
            child.send_signal(signal.SIGINT)
            sent = True
    os.close(master)
    assert child.wait(30) == 130
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert b"cancelled" in shown
    assert b"residue" in shown


# The handler by itself


def test_the_handlers_of_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    caught = Signals()
    with pytest.raises(Terminated), caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.received is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_somebody_swallowed_can_be_sent_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "PATIENCE", 0.0)
    with Signals() as caught:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert caught.received is signal.SIGINT


@pytest.mark.parametrize(("phase", "raises"), [("training", True), ("offloading", False), ("closed", False)])
def test_on_the_way_out_a_signal_is_only_noted(phase: str, raises: bool, capfd: pytest.CaptureFixture[str]):
    with Signals() as caught:
        caught.watch(SPEC)(PhaseChanged(1, "", "", phase, (), (), 0.0))
        if raises:
            with pytest.raises(Terminated):
                signal.raise_signal(signal.SIGTERM)
        else:
            signal.raise_signal(signal.SIGTERM)
            assert "SIGTERM: the run is ending already" in capfd.readouterr().err
    assert caught.received is signal.SIGTERM


def test_a_forked_worker_keeps_to_the_ordinary_meaning():
    with Signals():
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
