"""mypy and pyright accept the right programs in `typing/`, and reject the wrong ones line by line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import interlock

PROGRAMS = Path(__file__).parent / "typing"
PACKAGE_FOLDER = Path(interlock.__file__).parent.parent
EXPECTED = re.compile(r"#\s*expect: error\s*$")

Lines = set[tuple[str, int]]


def expected(folder: Path) -> Lines:
    """(file, line) of each line that is marked as wrong."""
    return {
        (path.name, number)
        for path in sorted(folder.glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if EXPECTED.search(line)
    }


def environment() -> dict[str, str]:
    """The checkers find the package where this process found it, and are told so only if they must be."""
    found = dict(os.environ)
    if "site-packages" not in str(PACKAGE_FOLDER):
        found["MYPYPATH"] = str(PACKAGE_FOLDER)
        found["PYTHONPATH"] = str(PACKAGE_FOLDER)
    return found


def mypy(folder: Path, scratch: Path) -> Lines:
    """Where mypy, strict, finds errors in the files of a folder."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file="]
    command += ["--no-error-summary", "--hide-error-context", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, "--cache-dir", str(scratch), *map(str, sorted(folder.glob("*.py")))],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error:", done.stdout, re.MULTILINE)
    return {(Path(path).name, int(line)) for path, line in found}


def pyright(folder: Path, scratch: Path) -> Lines:
    """Where pyright finds errors in the files of a folder."""
    # It reads only files below the folder of its settings.
    shutil.copytree(folder, scratch / "programs")
    settings = {
        "include": ["programs"],
        "typeCheckingMode": "strict",
        "reportMissingTypeStubs": False,
        "reportUnusedExpression": False,
        "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    if "site-packages" not in str(PACKAGE_FOLDER):
        settings["extraPaths"] = [str(PACKAGE_FOLDER)]
    (scratch / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(scratch)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    return {
        (Path(d["file"]).name, d["range"]["start"]["line"] + 1)
        for d in report["generalDiagnostics"]
        if d["severity"] == "error" and not d.get("rule", "").startswith("reportUnknown")
    }


CHECKERS = {"mypy": mypy, "pyright": pyright}


def require(tool: str) -> None:
    """Both are in the development environment; elsewhere a missing one is a reason to skip."""
    there = subprocess.run(
        [sys.executable, "-c", f"import {tool}"], capture_output=True, check=False
    ).returncode
    if there != 0 and not os.environ.get("CI"):
        pytest.skip(f"{tool} is not installed in this environment")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", CHECKERS)
def test_each_wrong_line_is_rejected_and_no_other(tool: str, tmp_path: Path) -> None:
    require(tool)
    assert len(expected(PROGRAMS)) >= 30
    assert CHECKERS[tool](PROGRAMS, tmp_path) == expected(PROGRAMS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", CHECKERS)
def test_a_wrong_line_without_a_mark_is_noticed(tool: str, tmp_path: Path) -> None:
    require(tool)
    planted = tmp_path / "planted"
    planted.mkdir()
    shutil.copy(PROGRAMS / "right.py", planted)
    with (planted / "right.py").open("a") as file:
        file.write("engine.open(task).train()\n")
    last = len((planted / "right.py").read_text().splitlines())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert CHECKERS[tool](planted, scratch) == {("right.py", last)}
