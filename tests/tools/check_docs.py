"""Runs the examples in the documents and resolves their links, so that no page can go stale.

    python tests/tools/check_docs.py [FILE ...]        default: README.md and docs/*.md

Each page starts in a temporary folder with a link to `examples/`. From top to bottom:

- each ```python block is executed, all in one namespace;
- each ```console block that begins with `$ interlock` runs its commands, which must exit with 0.

A comment right above a block changes that:

- `<!-- not run: REASON -->` skips the block;
- `<!-- file: NAME -->` saves the block, before it is executed, for the commands after it;
- `<!-- exit status: N -->` is what the last command of the block must exit with.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/*.md")
LINKED = ("*.md", "docs/**/*.md")

_FENCE = re.compile(r"^ {0,3}(?P<ticks>`{3,}|~{3,}) *(?P<language>[\w+-]*)")
_COMMENT = re.compile(r"^ {0,3}<!--\s*(?P<word>not run|file|exit status)\b:?\s*(?P<value>.*?)\s*-->\s*$")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?(?P<link>[^)\s>]+)>?[^)]*\)|\b(?:src|href)=\"(?P<html>[^\"]+)\"")
_DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(?P<link>[^\s>]+)")
_HEADING = re.compile(r"^#{1,6}\s+(?P<text>.+?)\s*#*$")
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_COMMAND_SECONDS = 100


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its first line of text, and the comments right above it."""

    line: int
    language: str
    text: str
    comments: dict[str, str]


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


ON_SIM = "simulator.md"
"""Its blocks register a device for the rest of the process: tests/sim runs it."""


def pages(root: Path = ROOT) -> list[Path]:
    """The pages whose blocks run, but for `ON_SIM`."""
    found = [path for pattern in PAGES for path in sorted(root.glob(pattern))]
    return [path for path in found if path.name != ON_SIM]


def linked_pages(root: Path = ROOT) -> list[Path]:
    """The pages whose links must resolve."""
    return [path for pattern in LINKED for path in sorted(root.glob(pattern))]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    comments: dict[str, str] = {}
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if comment := _COMMENT.match(line):
            comments[comment["word"]] = comment["value"]
        elif fence := _FENCE.match(line):
            inside = []
            for _, inner in lines:
                closing = _FENCE.match(inner)
                if closing and closing["ticks"].startswith(fence["ticks"]) and not closing["language"]:
                    break
                inside.append(inner)
            yield Block(number + 1, fence["language"], "\n".join(inside) + "\n", comments)
            comments = {}
        elif line.strip():
            comments = {}


# Blocks


def run_page(path: Path, root: Path = ROOT) -> list[Problem]:
    """Runs a page's blocks; after the first that fails the rest of the page is not tried."""
    file = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    # A module of its own, registered: dataclasses and pickle look their module up by name.
    module = types.ModuleType(f"page_{re.sub(r'[^a-z0-9]', '_', path.stem.lower())}")
    with _temporary_folder(root), _registered(module):
        for block in blocks(path.read_text(encoding="utf-8")):
            message = _run_block(block, str(path), module)
            if message is not None:
                return [Problem(file, block.line, message)]
    return []


def _run_block(block: Block, path: str, module: types.ModuleType) -> str | None:
    if "not run" in block.comments:
        return None if block.comments["not run"] else "not run, without a reason"
    if name := block.comments.get("file"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(block.text, encoding="utf-8")
    if block.language == "python":
        return _run_python(block, path, module)
    if block.language == "console" and block.text.startswith("$ interlock"):
        return _run_console(block)
    return None


def _run_python(block: Block, path: str, module: types.ModuleType) -> str | None:
    printed = io.StringIO()
    try:
        # The empty lines make a traceback show the page's own line numbers.
        code = compile("\n" * (block.line - 1) + block.text, path, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)  # the project's own documents
    except (Exception, SystemExit):
        return f"the block fails\n{printed.getvalue()}{traceback.format_exc()}"
    return None


def _run_console(block: Block) -> str | None:
    commands = [line[2:] for line in block.text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    expected = int(block.comments.get("exit status", "0"))
    for position, command in enumerate(commands, start=1):
        words = shlex.split(command, comments=True)
        if words[0] != "interlock":
            return f"only `interlock` can be run here; split the block before `{command}`"
        words[0] = str(Path(sysconfig.get_path("scripts")) / "interlock")
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_COMMAND_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{command}` did not run: {error}"
        wanted = expected if position == len(commands) else 0
        if done.returncode != wanted:
            output = f"{done.stdout}{done.stderr}"
            return f"`{command}` exited with {done.returncode}, not with {wanted}\n{output}"
    return None


@contextlib.contextmanager
def _temporary_folder(root: Path) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="interlock-docs-") as folder:
        if (root / "examples").is_dir():
            Path(folder, "examples").symlink_to(root.resolve() / "examples")
        with contextlib.chdir(folder):
            yield


@contextlib.contextmanager
def _registered(module: types.ModuleType) -> Iterator[None]:
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]


# Links


def check_links(path: Path, root: Path = ROOT) -> list[Problem]:
    """The page's relative links that lead to no file, or to no heading of it."""
    file = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    problems = []
    for number, line in _prose(path.read_text(encoding="utf-8")):
        shown = re.sub(r"`[^`]*`", "``", line)  # code is no link
        found = [match["link"] or match["html"] for match in _LINK.finditer(shown)]
        found += [match["link"] for match in _DEFINITION.finditer(shown)]
        problems += [Problem(file, number, why) for link in found if (why := _broken(link, path)) is not None]
    return problems


def _broken(link: str, page: Path) -> str | None:
    if _SCHEME.match(link) or link.startswith("//"):
        return None
    name, _, anchor = link.partition("#")
    target = page.parent / unquote(name) if name else page
    if not target.exists():
        return f"the link leads to no file: {link}"
    if anchor and target.suffix == ".md" and anchor not in _anchors(target.read_text(encoding="utf-8")):
        return f"the link leads to no heading: {link}"
    return None


def _anchors(text: str) -> set[str]:
    """The anchors of the headings, as renderers make them: lower case, hyphens, numbered repeats."""
    anchors: set[str] = set()
    seen: dict[str, int] = {}
    for _, line in _prose(text):
        if heading := _HEADING.match(line):
            plain = re.sub(r"[^\w\- ]", "", heading["text"].lower()).replace(" ", "-")
            repeat = seen.get(plain, 0)
            seen[plain] = repeat + 1
            anchors.add(f"{plain}-{repeat}" if repeat else plain)
        anchors.update(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line))
    return anchors


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines outside fenced blocks."""
    ticks = ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if ticks:
            if fence and fence["ticks"].startswith(ticks) and not fence["language"]:
                ticks = ""
        elif fence:
            ticks = fence["ticks"]
        else:
            yield number, line


def main(arguments: list[str]) -> int:
    """Checks the pages given, or all."""
    given = [Path(argument).resolve() for argument in arguments]
    problems = [problem for path in given or pages() for problem in run_page(path)]
    problems += [problem for path in given or linked_pages() for problem in check_links(path)]
    for problem in problems:
        print(problem)
    print(f"documents: {len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
