"""Typed phase handles: the order of a run, visible to type checkers.

Each handle has only the methods that are legal in its phase, and each returns the handle of the
next one, so `mypy` and `pyright` reject a step before the optimizer or after the end. A handle
whose phase is over raises `StaleHandle`, also through a bound method taken earlier.

    with engine.open(task) as created:
        training = created.place().optimize().train()
        for batch in batches:
            loss = training.step(batch)
        outcome = training.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, final

from .errors import StaleHandle
from .outcome import Outcome

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .session import Session

T = TypeVar("T")
H = TypeVar("H", bound="_Handle")


class _Handle:
    """What all handles share: the session, and whether their phase is still the present one."""

    _phase: str
    __slots__ = ("_current", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._current = True

    @property
    def phase(self) -> str:
        """The present phase of the run (not: of this handle)."""
        return self._session.driver.phase

    def _check(self, what: str) -> None:
        if self._session.outcome is not None:
            raise StaleHandle(
                f"'{what}' on the handle of phase '{self._phase}': the run is closed. A run is single-use; "
                "open another one with `engine.open(task)`"
            )
        if not self._current:
            raise StaleHandle(
                f"'{what}' on the handle of phase '{self._phase}', which is over: the run is in phase "
                f"'{self.phase}'. Use the handle that the last call returned"
            )

    def _go(self, what: str, work: Callable[[], T]) -> T:
        """Do a piece of the run that ends this handle's phase."""
        self._check(what)
        result = self._session.perform(work)
        self._current = False
        return result

    def _advance(self, what: str, until: str, following: Callable[[Session], H]) -> H:
        """Go on to a phase, and to its handle."""
        self._go(what, lambda: self._session.driver.advance(until))
        return following(self._session)

    def _offload(self) -> Outcome:
        self._go("offload", lambda: self._session.driver.fire("offload"))
        return self._session.close()


@final
class Created(_Handle):
    """Described; no device has been touched. Use it in a `with` block, which ends the run in any case."""

    __slots__ = ()
    _phase = "created"

    def __enter__(self) -> Created:
        self._check("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        session.leave(error)
        # The handles' own frames stand in its traceback, and have ended by now.
        session.errors.unpin()

    def place(self) -> Placed:
        """Take the device and move the model there."""
        return self._advance("place", "placed", Placed)

    def offload(self) -> Outcome:
        """End the run."""
        return self._offload()

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, once it has."""
        return self._session.outcome


@final
class Placed(_Handle):
    """The model stands on the device; its parameters are those that will train."""

    __slots__ = ()
    _phase = "placed"

    @property
    def model(self) -> nn.Module:
        """The placed model."""
        self._check("model")
        return self._session.model

    def optimize(self) -> Ready:
        """Build the optimizer from the placed model, by the task's function, and check it."""
        return self._advance("optimize", "ready", Ready)

    def offload(self) -> Outcome:
        """Bring everything home and end the run."""
        return self._offload()


@final
class Ready(_Handle):
    """Placed and optimized."""

    __slots__ = ()
    _phase = "ready"

    def train(self) -> Training:
        """Begin to train."""
        training = self._advance("train", "training", Training)
        self._session.perform(self._session.begin_epoch)
        return training

    def stop(self) -> Outcome:
        """End the run before it trains, keeping what there is.

        Returns:
            The outcome.

        Raises:
            BaseException: Whatever went wrong on the way, the same object.
        """
        self._go("stop", lambda: self._session.driver.fire("stop"))
        return self._session.close()

    def offload(self) -> Outcome:
        """Bring everything home and end the run."""
        return self._offload()


@final
class Training(_Handle):
    """Steps may be taken."""

    __slots__ = ()
    _phase = "training"

    def step(self, batch: Any) -> torch.Tensor:
        """One update from one batch.

        Every `report_every` steps, and before `validate`, `finish` and `stop`, the losses since the
        last report are read and the facts are checked, as in `fit`.

        Args:
            batch: As the task's functions take it, on the host; with `Accumulate`, a list of batches.

        Returns:
            The loss, detached, on the device.
        """
        self._check("step")
        return self._session.perform(lambda: self._session.step_once(batch))

    def validate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Evaluate on some batches, in evaluation mode and without gradients.

        Args:
            batches: Iterated once.

        Returns:
            `loss` and the task's metrics, averaged over samples.
        """
        self._check("validate")
        return self._session.perform(lambda: self._session.validate(batches))

    def adopt(self, change: Callable[[nn.Module, Any], object]) -> None:
        """Change what trains, by declaration: unfreeze layers, add groups.

        Args:
            change: A function from model and optimizer (a mapping, if there are several).

        Raises:
            PlacementError: What it left does not fit together, as after building the optimizer.
        """
        self._check("adopt")
        self._session.perform(lambda: self._session.adopt(change))

    def next_epoch(self, batches: Iterable[Any] | None = None) -> dict[str, float] | None:
        """End an epoch and begin the next one, as `fit` does.

        Schedulers that move after each epoch move, and what the task adopts before the next one is adopted.

        Args:
            batches: To validate on first.

        Returns:
            The validation's metrics, if there was one.
        """
        self._check("next_epoch")
        return self._session.perform(lambda: self._session.next_epoch(batches))

    def finish(self) -> Outcome:
        """End the run well: everything comes home.

        Returns:
            The outcome.

        Raises:
            BaseException: Whatever went wrong on the way, the same object; `outcome` of the first handle
                has the outcome then, as it has after each of the errors raised here.
        """
        self._go("finish", lambda: self._session.end("finish"))
        return self._session.close()

    def stop(self) -> Outcome:
        """End the run before its work is done, keeping the results."""
        self._go("stop", lambda: self._session.end("stop"))
        return self._session.close()
