"""Loads torch's compiler, once per process and one thread at a time.

Its parts import one another in a circle: two threads that begin at different ends of it find half-loaded
modules, and the process has no compiler any more. And something in that import keeps the frames that it was
called from, with their locals, until the garbage collector runs: the first run's model would outlive the
run. So it is done under a lock, and on a thread of its own, which has no callers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

COMPILER = "torch._dynamo"
"""What the first optimizer of a process would load otherwise."""
SETTINGS = "torch._inductor.config"

_lock = threading.Lock()
_loaded: dict[str, Any] = {}


def load(name: str = COMPILER) -> Any:
    """A module of the compiler, loaded wholly.

    Args:
        name: `COMPILER` or `SETTINGS`.

    Raises:
        BaseException: What its import raised.
    """
    with _lock:
        for module in dict.fromkeys((COMPILER, name)):
            if module not in _loaded:
                _loaded[module] = _on_new_thread(partial(import_module, module))
        return _loaded[name]


def _on_new_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="interlock import")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
