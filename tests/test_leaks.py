"""Leak reports: each kind of owner is found and named, on plain host tensors that are told to count."""

from __future__ import annotations

import contextvars
import functools
import gc
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tools.runs import environment
from torch import nn
from torch.utils._pytree import tree_map

from interlock import leaks, standing
from interlock.leaks import Leak
from interlock.process_state import Allowed

MARK = 4391
"""The length of tensors that count here."""


def counts(tensor: torch.Tensor) -> bool:
    return tensor.numel() >= MARK


def marked() -> torch.Tensor:
    return torch.zeros(MARK)


def left(plant: Callable[[], object], **more: Any) -> tuple[Leak, ...]:
    before = leaks.census(counts)
    plant()
    # Time enough for the owners, also in a process that has run many other tests.
    return leaks.since(before, **{"seconds": 60, **more})


# What holds something, in names of this module

HELD: dict[Any, Any] = {}
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")
LOCAL = threading.local()


def make_report() -> Callable[[object], None]:
    seen: list[object] = []
    return lambda value: seen.append(value)


report = make_report()


@functools.lru_cache
def features(size: int) -> torch.Tensor:
    return torch.zeros(MARK + size)


def batches() -> Iterator[int]:
    kept = marked()
    while True:
        yield len(kept)


def default(value: object, into: list[object] = []) -> None:  # noqa: B006
    into.append(value)


class Net(nn.Module):
    seen: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(MARK, 1, bias=False)


class Slotted:
    __slots__ = ("value",)


class Node:
    value: Any
    other: Any


def step() -> None:
    loss = marked()
    raise RuntimeError(len(loss))


def keep_an_error() -> None:
    try:
        step()
    except RuntimeError as error:
        HELD["error"] = error


def hold(name: str, thing: Any) -> None:
    HELD[name] = thing


def hold_generator() -> None:
    HELD["stream"] = batches()
    next(HELD["stream"])


def hold_slot() -> None:
    HELD["slotted"] = Slotted()
    HELD["slotted"].value = marked()


def hold_graph() -> None:
    weight = marked().requires_grad_()
    HELD["loss"] = (weight.exp() * 2).sum()


def hold_gradient() -> None:
    HELD["net"] = Net()
    HELD["net"].body(marked()).backward()


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    HELD.clear()
    features.cache_clear()
    Net.seen.clear()
    LOCAL.__dict__.clear()
    VARIABLE.set(None)
    (report.__closure__ or ())[0].cell_contents.clear()
    (default.__defaults__ or ([],))[0].clear()


PATHS: dict[str, tuple[Callable[[], object], str]] = {
    "global": (lambda: hold("cache", [marked()]), "global {here}.HELD['cache'][0]"),
    "closure": (
        lambda: report(marked()),
        "global {here}.report (closure variable 'seen' of make_report.<locals>.<lambda>)[0]",
    ),
    "cache": (lambda: features(1).sum(), "global {here}.features (its cache of results)"),
    "generator": (hold_generator, "global {here}.HELD['stream'] -> local 'kept' of batches ("),
    "default": (lambda: default(marked()), "global {here}.default (default of default)[0][0]"),
    "class": (lambda: Net.seen.update(last=marked()), "class {here}.Net.seen['last']"),
    "slot": (hold_slot, "global {here}.HELD['slotted'].value"),
    "thread local": (lambda: setattr(LOCAL, "last", marked()), "global {here}.LOCAL (thread local).last"),
    "context variable": (lambda: VARIABLE.set(marked()), "context variable 'VARIABLE'"),
    "traceback": (keep_an_error, "global {here}.HELD['error'].__traceback__ -> local 'loss' of step ("),
    "view": (lambda: hold("view", torch.zeros(2 * MARK)[1:-1]), "global {here}.HELD['view']"),
    "sparse": (lambda: hold("sparse", marked().to_sparse()), "global {here}.HELD['sparse']"),
    "gradient": (hold_gradient, "global {here}.HELD['net'].body.weight.grad"),
    "graph": (hold_graph, "saved by ExpBackward0 in the graph of global {here}.HELD['loss']"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_each_owner_is_named(kind: str) -> None:
    plant, path = PATHS[kind]
    found = left(plant)
    assert found
    wanted = path.format(here=__name__)
    assert any(leak.owners[0].startswith(wanted) for leak in found), leaks.render(found)
    assert all(leak.held == "named" for leak in found), leaks.render(found)


RUN = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import interlock as il

OUT = []

def loss(model, batch):
    OUT.append(model(batch))
    return F.cross_entropy(OUT[-1], torch.zeros(8, dtype=torch.long, device=batch.device))

task = il.Task(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    optimizer=lambda model: torch.optim.Adam(model.parameters()),
    loss=loss,
    data=lambda: il.Data([torch.ones(8, 4)] * 3),
)
for left in il.Engine(sys.argv[1]).fit(task).residue.leftovers:
    print(left.nbytes, *left.owners, sep="; ")
"""


@pytest.mark.parametrize("backend", ["sim", "double"])
def test_the_residue_of_a_run_names_the_root_of_what_only_a_graph_keeps(backend: str) -> None:
    """The loss keeps its logits: their graph keeps the parameters, which nobody else has any more."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, backend], check=True, capture_output=True, text=True, env=environment()
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4 + 3
    assert "not found" not in done.stdout
    assert all("; global __main__.OUT[" in line for line in lines[:3]), done.stdout
    # The first layer's weight; no other block has its size.
    weight = next(line for line in lines if line.startswith("128; "))
    assert re.fullmatch(r"128; saved by AccumulateGrad in the graph of global __main__\.OUT\[\d\]", weight)


def test_the_gradient_of_a_parameter_that_only_a_graph_keeps_is_named() -> None:
    def plant() -> None:
        weight = marked().requires_grad_()
        HELD["out"] = weight.sum()
        HELD["out"].backward(retain_graph=True)

    found = left(plant)
    path = f"the graph of global {__name__}.HELD['out']"
    assert {str(leak.owners[0]) for leak in found} == {
        f"saved by AccumulateGrad in {path}",
        f"the gradient of a parameter in {path}",
    }
    text = leaks.render(found)
    assert "held by saved by" not in text
    assert "  saved by AccumulateGrad in " in text


def keep_an_error_of(name: str, held: torch.Tensor) -> None:
    """Keeps, under no name but the error's own, an error from a function of a module."""
    space: dict[str, Any] = {"__name__": name}
    exec("def fails(held):\n    raise RuntimeError", space)
    try:
        space["fails"](held)
    except RuntimeError as error:
        HELD["error"] = error


@pytest.mark.parametrize("where", [__name__, "interlock.planted"])
def test_a_longer_path_is_named_rather_than_one_through_a_traceback(where: str) -> None:
    def plant() -> None:
        held = marked()
        HELD["deep"] = [[[[[held]]]]]
        keep_an_error_of(where, held)

    found = left(plant)
    assert [leak.owners for leak in found] == [(f"global {__name__}.HELD['deep']" + "[0]" * 5,)]
    # It is named if there is no other.
    del HELD["deep"]
    found = leaks.since(leaks.Census(lambda tensor: tensor.numel() == MARK, {}), seconds=60)
    assert any(".__traceback__ -> local 'held' of " in leak.owners[0] for leak in found)


def test_an_object_of_the_program_without_a_name_is_told_rather_than_frames_of_the_engine() -> None:
    def plant() -> None:
        node = Node()
        node.other, node.value = node, marked()
        keep_an_error_of("interlock.planted", node.value)
        # As the engine holds a run's error: by something that nobody else knows.
        node.other = [node, HELD.pop("error")]

    gc.collect()
    gc.disable()
    try:
        found = left(plant)
    finally:
        gc.enable()
    assert [leak.owners for leak in found] == [("a Node.value",)], leaks.render(found)


def test_what_was_there_before_is_not_left_and_what_is_gone_neither() -> None:
    hold("before", marked())
    assert left(lambda: marked().exp()) == ()


def test_a_variable_of_a_running_function_is_named() -> None:
    before = leaks.census(counts)
    mine = marked()
    found = leaks.since(before)
    del mine
    assert found[0].owners[0].startswith("local 'mine' of test_a_variable_of_a_running_function_is_named (")
    assert leaks.since(before) == ()  # the search itself kept nothing


def test_a_parameter_is_named_as_its_module_names_it() -> None:
    found = left(lambda: hold("net", Net()))
    assert [leak.owners for leak in found] == [(f"global {__name__}.HELD['net'].body.weight",)]
    assert found[0].shape == (1, MARK)
    assert found[0].dtype == "torch.float32"
    assert found[0].nbytes == 4 * MARK


def test_views_count_once() -> None:
    def plant() -> None:
        whole = torch.zeros(2 * MARK)
        hold("views", [whole[:MARK], whole[MARK:], whole])

    found = left(plant)
    assert [leak.nbytes for leak in found] == [8 * MARK]


def tie(*nodes: Node) -> None:
    for node, other in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        node.other = other


def test_memory_that_grew_under_a_tensor_of_before_is_left() -> None:
    hold("grown", marked())
    hold("shrunk", marked())

    def plant() -> None:
        HELD["grown"].untyped_storage().resize_(4 * MARK + 100)
        HELD["shrunk"].untyped_storage().resize_(0)

    found = left(plant)
    assert [(leak.nbytes, leak.owners) for leak in found] == [(100, (f"global {__name__}.HELD['grown']",))]


def test_a_storage_without_a_tensor_is_left() -> None:
    found = left(lambda: hold("bare", torch.zeros(MARK, dtype=torch.uint8).untyped_storage()))
    assert [(leak.kind, leak.nbytes, leak.owners) for leak in found] == [
        ("storage", MARK, (f"global {__name__}.HELD['bare']",))
    ]
    assert f"memory on cpu, {MARK} bytes\n" in str(found[0])


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one * 1)
        return one * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@pytest.mark.parametrize(
    ("function", "name"), [(torch.exp, "ExpBackward0"), (Doubles.apply, "DoublesBackward")]
)
def test_what_a_node_of_autograd_keeps_is_left_without_the_tensor_that_it_made(
    function: Any, name: str
) -> None:
    found = left(lambda: hold("node", function(torch.ones(MARK, requires_grad=True)).grad_fn))
    assert f"saved by {name} in the graph of global {__name__}.HELD['node']" in {
        leak.owners[0] for leak in found
    }, leaks.render(found)


def test_a_cycle_is_told_from_a_leak_without_collecting() -> None:
    gone: list[Any] = []

    def plant() -> None:
        nodes = [Node() for _ in range(3)]
        tie(*nodes)
        nodes[0].value = marked()
        gone.append(weakref.ref(nodes[0].value))

    gc.collect()
    gc.disable()
    try:
        found = left(plant)
        assert [leak.held for leak in found] == ["cycle"], leaks.render(found)
        assert "held only by a reference cycle; gc would free it" in str(found[0])
        assert gone[0]() is not None
    finally:
        gc.enable()
    gc.collect()
    assert gone[0]() is None


def test_a_cycle_that_something_unseen_holds_is_not_called_a_cycle() -> None:
    held: Any = None

    def plant() -> None:
        nonlocal held
        nodes = [Node(), Node()]
        tie(*nodes)
        nodes[0].value = marked()
        # C holds it, where the collector does not look.
        held = _Unseen(nodes[1])

    found = left(plant)
    held.let_go()
    assert [leak.held for leak in found] == ["unseen"], leaks.render(found)


class _Unseen:
    """One more reference, that no object has."""

    def __init__(self, thing: object) -> None:
        import ctypes

        self._address = id(thing)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def let_go(self) -> None:
        import ctypes

        ctypes.pythonapi.Py_DecRef(ctypes.cast(self._address, ctypes.py_object))
        gc.collect()


def test_a_subclass_that_wraps_runs_no_code_and_its_content_counts() -> None:
    class Wraps(torch.Tensor):
        ran: ClassVar[list[str]] = []
        inner: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wraps:
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]
            made.inner = inner
            return made  # type: ignore[no-any-return]

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.ran.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.ran.append(str(func))
            return func(*tree_map(lambda one: getattr(one, "inner", one), args), **(kwargs or {}))

    wraps = Wraps(torch.zeros(3))
    wraps.exp()
    assert Wraps.ran
    Wraps.ran.clear()
    # As the built-in predicate looks: at the memory, past the class.
    assert not standing.on_device(wraps)

    def of_three(one: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return torch._C.TensorBase.numel(one) == 3

    found = leaks.since(leaks.Census(of_three, {}))
    assert Wraps.ran == []
    inner = [leak for leak in found if "inner" in leak.owners[0]]
    assert [leak.nbytes for leak in inner] == [12]


def test_residue_of_a_library_is_named_and_not_blamed() -> None:
    module = types.ModuleType("torch._inductor.planted")
    sys.modules[module.__name__] = module
    before = leaks.census(counts)
    try:
        found = left(lambda: setattr(module, "cache", {1: marked()}))
        assert [leak.residue for leak in found] == ["the compiler's caches, kept for the next call"]
        assert leaks.blamed(found) == ()
        assert "not blamed" in leaks.render(found)
        # What somebody else holds as well is blamed.
        hold("too", module.__dict__["cache"])
        both = leaks.since(before, seconds=60)
        assert [leak.residue for leak in both] == [""]
        assert both[0].owners == (f"global {__name__}.HELD['too'][1]",)
    finally:
        del sys.modules[module.__name__]


def test_more_may_be_allowed_with_a_reason() -> None:
    mine = Allowed("tensor", "global *HELD*", "known")
    found = left(lambda: hold("known", marked()), allowed=[mine])
    assert [leak.residue for leak in found] == ["known"]


def test_each_residue_has_a_reason() -> None:
    assert all(entry.reason and entry.what == "tensor" for entry in leaks.RESIDUE)


def test_a_census_keeps_nothing_alive_and_an_address_is_not_taken_for_another_tensor() -> None:
    hold("first", marked())
    gone = weakref.ref(HELD["first"])
    before = leaks.census(counts)
    HELD.clear()
    assert gone() is None
    hold("second", [marked() for _ in range(8)])
    assert len(leaks.since(before)) == 8


def test_hooks_of_saved_tensors_do_not_run() -> None:
    ran: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        ran.append("unpack")
        return tensor

    def plant() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            hold_graph()

    assert left(plant)
    assert ran == []


def test_an_out_of_time_search_says_so() -> None:
    found = left(lambda: hold("late", [[[marked()]]]), seconds=-1.0)
    assert [leak.held for leak in found] == ["unknown"]
    assert "as far as the search went" in str(found[0])


def test_the_report_is_cut() -> None:
    found = left(lambda: hold("many", [marked() for _ in range(12)]))
    text = leaks.render(found)
    assert text.startswith("12 piece(s) of memory are left on a device, ")
    assert "- and 2 more" in text
    assert leaks.render(()) == "nothing is left on a device"


def test_without_torch_nothing_is_loaded_and_nothing_is_left() -> None:
    program = (
        "import sys; from interlock import leaks, testing\n"
        "assert leaks.live_tensors() == ()\n"
        "with testing.device_empty(), testing.process_clean(): pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_host_tensors_do_not_count_by_default() -> None:
    hold("host", marked())
    hold("meta", torch.empty(MARK, device="meta"))
    assert leaks.live_tensors() == ()
