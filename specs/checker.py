"""Decides the properties of a spec by exploring its machine, and returns shortest traces.

The graph explored is the product of phases, resource statuses and automata, computed by
`Rule.advance` over the rules that were read back from the `transitions` machine. Wishes are
unknown to the checker: a transition with a wish may or may not be taken, so a proof holds for
every choice. Each property is decided by a breadth-first search (safety), or by looking for a
cycle or a dead end (response), so a refutation comes with a shortest trace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from .deciders import DECIDERS
from .graph import Edge, Graph, arrows
from .machine import Lifecycle, lifecycle
from .model import Spec
from .properties import Property


class Result(StrEnum):
    """What the checker says of a property. Only `PROVED` is a pass."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True)
class Verdict:
    """What was found about one property.

    Attributes:
        prop: The property.
        result: Proved, refuted or undetermined.
        trace: For refuted: the edges of a shortest path that breaks it, from the start.
        note: Where it breaks, or why it is undetermined.
    """

    prop: Property
    result: Result
    trace: tuple[Edge, ...] = ()
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is proved."""
        return self.result is Result.PROVED

    @property
    def path(self) -> str:
        """The trace as text: `created --acquire--> acquiring --fail--> failed`."""
        return arrows(self.trace)

    @property
    def events(self) -> tuple[str, ...]:
        """The events of the trace."""
        return tuple(edge.rule.transition.event for edge in self.trace)

    def __str__(self) -> str:
        lines = [f"{self.result:>12}  {self.prop.name}: {self.prop.doc}"]
        if self.note:
            lines.append(f"{'':14}{self.note}")
        if self.trace:
            lines.append(f"{'':14}{self.path}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """The verdicts on all properties of one spec.

    Attributes:
        spec: What was checked.
        verdicts: One per property, in the order of the spec.
        configurations: Size of the explored product.
        transitions: Edges of the product.
        seconds: Wall time of build, exploration and decision.
    """

    spec: Spec
    verdicts: tuple[Verdict, ...]
    configurations: int
    transitions: int
    seconds: float

    @property
    def result(self) -> Result:
        """Refuted if any is, else undetermined if any is, else proved."""
        found = {v.result for v in self.verdicts} or {Result.UNDETERMINED}
        for result in (Result.REFUTED, Result.UNDETERMINED):
            if result in found:
                return result
        return Result.PROVED

    @property
    def proved(self) -> bool:
        """Whether every property is proved (and there is at least one)."""
        return self.result is Result.PROVED

    def __getitem__(self, name: str) -> Verdict:
        return next(v for v in self.verdicts if v.prop.name == name)

    def __str__(self) -> str:
        """The lifecycle, what was found of it, and each property that is not proved."""
        held, count = sum(verdict.holds for verdict in self.verdicts), len(self.verdicts)
        found = f"{held} of {count} properties proved" if count else "it has no property to prove"
        head = f"{self.spec.name}: {self.result} ({found}, {self.configurations} configurations)"
        return "\n".join([head, *(str(verdict) for verdict in self.verdicts if not verdict.holds)])


def check(spec: Spec, limit: int = 100_000, life: Lifecycle | None = None) -> Report:
    """Decide every property of a spec.

    Args:
        spec: Usually a composed one (`compose`).
        limit: Largest number of configurations to explore; beyond it, what cannot be refuted is
            undetermined.
        life: The machine to explore, if not the shared one of the spec.

    Returns:
        The report. It is proved only if each single property is.
    """
    begin = time.perf_counter()
    graph = Graph(life or lifecycle(spec), limit)
    verdicts = tuple(decide(graph, prop) for prop in spec.properties)
    return Report(spec, verdicts, len(graph.configs), len(graph.edges), time.perf_counter() - begin)


def decide(graph: Graph, prop: Property) -> Verdict:
    """Decide one property on an explored graph."""
    trace, note, vacuous = DECIDERS[prop.pattern](graph, prop)
    if trace or note:
        return Verdict(prop, Result.REFUTED, trace, note)
    if not graph.complete:
        return Verdict(
            prop, Result.UNDETERMINED, note=f"more than {len(graph.configs)} configurations: raise the limit"
        )
    if vacuous:
        return Verdict(prop, Result.UNDETERMINED, note=f"vacuous: {vacuous}")
    return Verdict(prop, Result.PROVED)
