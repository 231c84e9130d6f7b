"""SPIN, which explores a model of its own, agrees with every verdict of the checker."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tools import spin, tiny
from tools.mutation import Judged, all_judged, compositions, rebuilt

from interlock.specs import Pattern, Report, Result, Spec, check, into, on
from interlock.specs.graph import Graph
from interlock.specs.ltl import claims, untranslated
from interlock.specs.mutants import own_lifecycle
from interlock.specs.promela import promela

SEED = 20
SPECS = {spec.name: spec for spec, _ in compositions()}


def test_spin_is_here_where_it_must_be() -> None:
    if missing := spin.missing():
        if os.environ.get("CI"):
            pytest.fail(f"CI has to compare with SPIN; not installed: {', '.join(missing)}")
        pytest.skip(f"not installed: {', '.join(missing)}")


def differences(report: Report, found: spin.Found) -> list[str]:
    """Where the checker and SPIN say different things."""
    mine = {verdict.prop.name: verdict.result for verdict in report.verdicts}
    names = sorted(mine.keys() | found.results.keys())
    differ = [
        f"{report.spec.name}: {name}: checker {mine.get(name)}, SPIN {found.results.get(name)}"
        for name in names
        if mine.get(name) != found.results.get(name)
    ]
    sizes = (report.configurations, report.transitions), (found.configurations, found.steps)
    if sizes[0] != sizes[1]:
        differ.append(f"{report.spec.name}: checker explored {sizes[0]}, SPIN {sizes[1]}")
    return differ


def checked(specs: Iterable[Spec]) -> Iterator[tuple[Spec, Report]]:
    """Each spec with the checker's report, on a machine that is not kept."""
    return ((spec, check(spec, life=own_lifecycle(spec))) for spec in specs)


def compared(pairs: Iterable[tuple[Spec, Report]], folder: Path) -> list[str]:
    """The differences over many specs; two at a time, since most of it is waiting for the compiler."""
    jobs = list(pairs)
    folders = [folder / str(number) for number in range(len(jobs))]
    for path in folders:
        path.mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(spin.decide, [spec for spec, _ in jobs], folders))
    return [line for (_, report), one in zip(jobs, found, strict=True) for line in differences(report, one)]


def sample(each: int, survivors: int) -> list[Judged]:
    """Mutants such that each property is refuted by at least `each` of them, and some survivors."""
    judged = [one for one in all_judged() if one.built]
    random.Random(SEED).shuffle(judged)
    judged.sort(key=lambda one: len(SPECS[one.spec].transitions) // 60)  # small models compile faster
    counts: Counter[str] = Counter()
    chosen = [one for one in judged if one.fate == "undetermined"]
    for few in (True, False):  # those that refute little come first: they tell more of each property
        for one in judged:
            if (
                one.refuted
                and (len(one.refuted) <= 2) is few
                and any(counts[name] < each for name in one.refuted)
            ):
                counts.update(one.refuted)
                chosen.append(one)
    return chosen + [one for one in judged if one.fate == "survives"][:survivors]


@pytest.mark.spin
@pytest.mark.timeout(300)
def test_agrees_on_every_property_of_every_composed_spec(tmp_path: Path) -> None:
    assert compared(checked(SPECS.values()), tmp_path) == []


@pytest.mark.spin
@pytest.mark.timeout(600)
def test_agrees_on_mutants_that_refute_each_property(tmp_path: Path) -> None:
    chosen = sample(each=1, survivors=3)
    refuted = {name for one in chosen for name in one.refuted}
    assert refuted == {p.name for spec in SPECS.values() for p in spec.properties} - {"deterministic"}
    assert compared(checked(rebuilt(chosen)), tmp_path) == []


@pytest.mark.spin
@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_agrees_on_many_mutants(tmp_path: Path) -> None:
    chosen = sample(each=10, survivors=60)
    assert compared(checked(rebuilt(chosen)), tmp_path) == []


@pytest.mark.spin
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_agrees_on_tiny_specs_and_on_random_ones(tmp_path: Path) -> None:
    specs = [case.values[0] for case in tiny.CASES]
    for prop in (
        tiny.of(Pattern.EXISTENCE, into("n1")),
        tiny.of(Pattern.PRECEDENCE, on("x"), first=on("y"), since=on("z")),
        tiny.of(Pattern.RESPONSE, on("x")),
        tiny.of(Pattern.ABSENCE, on("x"), after=on("y")),
        tiny.of(Pattern.BOUNDED_EXISTENCE, on("x")),
    ):
        specs += tiny.random_specs(40, prop)
    assert compared(checked(specs), tmp_path) == []


PLANTED = {
    "a release that leaves something": (
        "r_model = ABSENT; /* releases model */",
        "r_model = PARTIAL; /* releases model */",
    ),
    "a claim that is never violated": ("ltl p_fail_closes { [] (", "ltl p_fail_closes { [] (false && "),
    "a claim that is always violated": ("ltl p_no_dead_end { [] !stuck", "ltl p_no_dead_end { [] stuck"),
    "a guard that is forgotten": ("(r_model == WHOLE)", "true"),
}


@pytest.mark.spin
@pytest.mark.parametrize("name", PLANTED)
def test_notices_a_wrong_translation(tmp_path: Path, name: str) -> None:
    right, wrong = PLANTED[name]
    spec = SPECS["inference on cpu"]
    report = check(spec)
    if name == "a claim that is never violated":
        refuted = next(o for o in all_judged() if o.spec == spec.name and "fail-closes" in o.refuted)
        ((spec, report),) = checked(rebuilt([refuted]))
    text = promela(spec)
    assert right in text
    assert differences(report, spin.decide(spec, tmp_path, text.replace(right, wrong))) != []


@pytest.mark.spin
def test_notices_a_wrong_verdict(tmp_path: Path) -> None:
    spec = SPECS["inference on cpu"]
    found = spin.decide(spec, tmp_path)
    assert differences(check(spec), found) == []
    found.results["fail-closes"] = Result.REFUTED
    assert differences(check(spec), found) == ["inference on cpu: fail-closes: checker proved, SPIN refuted"]


@pytest.mark.spin
def test_a_model_that_is_no_promela_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(spin.SpinError, match="spin -a"):
        spin.decide(SPECS["inference on cpu"], tmp_path, "active proctype p() { nonsense }")


@pytest.mark.parametrize("name", SPECS)
def test_the_model_states_every_property_once_and_is_deterministic_to_the_byte(name: str) -> None:
    spec = SPECS[name]
    text = promela(spec)
    assert text == promela(spec)
    stated = [claim.prop for claim in claims(spec) if claim.prop]
    assert stated == [p.name for p in spec.properties if p.name not in untranslated(spec)]
    assert set(untranslated(spec)) == {"deterministic", "every-phase-reachable", "closable"}
    assert all(f"ltl {claim.name} {{ {claim.formula} }}" in text for claim in claims(spec))


def test_the_model_is_written_without_exploring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "__init__", lambda *_: pytest.fail("explored"))
    assert "active proctype lifecycle" in promela(SPECS["training on cpu"])
    with pytest.raises(pytest.fail.Exception):
        Graph(own_lifecycle(SPECS["training on cpu"]))
