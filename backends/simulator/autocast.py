"""Autocast on the simulated device: the lists of operators are those that PyTorch documents for CUDA.

https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from . import private
from .kernels import state

_LOWER = (
    "mm addmm bmm baddbmm addbmm addmv addr mv matmul linear conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d chain_matmul linalg_multi_dot _convolution prelu "
    "scaled_dot_product_attention"
).split()
_FLOAT32 = (
    "acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity cumprod "
    "cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log "
    "log10 log1p log2 log_softmax margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss "
    "native_layer_norm nll_loss nll_loss2d norm pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss"
).split()


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(operator, what casts its arguments first) for each that autocast changes."""
    for names, lower in ((_LOWER, True), (_FLOAT32, False)):
        for name in names:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operator = getattr(packet, overload)
                if not any(argument.is_out for argument in operator._schema.arguments):
                    yield (
                        name if overload == "default" else f"{name}.{overload}",
                        _cast_first(operator, lower),
                    )


def _cast_first(operator: Any, lower: bool) -> Callable[..., Any]:
    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(state.device.type) if lower else torch.float32

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and _casts(value, dtype) else value

        with private.below_autocast():
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return cast_and_run


def _casts(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    there = tensor.device.type == state.device.type
    return there and tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)
