"""Optimizers in their fused form, where torch has one and nobody chose another.

A fused update is one kernel for all parameters instead of several for each; torch leaves it off by default
only since it came later. Choosing is up to the user still: `fused=False`, `foreach=True` or
`differentiable=True` in the optimizer function is left as it is.

On the CPU the fused kernels go over memory, whatever the strides are, and say nothing where those of a
parameter and its gradient differ: the update would be wrong. So it has to be known here that they do not.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_KINDS = (Adam, AdamW, SGD)
"""Not Adagrad, whose state exists as soon as it is built."""
_CHOICES = ("foreach", "fused", "differentiable", "capturable")
_ours: WeakSet[Optimizer] = WeakSet()
"""Those that are fused because nobody chose."""


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
    _ours.add(optimizer)
    return True


def settle(optimizer: Optimizer) -> bool:
    """Before its first update, when there are gradients: take back what they do not allow.

    Args:
        optimizer: Fused by `fuse`, or not; where the user chose the fused form, it is left as it is.

    Returns:
        Whether it is in its plain form again: a gradient is sparse, or not laid out as its parameter; or a
        parameter has come since that does not fit.
    """
    if type(optimizer) not in _KINDS or optimizer not in _ours:
        return False
    if all(_alike(p) for group in optimizer.param_groups for p in group["params"]):
        return False
    _ours.discard(optimizer)
    for options in (*optimizer.param_groups, optimizer.defaults):
        options["fused"] = None
    del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
    return True


def _alike(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return _dense(parameter)
    if gradient.layout is not torch.strided:
        return False
    strides = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    alike = all(size == 1 or mine == its for size, mine, its in strides) or not parameter.numel()
    return alike and _dense(parameter)


def _fits(parameter: torch.Tensor, devices: set[str]) -> bool:
    plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided and _dense(parameter)
    return plain and parameter.device.type in devices and torch.is_floating_point(parameter)


def _dense(parameter: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory: no gaps between them, and none stored twice."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
