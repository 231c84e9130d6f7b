"""What is *allowed*: lifecycles as data, the machine that runs them, the checker that proves them.

Nothing here imports torch. `TRAINING` and `INFERENCE` are the lifecycles; `compose(spec, monitor)`
makes one for a backend; `check(spec)` proves it; `lifecycle(spec).slot()` runs it.
"""

from .checker import Report, Result, Verdict, check
from .compose import Monitor, compose
from .errors import IllegalTransition, InterlockError, SpecError, UnknownName
from .lifecycles import INFERENCE, SPECS, TRAINING
from .machine import Entry, Lifecycle, Slot, lifecycle, machine_for, read_back
from .model import Automaton, Effect, Guard, Kind, Phase, Spec, Status, Transition, Verb
from .properties import Atom, Pattern, Property, Scope, does, into, on
from .semantics import Config, Rule

__all__ = [
    "INFERENCE",
    "SPECS",
    "TRAINING",
    "Atom",
    "Automaton",
    "Config",
    "Effect",
    "Entry",
    "Guard",
    "IllegalTransition",
    "InterlockError",
    "Kind",
    "Lifecycle",
    "Monitor",
    "Pattern",
    "Phase",
    "Property",
    "Report",
    "Result",
    "Rule",
    "Scope",
    "Slot",
    "Spec",
    "SpecError",
    "Status",
    "Transition",
    "UnknownName",
    "Verb",
    "Verdict",
    "check",
    "compose",
    "does",
    "into",
    "lifecycle",
    "machine_for",
    "on",
    "read_back",
]
