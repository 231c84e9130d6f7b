"""Every private or experimental call of torch that the simulated device rests on, and nothing else.

Each has a canary test of its own (tests/sim/test_private.py), so that a release of torch that changes one
is noticed by name. They were tried with torch 2.13 only; 2.10 is the first release that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

SINCE = (2, 10)
"""The first release of torch in which a device can be registered from Python alone."""
UNTAKEN = "privateuseone"
"""The name of the one private device while nobody has registered it."""
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_SET = torch.ops.aten.set_.source_Storage_storage_offset._handle
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


META_KERNELS = str(Path(torch.__file__).parent / "_meta_registrations.py")
"""The file with torch's kernels for tensors that have a shape only."""
IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__
"""What a mode for torch functions is told of when `tensor.is_cuda` is asked."""
LAZY_INIT = "_lazy_init"
"""In `torch.cuda`: what everything that needs CUDA calls first, torch's own C++ among it."""
leaves_of: Callable[[Any], Iterable[Any]] = tree_iter
map_leaves: Callable[[Callable[[Any], Any], Any], Any] = tree_map


pinned: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.pin_memory
"""The method as it is, also while another one stands in its place."""


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view that is marked as one whose values are to be read as negative."""
    return torch._neg_view(tensor)


def too_old() -> str:
    """Why this torch has no devices in Python; empty if it has."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release >= SINCE:
        return ""
    return f"it needs torch {SINCE[0]}.{SINCE[1]} or newer, and this is {torch.__version__}"


def slot() -> str:
    """The name under which the one private device of the process is registered."""
    return str(torch._C._get_privateuse1_backend_name())


def register(name: str, module: ModuleType) -> None:
    """Register the private device under a name. Cannot be undone.

    Args:
        name: From then on a device type, as in `torch.device(name)`.
        module: What is to be found as `torch.<name>`.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def storage_over(pointer: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """A storage of a device over memory that somebody else owns."""
    made: Any = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    return made  # type: ignore[no-any-return]


empty_of: Callable[[Sequence[int], torch.dtype], torch.Tensor] = getattr(
    getattr(torch._C, "_acc", None), "create_empty_tensor", None
)  # type: ignore[assignment]
"""(size, dtype) -> a tensor of the private device without memory of its own; absent in an old torch."""


def put(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int | torch.SymInt,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Let a tensor stand over a storage, by the kernel of the CPU, which asks no allocator."""
    put_: torch.Tensor = _SET.redispatch_boxed(CPU_KEYS, tensor, storage, offset, size, stride)
    return put_


def operators() -> Iterator[tuple[str, Any]]:
    """(short name, operator) of everything in `aten` that Python can call."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        if namespace == "aten":
            operator = operator_of("aten", short)
            if operator is not None:
                yield short, operator


def operator_of(namespace: str, short: str) -> Any:
    """The operator with a name such as `add.Tensor`; `None` where Python cannot call it."""
    packet, _, overload = short.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


def collectives() -> Iterator[tuple[str, Any]]:
    """(short name, operator) of the collectives that have a kernel for the CPU."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        if namespace == "c10d" and has_kernel(name, "CPU"):
            yield short, operator_of("c10d", short)


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator, named with its namespace, has a kernel for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def below_autocast() -> AbstractContextManager[None]:
    """Within the block the operators called are not cast again."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)
    return guard


Patched = tuple[Callable[..., Any], Callable[..., Any], Callable[..., int], Callable[..., Any]]


def replace_storage_methods(new: Any, resize: Any, nbytes: Any, copy: Any) -> Patched:
    """Put methods of ours in the place of four of `torch.UntypedStorage`.

    Its constructor and `resize_` ask the device for an allocator, which a device in Python cannot have
    (torch 2.13 ends the process there).

    Returns:
        What stood there: `__new__`, `resize_`, `nbytes`, `copy_`.
    """
    kind: Any = torch.UntypedStorage
    before = kind.__new__, kind.resize_, kind.nbytes, kind.copy_
    kind.__new__, kind.resize_, kind.nbytes, kind.copy_ = staticmethod(new), resize, nbytes, copy
    kind.__init__ = _ignore
    return before


def _ignore(*_: Any, **__: Any) -> None:
    """`object.__init__` refuses arguments where `__new__` is not the class's own."""


COMPILER_PARTS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
"""What torch's compiler asks the module of a device for, when it first compiles anything."""


def give_compiler_part(name: str, part: type) -> None:
    """Let the compiler find something for a device also where it does not ask the device's module."""
    from torch._inductor.codegen import common

    common.get_device_op_overrides("cpu")  # the first question loads those of all known devices
    common.device_op_overrides_dict.setdefault(name, object.__new__(part))


def run_backward_where_it_is_called() -> None:
    """Let backward passes run on the thread that asks for them.

    torch gives each kind of device threads of its own for that, once and for all, at the first backward pass
    of the process; for a device that is registered later there are none, and it ends in an internal error.
    """
    before: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return before(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
