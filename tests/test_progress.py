"""What is shown of a run: on a terminal, and where there is none; and that the terminal comes back."""

from __future__ import annotations

import atexit
import gc
import io
import re
import sys
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from interlock import Engine, Task
from interlock.events import Closed, PhaseChanged, Report
from interlock.plan import Plan
from interlock.progress import Progress
from interlock.task import Data as Batches

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Stream(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def terminal(patch: pytest.MonkeyPatch) -> Stream:
    """From now on the standard error stream is a terminal. (No fixture: pytest sets its own after those.)"""
    stream = Stream(True)
    patch.setattr(sys, "stderr", stream)
    patch.setenv("TERM", "xterm-256color")
    patch.setenv("COLUMNS", "160")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        patch.delenv(name, raising=False)
    return stream


def pipe(patch: pytest.MonkeyPatch) -> Stream:
    """From now on it is none, although the environment insists on colours, as on many build servers."""
    stream = Stream(False)
    patch.setattr(sys, "stderr", stream)
    patch.setenv("FORCE_COLOR", "1")
    return stream


def task(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1),
        "loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
    }
    return Task(**{**parts, **changes})


def batches(count: int = 5) -> list[Any]:
    return [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(count)]


def fake(data: Any = None, phase: str = "created") -> Any:
    """A session as far as a display asks for it."""

    class Thing:
        pass

    session, driver, position = Thing(), Thing(), Thing()
    driver.phase = phase  # type: ignore[attr-defined]
    position.step, position.epoch, position.cutting = 0, 0, 0.0  # type: ignore[attr-defined]
    session.driver, session.position = driver, position  # type: ignore[attr-defined]
    session.plan = data and Plan(data)  # type: ignore[attr-defined]
    session.task = task()  # type: ignore[attr-defined]
    return session


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def until_drawn(screen: Stream) -> None:
    """Wait for the first frame, which hides the cursor."""
    end = time.monotonic() + 20
    while HIDE not in screen.getvalue():
        assert time.monotonic() < end, "nothing was drawn"
        time.sleep(0.005)


def test_a_run_that_is_over_before_the_first_frame_leaves_one_line(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)
    monkeypatch.setattr("interlock.progress.FIRST", 60.0)
    assert Engine("cpu", progress=True).fit(task(), batches()).ok
    (line,) = plain(screen.getvalue()).splitlines()
    assert re.search(r"epoch 1/1  step 5/5  finished  0:00  loss [\d.]+", line)
    assert HIDE not in screen.getvalue()


def test_a_terminal_shows_a_bar_and_is_given_back(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        until_drawn(screen)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    outcome = Engine("cpu", progress=True, report_every=2).fit(
        task(loss=loss), batches(), validate=batches(2), epochs=2
    )
    assert outcome.ok
    assert outcome.notes == tuple(note for note in outcome.notes if "observer" not in note)
    shown = screen.getvalue()
    last = plain(shown).rstrip().splitlines()[-1]
    assert re.search(r"epoch 2/2  step 10/10  finished  0:\d\d  loss [\d.]+  val_loss [\d.]+", last)
    assert shown.count(HIDE) == shown.count(SHOW) == 1
    assert shown.index(HIDE) < shown.index(SHOW)
    assert isinstance(sys.stderr, Stream)  # rich has taken its own stream away again


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_is_given_back_on_every_end(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]):
    screen = terminal(monkeypatch)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        until_drawn(screen)
        raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        Engine("cpu", progress=True).fit(task(loss=loss), batches())
    assert screen.getvalue().count(SHOW) == 1
    assert re.search(r"failed|cancelled", plain(screen.getvalue()).splitlines()[-1])


def test_also_when_the_last_event_never_came(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)
    progress = Progress(fake(), 1)
    until_drawn(screen)
    assert SHOW not in screen.getvalue()
    progress.on_end(3)
    progress.stop()
    assert screen.getvalue().count(SHOW) == 1


def test_also_when_the_program_ends_in_the_middle(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)
    last_words: list[Any] = []
    monkeypatch.setattr(atexit, "register", last_words.append)
    Progress(fake(), 1)
    until_drawn(screen)
    (stop,) = last_words
    stop()
    assert screen.getvalue().endswith(SHOW)


def test_another_phase_than_training_is_named(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)
    session = fake(data=None)
    progress = Progress(session, 3)
    until_drawn(screen)
    progress(PhaseChanged(1, "train", "ready", "training", (), (), 0.0))
    session.position.step = 7
    progress._live.refresh()
    assert re.search(r"epoch 1/3  step 7  [\d.]+/s", plain(screen.getvalue()))
    progress(PhaseChanged(2, "validate", "training", "validating", (), (), 0.0))
    progress._live.refresh()
    assert "step 7  validating" in plain(screen.getvalue())
    progress.stop()


def test_what_the_task_prints_is_left_alone_where_it_goes_to_a_file(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)
    out = Stream(False)
    monkeypatch.setattr(sys, "stdout", out)
    progress = Progress(fake(), 1)
    until_drawn(screen)
    print("a result")
    progress.stop()
    assert out.getvalue() == "a result\n"
    assert "a result" not in screen.getvalue()


def test_elsewhere_there_is_a_line_an_epoch(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)
    Engine("cpu", progress=True, report_every=2).fit(task(), batches(), validate=batches(2), epochs=2)
    lines = log.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "interlock: 2 epochs of 5 steps"
    assert re.fullmatch(r"interlock: epoch 1/2, step 5/10, [\d.]+ steps/s: loss .*, val_loss .*", lines[1])
    assert lines[2].startswith("interlock: epoch 2/2, step 10/10, ")
    assert lines[3].startswith("interlock: finished, clean, 10 steps in ")
    assert "\x1b" not in log.getvalue()


def test_without_validation_too(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)
    Engine("cpu", progress=True, report_every=2).fit(task(), batches(), epochs=3)
    assert [line[:20] for line in log.getvalue().splitlines()] == [
        "interlock: 3 epochs ",
        "interlock: epoch 1/3",
        "interlock: epoch 2/3",
        "interlock: epoch 3/3",
        "interlock: finished,",
    ]


def test_a_long_epoch_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)
    progress = Progress(fake(phase="training"), 1)
    monkeypatch.setattr("interlock.progress.EVERY", 0.0)
    progress(Report(1000, 0, {"loss": 0.5}, 60.0))
    progress.stop()
    line = log.getvalue().splitlines()[1]
    assert re.fullmatch(r"interlock: epoch 1/1, step 1000, [\d.]+ steps/s: loss 0.5", line)


def test_so_does_one_without_any_report(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)
    monkeypatch.setattr("interlock.progress.EVERY", 0.01)
    session = fake(phase="placing")
    session.position.step = 3
    progress = Progress(session, 2)
    end = time.monotonic() + 20
    while log.getvalue().count("\n") < 3 and time.monotonic() < end:
        time.sleep(0.01)
    progress.stop()
    assert log.getvalue().splitlines()[:2] == ["interlock: 2 epochs", "interlock: epoch 1/2, step 3, placing"]
    assert log.getvalue().count("\n") >= 3


def test_the_rate_is_that_of_training(monkeypatch: pytest.MonkeyPatch):
    pipe(monkeypatch)
    session = fake()
    progress = Progress(session, 1)
    progress.begun -= 100  # so long did it take to get there
    progress(PhaseChanged(7, "train", "ready", "training", (), (), 98.0))
    session.position.step = 50
    assert 20 < progress.rate() <= 25
    progress.stop()


def test_a_stream_that_nobody_reads_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)
    log.close()
    assert Engine("cpu", progress=True).fit(task(), batches()).ok


def test_data_without_a_length_has_no_total(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)

    class Endless:
        def __iter__(self):
            return iter(batches(3))

        def __len__(self):
            raise TypeError("a stream has no length")

    Engine("cpu", progress=True).fit(task(), Endless(), validate=batches(1))
    assert "step 3, " in log.getvalue()


def test_failure_is_the_last_line(monkeypatch: pytest.MonkeyPatch):
    log = pipe(monkeypatch)
    progress = Progress(fake(), 1)
    progress(Closed("failed", "clean", 0, "ValueError: no", 3, 1.0))
    assert log.getvalue().endswith("\ninterlock: failed, clean, 3 steps in 1.0 s: ValueError: no\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("ValueError: one\ntwo\nthree", "ValueError: one"),
        ("KeyboardInterrupt: ", "KeyboardInterrupt"),
        ("interlock.signals.Terminated: SIGTERM", "SIGTERM"),
    ],
)
def test_of_an_error_one_line_is_enough(monkeypatch: pytest.MonkeyPatch, error: str, says: str):
    log = pipe(monkeypatch)
    Progress(fake(), 1)(Closed("cancelled", "clean", 0, error, 3, 1.0))
    assert log.getvalue().endswith(f" 1.0 s: {says}\n")


def test_a_terminal_of_few_colours_shows_the_bar(monkeypatch: pytest.MonkeyPatch):
    screen = terminal(monkeypatch)
    monkeypatch.setenv("TERM", "xterm-16color")
    session = fake(data=Batches([1, 2]))
    session.position.step = 1
    Progress(session, 1).stop()
    assert "\x1b[36m" in screen.getvalue()
    assert "\x1b[90m" in screen.getvalue()


@pytest.mark.parametrize("kind", [True, False])
def test_it_keeps_nothing_of_the_run(kind: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Stream(kind))
    monkeypatch.setenv("TERM", "xterm")

    class Data(list):
        pass

    class Session:
        driver = fake().driver
        position = fake().position

    session: Any = Session()
    session.task = task()
    session.plan = Plan(Batches(Data()))
    gone = [weakref.ref(session), weakref.ref(session.plan.data.train)]
    progress = Progress(session, 1)
    display = weakref.ref(progress)
    gc.disable()
    try:
        del session
        assert [ref() for ref in gone] == [None, None]
        progress(Closed("finished", "clean", 0, "", 0, 1.0))
        del progress
        assert display() is None
    finally:
        gc.enable()
