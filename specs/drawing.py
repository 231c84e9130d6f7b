"""Drawings of a spec: Mermaid, DOT, SVG and JSON, the same to the byte for the same spec.

    print(mermaid(compose(TRAINING, CUDA)))
    Path("run.svg").write_text(svg(spec, path_of(journal)))

What a drawing shows and what it folds is decided in `picture.py`. Every drawing names its spec and
the spec's hash in a comment, so that a stale one can say why it is stale (`embedded.py`).

The ids are a contract for pages that follow a run: `phase-NAME`, `transition-SOURCE-EVENT-DEST`,
and around the latter, with class `arrow`, `arrow-SOURCE-DEST` or `arrow-any-EVENT-DEST`. Adding the
class `taken` to a transition and to its closest `.arrow`, and `now` to one phase, is all there is
to do. Names are letters, digits and underscores there; any other character is spelt `_xHEX_`.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence

from .model import Kind, Spec
from .picture import Arrow, Line, Note, Picture, Step, phase_id, picture, printable, slug, transition_id
from .svg import lay_out, restyle

__all__ = ["as_json", "dot", "mermaid", "svg"]

TAKEN = "#0969da"
NOW = "#1a7f37"
_QUIET = "#808891"
_STAR = "note-star-"
_FILL = {Kind.WORK: "#0969da1f", Kind.EXIT: "#bf870026", Kind.TERMINAL: "#80889133"}

# Round trips are lines of text in a box, which Mermaid would break at 200 pixels.
_WIDE = '%%{init: {"flowchart": {"wrappingWidth": 500}}}%%'

_BOX = {
    Kind.STABLE: ('("', '")'),
    Kind.WORK: ('("', '")'),
    Kind.FLIGHT: ('("', '")'),
    Kind.EXIT: ('["', '"]'),
    Kind.TERMINAL: ('[["', '"]]'),
}
# The dashed one comes last: Graphviz dashes the filling of the cell after it.
_LEGEND = {
    Kind.STABLE: "at rest",
    Kind.WORK: "at work",
    Kind.EXIT: "way out",
    Kind.TERMINAL: "end",
    Kind.FLIGHT: "in flight",
}


def title(spec: Spec) -> str:
    """What every drawing says of itself in a comment: the spec's name and hash."""
    return f"{printable(spec.name)} (hash {spec.hash})"


def star_text(star: Sequence[str]) -> str:
    """The legend of the star."""
    return f"* or {', '.join(map(printable, star))}"


# Mermaid


def mermaid(spec: Spec, path: Iterable[Step] = ()) -> str:
    """A Mermaid flow chart.

    Colours are translucent or absent, so that it is readable on light and dark pages.

    Args:
        spec: Any spec, usually a composed one.
        path: The (source, event, dest) that a run has taken: highlighted, with counts.

    Returns:
        The text, ending with a newline.

    Raises:
        UnknownName: The path has a transition that the spec has not.
    """
    shown = picture(spec, path)
    out = [f"%% spec: {title(spec)}", _WIDE, "flowchart TD"]
    for phase in spec.phases:
        if phase.name not in shown.hubs:
            left, right = _BOX[phase.kind]
            out.append(f"    {_node(phase.name)}{left}{_mermaid_phase(shown, phase.name)}{right}")
    out += [f'    {note.id}>"{"<br/>".join(map(_quoted, _wrapped(note.text)))}"]' for note in shown.notes]
    if shown.starred:
        out.append(f'    {_STAR}>"{_quoted(star_text(shown.star))}"]')
    arrows = shown.outside
    for arrow in arrows:
        head = "-.->" if arrow.from_note else "-->"
        source = arrow.source if arrow.from_note else _node(arrow.source)
        out.append(f'    {source} {head}|"{_label(arrow)}"| {_node(arrow.dest)}')
    return "\n".join([*out, *_mermaid_styles(shown, arrows)]) + "\n"


def _mermaid_phase(shown: Picture, name: str) -> str:
    """The text of a phase's box: its name, and a line for each of its round trips."""
    trips = shown.round_trips(name)
    if not trips:
        return _quoted(name)
    rows = [f"<b>{_quoted(name)}</b>"]
    for out, phase, back in trips:
        text = f"({_quoted(phase)})" if shown.spec.phase[phase].kind is Kind.FLIGHT else _quoted(phase)
        if phase == shown.now:
            text = f"<b>\N{BLACK RIGHT-POINTING TRIANGLE} {text}</b>"
        rows.append(f"{_label(out, in_box=True)} → {text} → {_label(back, in_box=True)}")
    return "<br/>".join(rows)


def _mermaid_styles(shown: Picture, arrows: Sequence[Arrow]) -> list[str]:
    """The class definitions, who has them, and the arrows that were taken."""
    looks = {
        "stable": "stroke-width:1px",
        "work": f"fill:{_FILL[Kind.WORK]},stroke-width:3px",
        "flight": "fill:#0000,stroke-dasharray:5 3",
        "exit": f"fill:{_FILL[Kind.EXIT]}",
        "terminal": f"fill:{_FILL[Kind.TERMINAL]},stroke-width:2px",
        "note": f"fill:#0000,stroke:{_QUIET},stroke-dasharray:2 3",
        "taken": f"stroke:{TAKEN},stroke-width:2px",
        "now": f"fill:{NOW}4d,stroke:{NOW},stroke-width:4px",
    }
    members: dict[str, list[str]] = {name: [] for name in looks}
    for phase in shown.spec.phases:
        if phase.name not in shown.hubs:
            for name in shown.classes(phase.name).split()[1:]:
                members[name].append(_node(phase.name))
    members["note"] = [note.id for note in shown.notes] + ([_STAR] if shown.starred else [])
    out = []
    for name, nodes in members.items():
        if nodes:
            out += [f"    classDef {name} {looks[name]}", f"    class {','.join(nodes)} {name}"]
    taken = [str(number) for number, arrow in enumerate(arrows) if arrow.taken]
    if taken:
        out.append(f"    linkStyle {','.join(taken)} stroke:{TAKEN},stroke-width:3px")
    return out


# Words of Mermaid that cannot be the id of a node.
_RESERVED = re.compile(
    r"(?:end|graph|flowchart|subgraph|style|linkstyle|classdef|class|click|call|href|default|direction|interpolate"
    r"|tb|bt|td|br|rl|lr|_self|_blank|_parent|_top)",
    re.IGNORECASE,
)


def _node(name: str) -> str:
    """A name as id of a node; a reserved word has its first letter spelt out, so it stays unique."""
    text = slug(name)
    return f"_x{ord(text[0]):X}_{text[1:]}" if _RESERVED.fullmatch(text) else text


def _quoted(text: str) -> str:
    """Text inside of quotes: what might have a meaning to Mermaid is spelt as a number."""
    return re.sub(r"[^A-Za-z0-9_ ,.*()×-]", lambda found: f"#{ord(found[0])};", printable(text))


def _label(arrow: Arrow, *, in_box: bool = False) -> str:
    """The label of an arrow; events that were taken have a tick where its colour does not tell."""
    tick = in_box or len(arrow.lines) > 1
    return ", ".join(
        ("\N{CHECK MARK} " if tick and line.taken else "") + _quoted(line.text) for line in arrow.lines
    )


# DOT


def dot(spec: Spec, path: Iterable[Step] = ()) -> str:
    """A graph for Graphviz, with ids and classes that its SVG keeps.

    Args:
        spec: Any spec, usually a composed one.
        path: The (source, event, dest) that a run has taken: highlighted, with counts.

    Returns:
        The text, ending with a newline.

    Raises:
        UnknownName: The path has a transition that the spec has not.
    """
    shown = picture(spec, path)
    out = [
        f"// spec: {title(spec)}",
        "digraph interlock {",
        "  graph [bgcolor=transparent fontname=Arial margin=0 nodesep=0.2 pad=0.1 ranksep=0.22 labelloc=b]",
        '  node [fontname=Arial fontsize=12 height=0.3 margin="0.1,0.04" shape=box]',
        "  edge [arrowsize=0.6 fontname=Arial fontsize=10]",
    ]
    out += [_dot_phase(shown, phase.name) for phase in spec.phases if phase.name not in shown.hubs]
    out += [_dot_note(note) for note in shown.notes]
    out += [_dot_arrow(arrow) for arrow in shown.outside]
    out.append(f"  label={_dot_legend(shown)}")
    return "\n".join([*out, "}"]) + "\n"


def _dot_phase(shown: Picture, name: str) -> str:
    """A phase, with its round trips as rows inside of it."""
    kind = shown.spec.phase[name].kind
    style = {Kind.STABLE: "rounded", Kind.WORK: "rounded,filled", Kind.FLIGHT: "rounded,dashed"}
    attributes = [
        f'id="{phase_id(name)}"',
        f'class="{shown.classes(name)}"',
        f'style="{style.get(kind, "filled")}"',
        *([f'fillcolor="{_FILL[kind]}"'] if kind in _FILL else []),
        *(["peripheries=2"] if kind is Kind.TERMINAL else []),
        *(["penwidth=2"] if kind is Kind.WORK else []),
        *_dot_colour(shown, name),
    ]
    trips = shown.round_trips(name)
    if not trips:
        return f'  "{slug(name)}" [label=<{_html(name)}> {" ".join(attributes)}]'
    rows = [f'<tr><td colspan="3"><b>{_html(name)}</b></td></tr>']
    for out, phase, back in trips:
        border = "dashed" if shown.spec.phase[phase].kind is Kind.FLIGHT else "solid"
        colour = "".join(f" {part}" for part in _dot_colour(shown, phase)[:1])
        box = f'id="{phase_id(phase)}" tooltip="{_html(phase)}" border="1" style="rounded,{border}"{colour}'
        cells = [_cell(out, "right", "{} →"), f"<td {box}>{_html(phase)}</td>", _cell(back, "left", "→ {}")]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    table = '<table border="0" cellborder="0" cellspacing="3" cellpadding="3">' + "".join(rows) + "</table>"
    return f'  "{slug(name)}" [label=<{table}> {" ".join(attributes)}]'


def _cell(arrow: Arrow, align: str, form: str) -> str:
    """An arrow of a round trip: a cell of the table, one line for each event."""
    texts = [_bold(line, "{}" if number else form) for number, line in enumerate(arrow.lines)]
    colour = f' color="{TAKEN}"' if arrow.taken else ""
    lines = f'<br align="{align}"/>'.join(texts)
    return (
        f'<td id="{arrow.id}" tooltip="{_html(arrow.id)}" align="{align}" balign="{align}">'
        f'<font point-size="10"{colour}>{lines}</font></td>'
    )


def _dot_note(note: Note) -> str:
    text = "<br/>".join(_html(line) for line in _wrapped(note.text))
    return (
        f'  "{note.id}" [label=<{text}> id="{note.id}" class="note" shape=note style=dotted'
        f' color="{_QUIET}" fontsize=11]'
    )


def _dot_arrow(arrow: Arrow) -> str:
    """An arrow between two boxes. Blanks that do not collapse keep the label off the line."""
    text = "<br/>".join(_bold(line, "&#160;{}&#160;") for line in arrow.lines)
    source = arrow.source if arrow.from_note else slug(arrow.source)
    dashed = " style=dashed" if arrow.from_note else ""
    taken = f' color="{TAKEN}" fontcolor="{TAKEN}" penwidth=2' if arrow.taken else ""
    classes = "arrow taken" if arrow.taken else "arrow"
    attributes = f'label=<{text}> id="{arrow.id}" class="{classes}"{dashed}{taken}'
    return f'  "{source}" -> "{slug(arrow.dest)}" [{attributes}]'


def _dot_colour(shown: Picture, phase: str) -> list[str]:
    if phase == shown.now:
        return [f'color="{NOW}"', "penwidth=3"]
    return [f'color="{TAKEN}"', "penwidth=2"] if phase in shown.visited else []


def _dot_legend(shown: Picture) -> str:
    """One row: how each kind of phase looks, and what the star stands for."""
    styles = {Kind.STABLE: "rounded", Kind.WORK: "rounded", Kind.FLIGHT: "rounded,dashed"}
    kinds = [kind for kind in _LEGEND if any(p.kind is kind for p in shown.spec.phases)]
    cells = [
        f'<td id="legend-{kind}" tooltip="{kind}" border="{2 if kind is Kind.WORK else 1}"'
        f' style="{styles.get(kind, "solid")}"'
        + (f' bgcolor="{_FILL[kind]}"' if kind in _FILL else "")
        + f'><font point-size="10">{_LEGEND[kind]}</font></td>'
        for kind in kinds
    ]
    if shown.starred:
        cells.append(f'<td border="0"><font point-size="10">{_html(star_text(shown.star))}</font></td>')
    work = {phase.name for phase in shown.spec.phases if phase.kind is Kind.WORK}
    fast = {t.event for t in shown.spec.transitions if t.fast and t.source in work}
    fast &= {event for _, event, _ in shown.taken}
    if fast:
        text = f"{', '.join(sorted(fast))}: once for all between two other events"
        cells.append(f'<td border="0"><font point-size="10">{_html(text)}</font></td>')
    table = '<table border="0" cellborder="1" cellspacing="6" cellpadding="3">'
    return f"<{table}<tr>{''.join(cells)}</tr></table>>"


def _wrapped(text: str, width: int = 28) -> list[str]:
    """The text in as few lines as the width asks for, of about equal length."""

    def broken(width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [text]

    while width > 1 and len(broken(width - 1)) == len(broken(width)):
        width -= 1
    return broken(width)


def _bold(line: Line, form: str) -> str:
    """A line of a label; bold if taken, so that the layout leaves room for it."""
    text = form.format(_html(line.text))
    return f"<b>{text}</b>" if line.taken else text


def _html(text: str) -> str:
    """Text inside of a label or an attribute of Graphviz' HTML."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return printable(text)


# SVG and JSON


def svg(spec: Spec, path: Iterable[Step] = ()) -> str:
    """A picture that stands alone: no script, no font, no link; for light and dark pages.

    Args:
        spec: Any spec, usually a composed one.
        path: The (source, event, dest) that a run has taken: highlighted, with counts.

    Returns:
        The text, ending with a newline.

    Raises:
        MissingExtra: The package `graphviz-pure` (extra `svg`) is not installed.
        UnknownName: The path has a transition that the spec has not.
    """
    steps = tuple(path)
    return restyle(lay_out(dot(spec, steps)), picture(spec, steps), title(spec))


def as_json(spec: Spec) -> str:
    """The spec as JSON, with the ids under which phases and transitions are found in the SVG.

    Args:
        spec: Any spec.

    Returns:
        The data of `Spec.as_data`, each phase with `id`, each transition with `id` and `arrow`.
    """
    shown = picture(spec)
    arrow_of = {id(t): arrow.id for arrow in shown.arrows for line in arrow.lines for t in line.all}
    data = spec.as_data()
    for phase, row in zip(spec.phases, data["phases"], strict=True):
        row["id"] = phase_id(phase.name)
    for t, row in zip(spec.transitions, data["transitions"], strict=True):
        row |= {"id": transition_id(t), "arrow": arrow_of[id(t)]}
    return json.dumps({"spec": title(spec), "hash": spec.hash, **data}, indent=1, ensure_ascii=False) + "\n"
