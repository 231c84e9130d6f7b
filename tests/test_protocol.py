"""The step protocol: wrong orders are refused, inclusion is exact, three readings agree."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.backends.monitors import CPU, CUDA, DDP, FSDP2, MONITORS, XLA
from interlock.specs import (
    TRAINING,
    Automaton,
    IllegalTransition,
    SpecError,
    compose,
    lifecycle,
    machine_for,
)
from interlock.specs.checker import Result
from interlock.specs.expressions import (
    NOTHING,
    Alt,
    Event,
    Opt,
    Seq,
    Star,
    derive,
    dfa,
    difference,
    nullable,
    seq,
)
from interlock.specs.inclusion import included, prove
from interlock.specs.protocol import LEAVE, STEP, Protocol, step_protocol

PLAIN = "zero forward backward update apply updated"


def fire(protocol, events):
    checker = protocol.checker()
    for event in events.split():
        checker.fire(event)
    return checker


# The table

# (what is wrong, the events before, the event that is refused, all that is legal instead)
AFTER_UPDATE = "average move schedule sync zero"
AFTER_BACKWARD = "clip forward move skip sync update"
AFTER_FORWARD = "backward move scale skip sync"
AFTER_SCALED = "forward move skip sync unscale"
AFTER_ZERO = "forward move sync zero"
WRONG = [
    ("an update before any backward", "", "update", AFTER_ZERO),
    ("an update without a backward", "zero forward", "update", AFTER_FORWARD),
    ("two updates for one backward", PLAIN, "update", AFTER_UPDATE),
    ("a forward without zeroing", PLAIN, "forward", AFTER_UPDATE),
    ("gradients dropped unused", "zero forward backward", "zero", AFTER_BACKWARD),
    ("a backward without forward", "zero", "backward", AFTER_ZERO),
    ("two backwards for one forward", "zero forward backward", "backward", AFTER_BACKWARD),
    ("two forwards for one backward", "zero forward", "forward", AFTER_FORWARD),
    ("clip before unscale", "zero forward scale backward", "clip", AFTER_SCALED),
    ("update before unscale", "zero forward scale backward", "update", AFTER_SCALED),
    ("unscale twice", "zero forward scale backward unscale", "unscale", "clip move skip sync update"),
    ("unscale of what is true", "zero forward backward", "unscale", AFTER_BACKWARD),
    ("a scaled loss among plain ones", "zero forward backward forward", "scale", "backward move skip sync"),
    (
        "a plain loss among scaled ones",
        "zero forward scale backward forward",
        "backward",
        "move scale skip sync",
    ),
    ("a loss scaled twice", "zero forward scale", "scale", "backward move skip sync"),
    ("more gradients after clip", "zero forward backward clip", "forward", "clip move skip sync update"),
    ("schedule without an update", "zero forward backward", "schedule", AFTER_BACKWARD),
    ("schedule before an update", "", "schedule", AFTER_ZERO),
    ("schedule twice", f"{PLAIN} schedule", "schedule", "average move sync zero"),
    ("schedule though it was skipped", "zero forward backward skip", "schedule", "move sync zero"),
    ("average though it was skipped", "zero forward backward skip", "average", "move sync zero"),
    ("apply outside of an update", "zero forward backward", "apply", AFTER_BACKWARD),
    ("apply twice", "zero forward backward update apply", "apply", "updated"),
    ("an update without apply", "zero forward backward update", "updated", "apply"),
    ("schedule inside an update", "zero forward backward update apply", "schedule", "updated"),
    ("sync inside an update", "zero forward backward update", "sync", "apply"),
    ("an update inside an update", "zero forward backward update", "update", "apply"),
    ("skip without a window", "zero", "skip", AFTER_ZERO),
    ("an event that does not exist", "zero", "step", AFTER_ZERO),
]


@pytest.mark.parametrize(("begin", "wrong", "legal"), [r[1:] for r in WRONG], ids=[r[0] for r in WRONG])
def test_a_wrong_order_is_refused_and_changes_nothing(begin, wrong, legal):
    checker = fire(STEP, begin)
    row, phase = checker.row, checker.phase
    with pytest.raises(IllegalTransition) as caught:
        checker.fire(wrong)
    assert caught.value.legal == checker.legal == tuple(legal.split())
    assert caught.value.phase == phase
    assert caught.value.event == wrong
    assert checker.row is row
    for event in caught.value.legal:
        fire(STEP, f"{begin} {event}")


RIGHT = [
    PLAIN,
    f"{PLAIN} schedule",
    f"{PLAIN} zero schedule",
    f"{PLAIN} schedule zero",
    f"{PLAIN} average sync schedule",
    "forward backward update apply updated zero",
    "zero forward backward sync forward backward sync clip update apply updated",
    "move zero forward scale backward forward scale backward unscale clip update apply updated",
    "zero forward scale backward unscale skip zero",
    "zero forward skip",
    f"{PLAIN} {PLAIN}",
]


@pytest.mark.parametrize("word", RIGHT)
def test_a_right_order_is_accepted_again_and_again(word):
    assert fire(STEP, f"{word} {word} {word}").may_end
    assert prove(seq(*word.split()), STEP).holds


def test_a_message_says_what_where_why_and_what_instead():
    with pytest.raises(IllegalTransition) as caught:
        fire(STEP, "zero forward scale backward clip")
    assert str(caught.value) == (
        "event 'clip' is not legal in phase 'gathered (scaling scaled)' (scaling is 'scaled', must be "
        "plain or unscaled: unscale before clipping: scaled gradients have another norm). "
        "Legal here: forward, move, skip, sync, unscale."
    )


def test_hints_speak_of_what_can_be_refused():
    automata = {a.name: a for a in STEP.automata}
    for name, event in STEP.hints:
        states = {automata[name].initial, *automata[name].moves.values()}
        assert event in automata[name].alphabet
        assert any((state, event) not in automata[name].moves for state in states)


def test_the_lifecycle_fires_the_same_fast_events():
    fast = {t.event for t in TRAINING.transitions if t.fast}
    assert fast == {"update", "updated"}
    assert fast <= STEP.events
    slot = lifecycle(compose(TRAINING, CPU)).slot()
    for event in ("acquire", "acquired", "place", "placed", "optimize", "optimized", "train"):
        slot.fire(event)
    for event in (e for e in f"{PLAIN} {PLAIN}".split() if e in fast):
        slot.fire(event)
    assert slot.state == "training"


# Backends


@pytest.mark.parametrize("monitor", [CPU, CUDA, DDP, FSDP2], ids=lambda m: m.name)
def test_most_backends_have_the_plain_protocol(monitor):
    assert prove(seq(*PLAIN.split()), step_protocol(monitor)).holds


XLA_WORDS = [
    (f"{PLAIN} sync", None),
    (f"{PLAIN} sync schedule", None),
    (f"{PLAIN} schedule zero sync", None),
    (f"{PLAIN} average sync", None),
    ("zero forward backward sync forward backward update apply updated sync", None),
    ("zero forward scale backward unscale skip sync", None),
    ("zero forward skip sync", None),
    (f"sync {PLAIN}", None),
    (PLAIN, f"{PLAIN} zero forward"),
    (f"{PLAIN} sync average", f"{PLAIN} sync average zero forward"),
    (
        "forward backward sync update apply updated zero",
        "forward backward sync update apply updated zero forward",
    ),
    ("zero forward backward forward backward update apply updated sync", "zero forward backward forward"),
    ("zero forward sync backward update apply updated sync", "zero forward sync"),
]


@pytest.mark.parametrize(("word", "broken"), XLA_WORDS)
def test_xla_cuts_each_micro_batch(word, broken):
    verdict = prove(seq(*word.split()), step_protocol(XLA))
    assert verdict.holds == (broken is None)
    assert verdict.path == (broken or "").replace(" ", " -> ")
    if broken and "sync" not in broken.split()[-1]:
        assert "sync" in verdict.legal


def test_a_loop_must_be_cut_in_its_body():
    micro = seq("forward", "backward")
    rest = seq("forward", "backward", "update", "apply", "updated", "sync")
    assert prove(seq("zero", Star(seq(micro, "sync")), rest), step_protocol(XLA)).holds
    verdict = prove(seq("zero", Star(micro), rest), step_protocol(XLA))
    assert verdict.word == ("zero", "forward", "backward", "forward")


# Verdicts


def test_a_refuted_verdict_says_where_and_what_was_legal():
    verdict = prove(seq("zero", Star(seq("forward", "backward")), "update", "apply", "updated"), STEP)
    assert verdict.result is Result.REFUTED
    assert verdict.word == ("zero", "update")
    assert verdict.phase == "clean"
    assert set(verdict.legal) == {"forward", "move", "sync", "zero"}
    assert "one update needs at least one forward and backward" in str(verdict)
    assert "counterexample: zero -> update" in str(verdict)


def test_a_step_must_not_end_in_the_middle():
    verdict = prove(seq("zero", "forward", "backward", Opt(seq("update", "apply", "updated"))), STEP)
    assert verdict.unfinished
    assert verdict.word == ("zero", "forward", "backward")
    assert "the step may end here" in str(verdict)


@pytest.mark.parametrize("turn", [1, -1])
def test_the_shortest_counterexample_is_found(turn):
    long = seq("zero", "forward", "backward", "clip", "update", "zero")
    short = seq("zero", "forward", "sync", "zero")
    verdict = prove(Alt((long, short)[::turn]), STEP)
    assert verdict.word == ("zero", "forward", "sync", "zero")
    verdict = prove(
        Alt((seq("zero", "move", long), short, seq("zero", "zero", "zero", "zero", "clip"))[::turn]), STEP
    )
    assert verdict.word == ("zero", "forward", "sync", "zero")


def test_the_second_repetition_counts():
    assert prove(seq("forward", "backward", "update", "apply", "updated"), STEP).word[-1] == "forward"


def test_nothing_is_not_proved():
    assert prove(NOTHING, STEP).result is Result.UNDETERMINED
    assert not prove(Star(NOTHING), STEP).holds


def test_an_unknown_event_is_refuted():
    verdict = prove(seq("zero", "perturb"), STEP)
    assert verdict.word == ("zero", "perturb")
    assert "has no such event" in verdict.note


def test_an_event_of_ones_own_is_legal_where_its_automaton_allows_and_never_in_an_update():
    own = Automaton(
        "noise", "none", {("none", "perturb"): "some", ("some", "zero"): "none", ("none", "zero"): "none"}
    )
    protocol = step_protocol(CPU, [own])
    assert prove(seq("zero", "perturb", *PLAIN.split()[1:]), protocol).holds
    assert prove(seq("zero", "perturb", "perturb"), protocol).word == ("zero", "perturb", "perturb")
    inside = prove(seq(*PLAIN.replace("apply", "perturb apply").split()), protocol)
    assert inside.word == ("zero", "forward", "backward", "update", "perturb")
    assert inside.legal == ("apply",)


# Expressions


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (seq("a", "b"), "a b"),
        (seq("a"), "a"),
        (seq(), "()"),
        (seq("a", Alt((Event("b"), seq("c", "d")))), "a (b | c d)"),
        (Star(Event("a")), "a*"),
        (Star(seq("a", "b")), "(a b)*"),
        (Opt(Alt((Event("a"), Event("b")))), "(a | b)?"),
        (seq("a", seq("b", Opt(Event("c")))), "a b c?"),
        (Star(Opt(Event("a"))), "(a?)*"),
    ],
)
def test_an_expression_reads_like_one(expression, text):
    assert str(expression) == text


def test_an_alternative_needs_a_choice():
    with pytest.raises(SpecError, match="no choice"):
        Alt(())


LETTERS = "abc"


def expressions(letters=LETTERS):
    leaves = st.sampled_from([*map(Event, letters), NOTHING])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: Seq(tuple(parts))),
            st.lists(inner, min_size=1, max_size=2).map(lambda choices: Alt(tuple(choices))),
            inner.map(Star),
            inner.map(Opt),
        ),
        max_leaves=4,
    )


def pattern(expression):
    """The expression in Python's own syntax: an independent reader of it."""
    match expression:
        case Event(name):
            return name
        case Seq(parts):
            return "".join(f"(?:{pattern(p)})" for p in parts)
        case Alt(choices):
            return "|".join(f"(?:{pattern(c)})" for c in choices)
        case Star(body):
            return f"(?:{pattern(body)})*"
        case Opt(body):
            return f"(?:{pattern(body)})?"


def all_words(longest, letters=LETTERS):
    return [word for n in range(longest + 1) for word in itertools.product(letters, repeat=n)]


WORDS = all_words(5)


def language(expression, words=WORDS):
    regex = re.compile(pattern(expression))
    return {word for word in words if regex.fullmatch("".join(word))}


@given(expressions())
def test_the_automaton_accepts_what_python_matches(expression):
    automaton = dfa(expression)
    assert {word for word in WORDS if automaton.accepts(word)} == language(expression)
    assert nullable(expression) == (() in language(expression))


@given(expressions(), st.sampled_from(LETTERS))
def test_a_derivative_is_what_may_still_come(expression, event):
    rest = set().union(*(language(e, all_words(4)) for e in derive(expression, event)))
    assert rest == {word[1:] for word in language(expression) if word[:1] == (event,)}


@given(expressions())
def test_from_each_state_a_word_can_be_completed(expression):
    automaton = dfa(expression)
    good = set(automaton.accepting)
    for _ in automaton.rows:
        good |= {i for i, row in enumerate(automaton.rows) if good & set(row.values())}
    assert good == set(range(len(automaton.rows)))


@given(expressions(), expressions())
def test_difference_is_a_shortest_word_of_one_only(left, right):
    found = difference(left, right)
    apart = language(left) ^ language(right)
    if found is None:
        assert not apart
    elif len(found) <= 5:
        assert found in apart
        assert len(found) == min(map(len, apart))
    else:
        assert not apart


# Inclusion against brute force


@st.composite
def automata(draw, name):
    states = ["s0", "s1", "s2"][: draw(st.integers(1, 3))]
    alphabet = draw(st.lists(st.sampled_from(LETTERS), min_size=1, unique=True))
    pairs = st.tuples(st.sampled_from(states), st.sampled_from(alphabet))
    moves = draw(st.dictionaries(pairs, st.sampled_from(states), min_size=1))
    return Automaton(name, "s0", moves)


@st.composite
def protocols(draw):
    first, second = draw(automata("one")), draw(automata("two"))
    whole = {(s, e): d for (s, e), d in first.moves.items()}
    for letter in LETTERS:  # the first automaton knows every event
        if letter not in first.alphabet:
            whole |= {(s, letter): s for s in ("s0", "s1", "s2")}
    rests = draw(st.frozensets(st.sampled_from(["s0", "s1", "s2"])))
    return Protocol("toy", (Automaton("one", "s0", whole), second), rests)


def breaks_at(protocol, word):
    """How many events of a whole word it takes to break the protocol: `None` if it is legal to its end."""
    states = {a.name: a.initial for a in protocol.automata}
    for i, event in enumerate(word, start=1):
        for automaton in protocol.automata:
            if event in {e for _, e in automaton.moves}:
                if (states[automaton.name], event) not in automaton.moves:
                    return i
                states[automaton.name] = automaton.moves[states[automaton.name], event]
    return None if states["one"] in protocol.rests else len(word)


LONG = all_words(7)


@given(expressions(), protocols())
def test_inclusion_agrees_with_brute_force(expression, protocol):
    verdict = included(expression, protocol)
    words = language(expression, LONG)
    broken = {word: at for word in words if (at := breaks_at(protocol, word)) is not None}
    if verdict.holds:
        assert not broken
        return
    assert verdict.result is Result.REFUTED
    # A shortest one: brute force finds none shorter, and finds this one where it looks far enough.
    found = len(verdict.word)
    assert all(at >= found for at in broken.values())
    assert breaks_at(protocol, verdict.word) == found
    assert verdict.unfinished or verdict.word[-1] not in verdict.legal
    if found <= 3:  # and at most four leaves to complete the word: seven events
        assert verdict.word in {word[:at] for word, at in broken.items()}


# Three readings of one table

PROTOCOLS = {name: step_protocol(monitor) for name, monitor in MONITORS.items()} | {"none": STEP}


# An integer picks a legal event: walks of any events stay near the start.
WISHES = st.one_of(st.integers(0, 20), st.sampled_from([*sorted(STEP.events), "other"]))


@given(st.sampled_from(sorted(PROTOCOLS)), st.lists(WISHES, max_size=60))
def test_table_rows_and_transitions_machine_agree(name, wishes):
    protocol = PROTOCOLS[name]
    state, checker, slot = protocol.start, protocol.checker(), lifecycle(protocol.spec).slot()
    for wish in wishes:
        legal = protocol.legal(state)
        assert set(checker.legal) == set(legal) == set(slot.legal) - {LEAVE}
        assert protocol.may_end(state) == checker.may_end == (LEAVE in slot.legal)
        event = legal[wish % len(legal)] if isinstance(wish, int) else wish
        after = protocol.after(state, event)
        for target in (checker, slot):
            if after is None:
                with pytest.raises(IllegalTransition):
                    target.fire(event)
            else:
                target.fire(event)
        state = after or state
        assert state == checker.row.state == (slot.state, *slot.config.automata)


def test_the_spec_has_an_ordinary_machine():
    machine = machine_for(step_protocol(XLA).spec)
    assert set(machine.states) == {
        "clean", "ahead", "gathered", "more", "ready", "updating", "applied", "spent", "left",
    }  # fmt: skip
    assert machine.initial == "clean"


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_nothing_is_a_dead_end(protocol):
    rows, todo = {protocol.start: protocol.checker().row}, [protocol.checker().row]
    while todo:
        row = todo.pop()
        assert row, row.state
        for after in row.values():
            if after.state not in rows:
                rows[after.state] = after
                todo.append(after)
    ends = {state for state in rows if protocol.may_end(state)}
    for _ in rows:
        ends |= {state for state, row in rows.items() if any(a.state in ends for a in row.values())}
    assert ends == set(rows)
    # Each event is legal somewhere: no word of the alphabet is only written.
    assert {event for row in rows.values() for event in row} == protocol.events


def test_rows_are_built_once():
    assert step_protocol(XLA).checker().row is step_protocol(XLA).checker().row
    assert step_protocol(XLA).checker().row is not step_protocol(CPU).checker().row


@pytest.mark.torchless
def test_protocol_and_programs_load_without_torch():
    names = "interlock.specs.inclusion, interlock.backends.monitors, interlock.program"
    code = f"import sys; sys.modules['torch'] = None; import {names}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cost_is_printed(capsys):
    checker = STEP.checker()
    fire_one = checker.fire
    events = [*PLAIN.split(), "schedule"]

    def by_method():
        for event in events:
            fire_one(event)

    row = STEP.checker().row

    def by_row():
        nonlocal row
        here = row
        for event in events:
            here = here[event]
        row = here

    with capsys.disabled():
        for run in (by_method, by_row):
            cost = min(timeit.repeat(run, number=20_000, repeat=5)) / 20_000 / len(events) * 1e9
            print(f"\n  {run.__name__}: {cost:.0f} ns an event", end="")
