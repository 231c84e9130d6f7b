"""Shows on the terminal how a run is going; plain lines now and then where there is no terminal.

Nothing is added to a step: the display reads the run's position from a thread of its own. It keeps
that position and a length, and nothing of the model or the data.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from .events import Closed, Event, PhaseChanged, Report

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from .session import Session

FRAMES = 2.5
"""How often a second the terminal is redrawn. Each time costs about a millisecond of Python."""
FIRST = 0.1
"""Seconds before the first frame: a run that is over sooner leaves its last frame, and nothing moves."""
WINDOW = 5.0
"""The rate is that of the last so many seconds."""
EVERY = 10.0
"""Without a terminal: seconds between two lines in mid-epoch."""
COMPILES = 1.0
"""Seconds after which a program that a lazy device begins is said to be compiled."""
BACK, GOING, DONE = "bright_black", "cyan", "green"
"""The bar. Rich's own colours are shades that a terminal of 16 colours does not have."""


_SIGNAL = "interlock.signals.Terminated: "
"""What comes before the name of a signal that ended the run."""


class Progress:
    """An observer that shows a run.

    On a terminal: a bar with epoch, step, steps per second, the last numbers, the phase while it is
    another one than training, and the time. Elsewhere (files, logs, notebooks): a line at the start
    and for each epoch, and one every ten seconds in between. All of it goes to the standard error stream.

    Args:
        session: The run.
        epochs: How many there will be.
    """

    def __init__(self, session: Session, epochs: int) -> None:
        self.epochs = epochs
        self.position = session.position
        self.per_epoch = _length(session) or None
        self._validates = session.plan is not None and session.plan.data.validate is not None
        self.phase = session.driver.phase
        self.metrics: dict[str, float] = {}
        self.status = ""
        self.begun = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self.begun, 0)])
        self._told = self.begun
        self._live = _live(self.render)
        self._in_lines = self._live is None
        self._stream: TextIO = sys.stdout if _in_notebook() else sys.stderr
        self._over = threading.Event()
        self._drawer: threading.Thread | None = None
        if self._live is not None:
            # A program that ends in mid-run must not leave a terminal without a cursor.
            atexit.register(self.stop)
        else:
            steps = f" of {_many(self.per_epoch, 'step')}" if self.per_epoch else ""
            self._line(f"{_many(epochs, 'epoch')}{steps}")
        draw = self._remind if self._in_lines else self._draw
        self._drawer = threading.Thread(target=draw, name="interlock progress", daemon=True)
        self._drawer.start()

    def __call__(self, event: Event) -> None:
        """Take note of an event, and write a line if one is due and this is no terminal."""
        match event:
            case PhaseChanged(event=name, phase=phase, at=at):
                self.phase = phase
                if name == "train":  # the rate is that of the steps, not of what came before them
                    self._samples = deque([(self.begun + at, 0)])
            case Report():
                self.metrics.update(event.metrics)
                if self._in_lines:
                    self._tell(event)
            case Closed(status=status):
                self.status = status
                self.stop()
                if self._in_lines:
                    self._line(_end(event))

    def on_end(self, lost: int) -> None:
        """Leave the terminal as it was, also where the last event was lost."""
        self.stop()

    def stop(self) -> None:
        """Draw a last time and give the terminal back. Idempotent."""
        live, self._live = self._live, None  # which holds this object: a cycle otherwise
        drawer, self._drawer = self._drawer, None
        self._over.set()
        if drawer is not None:
            drawer.join()
        if live is not None:
            atexit.unregister(self.stop)
            if live.is_started:
                live.stop()
            else:
                live.console.print(self.render())  # a run that was over before the first frame

    def _draw(self) -> None:
        # Not rich's own thread, which nobody waits for.
        live = self._live
        while live is not None and not self._over.wait(1 / FRAMES if live.is_started else FIRST):
            if live.is_started:
                live.refresh()
            else:
                live.start(refresh=True)

    def _remind(self) -> None:
        """A line where no report came for so long that nobody knows whether the run goes on."""
        while not self._over.wait(max(EVERY / 10, 0.05)):
            if time.monotonic() - self._told >= EVERY:
                self._say(self.position.epoch, self.position.step)

    def rate(self) -> float:
        """Steps per second, lately."""
        now, step = time.monotonic(), self.position.step
        samples = self._samples
        samples.append((now, step))
        while len(samples) > 2 and now - samples[0][0] > WINDOW:
            samples.popleft()
        seconds = now - samples[0][0]
        return (step - samples[0][1]) / seconds if seconds > 0 else 0.0

    def _compiles(self) -> str:
        """On a lazy device, while a program is compiled: that, and for how long."""
        since = self.position.cutting
        seconds = time.monotonic() - since if since else 0.0
        return f"compiling {_clock(seconds)}" if seconds >= COMPILES else ""

    # -- on a terminal --------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """One frame: a bar, and what is known beside it."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step = self.position.step
        total = self.per_epoch * self.epochs if self.per_epoch else None
        going = not self.status
        bar = ProgressBar(
            total=total,
            completed=step,
            width=12,
            pulse=going and total is None,
            style=BACK,
            complete_style=GOING,
            finished_style=DONE,
            pulse_style=GOING,
        )
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True, min_width=12)
        row.add_column(no_wrap=True, overflow="ellipsis")
        row.add_row(bar, Text("  ".join(self._parts(step, total)), no_wrap=True, overflow="ellipsis"))
        return row

    def _parts(self, step: int, total: int | None) -> list[str]:
        """The words beside the bar, the most important first: a narrow terminal cuts the others off."""
        parts = [f"epoch {min(self.position.epoch + 1, self.epochs)}/{self.epochs}"]
        parts.append(f"step {step}/{total}" if total else f"step {step}")
        compiles = self._compiles()
        if self.status or self.phase != "training" or compiles:
            parts.append(self.status or compiles or self.phase)
        else:
            parts.append(f"{_short(self.rate())}/s")
        parts.append(_clock(time.monotonic() - self.begun))
        return parts + _numbers(self.metrics)

    # -- elsewhere ------------------------------------------------------------------------------------

    def _tell(self, report: Report) -> None:
        """A line at the end of an epoch (after its validation, if it has one), or if it is time for one."""
        now = time.monotonic()
        if self._validates:
            end_of_epoch = any(name.startswith("val_") for name in report.metrics)
        else:
            end_of_epoch = self.per_epoch is not None and report.step % self.per_epoch == 0
        if end_of_epoch or now - self._told >= EVERY:
            self._say(report.epoch, report.step)

    def _say(self, epoch: int, step: int) -> None:
        self._told = time.monotonic()
        of = f"/{self.per_epoch * self.epochs}" if self.per_epoch else ""
        rate = f"{_short(self.rate())} steps/s" if self.phase == "training" else self.phase
        how = self._compiles() or rate
        numbers = ", ".join(_numbers(dict(self.metrics)))
        text = f"epoch {epoch + 1}/{self.epochs}, step {step}{of}, {how}"
        self._line(f"{text}: {numbers}" if numbers else text)

    def _line(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a pipe that nobody reads ends no run
            self._stream.write(f"interlock: {text}\n")
            self._stream.flush()


def _live(render: Any) -> Live | None:
    """The live display, where there is a terminal for it."""
    # Asked of the stream and not of rich: FORCE_COLOR makes it take any file for a terminal.
    if _in_notebook() or not _is_terminal(sys.stderr):
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_interactive:
        return None
    return Live(
        console=console,
        get_renderable=render,
        auto_refresh=False,
        # What the task prints then appears above the bar; a redirected stream is left alone.
        redirect_stdout=_is_terminal(sys.stdout),
    )


def _is_terminal(stream: object) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # replaced, or closed
        return False


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this program: its streams are no terminal, and show in red."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _length(session: Session) -> int | None:
    """How many steps an epoch has, if the loader can tell."""
    return session.plan.steps(session.task.window) if session.plan is not None else None


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.3g}" for name, value in metrics.items()]


def _end(event: Closed) -> str:
    """The last line: of an error no more than its type and the first line of its message."""
    first = event.error.partition("\n")[0].removesuffix(": ").removeprefix(_SIGNAL)
    return str(replace(event, error=first))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
