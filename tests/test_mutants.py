"""No rubber stamp: wrong variants of the specs are refuted, each property earns its place."""

from __future__ import annotations

from collections import Counter

import pytest
from tools import mutants_report
from tools.mutation import IMPLIED, Judged, all_judged

from interlock.backends.monitors import CPU
from interlock.specs import TRAINING, compose
from interlock.specs.mutants import KINDS, judge, mutants
from interlock.specs.wrong_edges import WRONG_EDGES

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def judged() -> tuple[Judged, ...]:
    return all_judged()


def label(one: Judged) -> str:
    return f"{one.spec}: {one.mutant.kind}: {one.mutant.name}"


def test_each_survivor_has_a_reason(judged: tuple[Judged, ...]) -> None:
    assert [label(one) for one in judged if one.fate == "survives" and not one.reason] == []


def test_each_trace_replays_on_the_mutants_own_machine(judged: tuple[Judged, ...]) -> None:
    assert [(label(one), one.problems) for one in judged if one.problems] == []
    assert sum(one.replayed for one in judged) > 1000


def test_each_property_refutes_a_mutant_that_no_other_does_or_is_implied(judged: tuple[Judged, ...]) -> None:
    alone = mutants_report.unique(judged)
    assert set(IMPLIED) == {name for name in mutants_report.properties() if not alone.get(name)}


@pytest.mark.parametrize("name", [name for name, (others, _) in IMPLIED.items() if others])
def test_what_is_implied_is_refuted_by_what_implies_it(judged: tuple[Judged, ...], name: str) -> None:
    mine = [one for one in judged if name in one.refuted]
    assert mine
    assert [label(one) for one in mine if not set(one.refuted) & set(IMPLIED[name][0])] == []


def test_a_spec_that_is_not_deterministic_cannot_be_built(judged: tuple[Judged, ...]) -> None:
    refused = [one for one in judged if "a second destination of an event" in one.mutant.name]
    assert {one.fate for one in refused} == {"refused at build"}
    assert "leaves phase 'training' twice" in refused[0].reason


def test_each_kind_of_mutant_is_made_and_refuted(judged: tuple[Judged, ...]) -> None:
    refuted = Counter(one.mutant.kind for one in judged if one.fate == "refuted")
    assert {kind for kind in KINDS if refuted[kind] >= 5} == set(KINDS)
    assert sum(one.mutant.kind == "add wrong edge" and one.spec == "training on cpu" for one in judged) >= 60


def test_each_wrong_edge_is_refused_somewhere(judged: tuple[Judged, ...]) -> None:
    wrong = [one for one in judged if one.mutant.kind == "add wrong edge" and one.fate != "survives"]
    caught = {one.mutant.name for one in wrong}
    assert {f"{e.transitions[0]}, {e.why}" for e in WRONG_EDGES} <= caught


def test_mutants_are_made_in_the_same_order_with_unique_names() -> None:
    spec = compose(TRAINING, CPU)
    names = [(m.kind, m.name) for m in mutants(spec)]
    assert names == [(m.kind, m.name) for m in mutants(spec)]
    assert len(set(names)) == len(names)


def test_a_mutant_that_cannot_be_built_cannot_be_judged() -> None:
    broken = next(m for m in mutants(compose(TRAINING, CPU)) if m.spec is None)
    with pytest.raises(ValueError, match="cannot be built"):
        judge(broken)


def test_the_page_is_up_to_date(judged: tuple[Judged, ...]) -> None:
    assert mutants_report.PAGE.read_text() == mutants_report.page(judged), (
        "docs/mutants.md is out of date: run `python tests/tools/mutants_report.py` and read what changed"
    )


@pytest.mark.nightly
def test_what_backends_share_is_as_well_refuted_on_each(judged: tuple[Judged, ...]) -> None:
    everything = all_judged(everything=True)
    assert len(everything) > len(judged)
    assert [label(one) for one in everything if one.fate == "survives" and not one.reason] == []
    assert [label(one) for one in everything if one.problems] == []
