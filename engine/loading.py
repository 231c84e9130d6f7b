"""Loads what a command line names: `FILE.py:NAME` or `package.module:NAME`.

The file's folder (or the working directory, for a module) can be imported from while the object is
in use; afterwards the import path is what it was, and the modules that came from there are gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import LoadError
from .task import Task

FORMS = "give FILE.py:NAME or package.module:NAME"
_SHOWN = 10
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@contextmanager
def task_from(reference: str) -> Iterator[Task]:
    """The task that a reference names, or that the function it names returns.

    Args:
        reference: `FILE.py:NAME` or `package.module:NAME`; NAME may be nested: `config.small`.

    Raises:
        LoadError: It is not there, is no task, or importing it raised: then that is the cause.
    """
    with loaded(reference, Task) as task:
        yield task


@contextmanager
def loaded(reference: str, kind: type[Any]) -> Iterator[Any]:
    """An object of a kind, or what a function without arguments that returns one returns.

    Args:
        reference: As for `task_from`.
        kind: What the object has to be.

    Raises:
        LoadError: It is not there, is something else, or importing it raised: then that is the cause.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise LoadError(f"'{reference}' does not say what to load: {FORMS}")
    with _importable(_folder(place)):
        module = _module(place)
        yield _as_kind(_attribute(module, place, name, kind), reference, kind)


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _folder(place: str) -> Path:
    if not _is_file(place):
        return Path.cwd()
    file = Path(place)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise LoadError(f"the file '{place}' {what}: {FORMS}")
    if file.suffix != ".py":
        raise LoadError(f"'{place}' is no Python file: {FORMS}")
    return file.resolve().parent


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The folder is first on the import path; its modules are forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if _is_from(sys.modules[name], folder):
                del sys.modules[name]


def _is_from(module: ModuleType | None, folder: Path) -> bool:
    """Whether a module is the user's own: from the folder, and not installed in an environment below it."""
    file = getattr(module, "__file__", None)
    if not file:
        return False
    inner = Path(file).resolve()
    return inner.is_relative_to(folder) and not _INSTALLED.intersection(inner.parts)


def _module(place: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if _is_file(place) else importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not _is_file(place) and (place == missing or place.startswith(f"{missing}.")):
            raise LoadError(
                f"there is no module '{missing}', neither in '{Path.cwd()}' nor installed: {FORMS}"
            ) from None
        raise _raised(place, error) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as error:
        raise LoadError(
            f"importing '{place}' ended the program (exit status {error.code!r}): put what is to run only "
            'when it is the program itself under `if __name__ == "__main__":`'
        ) from None
    except Exception as error:
        raise _raised(place, error) from error


def _raised(place: str, error: BaseException) -> LoadError:
    return LoadError(f"importing '{place}' raised {type(error).__name__}")


def _from_file(file: Path) -> ModuleType:
    """Import a file under its own name, so that what it defines can be pickled, unless that is taken."""
    name = file.stem
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        name = f"interlock_task_{''.join(c if c.isalnum() else '_' for c in name)}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise LoadError(f"'{file}' cannot be imported: {FORMS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, place: str, name: str, kind: type[Any]) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            there = _names(module, kind)
            word = kind.__name__
            hint = f"its {word}s are {_nearest(name, there)}" if there else f"it has no {word} at all"
            raise LoadError(f"'{place}' has no '{name}': {hint}") from None
    return found


def _nearest(name: str, there: list[str]) -> str:
    """The names in words, those first that come close to the one asked for, and not too many of them."""
    near = get_close_matches(name, there)
    names = [*near, *(other for other in there if other not in near)]
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _names(module: ModuleType, kind: type[Any]) -> list[str]:
    """The objects of a kind in a module, and the functions that say they return one."""
    names = []
    for name, value in vars(module).items():
        returns = getattr(value, "__annotations__", {}).get("return") if callable(value) else None
        if isinstance(value, kind):
            names.append(name)
        elif returns is kind or (isinstance(returns, str) and returns.rpartition(".")[2] == kind.__name__):
            names.append(f"{name} (a function)")
    return names


def _as_kind(found: Any, reference: str, kind: type[Any]) -> Any:
    if isinstance(found, kind):
        return found
    word = kind.__name__
    if isinstance(found, type) or not callable(found):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"{type(found).__name__}"
        raise LoadError(f"'{reference}' is {what}, and must be a {word}, or a function that returns one")
    try:
        made = found()
    except Exception as error:
        raise LoadError(
            f"'{reference}' was called to get a {word}, and raised {type(error).__name__}"
        ) from error
    if not isinstance(made, kind):
        raise LoadError(f"'{reference}' returned {type(made).__name__}, and must return a {word}")
    return made
