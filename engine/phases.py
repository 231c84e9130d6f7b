"""What is done in each phase of a run. Nothing here asks in which phase the run is, nor which comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.specs.protocol import step_protocol

from . import compiler, facts, leases, wiring
from .batches import convert, size
from .deadline import bounded
from .errors import TaskError
from .evaluation import evaluate, predict
from .fused import fuse, settle
from .hand import Hand
from .holding import Holding, kind_of_device, nothing
from .keeping import Kept, widen
from .leases import ProcessSettings
from .loop import check_cancel
from .outcome import UNKNOWN, Residue
from .owners import with_owners
from .release import Release
from .residency import Registry, claim, family, lazy
from .serving import output_of
from .steps.option import Parts
from .suspension import Resting, place_again
from .task import Task


class Phases(Holding):
    """The phases of a run, each as a method that carries it out."""

    # -- to the first step ----------------------------------------------------------------------

    def _acquire(self) -> None:
        check_cancel(self._position)
        compiler.load()
        settings, options = self._settings(), self._options
        if settings.wanted():
            check = partial(check_cancel, self._position)
            name = self._todo().name
            leases.take(settings, self._token, when_taken=options.when_taken, check=check, name=name)
        self._adapter.acquire()
        if settings.seed is not None:
            self._device_random = self._adapter.random_state()
            self._adapter.seed(settings.seed)

    def _settings(self) -> ProcessSettings:
        """What the run wants of its process. One that resumes brings states of its own for the generators."""
        settings = self._options.process
        resumes = self.keeper is not None and self.keeper.resume is not None
        return replace(settings, seed=0) if resumes and settings.seed is None else settings

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
                self.cut,
                self._adapter.read,
            )
            self.stepping.begin_by_hand(hand, self.optimizers)
            return
        read = self._adapter.read
        parts = Parts(model, self.optimizers[0], task.batch_size or size, kind_of_device(model), read)
        loss_of, move = self._loss_of(), self._move
        forward = (lambda batch: loss_of(move(batch))) if self._adapter.copies else loss_of
        more = {"schedule": self._schedule} if task.schedules_steps else {}
        self.stepping.begin(parts, tuple(task.options), forward, more)

    def _schedule(self) -> None:
        for scheduler in self.schedulers.values():
            scheduler.step()

    def _compile(self) -> None:
        """From here on calls of the model go through `torch.compile`, which does its work at the first."""
        check_cancel(self._position)
        model, options = self.placed_model(), self._todo().compile
        if model._compiled_call_impl is None:  # one that comes compiled stays as it is
            self._compiled = model
            model.compile(**(options if isinstance(options, Mapping) else {}))

    # -- in training ----------------------------------------------------------------------------

    def _validate(self) -> None:
        self.validation = self.evaluate()

    def _adopt(self) -> None:
        """Let the task change what trains, and look at what became of it."""
        model, _ = self.placed()
        change, self.adoption = self.adoption, None
        if change is None:
            raise TaskError("there is nothing to adopt: no function says what is to change")
        self._known = self._agreed = None  # what is found from here on was declared
        made = change(model, self.named if len(self.named) > 1 else self.optimizers[0])
        if isinstance(made, Optimizer):
            raise TaskError(
                "the adopt function returned an optimizer, which nobody would use: change the one that it is "
                "given, by `optimizer.add_param_group({'params': [...]})`"
            )
        for optimizer in self.optimizers:
            settle(optimizer)
        for scheduler in self.schedulers.values():
            widen(scheduler)
        self.check("when parameters were adopted")
        self._agree(model)

    def end_of_epoch(self, metrics: Mapping[str, float]) -> None:
        """Move the schedulers that move after each epoch.

        Args:
            metrics: The last ones, for a scheduler that follows one.

        Raises:
            TaskError: The metric that it follows was not reported.
        """
        task = self._todo()
        if task.scheduler_every != "epoch" or self._position.step == self.stepping.skipped:
            return  # a scheduler moves after an update, and there may have been none yet
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

    def _kept(self) -> Kept:
        """What a checkpoint holds."""
        extra = {**self.stepping.state(), **self.rules, **self.generators}
        return Kept(self.placed_model(), self.named, self.schedulers, extra)

    def _save(self) -> None:
        if self.keeper is None:
            raise TaskError("this run keeps no checkpoints")
        if self._adapter.lazy:
            self.run_what_was_traced()  # or each tensor that is fetched would be a program
        self.keeper.save(self._kept(), self._position, self._adapter)

    def _rescue(self) -> None:
        if self.keeper is not None:
            if self._adapter.lazy:
                deadline = self._options.deadline
                bounded(self.run_what_was_traced, deadline, "running what was traced, for the rescue")
            fetch = self._fetch_in_time if self._adapter.copies else None
            self.keeper.save(self._kept(), self._position, self._adapter, fetch)

    def _fetch_in_time(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the way out no copy may block for ever."""
        deadline = self._options.deadline
        return bounded(lambda: self._adapter.fetch(tensor), deadline, "copying to the host, for the rescue")

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

    # -- evaluation and prediction --------------------------------------------------------------

    def _predict(self) -> None:
        options = tuple(self._todo().options)
        self.stepping.begin_serving(options, kind_of_device(self.placed_model()))
        if self.serving is None:
            raise TaskError("this run neither evaluates nor predicts")
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
            self._generators(),
            self._ends_a_program(),
        )

    def _ends_a_program(self) -> Callable[[], object]:
        """What ends the program of a batch that is evaluated or predicted on."""
        return self._cut if self._adapter.lazy else nothing

    def _generators(self) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
        """How the state of the device's random generator is read and put back, where there is a device."""
        adapter = self._adapter
        return [(adapter.random_state, adapter.set_random_state)] if adapter.copies else []

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
            self._generators(),
            self._ends_a_program(),
            self._adapter.read,
        )

    # -- lending the device ---------------------------------------------------------------------

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

    # -- on the way out -------------------------------------------------------------------------

    def _drop(self) -> None:
        self._let_go_of_steps()
        self._stack.release("optimizer")

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
