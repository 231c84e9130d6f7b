"""The examples run as they say, each in a process of its own; `digits` is the project's main job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.runs import command, environment

from interlock.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=folder,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout + done.stderr


def test_the_main_job_learns_digits_and_leaves_nothing(tmp_path: Path):
    began = time.monotonic()
    journal, drawing = tmp_path / "digits.jsonl", tmp_path / "digits.svg"
    done = command(
        "fit",
        f"{EXAMPLES}/digits.py:task",
        "--journal",
        journal,
        "--drawing",
        drawing,
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["metrics"]["val_accuracy"] >= 0.97
    assert result["residue"] == {"known": True, "bytes": 0, "text": "0 bytes"}
    assert result["replay"]["result"] == "proved"
    assert "taken" in drawing.read_text()
    assert time.monotonic() - began < 120
    assert "interlock: epoch 15/15, step 675/675, " in done.stderr
    assert main(["check", "--journal", str(journal)]) == 0


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES.glob("*.py") if path.name != "digits.py"])
def test_each_example_runs(tmp_path: Path, name: str):
    said = run(name, tmp_path)
    expected = {
        "bring.py": "outcome: finished, 300 steps; on the device afterwards: 0 bytes",
        "chars.py": "of the characters foreseen",
        "embed.py": "serving: the point (0.1, -0.2) lies inside the circle",
        "fails.py": "broken: failed, clean, after 25 steps",
        "backend.py": "the shelf's lifecycle is proved: ",
        "gan.py": "the generator's points are ",
        "lbfgs.py": "fitted: slopes [2.0, -1.0, 0.5], offset 3.0",
        "thaw.py": "thawed in 2 steps: accuracy 0.9",
    }
    assert expected[name] in said
