"""All public names are documented in one place, `docs/api.md`, and as their docstrings say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from tools import api_page

import interlock as il
from interlock import errors

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == api_page.page(), "run: python tests/tools/api_page.py"
    assert PAGE.with_name("reference.md").read_text() == api_page.reference(), "run the same"


def test_each_name_is_on_it_once() -> None:
    named = re.findall(r"^\| `il\.([\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    short = [name for name in il.__all__ if name not in (*errors.__all__, "errors")]
    assert named == [*short, *(f"errors.{name}" for name in errors.__all__)]


def test_each_line_says_something() -> None:
    said = [line.split(" | ")[1].rstrip(" |") for line in PAGE.read_text().splitlines() if "| `il." in line]
    assert all(len(text.split()) >= 3 for text in said)


def members() -> list[Any]:
    """(name, function) of the public methods and constructors of the public classes of this package."""
    found = []
    for name in il.__all__:
        kind = getattr(il, name)
        if not inspect.isclass(kind) or not kind.__module__.startswith("interlock"):
            continue
        if "__init__" in vars(kind) and not issubclass(kind, (BaseException, tuple)):
            found.append(pytest.param(kind, vars(kind)["__init__"], id=name))
        found += [
            pytest.param(value, value, id=f"{name}.{key}")
            for key, value in vars(kind).items()
            if inspect.isfunction(value) and not key.startswith("_")
        ]
    return found


def undocumented(documented: Any, function: Any) -> list[str]:
    """What of a function its documentation leaves out: arguments, what it returns, what it raises itself."""
    text = inspect.getdoc(documented) or ""
    parameters = list(inspect.signature(function).parameters)[1:]
    if documented in MADE_BY_THE_ENGINE or "arguments as for" in text:
        parameters = []
    missing = [name for name in parameters if not re.search(rf"\b{name}\b", text)]
    if len(parameters) > 1 and not re.search("Args:|Attributes:", text):
        missing.append("Args:")
    returned = str(inspect.signature(function).return_annotation)
    if (
        parameters
        and returned not in ("None", "NoReturn")
        and not re.search("Returns:|^(The|A|An|Whether) ", text)
    ):
        missing.append("Returns:")
    if re.search(r"^\s+raise \w+\(", source(function), re.MULTILINE) and "Raises:" not in text:
        missing.append("Raises:")
    return missing


MADE_BY_THE_ENGINE = (il.Brought, il.Created, il.Placed, il.Ready, il.Training, il.Run)
"""Classes whose constructors are not for users."""


def source(function: Any) -> str:
    """Of a function; nothing for one that `dataclass` has made."""
    return "" if function.__code__.co_filename == "<string>" else inspect.getsource(function)


@pytest.mark.parametrize(("documented", "function"), members())
def test_arguments_results_and_errors_are_documented(documented: Any, function: Any) -> None:
    assert undocumented(documented, function) == []


def test_what_is_left_out_is_found() -> None:
    """Planted."""

    def bare(self: Any, one: int, two: int) -> int:
        """Do it."""
        raise ValueError(one)

    assert undocumented(bare, bare) == ["one", "two", "Args:", "Returns:", "Raises:"]
