"""A spec as one Promela model, so that SPIN can decide the same properties by its own exploration.

The translation starts from the spec's *data* (phases, resources, effects, guards, automata, table)
and from nothing that the checker computes; what a verb means is written down here a second time.
Two readings of a spec, by two explorers, that agree: that is what the comparison is worth.

Each step of the model is one transition. It leaves behind labels: `a3` is set if the transition
matched the third atom of the properties, `u_x` if an effect was not legal in the status it met.
The properties are named LTL formulas over labels and phases: see `ltl.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .ltl import Names, identifiers, untranslated
from .model import EVERY, FAULTS, Automaton, Effect, Guard, Kind, Spec, Status, Transition, Verb
from .properties import Atom, Pattern, Property, Scope

_HELD = "({r} != ABSENT && {r} != LOST)"

_SOUND = {
    Verb.ACQUIRES: "({r} == ABSENT)",
    Verb.OPENS: "({r} == WHOLE)",
    Verb.COMPLETES: "({r} == PARTIAL)",
    Verb.NEEDS: "({r} == WHOLE)",
    Verb.USES: "({r} == WHOLE)",
    Verb.SAVES: "({r} == WHOLE)",
    Verb.STEPS: "({r} == WHOLE)",
    Verb.BUILDS: "true",
    Verb.RELEASES: _HELD,
    Verb.TRANSFERS: "({r} == WHOLE)",
    Verb.SPOILS: _HELD,
    Verb.ABANDONS: "true",
    Verb.LOSES: _HELD,
}
_AFTER = {
    Verb.ACQUIRES: "PARTIAL",
    Verb.OPENS: "({r} == WHOLE -> PARTIAL : {r})",
    Verb.COMPLETES: "({r} == PARTIAL -> WHOLE : {r})",
    Verb.RELEASES: "ABSENT",
    Verb.TRANSFERS: "ABSENT",
    Verb.SPOILS: "({r} == FAULTED -> ABSENT : ({r} == PARTIAL || {r} == WHOLE -> FAULTED : {r}))",
    Verb.ABANDONS: "ABSENT",
    Verb.LOSES: "({r} == ABSENT -> ABSENT : LOST)",
}
_WORD = 30
"""Labels in one integer."""


def promela(spec: Spec) -> str:
    """The model, deterministic to the byte.

    Args:
        spec: Usually a composed one.

    Returns:
        Promela text: `spin -a` makes a verifier of it, and `pan -a -N NAME` decides one claim.
        Compiled with `-DPRINTF` the verifier also prints the transitions it takes, one a line:
        `step NUMBER: PHASE STATUSES STATES > PHASE STATUSES STATES : CHOSEN LABELS`, and where it
        begins: `start > PHASE STATUSES STATES : CHOSEN LABELS`.
    """
    return _Writer(spec).text()


class _Writer(Names):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.words = range(max(1, -(-len(self.labels) // _WORD)))
        self.out = {p.name: [t for t in spec.transitions if t.source == p.name] for p in spec.phases}

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"/* The lifecycle '{self.spec.name}', written by `interlock graph --format promela`. */"
        yield from (f"/* No formula for {name}: {why}. */" for name, why in untranslated(self.spec).items())
        yield from self._declarations()
        for phase in self.spec.phases:
            yield from self._arrival(phase.name)
        yield from (
            "active proctype lifecycle() {",
            f'  d_step {{ at_{self.phases[self.spec.initial]}(); printf("start "); after() }};',
            "  do",
        )
        for number, transition in enumerate(self.spec.transitions):
            yield from self._option(number, transition)
        yield from ("  :: else -> d_step { clear() } /* silence for ever */", "  od", "}")
        yield from (f"ltl {claim.name} {{ {claim.formula} }}" for claim in self.claims())

    def _declarations(self) -> Iterator[str]:
        spec = self.spec
        yield from _numbered(str(s).upper() for s in Status)
        yield from _numbered(self.phases.values())
        yield f"byte phase = {self.phases[spec.initial]};"
        yield from (f"byte {r} = ABSENT;" for r in self.resources.values())
        for a in spec.automata:
            states = _states(a, self.automata[a.name])
            yield from _numbered(states.values())
            yield f"byte {self.automata[a.name]} = {states[a.initial]};"
        yield "bit tick; /* changes with each step */"
        yield "int " + ", ".join(f"did{word}" for word in self.words) + "; /* the labels of the last step */"
        meaning = {name: f"{'tries' if tried else 'it'} {atom}" for (atom, tried), name in self.atoms.items()}
        for number, name in enumerate(self.labels):
            word, bit = divmod(number, _WORD)
            yield f"#define {name} ((did{word} & {1 << bit}) != 0) /* {meaning.get(name, 'illegally')} */"
        for name in ("stuck", "unanswered", *self.deaf.values()):
            yield f"bit {name};"
        if self.leaving:
            yield "bit leaving; /* an exit phase has been entered */"
        yield "int chosen; /* the entries of the table that may be chosen, as bits */"
        yield "inline clear() { " + "".join(f"did{word} = 0; " for word in self.words) + "tick = 1 - tick }"
        config = ["phase", *self.resources.values(), *self.automata.values()]
        shown = f'"{"%d " * len(config)}"' + "".join(f", {name}" for name in config)
        words = [f"did{word}" for word in self.words]
        after = f'">{" %d" * len(config)} : %d{" %d" * len(words)}\\n"'
        yield f'inline before(number) {{ printf("step %d: ", number); printf({shown}) }}'
        yield f"inline after() {{ printf({', '.join([after, *config, 'chosen', *words])}) }}"

    def _option(self, number: int, t: Transition) -> Iterator[str]:
        """A transition as one indivisible option of the loop: guards, labels, effects, moves."""
        yield f"  :: d_step {{ /* {t} */ phase == {self.phases[t.source]} && {self._enabled(t)} ->"
        yield f"       before({number}); clear();"
        for (atom, tried), label in self.atoms.items():
            attempt = tried and any(_speaks(atom, e.verb, name) for e, name in self._effects(t))
            if attempt or t.event in atom.events or t.dest in atom.enters:
                yield f"       {self._mark(label, 'true')} /* {atom} */"
        for effect, name in self._effects(t):
            yield f"       {' '.join(self._effect(effect.verb, name))} /* {effect.verb} {name} */"
        for automaton in self.spec.automata:
            moves = {s: d for (s, e), d in automaton.moves.items() if e == t.event}
            if moves:
                yield f"       {self._move(automaton, moves)}"
        here = self.phases[t.dest]
        yield f"       phase = {here}; at_{here}(); after() }}"

    def _effects(self, t: Transition) -> Iterator[tuple[Effect, str]]:
        for effect in t.declared:
            yield from ((effect, name) for name in self.resources if effect.resource in (EVERY, name))

    def _mark(self, label: str, when: str) -> str:
        word, bit = divmod(self.labels.index(label), _WORD)
        return f"did{word} = did{word} | ({when} -> {1 << bit} : 0);"

    def _effect(self, verb: Verb, name: str) -> Iterator[str]:
        r = self.resources[name]
        sound = _SOUND[verb].format(r=r)
        for prop in self.spec.properties:
            if prop.pattern is Pattern.SOUND and _speaks(prop.what, verb, name):
                yield self._mark(self.unsound[prop.name], f"!{sound}")
        # Giving up what is not held does nothing, so it is not an event of the resource.
        done = f"({r} != ABSENT)" if verb is Verb.ABANDONS else sound
        for (atom, tried), label in self.atoms.items():
            if not tried and _speaks(atom, verb, name):
                yield self._mark(label, done)
        if verb in _AFTER:
            yield f"{r} = {_AFTER[verb].format(r=r)};"

    def _move(self, automaton: Automaton, moves: dict[str, str]) -> str:
        m = self.automata[automaton.name]
        states = _states(automaton, m)
        text = m
        for source, dest in sorted(moves.items()):
            text = f"({m} == {states[source]} -> {states[dest]} : {text})"
        return f"{m} = {text};"

    def _enabled(self, t: Transition) -> str:
        """Guards and automata of a transition, its source phase being given."""
        parts = [self._guard(g, name) for g in t.when for name in self.resources if _guarded(g, name)]
        for automaton in self.spec.automata:
            legal = sorted(s for s, e in automaton.moves if e == t.event)
            m = self.automata[automaton.name]
            states = _states(automaton, m)
            if legal:
                parts.append("(" + " || ".join(f"{m} == {states[s]}" for s in legal) + ")")
        return " && ".join(parts) or "true"

    def _guard(self, guard: Guard, name: str) -> str:
        wanted = [s for s in Status if s in guard.statuses]
        found = " || ".join(f"{self.resources[name]} == {str(s).upper()}" for s in wanted)
        return f"({found or 'false'})"

    def _arrival(self, phase: str) -> Iterator[str]:
        """What is judged of each configuration when it is entered."""
        leaving = self.out[phase]
        yield f"inline at_{self.phases[phase]}() {{"
        onward = [t for t in leaving if t.event not in FAULTS]
        yield f"  stuck = {'0' if phase == self.spec.terminal else f'!({self._any(onward)})'};"
        row = [t for e in self.spec.table.get(phase, ()) for t in leaving if t.event == e]
        yield f"  unanswered = {f'!({self._any(t for t in row if not t.wish)})' if row else '0'};"
        chosen = " | ".join(f"({self._choice(row, n)} -> {1 << n} : 0)" for n, _ in enumerate(row))
        if self.leaving and self.spec.phase[phase].kind is Kind.EXIT:
            yield "  leaving = 1;"
        for prop in self.spec.properties:
            if prop.name in self.deaf:
                yield f"  {self.deaf[prop.name]} = {self._deafness(prop, phase, leaving)};"
        yield f"  chosen = {chosen or '0'} }}"

    def _any(self, transitions: Iterable[Transition]) -> str:
        return " || ".join(f"({self._enabled(t)})" for t in transitions) or "false"

    def _choice(self, row: list[Transition], n: int) -> str:
        """Whether a run with no wish but that of the entry takes this entry of the table."""
        before = [t for t in row[:n] if t.wish in ("", row[n].wish)]
        return f"(({self._enabled(row[n])}) && !({self._any(before)}))"

    def _deafness(self, prop: Property, phase: str, leaving: list[Transition]) -> str:
        heard = [t for t in leaving if t.event in prop.what.events or t.dest in prop.what.enters]
        kind = self.spec.phase[phase].kind
        due = "true"
        if kind in (Kind.EXIT, Kind.TERMINAL) or (kind is not Kind.FLIGHT and prop.scope is Scope.LEAVING):
            due = "false"
        elif prop.scope is Scope.ON_DEVICE:
            device = self.resources.get("device")
            due = _HELD.format(r=device) if device else "false"
        elif prop.scope in (Scope.RUNNING, Scope.LEAVING):
            due = "leaving" if prop.scope is Scope.LEAVING else "!leaving"
        elif prop.scope is Scope.RESTING and kind is Kind.FLIGHT:
            due = "false"
        return f"({due} && !({self._any(heard)}))"


def _speaks(atom: Atom, verb: Verb, resource: str) -> bool:
    return any(v == verb and name in (EVERY, resource) for v, name in atom.effects)


def _guarded(guard: Guard, resource: str) -> bool:
    return guard.resource == resource or (guard.resource == EVERY and resource not in guard.but)


def _states(automaton: Automaton, name: str) -> dict[str, str]:
    pairs = ((source, dest) for (source, _), dest in automaton.moves.items())
    states = dict.fromkeys([automaton.initial, *(state for pair in pairs for state in pair)])
    return identifiers(f"S_{name}", states)


def _numbered(names: Iterable[str]) -> Iterator[str]:
    yield from (f"#define {name} {number}" for number, name in enumerate(names))
