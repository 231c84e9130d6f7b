"""What a TPU adds to the lifecycles by way of torch_tpu, free of torch: the order is that of CUDA."""

from __future__ import annotations

from dataclasses import replace

from .monitors import CUDA

TPU = replace(
    CUDA,
    name="tpu",
    doc="one TPU as a PyTorch device; queued work is synchronised before anything moves home",
)
