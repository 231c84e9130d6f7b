"""Exported weights are read by safetensors itself, with ties stored once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interlock.checkpoint import CheckpointError
from interlock.export import export_weights
from interlock.specs.errors import MissingExtra


class Tied(nn.Module):
    """Tied weights, a transposed one, two views of one storage, an empty parameter, both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 3)
        self.out = nn.Linear(3, 3)
        self.out.weight = self.into.weight
        self.across = nn.Parameter(torch.rand(2, 3).t())
        both = torch.rand(4)
        self.left, self.right = nn.Parameter(both[:2]), nn.Parameter(both[2:])
        self.whole = nn.Parameter(both)
        self.fine = nn.Parameter(torch.rand(2).to(torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.arange(3), persistent=False)


def reading(path: Path) -> Any:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    return safetensors.safe_open(path, framework="pt")


def test_it_is_read_back_by_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    model = Tied()
    path = export_weights(model, tmp_path / "weights.safetensors")
    with reading(path) as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        metadata = file.metadata()
    expected = {**dict(model.named_parameters()), "kept": model.kept}
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert json.loads(metadata["ties"]) == [["into.weight", "out.weight"]]
    assert [one.name for one in tmp_path.iterdir()] == ["weights.safetensors"]


def test_it_replaces_a_file_and_is_whole_or_not_there(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "weights.safetensors"
    path.write_text("earlier")
    model = nn.Module()
    model.register_buffer("thin", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match="make 'thin' dense"):
        export_weights(model, path)
    model.thin = torch.empty(2, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match="convert what it names"):
        export_weights(model, path)
    assert path.read_text() == "earlier"
    export_weights(nn.Linear(1, 1), path)
    assert path.stat().st_size > 7
    with pytest.raises(CheckpointError, match="choose another file"):
        export_weights(nn.Linear(1, 1), tmp_path / "none" / "weights.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["weights.safetensors"]


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtra, match=r'pip install "interlock\[safetensors\]"'):
        export_weights(nn.Linear(1, 1), tmp_path / "weights.safetensors")
    assert list(tmp_path.iterdir()) == []
