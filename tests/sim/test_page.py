"""The page of the simulated device: its blocks run, in a process that may have the device."""

from __future__ import annotations

import subprocess
import sys

from tools import check_docs
from tools.runs import environment


def test_the_examples_of_the_page_run() -> None:
    page = check_docs.ROOT / "docs" / check_docs.ON_SIM
    words = [sys.executable, str(check_docs.__file__), str(page)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=110, check=False)
    assert done.returncode == 0, done.stdout
