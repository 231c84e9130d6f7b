"""The judge can say no: each fault that is planted into the engine is found by the promise it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tools import aftermath as judge
from tools.lives import Life, Strike, live, without_collector

from interlock import engine, evidence, loop
from interlock.backends.double import ReplacingDouble
from interlock.driver import Driver
from interlock.events import Bus, PhaseChanged
from interlock.evidence import Errors
from interlock.release import ReleaseStack
from interlock.residency import Registry
from interlock.session import Session
from interlock.work import Work

LIFE = Life(backend="double", given=True, validate=False)
STRUCK = (Strike("loss", "half", 3, "cause"),)
TWICE = (*STRUCK, Strike("backend.free", "before", 1, "Unpicklable"))

Plant = Callable[[pytest.MonkeyPatch], None]


def broken(life: Life, *strikes: Strike) -> set[str]:
    """The names of the promises that were broken."""
    with without_collector():
        ended = live(life, *strikes)
        return {p.__name__ for p in judge.PROMISES if list(p(life, ended, ()))}


def instead(owner: Any, name: str, function: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, function)


def _half_committed(self: Any, copies: dict[int, torch.Tensor]) -> None:
    """The copies of the second half are lost."""
    _commit_model(self, dict(list(copies.items())[::2]))


def _another_error(error: BaseException) -> None:
    raise RuntimeError(str(error)) from error


def _silent(self: Bus, event: Any) -> None:
    if not (isinstance(event, PhaseChanged) and event.event == "homed"):
        _publish(self, event)


def _zeros(self: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(_fetch(self, tensor))


def _keeps_the_session(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    plain = Session.run
    patch.setattr(Session, "run", lambda self: (kept.append(self), plain(self))[1])


def _keeps_a_tensor(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    plain = loop.train_epoch

    def train_epoch(batches: Any, step: Any, first: Any, *rest: Any) -> bool:
        def keeping(batch: Any) -> torch.Tensor:
            kept.append(step(batch))
            return kept[-1]

        return plain(batches, keeping, first, *rest)

    patch.setattr("interlock.routine.train_epoch", train_epoch)


def _no_grad_for_ever(patch: pytest.MonkeyPatch) -> None:
    plain = Work.let_go

    def let_go(self: Work) -> None:
        plain(self)
        torch.set_grad_enabled(False)

    patch.setattr(Work, "let_go", let_go)


_left: list[Bus] = []
_commit_model, _publish, _fetch = Registry.commit_model, Bus.publish, ReplacingDouble._fetch

PLANTS: dict[str, tuple[Plant, tuple[Strike, ...], str]] = {
    "the optimizer's state stays": (
        instead(Registry, "commit_state", lambda self, copies: None),
        (),
        "nothing_is_left_on_the_device",
    ),
    "the model stays": (
        instead(Registry, "commit_model", lambda self, copies: None),
        STRUCK,
        "nothing_is_left_on_the_device",
    ),
    "half of the model stays": (
        instead(Registry, "commit_model", _half_committed),
        (),
        "nothing_is_left_on_the_device",
    ),
    "frames are pinned": (
        instead(evidence, "unpin", lambda *_: None),
        STRUCK,
        "nothing_of_a_step_is_alive",
    ),
    "losses are kept": (_keeps_a_tensor, (), "nothing_is_left_on_the_device"),
    "copies are wrong": (instead(ReplacingDouble, "_fetch", _zeros), STRUCK, "the_weights_are_right"),
    "another error is raised": (
        instead(engine, "raise_again", _another_error),
        STRUCK,
        "the_first_error_reaches_the_caller",
    ),
    "the error is swallowed": (
        instead(Errors, "first", property(lambda self: None)),
        STRUCK,
        "the_first_error_reaches_the_caller",
    ),
    "later errors are lost": (
        instead(Errors, "failures", lambda self: (evidence.record(*self._noted[0]),) if self._noted else ()),
        TWICE,
        "the_first_error_reaches_the_caller",
    ),
    "the way out is not taken": (
        instead(Driver, "unwind", lambda self, on_error: None),
        STRUCK,
        "the_run_is_closed",
    ),
    "a release does not leave the stack": (
        instead(ReleaseStack, "drop", lambda self, name: None),
        (),
        "the_run_is_closed",
    ),
    "the device is never released": (
        instead(ReplacingDouble, "releases", lambda self: {}),
        (),
        "each_resource_ends_once",
    ),
    "the session is kept": (_keeps_the_session, STRUCK, "the_run_is_freed"),
    "nobody is told": (instead(Bus, "publish", _silent), (), "the_history_is_legal"),
    "observers are left running": (
        instead(Bus, "finish", lambda self, seconds: _left.append(self)),
        (),
        "the_process_is_as_it_was",
    ),
    "torch is left without gradients": (_no_grad_for_ever, (), "the_process_is_as_it_was"),
}


OBSERVED = ("nobody is told", "observers are left running")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str) -> None:
    do, strikes, promise = PLANTS[plant]
    life = (
        LIFE if promise != "the_history_is_legal" else Life(backend="double", observed=True, validate=False)
    )
    if promise == "the_process_is_as_it_was":
        life = Life(backend="double", observed=plant.startswith("observers"), validate=False)
    assert broken(life, *strikes) == set()
    with pytest.MonkeyPatch.context() as patch:
        do(patch)
        found = broken(life, *strikes)
    torch.set_grad_enabled(True)
    while _left:
        _left.pop().finish(1.0)
    assert promise in found
