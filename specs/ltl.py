"""Properties as LTL formulas, over the labels and variables of the Promela model of `promela.py`.

The model never stops: where nothing can fire it takes silent steps for ever, so every path is
infinite. Its bit `tick` changes with each step, which lets the formulas say "from the next step
on" without LTL's X, which not every SPIN accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .model import EVERY, Kind, Spec
from .properties import NOTHING, Atom, Pattern, Property, Scope, does

NOT_LTL = {
    Pattern.DETERMINISTIC: "an option of a loop has one destination; see the transitions that are printed",
    Pattern.REACHABLE: "LTL speaks of all paths, this of some path; see which transitions are printed",
    Pattern.CLOSABLE: "branching time (AG EF); search backwards through the transitions that are printed",
}
_TRIED = (Pattern.ABSENCE, Pattern.PRECEDENCE, Pattern.BOUNDED_EXISTENCE)
"""Here an effect counts even if it met a status in which it does nothing."""


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


def claims(spec: Spec) -> tuple[Claim, ...]:
    """The formulas of `promela(spec)`, in the order of the spec's properties."""
    return tuple(Names(spec).claims())


def untranslated(spec: Spec) -> dict[str, str]:
    """The properties of a spec that are no LTL formula, each with the reason."""
    return {p.name: NOT_LTL[p.pattern] for p in spec.properties if p.pattern in NOT_LTL}


class Names:
    """What the model calls the things of a spec, and the formulas over these names.

    Attributes:
        phases: Phase -> constant; `resources`, `automata`: name -> variable.
        properties: Property -> name of its formula.
        atoms: (atom, whether an attempt counts) -> label.
        unsound: Property -> label of an effect that was not legal; `deaf`: -> bit "refused now".
        labels: All labels, in the order of their bits.
        leaving: Whether the model has to remember that an exit phase was entered.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.phases = identifiers("P", (p.name for p in spec.phases))
        self.resources = identifiers("r", spec.resources)
        self.automata = identifiers("m", (a.name for a in spec.automata))
        self.properties = identifiers("p", (p.name for p in spec.properties))
        found = dict.fromkeys(a for p in spec.properties for a in _atoms(p))
        self.atoms = {key: f"a{number}" for number, key in enumerate(found)}
        self.leaving = any(
            p.scope in (Scope.RUNNING, Scope.LEAVING) or p.pattern is Pattern.ONE_WAY for p in spec.properties
        )
        self.unsound = self._of(Pattern.SOUND, "u")
        self.deaf = self._of(Pattern.UNIVERSALITY, "deaf")
        self.closed = f"(phase == {self.phases[spec.terminal]})"
        self.holding = " || ".join(f"{r} != ABSENT" for r in self.resources.values()) or "false"
        self.labels = [*self.atoms.values(), *self.unsound.values()]

    def _of(self, pattern: Pattern, prefix: str) -> dict[str, str]:
        chosen = (p.name for p in self.spec.properties if p.pattern is pattern)
        return {name: f"{prefix}_{self.properties[name]}" for name in chosen}

    def claims(self) -> Iterator[Claim]:
        """The formulas, in the order of the properties, and one that is always true.

        The verifier has to go through the whole space for the last one, and may print what it sees.
        """
        for prop in self.spec.properties:
            if prop.pattern not in NOT_LTL:
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
            case Pattern.UNIVERSALITY if not prop.what.effects:
                return f"[] !{self.deaf[prop.name]}", ""
            case Pattern.ENDED:
                return f"[] !({self.closed} && ({self.holding}))", ""
            case Pattern.ONE_WAY:
                rest = [self.phases[p.name] for p in self.spec.phases if p.kind in (Kind.STABLE, Kind.WORK)]
                return f"[] !(leaving && ({' || '.join(f'phase == {name}' for name in rest) or 'false'}))", ""
            case Pattern.NESTED:
                left = [
                    f"{r} != ABSENT" for name, r in self.resources.items() if {name, EVERY} & set(prop.held)
                ]
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
        raise NotImplementedError(f"no translation of '{prop.name}': {prop.pattern} of {prop.what}")


def _atoms(prop: Property) -> Iterator[tuple[Atom, bool]]:
    """The atoms of which a formula needs a label, and whether an attempt counts."""
    if prop.pattern is not Pattern.UNIVERSALITY:
        found = (
            (prop.what, prop.pattern in _TRIED),
            (prop.first, False),
            (prop.since, False),
            (prop.after, False),
        )
        yield from ((atom, tried) for atom, tried in found if atom != NOTHING)
    if prop.pattern is Pattern.EXISTENCE:
        yield does("acquires"), False


def _next(formula: str) -> str:
    """What X means, by the bit that changes with each step."""
    return f"((tick && (tick U (!tick && {formula}))) || (!tick && (!tick U (tick && {formula}))))"


def identifiers(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Promela identifiers, no two the same."""
    found: dict[str, str] = {}
    for name in names:
        word = re.sub(r"\W", "_", f"{prefix}_{name}", flags=re.ASCII)
        while word in found.values():
            word += "_"
        found[name] = word
    return found
