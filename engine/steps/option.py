"""What a step option is: lines woven into the step program, and what they do in a run.

Subclass `Option`, in any package: the task takes it in `options=`, and no file of Interlock need know it.
The lines say which step events they fire; that the program with them keeps to the step protocol is
proved before the run, and not believed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from interlock.specs.model import Automaton
from interlock.weaving import Block

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


def _read_together(tensors: Sequence[torch.Tensor]) -> list[float]:
    from interlock.backends.adapter import read_together  # loads torch, which a description does without

    return read_together(tensors)


class Stateful(Protocol):
    """What a checkpoint takes along."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take up what `state_dict` returned."""


@dataclass(eq=False)
class Parts:
    """What of a run an option may use; emptied when the run lets go of it, so that nothing pins the run.

    Attributes:
        model: As placed.
        optimizer: As built.
        size: The number of samples of a batch.
        device: The type of the device that the parameters stand on, as torch calls it: "cuda".
        read: Reads scalars from the device, all in one go: in reports, never in a step.
    """

    model: nn.Module
    optimizer: Optimizer
    size: Callable[[Any], int]
    device: str
    read: Callable[[Sequence[torch.Tensor]], list[float]] = field(default=_read_together)


@dataclass
class Running:
    """An option in one run.

    Attributes:
        bindings: A value for each of the option's names.
        forward: Wraps the forward pass; `None` leaves it as it is.
        metrics: What it adds to each report, since the last one.
        state: Name -> what a checkpoint takes along.
        suspend: Called when the device is given back in mid-run: nothing of the option may stay on it. What
            is needed there again is made when it is needed.
    """

    bindings: Mapping[str, Any] = field(default_factory=dict)
    forward: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    metrics: Callable[[], Mapping[str, float]] | None = None
    state: Mapping[str, Stateful] = field(default_factory=dict)
    suspend: Callable[[], None] | None = None


class Option(ABC):
    """One thing that a step may do besides the plain one. Subclass it; class attributes will do.

    Attributes:
        name: Unique among the options of a program.
        events: The step events that its lines fire.
        bindings: The names that its lines use and that `begin` has to give, with their meaning. A
            name that is called and is no event must be a *helper* that fires none.
        conflicts: Name of another option -> why the two do not go together.
        follows: Names of the options that must be woven before this one, where they are present.
        automata: When events of its own, which the step protocol does not know, are legal; inside
            an update they never are.
        window: How many batches one step takes: with more than one, it is given a list of them.
    """

    name: str
    events: tuple[str, ...] = ()
    bindings: Mapping[str, str] = {}
    conflicts: Mapping[str, str] = {}
    follows: frozenset[str] = frozenset()
    automata: tuple[Automaton, ...] = ()
    window: int = 1

    @abstractmethod
    def weave(self, program: Block) -> Block:
        """Weave its lines in, by `before`, `after`, `instead`, `span` of `interlock.weaving`.

        Args:
            program: The plain step, with the options woven before.

        Returns:
            The program with this option in it.
        """

    def in_evaluation(self, call: Callable[..., Any], device: str) -> Callable[..., Any]:
        """The loss, the metrics or the outputs of a batch as they are computed in evaluation and prediction.

        There need be no run of training around it, and so no optimizer: `begin` may not have been called.

        Args:
            call: What would be called without this option.
            device: The type of the device, as torch calls it.

        Returns:
            What is called in its place; by default the same.
        """
        return call

    def begin(self, parts: Parts) -> Running:
        """What stands behind the names in one run. Called once the optimizer is built.

        Args:
            parts: Of the run. Keep the object and not what is in it: it is emptied when the run ends.

        Returns:
            A value for each of its `bindings`, and what else it does in the run.
        """
        return Running()
