"""Tiny specs by hand, each with the verdict that is right for it, and small random ones.

For the tests of the checker, which decides them, and of the translation, by which SPIN does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from interlock.specs import (
    Automaton,
    Effect,
    Kind,
    Pattern,
    Phase,
    Property,
    Result,
    Scope,
    Spec,
    Transition,
    does,
    into,
    on,
)
from interlock.specs.lifecycles import USES, acquires, completes, needs, releases
from interlock.specs.model import whole

NOTHING: tuple[Effect, ...] = ()


def edges(*lines: str) -> tuple[Transition, ...]:
    """Transitions from `source event dest`, which touch nothing."""
    return tuple(Transition(event, source, dest, NOTHING) for source, event, dest in map(str.split, lines))


def tiny(
    *transitions: Transition,
    prop: Property,
    table: dict[str, tuple[str, ...]] | None = None,
    resources: tuple[str, ...] = ("device",),
    exits: str = "",
    automata: tuple[Automaton, ...] = (),
) -> Spec:
    """A spec whose phases are those of its transitions: `a` first, `end` last, `exits` on the way out."""
    names = dict.fromkeys(name for t in transitions for name in (t.source, t.dest))
    names = dict.fromkeys(["a", *names])
    names.pop("end", None)
    kinds = {name: Kind.EXIT if name in exits.split() else Kind.STABLE for name in names}
    phases = (*(Phase(name, kind) for name, kind in kinds.items()), Phase("end", Kind.TERMINAL))
    rows = {name: tuple(t.event for t in transitions if t.source == name) for name in exits.split()}
    return Spec("tiny", phases, resources, transitions, {**rows, **(table or {})}, automata, (prop,))


LINE = edges("a go b", "b go c", "c stop end")
BACK = (*LINE, *edges("c back b"))
TAKE = Transition("take", "a", "b", acquires("device"))
TAKEN = Transition("taken", "b", "c", completes("device"))
GIVE = Transition("give", "c", "d", releases("device"))
TAKE_GIVE = (TAKE, TAKEN, GIVE, *edges("d stop end"))


def refuted(name: str, prop: Property, path: str, *transitions: Transition, **more: Any) -> object:
    return pytest.param(tiny(*transitions, prop=prop, **more), Result.REFUTED, path, id=name)


def passes(name: str, prop: Property, *transitions: Transition, **more: Any) -> object:
    return pytest.param(tiny(*transitions, prop=prop, **more), Result.PROVED, "", id=name)


def of(pattern: Pattern, *args: Any, **more: Any) -> Property:
    return Property("p", pattern, *args, **more)


CLOSED = of(Pattern.CLOSABLE)
CASES = [
    passes("deterministic", of(Pattern.DETERMINISTIC), *LINE),
    passes("all reached", of(Pattern.REACHABLE), *LINE),
    refuted("a phase is not reached", of(Pattern.REACHABLE), "", *LINE, *edges("x go end")),
    refuted(
        "a guard never holds",
        of(Pattern.REACHABLE),
        "",
        *LINE,
        Transition("jump", "a", "c", NOTHING, whole("device")),
    ),
    refuted(
        "an entry of the table is never chosen",
        of(Pattern.REACHABLE),
        "",
        *LINE,
        *edges("a jump c"),
        table={"a": ("go", "jump")},
    ),
    passes(
        "an entry of the table is chosen by those who wish it",
        of(Pattern.REACHABLE),
        *LINE,
        Transition("jump", "a", "c", NOTHING, wish="jump"),
        table={"a": ("jump", "go")},
    ),
    refuted(
        "a wish that no table knows",
        of(Pattern.REACHABLE),
        "",
        *LINE,
        Transition("jump", "a", "c", NOTHING, wish="jump"),
    ),
    passes("no dead end", of(Pattern.NO_DEAD_END), *LINE),
    refuted("a dead end", of(Pattern.NO_DEAD_END), "a --hop--> d", *LINE, *edges("a hop d")),
    refuted(
        "only a fault leads on",
        of(Pattern.NO_DEAD_END),
        "a --hop--> d",
        *LINE,
        *edges("a hop d", "d fail end"),
    ),
    passes("closable", CLOSED, *BACK),
    refuted("a trap", CLOSED, "a --hop--> d", *LINE, *edges("a hop d", "d on e", "e on d")),
    refuted(
        "a trap but for faults", CLOSED, "a --hop--> d", *LINE, *edges("a hop d", "d on d", "d fail end")
    ),
    refuted(
        "a way back",
        of(Pattern.ONE_WAY),
        "a --go--> b --go--> c --back--> b",
        *BACK,
        exits="c",
    ),
    passes("the way out", of(Pattern.ONE_WAY), *LINE, exits="b c"),
    passes("the table answers", of(Pattern.TABLE_TOTAL), *LINE, table={"b": ("go",)}),
    refuted(
        "the table answers only those who wish it",
        of(Pattern.TABLE_TOTAL),
        "a --go--> b",
        *edges("a go b"),
        Transition("go", "b", "end", NOTHING, wish="far"),
        table={"b": ("go",)},
    ),
    passes(
        "accepted",
        of(Pattern.UNIVERSALITY, on("fail")),
        *LINE,
        *edges("a fail end", "b fail end", "c fail end"),
    ),
    refuted(
        "not accepted",
        of(Pattern.UNIVERSALITY, on("fail")),
        "a --go--> b --go--> c",
        *LINE,
        *edges("a fail end", "b fail end"),
    ),
    passes(
        "accepted before the way out",
        of(Pattern.UNIVERSALITY, on("fail"), scope=Scope.RUNNING),
        *LINE,
        *edges("a fail end"),
        exits="b",
    ),
    passes(
        "accepted while the device is held",
        of(Pattern.UNIVERSALITY, on("lose"), scope=Scope.ON_DEVICE),
        *TAKE_GIVE,
        *edges("b lose end", "c lose end"),
    ),
    refuted(
        "not accepted while the device is held",
        of(Pattern.UNIVERSALITY, on("lose"), scope=Scope.ON_DEVICE),
        "a --take--> b --taken--> c",
        *TAKE_GIVE,
        *edges("b lose end"),
    ),
    passes("absence", of(Pattern.ABSENCE, on("jump")), *LINE),
    refuted("presence", of(Pattern.ABSENCE, into("c")), "a --go--> b --go--> c", *LINE),
    passes("absence after", of(Pattern.ABSENCE, on("go"), after=on("stop")), *LINE),
    refuted(
        "presence after",
        of(Pattern.ABSENCE, on("back"), after=on("back")),
        "a --go--> b --go--> c --back--> b --go--> c --back--> b",
        *BACK,
    ),
    passes("precedence", of(Pattern.PRECEDENCE, on("stop"), first=into("b")), *BACK),
    passes("precedence on one edge", of(Pattern.PRECEDENCE, into("b"), first=on("go")), *LINE),
    refuted(
        "no precedence",
        of(Pattern.PRECEDENCE, on("stop"), first=into("b")),
        "a --jump--> c --stop--> end",
        *LINE,
        *edges("a jump c"),
    ),
    refuted(
        "no precedence in the second epoch",
        of(Pattern.PRECEDENCE, on("stop"), first=on("go"), since=on("renew")),
        "a --go--> b --go--> c --renew--> c --stop--> end",
        *LINE,
        *edges("c renew c"),
    ),
    refuted(
        "an attempt counts where it must not come first",
        of(Pattern.PRECEDENCE, does("needs", "device"), first=does("completes", "device")),
        "a --peek--> a",
        Transition("peek", "a", "a", needs("device")),
        *TAKE_GIVE,
    ),
    passes("at most once", of(Pattern.BOUNDED_EXISTENCE, on("stop")), *BACK),
    refuted("twice", of(Pattern.BOUNDED_EXISTENCE, on("go")), "a --go--> b --go--> c", *LINE),
    passes("existence", of(Pattern.EXISTENCE, into("d")), *TAKE_GIVE),
    refuted(
        "a way around",
        of(Pattern.EXISTENCE, into("d")),
        "a --take--> b --taken--> c --skip--> end",
        *TAKE_GIVE,
        *edges("c skip end"),
    ),
    passes("nothing was held", of(Pattern.EXISTENCE, into("d")), *TAKE_GIVE, *edges("a quit end")),
    passes(
        "an excused way around",
        of(Pattern.EXISTENCE, into("d"), after=on("skip")),
        *TAKE_GIVE,
        *edges("c skip end"),
    ),
    refuted(
        "what was held again after it",
        of(Pattern.EXISTENCE, into("d")),
        "a --take--> b --taken--> c --give--> d --again--> e --quit--> end",
        *TAKE_GIVE,
        Transition("again", "d", "e", acquires("device")),
        *edges("e quit end"),
    ),
    passes("response", of(Pattern.RESPONSE, on("go")), *LINE),
    refuted("a cycle", of(Pattern.RESPONSE, on("go")), "a --go--> b", *BACK),
    refuted("no answer", of(Pattern.RESPONSE, on("hop")), "a --hop--> d", *LINE, *edges("a hop d")),
    passes("a cycle before", of(Pattern.RESPONSE, on("stop")), *BACK),
    passes("sound", of(Pattern.SOUND, does("releases")), *TAKE_GIVE),
    refuted(
        "released twice",
        of(Pattern.SOUND, does("releases")),
        "a --take--> b --taken--> c --give--> d --give--> e",
        *TAKE_GIVE,
        Transition("give", "d", "e", releases("device")),
        *edges("e stop end"),
    ),
    refuted(
        "a hook that declares nothing",
        of(Pattern.SOUND, does("uses")),
        "a --log--> a",
        Transition("log", "a", "a"),
        Transition("look", "c", "c", USES),
        *TAKE_GIVE,
    ),
    passes("nested", of(Pattern.NESTED, does("releases", "device"), held=("*",)), *TAKE_GIVE),
    refuted(
        "the outer one first",
        of(Pattern.NESTED, does("releases", "device"), held=("*",)),
        "a --take--> b --taken--> c --load--> e --give--> d",
        *TAKE_GIVE,
        Transition("load", "c", "e", acquires("model")),
        Transition("give", "e", "d", releases("device")),
        resources=("device", "model"),
    ),
    passes("ended", of(Pattern.ENDED), *TAKE_GIVE),
    refuted(
        "held at the end", of(Pattern.ENDED), "a --take--> b --quit--> end", *TAKE_GIVE, *edges("b quit end")
    ),
]


def random_specs(count: int, prop: Property) -> Iterator[Spec]:
    """Small specs; the device is taken with the first step and kept."""
    source = random.Random(7)
    for _ in range(count):
        size = source.randint(3, 8)
        names = [f"n{number}" for number in range(size)]
        found = {("a", "begin"): Transition("begin", "a", "n0", acquires("device"))}
        for _ in range(source.randint(size, 2 * size)):
            here, there = source.choice(names), source.choice([*names, "end"])
            event = source.choice(("x", "y", "z", "go", "on"))
            found.setdefault((here, event), Transition(event, here, there, NOTHING))
        yield tiny(*found.values(), prop=prop)
