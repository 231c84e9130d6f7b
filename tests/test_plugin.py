"""The pytest plug-in, its context managers, decorator and mix-in: each planted fault fails, and only that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test
from tools.runs import environment

from interlock import testing
from interlock.testing import Allowed, CheckMisused, CleanMachine, ProcessChanged, TensorsLeft

EXAMPLES = Path(__file__).parents[1] / "examples"
HELD: list[object] = []


def counts(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64


def leak() -> None:
    HELD.append(torch.zeros(7, dtype=torch.float64))


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    HELD.clear()
    os.environ.pop("PLANTED", None)


def no_f64() -> testing.AbstractContextManager[None]:
    return testing.device_empty(counts)


# Context managers


def test_a_block_that_leaves_a_tensor_fails_and_names_the_owner() -> None:
    with pytest.raises(TensorsLeft, match=r"held by global .*test_plugin\.HELD\[0\]") as caught, no_f64():
        leak()
    assert [one.nbytes for one in caught.value.leaks] == [56]
    assert len(HELD) == 1  # nothing was repaired
    with no_f64():
        torch.zeros(7, dtype=torch.float64).sum()


def test_an_error_of_the_block_is_let_through() -> None:
    def fails() -> None:
        with no_f64(), testing.process_clean():
            leak()
            os.environ["PLANTED"] = "1"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_a_block_that_changes_the_process_fails() -> None:
    with pytest.raises(ProcessChanged, match="environment PLANTED: set to '1'"), testing.process_clean():
        os.environ["PLANTED"] = "1"
    allowed = Allowed("environment", "PLANTED", "planted")
    with testing.process_clean(allowed=[allowed]):
        os.environ["PLANTED"] = "2"


def test_what_may_stay_has_a_reason() -> None:
    with testing.device_empty(counts, allowed=[Allowed("tensor", "global *HELD*", "planted")]):
        leak()


# Each example, and machines


def test_a_leak_from_three_on_is_found_and_shrunk_to_three() -> None:
    failed: list[int] = []

    @settings(database=None, max_examples=200)
    @given(st.integers(0, 100))
    @testing.each_example(no_f64, testing.process_clean)
    def trains(n: int) -> None:
        failed.append(n)
        if n >= 3:
            leak()

    with pytest.raises(TensorsLeft, match=r"global .*test_plugin\.HELD\[\d+\]"):
        trains()
    assert failed[-1] == 3


def test_a_thread_from_three_on_is_found_and_shrunk_to_three() -> None:
    failed: list[int] = []
    done = threading.Event()
    started: list[threading.Thread] = []

    @settings(database=None, max_examples=50)
    @given(st.integers(0, 20))
    @testing.each_example(lambda: testing.process_clean(seconds=0.01))
    def trains(n: int) -> None:
        failed.append(n)
        if n >= 3:
            started.append(threading.Thread(target=done.wait, name="planted"))
            started[-1].start()

    with pytest.raises(ProcessChanged, match="thread started and still alive"):
        trains()
    assert failed[-1] == 3
    done.set()
    for one in started:
        one.join()


def test_a_decorator_above_given_or_around_a_coroutine_is_refused() -> None:
    with pytest.raises(CheckMisused, match="above @given"):

        @testing.each_example(no_f64)
        @given(st.integers())
        def wrong(n: int) -> None: ...

    with pytest.raises(CheckMisused, match="runs only later"):

        @testing.each_example(no_f64)
        async def later() -> None: ...


class Cache(CleanMachine, RuleBasedStateMachine):
    """Its own tensors go with it; what the global list gets stays."""

    checks = (no_f64,)
    leaks = True
    made = Bundle("made")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @rule(target=made)
    def make(self) -> torch.Tensor:
        self.last = torch.zeros(3, dtype=torch.float64)
        return self.last

    @rule(one=made)
    def use(self, one: torch.Tensor) -> None:
        self.calls += 1
        if self.leaks and self.calls >= 3:
            HELD.append(one.clone())


class CleanCache(Cache):
    leaks = False


class FailingCache(Cache):
    @rule()
    def fails(self) -> None:
        leak()
        raise ZeroDivisionError


def test_a_machine_that_leaks_at_the_third_call_is_found_and_shrunk() -> None:
    with pytest.raises(TensorsLeft, match=r"test_plugin\.HELD\[\d+\]") as caught:
        run_state_machine_as_test(
            Cache, settings=settings(database=None, max_examples=50, stateful_step_count=8, deadline=None)
        )
    program = "\n".join(caught.value.__notes__)
    assert program.count("state.use(") == 3, program
    assert program.count("state.make()") == 1, program


def test_what_a_machine_holds_itself_is_not_blamed() -> None:
    run_state_machine_as_test(CleanCache, settings=settings(database=None, max_examples=20))


def test_an_error_of_a_rule_is_what_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        run_state_machine_as_test(FailingCache, settings=settings(database=None, max_examples=20))


def test_a_mix_in_behind_the_machine_is_refused() -> None:
    with pytest.raises(CheckMisused, match="must stand before"):
        type("Wrong", (RuleBasedStateMachine, CleanMachine), {})


# The plug-in, in a pytest of its own

ON_SIM = """
import os, pytest, torch
KEPT = []
def tensor(n=5): return torch.zeros(n, device="sim")

@pytest.fixture(autouse=True, scope="session")
def simulated():
    from interlock.backends import simulator
    simulator.install()
"""


def inner(pytester: pytest.Pytester, body: str, *options: str, head: str = ON_SIM) -> pytest.RunResult:
    pytester.makepyfile(head + body)
    pytester.makeini("[pytest]")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_a_test_that_leaves_a_tensor_fails_and_its_neighbours_pass(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
def test_first(device_empty): tensor()
def test_leaks(device_empty): KEPT.append(tensor())
def test_last(device_empty): tensor()
def test_unchecked(): KEPT.append(tensor())
""",
    )
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*", "*held by global *.KEPT[[]0]*"])


def test_a_whole_suite_is_checked_by_an_option(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
import unittest
from hypothesis import given, strategies as st

def test_leaks(): KEPT.append(tensor())
def test_clean(): tensor()

class TestClass:
    def test_leaks(self): KEPT.append(tensor())

class Case(unittest.TestCase):
    def setUp(self): self.mine = tensor()
    def test_leaks(self): KEPT.append(tensor())
    def test_on_itself(self): self.mine = tensor()

@given(st.booleans())
def test_examples(value): KEPT.append(tensor())
""",
        "--interlock-leaks",
    )
    result.assert_outcomes(passed=6, errors=4)
    result.stdout.no_fnmatch_line("*ERROR at teardown of Case.test_on_itself*")


def test_what_a_test_puts_on_its_own_object_goes_with_the_object(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
class TestSetUp:
    def setup_method(self): self.model = tensor()
    def test_it(self): assert self.model is not None
    @pytest.mark.parametrize("n", range(2))
    def test_each(self, n): assert self.model.numel() == 5

class TestFixture:
    @pytest.fixture(autouse=True)
    def model(self): self.model = tensor()
    def test_it(self): self.batch = tensor()
    def test_fails(self):
        self.batch = tensor()
        assert not self.batch.numel()
    def test_leaks(self): KEPT.append(self.model)

class TestOfClass:
    @pytest.fixture(scope="class", autouse=True)
    def model(self, request): request.cls.model = tensor()
    def test_it(self): self.batch = self.model

def test_end():
    from interlock.backends import simulator
    assert simulator.memory.allocated == 2 * 20  # of the leak, and of the class
""",
        "--interlock-leaks",
    )
    result.assert_outcomes(passed=7, failed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of TestFixture.test_leaks*", "*held by global *.KEPT[[]0]*"]
    )


def test_an_object_of_a_test_class_is_made_anew_for_a_rerun(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
TRIES = []
class TestClass:
    def setup_method(self): self.model = tensor()
    def test_flaky(self, device_empty, process_clean):
        TRIES.append(self.model.numel())
        assert len(TRIES) == 2
""",
        "--reruns=2",
    )
    seen = result.parseoutcomes()
    assert (seen["passed"], seen["rerun"]) == (1, 1)


def test_a_test_that_is_expected_to_fail_may_leave_nothing_either(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
@pytest.mark.xfail
def test_fails_and_leaks(device_empty):
    KEPT.append(tensor())
    assert 0
@pytest.mark.xfail
def test_leaks(device_empty): KEPT.append(tensor())
@pytest.mark.xfail
def test_fails(device_empty):
    mine = tensor()
    assert 0
@pytest.fixture
def breaks():
    yield
    raise ValueError
@pytest.mark.xfail
def test_teardown_fails(breaks, device_empty): pass
""",
        "-rE",
    )
    result.assert_outcomes(xfailed=3, xpassed=2, errors=2)
    result.stdout.fnmatch_lines(["ERROR *::test_fails_and_leaks*", "ERROR *::test_leaks*"])
    result.stdout.fnmatch_lines(["*held by global *.KEPT[[]0]*"])


def test_what_fixtures_hold_is_not_blamed_on_the_test(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
@pytest.fixture(scope="module")
def model(): return tensor()
@pytest.fixture
def batch(): return tensor()
@pytest.fixture
def later():
    held = tensor()
    yield held
@pytest.fixture
def forgets():
    KEPT.append(tensor())

def test_one(model, batch, later, device_empty): model.add_(batch)
def test_two(device_empty, model, batch, later): model.add_(batch)
def test_three(device_empty, forgets): pass
""",
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_three*"])


def test_a_failing_test_pins_nothing_for_the_next_one(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
import logging
from interlock.backends import simulator

def deep(n):
    mine = tensor(n)
    if n: deep(n - 1)
    raise ValueError("planted")

def test_fails(device_empty):
    mine = tensor()
    try:
        deep(3)
    except ValueError:
        logging.exception("kept in a record")
        raise KeyError("planted")

def test_next(device_empty):
    assert simulator.memory.allocated == 0
    tensor()

def test_fails_and_leaks(device_empty):
    mine = tensor()
    KEPT.append(tensor())
    assert mine is None

def test_after(device_empty):
    assert simulator.memory.allocated == KEPT[0].nbytes

@pytest.fixture
def breaks(device_empty):
    mine = tensor()
    raise ValueError("planted")
def test_set_up(breaks): pass
def test_end(device_empty):
    assert simulator.memory.allocated == KEPT[0].nbytes
""",
    )
    result.assert_outcomes(passed=3, failed=2, errors=2)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_fails_and_leaks*"])
    result.stdout.no_fnmatch_line("*ERROR at teardown of test_fails _*")
    result.stdout.no_fnmatch_line("*local 'mine'*")


# Beside other plug-ins: workers, random order, reruns

MIXED = """
@pytest.mark.parametrize("n", range(6))
def test_clean(n, device_empty, process_clean): tensor()
@pytest.mark.parametrize("n", range(3))
def test_leaks(n, device_empty): KEPT.append(tensor())
def test_thread(process_clean):
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True, name="planted").start()
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-p", "xdist", "-n", "2"), id="workers"),
        pytest.param(("--random-order", "--random-order-seed=1"), id="random order"),
        pytest.param(("--random-order", "--random-order-seed=2", "-n", "2"), id="both"),
    ],
)
def test_the_same_tests_fail_in_any_order_and_in_workers(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = inner(pytester, MIXED, "-rE", *options)
    result.assert_outcomes(passed=10, errors=4)
    for name in ("test_leaks[[]0]", "test_leaks[[]1]", "test_leaks[[]2]", "test_thread"):
        result.stdout.fnmatch_lines([f"ERROR *::{name}*"])
    result.stdout.no_fnmatch_line("ERROR *::test_clean*")


def test_a_rerun_is_compared_with_what_the_first_attempt_left(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
from interlock.backends import simulator
TRIES = []

def test_flaky(device_empty, process_clean):
    assert simulator.memory.allocated == 0  # the first attempt's traceback pins nothing
    mine = tensor()
    TRIES.append(len(TRIES))
    assert TRIES == [0, 1]

def test_leaks_once(device_empty):
    if len(TRIES) == 2:
        KEPT.append(tensor())
    TRIES.append(len(TRIES))

def test_leaks_and_fails(device_empty):
    KEPT.append(tensor())
    assert 0
""",
        "--reruns=2",
        "-rE",
    )
    seen = result.parseoutcomes()
    assert (seen["failed"], seen["errors"]) == (1, 1)
    result.stdout.fnmatch_lines(["ERROR *::test_leaks_and_fails*"])
    result.stdout.no_fnmatch_line("*ERROR at teardown of test_flaky*")
    result.stdout.no_fnmatch_line("*ERROR at teardown of test_leaks_once*")  # of the last attempt


def test_the_process_is_checked(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
import os, threading
def test_first(process_clean, monkeypatch): monkeypatch.setenv("X", "1")
def test_changes(process_clean): os.environ["PLANTED"] = "1"
def test_last(process_clean): pass
""",
        head="",
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_changes*", "*environment PLANTED: set to '1'*"])


def test_a_suite_says_what_it_allows(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
import pytest
from interlock.testing import Allowed

@pytest.fixture(scope="session")
def interlock_allowed():
    return [Allowed("environment", "X", "set once"), Allowed("tensor", "global *KEPT*", "a cache")]
"""
    )
    result = inner(
        pytester,
        """
def test_process(process_clean): os.environ["X"] = "1"
def test_device(device_empty): KEPT.append(tensor())
def test_other(process_clean): os.environ["Y"] = "1"
""",
    )
    result.assert_outcomes(passed=3, errors=1)


def test_the_simulated_device_records_where_a_leak_was_made(pytester: pytest.Pytester) -> None:
    result = inner(
        pytester,
        """
import torch
KEPT = []
def make(device): KEPT.append(torch.zeros(3, device=device))
def test_leaks(device_empty, sim_device):
    make("sim")
    assert sim_device.memory.allocated == 12
""",
        head="",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*made at *test_the_simulated_device*.py:3 in make*", "*in test_leaks*"])


def test_where_there_is_no_simulated_device_a_test_is_skipped_with_the_reason(
    pytester: pytest.Pytester,
) -> None:
    result = inner(
        pytester,
        """
import pytest
from interlock.backends import simulator

@pytest.fixture(autouse=True)
def none(monkeypatch): monkeypatch.setattr(simulator, "unavailable", lambda: "planted reason")
def test_uses(sim_device): pass
""",
        "-rs",
        head="",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no simulated device: planted reason*"])


@pytest.mark.parametrize(("option", "name"), [((), "double"), (("--interlock-backend=cpu",), "cpu")])
def test_a_backend_is_chosen_by_an_option(
    pytester: pytest.Pytester, option: tuple[str, ...], name: str
) -> None:
    body = f"def test_it(interlock_backend): assert interlock_backend().name == {name!r}"
    inner(pytester, body, *option, head="").assert_outcomes(passed=1)


def test_the_simulated_backend_is_installed_when_it_is_asked_for(pytester: pytest.Pytester) -> None:
    body = "def test_it(interlock_backend): assert interlock_backend().acquire().device.type == 'sim'"
    inner(pytester, body, "--interlock-backend=sim", head="").assert_outcomes(passed=1)


def test_an_unknown_backend_is_refused_and_the_known_ones_are_listed(pytester: pytest.Pytester) -> None:
    result = inner(pytester, "def test_it(): pass", "--interlock-backend=warp", head="")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "no such backend; there are auto, cpu" in result.stderr.str()


def test_a_suite_that_uses_nothing_loads_nothing(pytester: pytest.Pytester) -> None:
    body = """
import sys
def test_it():
    ours = {name for name in sys.modules if name.partition(".")[0] == "interlock"}
    assert ours == {"interlock", "interlock.pytest_plugin"}
    assert not {"torch", "numpy", "transitions", "rich"} & set(sys.modules)
"""
    inner(pytester, body, "-p", "no:hypothesispytest", head="").assert_outcomes(passed=1)


def test_loading_the_plug_in_loads_nothing_else() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import interlock.pytest_plugin; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, env=environment()
    )
    assert done.stdout.split() == ["interlock", "interlock.pytest_plugin"]


# The example


def test_the_example_names_each_leak(tmp_path: Path) -> None:
    """A foreign script: a closure, a module's cache, a live generator; and two tests that are clean."""
    shutil.copytree(EXAMPLES / "leaky", tmp_path / "leaky", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("--interlock-leaks", "--rootdir", str(tmp_path), str(tmp_path / "leaky")),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(),
    )
    said = done.stdout
    assert done.returncode == 1, said
    assert "5 passed, 3 errors" in said
    assert "held by global train.log (closure variable 'losses' of make_logger.<locals>.log)[0]" in said
    assert "held by global train.MEANS[0]" in said
    assert "held by global test_train.STREAMS[0] -> local 'points' of batches (" in said
    assert "train.py:" in said.partition("made at ")[2]
    for name in ("test_training_leaves_nothing", "test_a_peek_that_closes"):
        assert f"ERROR at teardown of {name}" not in said
