"""The page of all public names, `docs/api.md`, made from their docstrings.

`python tests/tools/api_page.py > docs/api.md` writes it; a test holds page and docstrings together.
"""

from __future__ import annotations

import inspect

import interlock
from interlock import errors

HEAD = """# Public names

What `import interlock as il` offers, each with the first sentence of its documentation: `help(il.NAME)` has
the rest. Everything else is internal, but for `interlock.specs` (what is allowed) and `interlock.backends`
(where it runs). Made from the docstrings by `tests/tools/api_page.py`.
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


if __name__ == "__main__":
    print(page(), end="")
