"""For all tests: Hypothesis profiles, the process-state check, skips by what the machine has, evidence.

Fixtures that only one topic needs stand in that topic's file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tools import process_state
from tools.evidence import Evidence

# `deadline=None`: a first step compiles and a loaded machine stalls; each test has a time limit instead.
# `ci` is derandomized, so that an unrelated change never turns red by chance; `nightly` goes looking.
settings.register_profile("dev", max_examples=20, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True, derandomize=True)
settings.register_profile(
    "nightly", max_examples=2000, stateful_step_count=100, deadline=None, print_blob=True, derandomize=False
)
settings.load_profile(os.environ.get("INTERLOCK_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Fails a test that leaves the process other than it found it; see tools/process_state.py."""
    before = process_state.snapshot()
    yield
    if found := process_state.settled(before):
        pytest.fail("the test left the process changed:\n  " + "\n  ".join(found), pytrace=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves tests/sim and tests/xla out, unless asked for alone: each has a device for its whole process."""
    if collection_path not in (Path(__file__).parent / "sim", Path(__file__).parent / "xla"):
        return None
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if all(path.is_relative_to(collection_path) for path in asked) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --evidence, for `make nightly`."""
    parser.addoption(
        "--evidence", metavar="FILE", help="write the figures of this session to a Markdown FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts to collect figures when they are asked for."""
    if path := config.getoption("--evidence"):
        config.pluginmanager.register(Evidence(Path(path), os.environ.get("INTERLOCK_PROFILE", "ci")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips, with the reason, what this machine cannot run."""
    if item.get_closest_marker("spin"):
        missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA device")
