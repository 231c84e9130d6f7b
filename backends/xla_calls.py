"""Everything that is asked of torch_xla, and nothing else: what is asked when is decided in `xla.py`.

torch_xla is imported when the device is taken, and not before: importing it sets environment variables,
and the first question about a device starts its runtime, which cannot be started again in this process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from .adapter import DeviceFacts
from .errors import DeviceUnavailable


def unavailable() -> str:
    """Why torch_xla cannot be used here, in a few words; imports nothing of it."""
    if find_spec("torch_xla") is None:
        return (
            "torch-xla is not installed: it needs torch 2.9, so give it an environment of its own, "
            "pip install 'interlock[xla]'"
        )
    try:
        installed = version("torch_xla")
    except PackageNotFoundError:
        return ""  # built from source, with the torch that is here
    if _release(installed) != _release(torch.__version__):
        return (
            f"torch-xla {installed} needs torch {_release(installed)}, and this is torch {torch.__version__}"
        )
    return ""


def _release(name: str) -> str:
    return ".".join(name.split(".")[:2])


def initialised() -> bool:
    """Whether the runtime runs in this process; asks without starting it."""
    native: Any = sys.modules.get("_XLAC")
    return native is not None and bool(native._xla_runtime_is_initialized())


@dataclass(frozen=True)
class Counted:
    """What torch_xla has counted in this process so far.

    Attributes:
        live: Tensors on the device that are alive, those included that only a graph holds.
        programs: Programs that were compiled.
        seconds: Spent on that.
        reads: Times that a value was read, one by one, or that XLA left an operation to the host.
    """

    live: int
    programs: int
    seconds: float
    reads: int


class Calls:
    """The calls, on the device of this process.

    Args:
        spmd: Spread batches over all devices of this host, as one.
    """

    def __init__(self, spmd: bool) -> None:
        self.spmd = spmd
        self._xla: Any = None
        self._native: Any = None
        self._metrics: Any = None
        self._device = torch.device("xla", 0)
        self._mesh: Any = None

    def begin(self) -> DeviceFacts:
        """Load torch_xla, start its runtime if it does not run, and say what it runs on."""
        self._xla = importlib.import_module("torch_xla")
        self._native = self._xla._XLAC
        self._metrics = importlib.import_module("torch_xla.debug.metrics")
        runtime = importlib.import_module("torch_xla.runtime")
        started = bool(self._native._xla_runtime_is_initialized())
        if started and self.spmd != bool(runtime.is_spmd()):
            # torch_xla itself would end the process, or fail later.
            how = "for one device" if self.spmd else "over all devices (SPMD)"
            raise DeviceUnavailable(
                f"torch_xla runs {how} in this process already, and cannot be switched: let all runs of a "
                "process pass the same `XlaAdapter(spmd=...)`"
            )
        if self.spmd and self._mesh is None:
            runtime.use_spmd()
            sharding = importlib.import_module("torch_xla.distributed.spmd")
            count = runtime.global_runtime_device_count()
            self._mesh = sharding.Mesh(torch.arange(count).numpy(), (count,), ("batch",))
        self._device = self._xla.device()
        facts = {
            "hardware": str(runtime.device_type()),
            # Under SPMD the device stands for all of them, and has no kind.
            "kind": "all" if self.spmd else str(self._native._xla_device_kind(str(self._device))),
            "devices": str(runtime.global_runtime_device_count() if self.spmd else 1),
            "process": f"{runtime.process_index() + 1} of {runtime.process_count()}",
            "torch_xla": str(self._xla.__version__),
            "memory": self._memory(),
        }
        return DeviceFacts(self._device, f"XLA on {facts['hardware']}", facts)

    def _memory(self) -> str:
        """In bytes, where the hardware tells: the CPU does not."""
        try:
            info = self._native._xla_memory_info(str(self._device))
        except RuntimeError:
            return "not told"
        return f"{info.get('bytes_limit', 'unknown')} bytes"

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return tensor.to(self._device)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor of a batch, laid out over all devices by its first dimension if that fits."""
        if self._mesh is None or not tensor.ndim or tensor.shape[0] % self._mesh.size():
            return self.there(tensor)
        sharding = importlib.import_module("torch_xla.distributed.spmd")
        layout = sharding.ShardingSpec(self._mesh, ("batch", *[None] * (tensor.ndim - 1)))
        # Not by `mark_sharding`, after which torch_xla counts one tensor more for ever.
        made: list[torch.Tensor] = self._native._xla_tensors_from_aten(
            [tensor], [str(self._device)], [layout.xla_spec(tensor)]
        )
        return made[0]

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of the host."""
        return tensor.cpu()

    def read(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """Values of scalars, by one copy and without a program."""
        return [float(value) for value in self._native._xla_get_cpu_tensors(list(tensors))]

    def cut(self) -> None:
        """Have what was traced compiled and run; waits for the compilation only."""
        self._xla.sync()

    def wait(self) -> None:
        """The same, and wait until it has run."""
        self._xla.sync(wait=True)

    def random_state(self) -> torch.Tensor:
        """The state of the generator, which `torch.manual_seed` leaves alone: eight bytes."""
        state = int(self._native._xla_get_rng_seed(str(self._device)))
        return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Let the generator go on from a state."""
        self.seed(int.from_bytes(bytes(state.tolist()), "little"))

    def seed(self, seed: int) -> None:
        """Let the generator begin at a number from 0 to 2 ** 64 - 1."""
        self._native._xla_set_rng_seed(seed, str(self._device))

    def number(self, tensor: torch.Tensor) -> int:
        """Tells tensors of the device apart; they are counted up as they are made."""
        return int(self._native._xla_get_tensor_id(tensor))

    def next_number(self) -> int:
        """The number of a tensor that is made now."""
        return self.number(self.there(torch.empty(0)))

    def counted(self) -> Counted:
        """What has been counted so far."""
        count = self._metrics.counter_value
        compiled = self._metrics.metric_data("CompileTime")
        return Counted(
            live=(count("CreateXlaTensor") or 0) - (count("DestroyXlaTensor") or 0),
            programs=self.programs(),
            seconds=compiled[1] / 1e9 if compiled else 0.0,
            # What XLA does itself is counted under `xla::`.
            reads=sum(
                count(name) or 0 for name in self._metrics.counter_names() if name.startswith("aten::")
            ),
        )

    def programs(self) -> int:
        """How many programs were compiled so far; costs a fraction of a microsecond."""
        return self._metrics.counter_value("UncachedCompile") or 0
