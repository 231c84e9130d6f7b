"""`interlock graph`: draws lifecycles and the paths of runs. Needs no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from interlock.specs import SPECS, Spec
from interlock.specs.journal import path_of, read_journal

from .choices import UsageError, composed, of_journal, readable
from .messages import say

FORMATS = ("mermaid", "dot", "svg", "json", "promela")
SUFFIXES = {
    ".mmd": "mermaid",
    ".mermaid": "mermaid",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
    ".json": "json",
    ".pml": "promela",
    ".promela": "promela",
}
_CHECKED = (".md", ".mmd", ".mermaid", ".dot", ".gv", ".svg", ".json")


def run_graph(options: Namespace) -> int:
    """Draw a lifecycle, or compare (or renew) the drawings in a file."""
    file = options.check or options.renew
    if file is not None:
        given = [f"--{n}" for n in ("backend", "spec", "trace", "format", "output") if getattr(options, n)]
        if given:
            raise UsageError(
                f"{', '.join(given)}: a drawing in a file says itself how it was made; leave this out"
            )
        return _compare(file) if options.check else _renew(file)
    kind = _format(options)
    spec, path = composed(options.spec or SPECS["training"].name, options.backend), None
    if options.trace is not None:
        journal = read_journal(readable(options.trace))
        spec = of_journal(journal.header, options.spec, options.backend)
        path = path_of(journal)
    text = drawn(kind, spec, path)
    if path is None and kind != "promela":
        text = _marked(text, options)
    if options.output is None:
        say(text.rstrip("\n"))
    else:
        write(options.output, text)
    return 0


def drawn(kind: str, spec: Spec, path: Iterable[tuple[str, str, str]] | None = None) -> str:
    """A drawing of a spec as text, with the path of a run if there is one.

    Raises:
        InterlockError: The path is not one of this spec, or the package that draws SVG is missing.
    """
    from interlock.specs import drawing
    from interlock.specs.promela import promela

    match kind:
        case "promela":
            return promela(spec)
        case "json":
            return drawing.as_json(spec)
        case "svg":
            return drawing.svg(spec, path or ())
        case "dot":
            return drawing.dot(spec, path or ())
        case _:
            return drawing.mermaid(spec, path or ())


def format_of(path: Path) -> str:
    """The format that a file's name asks for.

    Raises:
        UsageError: It ends in none of those known.
    """
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        known = ", ".join(SUFFIXES)
        raise UsageError(f"'{path}': the format is told by the file's ending, one of {known}")
    return found


def write(path: Path, text: str) -> None:
    """Write a text file, completely or not at all.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        part = path.with_name(f".{path.name}.part") if not path.exists() or path.is_file() else path
        part.write_text(text, encoding="utf-8")
        if part != path:
            part.replace(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written ({error.strerror}): choose another file") from error


def _format(options: Namespace) -> str:
    if options.format:
        kind: str = options.format
    else:
        kind = format_of(options.output) if options.output is not None else "mermaid"
    if options.trace is not None and kind in ("json", "promela"):
        raise UsageError(f"--trace shows a run's path, which the format {kind} has no place for")
    return kind


def _marked(text: str, options: Namespace) -> str:
    from interlock.specs.embedded import marked

    words = []
    for name in ("spec", "backend"):
        if value := getattr(options, name):
            words += [f"--{name}", value]
    return marked(text, tuple(words))


def _spec_of(words: tuple[str, ...]) -> Spec:
    """The spec of the options that a drawing in a file carries."""
    from .cli import parser

    try:
        options = parser(exits=False).parse_args(["graph", *words])
    except ValueError as error:
        raise UsageError(f"its options are not those of `interlock graph`: {error}") from error
    return composed(options.spec or SPECS["training"].name, options.backend)


def _compare(file: Path) -> int:
    from interlock.specs.embedded import stale

    findings = stale(_drawings(file), _spec_of)
    for finding in findings:
        say(finding)
    if findings:
        say(f"to draw anew: interlock graph --renew {file}")
    else:
        say(f"{file}: up to date")
    return 1 if findings else 0


def _renew(file: Path) -> int:
    from interlock.specs.embedded import renewed

    before = _drawings(file).read_text(encoding="utf-8")
    after = renewed(file, _spec_of)
    if after != before:
        write(file, after)
    say(f"{file}: {'drawn anew' if after != before else 'up to date'}")
    return 0


def _drawings(file: Path) -> Path:
    if file.suffix not in _CHECKED:
        raise UsageError(f"'{file}': drawings are looked for in files ending in {', '.join(_CHECKED)}")
    return readable(file)
