"""Judges the mutants of all composed specs, and says of each survivor why it breaks no promise.

A survivor's reason is found by rule where one can be checked (the mutant allows exactly the same
runs, ...), and stands in `REASONS` by name otherwise. A survivor without a reason fails the tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from interlock.backends.monitors import MONITORS
from interlock.specs import INFERENCE, TRAINING, Lifecycle, Report, Result, Spec, Status, check, compose
from interlock.specs.graph import Edge, Graph
from interlock.specs.mutants import Mutant, mutants, own_lifecycle

BASES = {"cpu": "", "cuda": "cpu", "xla": "cuda", "ddp": "cpu", "fsdp2": "ddp"}
"""Of each backend only what it adds to this one is mutated; the nightly tests mutate all of it."""

IMPLIED = {
    "deterministic": ((), "a spec in which an event has two destinations cannot be built"),
    "no-dead-end": (
        ("closable",),
        "it names the phase where nothing leads on",
    ),
    "peer-fail-closes": (
        ("fail-closes", "peer-fail-accepted"),
        "it leads to `failed`, as an error does; led elsewhere, the next failure of a peer finds no edge",
    ),
    "lose-closes": (
        ("fail-closes", "closable"),
        "a device can be lost on the way out as well, so `device_lost` is part of what follows a failure",
    ),
    "placed-before-used": (("needs-met",), "the promise by history, where `needs-met` goes by status"),
}
"""Properties that no mutant refutes alone: by which others they are implied, and why they are kept."""

_AVAILABLE = "what a run can do, not what it promises: "
_ORDER = "another legal order, in which nothing is skipped that must happen: "
REASONS = {
    "paused --resume--> training": _AVAILABLE + "a paused run can still be suspended, and stopped",
    "training --suspend--> suspending": _AVAILABLE + "it can still be paused first",
    "paused --suspend--> suspending": _AVAILABLE + "it can still be resumed first",
    "ready --stop--> stopping": _AVAILABLE + "`offload` is left",
    "ready --offload--> offloading": _AVAILABLE + "`stop` is left",
    "failed --rescue--> rescuing": _AVAILABLE + "the last checkpoint stands",
    "interrupted --rescue--> rescuing": _AVAILABLE + "the last checkpoint stands",
    "created no longer sends acquire": "without an answer of the table the caller decides",
    "acquired no longer sends place": "without an answer of the table the caller decides",
    "placed no longer sends optimize": "without an answer of the table the caller decides",
    "placed no longer sends serve": "without an answer of the table the caller decides",
    "ready sends compile before restore": _ORDER + "both are taken, in any order",
    "offloading sends discard before keep": "only for a run with both wishes, and there is one exit policy",
    "paused --resume--> training goes to paused": _AVAILABLE
    + "a paused run can still be suspended, and stopped",
    "restoring --restored--> ready goes to training": _AVAILABLE + "no compilation after a restore",
    "compiling --compiled--> ready goes to training": _AVAILABLE + "no restore after a compilation",
    "created --offload--> offloading goes to closed": "nothing is held yet",
    "created --offload--> offloading goes to serving": "nothing is held, and `predict` is refused there",
    "created --fail--> failed goes to closed": "nothing is held yet",
    "created --interrupt--> interrupted goes to closed": "nothing is held yet",
    "created --peer_fail--> failed goes to closed": "nothing is held yet",
    "placed --warm_up--> placed, a step before there is an optimizer": "inference asks for no optimizer",
    "stream in settled refuses pause": _AVAILABLE + "a run can still be suspended, and stopped",
    "lazy in settled refuses pause": _AVAILABLE + "a run can still be suspended, and stopped",
    "stream in idle accepts sync": "a synchronisation too many, where nothing is queued yet",
    "lazy in idle accepts sync": "a synchronisation too many, where nothing is queued yet",
    "ranks in together accepts abort": "`leave` comes first in the table; alone is always safe",
    "leaving --fail--> offloading no longer spoils group": "after a failed `leave` the group is aborted",
    "leaving --interrupt--> offloading no longer spoils group": "after a failed `leave` the group is aborted",
}
_REASON_ENDINGS = {
    ("goes to homing",): _ORDER + "`offloading` would send `home` next",
    ("goes to predicting",): _ORDER + "`serving` would go there next",
    ("goes to dropping",): _ORDER + "`offloading` would send `drop` next",
    ("goes to freeing",): _ORDER + "`offloaded` would send `free` next",
    ("freeing --freed--> offloaded goes to closed", "freeing --abandon--> offloaded goes to closed"): _ORDER
    + "`offloaded` would send `close` next",
    (
        "failed --rescue--> rescuing goes to offloading",
        "interrupted --rescue--> rescuing goes to offloading",
    ): "the save happens, in no phase of its own: what strikes there is booked as struck in `offloading`",
    (
        "no longer opens model",
        "no longer opens optimizer",
        "no longer opens device",
    ): "a declaration: only the "
    "transition itself says that it changes the resource; the tests of the adapters observe it",
}


@dataclass(frozen=True)
class Judged:
    """A mutant and what became of it.

    Attributes:
        spec: Name of the composed spec.
        mutant: The mutant, without its spec: thousands of specs would keep the garbage collector busy.
        built: Whether it could be built.
        refuted: The properties that are refuted.
        vacuous: Those that are undetermined.
        reason: For survivors: why no promise is broken.
        replayed: How many traces of refutations were fired on the mutant's own machine.
        problems: Where the machine did otherwise.
    """

    spec: str
    mutant: Mutant
    built: bool
    refuted: tuple[str, ...] = ()
    vacuous: tuple[str, ...] = ()
    reason: str = ""
    replayed: int = 0
    problems: tuple[str, ...] = ()

    @property
    def fate(self) -> str:
        """`refused at build`, `refuted`, `undetermined` (which is no pass either) or `survives`."""
        if not self.built:
            return "refused at build"
        return "refuted" if self.refuted else "undetermined" if self.vacuous else "survives"


def compositions() -> Iterator[tuple[Spec, Spec | None]]:
    """Each composed spec, with the one of which it is an extension."""
    for spec in (TRAINING, INFERENCE):
        for name, base in BASES.items():
            yield compose(spec, MONITORS[name]), compose(spec, MONITORS[base]) if base else None


@lru_cache(maxsize=2)
def all_judged(everything: bool = False) -> tuple[Judged, ...]:
    """The mutants of all compositions, judged.

    Args:
        everything: Also those that a backend shares with the one it extends.
    """
    found: list[Judged] = []
    for spec, base in compositions():
        original = Graph(own_lifecycle(spec))
        found += [_judged(spec, original, mutant) for mutant in mutants(spec, None if everything else base)]
    return tuple(found)


def rebuilt(chosen: Iterable[Judged]) -> list[Spec]:
    """The specs of judged mutants, made again."""
    wanted = {(one.spec, one.mutant.kind, one.mutant.name): number for number, one in enumerate(chosen)}
    found: dict[int, Spec] = {}
    for spec, _ in compositions():
        if any(name == spec.name for name, _, _ in wanted):
            for mutant in mutants(spec):
                if (number := wanted.get((spec.name, mutant.kind, mutant.name))) is not None:
                    found[number] = buildable(mutant)
    return [found[number] for number in range(len(wanted))]


def _judged(spec: Spec, original: Graph, mutant: Mutant) -> Judged:
    if mutant.spec is None:
        return Judged(spec.name, mutant, False, reason=mutant.note)
    life = own_lifecycle(mutant.spec)
    report = check(mutant.spec, life=life)
    refuted, vacuous = (names(report, result) for result in (Result.REFUTED, Result.UNDETERMINED))
    reason = "" if refuted or vacuous else why(original, mutant)
    traces = [verdict.trace for verdict in report.verdicts if verdict.trace]
    problems = tuple(problem for trace in traces for problem in replay(life, trace))
    return Judged(
        spec.name, replace(mutant, spec=None), True, refuted, vacuous, reason, len(traces), problems
    )


def replay(life: Lifecycle, trace: tuple[Edge, ...]) -> Iterator[str]:
    """Fire the events of a trace on a machine; yields where it does not go the same way."""
    slot = life.slot()
    for edge in trace:
        event = edge.rule.transition.event
        if event not in slot.legal:
            yield f"{event} is refused in {slot.config}"
            return
        if slot.fire(event).config != edge.dest:
            yield f"{event} leads to {slot.config}, not to {edge.dest}"
            return


def names(report: Report, result: Result) -> tuple[str, ...]:
    """The properties of a report with this result."""
    return tuple(v.prop.name for v in report.verdicts if v.result is result)


def buildable(mutant: Mutant) -> Spec:
    """The spec of a mutant that was not refused at build."""
    assert mutant.spec is not None, mutant.note
    return mutant.spec


def why(original: Graph, mutant: Mutant) -> str:
    """Why a survivor breaks no promise, or nothing if nobody knows."""
    graph = Graph(own_lifecycle(buildable(mutant)))
    runs = _runs(graph) == _runs(original)
    if (
        mutant.kind not in ("drop effect", "drop release", "undeclare effects")
        and runs
        and _same_choices(original, graph)
    ):
        return "exactly the same runs: what it changes never matters"
    if mutant.kind == "undeclare effects" and _on_whole_device(original, graph):
        return "the device is whole wherever it fires: to touch it is allowed there"
    name = mutant.name
    if name in REASONS:
        return REASONS[name]
    for endings, reason in _REASON_ENDINGS.items():
        if name.endswith(endings):
            return reason
    if mutant.kind in ("drop move", "add move") and _runs(graph) < _runs(original):
        return "fewer runs, all of them the original's; each phase is still entered, each way out open"
    if mutant.kind == "drop effect" and runs:
        return "one obligation fewer, which the same runs still meet"
    return ""


def _runs(graph: Graph) -> set[tuple[object, ...]]:
    return {(edge.source, edge.rule.transition.event, edge.dest) for edge in graph.edges}


def _same_choices(one: Graph, other: Graph) -> bool:
    wishes = sorted({t.wish for t in one.spec.transitions if t.wish})
    runs = [frozenset(chosen) for n in range(len(wishes) + 1) for chosen in itertools.combinations(wishes, n)]
    lives = [Lifecycle(graph.spec, cast("Any", None), graph.rules) for graph in (one, other)]
    configs = [c for c in one.configs if one.spec.table.get(c.phase) != other.spec.table.get(c.phase)]
    return all(lives[0].next(c, wished) == lives[1].next(c, wished) for c in configs for wished in runs)


def _on_whole_device(original: Graph, graph: Graph) -> bool:
    old = set(original.spec.transitions)
    device = graph.spec.resources.index("device")
    fired = [e for e in graph.edges if e.rule.transition not in old]
    return bool(fired) and all(e.source.statuses[device] is Status.WHOLE for e in fired)
