"""The release stack: what a run holds, and how each of it is given back.

A release is pushed before its resource is acquired and must therefore be idempotent and able to
deal with a resource that is half there. It has two halves: `copy`, which may block and changes
nothing, runs under a deadline; `commit` makes the change, on the owner's thread, so that a copy
that comes too late cannot touch anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .deadline import bounded
from .errors import MissingRelease


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Release:
    """How one resource is given back.

    Attributes:
        what: For messages: "bringing the model home".
        commit: Takes what `copy` returned and makes the change; quick, and on the host.
        copy: May block; may be left out.
        forget: What is still done for a resource that is abandoned: drops the host's references.
    """

    what: str
    commit: Callable[[Any], None]
    copy: Callable[[], Any] = _nothing
    forget: Callable[[], None] = _nothing


class ReleaseStack:
    """The resources held, in order of acquisition.

    Args:
        deadline: Seconds that each `copy` may take.
        threaded: Whether `copy` can block at all; if not it is called directly.
    """

    def __init__(self, deadline: float, threaded: bool) -> None:
        self._deadline = deadline
        self._threaded = threaded
        self._releases: dict[str, Release] = {}
        self._carried_out: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """What is held, the first acquired first."""
        return tuple(self._releases)

    def push(self, name: str, release: Release) -> None:
        """Register the release of a resource that is about to be acquired (again: no effect)."""
        self._carried_out.discard(name)
        self._releases.setdefault(name, release)

    def release(self, name: str, how: Release | None = None) -> None:
        """Carry out the release of one resource. It stays on the stack until `drop`.

        Once it has been carried out, a further call does nothing: an interrupt may land between
        the release and the transition that says so, and then the release is asked for again.

        Args:
            name: The resource.
            how: Another way to give it back than the one registered (an exit policy).

        Raises:
            MissingRelease: Nothing was registered under the name.
            DeadlinePassed: The copy did not return in time.
            BaseException: Whatever the release raised; it can be tried again.
        """
        registered = self._releases.get(name)
        if registered is None:
            raise MissingRelease(f"no release is registered for '{name}'; held: {list(self._releases)}")
        if name in self._carried_out:
            return
        release = how or registered
        if self._threaded and release.copy is not _nothing:
            payload = bounded(release.copy, self._deadline, release.what)
        else:
            payload = release.copy()
        release.commit(payload)
        self._carried_out.add(name)

    def drop(self, name: str) -> None:
        """The resource has ended, by the spec's account: it leaves the stack if it was released."""
        if name in self._carried_out:
            self._releases.pop(name, None)

    def forget(self, name: str) -> None:
        """Give a resource up: the host's references to it are dropped, and it leaves the stack."""
        release = self._releases.get(name)
        if release is None:
            return
        try:
            release.forget()
        except Exception:
            # It would fail for ever. After an interrupt it stays, and is tried again.
            self._releases.pop(name, None)
            raise
        self._releases.pop(name, None)
