"""One run under test: driven operation by operation, and held against the plain machine after each.

No Hypothesis in here: an operation is a method call, so what Hypothesis prints can be run again by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from interlock import Created, Engine, Outcome
from interlock.errors import StaleHandle

from .errors import BrokenPromise, InterlockError
from .model import Kind
from .suite_device import ERRORS, Lost, Process, RunFault, Watch
from .suite_operations import LEAVING, METHODS, OPERATIONS, WAITS, operation
from .suite_paths import refused
from .suite_plain import Plain
from .suite_setup import Setup, empty, named

Exit = Literal["offload", "keep", "discard"]
LEASES: dict[str, dict[str, Any]] = {"": {}, "seed": {"seed": 0}, "threads": {"threads": 1}}
"""What a run may want of its process, by name."""
_FAST = ("update", "updated")


class Life:
    """One run.

    Attributes:
        plain: The plain machine, in the same place.
        struck: The errors that were raised on purpose, in order.
        model: As the run built it; `None` before.
        originals: Name -> the parameter or buffer of before placement.
        steps: Those that are complete.
        process: As it was before the run.

    Args:
        setup: What it has in common with others.
        watch: Looks at its adapter.
        exit: The exit policy.
        fault: What strikes it.
        lease: A key of `LEASES`.
    """

    def __init__(
        self,
        setup: Setup,
        watch: Watch,
        exit: Exit = "offload",  # noqa: A002 - named as the engine's setting
        fault: RunFault | None = None,
        lease: str = "",
    ) -> None:
        self.setup, self.watch, self.exit, self.fault, self.lease = setup, watch, exit, fault, lease
        self.plain = Plain(setup.spec)
        self.struck: list[BaseException] = []
        self.model: nn.Module | None = None
        self.originals: dict[str, torch.Tensor] = {}
        self.trains: dict[str, bool] = {}
        self.steps = 0
        self.remembered = 0
        self.pending = False
        """Whether steps were taken that the history does not tell of yet: it does with the next event."""
        self._updates = 0
        self._seen = 1
        self.handles: dict[str, Any] = {}
        """Those that the run has given so far, by the name of their phase."""
        self.process = Process()
        self.random = torch.get_rng_state()
        watch.begin(fault, self.error)
        engine = Engine(watch.adapter, exit=exit, deadline=setup.deadline, **LEASES[lease])
        task = replace(setup.task, model=self._build, optimizer=self._optimizer, compile=False)
        self.created: Created = engine.open(task)
        self.handles["created"] = self.created
        self.session = self.created._session
        self.created.__enter__()

    # -- what the task is told ------------------------------------------------------------------

    def _build(self) -> nn.Module:
        model = self.setup.build()
        if isinstance(model, nn.Module):
            self.model = model
            self.originals = named(model)
            self.trains = {name: p.requires_grad for name, p in model.named_parameters()}
        return model

    def _optimizer(self, model: nn.Module) -> Any:
        made: Any = self.setup.task.optimizer(model)
        if self.fault is not None and self.fault.call == "update":
            for optimizer in made.values() if isinstance(made, dict) else (made,):
                optimizer.register_step_pre_hook(lambda *_: self._update("before"))
                optimizer.register_step_post_hook(lambda *_: self._update("after"))
        return made

    def _update(self, moment: str) -> None:
        self._updates += moment == "before"
        fault = self.fault
        struck = fault is not None and fault.nth <= self._updates < fault.nth + fault.times
        if fault is not None and struck and moment == fault.moment:
            raise self.error(fault.error)

    def error(self, name: str) -> BaseException:
        """An error that strikes now, by name."""
        made = Lost("struck") if name == "Lost" else ERRORS[name]("struck")
        self.struck.append(made)
        return made

    # -- where it is ----------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, once it has."""
        return self.created.outcome

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self.outcome is not None

    @property
    def now(self) -> Plain:
        """The plain machine, after the steps that the history does not tell of yet."""
        return self.plain.ahead(*_FAST) if self.pending else self.plain

    @property
    def operations(self) -> list[str]:
        """The events that can be fired now, by whoever drives a run."""
        now = self.now
        drivable = (*OPERATIONS, *self.setup.added)
        found = [event for event in drivable if now.may(event) or self._detour(now, event)]
        if self.session.stepping.at_rest:
            return found
        return [event for event in found if event not in WAITS]  # gradients wait for their update first

    @property
    def illegal(self) -> list[str]:
        """The events that must be refused now."""
        now = self.now
        return [event for event in (*self.setup.spec.events, "no such event") if not now.may(event)]

    def _detour(self, now: Plain, event: str) -> list[str]:
        """What a backend does first, after which a run can be paused or suspended."""
        if event not in WAITS or not now.resting:
            return []
        for first in now.legal:
            way = now.way(first)
            after = now.ahead(*way)
            if after.state == now.state and after.may(event):
                return way
        return []

    def _expected(self, event: str) -> list[str]:
        """The events of an operation that nothing disturbs."""
        now = self.now
        if event == "update":
            return []
        if event == "leave":
            kind = self.setup.spec.phase[now.state].kind
            event = "stop" if kind is Kind.WORK else "offload" if now.may("offload") else "interrupt"
        if event == "lose" and not now.may(event):
            event = "fail"
        first = [] if now.may(event) else self._detour(now, event)
        after = now.ahead(*first)
        way = [*first, *after.way(event, frozenset({self.exit}))]
        if event == "train" and 0 in self.setup.task.adopt:
            way += after.ahead(event).way("adopt")
        return way

    # -- driving --------------------------------------------------------------------------------

    def fire(self, event: str) -> None:
        """Fire an event: carry out its operation where it is legal, and see it refused where it is not.

        Raises:
            BrokenPromise: Something is not as it should be.
            BaseException: What the engine raised of its own account.
        """
        if event != "leave" and event not in self.operations:
            self._refuse(event)
            return
        expected, struck = self._expected(event), len(self.struck)
        raised = self._attempt(lambda: self._carry_out(event))
        if event == "update" and raised is None:
            self.pending, self.steps = True, self.steps + 1
        new = self.struck[struck + (event in LEAVING) :]
        broken = [*self._follow(expected if not new else None)]
        if new and raised is None and event not in LEAVING:
            broken.append(f"{new[0]!r} struck in '{event}', and nothing was raised")
        if raised is not None and raised is not self.struck[0]:
            broken.append(f"{raised!r} was raised, and {self.struck[0]!r} had struck first")
        if self.struck and not self.closed:
            broken.append(f"the run goes on after {self.struck[0]!r}")
        self._judge(event, broken)

    def leave(self) -> None:
        """Leave the run's block, as one does who has no more to do. As `fire`."""
        if not self.closed:
            self.fire("leave")

    def abort(self) -> None:
        """End the run in any way, and put the process back, for a test that has failed."""
        try:
            self.created.__exit__(RuntimeError, RuntimeError("the test failed"), None)
        except BaseException as error:
            # The test's own error is the one that is told, but an interrupt of the user's goes through.
            if not isinstance(error, Exception) and all(error is not struck for struck in self.struck):
                raise
        finally:
            self.process.put_back()
            torch.set_rng_state(self.random)

    def drop(self) -> None:
        """Let what the run was to keep on the device go, and a device that a fault kept from being freed."""
        if self.watch.taken:
            adapter = self.watch.adapter
            adapter.faults = ()
            adapter.free()  # or the next runs could not tell theirs from what is left of this one
        if self.model is not None:
            empty(self.model, self.watch.adapter)
        self.originals.clear()  # the same ones, where placement keeps Parameters

    def _attempt(self, work: Callable[[], object]) -> BaseException | None:
        try:
            work()
        except BaseException as error:
            if all(error is not struck for struck in self.struck):
                raise
            return error
        return None

    def _carry_out(self, event: str) -> None:
        if event == "leave":
            self.created.__exit__(None, None, None)
        else:
            operation(event)(self)

    def _refuse(self, event: str) -> None:
        calls, stack = self.watch.calls, self.session.driver.stack.names
        first = _FAST if self.pending else ()
        broken = [*refused(self.session.driver.slot, self.now, event, self.session.driver.fire, first)]
        broken += self._follow([])
        broken += self.stale(event)
        if self.watch.calls != calls:
            broken.append(f"refusing '{event}' has called the backend")
        if self.session.driver.stack.names != stack:
            broken.append(f"refusing '{event}' has changed the release stack")
        self._judge(event, broken)

    def stale(self, event: str) -> Iterator[str]:
        """What is wrong with how the handle of an earlier phase refuses an event."""
        phase, call = METHODS.get(event, ("", lambda _: None))
        handle = self.handles.get(phase)
        if handle is None or (handle._current and not self.closed):
            return
        before = len(self.session.driver.slot.history)
        try:
            call(handle)
            raised = "nothing"
        except StaleHandle:
            raised = ""
        except InterlockError as error:
            raised = repr(error)
        if raised:
            yield f"'{event}' on the handle of phase '{phase}', which is over, raised {raised}"
        if len(self.session.driver.slot.history) != before:
            yield f"'{event}' on the handle of phase '{phase}', which is over, has changed the run"

    def _follow(self, expected: list[str] | None) -> Iterator[str]:
        """Take the plain machine where the run went; what is wrong with the way.

        Args:
            expected: The events; `None` where a fault struck, and the exit table decides.
        """
        history = self.session.driver.slot.history
        entries, self._seen = history[self._seen :], len(history)
        events = [entry.event for entry in entries]
        for entry in entries:
            yield from self.plain.follow(entry)
        if self.pending and events:
            self.pending = False
            if tuple(events[:2]) != _FAST:
                yield f"the history does not tell of the steps before {events}"
            del events[:2]
        if expected is not None and events != expected:
            yield f"the run went {events}, and should have gone {expected}"

    def _judge(self, event: str, broken: list[str]) -> None:
        from .suite_checks import promises_at_rest, promises_once_closed

        broken += self.plain.differs(self.session.driver.slot)
        if self.created.phase != self.plain.state:
            broken.append(f"the handle says '{self.created.phase}', the plain machine '{self.plain.state}'")
        broken += promises_once_closed(self) if self.closed else promises_at_rest(self)
        if broken:
            raise BrokenPromise(f"after '{event}' in phase '{self.plain.state}'", broken)
