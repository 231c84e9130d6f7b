"""How much of PyTorch the simulated device can: PyTorch's own samples of its operators, against the CPU.

    python tests/tools/sim_coverage.py            # writes docs/evidence/sim-operators.md

Each operator with up to four samples of each dtype, forward and gradient, has to give the bits of the CPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from interlock.backends import simulator

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "sim-operators.md"
SAMPLES = 4
DTYPES = (torch.float32, torch.complex64, torch.int64)
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Their values are not defined, so only shapes are compared."""


REASONS = {
    "tensor_split": "where to split is read on the host: torch refuses it on any device, CUDA too",
    **dict.fromkeys(
        ("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"),
        "refused: sparse tensors cannot stand there",
    ),
}
"""Name -> why it is other than on the CPU, where that is meant."""
UNSTEADY = dict.fromkeys(
    ("linalg.lstsq", "linalg.lstsq.grad_oriented"),
    "not judged: the CPU itself gives other bits for another copy of the same input (driver `gelsy`)",
)
"""Name -> why nothing can be said."""


def operators(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """(name, entry) of the operators that take a dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    for entry in op_db:
        if dtype in entry.dtypes:
            yield f"{entry.name}.{entry.variant_test_name}".rstrip("."), entry


def named() -> set[tuple[str, str]]:
    """(operator, dtype) of each that the page names as other than on the CPU."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {(row[1].strip(" `"), row[2].strip()) for row in rows}


def compare(name: str, entry: Any, dtype: torch.dtype) -> tuple[str, int, int]:
    """Why an operator is other than on the CPU, or nothing; how many samples and gradients were compared."""
    samples = gradients = 0
    try:
        grads = entry.supports_autograd and dtype != torch.int64
        for number, sample in enumerate(entry.sample_inputs("cpu", dtype, requires_grad=grads)):
            if number == SAMPLES:
                break
            # Copies, as moving to a device makes them: memory beside a view is not among what is given.
            given = tree_map(_copied, (sample.input, sample.args, sample.kwargs))
            ours = tree_map(_there, given)
            torch.manual_seed(0)
            try:
                expected = entry(given[0], *given[1], **given[2])
            except Exception:
                continue  # not for the CPU either
            torch.manual_seed(0)
            found = entry(ours[0], *ours[1], **ours[2])
            samples += 1
            why = _differs(name, _tensors(expected), _tensors(found))
            if why:
                return why, samples, gradients
            pairs = _gradients(given, expected), _gradients(ours, found)
            if pairs[0] is None or pairs[1] is None:
                continue
            gradients += 1
            why = _differs(name, pairs[0], pairs[1])
            if why:
                return f"gradient: {why}", samples, gradients
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        return f"{type(error).__name__}: {' '.join(first)[:120]}", samples, gradients
    return "", samples, gradients


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _there(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("sim").requires_grad_(value.requires_grad)
    named = isinstance(value, (str, torch.device)) and str(value) == "cpu"
    return "sim" if named else value


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _gradients(given: Any, out: Any) -> list[Any] | None:
    inputs = [t for t in _tensors(given) if t.requires_grad]
    outs = [t for t in _tensors(out) if t.requires_grad]
    if not inputs or not outs:
        return None
    try:
        found = torch.autograd.grad(sum(t.abs().sum() for t in outs), inputs, allow_unused=True)
    except RuntimeError:
        if inputs[0].device.type == "cpu":
            return None
        raise
    return list(filter(_there_is, found))


def _there_is(gradient: Any) -> bool:
    """One that an input does not have is `None`."""
    return gradient is not None


def _differs(name: str, expected: list[Any], found: list[Any]) -> str:
    for one, other in zip(expected, found, strict=True):
        if other.device.type != "sim":
            return f"the result stands on {other.device}"
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {tuple(one.shape)} became {other.dtype} {tuple(other.shape)}"
        if name.partition(".")[0] in UNDEFINED:
            continue
        mine, theirs = _plain(one), _plain(other.cpu())
        if not torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs)):
            return f"differs by up to {(mine - theirs).abs().max().item():.2g}"
    return ""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Values only, in a dtype that can be compared."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return values.to(torch.complex64) if values.dtype == torch.complex32 else values


def main() -> int:
    """Compare all of them, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write the page (%(default)s)")
    page: Path = parser.parse_args().page
    simulator.install()
    torch.set_num_threads(1)
    rows, totals = [], []
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        total = bad = samples = gradients = 0
        for name, entry in operators(dtype):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                why, some, more = compare(name, entry, dtype)
            total, samples, gradients = total + 1, samples + some, gradients + more
            if why or name in UNSTEADY:
                bad += 1
                told = {**REASONS, **UNSTEADY}.get(name, why).replace("|", "/")
                rows.append(f"| `{name}` | {kind} | {told} |")
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{kind}: {total} operators, {bad} other than on the CPU ")
        sys.stderr.write(f"\r{kind}: {total} operators, {bad} other than on the CPU\n")
        totals.append(f"| {kind} | {total} | **{total - bad}** | {samples} | {gradients} |")
    lines = [
        "# The simulated device: operators of PyTorch",
        "",
        "Written by `python tests/tools/sim_coverage.py`; do not edit. PyTorch's own samples of its",
        f"operators, up to {SAMPLES} of each, against the CPU: forward, and gradient where there is one.",
        f"torch {torch.__version__.partition('+')[0]}.",
        "",
        "| dtype | operators | the same bits | samples | gradients |",
        "|---|---|---|---|---|",
        *totals,
        "",
        "| other than on the CPU | dtype | why |",
        "|---|---|---|",
        *rows,
    ]
    page.write_text("\n".join(lines) + "\n")
    sys.stderr.write(f"{page.name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
