"""Optimizers in their fused form, where torch has one and nobody chose another.

A fused update is one kernel for all parameters instead of several for each; torch leaves it off by default
only since it came later. Choosing is up to the user still: `fused=False`, `foreach=True` or
`differentiable=True` in the optimizer function is left as it is.
"""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_KINDS = (Adam, AdamW, SGD)
"""Not Adagrad, whose state exists as soon as it is built."""
_CHOICES = ("foreach", "fused", "differentiable", "capturable")


def fuse(optimizer: Optimizer) -> bool:
    """Let an optimizer update in its fused form from now on, if it has one and nobody chose.

    Args:
        optimizer: Newly built: its state must not exist yet, since the fused form keeps it otherwise.

    Returns:
        Whether it does so now.
    """
    kind = type(optimizer)  # of a subclass nobody knows what its update does
    chosen = any(optimizer.defaults.get(name) for name in _CHOICES)
    chosen = chosen or optimizer.defaults.get("fused") is False or optimizer.defaults.get("foreach") is False
    if kind not in _KINDS or chosen or optimizer.state:
        return False
    groups = optimizer.param_groups
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in groups):
        return False
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return False
    devices = {*_get_fused_kernels_supported_devices()}
    parameters = [p for group in groups for p in group["params"]]
    if not all(_fits(p, devices) for p in parameters):
        return False
    for options in (*groups, optimizer.defaults):
        options["fused"] = True
    # What the constructor does for `fused=True`.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def _fits(parameter: torch.Tensor, devices: set[str]) -> bool:
    plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    return plain and parameter.device.type in devices and torch.is_floating_point(parameter)
