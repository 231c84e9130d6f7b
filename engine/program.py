"""Step programs: options -> a regular expression -> a proof -> one generated function without checks.

`step_program(monitor, ...)` weaves the options into the plain step, proves that the result keeps to the
step protocol of this backend, reads the events back from the generated source and compares, and only
then hands out a `StepProgram`, whose `bind` makes the function that runs.

The options themselves are in `interlock.steps`, one a file, and may come from anywhere: `Option` says what
one is. Whether it was woven in rightly is decided by the proof.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Protocol, TypeAlias

from .extraction import FLAG, HELPERS, PARAMETER, ExtractionError, read
from .specs.compose import Monitor
from .specs.expressions import Expression, difference, events_of
from .specs.inclusion import StepVerdict, prove
from .specs.protocol import step_protocol
from .steps.option import Option
from .steps.schedule import Schedule
from .steps.sync import Sync
from .weaving import Block, Line, ProgramError, expression_of, render

Step: TypeAlias = Callable[[Any], Any]
"""Takes one batch, returns the detached loss."""


_PLAIN: Block = (
    Line("zero()", ("zero",), "a new window: the last update's gradients go"),
    Line("loss = forward(batch)", ("forward",)),
    Line("backward(loss)", ("backward",)),
    Line("at.updating = True", ("update",), "a fault from here on leaves a half-applied update"),
    Line("apply()", ("apply",)),
    Line("at.updating = False", ("updated",), "not reached when `apply` raises"),
)
_RETURN = Line("return detach(loss)", (), "no graph outlives the step")
_PLAIN_BINDINGS: Mapping[str, str] = {
    "zero": "zero(): drop the gradients (`optimizer.zero_grad`)",
    "forward": "forward(batch) -> the loss, a scalar tensor with a graph",
    "backward": "backward(loss): add its gradients (`torch.Tensor.backward`)",
    "at": "object whose `updating` is set to True for the time of an update",
    "apply": "apply(): the step of the optimizer, or of all of them",
    "detach": "detach(loss) -> the loss without a graph (`torch.Tensor.detach`)",
}


class UpdateFlag(Protocol):
    """What a program sets around an update."""

    updating: bool


class Recorder(Protocol):
    """What the instrumented build writes to: a list, for instance."""

    def append(self, event: str, /) -> object:
        """Take one event."""


@dataclass(frozen=True)
class StepProgram:
    """A proved step program. `step_program` makes them.

    Attributes:
        expression: The regular expression of its events.
        source: Readable Python: one function `step(batch)`, without checks.
        verdict: That it keeps to the step protocol of its backend: always proved.
        bindings: Name -> meaning of all that `bind` has to be given.
        options: The names of the options woven in, in this order.
    """

    expression: Expression
    source: str
    verdict: StepVerdict
    bindings: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def bind(self, **bindings: Any) -> Step:
        """The step function over the objects of a run.

        Args:
            bindings: One value for each name in `self.bindings`.

        Returns:
            A function of one batch (on the host or on the device, as `forward` or `move` wants it)
            that returns the detached loss. It holds the bound objects, and nothing of a step
            that is over. When `apply` raises, `at.updating` stays True.

        Raises:
            ProgramError: A name is missing, or is not one of the program's.
        """
        missing = [name for name in self.bindings if name not in bindings]
        foreign = sorted(bindings.keys() - self.bindings.keys())
        problems = [f"'{name}' is not bound: {self.bindings[name]}" for name in missing]
        problems += [f"'{name}' is not used by it: remove it" for name in foreign]
        _refuse("the step function", problems)
        # No builtins: the source was read, and uses none; but C code that is called from it may import, and
        # takes that from here (torch 2.9 does, under a dispatch mode). The function leaves its own globals,
        # or it would be part of a cycle, and only the garbage collector could free what it holds.
        namespace: dict[str, Any] = {**bindings, "__builtins__": {"__import__": __import__}}
        exec(_compiled(self.source), namespace)  # noqa: S102 - our own source, read back and proved
        step: Step = namespace.pop("step")
        return step

    def bind_traced(self, record: Recorder, **bindings: Any) -> Step:
        """The same function with instrumented bindings, for tests.

        Args:
            record: Each event is appended to it as it begins, so that after a fault the last one
                is the one in which it struck.
            bindings: As for `bind`.

        Raises:
            ProgramError: As for `bind`.
        """
        events = events_of(self.expression)
        traced = {
            name: _Traced(name, value, record) if name in events else value
            for name, value in bindings.items()
        }
        if FLAG in traced:
            traced[FLAG] = _TracedFlag(bindings[FLAG], record)
        return self.bind(**traced)


class _Traced:
    """A binding that records its event, then does its work."""

    def __init__(self, event: str, call: Callable[..., Any], record: Recorder) -> None:
        self.event, self.call, self.record = event, call, record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.record.append(self.event)
        return self.call(*args, **kwargs)


class _TracedFlag:
    """The flag, recording `update` and `updated`."""

    def __init__(self, at: UpdateFlag, record: Recorder) -> None:
        self.at, self.record = at, record

    @property
    def updating(self) -> bool:
        return self.at.updating

    @updating.setter
    def updating(self, value: bool) -> None:
        self.record.append("update" if value else "updated")
        self.at.updating = value


def step_program(monitor: Monitor, *, schedule: bool = False, options: Sequence[Option] = ()) -> StepProgram:
    """The step program for a backend and a set of options, proved.

    Args:
        monitor: The backend's monitor. Where its step automata speak of `sync`, the program does.
        schedule: Whether learning rate schedulers follow each update.
        options: What else a step does. Their order matters only where their `follows` leave it open.

    Raises:
        ProgramError: Options clash or cannot be woven, or the program is not proved; in the latter
            case the message holds the shortest counterexample.
    """
    what = f"the step program for '{monitor.name}'"
    chosen = [*([Schedule()] if schedule else []), *options]
    if any("sync" in automaton.alphabet for automaton in monitor.step):
        chosen.append(Sync())
    _refuse(what, _clashes(chosen))
    chosen = _ordered(what, chosen)
    block = _woven(what, chosen)
    names = [option.name for option in chosen]
    source = render((*block, _RETURN), [f"Step program for '{monitor.name}': {', '.join(['plain', *names])}"])
    bindings = dict(_PLAIN_BINDINGS)
    for option in chosen:
        bindings.update(option.bindings)
    _verify(what, block, source, chosen, bindings)
    protocol = step_protocol(monitor, [automaton for option in chosen for automaton in option.automata])
    verdict = prove(expression_of(block), protocol)
    if not verdict.holds:
        raise ProgramError(what, [str(verdict)], verdict)
    return StepProgram(verdict.expression, source, verdict, bindings, tuple(names))


def _woven(what: str, options: Iterable[Option]) -> Block:
    block = _PLAIN
    for option in options:
        try:
            block = option.weave(block)
        except ProgramError as error:
            raise ProgramError(what, [f"option '{option.name}': {p}" for p in error.problems]) from error
    return block


def explain(program: StepProgram) -> str:
    """A program for people: its expression, its verdict, what is bound, its source."""
    verdict = program.verdict
    bound = "\n".join(f"  {name:<10} {doc}" for name, doc in program.bindings.items())
    return "\n\n".join(
        (
            f"program   {program.expression}",
            f"verdict   {verdict.result}: repeated for ever, it keeps to the {verdict.protocol.name}",
            f"bindings\n{bound}",
            program.source.rstrip(),
        )
    )


def _ordered(what: str, options: Sequence[Option]) -> list[Option]:
    """The options in an order that respects `follows`, otherwise as they were given."""
    waiting, ordered = list(options), list[Option]()
    while waiting:
        names = {option.name for option in waiting}
        ready = next((o for o in waiting if not o.follows & (names - {o.name})), None)
        if ready is None:
            problem = f"options {', '.join(sorted(names))} follow one another in a circle: cut it"
            raise ProgramError(what, [problem])
        waiting.remove(ready)
        ordered.append(ready)
    return ordered


def _clashes(options: Sequence[Option]) -> list[str]:
    found: list[str] = []
    for i, option in enumerate(options):
        for other in options[:i]:
            if other.name == option.name:
                found.append(f"option '{option.name}' is there twice: give it once")
                continue
            both = f"options '{other.name}' and '{option.name}'"
            why = option.conflicts.get(other.name) or other.conflicts.get(option.name)
            if why:
                found.append(f"{both} do not go together: {why}")
            shared = sorted(option.bindings.keys() & other.bindings.keys())
            found += [f"{both} both bind '{name}': rename one" for name in shared]
        taken = sorted(option.bindings.keys() & (_PLAIN_BINDINGS.keys() | {PARAMETER}))
        found += [f"option '{option.name}' binds '{n}', which every program has: rename it" for n in taken]
    return found


def _refuse(what: str, problems: Sequence[str]) -> None:
    if problems:
        raise ProgramError(what, problems)


def _verify(
    what: str, block: Block, source: str, options: Sequence[Option], bindings: Mapping[str, str]
) -> None:
    """Hold three things together: what was meant, what was declared, and what the source says."""
    meant = expression_of(block)
    fires = events_of(meant)
    declared = events_of(expression_of(_PLAIN)).union(*(option.events for option in options))
    try:
        found = read(source, declared - {"update", "updated"}, (bindings.keys() - declared) | HELPERS)
    except ExtractionError as error:
        raise ProgramError(what, error.problems) from error
    add, drop = "and not declared: add it to the option's", "drop it, or weave a line for it"
    problems = [f"event '{e}' is fired {add} `events`" for e in sorted(fires - declared)]
    problems += [f"event '{e}' is declared and never fired: {drop}" for e in sorted(declared - fires)]
    problems += [f"'{n}' is used {add} `bindings`" for n in sorted(found.free - bindings.keys())]
    problems += [f"'{n}' is declared and never used: {drop}" for n in sorted(bindings.keys() - found.free)]
    word = difference(meant, found.expression)
    if word is not None:
        problems.append(
            f"the source says `{found.expression}`, the program meant `{meant}`: "
            f"they differ in '{' -> '.join(word) or '(nothing)'}'"
        )
    _refuse(what, problems)


@lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """The code of a source, which is registered so that tracebacks show its lines."""
    name = f"<interlock step {hashlib.sha256(source.encode()).hexdigest()[:8]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")
