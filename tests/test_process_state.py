"""The process-state check: each planted leak is found and named, and nothing is repaired."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from tools import process_state
from tools.process_state import differences, snapshot
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def thread(daemon: bool) -> Iterator[None]:
    done = threading.Event()
    leak = threading.Thread(target=done.wait, name="planted", daemon=daemon)
    leak.start()
    yield
    done.set()
    leak.join()


@contextmanager
def child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as leak:
        # Between fork and exec it has no command line yet, and would be described in another way.
        while not Path(f"/proc/{leak.pid}/cmdline").read_bytes():
            time.sleep(0.001)
        try:
            yield
        finally:
            leak.communicate(b"\n")


@contextmanager
def descriptor() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(prefix="planted"):
        yield


@contextmanager
def connection() -> Iterator[None]:
    with socket.socket():
        yield


@contextmanager
def variable() -> Iterator[None]:
    os.environ["PLANTED"] = "1"
    yield
    del os.environ["PLANTED"]


@contextmanager
def handler() -> Iterator[None]:
    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, old)


@contextmanager
def directory() -> Iterator[None]:
    old = Path.cwd()
    with tempfile.TemporaryDirectory() as new:
        os.chdir(new)
        yield
        os.chdir(old)


@contextmanager
def deleted_directory() -> Iterator[None]:
    old = Path.cwd()
    with tempfile.TemporaryDirectory() as new:
        os.chdir(new)
    yield
    os.chdir(old)


@contextmanager
def attribute(owner: object, name: str, value: object) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, old)


@contextmanager
def switch(read: Callable[[], object], write: Callable[[object], object], value: object) -> Iterator[None]:
    old = read()
    write(value)
    yield
    write(old)


@contextmanager
def warning_filter() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="planted")
        yield


@contextmanager
def module() -> Iterator[None]:
    sys.modules["engine.planted"] = os
    yield
    del sys.modules["engine.planted"]


FUTURE = torch.__future__
LEAKS = {
    "a thread": (lambda: thread(daemon=False), "thread started and still alive: <Thread(planted"),
    "a daemon thread": (lambda: thread(daemon=True), "thread started and still alive: <Thread(planted"),
    "a child process": (child, "process "),
    "a file": (descriptor, "planted"),
    "a socket": (connection, "file opened and not closed: socket:"),
    "a variable": (variable, "environment PLANTED: set to '1'"),
    "a signal handler": (handler, "signal handler SIGUSR1: "),
    "the directory": (directory, "current directory: "),
    "a deleted directory": (deleted_directory, "became 'one that was deleted'"),
    "sys.excepthook": (lambda: attribute(sys, "excepthook", print), "hook sys.excepthook: "),
    "threading.excepthook": (
        lambda: attribute(threading, "excepthook", print),
        "hook threading.excepthook: ",
    ),
    "a warning filter": (warning_filter, "warning filter added: ('ignore', re.compile('planted'"),
    "a second copy": (module, "second copy of the package loaded: engine.planted"),
    "the default dtype": (
        lambda: switch(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "torch default dtype: torch.float32 became torch.float64",
    ),
    "the default device": (
        lambda: switch(lambda: None, torch.set_default_device, "meta"),
        "torch default device: device(type='cpu') became device(type='meta')",
    ),
    "determinism": (
        lambda: switch(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        "torch deterministic algorithms: False became True",
    ),
    "grad mode": (
        lambda: switch(torch.is_grad_enabled, torch._C._set_grad_enabled, False),
        "torch gradients enabled: True became False",
    ),
    "threads of torch": (
        lambda: switch(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
        "torch threads: ",
    ),
    "anomaly detection": (
        lambda: switch(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
        "torch anomaly detection: False became True",
    ),
    "overwrite on conversion": (
        lambda: switch(
            FUTURE.get_overwrite_module_params_on_conversion,
            FUTURE.set_overwrite_module_params_on_conversion,
            True,
        ),
        "torch overwrite parameters on conversion: False became True",
    ),
    "swap on conversion": (
        lambda: switch(
            FUTURE.get_swap_module_params_on_conversion, FUTURE.set_swap_module_params_on_conversion, True
        ),
        "torch swap parameters on conversion: False became True",
    ),
}


@contextmanager
def logs() -> Iterator[None]:
    added = logging.StreamHandler()
    logging.getLogger("planted").addHandler(added)
    yield
    logging.getLogger("planted").removeHandler(added)


@contextmanager
def default_hooks() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        yield


@contextmanager
def hook_of_modules() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def hook_of_optimizers() -> Iterator[None]:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def thresholds() -> Iterator[None]:
    old = gc.get_threshold()
    gc.set_threshold(1234, *old[1:])
    yield
    gc.set_threshold(*old)


def start_method() -> AbstractContextManager[None]:
    usual, other = multiprocessing.get_all_start_methods()[:2]
    return switch(lambda: usual, lambda to: multiprocessing.set_start_method(to, True), other)


@contextmanager
def blocked_signal() -> Iterator[None]:
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextmanager
def search_path() -> Iterator[None]:
    sys.path.append("planted")
    yield
    sys.path.remove("planted")


@contextmanager
def collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@contextmanager
def callback() -> Iterator[None]:
    def planted(*_: object) -> None: ...

    gc.callbacks.append(planted)
    yield
    gc.callbacks.remove(planted)


CORE = torch._C
LEAKS |= {
    "the collector": (collector, "interpreter garbage collection: True became False"),
    "thresholds of the collector": (thresholds, "interpreter garbage collection's thresholds: "),
    "a callback of the collector": (callback, "callback.<locals>.planted"),
    "the recursion limit": (
        lambda: switch(sys.getrecursionlimit, sys.setrecursionlimit, 5000),
        "interpreter recursion limit: ",
    ),
    "the switch interval": (
        lambda: switch(sys.getswitchinterval, sys.setswitchinterval, 0.25),
        "interpreter switch interval: ",
    ),
    "a profile function": (
        lambda: switch(threading.getprofile, threading.setprofile, lambda *_: None),
        "interpreter profile function of threads: 'none' became ",
    ),
    "the search path": (search_path, "interpreter sys.path: "),
    "the umask": (lambda: switch(lambda: 0o22, os.umask, 0o77), "interpreter umask: "),
    "a blocked signal": (
        blocked_signal,
        "interpreter signals that are blocked: () became ('SIGUSR2',)",
    ),
    "a timer": (
        lambda: switch(lambda: 0, lambda to: signal.setitimer(signal.ITIMER_VIRTUAL, to), 1000),
        "interpreter timers: () became ('ITIMER_VIRTUAL',)",
    ),
    "the start method": (start_method, "interpreter start of processes: 'as usual' became "),
    "flushed tiny numbers": (
        lambda: switch(lambda: False, torch.set_flush_denormal, True),
        "interpreter tiny numbers: 'kept' became 'taken for zero'",
    ),
    "a handler of logs": (logs, "logger planted: set to 'level 0, logging.StreamHandler of level 0 "),
    "the level of logs": (
        lambda: switch(lambda: 0, logging.getLogger("planted").setLevel, 7),
        "logger planted: set to 'level 7'",
    ),
    "the level of torch's logs": (
        lambda: switch(lambda: logging.getLogger("torch").level, logging.getLogger("torch").setLevel, 7),
        "logger torch: 'level ",
    ),
    "silent logs": (
        lambda: switch(lambda: 0, logging.disable, 7),
        "logger (all): set to 'disabled up to 7'",
    ),
    "errors of numpy": (
        lambda: switch(lambda: numpy.geterr()["over"], lambda to: numpy.seterr(over=to), "raise"),
        "numpy on over: ",
    ),
    "how numpy prints": (
        lambda: switch(lambda: 8, lambda to: numpy.set_printoptions(precision=to), 3),
        "numpy print options: ",
    ),
    "how torch prints": (
        lambda: switch(lambda: 4, lambda to: torch.set_printoptions(precision=to), 2),
        "torch print options: ",
    ),
    "the precision of products": (
        lambda: switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        "torch float32 matmul precision: 'highest' became 'medium'",
    ),
    "tf32": (
        lambda: switch(CORE._get_cublas_allow_tf32, CORE._set_cublas_allow_tf32, True),
        "torch cuda.matmul.allow_tf32: False became True",
    ),
    "tf32 of cudnn": (
        lambda: switch(CORE._get_cudnn_allow_tf32, CORE._set_cudnn_allow_tf32, False),
        "torch cudnn.allow_tf32: True became False",
    ),
    "mkldnn": (
        lambda: switch(CORE._get_mkldnn_enabled, CORE._set_mkldnn_enabled, False),
        "torch mkldnn.enabled: True became False",
    ),
    "a kind of attention": (
        lambda: switch(CORE._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
        "torch attention: flash: True became False",
    ),
    "the type of autocast": (
        lambda: switch(
            lambda: torch.get_autocast_dtype("cpu"),
            lambda to: torch.set_autocast_dtype("cpu", to),
            torch.float16,
        ),
        "torch autocast's type on cpu: torch.bfloat16 became torch.float16",
    ),
    "the cache of autocast": (
        lambda: switch(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
        "torch autocast's cache: True became False",
    ),
    "hooks of saved tensors": (default_hooks, "torch hooks of saved tensors: 'None' became "),
    "a hook of all modules": (hook_of_modules, "hook_of_modules.<locals>.<lambda>"),
    "a hook of all optimizers": (hook_of_optimizers, "hook_of_optimizers.<locals>.<lambda>"),
    "warnings always": (
        lambda: switch(torch.is_warn_always_enabled, torch.set_warn_always, True),
        "torch warn always: False became True",
    ),
    "the sharing strategy": (
        lambda: switch(
            torch.multiprocessing.get_sharing_strategy,
            torch.multiprocessing.set_sharing_strategy,
            "file_system",
        ),
        "torch sharing between processes: 'file_descriptor' became 'file_system'",
    ),
    "a mode of operators": (
        TorchDispatchMode,
        "torch modes of operators: 0 became 1",
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_finds_the_planted_leak_and_repairs_nothing(leak: str) -> None:
    plant, says = LEAKS[leak]
    before = snapshot()
    with plant():
        found = differences(before, snapshot())
        assert any(says in line for line in found), found
        assert differences(before, snapshot()) == found
    assert differences(before, snapshot()) == []


def test_a_quiet_process_has_no_difference() -> None:
    assert differences(snapshot(), snapshot()) == []


@pytest.mark.parametrize("leak", ["a thread", "a file", "a variable", "a warning filter"])
def test_what_is_gone_differs_too(leak: str) -> None:
    with LEAKS[leak][0]():
        before = snapshot()
    assert differences(before, snapshot()) != []


def test_a_child_that_nobody_waited_for_is_found() -> None:
    before = snapshot()
    leak = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, leak.pid, os.WEXITED | os.WNOWAIT)
    found = differences(before, snapshot())
    leak.wait()
    assert found == [f"process {leak.pid} (ended, and never waited for): new"]


def test_what_is_just_ending_may_end() -> None:
    before = snapshot()
    ending = threading.Thread(target=time.sleep, args=(0.1,))
    ending.start()
    assert differences(before, snapshot()) != []
    assert process_state.settled(before) == []
    ending.join()


@pytest.mark.parametrize("leak", ["a thread", "a child process", "a file", "a variable"])
def test_what_lasts_is_found_after_the_wait(leak: str) -> None:
    before = snapshot()
    with LEAKS[leak][0]():
        assert process_state.settled(before, seconds=0.05) != []


def test_workers_of_a_loader_leave_nothing_else() -> None:
    from torch.utils.data import DataLoader

    before = snapshot()
    assert [int(batch) for batch in DataLoader(range(4), batch_size=None, num_workers=1)] == [0, 1, 2, 3]
    assert process_state.settled(before) == []


def test_each_allowance_has_a_reason() -> None:
    assert all(entry.reason for entry in process_state.ALLOWED)


def test_reading_the_state_imports_nothing() -> None:
    code = (
        "import sys; from tools.process_state import differences, snapshot\n"
        "before = set(sys.modules); state = snapshot(); differences(state, snapshot())\n"
        "assert state.torch is None; assert set(sys.modules) == before, set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_the_first_use_of_processes_and_of_logs_is_no_difference() -> None:
    code = (
        "from tools.process_state import differences, snapshot\n"
        "before = snapshot(); import logging, multiprocessing; multiprocessing.get_start_method()\n"
        "logging.getLogger('planted').info('nothing')\n"
        "assert differences(before, snapshot()) == [], differences(before, snapshot())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_the_simulated_device_belongs_to_the_state() -> None:
    code = (
        "from interlock.backends import simulator; from tools.process_state import differences, snapshot\n"
        "before = snapshot(); simulator.install(); assert differences(before, snapshot()) == []\n"
        "before = snapshot(); simulator.memory.capacity = 10\n"
        "assert differences(before, snapshot()) == ['simulated device capacity: None became 10']"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=Path(__file__).parent)


def test_torch_imported_in_a_test_is_no_difference() -> None:
    code = (
        "import warnings; from tools.process_state import differences, snapshot\n"
        "before = snapshot(); import torch, numpy, sklearn.datasets, transitions, torch._dynamo\n"
        "assert differences(before, snapshot()) == [], differences(before, snapshot())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_the_fixture_fails_the_test_that_leaks_and_no_other(pytester: pytest.Pytester) -> None:
    folder = Path(__file__).parent
    pytester.makeconftest((folder / "conftest.py").read_text())
    pytester.makepyfile(
        """
        import os

        def test_first(): pass
        def test_leaks(): os.environ["PLANTED"] = "1"
        def test_last(): pass
        """
    )
    result = pytester.runpytest_subprocess("-o", f"pythonpath={folder}", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*", "*environment PLANTED: set to '1'"])


def test_an_unknown_profile_is_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent
    pytester.makeconftest((folder / "conftest.py").read_text())
    monkeypatch.setenv("INTERLOCK_PROFILE", "planted")
    result = pytester.runpytest_subprocess("-o", f"pythonpath={folder}")
    assert result.ret != 0
    assert "planted" in result.stderr.str() + result.stdout.str()


def test_evidence_names_results_and_figures(pytester: pytest.Pytester) -> None:
    folder = Path(__file__).parent
    pytester.makeconftest((folder / "conftest.py").read_text())
    pytester.makepyfile(
        """
        from hypothesis import given, strategies as st

        def test_figure(record_property): record_property("pairs tried", 130)
        @given(st.booleans())
        def test_examples(value): pass
        def test_fails(): assert False
        """
    )
    result = pytester.runpytest_subprocess("-o", f"pythonpath={folder}", "--evidence", "out/page.md")
    assert result.ret == 1
    page = (pytester.path / "out/page.md").read_text()
    assert "**failed (pytest exit status 1)**: 1 failed, 2 passed" in page
    assert "| pairs tried | 130 |" in page
    assert "- Hypothesis examples: 2 in 1 tests" in page
    assert "test_fails (call)" in page
