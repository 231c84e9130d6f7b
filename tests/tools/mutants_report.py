"""Writes docs/mutants.md: which wrong variants of the specs are refuted, by what, and which are not, and why.

python tests/tools/mutants_report.py            writes the file
python tests/tools/mutants_report.py --check    fails if the file is not up to date
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from interlock.specs.mutants import KINDS
from tools.mutation import IMPLIED, Judged, all_judged, compositions

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
FATES = ("refuted", "undetermined", "refused at build", "survives")


def unique(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Property -> the mutants that it alone refutes."""
    found: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if len(one.refuted) == 1:
            found[one.refuted[0]].append(one)
    return found


def properties() -> dict[str, str]:
    """The properties of all composed specs, with what they say."""
    return {prop.name: prop.doc for spec, _ in compositions() for prop in spec.properties}


def page(judged: tuple[Judged, ...]) -> str:
    """The text of the page."""
    return "\n".join(_lines(judged)) + "\n"


def _lines(judged: tuple[Judged, ...]) -> Iterator[str]:
    fates = Counter(one.fate for one in judged)
    replayed = sum(one.replayed for one in judged)
    yield "# Mutants: what the proofs are worth"
    yield ""
    yield "<!-- Written by `python tests/tools/mutants_report.py`; a test fails when it is out of date. -->"
    yield ""
    yield (
        "A proof is worth what it refuses. From the specs of all backends, wrong variants are made, one "
        "change each, and checked like any spec; of a backend only what it adds to the one it extends is "
        "changed (the nightly tests change all of it)."
    )
    yield ""
    yield (
        f"**{len(judged)} mutants: {fates['refuted']} refuted** (the {replayed} traces "
        "that refute them were fired on the mutants' own machines), "
        f"{fates['refused at build']} cannot be built, {fates['undetermined']} undetermined (no pass), "
        f"{fates['survives']} break no promise: each of these is listed below with the reason."
    )
    yield from ("", "| kind | " + " | ".join(FATES) + " |", "|---|" + "---:|" * len(FATES))
    for kind in KINDS:
        fates = Counter(one.fate for one in judged if one.mutant.kind == kind)
        yield f"| {kind} | " + " | ".join(str(fates[fate]) for fate in FATES) + " |"
    yield from ("", "## What each property alone refutes", "")
    yield "| property | refutes | alone | for example, alone |"
    yield "|---|---:|---:|---|"
    alone = unique(judged)
    for name in properties():
        count = sum(name in one.refuted for one in judged)
        mine = alone.get(name, [])
        example = f"{mine[0].spec}: `{mine[0].mutant.name}`" if mine else _implied(name)
        yield f"| {name} | {count} | {len(mine)} | {example} |"
    yield from ("", "## What breaks no promise, and why", "")
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in judged:
        if one.fate == "survives":
            groups[one.reason][one.mutant.name].append(one.spec)
    for reason, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"- **{reason[:1].upper()}{reason[1:]}** ({sum(map(len, names.values()))})"
        yield from (f"  - `{name}` ({', '.join(specs)})" for name, specs in names.items())
    yield from ("", "## What cannot be built", "")
    refused: dict[str, int] = Counter(f"`{one.mutant.name}`: {one.reason}" for one in judged if not one.built)
    yield from (f"- {text}" for text in refused)


def _implied(name: str) -> str:
    others, why = IMPLIED[name]
    by = f"implied by {' or '.join(others)}: " if others else ""
    return f"{by}{why}"


def main() -> int:
    """Write the page, or check it."""
    text = page(all_judged())
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
