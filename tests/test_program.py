"""Step programs: proved, read back, bit-identical to a hand-written step; options come from outside."""

from __future__ import annotations

import gc
import timeit
import traceback
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from interlock.backends.monitors import CPU, MONITORS, XLA
from interlock.extraction import ExtractionError, extract
from interlock.program import explain, step_program
from interlock.specs import Automaton, IllegalTransition, SpecError
from interlock.specs.expressions import difference
from interlock.specs.inclusion import prove
from interlock.specs.protocol import step_protocol
from interlock.steps.move import Move
from interlock.steps.option import Option
from interlock.steps.schedule import Schedule
from interlock.weaving import (
    Branch,
    Line,
    Loop,
    ProgramError,
    after,
    before,
    expression_of,
    instead,
    render,
    span,
)

PLAIN = "zero forward backward update apply updated"

# Options, as someone outside of Interlock would write them: no file of ours knows them.


class Clip(Option):
    name = "clip"
    events = ("clip",)
    bindings: Mapping[str, str] = {"clip": "clip(): bound the norm of the gradients"}
    follows = frozenset({"scale"})
    conflicts: Mapping[str, str] = {"clip_value": "one bound is enough"}

    def weave(self, program):
        return before(program, "update", Line("clip()", ("clip",), "bound by norm"))


class ClipValue(Clip):
    name = "clip_value"
    bindings: Mapping[str, str] = {"clip_value": "clip_value()"}
    conflicts: Mapping[str, str] = {}


class Accumulate(Option):
    """One update for several micro-batches: all but the last in a loop, so that there is one at least."""

    name = "accumulate"
    follows = frozenset({"move", "scale"})
    bindings: Mapping[str, str] = {
        "head": "head(batch): all micro-batches but the last",
        "tail": "tail(batch)",
    }

    def weave(self, program):
        start, micro, rest = span(program, "forward", "backward")
        inner = instead(micro, "forward", Line("loss = forward(micro)", ("forward",)))
        return (*start, Loop("micro", "head(batch)", inner), Line("batch = tail(batch)"), *micro, *rest)


class Scale(Option):
    """Loss scaling: an update with gradients that are not finite is given up."""

    name = "scale"
    events = ("scale", "unscale", "skip")
    follows = frozenset({"schedule"})
    bindings: Mapping[str, str] = {
        "scale": "scale(loss) -> the loss, scaled",
        "unscale": "unscale(): divide the gradients",
        "finite": "finite() -> whether all gradients are",
        "skip": "skip(): count it",
    }

    def weave(self, program):
        program = instead(program, "backward", Line("backward(scale(loss))", ("scale", "backward")))
        program = before(program, "update", Line("unscale()", ("unscale",)))
        start, update, rest = span(program, "update", "updated")
        return (*start, Branch("finite()", (*update, *rest), (Line("skip()", ("skip",)),)))


class Average(Option):
    name = "average"
    events = ("average",)
    bindings: Mapping[str, str] = {"average": "average(): the moving average follows"}

    def weave(self, program):
        return after(program, "updated", Line("average()", ("average",)))


class Noise(Option):
    """An event of its own, which the step protocol has never heard of."""

    name = "noise"
    events = ("perturb",)
    bindings: Mapping[str, str] = {"perturb": "perturb(): add noise to the gradients"}
    automata = (
        Automaton(
            "noise",
            "calm",
            {("calm", "backward"): "due", ("due", "perturb"): "calm", ("calm", "update"): "calm"},
            "noise once after backward",
        ),
    )

    def weave(self, program):
        return after(program, "backward", Line("perturb()", ("perturb",)))


def expression(monitor=CPU, *, schedule=False, options=()):
    return str(step_program(monitor, schedule=schedule, options=options).expression)


# What programs there are


@pytest.mark.parametrize("name", sorted(MONITORS))
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("options", [(), (Move(),)], ids=["plain", "move"])
def test_each_backend_has_a_proved_program(name, schedule, options):
    program = step_program(MONITORS[name], schedule=schedule, options=options)
    assert program.verdict.holds
    events = PLAIN.split() + ["sync"] * (name == "xla") + ["schedule"] * schedule
    if options:
        events.insert(1, "move")
    assert str(program.expression) == " ".join(events)
    assert difference(extract(program.source), program.expression) is None


def test_the_source_is_what_one_would_write():
    assert step_program(CPU, schedule=True).source == (
        "# Step program for 'cpu': plain, schedule\n"
        "# zero forward backward update apply updated schedule\n"
        "def step(batch):\n"
        "    zero()                 # a new window: the last update's gradients go\n"
        "    loss = forward(batch)\n"
        "    backward(loss)\n"
        "    at.updating = True     # a fault from here on leaves a half-applied update\n"
        "    apply()\n"
        "    at.updating = False    # not reached when `apply` raises\n"
        "    schedule()             # the update was a real one\n"
        "    return detach(loss)    # no graph outlives the step\n"
    )


def test_explain_prints_program_verdict_and_source():
    program = step_program(XLA, options=[Clip()])
    text = explain(program)
    assert "program   zero forward backward clip update apply updated sync\n" in text
    assert "proved: repeated for ever, it keeps to the step protocol of xla" in text
    assert "clip(): bound the norm of the gradients" in text
    assert program.source.rstrip() in text


# Options from outside


COMPOSED = [
    ([Clip()], "zero forward backward clip update apply updated"),
    ([Average()], "zero forward backward update apply updated average"),
    ([Average(), Schedule()], "zero forward backward update apply updated schedule average"),
    ([Noise()], "zero forward backward perturb update apply updated"),
    ([Accumulate()], "zero (forward backward)* forward backward update apply updated"),
    (
        [Accumulate(), Noise()],
        "zero (forward backward perturb)* forward backward perturb update apply updated",
    ),
    ([Accumulate(), Move()], "zero move (forward backward)* forward backward update apply updated"),
    ([Scale()], "zero forward scale backward unscale (update apply updated | skip)"),
    # Whatever the order in which they are given, clipping follows unscaling.
    ([Clip(), Scale()], "zero forward scale backward unscale (clip update apply updated | skip)"),
    ([Scale(), Schedule()], "zero forward scale backward unscale (update apply updated schedule | skip)"),
]


@pytest.mark.parametrize(("options", "expected"), COMPOSED, ids=[text for _, text in COMPOSED])
def test_options_come_from_outside(options, expected):
    program = step_program(CPU, options=options)
    assert str(program.expression) == expected
    assert program.verdict.holds


@given(st.permutations([Clip(), Accumulate(), Scale(), Average(), Schedule(), Move()]), st.integers(0, 6))
def test_options_compose_in_any_order(options, count):
    chosen = options[:count]
    for monitor in (CPU, XLA):
        program = step_program(monitor, options=chosen)
        assert program.verdict.holds
        assert set(program.options) - {"sync"} == {option.name for option in chosen}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([Clip(), Clip()], ["option 'clip' is there twice"]),
        ([Clip(), ClipValue()], ["options 'clip' and 'clip_value' do not go together: one bound is enough"]),
        ([ClipValue(), Clip()], ["do not go together"]),
        ([Schedule(), Clip(), Clip(), Schedule()], ["'clip' is there twice", "'schedule' is there twice"]),
    ],
)
def test_clashing_options_are_refused_all_at_once(options, says):
    with pytest.raises(ProgramError) as caught:
        step_program(CPU, options=options)
    assert len(caught.value.problems) == len(says)
    for text in says:
        assert text in str(caught.value)
    assert isinstance(caught.value, SpecError)


def option(weave, events=(), bindings=(), name="planted", **more):
    body = {
        "name": name,
        "events": events,
        "bindings": dict.fromkeys(bindings, "a test"),
        "weave": lambda _, program: weave(program),
    }
    return type("Planted", (Option,), body | more)()


def line(source, *events):
    return Line(source, events)


CLIP = line("clip()", "clip")
CLIPS = {"events": ("clip",), "bindings": ("clip",)}
TWICE = option(lambda p: after(p, "updated", *span(p, "update", "updated")[1]))
EMPTY = option(lambda p: (p[0], line("loss = batch"), Loop("micro", "batch", p[1:3]), *p[3:]))
WRONG_OPTIONS = [
    (option(lambda p: after(p, "updated", CLIP), **CLIPS), f"{PLAIN} clip".replace(" ", " -> ")),
    (option(lambda p: before(p, "apply", CLIP), **CLIPS), "zero -> forward -> backward -> update -> clip"),
    (option(lambda p: p[:1] + p[3:]), "event 'forward' is declared and never fired"),
    (option(lambda p: p[1:]), "event 'zero' is declared and never fired"),
    (TWICE, f"{PLAIN} update".replace(" ", " -> ")),
    (EMPTY, "zero -> update"),
    (option(lambda p: before(p, "update", CLIP), (), ("clip",)), "fired and not declared"),
    (option(lambda p: p, ("clip",)), "event 'clip' is declared and never fired"),
    (option(lambda p: before(p, "update", line("clip(limit)", "clip")), **CLIPS), "'limit' is used"),
    (option(lambda p: p, (), ("limit",)), "'limit' is declared and never used"),
    (option(lambda p: before(p, "unscale", CLIP), **CLIPS), "'planted': nothing fires 'unscale'"),
    (option(lambda p: span(p, "apply", "zero")[1]), "'planted': there is no 'apply' with a 'zero' after it"),
    (option(lambda p: p, (), ("forward",)), "binds 'forward', which every program has"),
    (option(lambda p: before(p, "update", line("warm()", "warm")), ("warm",), ("warm",)), "no such event"),
]


@pytest.mark.parametrize(("planted", "says"), WRONG_OPTIONS)
def test_an_option_that_weaves_wrongly_is_refused(planted, says):
    with pytest.raises(ProgramError) as caught:
        step_program(CPU, options=[planted])
    assert says in str(caught.value)


def test_a_refused_program_carries_the_verdict():
    with pytest.raises(ProgramError) as caught:
        step_program(CPU, options=[TWICE])
    verdict = caught.value.verdict
    assert verdict.word == (*PLAIN.split(), "update")
    assert verdict.legal == ("average", "move", "schedule", "sync", "zero")


def test_options_that_follow_in_a_circle_are_refused():
    one = option(lambda p: p, name="one", follows=frozenset({"two"}))
    two = option(lambda p: p, name="two", follows=frozenset({"one"}))
    with pytest.raises(ProgramError, match="options one, two follow one another in a circle"):
        step_program(CPU, options=[one, two])


# XLA


def test_xla_syncs_each_micro_batch_and_after_the_update():
    assert expression(XLA, schedule=True, options=[Accumulate(), Average()]) == (
        "zero (forward backward sync)* forward backward update apply updated average sync schedule"
    )
    assert expression(XLA, options=[Scale()]).endswith(" sync")


@pytest.mark.parametrize("options", [(), (Accumulate(),)], ids=["plain", "accumulate"])
def test_dropping_any_sync_is_refuted(options):
    text = str(step_program(XLA, options=options).expression)
    source = step_program(XLA, options=options).source
    lines = source.splitlines()
    syncs = [i for i, row in enumerate(lines) if row.strip().startswith("sync()")]
    assert len(syncs) == text.split().count("sync") + text.split().count("sync)*")
    for i in syncs:
        without = "\n".join(lines[:i] + lines[i + 1 :])
        verdict = prove(extract(without, helpers={"detach", "head", "tail"}), step_protocol(XLA))
        assert not verdict.holds
        assert verdict.word[-1] == "forward"
        assert "sync" in verdict.legal


# Reading the source back

GOOD = step_program(CPU, schedule=True).source

OTHER_PROGRAM = [
    ("an event dropped", "    zero()                 # a new window: the last update's gradients go\n", ""),
    ("an event doubled", "    apply()\n", "    apply()\n    apply()\n"),
    (
        "events reordered",
        "    backward(loss)\n    at.updating = True",
        "    at.updating = True\n    backward(loss)",
    ),
    ("the update left open", "at.updating = False", "at.updating = True"),
    ("made optional", "    apply()", "    if loss:\n        apply()"),
    ("made repeated", "    apply()", "    for part in batch:\n        apply()"),
    ("an event in an argument", "detach(loss)", "detach(forward(batch))"),
    (
        "an event in a test",
        "    apply()",
        "    if not forward(batch):\n        apply()\n    else:\n        apply()",
    ),
    ("an event that was not asked for", "    schedule()", "    sync()\n    schedule()"),
]


@pytest.mark.parametrize(
    ("old", "new"), [row[1:] for row in OTHER_PROGRAM], ids=[row[0] for row in OTHER_PROGRAM]
)
def test_a_tampered_source_is_another_program(old, new):
    assert old in GOOD
    meant = step_program(CPU, schedule=True).expression
    assert difference(extract(GOOD), meant) is None
    assert difference(extract(GOOD.replace(old, new)), meant) is not None


UNREADABLE = [
    ("a hidden call", "    apply()", "    report()\n    apply()"),
    ("a call of a method", "    apply()", "    batch.apply()"),
    ("a hidden call in an argument", "backward(loss)", "backward(check(loss))"),
    ("try and except", "    apply()\n", "    try:\n        apply()\n    except Exception:\n        zero()\n"),
    ("try and finally", "    apply()\n", "    try:\n        apply()\n    finally:\n        zero()\n"),
    ("with", "    apply()\n", "    with batch:\n        apply()\n"),
    ("while", "    apply()\n", "    while loss:\n        apply()\n"),
    ("for with else", "    apply()\n", "    for x in batch:\n        apply()\n    else:\n        zero()\n"),
    ("break", "    apply()\n", "    for x in batch:\n        apply()\n        break\n"),
    ("an early return", "    apply()\n", "    if loss:\n        return loss\n    apply()\n"),
    ("no return", "    return detach(loss)    # no graph outlives the step\n", ""),
    ("code after the return", "    return detach(loss)", "    return detach(loss)\n    zero()"),
    ("an import", "    apply()", "    import os\n    apply()"),
    ("a nested function", "    apply()", "    def apply(): zero()\n    apply()"),
    ("a lambda", "backward(loss)", "backward(lambda: zero())"),
    ("a comprehension", "backward(loss)", "backward([zero() for _ in batch])"),
    ("a subscript", "forward(batch)", "forward(batch[0])"),
    ("an attribute", "forward(batch)", "forward(batch.x)"),
    ("an operator", "backward(loss)", "backward(loss + 1)"),
    ("a walrus", "backward(loss)", "backward((loss := zero()))"),
    ("and", "    apply()", "    if loss and zero():\n        apply()"),
    ("a conditional expression", "backward(loss)", "backward(loss if loss else zero())"),
    ("an event renamed", "    zero()", "    apply = zero\n    zero()"),
    ("an event set", "    zero()", "    zero = batch\n    zero()"),
    ("a helper set", "    zero()", "    detach = zero()\n    zero()"),
    ("the flag set", "    zero()", "    at = batch\n    zero()"),
    ("the flag passed on", "forward(batch)", "forward(at)"),
    ("an event passed on", "forward(batch)", "forward(apply)"),
    ("another attribute of the flag", "at.updating = True", "at.x = True"),
    ("a flag that is computed", "at.updating = True", "at.updating = loss"),
    ("a flag of another object", "at.updating = True", "batch.updating = True"),
    ("two targets", "loss = forward(batch)", "loss = other = forward(batch)"),
    ("an unpacking", "loss = forward(batch)", "loss, x = forward(batch)"),
    ("an added assignment", "loss = forward(batch)", "loss += forward(batch)"),
    ("stars", "forward(batch)", "forward(*batch)"),
    ("double stars", "forward(batch)", "forward(**batch)"),
    ("await and async", "def step", "async def step"),
    ("a decorator", "def step", "@zero\ndef step"),
    ("a default", "(batch):", "(batch=zero()):"),
    ("an annotation", "(batch):", "(batch: zero()):"),
    ("a result annotation", "(batch):", "(batch) -> zero():"),
    ("another name", "def step", "def walk"),
    ("a second function", "# Step", "def other():\n    pass\n# Step"),
    ("a statement outside", "# Step", "zero()\n# Step"),
    ("global", "    zero()", "    global loss\n    zero()"),
    ("del", "    apply()", "    del loss\n    apply()"),
    ("an assert", "    apply()", "    assert zero()\n    apply()"),
    ("raise", "    apply()", "    raise loss\n    apply()"),
    ("pass", "    apply()", "    pass\n    apply()"),
    ("a text", "    apply()", "    'text'\n    apply()"),
    ("match", "    apply()", "    match loss:\n        case _:\n            apply()"),
    ("yield", "    apply()", "    yield loss\n    apply()"),
    ("no Python at all", "    apply()", "    apply("),
    ("used before it is set", "    zero()", "    backward(loss)\n    zero()"),
    ("a loop's name after it", "    apply()", "    for x in batch:\n        apply()\n    backward(x)"),
    ("set in a branch only", "    loss = forward(batch)", "    if batch:\n        loss = forward(batch)"),
]


@pytest.mark.parametrize(("old", "new"), [row[1:] for row in UNREADABLE], ids=[row[0] for row in UNREADABLE])
def test_what_cannot_be_read_is_refused(old, new):
    assert old in GOOD
    with pytest.raises(ExtractionError, match="line "):
        extract(GOOD.replace(old, new, 1))


LIES = [
    ("an event more", "apply", "apply(); apply()", "the source says"),
    ("an event less", "apply", "x = batch", "the source says"),
    ("another event", "zero", "sync()", "sync"),
    ("a hidden call", "apply", "apply(report())", "'report' is neither an event nor a declared helper"),
    ("a hidden attribute", "forward", "loss = forward(batch.x)", "no such expression"),
    ("lines in a line", "apply", "apply()\n    apply()", "the source says"),
    ("half a block", "apply", "if loss: apply()", "they differ in"),
]


@pytest.mark.parametrize(("event", "source", "says"), [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_an_option_whose_source_is_not_what_it_says_is_refused(event, source, says):
    lying = option(lambda p: instead(p, event, Line(source, (event,))))
    with pytest.raises(ProgramError) as caught:
        step_program(CPU, options=[lying])
    assert says in str(caught.value)


EVENTS = ("zero", "forward", "backward", "sync", "clip", "apply")
BLOCKS = st.recursive(
    st.lists(st.sampled_from(EVENTS).map(lambda e: Line(f"{e}()", (e,))), max_size=3).map(tuple),
    lambda inner: st.one_of(
        inner.map(lambda b: (Loop("x", "batch", b or (line("zero()", "zero"),)),)),
        st.tuples(inner, inner).map(lambda bs: (Branch("batch", bs[0] or (line("zero()", "zero"),), bs[1]),)),
        st.tuples(inner, inner).map(lambda bs: bs[0] + bs[1]),
    ),
    max_leaves=6,
)


@given(BLOCKS)
def test_each_rendered_block_is_read_back_as_itself(block):
    source = render((*block, Line("return batch")), ["any program"])
    assert difference(extract(source), expression_of(block)) is None


# Running


def flag():
    return SimpleNamespace(updating=False)


def problem(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(7)]
    return model, batches


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def bindings_of(model, optimizer, **more):
    return {
        "zero": optimizer.zero_grad,
        "forward": loss_of(model),
        "backward": torch.Tensor.backward,
        "at": flag(),
        "apply": optimizer.step,
        "detach": torch.Tensor.detach,
        **more,
    }


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("schedule", [False, True])
def test_it_trains_bit_for_bit_like_a_hand_written_loop(make, schedule):
    model, batches = problem()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    wanted = []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if schedule:
            scheduler.step()
        wanted.append(loss.detach())
    expected, rate = model.state_dict(), optimizer.param_groups[0]["lr"]

    model, batches = problem()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    more = {"schedule": scheduler.step} if schedule else {}
    step = step_program(CPU, schedule=schedule).bind(**bindings_of(model, optimizer, **more))
    losses = [step(batch) for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
    assert not any(loss.requires_grad for loss in losses)
    assert all(torch.equal(a, expected[name]) for name, a in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == rate


def test_an_option_from_outside_trains():
    model, batches = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    program = step_program(CPU, options=[Clip()])
    record = []
    step = program.bind_traced(record, **bindings_of(model, optimizer, clip=clip))
    for batch in batches:
        step(batch)
    assert max(norms) <= 0.0101
    assert record == str(program.expression).split() * len(batches)


def test_accumulation_from_outside_is_one_big_batch():
    model, batches = problem()
    parts = 3
    program = step_program(XLA, options=[Accumulate()])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    record = []
    step = program.bind_traced(
        record,
        **bindings_of(
            model,
            optimizer,
            forward=lambda batch: F.cross_entropy(model(batch[0]), batch[1]) / parts,
            head=lambda batch: list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))[:-1],
            tail=lambda batch: (batch[0].chunk(parts)[-1], batch[1].chunk(parts)[-1]),
            sync=lambda: None,
        ),
    )
    step(batches[0])
    gradients = [p.grad.clone() for p in model.parameters()]
    model, batches = problem()
    F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    for mine, whole in zip(gradients, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(mine, whole)
    assert record == (
        [
            "zero",
            *["forward", "backward", "sync"] * 2,
            "forward",
            "backward",
            "update",
            "apply",
            "updated",
            "sync",
        ]
    )


def test_a_skipped_update_does_not_move_the_scheduler():
    program = step_program(CPU, schedule=True, options=[Scale()])
    record, finite = [], iter([True, False, True])
    nothing = dict.fromkeys(program.bindings, lambda *_: None)
    step = program.bind_traced(record, **{**nothing, "at": flag(), "finite": lambda: next(finite)})
    for _ in range(3):
        step(None)
    assert record.count("schedule") == record.count("apply") == 2
    assert record.count("skip") == 1
    assert replay(CPU, record).may_end


# The instrumented build, on the protocol


def replay(monitor, record):
    checker = step_protocol(monitor).checker()
    for event in record:
        checker.fire(event)
    return checker


@pytest.mark.parametrize("name", sorted(MONITORS))
@pytest.mark.parametrize("schedule", [False, True])
def test_the_real_trace_keeps_to_the_protocol(name, schedule):
    model, batches = problem()
    optimizer = torch.optim.AdamW(model.parameters())
    program = step_program(MONITORS[name], schedule=schedule)
    more = {"sync": lambda: None, "schedule": lambda: None}
    more = {key: value for key, value in more.items() if key in program.bindings}
    record, at = [], flag()
    inside = []
    bindings = bindings_of(model, optimizer, at=at, **more)
    apply = bindings["apply"]
    bindings["apply"] = lambda: (inside.append(at.updating), apply())
    step = program.bind_traced(record, **bindings)
    for batch in batches:
        step(batch)
    assert record == str(program.expression).split() * len(batches)
    assert inside == [True] * len(batches)
    assert at.updating is False
    assert replay(MONITORS[name], record).may_end


def test_the_protocol_finds_a_planted_event_in_a_trace():
    record = [*PLAIN.split(), *PLAIN.split()]
    record.remove("zero")
    record[record.index("zero")] = "sync"
    with pytest.raises(IllegalTransition):
        replay(CPU, record)


# Faults, names, memory, cost


def bound(program, **changes):
    nothing = dict.fromkeys(program.bindings, lambda *_: None)
    return program.bind(**{**nothing, "at": flag(), **changes})


@pytest.mark.parametrize(
    ("where", "updating"),
    [
        ("zero", False),
        ("forward", False),
        ("backward", False),
        ("apply", True),
        ("schedule", False),
        ("detach", False),
    ],
)
def test_a_fault_inside_the_update_leaves_the_flag_set(where, updating):
    at, error = flag(), ValueError("planted")

    def strike(*_):
        raise error

    step = bound(step_program(CPU, schedule=True), at=at, **{where: strike})
    with pytest.raises(ValueError, match="planted") as caught:
        step(None)
    assert caught.value is error
    assert at.updating is updating
    # The generated lines are in the traceback.
    assert f"{where}(" in "".join(traceback.format_exception(caught.value)).split("<interlock step")[1]


def test_a_fault_is_the_last_event_of_the_trace():
    record = []
    program = step_program(CPU)
    nothing = dict.fromkeys(program.bindings, lambda *_: None)
    step = program.bind_traced(record, **{**nothing, "at": flag(), "apply": lambda: {}["planted"]})
    with pytest.raises(KeyError):
        step(None)
    assert record == ["zero", "forward", "backward", "update", "apply"]


def test_missing_and_foreign_names_are_refused_together():
    with pytest.raises(ProgramError) as caught:
        step_program(CPU).bind(zero=print, forwards=print)
    assert "'apply' is not bound: apply(): the step of the optimizer" in str(caught.value)
    assert "'forwards' is not used by it" in str(caught.value)
    assert len(caught.value.problems) == 6
    with pytest.raises(ProgramError):
        step_program(CPU).bind_traced([], zero=print)


def test_two_bindings_of_one_program_are_apart():
    program = step_program(CPU)
    one, two = (bound(program, detach=lambda _, n=n: n) for n in (1, 2))
    assert (one(None), two(None), one(None)) == (1, 2, 1)
    assert one.__code__ is two.__code__
    # Nothing but what was bound can be reached.
    assert set(one.__globals__["__builtins__"]) == {"__import__"}  # for C code that it calls
    assert set(one.__globals__) == {*program.bindings, "__builtins__"}


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
def test_a_step_leaves_no_tensor_behind():
    model, _ = problem()
    optimizer = torch.optim.AdamW(model.parameters())
    graphs = []
    forward = loss_of(model)

    def watched(batch):
        loss = forward(batch)
        graphs.append(weakref.ref(loss))
        return loss

    step = step_program(CPU).bind(**bindings_of(model, optimizer, forward=watched))
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    refs = [weakref.ref(tensor) for tensor in batch]
    result = step(batch)
    assert graphs[0]() is None
    del batch
    assert [ref() for ref in refs] == [None, None]
    assert result.grad_fn is None
    refs = [weakref.ref(result)]
    del result
    assert refs[0]() is None


@pytest.mark.usefixtures("no_gc")
def test_a_step_function_is_freed_with_all_it_holds():
    model, batches = problem()
    optimizer = torch.optim.AdamW(model.parameters())
    refs = [weakref.ref(p) for p in model.parameters()]
    for bind in (step_program(CPU).bind, lambda **b: step_program(CPU).bind_traced([], **b)):
        step = bind(**bindings_of(model, optimizer))
        step(batches[0])
    del step, bind, model
    # An optimizer is cyclic by itself (its hooks), so the parameters go with it; the step is not.
    optimizer.param_groups.clear()
    optimizer.state.clear()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_cost_is_printed(capsys):
    class At:
        __slots__ = ("updating",)

    def nothing(*_):
        return None

    at = At()
    step = bound(
        step_program(CPU), at=at, **dict.fromkeys(("zero", "forward", "backward", "apply", "detach"), nothing)
    )

    def by_hand(batch):
        nothing()
        loss = nothing(batch)
        nothing(loss)
        nothing()
        return nothing(loss)

    def cost(function):
        return min(timeit.repeat(lambda: function(None), number=50_000, repeat=7)) / 50_000 * 1e9

    made = min(timeit.repeat(lambda: step_program(XLA, schedule=True), number=50, repeat=3)) / 50 * 1e6
    with capsys.disabled():
        generated, hand = cost(step), cost(by_hand)
        print(f"\n  generated {generated:.0f} ns, by hand {hand:.0f} ns: {generated - hand:+.0f} ns a step")
        print(f"  a program is made and proved in {made:.0f} us", end="")
