"""Drawings that live in files: how they are marked, whether they are stale, how they are renewed.

A drawing in a file begins with a comment that says how it was made:

    %% interlock graph --spec training --backend cuda

In a Markdown file that is the first line of a ```mermaid block, and there may be several blocks;
in a file of its own (`.mmd`, `.dot`, `.gv`, `.svg`) it is the first line; in JSON it is the first
member. `stale` draws again with these options and says what differs. What the options *mean* is the
command line's business: it hands in a function from options to spec.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .drawing import as_json, dot, mermaid, svg
from .errors import DrawingError, InterlockError
from .model import Spec

Options = tuple[str, ...]
"""The words after `interlock graph`, as a shell splits them."""

_DRAW: dict[str, Callable[[Spec], str]] = {
    ".md": mermaid,
    ".mmd": mermaid,
    ".mermaid": mermaid,
    ".dot": dot,
    ".gv": dot,
    ".svg": svg,
    ".json": as_json,
}
_MARKER = re.compile(r'^\s*(?:%%|//|<!--|"made_by": ")\s*interlock graph\b(?P<options>.*?)\s*(?:-->|",)?\s*$')
_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<ticks>`{3,}|~{3,})\s*mermaid\s*$")
_TITLE = re.compile(r'\bspec"?: "?(?P<name>.*) \(hash (?P<hash>[0-9a-f]+)\)')
_SHOWN = 6
_HYPHENS = "\N{HYPHEN}\N{HYPHEN}"  # two of the plain ones may not stand in a comment of XML


def check_drawing(text: str, file_text: str) -> list[str]:
    """How a drawing in a file differs from what it should be.

    Args:
        text: The drawing as it should be.
        file_text: The drawing as it is; other line endings and a missing last newline do not count.

    Returns:
        Why it differs, then the lines that do; empty if it is up to date.
    """
    wanted, found = text.splitlines(), file_text.splitlines()
    if wanted == found:
        return []
    return [_reason(text, file_text), *_lines(wanted, found)]


def marked(text: str, options: Options) -> str:
    """A drawing with the comment that says how it was made.

    Args:
        text: What `mermaid`, `dot`, `svg` or `as_json` returned.
        options: The words after `interlock graph`.
    """
    command = " ".join(["interlock graph", *map(shlex.quote, options)])
    if text.startswith("{\n"):
        return f'{{\n "made_by": "{command}",\n{text[2:]}'
    if text.startswith("<"):
        command = command.replace("--", _HYPHENS)
        return f"<!-- {command} -->\n{text}"
    return f"{'//' if text.startswith('//') else '%%'} {command}\n{text}"


def stale(file: Path, spec_of: Callable[[Options], Spec]) -> list[str]:
    """What is stale in a file.

    Args:
        file: A Markdown file with marked blocks, or a marked drawing.
        spec_of: The spec that options stand for; may raise `InterlockError`.

    Returns:
        One finding for each difference, with its place; empty if all is up to date. A file in which
        there is nothing to check is a finding too.

    Raises:
        OSError: The file cannot be read.
    """
    blocks = list(_blocks(file))
    found: list[str] = []
    for block in blocks:
        try:
            differences = check_drawing(_redrawn(file, block, spec_of), block.text)
        except InterlockError as error:
            differences = [f"cannot be checked: {error}"]
        found += [f"{file}:{block.line}: {difference}" for difference in differences]
    if not blocks:
        found.append(f"{file}: nothing to check: no drawing that begins with '%% interlock graph ...'")
    return found


def renewed(file: Path, spec_of: Callable[[Options], Spec]) -> str:
    """The text of a file with all of its drawings as they should be.

    Raises:
        InterlockError: The options of a drawing are not understood.
        OSError: The file cannot be read.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    for block in reversed(list(_blocks(file))):
        new = _redrawn(file, block, spec_of).splitlines()
        begin = block.line - 1
        lines[begin : begin + block.length] = [block.indent + line if line else "" for line in new]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Block:
    """One marked drawing: where it begins, its text without indentation, what its marker says."""

    line: int
    length: int
    text: str
    options: str
    indent: str = ""


def _blocks(file: Path) -> Iterator[_Block]:
    lines = file.read_text(encoding="utf-8").splitlines()
    if file.suffix not in _DRAW:
        raise DrawingError(f"{file}: the ending of a drawing's file is one of {', '.join(_DRAW)}")
    if file.suffix != ".md":
        marker = next(filter(None, map(_MARKER.match, lines[:2])), None)
        if marker:
            yield _Block(1, len(lines), "\n".join(lines), _options(marker))
        return
    end = 0
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if number < end or fence is None:
            continue
        closing = re.compile(rf"^ {{0,3}}{fence['ticks']}{fence['ticks'][0]}*\s*$")
        end = next((n for n in range(number + 1, len(lines)) if closing.match(lines[n])), len(lines))
        inside = [text.removeprefix(fence["indent"]) for text in lines[number + 1 : end]]
        marker = _MARKER.match(inside[0]) if inside else None
        if marker:
            yield _Block(number + 2, len(inside), "\n".join(inside), _options(marker), fence["indent"])


def _options(marker: re.Match[str]) -> str:
    return marker["options"].strip().replace(_HYPHENS, "--")


def _redrawn(file: Path, block: _Block, spec_of: Callable[[Options], Spec]) -> str:
    try:
        options = tuple(shlex.split(block.options))
    except ValueError as error:
        raise DrawingError(f"the options '{block.options}' cannot be split: {error}") from error
    return marked(_DRAW[file.suffix](spec_of(options)), options)


def _reason(text: str, file_text: str) -> str:
    """Why they differ, from the comments in which drawings name their spec."""
    wanted, found = _TITLE.search(text), _TITLE.search(file_text)
    if found is None or wanted is None:
        return "it names no spec, so it was not drawn by Interlock, or was edited"
    if found["name"] != wanted["name"]:
        return f"it shows the spec '{found['name']}', and should show '{wanted['name']}'"
    if found["hash"] == wanted["hash"]:
        return (
            f"the spec is the same (hash {found['hash']}), the drawing is not: it was edited, "
            "or drawn by another version of Interlock or graphviz-pure"
        )
    if file_text.replace(found["hash"], wanted["hash"]).splitlines() == text.splitlines():
        return f"the spec has changed (hash {found['hash']}, now {wanted['hash']}), but nothing that is drawn"
    return f"the spec has changed since it was drawn (hash {found['hash']}, now {wanted['hash']})"


def _lines(wanted: list[str], found: list[str]) -> list[str]:
    """The first few lines that differ."""
    out: list[str] = []
    for number, line in _numbered(difflib.unified_diff(found, wanted, lineterm="", n=0)):
        verb = "has" if line[0] == "-" else "lacks"
        out.append(f"line {number} {verb} {_short(line[1:].strip())}")
    more = len(out) - _SHOWN
    return [*out[:_SHOWN], f"and {more} more lines"] if more > 0 else out


def _numbered(diff: Iterator[str]) -> Iterator[tuple[int, str]]:
    """(line of the file, `-` or `+` and text) of a unified diff without context."""
    number = 0
    for line in diff:
        if line.startswith(("---", "+++")) and not number:
            continue
        if line.startswith("@@"):
            number = max(1, int(line.split()[1].lstrip("-").partition(",")[0]))
        else:
            yield number, line
            number += line[0] == "-"


def _short(text: str, width: int = 90) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
