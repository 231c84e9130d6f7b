"""What `--backend` and `--spec` stand for. Works without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from interlock.backends.monitors import MONITORS
from interlock.backends.registry import monitor
from interlock.specs import INFERENCE, SPECS, TRAINING, InterlockError, Spec, UnknownName, compose

FORMS = "training, inference or FILE_OR_MODULE:SPEC"
DEFAULT_BACKEND = "cpu"


class UsageError(InterlockError):
    """Options that do not go together, or a value that an option does not take."""


def readable(path: Path) -> Path:
    """The path of a file, made sure that it can be read.

    Raises:
        UsageError: It cannot.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}") from error
    return path


def writable(path: Path) -> Path:
    """The path of a file, made sure, without touching it, that it can be written.

    Raises:
        UsageError: It cannot.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"'{path}' cannot be written: it is a folder, or its folder is missing or protected")
    return path


def titled(backend: str, monitor: str) -> str:
    """A backend in words: one that has no lifecycle of its own says whose it is on."""
    return backend if backend == monitor else f"{backend} (on the lifecycle of {monitor})"


def spec_named(name: str) -> Spec:
    """A lifecycle by its name, or one of the user's by FILE_OR_MODULE:NAME.

    Raises:
        UnknownName: There is no such lifecycle.
        LoadError: The user's cannot be loaded.
    """
    if name in SPECS:
        return SPECS[name]
    if ":" not in name:
        raise UnknownName("spec", name, SPECS, f"Give {FORMS}.")
    from .loading import loaded

    with loaded(name, Spec) as spec:
        return spec  # type: ignore[no-any-return]


def composed(spec: str, backend: str | None) -> Spec:
    """The one spec that the options stand for.

    A spec of the user's own is taken as it is, unless a backend is given; a built-in one is
    composed with a backend's monitor, by default that of the CPU.

    Raises:
        InterlockError: One of the names is unknown, or the two cannot be composed.
    """
    found = spec_named(spec)
    if backend is None and spec not in SPECS:
        return found
    return _compose(found, backend or DEFAULT_BACKEND)


def all_composed(specs: Iterable[str], backends: Iterable[str]) -> Iterator[Spec]:
    """Every combination.

    Raises:
        InterlockError: One of the names is unknown, or the two cannot be composed.
    """
    found = [spec_named(name) for name in specs]
    yield from (_compose(spec, name) for spec in found for name in backends)


def built_in_specs() -> tuple[str, ...]:
    """The lifecycles that Interlock brings."""
    return TRAINING.name, INFERENCE.name


def checkable_backends() -> tuple[str, ...]:
    """The backends whose monitors are part of Interlock."""
    return tuple(MONITORS)


def of_journal(header: dict[str, str], spec: str | None, backend: str | None) -> Spec:
    """The spec that bound the run of a journal, by the names in its header.

    Args:
        header: The journal's first line.
        spec: What the user says it is, instead.
        backend: What the user says it is, instead.

    Raises:
        InterlockError: The names are not known here.
    """
    if spec is not None and spec not in SPECS:
        return composed(spec, backend)
    return composed(spec or header["lifecycle"], backend or header["backend"])


def _compose(spec: Spec, backend: str) -> Spec:
    try:
        return compose(spec, monitor(backend))
    except ImportError as error:
        text = f"the monitor of '{backend}' comes with its adapter, which needs {error.name}"
        raise InterlockError(text) from error
