"""One run, from `created` to `closed`, on the thread that calls it.

A session binds the phases of the lifecycle to what is done in them, and turns whatever happens
into an `Outcome`. Which phase follows which is not decided here: the driver follows the spec.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.backends.adapter import Adapter
from interlock.specs import Entry, Lifecycle

from . import facts
from .batches import convert, describe
from .deadline import bounded
from .driver import Driver, Position
from .errors import Cancelled, DeadlinePassed, InterlockError, RunInUse, TaskError
from .events import Bus, Closed, Note, PhaseChanged, Report
from .evidence import Failure, attach, record, unpin
from .loop import check_cancel, evaluate, mean_loss, train_epoch
from .outcome import Outcome, Residue, StatusName
from .owners import with_owners
from .program import StepProgram
from .release import Release, ReleaseStack
from .residency import Registry
from .task import Data, Task

T = TypeVar("T")

ExitPolicy = Literal["offload", "keep", "discard"]


@dataclass(frozen=True)
class Options:
    """How a run is to be carried out; the same for every task.

    Attributes:
        exit: What becomes of the model: home, kept on the device, or discarded.
        deadline: Seconds that each backend call on the way out may take.
        report_every: Steps between two reports; also the bound within which a parameter that is
            replaced in mid-run, or a loss that is not finite, is found.
        nonfinite: What a NaN or infinite loss is: an `error`, or something to `ignore`.
        keep_frames: Leave the frames of a failed run's traceback alone, for a debugger.
    """

    exit: ExitPolicy = "offload"
    deadline: float = 30.0
    report_every: int = 50
    nonfinite: Literal["error", "ignore"] = "error"
    keep_frames: bool = False


class Session:
    """The state of one run. Made by the engine, used once.

    Args:
        task: What to train.
        data: On what; `None` for a session that is driven by phase handles.
        epochs: How often.
        adapter: Where.
        life: The lifecycle of that backend, proved.
        program: The step, proved for that backend.
        options: How.
        bus: Whom to tell.
    """

    def __init__(
        self,
        task: Task,
        data: Data | None,
        epochs: int,
        adapter: Adapter,
        life: Lifecycle,
        program: StepProgram,
        options: Options,
        bus: Bus,
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.task = task
        self.adapter = adapter
        self.options = options
        self.bus = bus
        self.position = Position()
        self.outcome: Outcome | None = None
        self.validation: dict[str, float] = {}
        self._data = data
        self._epochs = epochs
        self._program = program
        self._model: nn.Module | None = None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._scheduler: Any = None
        self._registry: Registry | None = None
        self._step: Callable[[Any], torch.Tensor] | None = None
        self._first: Callable[[Any], torch.Tensor] | None = None
        self._residue: Residue | None = None
        self._error: BaseException | None = None
        self._failures: list[Failure] = []
        self._reports: list[Report] = []
        self._reported = 0
        self._metrics: dict[str, float] = {}
        self._notes: list[str] = []
        self._busy = False
        self._batches: Any = None
        self._outside: BaseException | None = None
        wishes = frozenset({options.exit} - {"offload"})
        stack = ReleaseStack(options.deadline, adapter.copies)
        self.driver = Driver(
            life, self._actions(), self._releases(), stack, self.position, wishes, self._announce
        )
        self._begun = self.driver.slot.history[0].at

    # -- a whole run ----------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Carry the run out, to the end, whatever happens. Never raises the run's own error."""
        try:
            self.perform(self._body)
        except BaseException as error:
            return self.outcome or self.conclude(error)
        return self.conclude()

    def _body(self) -> None:
        data = self._data
        if data is None:
            raise TaskError("this run has no data: drive it by its phase handles, or pass batches to `fit`")
        self.driver.advance("training")
        for epoch in range(self._epochs):
            self.position.epoch = epoch
            go_on = train_epoch(
                data.train, self.take_step(), self._first_step(), self.position, self.options.report_every,
                self._report,
            )  # fmt: skip
            if not go_on:
                self.driver.fire("stop")
                return
            if self._scheduler is not None and self.task.scheduler_every == "epoch":
                self._scheduler.step()
            if data.validate is not None:
                self.validate(data.validate)
        self.driver.fire("finish")

    # -- pieces of a run, for phase handles ---------------------------------------------------------

    def perform(self, work: Callable[[], T]) -> T:
        """Do a piece of the run. An error in it ends the run, and is raised again, the same object.

        Raises:
            RunInUse: The run is being driven already: from another thread, or by this very call's
                caller, from inside a hook.
        """
        if self._busy:
            raise RunInUse("this run is being driven already; start another run instead of calling into this one")
        self._busy = True
        self._outside = sys.exc_info()[1]
        try:
            with self.adapter.session():
                return work()
        except BaseException as error:
            self.conclude(error)
            raise
        finally:
            self._busy = False

    def conclude(self, error: BaseException | None = None) -> Outcome:
        """Go to `closed` by the exit table and draw up the outcome.

        Args:
            error: What ended the run, if anything did.
        """
        pending = error
        while True:
            try:
                with self.adapter.session():
                    if pending is not None:
                        self.driver.fault(self._note_error(pending))
                        pending = None
                    self.driver.unwind(self._note_error)
                break
            except BaseException as late:
                if isinstance(late, InterlockError) and late.__cause__ is not None:
                    self._note_error(late)
                    break
                pending = late
        return self._close()

    def take_step(self) -> Callable[[Any], torch.Tensor]:
        """The step function; there is one once the optimizer is built."""
        if self._step is None:
            raise TaskError("there is no step before the optimizer is built")
        return self._step

    def _first_step(self) -> Callable[[Any], torch.Tensor] | None:
        """The step that checks, the first time it is asked for."""
        first, self._first = self._first, None
        return first

    def step_once(self, batch: Any) -> torch.Tensor:
        """One step outside of the engine's loop: the detached loss."""
        step = self._first_step() or self.take_step()
        loss = step(batch)
        self.position.step += 1
        check_cancel(self.position)
        return loss

    def validate(self, batches: Any) -> dict[str, float]:
        """Evaluate in mid-run; the metrics are reported with the prefix `val_`."""
        self._batches = batches
        self.driver.do("validate")
        report = {f"val_{name}": value for name, value in self.validation.items()}
        self._publish_report(report)
        return self.validation

    @property
    def model(self) -> nn.Module:
        """The placed model."""
        return self._placed()[0]

    # -- what is done in each phase -----------------------------------------------------------------

    def _actions(self) -> dict[str, Callable[[], None]]:
        stack = lambda name, how=None: lambda: self.driver.stack.release(name, how)  # noqa: E731
        keep = Release("handing the model over", lambda _: self._registry and self._registry.keep_model())
        discard = Release("discarding the model", lambda _: self._registry and self._registry.discard_model())
        added = {
            phase: (lambda act=act: act(self._model)) for phase, act in self.adapter.actions().items()
        }
        return {
            "acquiring": self._acquire,
            "placing": self._place,
            "optimizing": self._optimize,
            "validating": self._validate,
            "dropping": stack("optimizer"),
            "homing": stack("model"),
            "keeping": stack("model", keep),
            "discarding": stack("model", discard),
            "measuring": self._measure,
            "freeing": stack("device"),
            "writing_off": lambda: None,
            **added,
        }

    def _releases(self) -> Mapping[str, Release]:
        own = {
            "model": Release(
                "bringing the model home",
                lambda copies: self._registry and self._registry.commit_model(copies),
                lambda: self._registry.copy_model() if self._registry else {},
                lambda: self._registry and self._registry.forget_model(),
            ),
            "optimizer": Release(
                "bringing the optimizer's state home",
                lambda copies: self._registry and self._registry.commit_state(copies),
                lambda: self._registry.copy_state() if self._registry else {},
                lambda: self._registry and self._registry.forget_state(),
            ),
        }
        of_backend = {
            name: Release(f"giving back the {name}", lambda _: None, function)
            for name, function in self.adapter.releases().items()
        }
        return {**own, **of_backend}

    def _acquire(self) -> None:
        check_cancel(self.position)
        self.adapter.acquire()

    def _place(self) -> None:
        check_cancel(self.position)
        source = self.task.model
        model = source if isinstance(source, nn.Module) else source()
        if not isinstance(model, nn.Module):
            raise TaskError(f"the task's model function returned {type(model).__name__}, not an nn.Module")
        self._model = model
        self._registry = Registry(model, self.adapter)
        self.adapter.place(model)
        self._registry.after_placement()

    def _optimize(self) -> None:
        check_cancel(self.position)
        model, registry = self._placed()
        self._optimizers = facts.as_optimizers(self.task.optimizer(model))
        registry.optimizers = list(self._optimizers)
        self._check("when the optimizer was built", built=True)
        (optimizer,) = self._optimizers
        if self.task.scheduler is not None:
            self._scheduler = self.task.scheduler(optimizer)
        self._step, self._first = self._bind(model, optimizer)

    def _placed(self) -> tuple[nn.Module, Registry]:
        if self._model is None or self._registry is None:
            raise TaskError("there is no placed model yet")
        return self._model, self._registry

    def _check(self, when: str, built: bool = False) -> None:
        model, registry = self._placed()
        if self._optimizers:
            facts.check_optimizers(
                model, self._optimizers, registry.original_names(), when=when, built=built
            )
            facts.check_state(self._optimizers, {id(p): name for name, p in model.named_parameters()})
        facts.check_ties(model, registry.ties)

    def _loss_of(self, model: nn.Module) -> Callable[[Any], Any]:
        loss = self.task.loss
        return (lambda batch: loss(model, batch)) if loss else (lambda batch: loss_of_output(model, batch))

    def _move(self, batch: Any) -> Any:
        return convert(batch, self.adapter.move)

    def _bind(self, model: nn.Module, optimizer: Optimizer) -> tuple[Callable[[Any], torch.Tensor], ...]:
        """The step, and the first step: the same with checks in it."""
        loss_of = self._loss_of(model)
        move = self._move if self.adapter.copies else None
        forward = (lambda batch: loss_of(move(batch))) if move else loss_of
        every_step = self._scheduler is not None and self.task.scheduler_every == "step"
        bindings: dict[str, Any] = {
            "zero": optimizer.zero_grad,
            "forward": forward,
            "backward": torch.Tensor.backward,
            "apply": optimizer.step,
            "at": self.position,
            "detach": torch.Tensor.detach,
            **({"schedule": self._scheduler.step} if every_step else {}),
        }
        step = self._program.bind(**bindings)

        def checked_forward(batch: Any) -> torch.Tensor:
            try:
                loss = forward(batch)
            except Exception as error:
                error.add_note(f"interlock: in the first forward pass, on a batch of {describe(batch)}")
                raise
            facts.check_loss(loss)
            if self.options.nonfinite == "error":
                facts.check_finite(loss, self.position.step + 1)
            return loss  # type: ignore[no-any-return]

        def checked_backward(loss: torch.Tensor) -> None:
            torch.Tensor.backward(loss)
            got, all_ = facts.check_gradients(model, self._optimizers)
            self._say(f"{got} of {all_} parameters received a gradient in the first step")

        inner = self._program.bind(**{**bindings, "forward": checked_forward, "backward": checked_backward})

        def first(batch: Any) -> torch.Tensor:
            self._check("before the first step")
            before = facts.fingerprints(model)
            loss = inner(batch)
            did, looked_at = facts.changed(before, model)
            self._say(f"{did} of {looked_at} parameters changed in the first update")
            return loss

        return step, first

    def _validate(self) -> None:
        model, _ = self._placed()
        metrics = self.task.metrics
        self.validation = evaluate(
            model,
            self._batches,
            self._loss_of(model),
            (lambda batch: metrics(model, batch)) if metrics else None,
            self._move,
            self.task.batch_size,
            self.position,
        )

    def _measure(self) -> None:
        ask = self.adapter.leftovers
        left = bounded(ask, self.options.deadline, "measuring the device") if self.adapter.copies else ask()
        if left is None:
            self._residue = Residue(known=False)
            return
        kept = self._model_bytes() if self.options.exit == "keep" else 0
        total = sum(leftover.nbytes for leftover in left)
        design = [f"{kept} bytes of the model kept on the device"] * bool(kept)
        design += ["the frames of the traceback are kept"] * bool(self.options.keep_frames and self._error)
        found = with_owners(left, self.adapter) if total > kept else ()
        self._residue = Residue(True, total - kept, found, "; ".join(design))

    def _model_bytes(self) -> int:
        tensors = [*self._model.parameters(), *self._model.buffers()] if self._model else []
        mine = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if self.adapter.resident(t)}
        return sum(storage.nbytes() for storage in mine.values())

    # -- what is told --------------------------------------------------------------------------------

    def _announce(self, entry: Entry) -> None:
        if entry.phase in ("training", "checkpointing") and entry.event != "train":
            self._check(f"after '{entry.event}'")
        slot = self.driver.slot
        statuses = zip(slot.lifecycle.spec.resources, entry.config.statuses, strict=True)
        held = tuple(name for name, status in statuses if status != "absent")
        number = self.driver.announced
        self.bus.publish(
            PhaseChanged(number, entry.event, entry.source, entry.phase, held, entry.ended, entry.at - self._begun)
        )

    def _say(self, text: str) -> None:
        self._notes.append(text)
        self.bus.publish(Note(text))

    def _report(self, losses: list[torch.Tensor]) -> None:
        self._check("at a report")
        if not losses:
            return
        first = self.position.step - len(losses) + 1
        if self.options.nonfinite == "ignore":
            mean = float(torch.stack(losses).mean())
        else:
            mean = mean_loss(losses, first)
        self._publish_report({"loss": mean})

    def _publish_report(self, metrics: dict[str, float]) -> None:
        self._metrics.update(metrics)
        report = Report(self.position.step, self.position.epoch, metrics, time.monotonic() - self._begun)
        self._reports.append(report)
        self.bus.publish(report)

    # -- faults and the end --------------------------------------------------------------------------

    def _note_error(self, error: BaseException) -> str:
        """Turn an error into evidence that pins nothing; the event to fire for it."""
        failure = record(error, self.driver.phase, self.position.step)
        if self._error is None:
            self._error = error
            self._failures.insert(0, failure)
        elif error is not self._error:
            self._failures.append(failure)
            attach(self._error, error)
        if not self.options.keep_frames:
            unpin(error, self._outside)
        if isinstance(error, DeadlinePassed):
            return "abandon"
        if self.adapter.is_loss_of_device(error):
            return "lose"
        if isinstance(error, Exception) and not isinstance(error, Cancelled):
            return "fail"
        return "interrupt"

    def _status(self) -> StatusName:
        events = [entry.event for entry in self.driver.slot.history]
        if self._error is not None:
            soft = isinstance(self._error, Cancelled) or not isinstance(self._error, Exception)
            return "cancelled" if soft else "failed"
        return "finished" if "finish" in events else "stopped"

    def _close(self) -> Outcome:
        slot = self.driver.slot
        now = time.monotonic() - self._begun
        gone = tuple(name for name, how in slot.ended if how == "abandoned")
        left = tuple(name for name in self.driver.stack.names)
        unknown = Residue(known="device" not in dict(slot.ended) or not gone)
        residue = self._residue or (Residue(known=False) if gone or left else unknown)
        status = self._status()
        first = self._failures[0] if self._failures else None
        self.bus.publish(
            Closed(
                status,
                "abandoned" if gone or left else "clean",
                residue.bytes if residue.known else None,
                f"{first.type}: {first.message}" if first else "",
                self.position.step,
                now,
            )
        )
        self.bus.finish(2.0)
        discarded = self.options.exit == "discard"
        self.outcome = Outcome(
            status=status,
            abandoned=tuple(dict.fromkeys(gone + left)),
            model=None if discarded else self._model,
            optimizer=self._optimizers[0] if self._optimizers and not discarded else None,
            error=self._error,
            failure=first,
            errors=tuple(self._failures[1:]),
            residue=residue,
            history=tuple(slot.history),
            metrics=dict(self._metrics),
            reports=tuple(self._reports),
            steps=self.position.step,
            seconds=now,
            notes=(*self._notes, *self.bus.failed),
            spec_hash=slot.lifecycle.spec.hash,
        )
        self._let_go()
        return self.outcome

    def _let_go(self) -> None:
        """Break the cycles through actions and bound functions: no garbage collector is needed."""
        self.driver.detach()
        self._step = self._first = None
        self._model = self._registry = self._scheduler = None
        self._optimizers = ()
        self._data = None
        self._batches = None
        self._error = self._outside = None


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
        f"the task has no loss function, and the model returned {type(output).__name__} without `.loss`: pass "
        "`loss=`"
    )
