"""What the Apple GPU adds to the lifecycles, free of torch: the order is that of a CUDA device."""

from __future__ import annotations

from dataclasses import replace

from .monitors import CUDA

MPS = replace(CUDA, name="mps", doc="one Apple GPU; queued work is synchronised before anything moves home")
