"""Lives of a run, as data: what is trained, how it is driven, and where a fault strikes it.

`live(life, *strikes)` carries one out and returns what can be seen afterwards, as an `Ended`. The user's
hooks and the backend's calls count themselves, so that a life without strikes enumerates every point at
which one can be placed. Nothing here judges; `tools.aftermath` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from interlock import Engine, Outcome, Task
from interlock.backends.adapter import Adapter
from interlock.backends.cpu import CpuAdapter
from interlock.backends.double import ReplacingDouble
from interlock.backends.faults import CALLS, Fault, faulty
from interlock.errors import TaskError
from interlock.specs import Slot
from tools import process_state

BACKENDS: dict[str, type[Adapter]] = {"cpu": CpuAdapter, "double": ReplacingDouble}
IN, HIDDEN, OUT, ROWS = 3, 4, 4, 5

# Errors


class Unpicklable(Exception):
    """Holds what cannot be sent to another process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        super().__init__("does not pickle")


@dataclass(frozen=True)
class Frozen(Exception):
    """No attribute of it can be set: no note, no context."""

    text: str = "frozen"


class Mute(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise ValueError("no message for you")


def _chain(near: Any, cause: bool) -> BaseException:
    """An error with another one behind it, whose frames hold something of the run."""

    def deep(held: Any) -> None:
        kept = held * 2 if isinstance(held, torch.Tensor) else held
        raise ValueError(f"the first of two, holding {type(kept).__name__}")

    try:
        try:
            deep(near)
        except ValueError as first:
            if cause:
                raise RuntimeError("the second of two") from first
            raise RuntimeError("the second of two")  # noqa: B904 - the context is the point
    except RuntimeError as second:
        return second
    raise AssertionError("nothing was raised")


def _group(near: Any, kind: type[BaseExceptionGroup]) -> BaseException:
    members = [_chain(near, True), ValueError("alone")]
    return kind("several", [*members, KeyboardInterrupt()] if kind is BaseExceptionGroup else members)


def _own(near: Any) -> BaseException:
    """An error of Interlock's own family with a cause, which nothing may mistake for a sign."""
    error = TaskError("raised in a hook")
    error.__cause__ = _chain(near, True)
    return error


ERRORS: dict[str, Callable[[Any], BaseException]] = {
    "RuntimeError": lambda _: RuntimeError("struck"),
    "OutOfMemoryError": lambda _: torch.OutOfMemoryError("struck"),
    "KeyboardInterrupt": lambda _: KeyboardInterrupt(),
    "SystemExit": lambda _: SystemExit(3),
    "CancelledError": lambda _: asyncio.CancelledError(),
    "Unpicklable": lambda _: Unpicklable(),
    "cause": lambda near: _chain(near, True),
    "context": lambda near: _chain(near, False),
    "ExceptionGroup": lambda near: _group(near, ExceptionGroup),
    "BaseExceptionGroup": lambda near: _group(near, BaseExceptionGroup),
    "GeneratorExit": lambda _: GeneratorExit(),
    "Frozen": lambda _: Frozen(),
    "Mute": lambda _: Mute(),
    "TaskError": _own,
}


# Points and strikes


@dataclass(frozen=True)
class Strike:
    """Where a fault strikes: at the nth passage of a point, in hooks or in the backend.

    Attributes:
        where: The name of a hook, or `backend.NAME` for a call of the adapter.
        moment: `before`, `half` or `after`.
        nth: Counted from 1.
        error: A key of `ERRORS`.
        times: From the nth passage on, this many are struck.
    """

    where: str
    moment: str = "before"
    nth: int = 1
    error: str = "RuntimeError"
    times: int = 1

    def __str__(self) -> str:
        times = f" x{self.times}" if self.times > 1 else ""
        return f"{self.error} {self.moment} {self.where} {self.nth}{times}"


class Points:
    """Counts the passages of hooks, and raises at those that are struck."""

    def __init__(self, strikes: tuple[Strike, ...]) -> None:
        self.strikes = strikes
        self.counts: Counter[tuple[str, str]] = Counter()
        self.raised: list[BaseException] = []
        self.seen: list[weakref.ref[Any]] = []
        self.weights: list[dict[str, bytes]] = []

    def at(self, where: str, moment: str, near: Any = None, spoil: Callable[[], None] | None = None) -> None:
        """Pass a point. `near` is something of the run that an error's frames may hold."""
        self.counts[where, moment] += 1
        count = self.counts[where, moment]
        for strike in self.strikes:
            if (strike.where, strike.moment) == (where, moment) and 0 <= count - strike.nth < strike.times:
                if spoil is not None:
                    spoil()
                raise self.error(strike.error, near)

    def error(self, name: str, near: Any = None) -> BaseException:
        """Makes an error, and remembers it."""
        made = ERRORS[name](near)
        self.raised.append(made)
        return made

    def see(self, *things: Any) -> None:
        """Remember weakly what must not outlive the run."""
        self.seen += [weakref.ref(thing) for thing in things if isinstance(thing, torch.Tensor)]


# What is trained


class Net(nn.Module):
    """Two layers, perhaps with one weight, buffers, plain tensors, and a memory of what it computed."""

    def __init__(self, life: Life, points: Points) -> None:
        super().__init__()
        self.points = points
        # Where the backend is the host itself, what the model remembers is the user's and stays.
        self.replaced = life.backend != "cpu"
        self.first = nn.Linear(IN, HIDDEN)
        points.at("model", "half")
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.third = nn.Linear(HIDDEN, OUT)
        if life.tied:
            self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(HIDDEN) if life.buffers else nn.Identity()
        self.scale = torch.full((), 1.5) if life.plain else 1.5
        self.remembered: Any = {"outputs": []} if life.remembers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.points.at("forward", "before", x)
        hidden = self.norm(torch.relu(self.first(x))) * self.scale
        self.points.at("forward", "half", hidden)
        out: torch.Tensor = self.third(torch.tanh(self.second(hidden)))
        if self.remembered is not None:
            self.remembered["outputs"] = [hidden, (out,)]
        if self.remembered is None or self.replaced:
            self.points.see(hidden, out)
        self.points.at("forward", "after", out)
        return out


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
}


class _Struck:
    """Mixed in before an optimizer's class: its step passes points, one of them half done."""

    points: Points

    def step(self, closure: Any = None) -> Any:
        points = self.points
        params = [p for group in self.param_groups for p in group["params"]]  # type: ignore[attr-defined]
        points.see(*[p.grad for p in params])
        points.at("step", "before", params[0].grad)

        def spoil() -> None:
            with torch.no_grad():
                params[0].add_(100.0)

        points.at("step", "half", params[0], spoil)
        result = super().step()  # type: ignore[misc]
        points.at("step", "after", params[-1])
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.points.at("zero", "before")
        super().zero_grad(set_to_none)  # type: ignore[misc]


class StruckLR(torch.optim.lr_scheduler.StepLR):
    """A scheduler whose step passes points, but for the one that its constructor takes."""

    points: Points | None = None

    def step(self, *args: Any) -> None:
        if self.points is not None:
            self.points.at("schedule", "before")
        super().step(*args)
        if self.points is not None:
            self.points.at("schedule", "after")


class Loader:
    """Batches that exist before the run; a new generator for each epoch."""

    def __init__(self, points: Points, name: str, batches: list[Any]) -> None:
        self.points, self.name, self.batches = points, name, batches

    def __iter__(self) -> Iterator[Any]:
        self.points.at(self.name, "before")
        for batch in self.batches:
            self.points.at(self.name, "half", batch["x"])
            yield batch
        self.points.at(self.name, "after")


@dataclass(frozen=True)
class Life:
    """How a run is to go. Everything that follows from it is deterministic."""

    backend: str = "cpu"
    drive: str = "fit"
    exit: str = "offload"
    optimizer: str = "AdamW"
    tied: bool = True
    buffers: bool = True
    plain: bool = True
    remembers: bool = False
    given: bool = False
    scheduler: str = "step"
    validate: bool = True
    epochs: int = 2
    batches: int = 2
    report_every: int = 2
    observed: bool = False
    request: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        plain = Life()
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(plain, name) or name == "backend"
        )


def build(life: Life, points: Points) -> nn.Module:
    """The model function, which passes points of its own."""
    points.at("model", "before")
    # Not `fork_rng`, which is made with contextlib and sets attributes on the errors that pass through.
    state = torch.get_rng_state()
    torch.manual_seed(7)
    try:
        model = Net(life, points)
    finally:
        torch.set_rng_state(state)
    points.at("model", "after")
    return model


def task_of(life: Life, points: Points, source: Any) -> Task:
    """The task, with points in every hook."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        points.at("optimizer", "before", next(model.parameters()))
        kind, settings = OPTIMIZERS[life.optimizer]
        settings = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
        struck = type(f"Struck{kind.__name__}", (_Struck, kind), {"points": points})
        built: torch.optim.Optimizer = struck(model.parameters(), **settings)
        points.at("optimizer", "after", next(model.parameters()))
        return built

    def scheduler(built: torch.optim.Optimizer) -> Any:
        points.at("scheduler", "before")
        made = StruckLR(built, 1, 0.9)
        made.points = points
        points.at("scheduler", "after")
        return made

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        points.see(*([batch["x"]] if life.backend == "double" else []))
        points.at("loss", "before", batch["x"])
        out = model(batch["x"])

        def compare() -> torch.Tensor:
            points.at("loss", "half", out)
            return nn.functional.mse_loss(out, batch["y"])

        if life.backend == "cpu":
            # What closures hold of the host is theirs; only what stands on a device must go.
            points.at("loss", "half", out)
            value = nn.functional.mse_loss(out, batch["y"])
        else:
            value = compare()
        points.see(value)
        points.at("loss", "after", value)
        return value

    def metrics(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        points.at("metrics", "before", batch["x"])
        error = (model(batch["x"]) - batch["y"]).abs().mean()
        points.at("metrics", "after", error)
        return {"mae": error}

    return Task(
        model=source,
        optimizer=optimizer,
        loss=loss,
        metrics=metrics,
        scheduler=scheduler if life.scheduler else None,
        scheduler_every="epoch" if life.scheduler == "epoch" else "step",
    )


@lru_cache(maxsize=8)
def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """The data: always the same, made outside of every run."""
    generator = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(ROWS, IN, generator=generator), "y": torch.randn(ROWS, OUT, generator=generator)}
        for _ in range(count)
    ]


# Carrying it out


@dataclass
class Ended:
    """What can be seen once a life is over.

    Attributes:
        error: What the caller got raised (or the handle's exception); kept, as a job record keeps it.
        outcome: Where the way of driving gives one.
        slot: Of the run; None if it was never made.
        adapter: As used.
        points: Counts, errors raised, what was seen.
        model: The task's own module, where it gave one; or the outcome's.
        parameters: The objects that were the given model's parameters and buffers before.
        stacked: What the release stack still has.
        session: A weak reference.
        built: A weak reference to the model that the run built.
        events: What an observer was told.
        process: In what the process is other than before.
    """

    error: BaseException | None
    outcome: Outcome | None
    slot: Slot | None
    adapter: Any
    points: Points
    model: nn.Module | None
    parameters: dict[str, torch.Tensor]
    stacked: tuple[str, ...] = ()
    session: weakref.ref[Any] | None = None
    built: weakref.ref[Any] | None = None
    events: list[Any] = field(default_factory=list)
    process: list[str] = field(default_factory=list)

    @property
    def struck(self) -> list[BaseException]:
        """The errors raised on purpose, in order."""
        return self.points.raised


class _Watched(Engine):
    """An engine that lets a test look at the machine of each run it makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sessions: list[weakref.ref[Any]] = []
        self.slots: list[Slot] = []
        self.stacks: list[Any] = []

    def _session(self, *args: Any, **kwargs: Any) -> Any:
        session = super()._session(*args, **kwargs)
        self.sessions.append(weakref.ref(session))
        self.slots.append(session.driver.slot)
        self.stacks.append(session.driver.stack)
        return session


def adapter_of(life: Life, points: Points) -> Any:
    """The backend, with the faults among the strikes."""
    faults = [
        Fault(
            strike.where.removeprefix("backend."),
            strike.moment,
            strike.nth,
            partial(points.error, strike.error),
            strike.times,
        )
        for strike in points.strikes
        if strike.where.startswith("backend.")
    ]
    return faulty(BACKENDS[life.backend], *faults)


def live(life: Life, *strikes: Strike, deadline: float = 20.0, weigh: bool = False) -> Ended:
    """Carry a life out.

    Args:
        life: What and how.
        strikes: Where it is struck.
        deadline: For the way out.
        weigh: Whether to note the weights after each update.
    """
    before = process_state.snapshot()
    points = Points(strikes)
    adapter = adapter_of(life, points)
    built: list[weakref.ref[Any]] = []
    given = build(life, Points(())) if life.given else None
    if isinstance(given, Net):
        given.points = points

    def source() -> nn.Module:
        model = build(life, points)
        built.append(weakref.ref(model))
        return model

    task = task_of(life, points, given if given is not None else source)
    events: list[Any] = []
    observers = [_observer(points, events)] if life.observed else []
    engine = _Watched(
        adapter, exit=life.exit, deadline=deadline, report_every=life.report_every, observers=observers
    )
    owned = {} if given is None else {**dict(given.named_parameters()), **dict(given.named_buffers())}
    data = Loader(points, "data", batches(life.batches))
    checked = Loader(points, "validation", batches(2)) if life.validate else None
    if weigh:
        _weigh(points)
    ended = Ended(None, None, None, adapter, points, given, owned)
    _DRIVES[life.drive](ended, engine, task, data, checked, life)
    ended.events = events
    if engine.slots:
        ended.slot, ended.stacked = engine.slots[0], engine.stacks[0].names
        ended.session = engine.sessions[0]
    ended.built = built[0] if built else None
    if ended.model is None and ended.outcome is not None:
        ended.model = ended.outcome.model
    ended.process = process_state.settled(before)
    return ended


def _weigh(points: Points) -> None:
    plain = points.at

    def at(where: str, moment: str, near: Any = None, spoil: Any = None) -> None:
        plain(where, moment, near, spoil)
        if (where, moment) == ("step", "after"):
            points.weights.append({"last": near.detach().numpy().tobytes()})

    points.at = at  # type: ignore[method-assign]


def _observer(points: Points, events: list[Any]) -> Callable[[Any], None]:
    def observer(event: Any) -> None:
        events.append(event)
        points.at("observer", "before")

    return observer


def _fit(ended: Ended, engine: Engine, task: Task, data: Any, checked: Any, life: Life) -> None:
    try:
        ended.outcome = engine.fit(task, data, validate=checked, epochs=life.epochs)
    except BaseException as error:
        ended.error = error


def _start(ended: Ended, engine: Engine, task: Task, data: Any, checked: Any, life: Life) -> None:
    what, step = life.request
    box: list[Any] = []
    if what:
        data = _Asking(data, box, what, step)
    try:
        run = engine.start(task, data, validate=checked, epochs=life.epochs)
    except BaseException as error:
        ended.error = error
        return
    box.append(run)
    ended.outcome = run.wait(30)
    ended.error = run.exception(1)


class _Asking:
    """Batches that, before the nth, ask the run for its end."""

    def __init__(self, inner: Loader, box: list[Any], what: str, nth: int) -> None:
        self.inner, self.box, self.what, self.nth = inner, box, what, nth
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.count += 1
            if self.count == self.nth:
                while not self.box:
                    threading.Event().wait(0.001)
                getattr(self.box[0], self.what)()
            yield batch


def _handles(ended: Ended, engine: Engine, task: Task, data: Any, checked: Any, life: Life) -> None:
    created = engine.open(task)
    try:
        with created:
            training = created.place().optimize().train()
            for _ in range(life.epochs):
                for batch in data:
                    training.step(batch)
                if checked is not None:
                    training.validate(checked)
            training.finish()
    except BaseException as error:
        ended.error = error
    ended.outcome = created.outcome


_DRIVES: dict[str, Callable[..., None]] = {"fit": _fit, "start": _start, "handles": _handles}


@dataclass(frozen=True)
class Reference:
    """What an undisturbed life shows: how often each point is passed, and the weights."""

    counts: dict[tuple[str, str], int]
    calls: dict[str, int]
    weights: tuple[bytes, ...]
    final: dict[str, bytes]


def state_of(model: nn.Module) -> dict[str, bytes]:
    """The model's whole state, to the bit."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.state_dict().items()}


@lru_cache(maxsize=512)
def reference(life: Life) -> Reference:
    """The undisturbed life: finished, its model kept home whatever the life's exit policy."""
    # Driven by handles, a scheduler that moves once an epoch is left to whoever drives.
    drive = "handles" if life.drive == "handles" else "fit"
    plain = replace(life, exit="offload", request=("", 0), drive=drive, observed=False)
    ended = live(plain, weigh=True)
    if ended.error is not None or ended.model is None:
        raise AssertionError(f"the undisturbed life failed: {plain}") from ended.error
    points = ended.points
    return Reference(
        dict(points.counts),
        dict(ended.adapter.counts),
        tuple(entry["last"] for entry in points.weights),
        state_of(ended.model),
    )


def points_of(life: Life) -> list[Strike]:
    """Every point of a life at which it can be struck, with one strike each."""
    ended = live(life)
    if ended.error is not None:
        raise AssertionError(f"the undisturbed life failed: {life}") from ended.error
    strikes = [
        Strike(where, moment, nth)
        for (where, moment), count in sorted(ended.points.counts.items())
        if where != "observer"
        for nth in range(1, count + 1)
    ]
    strikes += [
        Strike(f"backend.{call}", moment, nth)
        for call in CALLS
        for nth in range(1, ended.adapter.counts.get(call, 0) + 1)
        for moment in ("before", "after")
    ]
    return strikes


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection within: what is freed is freed by reference counts."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
