"""What a model is made of, as a table of plain text: modules, shapes, counts, ties, what comes out of each.

It looks at a model, and at most calls it once; what a run holds on a device is said by `residency`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .batches import convert
from .batches import describe as describe_batch
from .errors import TaskError
from .evaluation import undisturbed

WIDTH = 110
"""No line of the table is longer."""
TOP = "(model)"
"""What the model itself is called, whose path is empty."""


@dataclass(frozen=True)
class Part:
    """One module, with what is its own and not that of the modules in it.

    Attributes:
        path: As in `model.named_modules()`.
        depth: How many modules it is in.
        kind: The name of its class.
        shapes: Its parameters and buffers by name, as text.
        trainable: Elements of its parameters that require gradients; of a tied one where it stands first.
        frozen: Of the others.
        buffers: Elements of its buffers.
        same: The path of the module that it is, if that stands elsewhere already.
        output: What came out of it.
    """

    path: str
    depth: int
    kind: str
    shapes: tuple[str, ...] = ()
    trainable: int = 0
    frozen: int = 0
    buffers: int = 0
    same: str | None = None
    output: str = ""


@dataclass(frozen=True)
class Anatomy:
    """What a model is made of. As text it is the table.

    Attributes:
        parts: Its modules, in their order.
        stored: (data type, device) -> elements and bytes of its parameters and buffers.
        ties: (name, name): the first is the same tensor as the second, and not counted.
        unshaped: The parameters and buffers that have no shape yet.
    """

    parts: tuple[Part, ...]
    stored: Mapping[tuple[str, str], tuple[int, int]]
    ties: tuple[tuple[str, str], ...]
    unshaped: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*_table(self.parts), "", *_totals(self)])


def describe(model: nn.Module, inputs: Any = None) -> str:
    """A table of a model: its modules, their shapes and counts, and what is stored where.

    A tensor that stands in several places is counted in the first; the others name it. With inputs the model
    is called once, in evaluation mode and without gradients, to see what comes out of each module; `2x` is
    what is called twice, and its first output is shown. The `training` flags, the random generators and the
    hooks are afterwards as they were; what else a model changes in evaluation mode stays changed. A model on
    `meta` is called there, and computes nothing.

        print(il.describe(model, batch[0]))

    Args:
        model: On the host, on a device or on `meta`.
        inputs: What the model is called with: a tuple for its arguments, a dictionary with strings as keys
            for its named arguments, anything else for its only argument. It is moved to where the model is.

    Returns:
        The table, without a line end. The same model gives the same text.

    Raises:
        TaskError: It is no model, or it has inputs and parameters without a shape.
        Exception: Whatever the model raises when it is called.
    """
    return str(examine(model, inputs))


def examine(model: nn.Module, inputs: Any = None) -> Anatomy:
    """The same as data; see `describe`.

    Args:
        model: As there.
        inputs: As there.

    Returns:
        What it is made of.

    Raises:
        TaskError: As there.
    """
    given: object = model  # it comes from anywhere
    if not isinstance(given, nn.Module):
        what = "a function: call it first, and pass the model" if callable(given) else type(given).__name__
        raise TaskError(f"describe takes a model (an nn.Module), and got {what}")
    collector = _Collector()
    modules = list(_walk(model, "", 0, collector.places))
    found = [collector.part(*one) for one in modules]
    if inputs is not None:
        if collector.unshaped:
            raise TaskError(
                f"'{collector.unshaped[0]}' has no shape before the model is first called, and a description "
                "does not change a model: call it once yourself, or leave the inputs out"
            )
        outputs = _outputs(model, [module for _, _, module, same in modules if same is None], inputs)
        found = [
            replace(part, output=outputs.get(id(module), "") if same is None else "")
            for part, (_, _, module, same) in zip(found, modules, strict=True)
        ]
    stored = {key: (collector.elements[key], collector.bytes[key]) for key in sorted(collector.elements)}
    return Anatomy(tuple(found), stored, tuple(collector.ties), tuple(collector.unshaped))


Place = tuple[str, int, nn.Module, str | None]


def _walk(module: nn.Module, path: str, depth: int, places: dict[int, str]) -> Iterator[Place]:
    """Path, depth, module, and the path where it stands already; what is in it comes once."""
    same = places.setdefault(id(module), path)
    if same != path:
        yield path, depth, module, same
        return
    yield path, depth, module, None
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, depth + 1, places)


@dataclass
class _Collector:
    """Counts each tensor once."""

    places: dict[int, str] = field(default_factory=dict)
    elements: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ties: list[tuple[str, str]] = field(default_factory=list)
    unshaped: list[str] = field(default_factory=list)
    # With the tensors: scripted modules make a new object each time, whose number could be used again.
    _seen: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)

    def part(self, path: str, depth: int, module: nn.Module, same: str | None) -> Part:
        """What is this module's own."""
        counts: Counter[str] = Counter()
        shapes = []
        named: list[tuple[str, torch.Tensor | None, str]] = []
        if same is None:
            named += [(name, tensor, "") for name, tensor in module._parameters.items()]
            named += [(name, tensor, "buffers") for name, tensor in module._buffers.items()]
        for name, tensor, kind in named:
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            first, _ = self._seen.setdefault(id(tensor), (full, tensor))
            if first != full:
                self.ties.append((full, first))
                shapes.append(f"{name} = {first}")
            elif is_lazy(tensor):
                self.unshaped.append(full)
                shapes.append(f"{name} ?")
            else:
                shapes.append(f"{name} {'x'.join(map(str, tensor.shape)) or 'scalar'}")
                counts[kind or ("trainable" if tensor.requires_grad else "frozen")] += tensor.numel()
                key = (str(tensor.dtype).removeprefix("torch."), str(tensor.device))
                self.elements[key] += tensor.numel()
                self.bytes[key] += tensor.numel() * tensor.element_size()
        counted = counts["trainable"], counts["frozen"], counts["buffers"]
        return Part(path, depth, type(module).__name__, tuple(shapes), *counted, same)


# -- calling it ---------------------------------------------------------------------------------


def _outputs(model: nn.Module, modules: list[nn.Module], inputs: Any) -> dict[int, str]:
    """What comes out of each module that is called, by the module's id: the first time, and how often."""
    first: dict[int, str] = {}
    times: Counter[int] = Counter()

    def note(module: nn.Module, _: Any, output: Any) -> None:
        times[id(module)] += 1
        if id(module) not in first:
            first[id(module)] = describe_batch(output)

    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) == 1:
        inputs = convert(inputs, lambda tensor: tensor.to(next(iter(devices))))
    named = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    hooks: list[Any] = []
    try:
        # One by one: each is known when the next fails. Scripted modules refuse them.
        hooks.extend(
            module.register_forward_hook(note)
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)
        )
        with undisturbed(model, _generators(devices)):
            if named:
                model(**inputs)
            else:
                model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {key: text if times[key] == 1 else f"{times[key]}x {text}" for key, text in first.items()}


def _generators(devices: set[torch.device]) -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    for device in devices:
        if device.type == "cuda":
            yield (
                functools.partial(torch.cuda.get_rng_state, device),
                functools.partial(torch.cuda.set_rng_state, device=device),
            )
        elif device.type == "mps":
            yield torch.mps.get_rng_state, torch.mps.set_rng_state


# -- as text ------------------------------------------------------------------------------------


def _table(parts: tuple[Part, ...]) -> Iterator[str]:
    """Header and rows; columns in which there is nothing are left out."""
    texts = {
        "module": ["  " * part.depth + (part.path.rpartition(".")[2] or TOP) for part in parts],
        "class": [part.kind for part in parts],
        "own tensors": [_own(part) for part in parts],
        "output": [part.output for part in parts],
    }
    numbers = {
        name: [f"{count:,}" if (count := getattr(part, name)) else "" for part in parts]
        for name in ("trainable", "frozen", "buffers")
    }
    columns = {name: cells for name, cells in (texts | numbers).items() if name == "module" or any(cells)}
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    # The texts give way, the longest first; numbers are never cut.
    while sum(widths.values()) + 2 * (len(widths) - 1) > WIDTH:
        longest = max((name for name in widths if name in texts), key=lambda name: widths[name])
        if widths[longest] <= len("..."):
            break
        widths[longest] -= 1
    for row in zip(*([name, *cells] for name, cells in columns.items()), strict=True):
        cells = [
            _cut(cell, width).ljust(width) if name in texts else cell.rjust(width)
            for cell, (name, width) in zip(row, widths.items(), strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _own(part: Part) -> str:
    return ", ".join(part.shapes) if part.same is None else f"= {part.same or TOP}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _totals(anatomy: Anatomy) -> Iterator[str]:
    trainable, frozen, buffers = (
        sum(getattr(part, name) for part in anatomy.parts) for name in ("trainable", "frozen", "buffers")
    )
    yield f"parameters  {trainable + frozen:,}: {trainable:,} trainable, {frozen:,} frozen"
    if buffers:
        yield f"buffers     {buffers:,}"
    for (dtype, device), (elements, size) in anatomy.stored.items():
        yield f"stored      {elements:,} {dtype} on {device}: {_size(size)}"
    for names, what in ((anatomy.ties, "tied"), (anatomy.unshaped, "no shape")):
        for name in names:
            yield _cut(f"{what:<12}{name if isinstance(name, str) else ' = '.join(name)}", WIDTH)


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"
