"""The page of the simulated device: its blocks run, in the process that has the device."""

from __future__ import annotations

from tools import check_docs


def test_the_examples_of_the_page_run() -> None:
    page = check_docs.ROOT / "docs" / check_docs.ON_SIM
    assert [str(problem) for problem in check_docs.run_page(page)] == []
