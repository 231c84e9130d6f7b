"""Every error that Interlock raises, in one place to catch from: `interlock.errors`.

Messages say what was asked, in which phase, what is legal or expected there, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from interlock.backends.errors import (
    DeviceInUse,
    DeviceLost,
    DeviceUnavailable,
    ForeignDevice,
    ForeignMisused,
    StrikeMisused,
)
from interlock.specs.errors import (
    BrokenPromise,
    DrawingError,
    IllegalTransition,
    InterlockError,
    JournalError,
    MissingExtra,
    SpecError,
    UnknownName,
)

from .checkpoint import CheckpointDamaged, CheckpointError, CheckpointMismatch
from .extraction import ExtractionError
from .weaving import ProgramError

if TYPE_CHECKING:
    from .leaks import Leak


class NotProved(InterlockError):
    """The lifecycle of this backend is not proved, so no run may start on it."""


class TaskError(InterlockError):
    """The task, or what it produced, cannot be used; nothing was placed because of it."""


class LoadError(TaskError):
    """What the command line was told to load is not there, is something else, or raised when imported.

    In the last case the error that it raised is the cause.
    """


class DataError(InterlockError):
    """The data cannot be trained on: an empty loader, one that is used up, a batch of no known size."""


class StaleHandle(InterlockError):
    """A phase handle was used after its phase had ended."""


class RunInUse(InterlockError):
    """A run was driven from two places or from inside its own hooks, or its model is in another run."""


_PROCESS_WIDE = {
    "seed": "random generators",
    "deterministic": "determinism flags",
    "dtype": "default dtype",
    "threads": "thread count",
}


class LeaseRefused(RunInUse):
    """A run wants a process-wide setting at a value that another run does not leave it.

    Attributes:
        setting: Which: a field of `ProcessSettings`.
        wanted: The value asked for.
        present: The value that the other run has, or waits for.
        holder: The name of that run.
    """

    def __init__(
        self, name: str, setting: str, wanted: object, present: object, holder: str, has: str
    ) -> None:
        self.setting, self.wanted, self.present, self.holder = setting, wanted, present, holder
        instead = "leave the seed out" if setting == "seed" else "ask for the same value"
        super().__init__(
            f"run '{name}' cannot have the process's {_PROCESS_WIDE[setting]} with {setting}={wanted}: run "
            f"'{holder}' {has} {setting}={present}, and a process has them only once. Let it wait for that "
            f"run, {instead}, or carry it out in a process of its own"
        )


class NotFinished(InterlockError, TimeoutError):
    """The run was asked for its outcome, and the time allowed passed before there was one."""


class Cancelled(InterlockError):
    """The run was cancelled; raised by `result()`, never inside user code."""


class DirectUpdate(InterlockError):
    """In a hand-written step, an optimizer's `step` was called past the step handle."""


class DeadlinePassed(InterlockError):
    """A backend call did not return in time; the resource was abandoned.

    Attributes:
        what: What was being done.
        seconds: How long it was waited for.
        stack: Where the call was blocked, as text.
    """

    def __init__(self, what: str, seconds: float, stack: str) -> None:
        self.what, self.seconds, self.stack = what, seconds, stack
        super().__init__(
            f"{what} did not return within {seconds:g} s and was abandoned; "
            f"raise `deadline=` if it was only slow. It is blocked at:\n{stack}"
        )


class HeldSetMismatch(InterlockError):
    """What the run holds is not what the spec says it holds: an adapter or the engine is wrong.

    Attributes:
        held: What the spec says.
        stacked: What the release stack has.
    """

    def __init__(self, phase: str, event: str, held: Sequence[str], stacked: Sequence[str]) -> None:
        self.held, self.stacked = tuple(held), tuple(stacked)
        super().__init__(
            f"after '{event}', in phase '{phase}', the spec holds {list(held)}, but the release stack has "
            f"{list(stacked)}: a release is missing or was not carried out"
        )


class MissingRelease(InterlockError):
    """A resource was to be released for which no release was ever registered."""


class NoWayOut(InterlockError):
    """On the way out, one error followed another without any progress, and it was given up.

    The proof of the lifecycle says that this cannot happen: it is a fault in Interlock or in an adapter.
    """

    def __init__(self, phase: str, errors: int) -> None:
        super().__init__(
            f"the way out made no progress in phase '{phase}' after {errors} errors, the last of which is "
            "the cause of this one: please report it"
        )


class PlacementError(InterlockError):
    """An optimizer does not hold exactly the parameters that train. Names them.

    Attributes:
        parameters: The names, as in `model.named_parameters()` where they have one.
    """

    def __init__(self, message: str, parameters: Sequence[str]) -> None:
        self.parameters = tuple(parameters)
        super().__init__(message)


class StaleParameter(PlacementError):
    """The optimizer holds parameters that placement has replaced: it would train nothing."""


class ForeignParameter(PlacementError):
    """The optimizer holds parameters that are not the model's."""


class MissingParameter(PlacementError):
    """A trainable parameter of the model is in no optimizer."""


class DuplicateParameter(PlacementError):
    """A parameter stands in more than one group or optimizer."""


class ReplacedParameter(PlacementError):
    """A parameter of the model was replaced in mid-run, without the optimizer knowing."""


class UndeclaredChange(PlacementError):
    """What trains was changed in mid-run, and nobody declared it."""


class MisplacedState(PlacementError):
    """An optimizer's state stands on another device than its parameter."""


class BrokenTie(PlacementError):
    """Parameters that were one (tied weights) are two now."""


class LossError(InterlockError):
    """The loss cannot be trained on: not a tensor, not a scalar, or without a graph."""


class NoGradient(LossError):
    """After the first backward pass a whole parameter group has no gradient.

    Attributes:
        parameters: The names of its parameters.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()) -> None:
        self.parameters = tuple(parameters)
        super().__init__(message)


class NonFiniteLoss(LossError):
    """The loss became NaN or infinite.

    Attributes:
        step: The first step, counted from 1, whose loss was not finite.
        value: That loss.
    """

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value = step, value
        super().__init__(
            f"the loss of step {step} is {value}, and it is the first that is not finite: every update from "
            "there on spoils the parameters. Look at that step's batch, lower the learning rate, clip the "
            "gradients, or pass `nonfinite='ignore'` to the engine to go on regardless"
        )


class SweepError(InterlockError):
    """A sweep cannot be carried out, or cannot go on; the message says what to do instead."""


class UnknownCell(SweepError):
    """There is no cell of that id in this sweep."""


class CheckMisused(InterlockError):
    """A check was put where it would not check what it says."""


class ProcessChanged(InterlockError, AssertionError):
    """The process is not as it was before.

    Attributes:
        differences: One line for each.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__("the process is not as it was before:\n  " + "\n  ".join(self.differences))


class TensorsLeft(InterlockError, AssertionError):
    """Tensors are left on a device that were not there before; the message says which and who holds them.

    Attributes:
        leaks: Each of them.
    """

    def __init__(self, leaks: Iterable[Leak], text: str) -> None:
        self.leaks = tuple(leaks)
        super().__init__(text)


class FrozenParameterWarning(UserWarning):
    """The optimizer holds parameters with `requires_grad=False`; names them."""


class EvaluationModeWarning(UserWarning):
    """The model was given in evaluation mode: dropout and batch normalisation do not train like that."""


class UnusedParameterWarning(UserWarning):
    """Some trainable parameters received no gradient in the first step; names them."""


class ObserverWarning(UserWarning):
    """An observer raised, or lost events because it was too slow."""


__all__ = [
    "BrokenPromise",
    "BrokenTie",
    "Cancelled",
    "CheckMisused",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "DataError",
    "DeadlinePassed",
    "DeviceInUse",
    "DeviceLost",
    "DeviceUnavailable",
    "DirectUpdate",
    "DrawingError",
    "DuplicateParameter",
    "EvaluationModeWarning",
    "ExtractionError",
    "ForeignDevice",
    "ForeignMisused",
    "ForeignParameter",
    "FrozenParameterWarning",
    "HeldSetMismatch",
    "IllegalTransition",
    "InterlockError",
    "JournalError",
    "LeaseRefused",
    "LoadError",
    "LossError",
    "MisplacedState",
    "MissingExtra",
    "MissingParameter",
    "MissingRelease",
    "NoGradient",
    "NoWayOut",
    "NonFiniteLoss",
    "NotFinished",
    "NotProved",
    "ObserverWarning",
    "PlacementError",
    "ProcessChanged",
    "ProgramError",
    "ReplacedParameter",
    "RunInUse",
    "SpecError",
    "StaleHandle",
    "StaleParameter",
    "StrikeMisused",
    "SweepError",
    "TaskError",
    "TensorsLeft",
    "UndeclaredChange",
    "UnknownCell",
    "UnknownName",
    "UnusedParameterWarning",
]
