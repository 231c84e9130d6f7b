"""The weights of a checkpoint alone: for whoever evaluates, predicts, or goes on without Interlock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint import look
from .store import Store


def weights_of(checkpoint: str | Path) -> dict[str, Any]:
    """The weights that a checkpoint holds, for `model.load_state_dict`.

    Args:
        checkpoint: The directory of one, as `Outcome.checkpoint` names it; or a folder of checkpoints, of
            which the newest is taken.

    Returns:
        Name -> tensor on the host, of parameters and persistent buffers, tied ones under each of their
        names; and the extra state of modules.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = Path(checkpoint)
    found = Store(path).newest() if path.is_dir() else None
    saved = found or look(path)
    state = Store(saved.path.parent).read(saved)
    weights: dict[str, Any] = {**state["parameters"], **state["buffers"]}
    for group in state["ties"]:
        known = next((weights[name] for name in group if name in weights), None)
        weights.update({name: known for name in group if known is not None})
    for name, extra in state["modules"].items():
        weights[f"{name}._extra_state" if name else "_extra_state"] = extra
    return weights
