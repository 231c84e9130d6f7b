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
from interlock.backends.double import ReplacingDouble
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


# In an adapter: the double stands for anybody's


def _fetch_aliases() -> list[Change]:
    return [(ReplacingDouble, "_fetch", lambda self, tensor: tensor.detach())]


def _fetch_rounds() -> list[Change]:
    fetch = ReplacingDouble._fetch

    def rounding(self: ReplacingDouble, tensor: torch.Tensor) -> torch.Tensor:
        home = fetch(self, tensor)
        return home.half().to(home.dtype) if home.is_floating_point() else home

    return [(ReplacingDouble, "_fetch", rounding)]


def _place_freezes_biases() -> list[Change]:
    place = ReplacingDouble._place

    def freezing(self: ReplacingDouble, model: torch.nn.Module) -> None:
        place(self, model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() > 1)

    return [(ReplacingDouble, "_place", freezing)]


def _place_leaves_buffers() -> list[Change]:
    place = ReplacingDouble._place

    def leaving(self: ReplacingDouble, model: torch.nn.Module) -> None:
        buffers = [(module, dict(module._buffers)) for module in model.modules()]
        place(self, model)
        for module, before in buffers:
            module._buffers.update(before)

    return [(ReplacingDouble, "_place", leaving)]


def _free_forgets_a_staging_buffer() -> list[Change]:
    move = ReplacingDouble._move

    def keeping(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.staging = move(self, tensor)
        return moved

    return [(ReplacingDouble, "_move", keeping)]


def _free_forgets_a_switch() -> list[Change]:
    acquire = ReplacingDouble._acquire

    def switching(self: ReplacingDouble) -> Any:
        torch.use_deterministic_algorithms(True)
        return acquire(self)

    return [(ReplacingDouble, "_acquire", switching)]


def _leftovers_are_not_told() -> list[Change]:
    return [(ReplacingDouble, "_leftovers", lambda self: ())]


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
        _fetch_aliases,
        _fetch_rounds,
        _place_freezes_biases,
        _place_leaves_buffers,
        _free_forgets_a_staging_buffer,
        _free_forgets_a_switch,
        _leftovers_are_not_told,
    )
}
"""What is wrong -> what is changed for it."""

EXPECTED = {
    "release forgotten on one path": r"\d+ bytes are on the device, and 0 may be",
    "release of half a model forgotten": r"\d+ bytes are on the device, and 0 may be",
    "plain tensors forgotten": r"on the device, and should be at home: .*outputs",
    "optimizer not rebound at home": r"the optimizer holds parameters that are not the model's",
    "optimizer not rebound on resuming": r"when the run was resumed: the optimizer holds .* before placement",
    "optimizer state lost on resuming": r"the optimizer had state for 3 parameters, and has it for 0",
    "device released twice": r"the device was given back twice",
    "device asked after release": r"'sync' was called although the device was given back",
    "later error replaces the first": r"the outcome's error is .*, and the first that struck",
    "error on the way out swallowed": r"struck in '\w+', and nothing was raised",
    "ties not tied again": r"'first.weight' and 'second.weight' were one tensor, and are two",
    "gradients kept with the model": r"\d+ bytes are on the device, and \d+ may be",
    "optimizer state left there": r"\d+ bytes are on the device",
    "switch not put back": r"'overwrite parameters' was False, and is True",
    "wrong phase told": r"the handle says 'training', the plain machine 'paused'",
    "history entry dropped": r"the outcome has another history than the run",
    "residue not measured": r"should have gone \[.*'measure', 'measured'",
    "illegal event passed over": r"'\w+' was taken in '\w+', where it is not legal",
    "stale handles work": r"on the handle of phase '\w+', which is over, (raised|has changed)",
    "fetch aliases": r"on the device, and should be at home: .*first\._parameters",
    "fetch rounds": r"'first.weight' is .* away from an undisturbed run of \d+ steps",
    "place freezes biases": r"what trains has changed",
    "place leaves buffers": r"the model was kept on the device, and \['seen'\] are not there",
    "free forgets a staging buffer": r"\d+ bytes are on the device",
    "free forgets a switch": r"'deterministic algorithms' was False, and is True",
    "leftovers are not told": r"the outcome says that (0 bytes are left, and there are|it left -\d+ bytes)",
}
"""What is wrong -> what the error that finds it says, at least."""


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
