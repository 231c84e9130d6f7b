"""Drives one run along its lifecycle. It decides nothing: the spec does.

The driver fires events, performs what an in-flight phase stands for (the *action* bound to that
phase), and after every transition compares the release stack with the spec's held set. Where the
continuation table has a row, the next event comes from there; after a fault it always does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from interlock.specs import Entry, Kind, Lifecycle, Slot

from .errors import HeldSetMismatch, NoWayOut
from .release import Release, ReleaseStack

PATIENCE = 16
"""Faults in a row without any progress after which the way out is given up. The proof says that
it cannot happen; if it does, an endless loop would be the worse answer."""


WAITS = ("pause", "suspend")
"""Requests that are events of the spec, and hold until another one comes."""


class Position:
    """Where the loop is, written by the step's generated code and by requests, read at a fault.

    Attributes:
        updating: Inside the optimizer's update; parameters may be half changed.
        step: Steps that are complete.
        epoch: The present epoch, from 0.
        cutting: Since when, by `time.monotonic()`, a lazy device compiles or begins a program; else 0.
        doing: What the run's thread was last seen to begin: "loader", "step", ...
        request: What another thread asked for: "", "stop", "cancel", "pause" or "suspend"; or what the
            run's own thread found: "finish".
        asking: Held by whoever changes the request.
        changed: Set when the request changed, for a run that waits.
        cancellation: The error raised for `cancel`, so that one from another run is told apart.
    """

    __slots__ = (
        *("asking", "cancellation", "changed", "cutting", "doing", "epoch"),
        *("request", "since", "step", "updating"),
    )

    def __init__(self) -> None:
        self.updating = False
        self.cutting = 0.0
        self.step = 0
        self.epoch = 0
        self.doing = ""
        self.since = 0.0
        self.request = ""
        self.asking = threading.RLock()
        self.changed = threading.Event()
        self.cancellation: BaseException | None = None

    def ask(self, request: str) -> None:
        """Let the run know what is wanted, also if it waits."""
        with self.asking:
            self.request = request
        self.changed.set()

    def propose(self, request: str) -> bool:
        """Ask for it unless the run is to end already; whether it was asked for."""
        with self.asking:
            free = self.request in ("", *WAITS)
            self.request = request if free else self.request
        self.changed.set()
        return free


class Driver:
    """One run's slot in the machine, its release stack, and the actions of its phases.

    Args:
        life: The lifecycle, proved.
        actions: In-flight phase -> what is done in it.
        releases: Resource -> how it is given back; pushed when a transition acquires it.
        stack: Empty.
        position: Shared with the loop.
        wishes: The run's wishes, fixed at launch.
        announce: Called with each new entry of the history.
    """

    def __init__(
        self,
        life: Lifecycle,
        actions: Mapping[str, Callable[[], None]],
        releases: Mapping[str, Release],
        stack: ReleaseStack,
        position: Position,
        wishes: frozenset[str],
        announce: Callable[[Entry], None],
    ) -> None:
        self.slot: Slot = life.slot()
        self.spec = life.spec
        self.stack = stack
        self.position = position
        self.wishes = wishes
        self._actions = actions
        self._releases = releases
        self._announce = announce
        self._settled = 0
        """How many transitions the release stack has followed."""
        self._caught_up = 0
        self.announced = 0
        """How many transitions have been announced."""

    @property
    def phase(self) -> str:
        """The present phase."""
        return self.slot.state

    def fire(self, event: str) -> None:
        """Take one transition, then hold release stack and held set against each other.

        Raises:
            IllegalTransition: Nothing has changed.
            HeldSetMismatch: They differ.
        """
        self._catch_up()
        self.slot.fire(event)
        self.settle()

    def _catch_up(self) -> None:
        """Let the history say what the step's own code did since it was last asked.

        Updates are not fired one by one through the machine; the automata of a backend (what is
        queued, what is settled) still have to learn that there were any, so one pair of the fast
        transitions stands for all updates between two events.
        """
        if self.position.step == self._caught_up:
            return
        self._caught_up = self.position.step
        begin = self._fast()
        if begin:
            self.slot.fire(begin)
            self.slot.fire(self._fast())

    def _fast(self) -> str:
        """The event that generated code fires in the present phase, if there is one."""
        row = self.spec.by_source[self.phase]
        return next((event for event, transition in row.items() if transition.fast), "")

    def settle(self) -> None:
        """Let the stack follow the history, and compare. Idempotent.

        It is called again after a fault, since an interrupt may land between the transition and
        this call, or within it.
        """
        self._announce_new()
        history = self.slot.history
        while self._settled + 1 < len(history):
            self._follow(history[self._settled + 1])
            self._settled += 1
        entry, held = history[-1], self.slot.held
        if set(held) != set(self.stack.names):
            raise HeldSetMismatch(entry.phase, entry.event, held, self.stack.names)

    def _follow(self, entry: Entry) -> None:
        for resource, how in entry.ended:
            if how == "abandoned":
                self.stack.forget(resource)
            else:
                self.stack.drop(resource)
        for resource in self._acquired_by(entry):
            if resource in self._releases:
                self.stack.push(resource, self._releases[resource])

    def _acquired_by(self, entry: Entry) -> set[str]:
        """Only what the transition declares can be pushed."""
        rule = self.slot.lifecycle.rules.get(entry.source, {}).get(entry.event)
        return {effect.resource for _, effect in rule.effects if effect.verb == "acquires"} if rule else set()

    def _announce_new(self) -> None:
        while self.announced + 1 < len(self.slot.history):
            try:
                self._announce(self.slot.history[self.announced + 1])
            except Exception:
                # Told, and a check of it failed. After an interrupt it is told again: observers see it once.
                self.announced += 1
                raise
            self.announced += 1

    def do(self, event: str) -> None:
        """Fire an event, and carry out what it begins, until a phase that is not in flight."""
        self.fire(event)
        while (phase := self.spec.phase[self.phase]).kind is Kind.FLIGHT:
            self._actions[phase.name]()
            self.fire(phase.done)

    def reach(self, event: str) -> None:
        """As `do`, after the operation that this backend needs first, if there is one.

        Raises:
            IllegalTransition: The event is not legal, and no operation makes it so.
        """
        self._catch_up()
        if event not in self.slot.legal:
            first = self.slot.lifecycle.detour(self.slot.config, event)
            if first is not None:
                self.do(first)
        self.do(event)

    def advance(self, until: str) -> None:
        """Follow the continuation table to a phase.

        Raises:
            IllegalTransition: The table leads nowhere before that phase.
        """
        while self.phase != until:
            event = self.slot.next(self.wishes)
            if event is None:
                raise self.slot.lifecycle.refusal(until, self.slot.config, [])
            self.do(event)

    def fault(self, event: str) -> None:
        """A fault struck: catch up with what the step's own code did, then fire its event.

        Where the event is not legal (a lost device that is not held) it counts as `fail`; a late
        fault, in an exit phase that has nothing to do with it, is not fired.
        """
        self._catch_up()
        if self.position.updating and self._fast():
            self.slot.fire(self._fast())
        self.position.updating = False
        for candidate in (event, "fail"):
            if candidate in self.slot.legal:
                self.slot.fire(candidate)
                return

    def unwind(self, on_error: Callable[[BaseException], str]) -> None:
        """Follow the exit table to the end, whatever happens on the way.

        Args:
            on_error: Told of each error on the way out; returns the event to fire for it.
        """
        stuck = 0
        while self.phase != self.spec.terminal or self._settled + 1 < len(self.slot.history):
            before = len(self.slot.history)
            try:
                self._exit_step()
            except BaseException as error:
                stuck = 0 if len(self.slot.history) > before else stuck + 1
                if stuck > PATIENCE:
                    raise NoWayOut(self.phase, PATIENCE) from error
                self.fault(on_error(error))
        self._announce_new()

    def detach(self) -> None:
        """Drop what binds the driver to its run, once it is over."""
        self._actions = {}
        self._releases = {}
        self._announce = _ignore

    def _exit_step(self) -> None:
        # The last transition may have been made by `fault`, or cut short by an interrupt: the
        # stack is brought up to it first. A mismatch is reported once, by whoever caused it.
        self._settle_quietly()
        phase = self.spec.phase[self.phase]
        if phase.kind is Kind.TERMINAL:
            # A fault in the last phase led here: only the stack had to follow.
            return
        if self._is_live():
            # An interrupt landed before the first fault was fired: nothing may begin any more.
            self.fault("interrupt")
            return
        if phase.kind is Kind.FLIGHT:
            # An interrupt landed between the transition into this phase and its action.
            self._actions[phase.name]()
            self.fire(phase.done)
            return
        event = self.slot.next(self.wishes)
        if event is None:
            raise self.slot.lifecycle.refusal("offload", self.slot.config, [])
        self.do(event)

    def _is_live(self) -> bool:
        """Whether the way out has not begun: no junction of it is in the history."""
        phases = self.spec.phase
        return not any(phases[entry.phase].kind is Kind.EXIT for entry in self.slot.history)

    def _settle_quietly(self) -> None:
        try:
            self.settle()
        except HeldSetMismatch:
            # What is held without a release will be spoiled twice and abandoned, in plain sight.
            return


def _ignore(_: Entry) -> None:
    return None
