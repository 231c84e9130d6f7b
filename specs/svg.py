"""From a DOT graph to an SVG picture: `graphviz-pure` lays it out, `restyle` dresses it.

`graphviz-pure` is a port of Graphviz that comes as a wheel with one program in it: nobody has to
install Graphviz, and the same bytes come out on every platform. It is an optional extra.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from string import Template
from xml.etree import ElementTree

from .errors import DrawingError, MissingExtra
from .picture import Arrow, Picture, phase_id, transition_id

_SECONDS = 60

# Boxes are filled, and what stands outside of them is of a grey that can be read on white and on black:
# as an image in a page, a picture follows the reader's system and not the page around it. Colours are
# written out, not as CSS variables, which viewers other than browsers do not know.
_LOOK = """
.interlock text{fill:$ink}
.interlock .graph>text,.interlock .note text,.interlock .arrow text{fill:$quiet}
.interlock .phase>path{fill:$rest;stroke:$ink}
.interlock .phase>polygon{fill:none;stroke:$ink}
.interlock .work>path{fill:$work}
.interlock .exit>polygon:first-of-type{fill:$exit}
.interlock .terminal>polygon:first-of-type{fill:$end}
.interlock .note path,.interlock .note polygon,.interlock .note polyline{fill:none;stroke:$quiet}
.interlock .arrow path{fill:none;stroke:$quiet}
.interlock .arrow polygon{fill:$quiet;stroke:$quiet}
.interlock .taken>path,.interlock .taken>polygon{stroke:$taken}
.interlock .arrow.taken>polygon{fill:$taken}
.interlock .arrow text.taken{fill:$taken}
.interlock .now>path,.interlock .now>polygon{stroke:$now}
.interlock .now>path,.interlock .now>polygon:first-of-type{fill:$here}
"""
_LIGHT = {
    "ink": "#1f2328",
    "quiet": "#6e7781",
    "rest": "#ffffff",
    "work": "#ddf0ff",
    "exit": "#fff4d4",
    "end": "#e4e7eb",
    "taken": "#0969da",
    "now": "#1a7f37",
    "here": "#c8f0d2",
}
_DARK = {
    "ink": "#e6edf3",
    "quiet": "#848d97",
    "rest": "#0d1117",
    "work": "#10304f",
    "exit": "#3d300f",
    "end": "#30363d",
    "taken": "#4493f8",
    "now": "#3fb950",
    "here": "#12481f",
}
STYLE = (
    "\n.interlock{color-scheme:light dark}"
    '\n.interlock text{font-family:Arial,Helvetica,"Liberation Sans",Arimo,sans-serif}'
    "\n.interlock .work>path,.interlock .taken>path,.interlock .taken>polygon{stroke-width:2}"
    "\n.interlock .now>path,.interlock .now>polygon{stroke-width:3}"
    "\n.interlock .arrow text.taken{font-weight:bold}"
    f"{Template(_LOOK).substitute(_LIGHT)}"
    f"@media(prefers-color-scheme:dark){{{Template(_LOOK).substitute(_DARK)}}}\n"
)


def lay_out(graph: str) -> str:
    """The SVG of a DOT graph, as `graphviz-pure` writes it.

    Raises:
        MissingExtra: The package is not installed.
        DrawingError: It refused the graph.
    """
    # The program of this interpreter's environment first: that one need not be activated.
    scripts = sysconfig.get_path("scripts")
    program = shutil.which("graphviz-pure", path=scripts) or shutil.which("graphviz-pure")
    if program is None:
        raise MissingExtra("drawing SVG", "graphviz-pure", "svg")
    done = subprocess.run(
        [program, "-Tsvg"], input=graph.encode(), capture_output=True, check=False, timeout=_SECONDS
    )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()
        raise DrawingError(f"graphviz-pure exited with {done.returncode}: {why}")
    return done.stdout.decode()


def restyle(text: str, shown: Picture, title: str) -> str:
    """Colours by style sheet, ids on labels, a title on everything, and no trace of the layout's version.

    Args:
        text: What `lay_out` made of `dot` of the same picture.
        shown: The picture.
        title: Name and hash of the spec.

    Returns:
        The finished SVG.
    """
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in [n for n in element.attrib if n.startswith("{") or n in _DROPPED]:
            del element.attrib[name]
    _unwrap(root)
    by_id = {element.get("id"): element for element in root.iter("g")}
    for phase in shown.spec.phases:
        group = by_id[phase_id(phase.name)]
        group.set("class", shown.classes(phase.name))
        _name(group, f"{phase.name}: {phase.doc}" if phase.doc else phase.name)
    for note in shown.notes:
        by_id[note.id].set("class", "note")
        _name(by_id[note.id], note.text)
    for arrow in shown.arrows:
        _label(by_id[arrow.id], arrow, shown)
    for kind in ("stable", "work", "flight", "exit", "terminal"):
        if f"legend-{kind}" in by_id:
            by_id[f"legend-{kind}"].set("class", f"phase {kind}")
    return _document(root, shown, title)


# Presentation attributes that the style sheet replaces.
_DROPPED = frozenset({"fill", "stroke", "stroke-width", "font-family", "fill-opacity", "stroke-opacity"})


def _unwrap(root: ElementTree.Element) -> None:
    """Cells with a tooltip come as `<g id="a_ID"><a title="...">...</a></g>`: no link is meant."""
    for group in root.iter("g"):
        for link in group.findall("a"):
            group.remove(link)
            group.extend(list(link))
            group.set("id", group.get("id", "").removeprefix("a_"))


def _name(group: ElementTree.Element, text: str) -> None:
    """The title of a group, shown when the pointer rests on it."""
    found = group.find("title")
    if found is None:
        found = ElementTree.Element("title")
        group.insert(0, found)
    found.text = text


def _label(group: ElementTree.Element, arrow: Arrow, shown: Picture) -> None:
    """Give the lines of an arrow's label the ids of their transitions.

    A line that stands for several transitions is followed by an empty group for each, so that
    every transition is found by its id, inside of its arrow.
    """
    group.set("class", "arrow taken" if arrow.taken else "arrow")
    source = next((n.text for n in shown.notes if n.id == arrow.source), arrow.source)
    _name(group, f"{source} to {arrow.dest}: {', '.join(line.text for line in arrow.lines)}")
    texts = group.findall("text")
    for line, text in zip(arrow.lines, texts, strict=True):
        text.set("class", "transition taken" if line.taken else "transition")
        if len(line.transitions) == 1:
            text.set("id", transition_id(line.transitions[0]))
        others = line.transitions if len(line.transitions) > 1 else ()
        for t in (*others, *line.starred):
            taken = " taken" if (t.source, t.event, t.dest) in shown.taken else ""
            ElementTree.SubElement(group, "g", {"id": transition_id(t), "class": f"transition{taken}"})


def _document(root: ElementTree.Element, shown: Picture, title: str) -> str:
    """The parts put together, one element to a line."""
    style = ElementTree.Element("style")
    style.text = STYLE
    name, about = ElementTree.Element("title"), ElementTree.Element("desc")
    name.text = f"The lifecycle '{shown.spec.name}'"
    about.text = _description(shown)
    size = {k: root.get(k, "").removesuffix("pt") for k in ("width", "height")}
    root.attrib = {
        "xmlns": "http://www.w3.org/2000/svg",
        **size,
        "viewBox": root.get("viewBox", ""),
        "class": "interlock",
        "role": "img",
    }
    root[:] = [name, about, style, *root]
    for element in list(root.iter()):
        element.tail = "\n"
    # Two hyphens may not stand in a comment.
    comment = re.sub(r"-(?=-)|-$", "\N{NON-BREAKING HYPHEN}", title)
    return f"<!-- spec: {comment} -->\n" + ElementTree.tostring(root, encoding="unicode")


def _description(shown: Picture) -> str:
    """The picture in words, for those who do not see it."""

    def parts() -> Iterator[str]:
        spec = shown.spec
        yield f"A state machine of {len(spec.phases)} phases and {len(spec.transitions)} transitions,"
        yield f"from {spec.initial} to {spec.terminal}."
        for note in shown.notes:
            ways = [
                f"{' or '.join(line.event for line in arrow.lines)} leads to {arrow.dest}"
                for arrow in shown.arrows
                if arrow.source == note.id
            ]
            yield f"From {note.text}, {', '.join(ways)}."
        if shown.now:
            yield f"A run has taken the highlighted transitions and is in {shown.now}."

    return " ".join(parts())
