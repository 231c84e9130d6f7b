"""Reads the switches of a process for `process_state`: the interpreter's, logging's, numpy's, torch's.

Reading loads nothing and changes nothing: of a package that is not loaded nothing is read.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

_TINY = 5e-324
"""The smallest number: nothing is left of it where such numbers are taken for zero."""
_FLAGS = {
    "float32 matmul precision": "_get_float32_matmul_precision",
    "cuda.matmul.allow_tf32": "_get_cublas_allow_tf32",
    "cudnn.allow_tf32": "_get_cudnn_allow_tf32",
    "cudnn.enabled": "_get_cudnn_enabled",
    "mkldnn.enabled": "_get_mkldnn_enabled",
    "attention: flash": "_get_flash_sdp_enabled",
    "attention: memory efficient": "_get_mem_efficient_sdp_enabled",
    "attention: math": "_get_math_sdp_enabled",
    "attention: cudnn": "_get_cudnn_sdp_enabled",
    "modes of functions": "_len_torch_function_stack",
    "modes of operators": "_len_torch_dispatch_stack",
}
"""Functions of `torch._C`; one that a version of torch does not have is not read."""


def interpreter() -> dict[str, Any]:
    """Collector, limits, tracing, search path, mask and timers of signals, mode of new files, processors."""
    found: dict[str, Any] = {
        "garbage collection": gc.isenabled(),
        "garbage collection's thresholds": gc.get_threshold(),
        # Hypothesis has one from its first example on, with which it measures how long the collector takes.
        "garbage collection's callbacks": tuple(
            name for name in map(_named, gc.callbacks) if "hypothesis.internal" not in name
        ),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "sys.path": tuple(map(str, sys.path)),
        "trace function of threads": _named(threading.gettrace()),
        "profile function": _named(sys.getprofile()),
        "profile function of threads": _named(threading.getprofile()),
        "umask": _umask(),
        "tiny numbers": "kept" if _TINY * len("1") else "taken for zero",
    }
    if hasattr(signal, "pthread_sigmask"):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        found["signals that are blocked"] = tuple(sorted(map(_signal_name, mask)))
    if hasattr(signal, "getitimer"):
        found["timers"] = tuple(name for name in _TIMERS if _runs(name))
    if hasattr(os, "sched_getaffinity"):
        found["processors"] = tuple(sorted(os.sched_getaffinity(0)))
    processes: Any = getattr(sys.modules.get("multiprocessing.context"), "_default_context", None)
    chosen = None if processes is None else processes.get_start_method(allow_none=True)
    # The first use chooses the usual one, which stands first.
    usual = chosen is None or chosen == processes.get_all_start_methods()[0]
    found["start of processes"] = "as usual" if usual else chosen
    return found


_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


def _runs(timer: str) -> bool:
    if timer == "ITIMER_REAL" and _of_timeout(signal.getsignal(signal.SIGALRM)):
        return False
    return signal.getitimer(getattr(signal, timer))[0] > 0


def _of_timeout(handler: object) -> bool:
    return getattr(handler, "__module__", "") == "pytest_timeout"


def handler(number: signal.Signals) -> Any:
    """What handles a signal; the alarm of pytest-timeout counts as nothing.

    Args:
        number: The signal's.
    """
    found = signal.getsignal(number)
    # It stands during a test and is taken off early when the test fails.
    return signal.SIG_DFL if _of_timeout(found) else found


def _signal_name(number: int) -> str:
    return str(getattr(number, "name", number))


def _umask() -> str:
    """The mask of new files; empty where the system has no /proc: elsewhere it is read by changing it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[1] for line in lines if line.startswith("Umask:")), "")


def _named(function: object) -> str:
    if function is None:
        return "none"
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", "") or type(function).__qualname__
    return f"{module}.{name} at {id(function):#x}"


def loggers() -> dict[str, Hashable]:
    """Level, handlers and switches of each logger that is not as a new one; of the test tool nothing."""
    logging: Any = sys.modules.get("logging")
    if logging is None or not hasattr(logging, "root"):
        return {}
    found: dict[str, Hashable] = {}
    if logging.root.manager.disable:
        found["(all)"] = f"disabled up to {logging.root.manager.disable}"
    known = list(logging.root.manager.loggerDict.items())
    for name, logger in [("(root)", logging.root), *known]:
        if isinstance(logger, logging.PlaceHolder):
            continue
        usual = logging.WARNING if logger is logging.root else logging.NOTSET
        if logger.level != usual or logger.handlers or logger.disabled or not logger.propagate:
            said = [f"level {logger.level}"]
            said += [
                _handler_of_log(one)
                for one in logger.handlers
                if type(one).__module__.partition(".")[0] != "_pytest"
                and type(one) is not logging.NullHandler
            ]
            said += ["disabled"] * bool(logger.disabled) + ["does not propagate"] * (not logger.propagate)
            if said != [f"level {usual}"]:
                found[name] = ", ".join(said)
    return found


def _handler_of_log(one: Any) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__} of level {one.level} at {id(one):#x}"


def of_numpy() -> dict[str, Hashable] | None:
    """What numpy does on errors of numbers and how it prints; `None` while it is not loaded."""
    numpy: Any = sys.modules.get("numpy")
    if not hasattr(numpy, "geterr") or not hasattr(numpy, "get_printoptions"):
        return None
    errors = {f"on {kind}": way for kind, way in numpy.geterr().items()}
    return {**errors, "print options": str(sorted(numpy.get_printoptions().items(), key=str))}


def of_simulator() -> dict[str, Hashable] | None:
    """Capacity and state of the simulated device; `None` while it is not installed."""
    simulator: Any = sys.modules.get("interlock.backends.simulator")
    if simulator is None or not simulator.installed():
        return None
    return {"capacity": simulator.memory.capacity, "lost": simulator.lost()}


def of_torch() -> dict[str, Hashable] | None:
    """Torch's process-wide switches; `None` while it is not loaded."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "multiprocessing") or not hasattr(torch, "__future__"):
        return None  # its own import may be under way
    distributed = sys.modules.get("torch.distributed")
    core = torch._C
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "deterministic fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "autocast on cuda": torch.is_autocast_enabled("cuda"),
        "autocast's type on cpu": torch.get_autocast_dtype("cpu"),
        "autocast's type on cuda": torch.get_autocast_dtype("cuda"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "overwrite parameters on conversion": torch.__future__.get_overwrite_module_params_on_conversion(),
        "swap parameters on conversion": torch.__future__.get_swap_module_params_on_conversion(),
        "process group": distributed is not None
        and distributed.is_available()
        and distributed.is_initialized(),
        **{name: _read(getattr(core, getter, None)) for name, getter in _FLAGS.items()},
        "hooks of saved tensors": str(_read(_saved_tensors_hooks(core))),
        "hooks of all modules": _hooks("torch.nn.modules.module"),
        "hooks of all optimizers": _hooks("torch.optim.optimizer"),
        "print options": str(torch._tensor_str.PRINT_OPTS),
        "warn always": torch.is_warn_always_enabled(),
        "sharing between processes": torch.multiprocessing.get_sharing_strategy(),
    }


def _read(getter: Callable[[], Any] | None) -> Hashable:
    if getter is None:
        return "not in this version"
    try:
        found: Hashable = getter()
    except RuntimeError as error:
        # Where it was set by two sets of switches that contradict each other torch refuses to say.
        return f"not told: {str(error)[:60]}"
    return found


def _saved_tensors_hooks(core: Any) -> Callable[[], Any] | None:
    getter = getattr(core._autograd, "_top_saved_tensors_default_hooks", None)
    return None if getter is None else lambda: getter(True)


def _hooks(name: str) -> tuple[str, ...]:
    """Hooks that a module of torch calls for every module, or optimizer, of the process."""
    tables = [table for key, table in vars(sys.modules.get(name, os)).items() if key.startswith("_global_")]
    return tuple(_named(hook) for table in tables if isinstance(table, dict) for hook in table.values())
