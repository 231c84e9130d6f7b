"""What is done in each phase of a run, and how each resource of it is given back.

`Work` owns the parts of a run - model, optimizer, scheduler, step - and offers them to the driver
as *actions* (in-flight phase -> what is done in it) and *releases* (resource -> how it goes). It
never asks in which phase the run is, nor decides which comes next.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.backends.adapter import Adapter
from interlock.specs import Spec
from interlock.specs.protocol import step_protocol

from . import facts, leases, wiring
from .batches import convert, held, size
from .deadline import bounded
from .driver import Position
from .errors import TaskError
from .evaluation import evaluate, predict
from .fused import fuse, settle
from .hand import Hand
from .keeping import Keeper, Kept, widen
from .leases import ProcessSettings
from .loop import check_cancel
from .options import Options
from .outcome import UNKNOWN, Residue
from .owners import with_owners
from .program import StepProgram
from .release import Release, ReleaseStack
from .residency import Registry, claim, family, lazy, slots, unclaim
from .serving import output_of
from .stepping import Stepping
from .steps.option import Parts
from .suspension import Resting, place_again
from .task import Task


class Work:
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
        self.serving: Callable[[Work], Any] = Work.evaluate
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

    # -- for the driver -----------------------------------------------------------------------

    def actions(self, spec: Spec) -> dict[str, Callable[[], None]]:
        """In-flight phase of the spec -> what is done in it.

        Raises:
            TaskError: The backend has an action for a phase that is the engine's own.
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
            "rescuing": self._save,
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
            "writing_off": _nothing,
        }
        theirs = self._adapter.actions()
        self._refuse_clash("actions", "phase", own, theirs)
        return own | {phase: self._of_backend(action, spec, phase) for phase, action in theirs.items()}

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
            name: Release(f"giving back the {name}", _nothing, function) for name, function in theirs.items()
        }
        if "device" in given:  # what the process has once is taken and given back with it
            given["device"] = replace(
                given["device"],
                copy=self._with_random_state(given["device"].copy),
                commit=lambda _: leases.give_back(self._token),
                forget=lambda: leases.give_back(self._token),
            )
        return own | given

    def _with_random_state(self, free: Callable[[], Any]) -> Callable[[], Any]:
        """Give the device back with its generator as it was."""

        def call() -> Any:
            state, self._device_random = self._device_random, None
            self._adapter.set_random_state(state)
            return free()

        return call

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

    def _of_backend(
        self, action: Callable[[nn.Module | None], None], spec: Spec, phase: str
    ) -> Callable[[], None]:
        """What a backend does in a phase of its own: under the deadline where the spec has one there."""

        def act() -> None:
            action(self.model)

        if self._adapter.copies and "abandon" in spec.by_source.get(phase, {}):
            return lambda: bounded(act, self._options.deadline, f"what the backend does in phase '{phase}'")
        return act

    def remarks(self) -> list[str]:
        """What is worth saying at the end about the model's identity."""
        lost = self._registry.identity_lost if self._registry else []
        if not lost:
            return []
        told = (
            f"identity lost: at {facts.some(lost)} of the model another object stands than before the run; "
            "whoever holds the earlier one does not hold what was trained"
        )
        return [told]

    def let_go(self) -> None:
        """Drop every reference to the parts of the run."""
        leases.give_back(self._token)
        if self.keeper is not None:
            self.keeper.close()
        self.generators, self.rules = {}, {}
        unclaim(self._token)
        self.say = _nothing
        self.model = self.batches = self.adoption = None
        self.optimizers = ()
        self._family = []
        self.named = {}
        self._task = self._registry = None
        self._resting = Resting()
        self._let_go_of_steps()

    def _todo(self) -> Task:
        if self._task is None:
            raise TaskError("the run is closed, and has let go of its task")
        return self._task

    def _let_go_of_steps(self) -> None:
        # A scheduler has learning rates of its own, which may be tensors on the device; the step holds it.
        self.schedulers = {}
        self.stepping.let_go()
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            compiled._compiled_call_impl = None

    # -- the phases -----------------------------------------------------------------------------

    def _acquire(self) -> None:
        check_cancel(self._position)
        _load_compiler()
        settings, options = self._settings(), self._options
        if settings.wanted():
            check = partial(check_cancel, self._position)
            name = self._todo().name
            leases.take(settings, self._token, when_taken=options.when_taken, check=check, name=name)
        self._adapter.acquire()
        if settings.seed is not None:
            self._device_random = self._adapter.random_state()
            self._adapter.seed(settings.seed)

    def _place(self) -> None:
        check_cancel(self._position)
        source = self._todo().model
        model: Any = source if isinstance(source, nn.Module) else source()
        if not isinstance(model, nn.Module):
            hint = ": is a `return` missing?" if model is None else ""
            raise TaskError(
                "the task's model function must return an nn.Module, and returned "
                f"{type(model).__name__}{hint}"
            )
        unmade = lazy(model)
        if unmade:
            raise TaskError(
                f"the model has lazy modules, whose parameters have no shape yet: {facts.some(unmade)}. Run "
                "one forward pass in the model function before it returns the model"
            )
        claim(model, self._token)
        self.model = model
        self._registry = Registry(model, self._adapter)
        self._adapter.place(model)
        self._registry.after_placement()

    def _optimize(self) -> None:
        check_cancel(self._position)
        model, registry = self.placed()
        task = self._todo()
        self.named = wiring.as_optimizers(task.optimizer(model), by_hand=task.step is not None)
        self.optimizers = tuple(self.named.values())
        registry.optimizers = list(self.optimizers)
        self._family = family(self.optimizers)
        try:
            self.check("when the optimizer was built")
        except BaseException:
            self.optimizers, self.named, self._family = (), {}, []  # refused: no part of the outcome
            raise
        for optimizer in self.optimizers:
            fuse(optimizer)
        self._agree(model)
        if task.scheduler is not None:
            given = self.named if len(self.named) > 1 else self.optimizers[0]
            self.schedulers = wiring.as_schedulers(task.scheduler(given), self.named, task.scheduler_every)
        self._begin_stepping(task, model)

    def _agree(self, model: nn.Module) -> None:
        """What trains from now on, until parameters are adopted."""
        self._known = {id(p): name for name, p in model.named_parameters()}
        self._agreed = facts.agreed(model, self.optimizers)

    def _adopt(self) -> None:
        """Let the task change what trains, and look at what became of it."""
        model, _ = self.placed()
        change, self.adoption = self.adoption, None
        if change is None:
            raise TaskError("there is nothing to adopt: no function says what is to change")
        self._known = self._agreed = None  # what is found from here on was declared
        change(model, self.named if len(self.named) > 1 else self.optimizers[0])
        for optimizer in self.optimizers:
            settle(optimizer)
        for scheduler in self.schedulers.values():
            widen(scheduler)
        self.check("when parameters were adopted")
        self._agree(model)

    def _compile(self) -> None:
        """From here on calls of the model go through `torch.compile`, which does its work at the first."""
        check_cancel(self._position)
        model, options = self.placed_model(), self._todo().compile
        if model._compiled_call_impl is None:  # one that comes compiled stays as it is
            self._compiled = model
            model.compile(**(options if isinstance(options, Mapping) else {}))

    def _kept(self) -> Kept:
        """What a checkpoint holds."""
        extra = {**self.stepping.state(), **self.rules, **self.generators}
        return Kept(self.placed_model(), self.named, self.schedulers, extra)

    def _save(self) -> None:
        if self.keeper is None:
            raise TaskError("this run keeps no checkpoints")
        self.keeper.save(self._kept(), self._position, self._adapter)

    def _restore(self) -> None:
        check_cancel(self._position)
        if self.keeper is None:
            raise TaskError("this run resumes from no checkpoint")
        self._agreed = None  # groups may have been added, and layers unfrozen, by then
        self.keeper.restore(self._kept(), self._position, self._adapter)
        for scheduler in self.schedulers.values():
            widen(scheduler)
        self.check("when the checkpoint was restored")
        self._agree(self.placed_model())

    def _begin_stepping(self, task: Task, model: nn.Module) -> None:
        """Make the step over what has just been built."""
        if task.step is not None:
            protocol = step_protocol(self._adapter.monitor)
            hand = Hand(
                task.step,
                self.named,
                self.schedulers,
                protocol,
                self._position,
                self.placed_model,
                self._move,
            )
            self.stepping.begin_by_hand(hand, self.optimizers)
            return
        parts = Parts(model, self.optimizers[0], task.batch_size or size, _kind_of_device(model))
        loss_of, move = self._loss_of(), self._move
        forward = (lambda batch: loss_of(move(batch))) if self._adapter.copies else loss_of
        more = {"schedule": self._schedule} if task.schedules_steps else {}
        self.stepping.begin(parts, tuple(task.options), forward, more)

    def _schedule(self) -> None:
        for scheduler in self.schedulers.values():
            scheduler.step()

    def end_of_epoch(self, metrics: Mapping[str, float]) -> None:
        """Move the schedulers that move after each epoch.

        Args:
            metrics: The last ones, for a scheduler that follows one.

        Raises:
            TaskError: The metric that it follows was not reported.
        """
        task = self._todo()
        if task.scheduler_every != "epoch":
            return
        for scheduler in self.schedulers.values():
            scheduler.step(*self._followed(task, metrics) if wiring.required(scheduler.step) else ())

    def _followed(self, task: Task, metrics: Mapping[str, float]) -> tuple[float]:
        name = task.scheduler_metric or ("val_loss" if "val_loss" in metrics else "loss")
        if name not in metrics:
            raise TaskError(
                f"the scheduler follows '{name}', which was not reported in this epoch; there are "
                f"{facts.some(metrics)}: name one of them as `scheduler_metric`"
            )
        return (metrics[name],)

    def _validate(self) -> None:
        self.validation = self.evaluate()

    def _predict(self) -> None:
        options = tuple(self._todo().options)
        self.stepping.begin_serving(options, _kind_of_device(self.placed_model()))
        self.result = self.serving(self)

    def predict(self) -> list[Any]:
        """What the model makes of the batches, at home."""
        output = self._todo().output or output_of
        return predict(
            self.placed_model(),
            self.batches,
            self.stepping.in_evaluation(lambda batch: output(self.placed_model(), batch)),
            self._move,
            self._fetch,
            self._position,
        )

    def _fetch(self, value: Any) -> Any:
        """A value with all its tensors on the host."""
        adapter = self._adapter
        if not adapter.copies:
            return value
        return convert(value, lambda one: adapter.fetch(one) if adapter.resident(one) else one)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the batches.

        Raises:
            TaskError: There is nothing to compute.
        """
        model, _ = self.placed()
        if not self._computes_loss() and self._todo().metrics is None:
            raise TaskError("there is nothing to evaluate: give the task `loss=` or `metrics=`")
        metrics = self._todo().metrics
        around = self.stepping.in_evaluation
        return evaluate(
            model,
            self.batches,
            around(self._loss_of()) if self._computes_loss() else None,
            around(lambda batch: metrics(self.placed()[0], batch)) if metrics else None,
            self._move,
            self._todo().batch_size,
            self._position,
            [(self._adapter.random_state, self._adapter.set_random_state)] if self._adapter.copies else [],
        )

    def _drop(self) -> None:
        self._let_go_of_steps()
        self._stack.release("optimizer")

    def _suspend(self) -> None:
        """Everything comes home; the optimizer stays, and what the step is made of."""
        registry = self.placed()[1]
        rest = self._resting = Resting()

        def commit(copies: dict[int, torch.Tensor]) -> None:
            rest.note(copies)
            registry.commit_state(copies)

        home = "bringing the optimizer's state home"
        self._stack.release("optimizer", Release(home, commit, registry.copy_state))
        self._stack.release("model")
        self.stepping.suspend()
        self._lent = self._lend()
        self._measure()
        if self.residue is not None and self.residue.bytes:
            self.say(f"while suspended, {self.residue.bytes} bytes of the run stay on the device")

    def _settings(self) -> ProcessSettings:
        """What the run wants of its process. One that resumes brings states of its own for the generators."""
        settings = self._options.process
        resumes = self.keeper is not None and self.keeper.resume is not None
        return replace(settings, seed=0) if resumes and settings.seed is None else settings

    def _lend(self) -> tuple[Any, Any]:
        """Give back what the process has once: the lease, and the state of the device's generator."""
        if not self._settings().wanted():
            return None, None
        state = self._adapter.random_state() if self._settings().seed is not None else None
        return leases.suspend(self._token), state

    def _reacquire(self) -> None:
        check_cancel(self._position)
        lease, state = self._lent
        if lease is not None:
            check = partial(check_cancel, self._position)
            leases.resume(self._token, lease, when_taken=self._options.when_taken, check=check)
        self._adapter.acquire()
        if state is not None:
            self._device_random = self._adapter.random_state()
            self._adapter.set_random_state(state)

    def _resume(self) -> None:
        """Placed anew, and the optimizer follows."""
        check_cancel(self._position)
        if self.model is None:
            raise TaskError("there is no model to go on with")
        lost = self._registry.identity_lost if self._registry else []
        registry = self._registry = Registry(self.model, self._adapter)
        registry.identity_lost = lost
        registry.optimizers = list(self.optimizers)
        self.residue = None
        place_again(registry, self._adapter, self._resting)
        self._resting = Resting()
        self._agree(self.model)
        self.check("when the run was resumed")

    def _measure(self) -> None:
        torch.clear_autocast_cache()  # it keeps converted copies of the parameters
        ask, options = self._adapter.leftovers, self._options
        left = bounded(ask, options.deadline, "measuring the device") if self._adapter.copies else ask()
        if left is None:
            self.residue = UNKNOWN
            return
        kept = self._bytes_of_model() if options.exit == "keep" else 0
        total = sum(leftover.nbytes for leftover in left)
        design = [f"{kept} bytes of the model kept on the device"] if kept else []
        design += ["a failed run's frames are kept"] if options.keep_frames else []
        found = with_owners(left, self._adapter) if total > kept else ()
        self.residue = Residue(True, total - kept, found, "; ".join(design))

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

    # -- the step -------------------------------------------------------------------------------

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
        return convert(batch, self._adapter.move)


def _load_compiler() -> None:
    """Load torch's compiler now, which the first optimizer of a process would load otherwise.

    Something in that import keeps the frames it was called from, with their locals, until the garbage
    collector runs: the first run's model would outlive the run. A thread has no callers.
    """
    if "torch._dynamo" not in sys.modules:
        loader = threading.Thread(target=import_module, args=("torch._dynamo",), name="interlock import")
        loader.start()
        loader.join()


def _kind_of_device(model: nn.Module) -> str:
    """The type of the device that a model's parameters stand on, as torch calls it."""
    return next((p.device.type for p in model.parameters()), "cpu")


def _nothing(*_: Any) -> None:
    return None


def loss_of_output(model: nn.Module, batch: Any) -> Any:
    """The loss that the model itself computes: `.loss` or `["loss"]` of what it returns.

    Raises:
        TaskError: It returns neither.
    """
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    raise TaskError(
        f"the task has no loss function, and the model returned {type(output).__name__} without `.loss`: "
        "pass `loss=`"
    )
