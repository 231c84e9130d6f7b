"""The one family of errors. Every error that Interlock raises itself derives from `InterlockError`.

Only the errors of specs live here; the engine adds its own in `interlock.errors`, which also
re-exports these, so that a user needs one name space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class InterlockError(Exception):
    """Base of all errors that Interlock raises on its own account."""


class SpecError(InterlockError):
    """A spec (or a monitor, or a program) cannot be built.

    All mistakes are found before this is raised, so that one edit can mend them all.

    Attributes:
        problems: One sentence per mistake, each with its remedy.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{what} cannot be built, {len(self.problems)} problem(s):\n{lines}")


class IllegalTransition(InterlockError):
    """An event was fired that the spec does not allow here. Nothing has changed.

    Attributes:
        event: The event that was asked for.
        phase: The phase in which it was asked.
        legal: The events that are legal there, sorted.
    """

    def __init__(
        self, event: str, phase: str, legal: Iterable[str], *, why: str = "", recent: Sequence[str] = ()
    ) -> None:
        self.event = event
        self.phase = phase
        self.legal = tuple(sorted(legal))
        because = f" ({why})" if why else ""
        last = f" Last events: {' -> '.join(recent)}." if recent else ""
        options = ", ".join(self.legal) or "none: the run is over, start a new one"
        super().__init__(
            f"event '{event}' is not legal in phase '{phase}'{because}. Legal here: {options}.{last}"
        )


class UnknownName(InterlockError, LookupError):
    """A name (of a backend, a spec, a phase) is not known; the message lists those that are."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.name = name
        self.known = tuple(sorted(known))
        more = f" {hint}" if hint else ""
        super().__init__(f"unknown {kind} '{name}'; known: {', '.join(self.known) or 'none'}.{more}")


class MissingExtra(InterlockError, ImportError):
    """A feature needs a package that `pip install interlock` does not bring.

    Attributes:
        extra: The extra that brings it: `pip install "interlock[EXTRA]"`.
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f'{feature} needs the package {package}: pip install "interlock[{extra}]"')


class DrawingError(InterlockError):
    """A drawing could not be made, although the package that makes it is there."""


class JournalError(InterlockError):
    """A file is not a journal, or is one that this version cannot read.

    Attributes:
        line: The line of the file, counted from 1; 0 if the whole file is meant.
        problem: What is wrong there.
    """

    def __init__(self, source: str, line: int, problem: str) -> None:
        self.line = line
        self.problem = problem
        place = f"{source}, line {line}" if line else source
        super().__init__(f"{place}: {problem}")


class BrokenPromise(InterlockError, AssertionError):
    """A run, or a spec, is not as it should be.

    Attributes:
        broken: One line for each promise.
    """

    def __init__(self, where: str, broken: list[str]) -> None:
        self.broken = tuple(broken)
        lines = "\n".join(f"  - {line}" for line in broken)
        super().__init__(f"{where}: {len(broken)} promise(s) broken:\n{lines}")
