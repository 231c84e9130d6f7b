"""Faults planted in the engine and in an adapter, to show that the invariant suites find them.

`with planted(name):` the engine has that fault; afterwards it is as it was. Each is what a careless change
might do: a line forgotten, a guard left out, one path of several not thought of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from interlock import handles, phases, residency, suspension
from interlock.backends import double
from interlock.driver import Driver
from interlock.ending import Ending
from interlock.evidence import Errors
from interlock.release import ReleaseStack
from interlock.residency import Registry
from interlock.specs import IllegalTransition, Lifecycle, Status

Change = tuple[Any, str, Any]
"""Owner, attribute, and what stands there instead."""


def _nothing(*_: Any) -> None:
    return None


def _release_forgotten_on_one_path() -> list[Change]:
    return [(Registry, "discard_model", Registry.keep_model)]


def _plain_tensors_forgotten() -> list[Change]:
    return [(residency, "slots", residency.registered)]


def _optimizer_not_rebound_at_home() -> list[Change]:
    return [(residency, "rebind", _nothing)]


def _optimizer_not_rebound_on_resuming() -> list[Change]:
    return [(suspension, "rebind", _nothing)]


def _optimizer_state_lost_on_resuming() -> list[Change]:
    again = Registry.after_placement

    def after_placement(self: Registry) -> None:
        again(self)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    return [(Registry, "after_placement", after_placement)]


def _device_released_twice() -> list[Change]:
    release = ReleaseStack.release

    def twice(self: ReleaseStack, name: str, how: Any = None) -> None:
        release(self, name, how)
        self._carried_out.discard(name)
        release(self, name, how)

    return [(ReleaseStack, "release", twice)]


def _device_asked_after_release() -> list[Change]:
    draw_up = Ending._draw_up

    def asking(self: Ending) -> Any:
        self.adapter.sync()
        return draw_up(self)

    return [(Ending, "_draw_up", asking)]


def _later_error_replaces_the_first() -> list[Change]:
    def last(self: Errors) -> BaseException | None:
        return self._noted[-1][0] if self._noted else None

    return [(Errors, "first", property(last))]


def _error_on_the_way_out_swallowed() -> list[Change]:
    return [(Ending, "close", lambda self: self.conclude())]


def _ties_not_tied_again() -> list[Change]:
    return [(residency, "_ties", lambda originals: ())]


def _gradients_kept_with_the_model() -> list[Change]:
    commit = Registry.commit_state

    def keeping(self: Registry, copies: dict[int, torch.Tensor]) -> None:
        kept = {p: p.grad for p in self.model.parameters()}
        commit(self, copies)
        for parameter, grad in kept.items():
            parameter.grad = grad

    return [(Registry, "commit_state", keeping), (Registry, "keep_model", Registry._forget_placed)]


def _optimizer_state_left_there() -> list[Change]:
    return [(Registry, "copy_state", lambda self: {})]


def _switch_not_put_back() -> list[Change]:
    def leave(self: Any, *_: object) -> None:
        double._SWITCH.release()

    return [(double.replacing_parameters, "__exit__", leave)]


def _wrong_phase_told() -> list[Change]:
    def phase(self: Any) -> str:
        real: str = self._session.driver.phase
        return "training" if real == "paused" else real

    return [(handles._Handle, "phase", property(phase))]


def _history_entry_dropped() -> list[Change]:
    draw_up = Ending._draw_up

    def dropping(self: Ending) -> Any:
        outcome = draw_up(self)
        return replace(outcome, history=tuple(e for e in outcome.history if e.event != "validated"))

    return [(Ending, "_draw_up", dropping)]


def _residue_not_measured() -> list[Change]:
    following = Lifecycle.next

    def skipping(self: Lifecycle, config: Any, wishes: frozenset[str]) -> str | None:
        event = following(self, config, wishes)
        return "free" if event == "measure" else event

    return [(Lifecycle, "next", skipping)]


def _illegal_event_passed_over() -> list[Change]:
    fire = Driver.fire

    def passing(self: Driver, event: str) -> None:
        try:
            fire(self, event)
        except IllegalTransition:
            return

    return [(Driver, "fire", passing)]


def _stale_handles_work() -> list[Change]:
    return [(handles._Handle, "_check", _nothing)]


def _release_of_half_a_model_forgotten() -> list[Change]:
    settle = Driver.settle

    def forgetting(self: Driver) -> None:
        settle(self)
        if self.phase == "failed" and self.slot.status("model") is Status.PARTIAL:
            self.stack._carried_out.add("model")

    return [(Driver, "settle", forgetting)]


PLANTED: dict[str, Callable[[], list[Change]]] = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        _release_forgotten_on_one_path,
        _release_of_half_a_model_forgotten,
        _plain_tensors_forgotten,
        _optimizer_not_rebound_at_home,
        _optimizer_not_rebound_on_resuming,
        _optimizer_state_lost_on_resuming,
        _device_released_twice,
        _device_asked_after_release,
        _later_error_replaces_the_first,
        _error_on_the_way_out_swallowed,
        _ties_not_tied_again,
        _gradients_kept_with_the_model,
        _optimizer_state_left_there,
        _switch_not_put_back,
        _wrong_phase_told,
        _history_entry_dropped,
        _residue_not_measured,
        _illegal_event_passed_over,
        _stale_handles_work,
    )
}
"""What is wrong -> what is changed for it."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The engine with a fault, within the block; and the process's switches as they were, after it."""
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    # Who holds what is left is not looked for: that walks all objects of the process.
    changes = [*PLANTED[name](), (phases, "with_owners", lambda left, adapter: left)]
    before = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in changes]
    try:
        for owner, attribute, value in changes:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
