"""How events are brought about on a real run: by the public phase handles, where one has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlock import Placed, Ready, Training

from .compose import Monitor
from .model import Kind, Spec

if TYPE_CHECKING:
    from .suite_life import Life

LEAVING = {"fail": "RuntimeError", "interrupt": "KeyboardInterrupt", "lose": "Lost"}
"""Events by which the run's block is left with an error, and its name."""
WAITS = ("pause", "suspend")
"""What a run is asked for between two steps, and waits in."""


def _acquire(life: Life) -> None:
    life.session.perform(lambda: life.session.driver.do("acquire"))


def _place(life: Life) -> None:
    life.handles["placed"] = life.created.place()


def _optimize(life: Life) -> None:
    placed: Placed = life.handles["placed"]
    life.handles["ready"] = placed.optimize()


def _train(life: Life) -> None:
    ready: Ready = life.handles["ready"]
    life.handles["training"] = ready.train()


def _update(life: Life) -> None:
    training: Training = life.handles["training"]
    training.step(life.setup.batch(life.steps))


def _validate(life: Life) -> None:
    training: Training = life.handles["training"]
    training.validate(life.setup.batches[:2])


def _adopt(life: Life) -> None:
    training: Training = life.handles["training"]
    training.adopt(_nothing)


def _nothing(model: object, optimizer: object) -> None:
    """An adoption that changes nothing."""


def _reach(event: str) -> Callable[[Life], None]:
    def work(life: Life) -> None:
        session = life.session
        if session._losses and event in WAITS:
            session._report_losses()  # as between two steps of `fit`, before it attends to a request
        session.driver.reach(event)

    return lambda life: life.session.perform(lambda: work(life))


def _finish(life: Life) -> None:
    training: Training = life.handles["training"]
    training.finish()


def _stop(life: Life) -> None:
    if life.plain.state == "ready":
        ready: Ready = life.handles["ready"]
        ready.stop()
    elif life.plain.state == "training":
        training: Training = life.handles["training"]
        training.stop()
    else:
        life.session.perform(lambda: life.session.end("stop"))
        life.session.close()


def _offload(life: Life) -> None:
    handles = {"placed": life.handles.get("placed"), "ready": life.handles.get("ready")}
    handle: Any = handles.get(life.plain.state) or life.created
    handle.offload()


def _leave_with(name: str) -> Callable[[Life], None]:
    def operation(life: Life) -> None:
        try:
            raise life.error(name)
        except BaseException as error:
            life.created.__exit__(type(error), error, error.__traceback__)

    return operation


OPERATIONS: dict[str, Callable[[Life], None]] = {
    "acquire": _acquire,
    "place": _place,
    "optimize": _optimize,
    "train": _train,
    "update": _update,
    "resume": _reach("resume"),
    "validate": _validate,
    "adopt": _adopt,
    "sync": _reach("sync"),
    "pause": _reach("pause"),
    "suspend": _reach("suspend"),
    "finish": _finish,
    "stop": _stop,
    "offload": _offload,
    **{event: _leave_with(name) for event, name in LEAVING.items()},
}
"""Event -> how it is brought about: by the public phase handles where there is one."""


def added(spec: Spec, monitor: Monitor) -> tuple[str, ...]:
    """Events that a monitor adds before the exit, and that no operation of every backend stands for."""
    events = [t.event for t in monitor.transitions if spec.phase[t.source].kind in (Kind.STABLE, Kind.WORK)]
    return tuple(dict.fromkeys(event for event in events if event not in (*OPERATIONS, "abandon")))


def operation(event: str) -> Callable[[Life], None]:
    """How an event is brought about: one of `OPERATIONS`, or for one that a monitor adds, by itself."""
    return OPERATIONS.get(event) or (lambda life: life.session.perform(lambda: life.session.driver.do(event)))


METHODS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "place": ("created", lambda handle: handle.place()),
    "optimize": ("placed", lambda handle: handle.optimize()),
    "train": ("ready", lambda handle: handle.train()),
    "update": ("training", lambda handle: handle.step(None)),
    "finish": ("training", lambda handle: handle.finish()),
    "validate": ("training", lambda handle: handle.validate([])),
}
"""Event -> the phase whose handle has a method for it, and the call."""
