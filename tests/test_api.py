"""The public surface: what `import interlock` brings, what it does not load, that it is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import interlock
from interlock import specs

PACKAGE = Path(interlock.__file__).parent


def run(program: str) -> str:
    """The output of a program in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_names_are_lazy_and_each_can_be_loaded() -> None:
    assert sorted(interlock.__all__) == sorted(interlock._LAZY)
    assert list(interlock.__all__) == sorted(interlock.__all__)
    for name in interlock.__all__:
        assert getattr(interlock, name) is not None
        assert name in dir(interlock)


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == set(interlock.__all__)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'; it has Accumulate, Adapter"):
        _ = interlock.Trainer


def test_importing_loads_nothing_else() -> None:
    program = "import sys; old = set(sys.modules); import interlock; print(*sorted(set(sys.modules) - old))"
    assert set(run(program).split()) <= {"__future__", "_typing", "typing", "interlock"} | LOADED_BY_TYPING


LOADED_BY_TYPING = set(
    run("import sys; old = set(sys.modules); import typing; print(*sorted(set(sys.modules) - old))").split()
)


@pytest.mark.parametrize("blocked", ["torch", "transitions", "rich"])
def test_import_works_without(blocked: str) -> None:
    program = f"import sys; sys.modules['{blocked}'] = None\nimport interlock, interlock.specs\n"
    program += "from interlock.backends.monitors import MONITORS\n"
    program += "print(interlock.specs.compose(interlock.specs.TRAINING, MONITORS['xla']).name)"
    assert run(program).strip() == "training on xla"


def test_no_second_copy_under_the_folders_names() -> None:
    twice = [name for name in sys.modules if name.split(".")[0] in ("engine", "backends", "specs")]
    assert twice == []


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def public(module: object, names: list[str]) -> list[tuple[str, object]]:
    """(name, object) of the classes and functions among the names, and their public methods."""
    found: list[tuple[str, object]] = []
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found.append((name, thing))
        if inspect.isclass(thing) and thing.__module__.startswith("interlock"):
            found += [
                (f"{name}.{key}", value)
                for key, value in vars(thing).items()
                if inspect.isfunction(value) and not key.startswith("_")
            ]
    return found


SURFACE = public(interlock, list(interlock.__all__)) + public(specs, list(specs.__all__))


@pytest.mark.parametrize(("name", "thing"), SURFACE, ids=[name for name, _ in SURFACE])
def test_what_is_public_says_what_it_does(name: str, thing: object) -> None:
    doc = inspect.getdoc(thing)
    assert doc, f"{name} has no docstring"
    assert doc.splitlines()[0].rstrip()[-1:] in ".:`", f"{name}: the first line is no sentence: {doc!r}"


RAISING = ["Engine", "Engine.fit", "Task", "Task.load", "Run.wait", "Run.result"]


@pytest.mark.parametrize("name", RAISING)
def test_what_raises_says_which_errors(name: str) -> None:
    thing: object = interlock
    for part in name.split("."):
        thing = getattr(thing, part)
    doc = inspect.getdoc(thing) or ""
    assert "Raises:" in doc


def test_errors_are_one_family_and_can_be_caught_from_one_place() -> None:
    errors = importlib.import_module("interlock.errors")
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, (errors.InterlockError, UserWarning)), name
        assert error.__doc__, name
