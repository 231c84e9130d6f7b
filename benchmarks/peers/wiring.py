"""What each library does when a job is put together wrongly: an error, or silence?

- `early`: the optimizer is built before a placement that replaces Parameters, as on XLA.
- `foreign`: it holds the parameters of a copy of the model.
- `missing`: it holds all parameters but one.
- `nan`: every loss is NaN.
- `again`: nothing is wrong; the same handle is used for a second run.
"""

from __future__ import annotations

from typing import Any

import torch
from bench.timing import Tell
from torch import nn

from .libraries import LIBRARIES, Library
from .loops import quieten
from .probe import STEPS, Probe

MISTAKES = ("early", "foreign", "missing", "nan", "again")


def wiring(library: str, tell: Tell) -> dict[str, str]:
    """Mistake -> what happened, in words."""
    quieten()
    torch.set_num_threads(1)
    found = {}
    for mistake in MISTAKES:
        found[mistake] = _try(LIBRARIES[library](), mistake)
        tell(len(found) / len(MISTAKES))
    return found


def _try(library: Library, mistake: str) -> str:
    if mistake == "again":
        return _twice(library)
    probe = Probe(mistake=mistake, keeps=True)
    # What XLA does to every module that is moved, done on the CPU. Interlock's double does it by itself.
    torch.__future__.set_overwrite_module_params_on_conversion(mistake == "early")
    try:
        library.run(library.handle(probe), probe)
    except Exception as error:
        return f"error: {type(error).__name__}"
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return f"silent: {_trained(probe)}"


def _twice(library: Library) -> str:
    probe = Probe()
    handle = library.handle(probe)
    library.run(handle, probe)
    probe.updates = 0
    try:
        library.run(handle, probe)
    except Exception as error:
        return f"error: {type(error).__name__}"
    return "trains" if probe.updates == STEPS else f"silent: {probe.updates} of {STEPS} updates"


def _trained(probe: Probe) -> str:
    """How many parameters are no longer what they were, or are NaN."""
    model = probe.model
    if model is None:
        return "no model was seen"
    before, after = _values(Probe().build()), _values(model)
    if any(value.isnan().any() for value in after):
        return "the model is NaN"
    changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return f"{changed} of {len(before)} parameters trained"


def _values(model: nn.Module) -> list[Any]:
    return [parameter.detach() for parameter in model.parameters()]
