"""What a module shaped like Lightning's asks of itself, which is there while the engine calls it.

Meanwhile the module is of a class derived from its own, which has `log`, `device`, `current_epoch` and so on.
Before and after, it is of its own class: nothing is ever put on the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from . import bringing_logging
from .bringing_logging import Log
from .bringing_manual import Manual
from .bringing_table import defines
from .errors import TaskError


class Call:
    """One call of a module by the engine: what it may ask for meanwhile.

    Args:
        log: Takes what it logs.
        manual: Its optimizers, if it optimizes by hand.
    """

    def __init__(self, log: Log, manual: Manual | None = None) -> None:
        self.log = log
        self.manual = manual


class Trainer:
    """What `self.trainer` is; what is not here is refused.

    Args:
        context: Of the module.
    """

    is_global_zero = True

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def current_epoch(self) -> int:
        """From 0."""
        return self._context.epoch

    @property
    def global_step(self) -> int:
        """Steps taken before this one."""
        return self._context.step

    @property
    def training(self) -> bool:
        """Whether this is a training step."""
        return self._context.call("trainer.training").log.training

    @property
    def validating(self) -> bool:
        """Whether this is a validation step."""
        return not self.training

    def __getattr__(self, name: str) -> Any:
        """Refuse what is not emulated.

        Raises:
            TaskError: Always.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"`self.trainer.{name}` is not emulated; there are current_epoch, global_step, is_global_zero, "
            "training and validating. Give the module what it needs when it is built"
        )


class Context:
    """What a brought module sees of the run. It holds nothing of the run between two calls.

    Attributes:
        epoch: The present one, from 0.
        step: Steps taken before this one.
    """

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self._call: Call | None = None
        self.trainer = Trainer(self)

    def call(self, what: str) -> Call:
        """The present call.

        Raises:
            TaskError: There is none that it could be for.
        """
        if self._call is None:
            raise TaskError(f"`self.{what}` means something in training_step and validation_step only")
        return self._call

    def manual(self, what: str) -> Manual:
        """The optimizers of the present call.

        Raises:
            TaskError: The module does not optimize by hand.
        """
        manual = self.call(what).manual
        if manual is None:
            raise TaskError(
                f"`self.{what}` is for manual optimization: set `self.automatic_optimization = False` in "
                "__init__"
            )
        return manual

    def during(self, call: Call | None) -> None:
        """Begin or end a call."""
        self._call = call


class emulating:  # noqa: N801 - used as a function is
    """Within the block a module is of the derived class; afterwards of its own.

    Args:
        module: Of its own class.
        kind: Derived from it.
        call: What it may ask for meanwhile, if there is anything.
    """

    def __init__(self, module: nn.Module, kind: type[nn.Module], call: Call | None = None) -> None:
        self._module: nn.Module | None = module
        self._kind = kind
        self._own = own_class(module)
        self._call = call

    def __enter__(self) -> None:
        vars(self._kind)["_interlock"].during(self._call)
        object.__setattr__(self._module, "__class__", self._kind)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._put_back()
        except BaseException:
            # An interrupt: what it cut short is done again.
            self._put_back()
            raise

    def _put_back(self) -> None:
        if self._module is not None:
            object.__setattr__(self._module, "__class__", self._own)
        vars(self._kind)["_interlock"].during(None)
        if self._call is not None and self._call.manual is not None:
            self._call.manual.close()
        self._module = None


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, also where an interrupt has left it of the derived one."""
    kind = type(module)
    return kind.__mro__[1] if "_interlock" in vars(kind) else kind


def derived(module: nn.Module, context: Context) -> type[nn.Module]:
    """A class derived from the module's own that has what Lightning would give it.

    Args:
        module: What it has itself is left to it.
        context: What stands behind.

    Raises:
        TaskError: Its class cannot be derived from.
    """
    own = type(module)
    names = {name: value for name, value in NAMESPACE.items() if not defines(module, name)}
    names |= {"_interlock": context, "__module__": own.__module__, "__qualname__": own.__qualname__}
    try:
        meta: Any = type(own)
        kind: type[nn.Module] = meta(own.__name__, (own,), names)
        with emulating(module, kind):
            pass
    except TypeError as error:
        raise TaskError(
            f"the class of {own.__name__} cannot be derived from, so nothing can be emulated: {error}"
        ) from error
    return kind


def _of_manual(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return call(self._interlock.manual(name), *arguments, **options)

    return method


def _clip(
    manual: Manual,
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    manual.clip(optimizer, gradient_clip_val, gradient_clip_algorithm)


def _handles(manual: Manual, use_pl_optimizer: bool = True) -> Any:  # noqa: ARG001 - as Lightning has it
    return manual.handles()


def _toggled(manual: Manual, optimizer: Any) -> AbstractContextManager[None]:
    return manual.toggled(optimizer)


def _print(_: Any, *values: Any, **options: Any) -> None:
    print(*values, **{"file": sys.stdout, **options})  # noqa: T201 - that is what it is for


NAMESPACE: Mapping[str, Any] = {
    "log": bringing_logging.log,
    "log_dict": bringing_logging.log_dict,
    "print": _print,
    "device": property(lambda self: next((p.device for p in self.parameters()), torch.device("cpu"))),
    "current_epoch": property(lambda self: self._interlock.epoch),
    "global_step": property(lambda self: self._interlock.step),
    "global_rank": property(lambda _: 0),
    "local_rank": property(lambda _: 0),
    "trainer": property(lambda self: self._interlock.trainer),
    "optimizers": _of_manual("optimizers", _handles),
    "lr_schedulers": _of_manual("lr_schedulers", Manual.schedulers),
    "manual_backward": _of_manual("manual_backward", Manual.backward),
    "toggle_optimizer": _of_manual("toggle_optimizer", Manual.toggle),
    "untoggle_optimizer": _of_manual("untoggle_optimizer", lambda manual, _=None: manual.untoggle()),
    "toggled_optimizer": _of_manual("toggled_optimizer", _toggled),
    "clip_gradients": _of_manual("clip_gradients", _clip),
}
"""What a derived class has: what `GIVEN` says, as a test compares."""
