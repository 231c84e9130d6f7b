"""A sample of PyTorch's own operator samples, against the CPU; the page of evidence has all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tools import sim_coverage
from tools.runs import environment

SAMPLE = 60
COMPARED = """
import json, random, sys, warnings, torch
from interlock.backends import simulator
from tools import sim_coverage

warnings.simplefilter("ignore")
simulator.install()
dtype = getattr(torch, sys.argv[1])
everything = dict(sim_coverage.operators(dtype))
chosen = random.Random(0).sample(sorted(everything), int(sys.argv[2]))
chosen += [name for name, kind in sorted(sim_coverage.named()) if kind == sys.argv[1] and name not in chosen]
print(json.dumps({name: sim_coverage.compare(name, everything[name], dtype) for name in chosen}))
"""


@pytest.mark.parametrize("dtype", sim_coverage.DTYPES, ids=str)
def test_operators_differ_from_the_cpu_exactly_where_the_page_says_so(dtype: torch.dtype) -> None:
    # In a process of its own: the samples of some operators keep tensors in cycles.
    kind = str(dtype).removeprefix("torch.")
    words = [sys.executable, "-c", COMPARED, kind, str(SAMPLE)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    judged = {name: why for name, (why, _, _) in found.items() if name not in sim_coverage.UNSTEADY}
    named = {name for name, of in sim_coverage.named() if of == kind}
    assert {name for name, why in judged.items() if why} == named - set(sim_coverage.UNSTEADY), judged
    assert sum(samples for _, samples, _ in found.values()) > SAMPLE
    assert dtype == torch.int64 or sum(gradients for _, _, gradients in found.values()) > SAMPLE


def test_every_row_of_the_page_has_a_reason() -> None:
    assert {name for name, _ in sim_coverage.named()} <= {*sim_coverage.REASONS, *sim_coverage.UNSTEADY}


def test_a_wrong_bit_is_found() -> None:
    one = torch.ones(3)
    assert sim_coverage._differs("add", [one], [(one + 1e-7).to("sim")])
    assert not sim_coverage._differs("add", [one], [one.to("sim")])
    assert "stands on cpu" in sim_coverage._differs("add", [one], [one])
