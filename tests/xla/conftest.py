"""For the tests on torch_xla, which have an environment and a process of their own: `make test-xla`.

torch_xla 2.9 needs torch 2.9, and its runtime cannot be stopped. A session that collects other tests, too,
leaves these out; where there is no torch_xla each is skipped with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from interlock.backends import xla_calls

REASON = xla_calls.unavailable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips them all where torch_xla cannot run; in an environment that was made for it that is an error."""
    if REASON and os.environ.get("INTERLOCK_XLA"):
        pytest.exit(f"torch_xla cannot be used in the environment that was made for it: {REASON}", 1)
    for item in items if REASON else ():
        item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True, scope="session")
def loaded() -> None:
    """The runtime, once: on a TPU where there is one, or on what `PJRT_DEVICE` names."""
    if not REASON:
        xla_calls.Calls(spmd=False).begin()


@pytest.fixture(autouse=True)
def device_as_it_was(loaded: None) -> Iterator[None]:
    """Fails a test that leaves a tensor on the device, be it in a graph that Python cannot see."""
    calls = xla_calls.Calls(spmd=False)
    calls.begin()
    before = calls.counted().live
    yield
    after = calls.counted().live
    if after != before:
        pytest.fail(f"{after - before} more tensors than before are on the device", pytrace=False)
