"""What the driver is offered: actions of phases, and releases of resources.

*Actions* say what is done in each in-flight phase (`phases`), *releases* how each resource goes. Which of
them is due is the spec's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from interlock.specs import Spec
from interlock.specs.semantics import endings

from . import facts, leases
from .deadline import bounded
from .errors import TaskError
from .holding import nothing
from .phases import Phases
from .release import Release
from .residency import Registry


class Work(Phases):
    """The work of one run, as the driver asks for it. Arguments as for `Holding`."""

    def actions(self, spec: Spec) -> dict[str, Callable[[], None]]:
        """In-flight phase of the spec -> what is done in it.

        A phase in which a resource of the backend ends needs no action: its release is carried out there. If
        it has one, that is how the resource ends on this way.

        Raises:
            TaskError: The backend has an action for a phase that is the engine's own, or none for one that
                its monitor adds.
        """
        keep = Release("handing the model over", self._on_registry(Registry.keep_model))
        discard = Release("discarding the model", self._on_registry(Registry.discard_model))
        own: dict[str, Callable[[], None]] = {
            "acquiring": self._acquire,
            "placing": self._place,
            "optimizing": self._optimize,
            "validating": self._validate,
            "predicting": self._predict,
            "adopting": self._adopt,
            "compiling": self._compile,
            "checkpointing": self._save,
            "rescuing": self._rescue,
            "restoring": self._restore,
            "dropping": self._drop,
            "homing": lambda: self._stack.release("model"),
            "keeping": lambda: self._stack.release("model", keep),
            "discarding": lambda: self._stack.release("model", discard),
            "measuring": self._measure,
            "freeing": lambda: self._stack.release("device"),
            "suspending": self._suspend,
            "returning": lambda: self._stack.release("device"),
            "reacquiring": self._reacquire,
            "resuming": self._resume,
            "writing_off": nothing,
        }
        theirs = self._adapter.actions()
        self._refuse_clash("actions", "phase", own, theirs)
        ending = {phase: resource for phase, resource in endings(spec).items() if phase not in own}
        added = {phase.name for phase in self._adapter.monitor.phases} & set(spec.phase)
        silent = sorted(added - set(theirs) - set(ending))
        if silent:
            raise TaskError(
                f"actions() of backend '{self._adapter.name}' says nothing of {facts.some(silent)}, which "
                "its monitor adds: say what is done there, `lambda model: None` if it is nothing"
            )
        done = {name: self._of_backend(theirs[name], spec, name) for name in theirs if name not in ending}
        return own | done | {name: self._end(ending[name], name, theirs.get(name)) for name in ending}

    def releases(self) -> dict[str, Release]:
        """Resource -> how it is given back.

        Raises:
            TaskError: The backend has a release for a resource that is the engine's own.
        """
        own = {
            "model": Release(
                "bringing the model home",
                commit=self._on_registry(Registry.commit_model),
                copy=lambda: self._registry.copy_model() if self._registry else {},
                forget=self._on_registry(Registry.forget_model),
            ),
            "optimizer": Release(
                "bringing the optimizer's state home",
                commit=self._on_registry(Registry.commit_state),
                copy=lambda: self._registry.copy_state() if self._registry else {},
                forget=self._on_registry(Registry.forget_state),
            ),
        }
        theirs = self._adapter.releases()
        self._refuse_clash("releases", "resource", own, theirs)
        given = {
            name: Release(f"giving back the {name}", nothing, function) for name, function in theirs.items()
        }
        if "device" in given:  # what the process has once is taken and given back with it
            given["device"] = replace(
                given["device"],
                copy=self._with_random_state(given["device"].copy),
                commit=lambda _: leases.give_back(self._token),
                forget=self._forget_device,
            )
        return own | given

    def _with_random_state(self, free: Callable[[], Any]) -> Callable[[], Any]:
        """Give the device back with its generator as it was."""

        def call() -> Any:
            self._adapter.set_random_state(self._device_random)
            self._device_random = None  # after it: a call that failed is tried again
            return free()

        return call

    def _forget_device(self) -> None:
        leases.give_back(self._token)
        self._adapter.forget()

    def _refuse_clash(
        self, method: str, kind: str, own: Mapping[str, object], theirs: Mapping[str, object]
    ) -> None:
        clash = [name for name in theirs if name in own]
        if clash:
            raise TaskError(
                f"{method}() of backend '{self._adapter.name}' names {facts.some(clash)}, a {kind} that the "
                "engine itself takes care of: an adapter says it only for what its monitor adds"
            )

    def _on_registry(self, method: Callable[..., None]) -> Callable[..., None]:
        """The method, bound to the registry at the time of the call; nothing if there is none yet."""

        def call(*payload: Any) -> None:
            if self._registry is not None:
                takes = method in (Registry.commit_model, Registry.commit_state)
                method(self._registry, *(payload if takes else ()))

        return call

    def _end(
        self, resource: str, phase: str, action: Callable[[nn.Module | None], None] | None
    ) -> Callable[[], None]:
        """The release of a resource of the backend: as registered, or in the way of this phase."""
        what = f"what the backend does in phase '{phase}'"
        how = None if action is None else Release(what, nothing, lambda: action(self.model))
        return lambda: self._stack.release(resource, how)

    def _of_backend(
        self, action: Callable[[nn.Module | None], None], spec: Spec, phase: str
    ) -> Callable[[], None]:
        """What a backend does in a phase of its own: under the deadline where the spec has one there."""

        def act() -> None:
            action(self.model)

        if self._adapter.copies and "abandon" in spec.by_source.get(phase, {}):
            return lambda: bounded(act, self._options.deadline, f"what the backend does in phase '{phase}'")
        return act
