"""Autocast on the simulated device: what runs in lower precision, what in float32, what in the widest dtype.

The lists are those that torch has for CUDA and other accelerators, in ATen/autocast_mode.h of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import private
from .tensors import state

_LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum "
    "mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention "
).split()
_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm "
    "frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa "
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList "
    "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim"
).split()
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add "
).split()


_REFUSED = {
    "binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )
}
"""Operator -> the words in which CUDA refuses it."""


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(operator, what casts its arguments first) for each that autocast changes."""
    for names, dtype in ((_LOWER, _lower), (_FLOAT32, _float32), (_WIDEST, _widest)):
        for name in names:
            operator = private.operator_of("aten", name)
            if operator is not None:
                yield name, _cast_first(operator, dtype)
    for name, told in _REFUSED.items():
        yield name, _refuse(told)


def _refuse(told: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(told)

    return refuse


def _lower(_: Any) -> torch.dtype:
    return torch.get_autocast_dtype(state.device.type)


def _float32(_: Any) -> torch.dtype:
    return torch.float32


def _widest(arguments: Any) -> torch.dtype:
    wide = any(
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        for leaf in private.leaves_of(arguments)
    )
    return torch.float32 if wide else _lower(arguments)


def _cast_first(operator: Any, dtype_of: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of((args, kwargs))

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and _casts(value, dtype) else value

        with private.below_autocast():
            return operator(*private.map_leaves(cast, args), **private.map_leaves(cast, kwargs))

    return cast_and_run


def _casts(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    there = tensor.device.type == state.device.type
    return there and tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)
