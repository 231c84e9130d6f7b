"""Checkpoints of one run: when they are due, what goes into them, and how a run goes on from one.

`capture` and `restoring` know what of a run decides its future, `store` how it gets to the disk. Here it is
said which of these a run wants, and what belongs to it beside model and optimizers: the state of options and
of stop rules, and of the generators that shuffle its data and that the device has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from interlock.backends.adapter import Adapter

from .capture import Fetch, capture, describe
from .checkpoint import CheckpointError, Checkpoints, Saved, look
from .driver import Position
from .restoring import restore
from .store import Store

if TYPE_CHECKING:
    from .plan import Plan

Boundary = Literal["epoch", "step"]
Say = Callable[[str], None]


class Keeper:
    """Saves and restores one run.

    Args:
        settings: Where and how often; `None` for a run that only resumes.
        resume: From which checkpoint, as chosen by `chosen`; `None` for a run from the beginning.
        about: What is written of the run into each checkpoint.
        say: Takes what is worth reading afterwards.
        tell: Takes what is worth reading while the run goes on.
    """

    def __init__(
        self,
        settings: Checkpoints | None,
        resume: Saved | None,
        about: Mapping[str, Any],
        say: Say,
        tell: Say,
    ) -> None:
        self.resume = resume
        self.boundary: Boundary = "step"
        self.metrics: Mapping[str, float] = {}
        self.verdict = ""
        """Why a stop rule ended the run, if one did."""
        self.saved: Path | None = None
        self._settings = settings
        self._store = Store(settings.folder, settings.keep) if settings is not None else None
        self._about = about
        self._say: Say = say
        self._tell: Say = tell
        self._last = 0
        self._since = 0
        """Only checkpoints with a higher number are this run's to remove."""

    @property
    def rescues(self) -> bool:
        """Whether a run that fails saves once more, where its state is whole."""
        return self._settings is not None and self._settings.rescue

    def claim(self) -> None:
        """Have the folder for this run alone, until `close`.

        Raises:
            CheckpointError: Another run writes there, or it is a folder for something else.
        """
        if self._store is not None:
            self._store.claim()
            earlier = self._store.all()
            if earlier and (self.resume is None or self.resume.path.parent != self._store.folder):
                self._since = earlier[-1].number
                self._say(f"{len(earlier)} checkpoint(s) of earlier runs stay in '{self._store.folder}'")
            for damaged in self._store.damaged():
                self._say(str(damaged))

    def begin(self, step: int) -> None:
        """Count the steps between two checkpoints from here on."""
        self._last = step

    def due(self, step: int) -> tuple[bool, int | None]:
        """Whether one is due after this step, and the step at which the next one is."""
        every = self._settings.every_steps if self._settings is not None else None
        if every is None:
            return False, None
        now = step >= self._last + every
        return now, (step if now else self._last) + every

    def due_after(self, epoch: int) -> bool:
        """Whether one is due after so many complete epochs."""
        every = self._settings.every_epochs if self._settings is not None else None
        return every is not None and epoch % every == 0

    def save(self, parts: Kept, position: Position, adapter: Adapter, fetch: Fetch | None = None) -> None:
        """Write a checkpoint; those that are too many go.

        Args:
            parts: Of the run.
            position: Where it is.
            adapter: Its backend.
            fetch: How a tensor is copied to the host; by default as the backend does it.

        Raises:
            CheckpointError: It cannot be written, or something in it cannot be saved.
        """
        store, settings = self._store, self._settings
        if store is None or settings is None:
            raise CheckpointError("this run keeps no checkpoints: pass `checkpoints=Checkpoints(folder)`")
        state = capture(
            parts.model,
            parts.optimizers,
            parts.schedulers,
            fetch=fetch or adapter.fetch,
            extra={**parts.extra, **_device_random(adapter)},
        )
        between = self.boundary == "epoch"
        about = {
            **self._about,
            "step": position.step,
            "epoch": position.epoch + between,
            "boundary": self.boundary,
            "metrics": dict(self.metrics),
            "stopped": self.verdict,
        }
        saved = store.write(state, {**about, **describe(state)})
        self._last = position.step
        self.saved = saved.path
        store.prune(best=settings.best, lower_is_better=settings.lower, since=self._since)
        self._tell(f"saved {saved.path.name}")

    def restore(self, parts: Kept, position: Position, adapter: Adapter) -> None:
        """Bring all parts to where they were; training goes on from there.

        Raises:
            CheckpointError: The checkpoint is damaged, or does not fit.
        """
        saved = self.resume
        if saved is None:
            raise CheckpointError("there is no checkpoint to go on from")
        state = Store(saved.path.parent).read(saved)
        device = _device_random(adapter)
        if bool(device) != ("device" in state["extra"]):
            self._say(
                "the checkpoint is of another kind of device: this one's random generator goes on from where "
                "it is, so what is drawn there differs from a run that was never interrupted"
            )
            device = {}
            state["extra"] = {name: one for name, one in state["extra"].items() if name != "device"}
        extra = {**parts.extra, **device}
        restore(state, parts.model, parts.optimizers, parts.schedulers, extra=extra)
        position.step, position.epoch = saved.step, saved.epoch
        self._say(
            f"resumed from {saved.path.name}: after step {saved.step} and {saved.epoch} complete epoch(s)"
        )
        newer = [one.path.name for one in Store(saved.path.parent).all() if one.number > saved.number]
        if newer:
            self._say(f"left aside, saved later and in the middle of an epoch: {', '.join(newer)}")

    def close(self) -> None:
        """Let go of the folder."""
        if self._store is not None:
            with suppress(OSError):
                self._store.close()
        self._say = self._tell = _nothing


class Kept:
    """The parts of a run that a checkpoint holds.

    Attributes:
        model: As placed.
        optimizers: As built.
        schedulers: As built.
        extra: Name -> what else decides the future.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        schedulers: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers.values())
        self.schedulers = list(schedulers.values())
        self.extra = extra


def chosen(resume: bool | str | Path | None, settings: Checkpoints | None) -> Saved | None:
    """The checkpoint that a run is to go on from.

    Where in its data a run was in the middle of an epoch is not kept: going on from there would repeat or
    leave out batches. So only those that were saved between two epochs are gone on from.

    Args:
        resume: `True` for the newest such one of the run's folder, or the directory of one.
        settings: Which name the folder.

    Returns:
        `None` if none is asked for, or there is none yet.

    Raises:
        CheckpointError: It cannot be gone on from.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        if settings is None:
            raise CheckpointError(
                "resume=True looks in the folder of the run's checkpoints, and there is none: pass "
                "`checkpoints=Checkpoints(folder)`, or the directory of a checkpoint as `resume`"
            )
        between = _between_epochs(settings.folder)
        others = [one.path.name for one in _all(settings.folder) if one.boundary != "epoch"]
        if others and not between:
            raise CheckpointError(
                f"all checkpoints in '{settings.folder}' ({', '.join(others)}) were saved in the middle of "
                "an epoch, and where in its data that was is not kept: no run can go on from there. Save "
                "after epochs too (`every_epochs=1`); to begin anew, leave `resume` out"
            )
        return max(between, key=lambda one: one.number, default=None)
    if not Path(resume).is_dir():
        raise CheckpointError(f"there is no checkpoint '{resume}': name the directory of one")
    inside = [one.path.name for one in _all(resume)]
    if inside:
        raise CheckpointError(
            f"'{resume}' is a folder of checkpoints: name one of them ({', '.join(inside)}), or pass "
            f"`checkpoints=Checkpoints({str(resume)!r})` and `resume=True` for the newest"
        )
    saved = look(Path(resume))
    if saved.boundary != "epoch":
        names = [one.path.name for one in _between_epochs(saved.path.parent)]
        raise CheckpointError(
            f"{saved.path.name} was saved in the middle of epoch {saved.epoch + 1}, and where in its data "
            "that was is not kept: going on from there would repeat or leave out batches. Resume from one "
            f"that was saved between two epochs; here these are {names or 'none'}"
        )
    return saved


def _all(folder: str | Path) -> tuple[Saved, ...]:
    return Store(folder).all() if Path(folder).is_dir() else ()


def _between_epochs(folder: str | Path) -> list[Saved]:
    return [saved for saved in _all(folder) if saved.boundary == "epoch"]


def generators_of(plan: Plan) -> dict[str, torch.Generator]:
    """The generators by which the loaders of a plan shuffle, where they have their own."""
    found: dict[int, tuple[str, torch.Generator]] = {}
    for part, batches in zip(plan.data._fields, plan.data, strict=True):
        for path, generator in _generators(batches):
            found.setdefault(id(generator), (f"{part}.{path}", generator))
    return dict(found.values())


def _generators(batches: Any) -> Iterator[tuple[str, torch.Generator]]:
    sampler = getattr(batches, "sampler", None)
    inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
    for path, holder in (("", batches), ("sampler.", sampler), ("batch_sampler.sampler.", inner)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            yield f"{path}generator", generator


class _DeviceRandom:
    """The device's random generator, as something that a checkpoint takes along."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._adapter.random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adapter.set_random_state(state["state"])


def _device_random(adapter: Adapter) -> dict[str, _DeviceRandom]:
    return {"device": _DeviceRandom(adapter)} if adapter.random_state() is not None else {}


def widen(scheduler: Any) -> None:
    """Let a scheduler move the groups, too, that its optimizer got since: torch leaves that to who adds them.

    Args:
        scheduler: Of any kind; where it has no learning rate for each group, nothing is done.
    """
    for inner in getattr(scheduler, "_schedulers", ()):  # those that a chain of them is made of
        widen(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    rates = getattr(scheduler, "base_lrs", None)
    if isinstance(rates, list):
        for group in groups[len(rates) :]:
            rate = group["lr"]
            initial = rate.clone() if isinstance(rate, torch.Tensor) else rate
            rates.append(group.setdefault("initial_lr", initial))
    functions = getattr(scheduler, "lr_lambdas", None)
    if isinstance(functions, list) and len({id(one) for one in functions}) == 1:  # one for all groups
        functions.extend(functions[:1] * (len(groups) - len(functions)))


def _nothing(_: str) -> None:
    return None
