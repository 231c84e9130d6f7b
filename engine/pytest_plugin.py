"""The pytest plug-in `interlock`: checks for anybody's suite, with or without this engine.

Fixtures: `device_empty`, `process_clean`, `sim_device`, `interlock_backend`; `interlock_allowed` to override.
Options: `--interlock-leaks` (every test is checked as with `device_empty`), `--interlock-backend=NAME`.

Loading it loads nothing but pytest, and a suite that uses nothing of it pays for two calls a test. Whatever
it notes of a test stands in that test's own stash: nothing is shared between tests, workers or reruns.

A check begins when its fixture is set up and is judged after everything of the test was torn down, other
fixtures included. What only a failed test's traceback holds is let go of once that test was reported,
so that it weighs on no other test; with `--pdb` it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from interlock.backends.adapter import Adapter

    from .process_state import Allowed

_CHECKS = pytest.StashKey[list[Callable[[], str]]]()
"""Of a test: what is still to be judged. Each returns a complaint, or nothing."""
_COMPLAINT = pytest.StashKey[BaseException]()
"""Of a test: the error that was raised because it left something behind."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("interlock", "interlock: what tests leave behind")
    group.addoption(
        "--interlock-leaks",
        action="store_true",
        help="fail each test that leaves tensors on a device, with who holds them",
    )
    group.addoption(
        "--interlock-backend",
        metavar="NAME",
        help="what the fixture `interlock_backend` makes adapters of (cpu, cuda, sim, ...)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Takes up the options."""
    if config.getoption("--interlock-leaks"):
        config.pluginmanager.register(_EachTest(), "interlock-each-test")
    name = config.getoption("--interlock-backend")
    if name:
        from interlock.backends import registry

        if name not in ("auto", *registry.names()):
            known = ", ".join(("auto", *registry.names()))
            raise pytest.UsageError(f"--interlock-backend={name}: no such backend; there are {known}")


class _EachTest:
    """Registered by `--interlock-leaks` only, so that no other suite has a fixture that is always used."""

    @pytest.fixture(autouse=True)
    def _interlock_device_empty(
        self, request: pytest.FixtureRequest, interlock_allowed: Sequence[Allowed]
    ) -> None:
        _check_device(request.node, interlock_allowed)


@pytest.fixture(scope="session")
def interlock_allowed() -> Sequence[Allowed]:
    """What tests may leave besides what is allowed anyway, as `interlock.testing.Allowed`: to override."""
    return ()


@pytest.fixture
def device_empty(request: pytest.FixtureRequest, interlock_allowed: Sequence[Allowed]) -> None:
    """The test fails if it leaves tensors on a device that were not there before; who holds them is told."""
    _check_device(request.node, interlock_allowed)


@pytest.fixture
def process_clean(request: pytest.FixtureRequest, interlock_allowed: Sequence[Allowed]) -> None:
    """The test fails if it leaves threads, children, descriptors, handlers, environment, switches changed."""
    from . import errors, process_state

    before = process_state.snapshot()
    allowed = (*process_state.ALLOWED, *interlock_allowed)

    def judge() -> str:
        found = process_state.settled(before, allowed=allowed)
        return str(errors.ProcessChanged(found)) if found else ""

    request.node.stash.setdefault(_CHECKS, []).append(judge)


@pytest.fixture
def sim_device() -> Iterator[Any]:
    """The simulated device, with recorded stacks, as the package `interlock.backends.simulator`; or skips."""
    from interlock.backends import simulator

    from .testing import sim_device

    reason = "" if simulator.installed() else simulator.unavailable()
    if reason:
        pytest.skip(f"no simulated device: {reason}")
    with sim_device() as found:
        yield found


@pytest.fixture
def interlock_backend(request: pytest.FixtureRequest) -> type[Adapter]:
    """When called makes an adapter of the backend of `--interlock-backend`; skipped where it cannot run.

    Without the option it is the simulated device where that is installed already, or else `double`, a
    host that behaves like a device; both need no hardware.
    """
    from interlock.backends import registry

    name = request.config.getoption("--interlock-backend")
    if name == "sim":
        request.getfixturevalue("sim_device")
    found = registry.adapter_class(name or _best())
    reason = found.unavailable()
    if reason:
        pytest.skip(f"backend '{found.name}' cannot be used here: {reason}")
    return found


def _best() -> str:
    import sys

    simulator = sys.modules.get("interlock.backends.simulator")
    return "sim" if simulator is not None and simulator.installed() else "double"


def _check_device(item: pytest.Item, allowed: Sequence[Allowed]) -> None:
    from . import leaks

    before = leaks.census()

    def judge() -> str:
        left = leaks.since(before, allowed)
        return leaks.render(left) if leaks.blamed(left) else ""

    item.stash.setdefault(_CHECKS, []).append(judge)


# The innermost wrapper: within that of pytest's capture, whose files would differ outside of it.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Judges, after all fixtures of the test were torn down."""
    checks = item.stash.get(_CHECKS, [])
    if not checks:
        return (yield)
    del item.stash[_CHECKS]
    try:
        result = yield
    except BaseException as error:
        _let_go(item, error)
        raise
    # What fixtures returned goes right after this hook anyway; until then pytest holds it.
    values = getattr(item, "funcargs", None)
    if isinstance(values, dict):
        values.clear()
    _let_go_of_instance(item)
    complaints = [complaint for check in checks if (complaint := check())]
    if complaints:
        text = "the test leaves something behind:\n" + "\n".join(complaints)
        item.stash[_COMPLAINT] = pytest.fail.Exception(text, pytrace=False)
        raise item.stash[_COMPLAINT]
    return result


def _let_go_of_instance(item: Any) -> None:
    """The object of a test class goes with its test: pytest would keep it until the session ends.

    What its tests put on `self` is no more left behind than a local variable. If the test runs again, pytest
    makes a new object, as it does for those of unittest, which it lets go of itself.
    """
    if vars(item).get("_instance") is not None:
        del item._instance
    if getattr(vars(item).get("_obj"), "__self__", None) is not None:
        del item._obj


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Once a failed test is in the report, its traceback holds nothing any more; what is left is an error."""
    report = yield
    complaint = item.stash.get(_COMPLAINT, None)
    if complaint is not None and call.excinfo is not None and call.excinfo.value is complaint:
        del item.stash[_COMPLAINT]
        # A mark that expects the test to fail does not expect it to leave something behind.
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
    if call.excinfo is not None and item.stash.get(_CHECKS, None):
        _let_go(item, call.excinfo.value)
    return report


def _let_go(item: pytest.Item, error: BaseException) -> None:
    if item.config.getoption("usepdb", False):
        return
    from .evidence import graph, traceback_of, unpin
    from .references import locals_of

    unpin(error, None)
    for one in graph(error):
        trace = traceback_of(one)
        while trace is not None:
            # pytest has asked for the variables, of which a frame then keeps a copy (before Python 3.13).
            locals_of(trace.tb_frame)
            trace = trace.tb_next
