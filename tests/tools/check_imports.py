"""Judges which module may import which, by reading the sources; nothing is imported.

    python tests/tools/check_imports.py [ROOT]

Prints `file:line: message` for each violation and exits with 1 if there is one. The rules are the tables
below. Three moments of an import are told apart: at *load* (module or class level), *lazy* (inside a
function) and for *typing* only (under `if TYPE_CHECKING:`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOAD, LAZY, TYPING = "load", "lazy", "typing"

# A folder and the package that it is installed as.
PACKAGES = {"specs": "interlock.specs", "backends": "interlock.backends", "engine": "interlock"}

# Which folders a folder may import, at any moment.
LOCAL = {
    "specs": {"specs"},
    "backends": {"specs", "backends"},
    "engine": {"specs", "backends", "engine"},
}

# Third-party packages allowed at any moment: what `pip install interlock` brings, and no more.
ALWAYS = {
    "specs": {"transitions"},
    "backends": {"torch"},
    "engine": {"torch", "transitions", "rich"},
}

# Third-party packages allowed only inside functions; None means any (optional features).
LAZILY: dict[str, set[str] | None] = {
    "specs": set(),
    "backends": {"torch_xla"},  # importing it early starts a client, which breaks later launches
    "engine": None,
}

# Files with wider rights than their folder.
EXTRA = {
    # invariant suites, shipped for anybody's tests
    **{f"specs/{part}.py": {"torch", "hypothesis"} for part in ("suite", "suite_draws", "suite_profiles")},
    **{f"specs/suite_{part}.py": {"torch"} for part in ("checks", "device", "life", "setup")},
    "engine/pytest_plugin.py": {"pytest"},
    "backends/contract.py": {"pytest"},  # tests, shipped for whoever writes an adapter
}

# Files that may import further folders: contract and suites carry out whole runs, and nothing imports them.
WIDER = {
    "backends/contract.py": {"engine"},
    "specs/suite.py": {"backends", "engine"},
    **{
        f"specs/suite_{part}.py": {"backends", "engine"}
        for part in ("checks", "device", "draws", "life", "operations", "paths", "setup")
    },
}

# Types of torch may be named everywhere: that import never runs.
TYPED_EVERYWHERE = {"torch"}

# Loading these must not load torch, not even through another local module: `import interlock`,
# `interlock check` and `interlock graph` work where torch is missing.
TORCH_FREE = (
    "specs/__init__.py",
    "backends/__init__.py",
    "backends/monitors.py",
    "backends/registry.py",
    "engine/__init__.py",
    "engine/__main__.py",
    "engine/cli.py",
)

# Folders whose files are only checked for importing a source folder by its own name.
OUTSIDE = ("tests", "examples", "benchmarks")


@dataclass(frozen=True)
class Import:
    """One imported module, by absolute name, and when the import runs."""

    line: int
    module: str
    moment: str


@dataclass(frozen=True, order=True)
class Violation:
    """One import that a rule forbids."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def imports(source: str, package: str, file: str = "<source>") -> list[Import]:
    """All imports of a module's source, where `package` is what its relative imports start from."""
    return list(_walk(ast.parse(source, file).body, package, LOAD))


def _walk(body: list[ast.stmt], package: str, moment: str) -> Iterator[Import]:
    for statement in body:
        if isinstance(statement, ast.If) and _is_type_checking(statement.test):
            yield from _walk(statement.body, package, TYPING)
            yield from _walk(statement.orelse, package, moment)
        else:
            yield from _visit(statement, package, moment)


def _visit(node: ast.AST, package: str, moment: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, alias.name, moment) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        # `from p import q` may load the module p.q: keep the longest name, `_folder` reads it.
        yield from (Import(node.lineno, f"{base}.{alias.name}", moment) for alias in node.names)
    elif isinstance(node, ast.Call) and (name := _dynamic(node)) is not None:
        yield Import(node.lineno, name, moment)
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for field, value in ast.iter_fields(node):
        # Decorators, defaults and annotations of a function run when it is defined.
        inner = LAZY if function and field == "body" and moment == LOAD else moment
        if isinstance(value, ast.AST):
            yield from _visit(value, package, inner)
        elif isinstance(value, list):
            if value and isinstance(value[0], ast.stmt):
                yield from _walk(value, package, inner)
            else:
                for item in value:
                    if isinstance(item, ast.AST):
                        yield from _visit(item, package, inner)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def _dynamic(node: ast.Call) -> str | None:
    """The module of `import_module("x")` or `__import__("x")`, when it is written as a literal."""
    name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    if name in {"import_module", "__import__"} and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return None if argument.value.startswith(".") else argument.value
    return None


def _folder(module: str) -> str | None:
    """The source folder that holds an `interlock` module; None for a module of another package."""
    top, _, rest = module.partition(".")
    if top != "interlock":
        return None
    part = rest.partition(".")[0]
    return part if part in {"specs", "backends"} else "engine"


def check(root: Path) -> list[Violation]:
    """All violations in the tree at `root`, sorted by place."""
    violations: list[Violation] = []
    modules: dict[str, tuple[str, list[Import]]] = {}  # module name -> file, imports
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            inner = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in inner if part != "__init__")])
            within = name if path.stem == "__init__" else name.rpartition(".")[0]
            found = imports(path.read_text(encoding="utf-8"), within, file)
            modules[name] = file, found
            judged = ((item.line, _judge(folder, file, item)) for item in found)
            violations.extend(Violation(file, line, message) for line, message in judged if message)
    for folder in OUTSIDE:
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            found = imports(path.read_text(encoding="utf-8"), "", file)
            copies = ((item.line, _second_copy(item)) for item in found)
            violations.extend(Violation(file, line, message) for line, message in copies if message)
    violations.extend(_torch_at_load(modules))
    return sorted(set(violations))


def _judge(folder: str, file: str, item: Import) -> str | None:
    top = item.module.partition(".")[0]
    if (message := _second_copy(item)) is not None:
        return message
    if (target := _folder(item.module)) is not None:
        local = LOCAL[folder] | WIDER.get(file, set())
        if target in local:
            return None
        allowed = ", ".join(sorted(local))
        return f"{folder}/ imports {item.module} of {target}/; it may import from {allowed} only"
    if top in sys.stdlib_module_names or top in ALWAYS[folder] or top in EXTRA.get(file, ()):
        return None
    if item.moment == TYPING and top in TYPED_EVERYWHERE:
        return None
    lazily = LAZILY[folder]
    if lazily is None or top in lazily:
        if item.moment != LOAD:
            return None
        return f"{folder}/ imports {top} when it loads; it may do so only inside a function"
    allowed = ", ".join(sorted(ALWAYS[folder] | EXTRA.get(file, set())))
    return f"{folder}/ imports {item.module}; it may import the standard library and {allowed} only"


def _second_copy(item: Import) -> str | None:
    top = item.module.partition(".")[0]
    if top in PACKAGES:
        return f"imports {item.module} by the folder's name, a second copy; write {PACKAGES[top]}"
    return None


def _torch_at_load(modules: dict[str, tuple[str, list[Import]]]) -> Iterator[Violation]:
    """Loads of torch from the torch-free files, direct or through local modules, named by the way there."""
    names = {file: name for name, (file, _) in modules.items()}
    for start in TORCH_FREE:
        if start not in names:
            continue
        seen = {names[start]}
        # Each entry: a module, and the import in the torch-free file that led to it with the way since.
        pending: list[tuple[str, int | None, list[str]]] = [(names[start], None, [])]
        while pending:
            name, line, way = pending.pop(0)
            file, found = modules[name]
            for item in found:
                if item.moment != LOAD:
                    continue
                at = item.line if line is None else line
                if item.module.partition(".")[0] in {"torch", "torch_xla"}:
                    through = " -> ".join([*way, f"{item.module} ({file}:{item.line})"])
                    yield Violation(start, at, f"loads torch, and must work without it: {through}")
                for loaded in _loads(item.module, modules):
                    if loaded not in seen:
                        seen.add(loaded)
                        pending.append((loaded, at, [*way, modules[loaded][0]]))


def _loads(module: str, modules: dict[str, tuple[str, list[Import]]]) -> Iterator[str]:
    """The local modules that an import of `module` executes: each parent package, then the module."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        if (name := ".".join(parts[:end])) in modules:
            yield name


def main(arguments: list[str]) -> int:
    """Checks the tree given, or the one that holds this file."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[2]
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"import directions: {len(violations)} violation{'' if len(violations) == 1 else 's'}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
