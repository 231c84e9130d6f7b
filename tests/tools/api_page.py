"""The pages that are made of docstrings: `docs/api.md`, all public names, and `docs/reference.md`, in full.

`python tests/tools/api_page.py` writes both; a test holds pages and docstrings together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import interlock
from interlock import errors

DOCS = Path(__file__).parents[2] / "docs"

REFERENCE_HEAD = """# Reference

Every public name with its whole documentation, as `help(il.NAME)` shows it. [Public names](api.md) is
the short form. Made from the docstrings by `tests/tools/api_page.py`.
"""

HEAD = """# Public names

What `import interlock as il` offers, each with the first sentence of its documentation: the
[reference](reference.md) has the rest. Everything else is internal, but for `interlock.specs` (what is
allowed), `interlock.backends` (where it runs) and the modules that the other pages name. Made from the
docstrings by `tests/tools/api_page.py`.
"""


def page() -> str:
    """The text of the page."""
    names = [name for name in interlock.__all__ if name not in (*errors.__all__, "errors")]
    rows = [f"| `il.{name}` | {sentence(getattr(interlock, name))} |" for name in names]
    raised = [f"| `il.errors.{name}` | {sentence(getattr(errors, name))} |" for name in errors.__all__]
    table = ["| name | what it is |", "|---|---|"]
    aliases = ", ".join(f"`il.{name}`" for name in interlock.__all__ if name in errors.__all__)
    return "\n".join(
        [
            HEAD,
            *table,
            *rows,
            "",
            "## Errors and warnings",
            "",
            f"All errors are `InterlockError`; {aliases} are there under the short name as well.",
            "",
            *table,
            *raised,
            "",
        ]
    )


def sentence(thing: object) -> str:
    """The first paragraph of a docstring, on one line of a table."""
    text = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def reference() -> str:
    """The text of the reference."""
    names = [name for name in interlock.__all__ if name not in (*errors.__all__, "errors")]
    lines = [REFERENCE_HEAD]
    for name in names:
        lines += _whole(f"il.{name}", getattr(interlock, name))
    lines += ["## Errors and warnings", ""]
    for name in errors.__all__:
        lines += ["```text", f"il.errors.{name}", *_documented(getattr(errors, name)), "```", ""]
    return "\n".join(lines)


def _whole(name: str, thing: object) -> Iterator[str]:
    """One public name: its documentation, and that of what it can do."""
    yield from (f"## {name}", "", "```text", f"{name}{_signature(thing)}", *_documented(thing), "```", "")
    members = vars(thing).items() if inspect.isclass(thing) else ()
    for key, value in members:
        function = value.fget if isinstance(value, property) else value
        if key.startswith("_") or not inspect.isfunction(function):
            continue
        short = f"{name.removeprefix('il.')}.{key}"
        called = "" if isinstance(value, property) else _signature(function)
        yield from ("```text", f"{short}{called}", *_documented(function), "```", "")


def _signature(thing: object) -> str:
    if not callable(thing) or any(thing is made for made in MADE_BY_THE_ENGINE):
        return ""
    named = inspect.signature(thing).parameters.values()
    given = [one.replace(annotation=inspect.Parameter.empty) for one in named if one.name != "self"]
    return str(inspect.Signature(given))


def _documented(thing: object) -> list[str]:
    text = inspect.getdoc(thing) or ""
    return ["", *(f"    {line}".rstrip() for line in text.splitlines())]


_MADE = ("Brought", "Created", "Placed", "Ready", "Training", "Run", "Stepper")
MADE_BY_THE_ENGINE = tuple(getattr(interlock, name) for name in _MADE)
"""Classes whose constructors are not for users."""


if __name__ == "__main__":
    (DOCS / "api.md").write_text(page())
    (DOCS / "reference.md").write_text(reference())
