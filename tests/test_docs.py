"""Documents hold: examples run, docstrings' too, and links resolve; the checker finds planted errors."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
from tools import check_docs

ROOT = check_docs.ROOT


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", check_docs.pages(), ids=name)
def test_the_examples_of_a_page_run(page: Path) -> None:
    assert [str(problem) for problem in check_docs.run_page(page)] == []


@pytest.mark.parametrize("page", check_docs.linked_pages(), ids=name)
def test_the_links_of_a_page_resolve(page: Path) -> None:
    assert [str(problem) for problem in check_docs.check_links(page)] == []


def modules() -> list[str]:
    """The installed package's modules, found without importing them: only the package itself is."""
    package = importlib.import_module("interlock")
    folder = Path(package.__path__[0])
    found = [
        ".".join(("interlock", *path.relative_to(folder).with_suffix("").parts))
        for path in sorted(folder.rglob("*.py"))
    ]
    return [module.removesuffix(".__init__") for module in found if not module.endswith("__main__")]


@pytest.mark.parametrize("module", modules())
def test_the_examples_of_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_all_modules_are_installed() -> None:
    package = importlib.import_module("interlock")
    found = {info.name for info in pkgutil.walk_packages(package.__path__, "interlock.")}
    assert {module for module in modules() if module != "interlock"} <= found


# The checker itself


def run(folder: Path, text: str) -> list[str]:
    page = folder / "page.md"
    page.write_text(text)
    return [str(problem) for problem in check_docs.run_page(page, folder)]


def links(folder: Path, text: str) -> list[str]:
    page = folder / "page.md"
    page.write_text(text)
    return [str(problem) for problem in check_docs.check_links(page, folder)]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        pytest.param(
            "# A\n\n```python\nx = 1\n1 / 0\n```\n", 4, 'page.md", line 5, in <module>', id="exception"
        ),
        pytest.param("```python\nx = (\n```\n", 2, "SyntaxError", id="syntax error"),
        pytest.param("```python\nraise SystemExit(0)\n```\n", 2, "SystemExit", id="exit"),
        pytest.param("```python\nprint('shown')\nundefined\n```\n", 2, "shown", id="what was printed"),
        pytest.param("<!-- not run: -->\n```python\npass\n```\n", 3, "without a reason", id="no reason"),
        pytest.param("<!-- not run -->\n```python\npass\n```\n", 3, "without a reason", id="no colon"),
        pytest.param(
            "<!-- not run: slow -->\ntext between\n```python\n1 / 0\n```\n",
            4,
            "ZeroDivisionError",
            id="comment of something else",
        ),
        pytest.param(
            "```python\nx = 1\n```\n<!-- not run: slow -->\n```python\n1/0\n```\n```python\ny\n```",
            9,
            "'y'",
            id="comment of one block only",
        ),
        pytest.param(
            "```console\n$ interlock no-such-command\n```\n",
            2,
            "`interlock no-such-command` exited with",
            id="command",
        ),
        pytest.param(
            "```console\n$ interlock --help\n$ ls\n```\n",
            2,
            "split the block before `ls`",
            id="other command",
        ),
        pytest.param(
            "<!-- exit status: 1 -->\n```console\n$ interlock --help\n```\n",
            3,
            "with 0, not with 1",
            id="exit status",
        ),
    ],
)
def test_finds_the_planted_failure(tmp_path: Path, text: str, line: int, says: str) -> None:
    (found,) = run(tmp_path, text)
    assert found.startswith(f"page.md:{line}: ")
    assert says in found


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n```\ntext\n```python\nassert x == 1\n```\n",
        "<!-- not run: needs a device -->\n\n```python\n1 / 0\n```\n",
        "```console\n$ pip install interlock\n```\n```text\n1 / 0\n```\n",
        "````text\n```python\n1 / 0\n```\n````\n",
        "```console\n$ interlock \\\n    --help\nusage: ...\n```\n",
        "```python\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n```\n",
    ],
)
def test_accepts_what_is_right(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text) == []


def test_a_saved_block_is_there_for_the_next(tmp_path: Path) -> None:
    saved = "<!-- file: a/b.py -->\n```python\nx = 1\n```\n"
    code = "from pathlib import Path\nassert Path('a/b.py').read_text() == 'x = 1\\n'\n"
    assert run(tmp_path, f"{saved}```python\n{code}```\n") == []


def test_a_page_runs_in_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "a.py").touch()
    before, loaded = Path.cwd(), set(sys.modules)
    code = "import pathlib\nassert pathlib.Path('examples/a.py').exists()\npathlib.Path('left').touch()\n"
    assert run(tmp_path, f"```python\n{code}```\n") == []
    assert Path.cwd() == before
    assert set(sys.modules) == loaded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["examples", "page.md"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("see [this](gone.md)\n", 1),
        ("\n![this](gone.png)\n", 2),
        ('<img src="gone.svg">\n', 1),
        ("[this](#no-heading)\n", 1),
        ("[this](other.md#no-heading)\n", 1),
        ("[this][a]\n\n[a]: gone.md\n", 3),
        ("```text\n[x](y)\n```\n[this](gone.md)\n", 4),
    ],
)
def test_finds_the_planted_broken_link(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "other.md").write_text("# Some heading\n")
    (found,) = links(tmp_path, text)
    assert found.startswith(f"page.md:{line}: the link leads to no ")


def test_accepts_links_that_resolve(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Some `heading`, twice\n## Some heading twice\n")
    text = (
        "# Here\n[a](other.md) [b](#here) [c](other.md#some-heading-twice-1) [d](https://example.org/x) "
        "`[e](gone.md)` [f](<other.md>) [g](other.md 'title')\n```text\n[h](gone.md)\n```\n"
    )
    assert links(tmp_path, text) == []
