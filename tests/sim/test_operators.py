"""A sample of PyTorch's own operator samples, against the CPU; the page of evidence has all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from tools import sim_coverage
from tools.runs import environment

SAMPLE = 60
COMPARED = """
import json, random, warnings
from interlock.backends import simulator
from tools import sim_coverage

warnings.simplefilter("ignore")
simulator.install()
everything = dict(sim_coverage.operators())
chosen = random.Random(0).sample(sorted(everything), %d)
print(json.dumps({name: sim_coverage.compare(name, everything[name]) for name in chosen}))
"""


def test_operators_have_the_bits_of_the_cpu_but_for_those_that_the_page_names() -> None:
    # In a process of its own: the samples of some operators keep tensors in cycles.
    words = [sys.executable, "-c", COMPARED % SAMPLE]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    named = {
        line.split("`")[1] for line in sim_coverage.PAGE.read_text().splitlines() if line.startswith("| `")
    }
    assert {name: why for name, (why, _, _) in found.items() if why and name not in named} == {}
    assert sum(samples for _, samples, _ in found.values()) > SAMPLE
    assert sum(gradients for _, _, gradients in found.values()) > SAMPLE


def test_a_wrong_bit_is_found() -> None:
    one = torch.ones(3)
    assert sim_coverage._differs("add", [one], [(one + 1e-7).to("sim")])
    assert not sim_coverage._differs("add", [one], [one.to("sim")])
    assert "stands on cpu" in sim_coverage._differs("add", [one], [one])
