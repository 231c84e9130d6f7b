"""Interlock: training runs whose order is proved before they start, and that leave nothing behind.

    import interlock as il
    task = il.Task(model=build, optimizer=lambda m: torch.optim.AdamW(m.parameters()), loss=loss_of)
    outcome = il.Engine().fit(task, batches, epochs=3)

Importing this package loads nothing else, torch least of all: names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.backends.adapter import Adapter
    from interlock.specs.errors import IllegalTransition, InterlockError, SpecError

    from . import errors
    from .anatomy import describe
    from .bringing import Brought, bring
    from .checkpoint import Checkpoints
    from .copies import trace_copies
    from .engine import Engine
    from .events import Closed, Note, PhaseChanged, Report, Subscription
    from .evidence import Failure
    from .hand import Stepper
    from .handles import Created, Placed, Ready, Training
    from .observers import CsvWriter, TensorBoard
    from .outcome import Outcome, Residue
    from .run import Run, Snapshot
    from .steps.accumulate import Accumulate
    from .steps.clip import ClipNorm
    from .steps.option import Option
    from .steps.precision import Precision
    from .stopping import EarlyStopping, StopAt
    from .task import Data, Task
    from .weights import weights_of

__version__ = "0.1.0"

_LAZY = {
    "Accumulate": "interlock.steps.accumulate",
    "Adapter": "interlock.backends.adapter",
    "Brought": "interlock.bringing",
    "Checkpoints": "interlock.checkpoint",
    "ClipNorm": "interlock.steps.clip",
    "Closed": "interlock.events",
    "Created": "interlock.handles",
    "CsvWriter": "interlock.observers",
    "Data": "interlock.task",
    "EarlyStopping": "interlock.stopping",
    "Engine": "interlock.engine",
    "Failure": "interlock.evidence",
    "IllegalTransition": "interlock.specs.errors",
    "InterlockError": "interlock.specs.errors",
    "Note": "interlock.events",
    "Option": "interlock.steps.option",
    "Outcome": "interlock.outcome",
    "PhaseChanged": "interlock.events",
    "Placed": "interlock.handles",
    "Precision": "interlock.steps.precision",
    "Ready": "interlock.handles",
    "Report": "interlock.events",
    "Residue": "interlock.outcome",
    "Run": "interlock.run",
    "Snapshot": "interlock.run",
    "SpecError": "interlock.specs.errors",
    "Stepper": "interlock.hand",
    "StopAt": "interlock.stopping",
    "Subscription": "interlock.events",
    "Task": "interlock.task",
    "TensorBoard": "interlock.observers",
    "Training": "interlock.handles",
    "bring": "interlock.bringing",
    "describe": "interlock.anatomy",
    "errors": "interlock.errors",
    "trace_copies": "interlock.copies",
    "weights_of": "interlock.weights",
}
"""Public name -> the module that has it; `errors` is one itself."""


__all__ = [
    "Accumulate",
    "Adapter",
    "Brought",
    "Checkpoints",
    "ClipNorm",
    "Closed",
    "Created",
    "CsvWriter",
    "Data",
    "EarlyStopping",
    "Engine",
    "Failure",
    "IllegalTransition",
    "InterlockError",
    "Note",
    "Option",
    "Outcome",
    "PhaseChanged",
    "Placed",
    "Precision",
    "Ready",
    "Report",
    "Residue",
    "Run",
    "Snapshot",
    "SpecError",
    "Stepper",
    "StopAt",
    "Subscription",
    "Task",
    "TensorBoard",
    "Training",
    "bring",
    "describe",
    "errors",
    "trace_copies",
    "weights_of",
]


if not TYPE_CHECKING:
    # Hidden from type checkers: to them a module with `__getattr__` has every name, also a misspelt one.

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first used."""
        if name in _LAZY:
            from importlib import import_module

            module = import_module(_LAZY[name])
            value = globals()[name] = module if name == "errors" else getattr(module, name)
            return value
        raise AttributeError(f"module 'interlock' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
