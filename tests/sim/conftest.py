"""For the tests of the simulated device, which have a process of their own: it cannot be unregistered.

They run with `pytest tests/sim`; a session that collects other tests, too, leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interlock.backends import simulator


@pytest.fixture(autouse=True, scope="session")
def registered() -> None:
    """The device, for the whole process."""
    reason = simulator.unavailable()
    if reason:
        pytest.skip(f"the simulated device cannot be used here: {reason}")
    simulator.install()


@pytest.fixture(autouse=True)
def device_as_it_was() -> Iterator[None]:
    """Fails a test that leaves memory taken, a fault set, or the device lost."""
    before = simulator.memory.allocated
    yield
    left = [str(block) for block in simulator.memory.live()]
    if simulator.memory.allocated != before:
        pytest.fail(f"{simulator.memory.allocated - before} bytes are left: {left[-8:]}", pytrace=False)
    if simulator.lost() or simulator.memory.capacity is not None:
        pytest.fail("the device was left lost, or with a capacity", pytrace=False)
