"""Runs SPIN on the Promela model of a spec and says what it finds, property by property.

The model is compiled once, without optimisation (compiling is what takes the time), and the
verifier is run once per LTL formula. What LTL cannot say is asked of the transitions which the
verifier prints while it explores: whether each is taken, whether the end can be reached.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from interlock.specs import Kind, Pattern, Result, Spec, Transition
from interlock.specs.ltl import Claim, claims
from interlock.specs.model import FAULTS
from interlock.specs.promela import promela

FLAGS = ("-O0", "-w", "-DNOREDUCE", "-DNOFAIR", "-DPRINTF")
# A small hash table, and a stack deep enough for each spec: a search that hits the limit is an error.
LIMITS = ("-w14", "-m200000")
_STEP = re.compile(r"^step (\d+): ([\d ]+)> ([\d ]+): (\d+)((?: \d+)*)$", re.MULTILINE)
_START = re.compile(r"^start > ([\d ]+): (\d+)", re.MULTILINE)


class SpinError(Exception):
    """SPIN, the compiler or the verifier did not do its work; the message is its output."""


@dataclass(frozen=True)
class Step:
    """A transition that the verifier took.

    Attributes:
        number: Its place in the spec.
        source: The configuration before it: numbers of the phase, the statuses, the states.
        dest: The one after it.
        chosen: The entries of the table that may be chosen in `dest`, as bits.
        labels: The numbers of the labels that it left.
    """

    number: int
    source: tuple[int, ...]
    dest: tuple[int, ...]
    chosen: int
    labels: frozenset[int]


@dataclass(frozen=True)
class Found:
    """What SPIN found.

    Attributes:
        results: Property -> verdict.
        configurations: How many it explored.
        steps: How many transitions between them.
    """

    results: dict[str, Result]
    configurations: int
    steps: int


def missing() -> list[str]:
    """The tools that are not installed."""
    return [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


def decide(spec: Spec, folder: Path, text: str = "") -> Found:
    """Decide the properties of a spec by SPIN.

    Args:
        spec: A spec.
        folder: An empty folder to work in.
        text: The model, if it is not to be `promela(spec)`.

    Raises:
        SpinError: A tool failed, or the search was cut short.
    """
    (folder / "model.pml").write_text(text or promela(spec))
    _run(folder, "spin", "-a", "model.pml")
    _run(folder, "gcc", *FLAGS, "-o", "pan", "pan.c")
    output = _verify(folder, "whole_space")
    steps = frozenset(_step(*match.groups()) for match in _STEP.finditer(output))
    begun = _START.search(output)
    assert begun is not None, output
    start, chosen = begun.groups()
    model = _Model(spec, steps, tuple(int(part) for part in start.split()), int(chosen))
    results = {
        p.name: _result(_BY_STEPS[p.pattern](model)) for p in spec.properties if p.pattern in _BY_STEPS
    }
    for claim in claims(spec):
        if claim.prop:
            holds = "errors: 0" in _verify(folder, claim.name)
            results[claim.prop] = Result.UNDETERMINED if holds and model.vacuous(claim) else _result(holds)
    edges = {(step.number, step.source, step.dest) for step in steps}
    return Found(results, len(model.configurations), len(edges))


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or "error" in done.stderr.lower():
        raise SpinError(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _verify(folder: Path, name: str) -> str:
    output = _run(folder, "./pan", "-a", *LIMITS, "-N", name)
    if "errors: " not in output or "max search depth too small" in output:
        raise SpinError(f"the search for '{name}' was cut short:\n{output[-2000:]}")
    return output


def _result(holds: bool) -> Result:
    return Result.PROVED if holds else Result.REFUTED


def _step(number: str, source: str, dest: str, chosen: str, words: str) -> Step:
    labels = frozenset(
        30 * n + bit for n, word in enumerate(words.split()) for bit in range(30) if int(word) >> bit & 1
    )
    before, after = (tuple(int(part) for part in text.split()) for text in (source, dest))
    return Step(int(number), before, after, int(chosen), labels)


class _Model:
    """What the verifier printed, beside the spec's data."""

    def __init__(self, spec: Spec, steps: frozenset[Step], start: tuple[int, ...], chosen: int) -> None:
        self.spec = spec
        self.steps = steps
        self.start = start
        self.choices = {start: chosen} | {step.dest: step.chosen for step in steps}
        self.phases = [phase.name for phase in spec.phases]
        self.ends = self.phases.index(spec.terminal)
        self.configurations = set(self.choices)
        self.labels = {number for step in steps for number in step.labels}

    def vacuous(self, claim: Claim) -> bool:
        """Whether a formula holds only because what it speaks of never happens."""
        ended = any(step.dest[0] == self.ends for step in self.steps)
        pattern = next(p.pattern for p in self.spec.properties if p.name == claim.prop)
        return (claim.met >= 0 and claim.met not in self.labels) or (pattern is Pattern.ENDED and not ended)

    def graph(self, wanted: Callable[[Transition], bool]) -> nx.DiGraph:
        """The configurations, with the steps of the wanted transitions."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.configurations)
        wants = [wanted(t) for t in self.spec.transitions]
        graph.add_edges_from((step.source, step.dest) for step in self.steps if wants[step.number])
        return graph

    def deterministic(self) -> bool:
        """One destination for each configuration and event."""
        found: dict[tuple[object, ...], tuple[int, ...]] = {}
        events = [t.event for t in self.spec.transitions]
        return all(found.setdefault((s.source, events[s.number]), s.dest) == s.dest for s in self.steps)

    def closable(self) -> bool:
        """The end can be reached from everywhere, without a fault."""
        graph = self.graph(lambda t: t.event not in FAULTS)
        ends = [node for node in self.configurations if node[0] == self.ends]
        able = set(ends).union(*(nx.ancestors(graph, end) for end in ends))
        return able == self.configurations

    def reachable(self) -> bool:
        """Phases entered, transitions taken, entries of the table chosen by runs with that wish only."""
        spec = self.spec
        by_row = {(t.source, t.event): t for t in spec.transitions}
        kinds = {phase.name: phase.kind for phase in spec.phases}
        entered = {self.phases[node[0]] for node in self.configurations} == set(self.phases)
        taken = {step.number for step in self.steps} == set(range(len(spec.transitions)))
        entries = all(
            t.event in (*spec.table.get(t.source, ()), *FAULTS)
            for t in spec.transitions
            if t.wish or kinds[t.source] is Kind.EXIT
        )
        rows = [
            (phase, n, by_row[phase, e].wish) for phase, row in spec.table.items() for n, e in enumerate(row)
        ]
        seen = {wish: self._chosen(wish) for _, _, wish in rows}
        return entered and taken and entries and all((phase, n) in seen[wish] for phase, n, wish in rows)

    def _chosen(self, wish: str) -> set[tuple[str, int]]:
        graph = self.graph(lambda t: t.wish in ("", wish))
        nodes = {self.start} | nx.descendants(graph, self.start)
        return {(self.phases[node[0]], n) for node in nodes for n in range(30) if self.choices[node] >> n & 1}


_BY_STEPS: dict[Pattern, Callable[[_Model], bool]] = {
    Pattern.DETERMINISTIC: _Model.deterministic,
    Pattern.REACHABLE: _Model.reachable,
    Pattern.CLOSABLE: _Model.closable,
}
