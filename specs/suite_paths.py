"""Every transition, pair of transitions and illegal event of a spec, as cases for parametrized tests.

    @pytest.mark.parametrize("case", transitions_of(spec), ids=str)
    def test_transition(case):
        case.check(spec)

or, all of them at once, `class TestMine(SpecSuite): spec = MY_SPEC`. A case is fired on an ordinary
`transitions` machine and on interlock's own slot, and both must agree after each event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import BrokenPromise, IllegalTransition, SpecError
from .machine import Slot, lifecycle
from .model import Spec
from .semantics import Config, start
from .suite_plain import Plain


@dataclass(frozen=True)
class Case:
    """One event in one phase, and a way to get there.

    Attributes:
        id: For the test's name.
        path: The events before, from the beginning.
        event: The one in question.
        phase: Where it is fired.
        legal: Whether it must be taken.
    """

    id: str
    path: tuple[str, ...]
    event: str
    phase: str
    legal: bool = True

    def __str__(self) -> str:
        return self.id

    def check(self, spec: Spec) -> Slot:
        """Fire the case on both machines.

        Returns:
            Interlock's slot, after it.

        Raises:
            BrokenPromise: They differ, or the event was taken, or refused, wrongly.
        """
        plain, slot = Plain(spec), lifecycle(spec).slot()
        for event in (*self.path, *((self.event,) if self.legal else ())):
            slot.fire(event)
            broken = [*plain.follow(slot.history[-1]), *plain.differs(slot)]
            if broken:
                raise BrokenPromise(f"{self.id}, at '{event}'", broken)
        if not self.legal:
            broken = [*refused(slot, plain, self.event)]
            if broken:
                raise BrokenPromise(self.id, broken)
        return slot


def refused(
    slot: Slot,
    plain: Plain,
    event: str,
    fire: Callable[[str], object] | None = None,
    first: Sequence[str] = (),
) -> Iterator[str]:
    """What is wrong with how an illegal event is refused: one line each.

    Args:
        slot: Where it must change nothing.
        plain: In the same place.
        event: Not legal there.
        fire: How it is fired; on the slot itself if left out.
        first: The events that firing anything catches up with, before it is refused.
    """
    before = list(slot.history)
    if plain.ahead().fire(event):
        yield f"the plain machine takes '{event}', which should be illegal"
    try:
        (fire or slot.fire)(event)
    except IllegalTransition as error:
        if (error.event, error.phase) != (event, plain.state):
            yield f"the error is about '{error.event}' in '{error.phase}', not '{event}' in '{plain.state}'"
        if error.legal != plain.legal:
            yield f"the error lists {error.legal} as legal, and that is {plain.legal}"
        unlisted = [name for name in plain.legal if name not in str(error)]
        if unlisted:
            yield f"the error's message does not name {unlisted}: {error}"
    else:
        yield f"'{event}' was taken in '{plain.state}', where it is not legal"
    new = [entry.event for entry in slot.history[len(before) :]]
    if slot.history[: len(before)] != before or (new and new != list(first)):
        yield f"refusing '{event}' has changed the history"


Edges = Mapping[Config, Mapping[str, Config]]
_explored: dict[str, tuple[Edges, Mapping[Config, tuple[str, ...]]]] = {}


def _explore(spec: Spec) -> tuple[Edges, Mapping[Config, tuple[str, ...]]]:
    """Where each event leads from each configuration that can be reached; and the shortest way there."""
    if spec.hash in _explored:
        return _explored[spec.hash]
    life = lifecycle(spec)
    first = start(spec)
    edges: dict[Config, dict[str, Config]] = {}
    ways: dict[Config, tuple[str, ...]] = {first: ()}
    todo = deque([first])
    while todo:
        config = todo.popleft()
        row = life.rules[config.phase]
        edges[config] = {event: row[event].advance(config).config for event in life.legal(config)}
        for event, further in edges[config].items():
            if further not in ways:
                ways[further] = (*ways[config], event)
                todo.append(further)
    return _explored.setdefault(spec.hash, (edges, ways))


def transitions_of(spec: Spec) -> list[Case]:
    """Each transition of a spec once, by the shortest way to it.

    Raises:
        SpecError: Some can never be taken.
    """
    edges, ways = _explore(spec)
    cases: dict[tuple[str, str], Case] = {}
    for config, way in ways.items():
        for event, further in edges[config].items():
            name = f"{config.phase} --{event}--> {further.phase}"
            cases.setdefault((config.phase, event), Case(name, way, event, config.phase))
    never = [t for t in spec.transitions if (t.source, t.event) not in cases]
    if never:
        remedy = "can never be taken: remove it, or let its guards hold somewhere"
        raise SpecError(f"the suite of spec '{spec.name}'", [f"transition {t} {remedy}" for t in never])
    return list(cases.values())


def pairs_of(spec: Spec) -> list[Case]:
    """Each pair of transitions that can follow each other, by the shortest way to the second."""
    edges, ways = _explore(spec)
    cases: dict[tuple[str, str, str], Case] = {}
    for config, way in ways.items():
        for first, between in edges[config].items():
            for second, last in edges[between].items():
                key = config.phase, first, second
                if key not in cases:
                    name = f"{config.phase} --{first}--> {between.phase} --{second}--> {last.phase}"
                    cases[key] = Case(name, (*way, first), second, between.phase)
    return list(cases.values())


def illegal_pairs_of(spec: Spec) -> list[Case]:
    """Each phase with each event that it refuses, always or (by a guard, by an automaton) somewhere."""
    edges, ways = _explore(spec)
    cases: dict[tuple[str, str], Case] = {}
    for config, way in ways.items():
        for event in (*spec.events, "no such event"):
            if event not in edges[config] and (config.phase, event) not in cases:
                name = f"{config.phase} refuses {event}"
                cases[config.phase, event] = Case(name, way, event, config.phase, legal=False)
    return list(cases.values())


def covering_paths(spec: Spec) -> list[Case]:
    """Whole runs, from the first phase to the last, which together take each transition.

    Each goes, as long as it can, to the nearest transition that none has taken yet.
    """
    edges, _ = _explore(spec)
    left = {(case.phase, case.event) for case in transitions_of(spec)}
    cases: list[Case] = []
    while left:
        here, path = start(spec), []
        while (way := _nearest(edges, here, lambda c, e: (c.phase, e) in left)) is not None:
            for event in way:
                left.discard((here.phase, event))
                path.append(event)
                here = edges[here][event]
        path += _nearest(edges, here, lambda c, e: edges[c][e].phase == spec.terminal) or []
        phases = len(path)
        cases.append(Case(f"run {len(cases) + 1}, {phases} events", tuple(path[:-1]), path[-1], ""))
    return cases


def _nearest(edges: Edges, here: Config, wanted: Callable[[Config, str], bool]) -> list[str] | None:
    """The shortest way that ends with an event that is wanted; `None` if there is none."""
    seen = {here}
    todo: deque[tuple[Config, list[str]]] = deque([(here, [])])
    while todo:
        config, way = todo.popleft()
        for event, further in edges[config].items():
            if wanted(config, event):
                return [*way, event]
            if further not in seen:
                seen.add(further)
                todo.append((further, [*way, event]))
    return None


_KINDS: dict[str, Callable[[Spec], list[Case]]] = {
    "transition": transitions_of,
    "pair": pairs_of,
    "illegal": illegal_pairs_of,
    "whole": covering_paths,
}


class SpecSuite:
    """All cases of one spec as tests; pytest collects them from classes that inherit this one.

        class TestMine(SpecSuite):
            spec = MY_SPEC

    Attributes:
        spec: What is tested.
        backend: Instead of a spec: the name of the backend whose training lifecycle it is.
    """

    spec: ClassVar[Spec | None] = None
    backend: ClassVar[str] = ""

    @classmethod
    def composed(cls) -> Spec:
        """The spec that is tested.

        Raises:
            SpecError: The class names neither spec nor backend.
        """
        if cls.spec is not None:
            return cls.spec
        if not cls.backend:
            raise SpecError(f"the suite {cls.__name__}", ["it has nothing to test: set `spec` or `backend`"])
        from interlock.backends.registry import monitor

        from .compose import compose
        from .lifecycles import TRAINING

        return compose(TRAINING, monitor(cls.backend))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest: one test for each case."""
        for name, cases in _KINDS.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases(self.composed()), ids=str)

    def test_transition(self, transition: Case) -> None:
        """Both machines take each transition, to the same place."""
        transition.check(self.composed())

    def test_pair(self, pair: Case) -> None:
        """And each pair of them."""
        pair.check(self.composed())

    def test_illegal(self, illegal: Case) -> None:
        """What is illegal is refused by an error that lists what is legal, and changes nothing."""
        illegal.check(self.composed())

    def test_whole(self, whole: Case) -> None:
        """A run that is over holds nothing, and each resource ended as often as it was acquired."""
        spec = self.composed()
        slot = whole.check(spec)
        plain = Plain(spec).ahead(*whole.path, whole.event)
        broken = []
        if slot.state != spec.terminal or slot.held:
            broken.append(f"it ended in '{slot.state}', holding {slot.held}")
        if sorted(plain.acquired) != sorted(name for name, _ in slot.ended):
            broken.append(f"it acquired {plain.acquired}, and {slot.ended} ended")
        if broken:
            raise BrokenPromise(whole.id, broken)
