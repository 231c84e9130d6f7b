"""One direction of imports: the checker finds each planted violation, and the repository has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import check_imports

ROOT = Path(__file__).parents[1]


def plant(root: Path, file: str, source: str) -> list[str]:
    """The findings, as text, in a tree that holds this file and the empty packages."""
    for folder in check_imports.PACKAGES:
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "__init__.py").touch()
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return [str(violation) for violation in check_imports.check(root)]


@pytest.mark.parametrize(
    ("file", "source", "line", "says"),
    [
        ("specs/a.py", "import torch\n", 1, "specs/ imports torch"),
        ("specs/a.py", "def f():\n    import torch\n", 2, "specs/ imports torch"),
        ("specs/a.py", "import rich\n", 1, "specs/ imports rich"),
        ("specs/a.py", "from interlock.backends import cpu\n", 1, "of backends/"),
        ("specs/a.py", "def f():\n    from interlock.backends.cpu import Cpu\n", 2, "of backends/"),
        ("specs/a.py", "from .. import backends\n", 1, "of backends/"),
        ("specs/a.py", "from ..backends.cpu import Cpu\n", 1, "of backends/"),
        ("specs/a.py", "from .. import Engine\n", 1, "of engine/"),
        ("specs/a.py", "import interlock\n", 1, "of engine/"),
        ("specs/a.py", "if TYPE_CHECKING:\n    from interlock import Engine\n", 2, "of engine/"),
        ("specs/deep/a.py", "from ...run import Run\n", 1, "of engine/"),
        ("specs/suite.py", "import pandas\n", 1, "specs/ imports pandas"),
        ("backends/a.py", "from interlock.run import Run\n", 1, "of engine/"),
        ("backends/a.py", "def f():\n    import interlock.run\n", 2, "of engine/"),
        ("backends/a.py", "import transitions\n", 1, "backends/ imports transitions"),
        ("backends/a.py", "import torch_xla\n", 1, "only inside a function"),
        ("engine/a.py", "import numpy\n", 1, "only inside a function"),
        ("engine/a.py", "class A:\n    import numpy\n", 2, "only inside a function"),
        ("engine/a.py", "try:\n    import numpy\nexcept ImportError:\n    pass\n", 2, "only inside"),
        ("engine/a.py", "import importlib\nimportlib.import_module('numpy')\n", 2, "only inside"),
        ("engine/a.py", "def f(x=__import__('numpy')):\n    pass\n", 1, "only inside"),
        ("engine/a.py", "import specs.model\n", 1, "second copy"),
        ("tests/test_a.py", "def test_a():\n    from engine import run\n", 2, "second copy"),
        ("examples/a.py", "from backends.cpu import Cpu\n", 1, "second copy"),
        ("backends/monitors.py", "import torch\n", 1, "must work without it"),
        ("backends/registry.py", "from torch import Tensor\n", 1, "must work without it"),
        ("engine/__init__.py", "import torch.nn\n", 1, "must work without it"),
        ("engine/cli.py", "try:\n    import torch\nexcept ImportError:\n    torch = None\n", 2, "must work"),
    ],
)
def test_finds_the_planted_violation(tmp_path: Path, file: str, source: str, line: int, says: str) -> None:
    found = plant(tmp_path, file, source)
    assert len(found) == 1, found
    assert found[0].startswith(f"{file}:{line}: ")
    assert says in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "specs/a.py",
            "import json\nimport transitions.extensions\nfrom .b import c\nfrom interlock.specs import d",
        ),
        ("specs/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
        ("specs/a.py", "import typing\nif typing.TYPE_CHECKING:\n    from torch import Tensor\n"),
        ("specs/suite.py", "import torch\nimport hypothesis\n"),
        ("backends/a.py", "import torch\nfrom interlock.specs import Spec\nfrom ..specs import Spec\n"),
        ("backends/a.py", "def f():\n    import torch_xla\n"),
        ("backends/monitors.py", "def f():\n    import torch\n"),
        (
            "engine/a.py",
            "import torch, rich.table, transitions\nfrom .backends import cpu\nfrom . import specs\n",
        ),
        ("engine/a.py", "def f():\n    import sklearn\n"),
        ("engine/cli.py", "def main():\n    import torch\n    import rich\n"),
        ("engine/cli.py", "if TYPE_CHECKING:\n    import torch\n"),
        ("tests/test_a.py", "import numpy\nfrom interlock.backends import cpu\n"),
    ],
)
def test_accepts_what_is_allowed(tmp_path: Path, file: str, source: str) -> None:
    assert plant(tmp_path, file, source) == []


def test_finds_torch_through_another_module(tmp_path: Path) -> None:
    plant(tmp_path, "engine/deep.py", "import torch\n")
    plant(tmp_path, "engine/middle.py", "from interlock.deep import x\n")
    found = plant(tmp_path, "engine/cli.py", "\nfrom . import middle\n")
    way = "engine/middle.py -> engine/deep.py -> torch (engine/deep.py:1)"
    assert found == [f"engine/cli.py:2: loads torch, and must work without it: {way}"]


def test_a_parent_package_counts_as_loaded(tmp_path: Path) -> None:
    plant(tmp_path, "backends/__init__.py", "from .cpu import Cpu\n")
    plant(tmp_path, "backends/cpu.py", "import torch\n")
    found = plant(tmp_path, "engine/cli.py", "from interlock.backends.monitors import MONITORS\n")
    assert [line.partition(": ")[0] for line in found] == ["backends/__init__.py:1", "engine/cli.py:1"]


def test_prints_places_and_fails(tmp_path: Path) -> None:
    plant(tmp_path, "specs/a.py", "\nimport torch\n")
    command = [sys.executable, check_imports.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "specs/a.py:2: specs/ imports torch" in done.stdout
    (tmp_path / "specs/a.py").unlink()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_repository_has_no_violation() -> None:
    assert [str(violation) for violation in check_imports.check(ROOT)] == []


def test_the_package_under_test_is_the_installed_wheel() -> None:
    import interlock

    assert interlock.__file__ is not None
    assert not Path(interlock.__file__).is_relative_to(ROOT / "engine")
    assert "site-packages" in Path(interlock.__file__).parts
