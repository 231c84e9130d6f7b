"""What one run holds - model, optimizers, schedulers, step - and the facts that are observed of it.

Everything that stands on the device for a run is reached from here, and `let_go` drops all of it: so whoever
keeps a run's error, its outcome or its handle keeps nothing else of it alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.backends.adapter import Adapter

from . import facts, leases
from .batches import convert, held
from .driver import Position
from .errors import TaskError
from .keeping import Keeper
from .options import Options
from .outcome import Residue
from .program import StepProgram
from .release import ReleaseStack
from .residency import Registry, slots, unclaim
from .stepping import Stepping
from .suspension import Resting
from .task import Task


class Holding:
    """The parts of one run, from placement to homecoming.

    Args:
        task: What to train.
        adapter: Where.
        program: The step, proved for that backend; `None` where the task's is written by hand.
        options: How.
        position: Shared with loop and driver.
        stack: What releases are carried out from.
        say: Takes observations worth reading.
    """

    def __init__(
        self,
        task: Task,
        adapter: Adapter,
        program: StepProgram | None,
        options: Options,
        position: Position,
        stack: ReleaseStack,
        say: Callable[[str], None],
    ) -> None:
        self.model: nn.Module | None = None
        self.optimizers: tuple[Optimizer, ...] = ()
        self.named: dict[str, Optimizer] = {}
        """The optimizers, by name."""
        self.schedulers: dict[str, Any] = {}
        """By the name of their optimizer."""
        self.residue: Residue | None = None
        self.keeper: Keeper | None = None
        """Saves and restores, in a run that does."""
        self.generators: Mapping[str, torch.Generator] = {}
        """Those that shuffle its data."""
        self.rules: Mapping[str, Any] = {}
        """Its stop rules that remember something."""
        self.validation: dict[str, float] = {}
        self.batches: Any = None
        """What the next validation goes over, or the evaluation or prediction."""
        self.serving: Callable[[Any], Any] | None = None
        """What is done with them on the inference lifecycle."""
        self.result: Any = None
        """What came of that."""
        self._task: Task | None = task
        self._adapter = adapter
        self.stepping = Stepping(self, program, position, options.nonfinite)
        self._options = options
        self._position = position
        self._stack = stack
        self.say = say
        self._token = object()
        """Stands for this run where models are claimed, and holds nothing of it."""
        self._registry: Registry | None = None
        self._known: dict[int, str] | None = None
        """id -> name of the parameters when the optimizer was built."""
        self._agreed: facts.Agreement | None = None
        """What trains, as agreed then."""
        self.adoption: Callable[[nn.Module, Any], object] | None = None
        """What the next adoption changes."""
        self._device_random: torch.Tensor | None = None
        """What the device's generator was before it was seeded."""
        self._lent: tuple[Any, Any] = None, None
        """The lease and the device's random state of a suspended run."""
        self._compiled: nn.Module | None = None
        """The model, if the run has had it compiled."""
        self._resting = Resting()
        """What stood on the device when the run was suspended."""
        self._family: list[Optimizer] = []
        """The optimizers, with those that they wrap."""

    def placed(self) -> tuple[nn.Module, Registry]:
        """The model, and the registry of its tensors.

        Raises:
            TaskError: Nothing has been placed yet.
        """
        if self.model is None or self._registry is None:
            raise TaskError("there is no placed model yet")
        return self.model, self._registry

    def placed_model(self) -> nn.Module:
        """The model, on its device."""
        return self.placed()[0]

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of the run by what they are, for a report on memory."""
        model, registry = self.model, self._registry
        if model is None or registry is None:
            return {}
        parameters = list(model.parameters())
        return {
            "parameters": list(parameters),
            "buffers": list(model.buffers()),
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer state": list(registry.state_tensors()),
        }

    def _bytes_of_model(self) -> int:
        values = [slot.value for slot in slots(self.model)] if self.model else []
        tensors = [tensor for value in values for tensor in held(value)]
        storages = [tensor.untyped_storage() for tensor in tensors if self._adapter.resident(tensor)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def look(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device where it can be computed with: on a lazy one that would be a program."""
        return self._adapter.fetch(tensor) if self._adapter.lazy else tensor

    def cut(self) -> None:
        """On a lazy device the program of a micro-batch ends here, and is compiled if it is new.

        Only then is an update done: until the cut has returned, a fault leaves a half-applied one.
        """
        self._cut(self._position.step + 1)
        self._position.updating = False

    def _cut(self, step: int = 0) -> None:
        position = self._position
        position.cutting = time.monotonic()
        try:
            self._adapter.cut(step)
        finally:
            position.cutting = 0.0

    def run_what_was_traced(self) -> None:
        """On a lazy device, between two steps: its generator, which each cut moves on, is put back."""
        state = self._adapter.random_state()
        self._cut()
        self._adapter.set_random_state(state)

    def drop_gradients(self) -> None:
        """What a fault left half traced need not be compiled for gradients that nobody uses any more."""
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.grad = None

    def check(self, when: str) -> None:
        """Observe that the optimizer holds what trains, its state stands right, and ties are ties.

        Args:
            when: For messages.

        Raises:
            PlacementError: Naming parameters.
        """
        model, registry = self.placed()
        if self.optimizers:
            now = facts.agreed(model, self.optimizers)
            if self._agreed is None or now is None:
                names = registry.original_names()
                facts.check_optimizers(model, self.optimizers, names, when=when, known=self._known)
            else:
                facts.check_agreement(model, self._agreed, now, when)
            facts.check_state(self._family, model)
        if registry.went:
            facts.check_resident(model, registry.went, self._adapter.resident)
        facts.check_ties(model, registry.ties)

    def _agree(self, model: nn.Module) -> None:
        """What trains from now on, until parameters are adopted."""
        self._known = {id(p): name for name, p in model.named_parameters()}
        self._agreed = facts.agreed(model, self.optimizers)

    # A frame keeps its function, also once it is cleared, and the function what it closes over. The frames
    # of these functions may stand in an error's traceback: so they close over `self`, which lets go of
    # everything at the end, and neither over the model nor over the optimizer.

    def _loss_of(self) -> Callable[[Any], Any]:
        loss: Callable[[Any, Any], Any] = self._todo().loss or loss_of_output
        return lambda batch: loss(self.model, batch)

    def _computes_loss(self) -> bool:
        """Whether the loss of a batch is known outside of a step: one that is written by hand may hide it."""
        task = self._todo()
        return task.validates_loss and (task.step is None or task.loss is not None)

    def _move(self, batch: Any) -> Any:
        return convert(batch, self._adapter.feed)

    # -- the end --------------------------------------------------------------------------------

    def _todo(self) -> Task:
        if self._task is None:
            raise TaskError("the run is closed, and has let go of its task")
        return self._task

    def remarks(self) -> list[str]:
        """What is worth saying at the end about the model's identity, and what the device did."""
        lost = self._registry.identity_lost if self._registry else []
        device = list(self._adapter.remarks())
        if not lost:
            return device
        told = (
            f"identity lost: at {facts.some(lost)} of the model another object stands than before the run; "
            "whoever holds the earlier one does not hold what was trained"
        )
        return [told, *device]

    def let_go(self) -> None:
        """Drop every reference to the parts of the run."""
        leases.give_back(self._token)
        if self.keeper is not None:
            self.keeper.close()
        self.generators, self.rules = {}, {}
        unclaim(self._token)
        self.say = nothing
        self.model = self.batches = self.adoption = None
        self.optimizers = ()
        self._family = []
        self.named = {}
        self._task = self._registry = None
        self._resting = Resting()
        self._let_go_of_steps()

    def _let_go_of_steps(self) -> None:
        # A scheduler has learning rates of its own, which may be tensors on the device; the step holds it.
        self.schedulers = {}
        self.stepping.let_go()
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            compiled._compiled_call_impl = None


def kind_of_device(model: nn.Module) -> str:
    """The type of the device that a model's parameters stand on, as torch calls it."""
    return next((p.device.type for p in model.parameters()), "cpu")


def nothing(*_: Any) -> None:
    """In place of a function that has been let go of."""
    return


def loss_of_output(model: nn.Module, batch: Any) -> Any:
    """The loss that the model itself computes: `.loss` or `["loss"]` of what it returns.

    Raises:
        TaskError: It returns neither.
    """
    if isinstance(batch, (list, tuple)):
        raise TaskError(
            "there is no loss function, and nobody knows what of a batch the model takes: pass `loss=`, such "
            "as `loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])`"
        )
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    raise TaskError(
        f"the task has no loss function, and the model returned {type(output).__name__} without `.loss`: "
        "pass `loss=`"
    )
