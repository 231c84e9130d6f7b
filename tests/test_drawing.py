"""Drawings lose nothing, invent nothing, are the same to the byte, and stale ones are found."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.backends.monitors import MONITORS
from interlock.specs import (
    INFERENCE,
    TRAINING,
    Kind,
    Phase,
    Spec,
    Transition,
    UnknownName,
    compose,
    lifecycle,
)
from interlock.specs.drawing import as_json, dot, mermaid, svg
from interlock.specs.embedded import check_drawing, marked, renewed, stale
from interlock.specs.errors import DrawingError, MissingExtra
from interlock.specs.model import FAULTS
from interlock.specs.picture import picture, slug

COMPOSED = {c.name: c for s in (TRAINING, INFERENCE) for m in MONITORS.values() for c in (compose(s, m),)}
every_spec = pytest.mark.parametrize("spec", COMPOSED.values(), ids=str.lower and [*COMPOSED])


def transitions(spec: Spec) -> Counter[tuple[str, str, str]]:
    return Counter((t.source, t.event, t.dest) for t in spec.transitions)


# Small specs at random, with names that are hard to draw

NAMES = [
    "end",
    "a-b",
    "a",
    "b",
    "x y",
    "é",
    "_x2D_",
    "class",
    "note",
    "o",
    'q"<&>',
    "placing",
    "9",
    "style",
    "a_b",
]
EVENTS = ["go", "back", "on/off", "end", "b", *FAULTS]


@st.composite
def small_specs(draw: st.DrawFn) -> Spec:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=8, unique=True))
    inner, last = names[:-1], names[-1]
    kinds = [draw(st.sampled_from([Kind.STABLE, Kind.WORK, Kind.FLIGHT, Kind.EXIT])) for _ in inner]
    phases = [Phase(n, k, "done" if k is Kind.FLIGHT else "") for n, k in zip(inner, kinds, strict=True)]
    arrows: dict[tuple[str, str], str] = {}
    for source in inner:
        for event in draw(st.lists(st.sampled_from(EVENTS), unique=True, max_size=6)):
            arrows[source, event] = draw(st.sampled_from(names))
    table = {}
    for phase in phases:
        if phase.kind is Kind.FLIGHT:
            arrows[phase.name, "done"] = draw(st.sampled_from(names))
        if phase.kind is Kind.EXIT:
            arrows[phase.name, "leave"] = last
            table[phase.name] = ("leave",)
    return Spec(
        name="small -- one",
        phases=(*phases, Phase(last, Kind.TERMINAL)),
        resources=(),
        transitions=tuple(Transition(e, s, d, ()) for (s, e), d in arrows.items()),
        table=table,
    )


class Walk:
    """A spec and the path of a walk through its arrows. A composed spec is printed by its name."""

    def __init__(self, spec: Spec, path: list[tuple[str, str, str]]) -> None:
        self.spec, self.path = spec, path

    def __repr__(self) -> str:
        return f"Walk({self.spec.name if self.spec.name in COMPOSED else self.spec}, {self.path})"


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    names = st.sampled_from(sorted(COMPOSED))
    spec = draw(small_specs()) if draw(st.booleans()) else COMPOSED[draw(names)]
    here, path = spec.initial, []
    for _ in range(draw(st.integers(0, 30))):
        row = list(spec.by_source[here].values())
        if not row:
            break
        t = draw(st.sampled_from(row))
        path.append((t.source, t.event, t.dest))
        here = t.dest
    return Walk(spec, path)


# Reading drawings back, without help from the code under test


def live(spec: Spec) -> set[str]:
    found: set[str] = set()
    todo = [spec.initial]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            ways = [t.dest for t in spec.transitions if t.source == name]
            todo += [d for d in ways if spec.phase[d].kind not in ("exit", "terminal")]
    return found


def meant(words: str, spec: Spec) -> set[str]:
    """The phases that a note's words mean."""
    base, _, but = words.partition(" but ")
    without = set(but.split(", ")) if but else set()
    if base == "any live phase":
        return live(spec) - without
    if base == "any live or in-flight phase":
        return (live(spec) | {p.name for p in spec.phases if p.kind == "flight"}) - without
    assert not but
    return set(base.split(", "))


class Reading:
    """What a drawing says: boxes, and how often each transition is in it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.boxes: Counter[str] = Counter()
        self.notes: dict[str, set[str]] = {}
        self.star: list[str] = []
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.arrows: Counter[tuple[str, str]] = Counter()

    def arrow(self, source: str, label: list[str], dest: str) -> None:
        self.arrows[source, dest] += 1
        shown = {line.removeprefix("✓ ").partition(" ×")[0] for line in label}
        for line in label:
            text, _, times = line.removeprefix("✓ ").partition(" ×")
            event = text.removesuffix(" *")
            self.counts[event, dest] += int(times or 1)
            for origin in self.notes.get(source, {source}):
                self.found[origin, event, dest] += 1
                if text.endswith(" *"):
                    self.found.update((origin, fault, dest) for fault in self.star if fault not in shown)


def read_mermaid(text: str, spec: Spec) -> Reading:
    def plain(label: str) -> str:
        return re.sub(r"#(\d+);", lambda m: chr(int(m[1])), re.sub(r"</?b>", "", label))

    reading, ids, rows = Reading(spec), {}, []
    lines = text.splitlines()
    assert lines[0] == f"%% spec: {spec.name} (hash {spec.hash})"
    for line in lines:
        if m := re.fullmatch(r'    (\S+?)(?:\[\[|\[|\(|>)"(.*)"(?:\]\]|\]|\))', line):
            name, (head, *more) = m[1], m[2].split("<br/>")
            if line[4 + len(name)] == ">":
                words = plain(" ".join([head, *more]))
                if words.startswith("* or "):
                    reading.star = words.removeprefix("* or ").split(", ")
                else:
                    reading.notes[name] = meant(words, spec)
                continue
            assert name not in ids
            ids[name] = plain(head)
            reading.boxes[ids[name]] += 1
            rows += [(ids[name], row) for row in more]
    for hub, row in rows:
        out, phase, back = row.split(" → ")
        phase = plain(phase).removeprefix("▶ ")
        phase = phase[1:-1] if phase.startswith("(") else phase
        reading.boxes[phase] += 1
        reading.arrow(hub, [plain(x) for x in out.split(", ")], phase)
        reading.arrow(phase, [plain(x) for x in back.split(", ")], hub)
    for line in lines:
        if m := re.fullmatch(r'    (\S+) (-->|-\.->)\|"(.*)"\| (\S+)', line):
            assert (m[1] in reading.notes) == (m[2] == "-.->")
            reading.arrow(ids.get(m[1], m[1]), [plain(x) for x in m[3].split(", ")], ids[m[4]])
    return reading


def read_dot(text: str, spec: Spec) -> Reading:
    def plain(label: str) -> list[str]:
        lines = re.split(r"<br[^>]*/>", label)
        return [html.unescape(re.sub(r"<[^>]*>|→", "", x)).replace("\xa0", " ").strip() for x in lines]

    reading, names = Reading(spec), {}
    slugs = {slug(p.name): p.name for p in spec.phases}
    if m := re.search(r"\* or ([^<]*)<", text):
        reading.star = m[1].split(", ")
    for line in text.splitlines():
        if m := re.match(r'  "([^"]+)" \[label=<(.*)> id="note-', line):
            reading.notes[m[1]] = meant(" ".join(plain(m[2])), spec)
        elif m := re.match(r'  "([^"]+)" \[label=<(.*)> id="phase-([^"]+)" class', line):
            assert m[1] == m[3]
            head, *rows = re.split(
                r"<tr>", m[2].removeprefix("<table").partition(">")[2] if "<table" in m[2] else ""
            )[1:] or [m[2]]
            names[m[1]] = plain(head)[0]
            reading.boxes[names[m[1]]] += 1
            for row in rows:
                out, phase, back = re.findall(r"<td[^>]*>(.*?)</td>", row)
                (spoke,) = plain(phase)
                reading.boxes[spoke] += 1
                reading.arrow(names[m[1]], plain(out), spoke)
                reading.arrow(spoke, plain(back), names[m[1]])
    for line in text.splitlines():
        if m := re.match(r'  "([^"]+)" -> "([^"]+)" \[label=<(.*)> id="', line):
            reading.arrow(
                slugs.get(m[1], m[1]) if m[1] not in reading.notes else m[1], plain(m[3]), names[m[2]]
            )
    return reading


READERS = pytest.mark.parametrize(("draw", "read"), [(mermaid, read_mermaid), (dot, read_dot)])


def assert_complete(reading: Reading, spec: Spec) -> None:
    assert reading.boxes == Counter(p.name for p in spec.phases)
    assert reading.found == transitions(spec)
    assert max(reading.arrows.values(), default=1) == 1, "two arrows between the same two boxes"


@READERS
@every_spec
def test_every_phase_and_transition_is_drawn_once(spec: Spec, draw, read) -> None:
    assert_complete(read(draw(spec), spec), spec)


@READERS
@given(spec=small_specs())
def test_whatever_the_spec_it_can_be_read_back(draw, read, spec: Spec) -> None:
    assert_complete(read(draw(spec), spec), spec)


@READERS
@given(walk=walks())
def test_a_path_changes_what_is_highlighted_and_nothing_else(draw, read, walk: Walk) -> None:
    spec, path = walk.spec, walk.path
    reading = read(draw(spec, path), spec)
    assert_complete(reading, spec)
    taken = Counter((event, dest) for _, event, dest in path)
    for (event, dest), count in taken.items():
        assert reading.counts[event, dest] >= count


@every_spec
def test_faults_are_folded(spec: Spec) -> None:
    shown = picture(spec)
    assert len(shown.arrows) < len(spec.transitions) / 2
    plain = [a for a in shown.arrows if not a.from_note]
    spelt = [line.event for a in plain for line in a.lines if line.event in FAULTS]
    assert spelt == []
    assert "any live phase" in [note.text for note in shown.notes]


def test_what_leaves_many_phases_alike_is_drawn_once() -> None:
    shown = picture(COMPOSED["training on ddp"])
    arrows = [
        (note.text, [line.event for line in arrow.lines], arrow.dest)
        for note in shown.notes
        for arrow in shown.arrows
        if arrow.source == note.id
    ]
    assert sorted(arrows) == [
        ("any live or in-flight phase but created, writing_off", ["lose"], "device_lost"),
        ("any live phase", ["fail", "peer_fail"], "failed"),
        ("any live phase", ["interrupt"], "interrupted"),
        ("created, acquired, placed, ready", ["offload"], "offloading"),
        ("ready, training, paused", ["stop"], "stopping"),
    ]
    assert shown.star == ("fail", "interrupt", "abandon")


def test_round_trips_belong_to_their_hub() -> None:
    hubs = picture(COMPOSED["training on ddp"]).hubs
    assert [name for name, hub in hubs.items() if hub == "ready"] == ["compiling", "restoring"]
    assert sorted(name for name, hub in hubs.items() if hub == "training") == [
        "adopting",
        "checkpointing",
        "paused",
        "updating",
        "validating",
    ]


@READERS
def test_a_phase_to_which_a_note_points_has_a_box(draw, read) -> None:
    """It looks like a round trip, but for the fault that leads there from two phases."""
    phases = tuple(Phase(name, Kind.STABLE) for name in ("a", "b", "c", "d"))
    arrows = (("a", "go", "b"), ("b", "go", "a"), ("a", "on", "c"), ("c", "on", "d"), ("d", "off", "end"))
    faults = (("c", "fail", "b"), ("d", "fail", "b"))
    spec = Spec(
        name="corner",
        phases=(*phases, Phase("end", Kind.TERMINAL)),
        resources=(),
        transitions=tuple(Transition(e, s, d, ()) for s, e, d in arrows + faults),
        table={},
    )
    assert picture(spec).hubs == {}
    assert_complete(read(draw(spec), spec), spec)


def test_different_names_have_different_ids() -> None:
    names = ["a-b", "a_x2D_b", "a_b", "a b", "a_x20_b", "a_x5F_x2D_b", "a__x2D_b", "é", "_xE9_"]
    assert len({slug(name) for name in names}) == len(names)
    assert all(re.fullmatch(r"\w+", slug(name), re.ASCII) for name in names)
    assert slug("writing_off") == "writing_off"


@given(spec=small_specs())
def test_each_transition_is_in_one_line_of_one_arrow(spec: Spec) -> None:
    lines = [line for arrow in picture(spec).arrows for line in arrow.lines]
    assert Counter((t.source, t.event, t.dest) for line in lines for t in line.all) == transitions(spec)


def test_a_transition_that_the_spec_has_not_is_refused() -> None:
    with pytest.raises(UnknownName, match="created --acquire--> acquiring"):
        mermaid(TRAINING, [("created", "place", "placing")])


# SVG


def parsed(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def ids(root: ElementTree.Element) -> list[str]:
    return [value for element in root.iter() if (value := element.get("id"))]


def test_a_path_with_updates_says_that_they_are_drawn_once() -> None:
    spec, says = COMPOSED["training on cpu"], "update: once for all between two other events"
    path = [("training", "update", "updating"), ("updating", "updated", "training")]
    assert says in dot(spec, path)
    assert says not in dot(spec, [("created", "acquire", "acquiring")])
    assert says not in dot(spec)


def classes(root: ElementTree.Element, start: str) -> dict[str, set[str]]:
    """id -> classes, of the elements whose id begins so."""
    return {
        key: set(element.get("class", "").split())
        for element in root.iter()
        if (key := element.get("id", "")).startswith(start)
    }


def assert_svg(text: str, spec: Spec, path) -> None:
    root = parsed(text)
    assert len(set(ids(root))) == len(ids(root))
    phases, steps = classes(root, "phase-"), classes(root, "transition-")
    assert set(phases) == {f"phase-{slug(p.name)}" for p in spec.phases}
    assert set(steps) == {f"transition-{slug(s)}-{slug(e)}-{slug(d)}" for s, e, d in transitions(spec)}
    for phase in spec.phases:
        assert {"phase", str(phase.kind)} <= phases[f"phase-{slug(phase.name)}"]
    visited = {f"phase-{slug(name)}" for s, _, d in path for name in (s, d)}
    assert {key for key, value in phases.items() if "taken" in value} == visited
    now = [f"phase-{slug(path[-1][2])}"] if path else []
    assert [key for key, value in phases.items() if "now" in value] == now
    arrow_of = {row["id"]: row["arrow"] for row in json.loads(as_json(spec))["transitions"]}
    within = {
        element.get("id"): (arrow.get("id"), "taken" in arrow.get("class"), element.get("class"))
        for arrow in root.iter("g")
        if "arrow" in arrow.get("class", "").split()
        for element in arrow.iter()
        if element.get("id", "").startswith("transition-")
    }
    assert {key: arrow for key, (arrow, _, _) in within.items()} == arrow_of
    taken = {f"transition-{slug(s)}-{slug(e)}-{slug(d)}" for s, e, d in path}
    shown = {key for key, (_, _, own) in within.items() if own == "transition taken"}
    # A label that stands for several transitions is taken with any of them.
    assert taken <= shown
    assert {within[key][0] for key in shown} == {within[key][0] for key in taken}
    assert {arrow for arrow, arrow_taken, _ in within.values() if arrow_taken} == {
        within[key][0] for key in taken
    }


@every_spec
def test_svg_has_each_phase_and_transition_by_its_id(spec: Spec) -> None:
    assert_svg(svg(spec), spec, [])


@settings(max_examples=25)
@given(walk=walks())
def test_svg_of_any_spec_with_any_path(walk: Walk) -> None:
    spec, path = walk.spec, walk.path
    assert_svg(svg(spec, path), spec, path)


def run_of(spec: Spec, events: str):
    slot = lifecycle(spec).slot()
    for event in events.split():
        slot.fire(event)
    return [(entry.source, entry.event, entry.phase) for entry in slot.history[1:]]


FAILING = (
    "acquire acquired place placed optimize optimized train " + "update updated " * 3 + "update fail offload"
)


def test_svg_shows_a_run() -> None:
    spec = COMPOSED["training on cpu"]
    root = parsed(svg(spec, run_of(spec, FAILING)))
    texts = {e.get("id"): e for e in root.iter("text") if e.get("id")}
    assert texts["transition-training-update-updating"].text == "update ×4 →"
    assert texts["transition-updating-updated-training"].text == "→ updated ×3"
    taken = {key for key, value in classes(root, "transition-").items() if "taken" in value}
    assert "transition-updating-fail-failed" in taken
    assert "transition-training-fail-failed" not in taken
    arrows = {key for key, value in classes(root, "arrow-").items() if "taken" in value}
    assert {"arrow-any-fail-failed", "arrow-failed-offloading", "arrow-updating-training"} <= arrows
    assert "arrow-any-interrupt-interrupted" not in arrows
    assert classes(root, "phase-")["phase-offloading"] == {"phase", "exit", "taken", "now"}


def test_the_ids_do_not_depend_on_the_path() -> None:
    spec = COMPOSED["training on fsdp2"]
    path = run_of(spec, "acquire acquired join fail")
    assert sorted(ids(parsed(svg(spec)))) == sorted(ids(parsed(svg(spec, path))))


def test_svg_stands_alone_and_can_be_read_aloud() -> None:
    text = svg(COMPOSED["inference on cuda"])
    root = parsed(text)
    assert root.find("title").text == "The lifecycle 'inference on cuda'"
    assert "From any live phase, fail leads to failed" in root.find("desc").text
    assert root.get("role") == "img"
    assert "prefers-color-scheme:dark" in root.find("style").text
    assert not re.search(r"href|@import|url\(|<script|<image", text)
    assert re.findall(r"https?://\S+?(?=[\"<])", text) == ["http://www.w3.org/2000/svg"]


def test_without_graphviz_pure_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(MissingExtra, match=r'pip install "interlock\[svg\]"') as caught:
        svg(TRAINING)
    assert isinstance(caught.value, ImportError)


def test_a_layout_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: shutil.os.path.realpath("/bin/false"))
    with pytest.raises(DrawingError, match="exited with 1"):
        svg(TRAINING)


# The same to the byte

DRAW_ALL = """
import sys
sys.modules["torch"] = None
from interlock.backends.monitors import MONITORS
from interlock.specs import INFERENCE, TRAINING, compose
from interlock.specs.drawing import as_json, dot, mermaid, svg
path = [("created", "acquire", "acquiring"), ("acquiring", "fail", "failed")]
for lifecycle in (TRAINING, INFERENCE):
    for monitor in MONITORS.values():
        spec = compose(lifecycle, monitor)
        for draw in (mermaid, dot, svg):
            sys.stdout.buffer.write((draw(spec) + draw(spec, path)).encode())
        sys.stdout.buffer.write(as_json(spec).encode())
"""


@pytest.mark.torchless
def test_drawings_are_the_same_in_every_process() -> None:
    texts = {
        subprocess.run(
            [sys.executable, "-c", DRAW_ALL],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "random")
    }
    assert len(texts) == 1
    assert len(texts.pop()) > 100_000


def test_specs_with_the_same_content_have_the_same_drawing() -> None:
    again = compose(TRAINING, MONITORS["cpu"])
    assert mermaid(again) == mermaid(COMPOSED["training on cpu"])
    assert json.loads(as_json(again))["hash"] == again.hash


# Stale drawings

TEXT = mermaid(COMPOSED["training on cpu"])


def test_an_up_to_date_drawing_has_no_difference() -> None:
    assert check_drawing(TEXT, TEXT) == []
    assert check_drawing(TEXT, TEXT.replace("\n", "\r\n").rstrip()) == []


def test_a_drawing_of_another_spec_says_so() -> None:
    (first, *_) = check_drawing(TEXT, mermaid(COMPOSED["training on cuda"]))
    assert first == "it shows the spec 'training on cuda', and should show 'training on cpu'"


def test_a_drawing_of_an_older_spec_says_so() -> None:
    spec = COMPOSED["training on cpu"]
    fewer = tuple(t for t in spec.transitions if t.event not in ("pause", "adopt", "adopted"))
    phases = tuple(p for p in spec.phases if p.name != "adopting")
    older = Spec(
        spec.name, phases, spec.resources, tuple(t for t in fewer if t.source != "adopting"), spec.table
    )
    first, *lines = check_drawing(TEXT, mermaid(older))
    assert first == f"the spec has changed since it was drawn (hash {older.hash}, now {spec.hash})"
    assert any(' lacks training("<b>training</b><br/>update' in line for line in lines)
    assert lines[-1].startswith("and ")


def test_a_spec_that_changed_in_nothing_drawn_says_so() -> None:
    spec = COMPOSED["training on cpu"]
    other = Spec(spec.name, spec.phases, spec.resources, spec.transitions, spec.table)
    (first, *lines) = check_drawing(TEXT, mermaid(other))
    assert first.endswith("but nothing that is drawn")
    assert len(lines) == 2


def test_an_edited_drawing_says_where() -> None:
    edited = TEXT.replace('|"finish"|', '|"end"|')
    number = edited[: edited.index('|"end"|')].count("\n") + 1
    first, has, lacks = check_drawing(TEXT, edited)
    assert first.startswith("the spec is the same")
    assert has == f'line {number} has training -->|"end"| finished'
    assert lacks == f'line {number + 1} lacks training -->|"finish"| finished'


def test_what_is_no_drawing_says_so() -> None:
    assert check_drawing(TEXT, "flowchart TD\n")[0].startswith("it names no spec")


def spec_of(options: tuple[str, ...]) -> Spec:
    if options not in (("training", "--backend", "cpu"), ("inference", "--backend", "cuda")):
        raise UnknownName("spec", " ".join(options), COMPOSED)
    return COMPOSED[f"{options[0]} on {options[2]}"]


CPU = ("training", "--backend", "cpu")
CUDA = ("inference", "--backend", "cuda")


def readme(*drawings: str) -> str:
    blocks = [f"Some text.\n\n```mermaid\n{text.rstrip()}\n```\n" for text in drawings]
    return "# Title\n\n```mermaid\nflowchart LR\n  not --> ours\n```\n\n" + "\n".join(blocks)


def test_blocks_of_a_page_are_checked(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    good = [marked(mermaid(spec_of(options)), options) for options in (CPU, CUDA)]
    page.write_text(readme(*good))
    assert stale(page, spec_of) == []
    assert renewed(page, spec_of) == page.read_text()


@pytest.mark.parametrize("which", [0, 1])
def test_a_stale_block_is_found_and_renewed(tmp_path: Path, which: int) -> None:
    page = tmp_path / "README.md"
    good = [marked(mermaid(spec_of(options)), options) for options in (CPU, CUDA)]
    bad = [*good]
    bad[which] = bad[which].replace('|"acquire"|', '|"take"|')
    page.write_text(readme(*bad))
    line = page.read_text().splitlines().index(good[which].splitlines()[0]) + 1
    found = stale(page, spec_of)
    assert len(found) == 3
    assert all(text.startswith(f"{page}:{line}: ") for text in found)
    assert renewed(page, spec_of) == readme(*good)


def test_an_indented_block_is_checked(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    block = f"```mermaid\n{marked(TEXT, CPU)}```"
    page.write_text("\n".join(f"   {line}" for line in block.splitlines()) + "\n")
    assert stale(page, spec_of) == []


@pytest.mark.parametrize(
    ("ending", "draw"), [("mmd", mermaid), ("gv", dot), ("dot", dot), ("svg", svg), ("json", as_json)]
)
def test_a_drawing_in_a_file_of_its_own_is_checked(tmp_path: Path, ending: str, draw) -> None:
    file = tmp_path / f"run.{ending}"
    file.write_text(marked(draw(spec_of(CPU)), CPU))
    assert stale(file, spec_of) == []
    if ending == "svg":
        parsed(file.read_text())
    if ending == "json":
        assert json.loads(file.read_text())["made_by"] == "interlock graph training --backend cpu"
    old = file.read_text()
    file.write_text(old.replace("created", "begun"))
    assert stale(file, spec_of) != []
    assert renewed(file, spec_of) == old


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# Nothing\n", "nothing to check"),
        (readme(), "nothing to check"),
        (readme("%% interlock graph training --backend abacus\n"), "cannot be checked: unknown spec"),
        (readme("%% interlock graph 'training\n"), "cannot be checked: the options"),
        (readme("%% interlock graph training --backend cpu\n"), "it names no spec"),
    ],
)
def test_a_page_that_cannot_be_checked_does_not_pass(tmp_path: Path, text: str, says: str) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    assert says in stale(page, spec_of)[0]


def test_a_file_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DrawingError, match=r"\.svg"):
        stale(tmp_path / "a.txt", spec_of)
