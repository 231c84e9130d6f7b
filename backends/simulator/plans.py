"""What is known of an operator before it is called: what of its arguments has to be converted, and how.

Which operators take a number that stands on the host is CUDA's rule, as in `native_functions.yaml` of torch
2.13 (`device_check: NoCheck`): most of those that work element by element, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INDEXING = frozenset(
    "aten::index aten::index_put aten::index_put_ aten::_index_put_impl_ aten::_unsafe_index "
    "aten::_unsafe_index_put".split()
)
"""Their indices may stand on the host, and the tensor they index decides where the result is."""
INDICES = 1
"""The position of the indices in all of them."""


_NUMBERS = frozenset(
    "__irshift__ _index_put_impl_ _unsafe_index_put as_strided_scatter bernoulli_ binary_cross_entropy "
    "binary_cross_entropy_with_logits binomial copy_ copysign_ diagonal_scatter dist eq_ fill_ floor_divide "
    "floor_divide_ ge_ gt_ heaviside_ index index_fill index_fill_ index_put index_put_ is_same_size "
    "is_set_to le_ lt_ masked_fill masked_fill_ mse_loss ne_ rsub select_scatter set_ slice_scatter "
    "smooth_l1_loss".split()
)
"""Not tagged as pointwise by torch, and take a number of the host all the same."""
_CHECKED = frozenset(
    "clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ equal gcd gcd_ gelu_backward igamma igamma_ "
    "igammac igammac_ lcm lcm_ ldexp ldexp_ logaddexp logaddexp2 logit_backward native_dropout_backward "
    "nextafter nextafter_ sigmoid_backward silu_backward tanh_backward threshold_backward".split()
)
"""Tagged as pointwise, and take none."""
_CONVERTED = ("Tensor", "Device", "Generator")


class Plan:
    """What is known of an operator before it is called.

    Attributes:
        name: With its namespace, without the overload.
        call: What computes it.
        anyhow: The same, by whichever overload takes a Python number for a tensor.
        indexing: Its indices may stand on the host.
        reshapes: It may change size, strides or storage of its arguments.
        converts: The positions of arguments that may be tensors, or name a device or a generator.
        numbers: A tensor of the host without dimensions may stand for a number in it.
        returns: For an operator that returns its arguments: the position or name of each.
        writes: The positions or names of the arguments that it changes.
        bumps: Those of them that are lists of tensors whose versions torch leaves to the kernel.
    """

    __slots__ = (
        "anyhow",
        "bumps",
        "call",
        "converts",
        "indexing",
        "name",
        "numbers",
        "reshapes",
        "returns",
        "writes",
    )

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        self.name: str = schema.name
        self.call: Callable[..., Any] = operator._op
        self.anyhow: Callable[..., Any] = operator.overloadpacket
        self.indexing = self.name in _INDEXING
        kinds = [str(a.type) for a in schema.arguments if not a.kwarg_only]
        self.converts = tuple(i for i, kind in enumerate(kinds) if any(word in kind for word in _CONVERTED))
        self.numbers = _takes_numbers(operator)
        out = [a.name for a in schema.arguments if a.is_out]
        self.reshapes = torch.Tag.inplace_view in operator.tags or bool(out)
        written = [
            (a.name if a.kwarg_only else number, a.alias_info)
            for number, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.writes: tuple[int | str, ...] = tuple(key for key, _ in written)
        lists = self.name.startswith(("aten::_foreach_", "aten::_amp_foreach_"))
        self.bumps = tuple(n for n in self.writes if type(n) is int and "List" in kinds[n]) if lists else ()
        self.returns: tuple[int | str, ...] = ()
        if schema.returns and all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
            names = {frozenset(info.before_set): key for key, info in written}
            found = [names.get(frozenset(r.alias_info.before_set)) for r in schema.returns]
            if None not in found:
                self.returns = tuple(key for key in found if key is not None)

    def takes_from_host(self, key: int | str, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is not of the device may be given beside those that are, as on CUDA.

        Args:
            key: The position or name of the argument that it is, or stands in.
            tensor: Of another device.
        """
        if tensor.device.type != "cpu" or key in self.writes:
            return False
        if self.indexing and key == INDICES:
            return True
        return self.numbers and tensor.dim() == 0


def _takes_numbers(operator: Any) -> bool:
    namespace, _, name = operator._schema.name.partition("::")
    if namespace != "aten":
        return True  # whoever wrote it checks its devices
    if name.startswith("_foreach_") or name in _NUMBERS:
        return True
    if operator._schema.overload_name == "tensor_lr":
        return True  # of a fused optimizer: the learning rate may stand on the host
    return torch.Tag.pointwise in operator.tags and name not in _CHECKED
