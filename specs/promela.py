"""A spec as one Promela model, so that SPIN can decide the same properties by its own exploration.

The translation starts from the spec's *data* (phases, resources, effects, guards, automata, table)
and from nothing that the checker computes; what a verb means is written down here a second time.
Two readings of a spec, by two explorers, that agree: that is what the comparison is worth.

Each step of the model is one transition. It leaves behind labels: `a3` is set if the transition
matched the third atom of the properties, `u_x` if an effect was not legal in the status it met.
Properties are named LTL formulas over labels and phases. Where nothing can fire, the model takes
silent steps for ever, so that every path is infinite. `tick` changes with each step, which lets the
formulas say "from the next step on" without LTL's X, which not every SPIN accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .model import EVERY, Automaton, Effect, Guard, Kind, Spec, Status, Transition, Verb
from .properties import NOTHING, Atom, Pattern, Property, Scope, does

_FAULTS = ("fail", "interrupt", "lose", "peer_fail", "abandon")
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
_NOT_LTL = {
    Pattern.DETERMINISTIC: "an option of a loop has one destination; compare the transitions that are printed",
    Pattern.REACHABLE: "LTL speaks of all paths, this of some path; see which transitions are printed",
    Pattern.CLOSABLE: "branching time (AG EF); search backwards through the transitions that are printed",
}
_TRIED = (Pattern.ABSENCE, Pattern.PRECEDENCE, Pattern.BOUNDED_EXISTENCE)
"""Here an effect counts even if it met a status in which it does nothing."""
_WORD = 30
"""Labels in one integer."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One LTL formula of the model.

    Attributes:
        name: Its name in the model (`pan -a -N NAME` decides it).
        prop: The property that it states.
        formula: LTL, in Promela's syntax.
        met: The number of the label without which the property would be vacuous, or -1.
    """

    name: str
    prop: str
    formula: str
    met: int = -1


def promela(spec: Spec) -> str:
    """The model, deterministic to the byte.

    Args:
        spec: Usually a composed one.

    Returns:
        Promela text: `spin -a` makes a verifier of it, and `pan -a -N NAME` decides one claim.
        Compiled with `-DPRINTF` the verifier also prints the transitions it takes, one a line:
        `step NUMBER: PHASE STATUSES STATES > PHASE STATUSES STATES : CHOSEN LABELS`.
    """
    return _Writer(spec).text()


def claims(spec: Spec) -> tuple[Claim, ...]:
    """The LTL formulas of `promela(spec)`, in the order of the spec's properties."""
    return tuple(_Writer(spec).claims())


def untranslated(spec: Spec) -> dict[str, str]:
    """The properties of a spec that are no LTL formula, each with the reason."""
    return {p.name: _NOT_LTL[p.pattern] for p in spec.properties if p.pattern in _NOT_LTL}


class _Writer:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.phases = _names("P", (p.name for p in spec.phases))
        self.resources = _names("r", spec.resources)
        self.automata = _names("m", (a.name for a in spec.automata))
        self.properties = _names("p", (p.name for p in spec.properties))
        found = dict.fromkeys(a for p in spec.properties for a in _atoms(p))
        self.atoms = {key: f"a{number}" for number, key in enumerate(found)}
        self.leaving = any(
            p.scope in (Scope.RUNNING, Scope.LEAVING) or p.pattern is Pattern.ONE_WAY for p in spec.properties
        )
        self.unsound = self._of(Pattern.SOUND, "u")
        self.deaf = self._of(Pattern.UNIVERSALITY, "deaf")
        self.labels = [*self.atoms.values(), *self.unsound.values()]
        self.words = range(-(-len(self.labels) // _WORD))
        self.out = {p.name: [t for t in spec.transitions if t.source == p.name] for p in spec.phases}
        self.closed = f"(phase == {self.phases[spec.terminal]})"
        self.holding = " || ".join(f"{r} != ABSENT" for r in self.resources.values()) or "false"

    def _of(self, pattern: Pattern, prefix: str) -> dict[str, str]:
        chosen = (p.name for p in self.spec.properties if p.pattern is pattern)
        return {name: f"{prefix}_{self.properties[name]}" for name in chosen}

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"/* The lifecycle '{self.spec.name}', written by `interlock graph --format promela`. */"
        yield from (f"/* No formula for {name}: {why}. */" for name, why in untranslated(self.spec).items())
        yield from self._declarations()
        for phase in self.spec.phases:
            yield from self._arrival(phase.name)
        yield from ("active proctype lifecycle() {", f"  d_step {{ at_{self.phases[self.spec.initial]}() }};", "  do")
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
        terminal = phase == self.spec.terminal
        yield f"inline at_{self.phases[phase]}() {{"
        onward = [t for t in leaving if t.event not in _FAULTS]
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

    def claims(self) -> Iterator[Claim]:
        for prop in self.spec.properties:
            if prop.pattern not in _NOT_LTL:
                formula, met = self._formula(prop)
                number = self.labels.index(met) if met else -1
                yield Claim(self.properties[prop.name], prop.name, formula, number)
        yield Claim("whole_space", "", f"[] (phase <= {self.phases[self.spec.terminal]} || true)")

    def _formula(self, prop: Property) -> tuple[str, str]:
        """LTL of a property, and what has to happen somewhere lest it be vacuous."""
        what = self.atoms.get((prop.what, prop.pattern in _TRIED), "false")
        first, since, after = (
            self.atoms.get((atom, False), "false") for atom in (prop.first, prop.since, prop.after)
        )
        match prop.pattern:
            case Pattern.NO_DEAD_END:
                return "[] !stuck", ""
            case Pattern.TABLE_TOTAL:
                return "[] !unanswered", ""
            case Pattern.UNIVERSALITY:
                return f"[] !{self.deaf[prop.name]}", ""
            case Pattern.ENDED:
                return f"[] !({self.closed} && ({self.holding}))", ""
            case Pattern.ONE_WAY:
                rest = [self.phases[p.name] for p in self.spec.phases if p.kind in (Kind.STABLE, Kind.WORK)]
                return f"[] !(leaving && ({' || '.join(f'phase == {name}' for name in rest) or 'false'}))", ""
            case Pattern.NESTED:
                left = [f"{r} != ABSENT" for name, r in self.resources.items() if {name, EVERY} & set(prop.held)]
                return f"[] !({what} && ({' || '.join(left) or 'false'}))", what
            case Pattern.SOUND:
                return f"[] !{self.unsound[prop.name]}", what
            case Pattern.ABSENCE if prop.after == NOTHING:
                return f"[] !{what}", ""
            case Pattern.ABSENCE:
                return f"[] !({after} && {_next(f'<> {what}')})", after
            case Pattern.PRECEDENCE:
                unprepared = f"(!{first} U ({what} && !{first}))"
                again = f"<> ({since} && !{first} && {_next(unprepared)})"
                return f"!{unprepared} && !{again}" if since != "false" else f"!{unprepared}", what
            case Pattern.BOUNDED_EXISTENCE:
                return f"[] !({what} && {_next(f'<> {what}')})", what
            case Pattern.EXISTENCE:
                begins = self.atoms[does("acquires"), False]
                return f"(<> {after}) || [] ({begins} -> !(!{what} U ({self.closed} && !{what})))", what
            case Pattern.RESPONSE:
                return f"[] ({what} -> <> {self.closed})", what
        raise NotImplementedError(f"no translation of the pattern '{prop.pattern}'")


def _atoms(prop: Property) -> Iterator[tuple[Atom, bool]]:
    """The atoms of which a formula needs a label, and whether an attempt counts."""
    if prop.pattern is not Pattern.UNIVERSALITY:
        found = ((prop.what, prop.pattern in _TRIED), (prop.first, False), (prop.since, False), (prop.after, False))
        yield from ((atom, tried) for atom, tried in found if atom != NOTHING)
    if prop.pattern is Pattern.EXISTENCE:
        yield does("acquires"), False


def _next(formula: str) -> str:
    """What X means, by the bit that changes with each step."""
    return f"((tick && (tick U (!tick && {formula}))) || (!tick && (!tick U (tick && {formula}))))"


def _speaks(atom: Atom, verb: Verb, resource: str) -> bool:
    return any(v == verb and name in (EVERY, resource) for v, name in atom.effects)


def _guarded(guard: Guard, resource: str) -> bool:
    return guard.resource == resource or (guard.resource == EVERY and resource not in guard.but)


def _names(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Promela identifiers, no two the same."""
    found: dict[str, str] = {}
    for name in names:
        word = re.sub(r"\W", "_", f"{prefix}_{name}", flags=re.ASCII)
        while word in found.values():
            word += "_"
        found[name] = word
    return found


def _states(automaton: Automaton, name: str) -> dict[str, str]:
    pairs = ((source, dest) for (source, _), dest in automaton.moves.items())
    states = dict.fromkeys([automaton.initial, *(state for pair in pairs for state in pair)])
    return _names(f"S_{name}", states)


def _numbered(names: Iterable[str]) -> Iterator[str]:
    yield from (f"#define {name} {number}" for number, name in enumerate(names))
