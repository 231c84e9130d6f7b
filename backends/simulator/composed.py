"""Kernels of the simulated device for operators that torch would take apart otherwise than on the CPU.

Other kernels, and other bits, would come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .kernels import run
from .tensors import alias

aten = torch.ops.aten


def convolution(*args: Any) -> Any:
    """Devices outside of torch have a convolution of their own to give."""
    return run(aten.convolution.default, *args)


def convolution_backward(grad: Any, input: Any, weight: Any, *rest: Any) -> Any:  # noqa: A002 - torch's name
    """Its gradients. torch does not tell such devices the bias's size: that of the output's channels."""
    transposed, groups = rest[3], rest[5]
    bias = [weight.size(1) * groups if transposed else weight.size(0)]
    return run(aten.convolution_backward.default, grad, input, weight, bias, *rest)


_FLASH = 1
"""What `_fused_sdp_choice` says for the kernel that the CPU has."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention by the kernel that the CPU would choose."""
    mask = attn_mask
    if query.dim() == 4 and not dropout_p and not enable_gqa:
        q, k, v = (alias(t.detach()).requires_grad_(t.requires_grad) for t in (query, key, value))
        given = None if mask is None else alias(mask.detach())
        if aten._fused_sdp_choice(q, k, v, given, dropout_p, is_causal, scale=scale) == _FLASH:
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
            flash = aten._scaled_dot_product_flash_attention_for_cpu
            out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
            return out
    math = aten._scaled_dot_product_attention_math
    plain: torch.Tensor = math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def lstm_cell(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    """The cell that torch takes for a fused one on every device but the CPU, from plain operators."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = (input_gates + input_bias) + (hidden_gates + hidden_bias)
    entry, forget, cell, out = gates.chunk(4, 1)
    state_ = forget.sigmoid() * cx + entry.sigmoid() * cell.tanh()
    return out.sigmoid() * state_.tanh(), state_, gates


def gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    """The same for a gated recurrent unit."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    reset_in, update_in, new_in = input_gates.chunk(3, 1)
    reset_h, update_h, new_h = hidden_gates.chunk(3, 1)
    update = (update_in + update_h).sigmoid()
    new = (new_in + (reset_in + reset_h).sigmoid() * new_h).tanh()
    return (hx - new) * update + new, new


COMPOSED: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
    "scaled_dot_product_attention": attention,
}
"""Operator -> what it is composed of here, above autograd."""
