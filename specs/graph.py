"""The reachable product of a lifecycle: phases, resource statuses and automata.

It is computed by `Rule.advance` over the rules that were read back from the `transitions` machine.
Wishes are not known here: a transition with a wish may or may not be taken, so what holds of the
graph holds for every choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .machine import Lifecycle
from .model import EVERY, Status, Verb
from .properties import Atom
from .semantics import Config, Outcome, Rule, start


class Edge(NamedTuple):
    """One transition between two configurations of the product."""

    source: Config
    rule: Rule
    outcome: Outcome

    @property
    def dest(self) -> Config:
        """Where it leads."""
        return self.outcome.config


def arrows(trace: Sequence[Edge]) -> str:
    """A trace as text."""
    if not trace:
        return ""
    return trace[0].source.phase + "".join(f" --{e.rule.transition.event}--> {e.dest.phase}" for e in trace)


class Graph:
    """The reachable product of a lifecycle, with what the deciders need of it.

    Configurations and edges are numbered in the order in which they are found, so configuration 0
    is the start; `out[c]` lists the numbers of the edges that leave configuration `c`.
    """

    def __init__(self, life: Lifecycle, limit: int = 100_000) -> None:
        self.spec = life.spec
        self.rules = life.rules
        self.configs: list[Config] = [start(life.spec)]
        self.edges: list[Edge] = []
        self.source: list[int] = []
        self.dest: list[int] = []
        self.out: list[list[int]] = []
        self.complete = True
        number = {self.configs[0]: 0}
        rows = {phase: tuple(row.values()) for phase, row in life.rules.items()}
        for here, config in enumerate(self.configs):  # grows while it is walked: breadth first
            leaving: list[int] = []
            for rule in rows[config.phase]:
                if not rule.allowed(config):
                    continue
                outcome = rule.advance(config)
                there = number.get(outcome.config)
                if there is None:
                    if len(self.configs) >= limit:
                        self.complete = False
                        continue
                    there = number[outcome.config] = len(self.configs)
                    self.configs.append(outcome.config)
                leaving.append(len(self.edges))
                self.edges.append(Edge(config, rule, outcome))
                self.source.append(here)
                self.dest.append(there)
            self.out.append(leaving)
        self.end = [config.phase == self.spec.terminal for config in self.configs]
        self.holding = [any(s is not Status.ABSENT for s in config.statuses) for config in self.configs]
        # Many edges do the same thing in different configurations: match each kind of deed once.
        kinds: dict[tuple[int, tuple[tuple[Verb, str], ...]], int] = {}
        self._kind = [kinds.setdefault((id(e.rule), e.outcome.changes), len(kinds)) for e in self.edges]
        samples = dict(zip(reversed(self._kind), reversed(self.edges), strict=True))
        self._samples = [samples[kind] for kind in range(len(kinds))]
        self._index = _index(self._samples)
        self._marks: dict[tuple[Atom, bool], list[bool]] = {}
        self.unsound = [number for number, edge in enumerate(self.edges) if edge.outcome.unsound]

    def marks(self, atom: Atom, *, tried: bool = False) -> list[bool]:
        """For each edge whether it matches the atom.

        Args:
            atom: What to look for.
            tried: Whether an effect counts that met a status in which it does nothing: it does
                where a property forbids it, and not where a property waits for it.
        """
        found = self._marks.get((atom, tried))
        if found is None:
            keys = (
                *(("event", event) for event in atom.events),
                *(("enters", phase) for phase in atom.enters),
                *(("tried" if tried else "done", *effect) for effect in atom.effects),
            )
            kinds = frozenset().union(*(self._index.get(key, ()) for key in keys))
            found = self._marks[atom, tried] = [kind in kinds for kind in self._kind]
        return found

    def search(self, goal: Goal, observe: Observe | None = None) -> tuple[Edge, ...]:
        """A shortest path from the start to an edge that satisfies `goal`, or `()`.

        Args:
            goal: Asked of each edge number, with the observer's state before that edge.
            observe: The observer's state (0, 1 or 2; 0 at the start) after an edge.
        """
        came: dict[int, tuple[int, int]] = {0: (-1, -1)}  # 4 * configuration + observer -> (from, edge)
        todo = deque([0])
        while todo:
            node = todo.popleft()
            bits = node & 3
            for edge in self.out[node >> 2]:
                if goal(edge, bits):
                    return self._path(came, node, edge)
                after = (self.dest[edge] << 2) | (observe(edge, bits) if observe else bits)
                if after not in came:
                    came[after] = (node, edge)
                    todo.append(after)
        return ()

    def _path(self, came: dict[int, tuple[int, int]], node: int, edge: int) -> tuple[Edge, ...]:
        path = [self.edges[edge]]
        while node:
            node, edge = came[node]
            if edge >= 0:
                path.append(self.edges[edge])
        return tuple(reversed(path))

    def with_wish(self, wish: str) -> set[int]:
        """The configurations of runs that have one wish and no other."""
        kinds = [sample.rule.transition.wish in ("", wish) for sample in self._samples]
        return self.onward([0], [kinds[kind] for kind in self._kind])

    def onward(self, roots: Iterable[int], usable: Sequence[bool] = ()) -> set[int]:
        """The configurations reached from `roots` (themselves among them) by usable edges, or by any."""
        seen = set(roots)
        todo = list(seen)
        while todo:
            for edge in self.out[todo.pop()]:
                there = self.dest[edge]
                if there not in seen and (not usable or usable[edge]):
                    seen.add(there)
                    todo.append(there)
        return seen

    def path_to(self, config: int) -> tuple[Edge, ...]:
        """A shortest path to a configuration (`()` for the start itself)."""
        return self.search(lambda edge, _: self.dest[edge] == config) if config else ()


Goal = Callable[[int, int], bool]
Observe = Callable[[int, int], int]


def _index(samples: Sequence[Edge]) -> dict[tuple[str, ...], set[int]]:
    """What an atom may ask for -> the numbers of the samples that match."""
    found: dict[tuple[str, ...], set[int]] = {}
    for number, edge in enumerate(samples):
        t = edge.rule.transition
        tried = ((e.verb, e.resource) for _, e in edge.rule.effects)
        keys: list[tuple[str, ...]] = [("event", t.event), ("enters", t.dest)]
        for word, deeds in (("tried", tried), ("done", edge.outcome.changes)):
            for verb, resource in deeds:
                keys += [(word, verb, resource), (word, verb, EVERY)]
        for key in keys:
            found.setdefault(key, set()).add(number)
    return found
