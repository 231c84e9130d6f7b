"""What each library does when a job is put together wrongly: an error, or silence?

- `early`: the optimizer is built before a placement that replaces Parameters, as on XLA.
- `foreign`: it holds the parameters of a copy of the model.
- `missing`: it holds all parameters but one.
- `frozen`: one of the parameters that it holds is frozen.
- `replaced`: in mid-run, another Parameter takes the place of one that it holds.
- `detached`: the loss is not connected to the model.
- `nan`: every loss is NaN.
- `hasty`, `twice`, `unzeroed`: in a step that the user writes, the update comes before the backward pass;
  there are two for one; gradients are never zeroed.
- `again`: nothing is wrong; the same handle is used for a second run.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from bench.timing import Tell
from torch import nn

from .libraries import LIBRARIES
from .library import ORDERS, Library
from .loops import quieten
from .probe import STEPS, Probe

MISTAKES = ("early", "foreign", "missing", "frozen", "replaced", "detached", "nan", *ORDERS, "again")

NOT_WRITTEN = "its user writes no such step"


def wiring(library: str, tell: Tell) -> dict[str, str]:
    """Mistake -> what happened, in words."""
    quieten()
    torch.set_num_threads(1)
    kind = LIBRARIES[library]
    right, usual = _watched(kind(), Probe(keeps=True))
    if right != f"silent: 4 of {len(_values(Probe().build()))} parameters trained":
        raise RuntimeError(f"the job without a mistake: {right}")
    found = {}
    for mistake in MISTAKES:
        found[mistake] = _try(kind(), mistake, usual)
        tell(len(found) / len(MISTAKES))
    return found


def _try(library: Library, mistake: str, usual: set[str]) -> str:
    if mistake == "again":
        return _twice(library)
    if mistake in ORDERS and not library.writes_steps:
        return NOT_WRITTEN
    result, said = _watched(library, Probe(mistake=mistake, keeps=True))
    if warned := sorted(said - usual):
        return f"warning: {', '.join(warned)}; {result.removeprefix('silent: ')}"
    return result


def _watched(library: Library, probe: Probe) -> tuple[str, set[str]]:
    """How a run ends, and the kinds of warnings that it gives."""
    # What XLA does to every module that is moved, done on the CPU. Interlock's double does it by itself.
    torch.__future__.set_overwrite_module_params_on_conversion(probe.mistake == "early")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            library.run(library.handle(probe), probe)
            result = f"silent: {_trained(probe)}"
        except Exception as error:
            result = f"error: {type(error).__name__}"
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
    return result, {warning.category.__name__ for warning in caught}


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
    """How many parameters are no longer what they were, or are NaN, or are not what is right."""
    model = probe.model
    if model is None:
        return "no model was seen"
    before, after = _values(Probe().build()), _values(model)
    if any(value.isnan().any() for value in after):
        return "the model is NaN"
    changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    wrong = not all(torch.equal(a, b) for a, b in zip(_right(), after, strict=True))
    return f"{changed} of {len(before)} parameters trained" + (
        ", to wrong values" if wrong and changed == len(before) else ""
    )


def _right() -> list[Any]:
    """The weights that the job without a mistake ends with."""
    probe = Probe(keeps=True)
    by_hand = LIBRARIES["by hand"]()
    by_hand.run(by_hand.handle(probe), probe)
    return _values(probe.model) if probe.model is not None else []


def _values(model: nn.Module) -> list[Any]:
    return [parameter.detach() for parameter in model.parameters()]
