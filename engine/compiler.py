"""Loads torch's compiler, once per process and one thread at a time.

Its parts import one another in a circle: two threads that begin at different ends of it find half-loaded
modules, and the process has no compiler any more. And something in that import keeps the frames that it was
called from, with their locals, until the garbage collector runs: the first run's model would outlive the
run. So it is done under a lock, and on a thread of its own, which has no callers.
"""

from __future__ import annotations

import threading
from functools import partial
from importlib import import_module
from typing import Any

from .deadline import bounded

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
                _loaded[module] = bounded(partial(import_module, module), threading.TIMEOUT_MAX, "import")
        return _loaded[name]
