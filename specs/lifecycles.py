"""The lifecycles as data: `TRAINING` and `INFERENCE`, built from the same beginning and end.

Read `TRAINING` from top to bottom to see a run. Phases ending in *-ing* do something; while they
do, a fault strikes *in flight*, where the resource may be half there. A fault leads to `failed`
or `interrupted`, a dead device to `device_lost`, and from there the continuation table leads to
`closed` by way of `offloading`, releasing in reverse order whatever is held.
"""

from __future__ import annotations

from collections.abc import Iterable

from .model import (
    EVERY,
    Automaton,
    Effect,
    Guard,
    Kind,
    Phase,
    Spec,
    Status,
    Transition,
    Verb,
    absent,
    held,
    only,
    whole,
)
from .properties import COMMON, TRAINED

DEVICE, MODEL, OPTIMIZER = "device", "model", "optimizer"


def acquires(*names: str) -> tuple[Effect, ...]:
    """Effects: half there from now on, its release registered."""
    return tuple(Effect(Verb.ACQUIRES, name) for name in names)


def opens(*names: str) -> tuple[Effect, ...]:
    """Effects: being changed from now on."""
    return tuple(Effect(Verb.OPENS, name) for name in names)


def completes(*names: str) -> tuple[Effect, ...]:
    """Effects: wholly there from now on."""
    return tuple(Effect(Verb.COMPLETES, name) for name in names)


def needs(*names: str) -> tuple[Effect, ...]:
    """Effects: must be wholly there."""
    return tuple(Effect(Verb.NEEDS, name) for name in names)


def releases(*names: str) -> tuple[Effect, ...]:
    """Effects: given back, content safe."""
    return tuple(Effect(Verb.RELEASES, name) for name in names)


def spoils(*names: str) -> tuple[Effect, ...]:
    """Effects: a release failed; the second failure abandons."""
    return tuple(Effect(Verb.SPOILS, name) for name in names)


def abandons(*names: str) -> tuple[Effect, ...]:
    """Effects: given up, if held."""
    return tuple(Effect(Verb.ABANDONS, name) for name in names)


USES = (Effect(Verb.USES, DEVICE),)
"""Touches the device, be it only by a memory query."""
BUILDS_OPTIMIZER = (Effect(Verb.BUILDS, OPTIMIZER),)
STEPS = (Effect(Verb.STEPS, MODEL), Effect(Verb.STEPS, OPTIMIZER))
SAVES = (Effect(Verb.SAVES, MODEL), Effect(Verb.SAVES, OPTIMIZER))
LOSES = (Effect(Verb.LOSES, DEVICE),)
HARMLESS: tuple[Effect, ...] = ()
"""Declared to touch nothing (an undeclared transition counts as touching the device)."""


def flight(
    event: str,
    source: str | Iterable[str],
    phase: str,
    done: str,
    dest: str,
    *,
    begin: tuple[Effect, ...] = HARMLESS,
    end: tuple[Effect, ...] = HARMLESS,
    when: tuple[Guard, ...] = (),
    wish: str = "",
) -> tuple[Transition, ...]:
    """An operation: `event` takes each source into the in-flight `phase`, `done` on to `dest`."""
    sources = (source,) if isinstance(source, str) else tuple(source)
    entries = tuple(Transition(event, s, phase, begin, when, wish) for s in sources)
    return (*entries, Transition(done, phase, dest, end))


def quiet(event: str, sources: str | Iterable[str], dest: str) -> tuple[Transition, ...]:
    """A change of phase that touches nothing."""
    sources = (sources,) if isinstance(sources, str) else sources
    return tuple(Transition(event, source, dest, HARMLESS) for source in sources)


def fault_edges(phases: Iterable[Phase], without_device: Iterable[str] = ()) -> tuple[Transition, ...]:
    """`fail`, `interrupt` and (but in phases `without_device`) `lose` for every live phase."""
    live = [p.name for p in phases if p.kind in (Kind.STABLE, Kind.WORK, Kind.FLIGHT)]
    return tuple(
        edge
        for name in live
        for edge in (
            Transition("fail", name, "failed", HARMLESS),
            Transition("interrupt", name, "interrupted", HARMLESS),
            *(() if name in without_device else (lose(name),)),
        )
    )


def lose(phase: str) -> Transition:
    """The device died under `phase`. Nothing may touch it from here on."""
    return Transition("lose", phase, "device_lost", LOSES, held(DEVICE))


def release_flight(
    event: str,
    phase: str,
    done: str,
    resource: str,
    hub: str = "offloading",
    *,
    how: tuple[Effect, ...] | None = None,
    when: tuple[Guard, ...] = (),
    wish: str = "",
    uses: tuple[Effect, ...] = USES,
) -> tuple[Transition, ...]:
    """The release of one resource on the way out, with its own fault edges.

    A release that raises is tried once more, then abandoned (`spoils`); one whose deadline passes
    is abandoned at once. So whatever happens the statuses only move towards absent, and the way
    out has no cycle.
    """
    sources = {hub, "offloaded"} if event == "free" else {hub}
    return (
        *flight(
            event,
            sorted(sources),
            phase,
            done,
            hub,
            begin=uses,
            end=releases(resource) if how is None else how,
            when=(*when, *held(resource)),
            wish=wish,
        ),
        Transition("fail", phase, hub, spoils(resource)),
        Transition("interrupt", phase, hub, spoils(resource)),
        Transition("abandon", phase, hub, abandons(resource)),
        lose(phase),
    )


BEGINNING = (
    Phase("created", Kind.STABLE, doc="described; no device has been touched"),
    Phase("acquiring", Kind.FLIGHT, "acquired", "the backend takes the device"),
    Phase("acquired", Kind.STABLE, doc="the device is ours"),
    Phase("placing", Kind.FLIGHT, "placed", "the model moves to the device"),
    Phase("placed", Kind.STABLE, doc="the parameters are those that will train"),
)

ENDING = (
    Phase("finished", Kind.EXIT, doc="all work is done"),
    Phase("stopping", Kind.EXIT, doc="asked to stop; the last update is complete, results are kept"),
    Phase("failed", Kind.EXIT, doc="an error ended the run"),
    Phase("interrupted", Kind.EXIT, doc="Ctrl-C, or a cancellation"),
    Phase("device_lost", Kind.EXIT, doc="the device is dead: nothing may touch it"),
    Phase("offloading", Kind.EXIT, doc="everything held is released, the last acquired first"),
    Phase("homing", Kind.FLIGHT, "homed", "the model comes back to the host"),
    Phase("keeping", Kind.FLIGHT, "kept", "the model stays on the device and passes to the caller"),
    Phase("discarding", Kind.FLIGHT, "discarded", "the model's device memory is dropped"),
    Phase("measuring", Kind.FLIGHT, "measured", "what is left on the device is measured"),
    Phase("offloaded", Kind.EXIT, doc="nothing of the run is on the device"),
    Phase("freeing", Kind.FLIGHT, "freed", "the device is given back"),
    Phase("writing_off", Kind.FLIGHT, "written_off", "host-side releases only, the device being lost"),
    Phase("closed", Kind.TERMINAL, doc="the end; clean, or with something abandoned"),
)

TAKE_AND_PLACE = (
    *flight(
        "acquire",
        "created",
        "acquiring",
        "acquired",
        "acquired",
        begin=acquires(DEVICE),
        end=completes(DEVICE),
    ),
    *flight(
        "place",
        "acquired",
        "placing",
        "placed",
        "placed",
        begin=(*needs(DEVICE), *USES, *acquires(MODEL)),
        end=completes(MODEL),
    ),
)

MEASURE = (
    *flight(
        "measure",
        "offloading",
        "measuring",
        "measured",
        "offloaded",
        begin=USES,
        when=(*whole(DEVICE), *only(DEVICE)),
    ),
    *quiet("fail", "measuring", "offloaded"),
    *quiet("interrupt", "measuring", "offloaded"),
    *quiet("abandon", "measuring", "offloaded"),
    lose("measuring"),
)

GIVE_BACK = (
    *flight(
        "free",
        ("offloading", "offloaded"),
        "freeing",
        "freed",
        "offloaded",
        begin=HARMLESS,
        end=releases(DEVICE),
        when=(*held(DEVICE), *only(DEVICE)),
    ),
    Transition("fail", "freeing", "offloaded", spoils(DEVICE)),
    Transition("interrupt", "freeing", "offloaded", spoils(DEVICE)),
    Transition("abandon", "freeing", "offloaded", abandons(DEVICE)),
    lose("freeing"),
    Transition("close", "offloading", "closed", HARMLESS, only()),
    Transition("close", "offloaded", "closed", HARMLESS, only()),
)

WRITE_OFF = (
    *flight(
        "write_off",
        "device_lost",
        "writing_off",
        "written_off",
        "closed",
        begin=HARMLESS,
        end=abandons(EVERY),
        when=(Guard(DEVICE, frozenset({Status.LOST})),),
    ),
    Transition("fail", "writing_off", "closed", abandons(EVERY)),
    Transition("interrupt", "writing_off", "closed", abandons(EVERY)),
    Transition("abandon", "writing_off", "closed", abandons(EVERY)),
)


def model_home(*before: str) -> tuple[Transition, ...]:
    """The three exit policies of the model, due once the resources in `before` have ended."""
    gone = absent(*before)
    return (
        *release_flight(
            "keep",
            "keeping",
            "kept",
            MODEL,
            how=(Effect(Verb.TRANSFERS, MODEL),),
            when=(*gone, *whole(MODEL)),
            wish="keep",
        ),
        *release_flight("discard", "discarding", "discarded", MODEL, when=gone, wish="discard"),
        *release_flight("home", "homing", "homed", MODEL, when=gone),
    )


EXIT_TABLE = {
    "finished": ("offload",),
    "stopping": ("offload",),
    "failed": ("offload",),
    "interrupted": ("offload",),
    "device_lost": ("write_off",),
    "offloading": ("keep", "discard", "home", "measure", "free", "close"),
    "offloaded": ("free", "close"),
}

_TRAINING_ONLY = (
    Phase("optimizing", Kind.FLIGHT, "optimized", "the optimizer is built from the placed parameters"),
    Phase("ready", Kind.STABLE, doc="placed and optimized"),
    Phase("restoring", Kind.FLIGHT, "restored", "a checkpoint is loaded into all stateful parts"),
    Phase("compiling", Kind.FLIGHT, "compiled", "the step is compiled"),
    Phase("training", Kind.WORK, doc="steps are taken, outside of an update"),
    Phase("updating", Kind.FLIGHT, "updated", "the optimizer changes the parameters"),
    Phase("validating", Kind.FLIGHT, "validated", "the model is evaluated"),
    Phase("checkpointing", Kind.FLIGHT, "checkpointed", "everything that decides the future is saved"),
    Phase("adopting", Kind.FLIGHT, "adopted", "trained parameters change, by declaration"),
    Phase("paused", Kind.STABLE, doc="waiting, the device still ours"),
    Phase("suspending", Kind.FLIGHT, "evicted", "everything comes home in mid-run"),
    Phase("returning", Kind.FLIGHT, "returned", "the device is given back in mid-run"),
    Phase("suspended", Kind.STABLE, doc="waiting, nothing on the device"),
    Phase("reacquiring", Kind.FLIGHT, "reacquired", "the device is taken again"),
    Phase("resuming", Kind.FLIGHT, "resumed", "model and optimizer state are placed again"),
)
_RESCUING = Phase("rescuing", Kind.FLIGHT, "rescued", "a last checkpoint, at an update boundary")
_DROPPING = Phase("dropping", Kind.FLIGHT, "dropped", "optimizer state and gradients leave the device")

_BOTH = (MODEL, OPTIMIZER)
_READY = (*needs(DEVICE, *_BOTH), *USES)

_TRAINING_TRANSITIONS = (
    *flight(
        "optimize",
        "placed",
        "optimizing",
        "optimized",
        "ready",
        begin=(*needs(MODEL), *USES, *acquires(OPTIMIZER)),
        end=(*BUILDS_OPTIMIZER, *completes(OPTIMIZER)),
    ),
    *flight(
        "restore",
        "ready",
        "restoring",
        "restored",
        "ready",
        begin=(*_READY, *opens(*_BOTH)),
        end=completes(*_BOTH),
        wish="restore",
    ),
    *flight("compile", "ready", "compiling", "compiled", "ready", begin=_READY, wish="compile"),
    Transition("train", "ready", "training", _READY),
    Transition("update", "training", "updating", (*_READY, *STEPS, *opens(*_BOTH)), fast=True),
    Transition("updated", "updating", "training", completes(*_BOTH), fast=True),
    *flight("validate", "training", "validating", "validated", "training", begin=(*needs(MODEL), *USES)),
    *flight("checkpoint", "training", "checkpointing", "checkpointed", "training", begin=(*SAVES, *USES)),
    *flight(
        "adopt",
        "training",
        "adopting",
        "adopted",
        "training",
        begin=(*_READY, *opens(*_BOTH)),
        end=completes(*_BOTH),
    ),
    *quiet("pause", "training", "paused"),
    *quiet("resume", "paused", "training"),
    *flight(
        "suspend",
        ("training", "paused"),
        "suspending",
        "evicted",
        "returning",
        begin=(*_READY, *opens(*_BOTH)),
        end=(*releases(OPTIMIZER, MODEL), *opens(DEVICE)),
    ),
    Transition("returned", "returning", "suspended", releases(DEVICE)),
    *flight(
        "resume",
        "suspended",
        "reacquiring",
        "reacquired",
        "resuming",
        begin=acquires(DEVICE),
        end=(*completes(DEVICE), *USES, *acquires(MODEL, OPTIMIZER)),
    ),
    Transition("resumed", "resuming", "training", completes(MODEL, OPTIMIZER)),
    *quiet("finish", "training", "finished"),
    *quiet("stop", ("ready", "training", "paused", "suspended"), "stopping"),
    *flight(
        "rescue",
        ("failed", "interrupted"),
        "rescuing",
        "rescued",
        "offloading",
        begin=(*SAVES, *USES),
        when=whole(*_BOTH),
        wish="rescue",
    ),
    *quiet("fail", "rescuing", "offloading"),
    *quiet("interrupt", "rescuing", "offloading"),
    *quiet("abandon", "rescuing", "offloading"),
    lose("rescuing"),
    *release_flight("drop", "dropping", "dropped", OPTIMIZER),
)

_BEGIN_MOVES = {
    ("fresh", "restore"): "restored",
    ("fresh", "compile"): "compiled",
    ("restored", "compile"): "prepared",
    ("compiled", "restore"): "prepared",
}
_BEGIN_STATES = ("fresh", "restored", "compiled", "prepared", "over")
_ORDER_OF_BEGINNING = Automaton(
    "prologue",
    "fresh",
    {
        **_BEGIN_MOVES,
        **{(state, "train"): "over" for state in _BEGIN_STATES[:-1]},
        # What was prepared does not matter any more once the run ends: fewer configurations to explore.
        **{
            (state, event): "over"
            for state in _BEGIN_STATES
            for event in ("offload", "stop", "fail", "interrupt", "lose")
        },
    },
    doc="restore at most once and compile at most once, before training",
)

TRAINING = Spec(
    name="training",
    phases=(
        *BEGINNING,
        *_TRAINING_ONLY,
        *ENDING[:5],
        _RESCUING,
        ENDING[5],
        _DROPPING,
        *ENDING[6:],
    ),
    resources=(DEVICE, MODEL, OPTIMIZER),
    transitions=(
        *TAKE_AND_PLACE,
        *_TRAINING_TRANSITIONS,
        *quiet(
            "offload",
            ("created", "acquired", "placed", "ready", "finished", "stopping", "failed", "interrupted"),
            "offloading",
        ),
        *model_home(OPTIMIZER),
        *MEASURE,
        *GIVE_BACK,
        *WRITE_OFF,
        *fault_edges((*BEGINNING, *_TRAINING_ONLY), without_device=("created", "suspended")),
    ),
    table={
        "created": ("acquire",),
        "acquired": ("place",),
        "placed": ("optimize",),
        "ready": ("restore", "compile", "train"),
        **EXIT_TABLE,
        "failed": ("rescue", "offload"),
        "interrupted": ("rescue", "offload"),
        "offloading": ("drop", *EXIT_TABLE["offloading"]),
    },
    automata=(_ORDER_OF_BEGINNING,),
    properties=(*COMMON, *TRAINED),
)
"""The lifecycle of a training run."""

_SERVING = (
    Phase("serving", Kind.WORK, doc="ready to predict"),
    Phase("predicting", Kind.FLIGHT, "predicted", "one pass over data, no gradients"),
)

INFERENCE = Spec(
    name="inference",
    phases=(*BEGINNING, *_SERVING, *ENDING),
    resources=(DEVICE, MODEL),
    transitions=(
        *TAKE_AND_PLACE,
        Transition("serve", "placed", "serving", (*needs(DEVICE, MODEL), *USES)),
        *flight(
            "predict", "serving", "predicting", "predicted", "serving", begin=(*needs(DEVICE, MODEL), *USES)
        ),
        *quiet("finish", "serving", "finished"),
        *quiet("stop", "serving", "stopping"),
        *quiet(
            "offload",
            ("created", "acquired", "placed", "finished", "stopping", "failed", "interrupted"),
            "offloading",
        ),
        *model_home(),
        *MEASURE,
        *GIVE_BACK,
        *WRITE_OFF,
        *fault_edges((*BEGINNING, *_SERVING), without_device=("created",)),
    ),
    table={"created": ("acquire",), "acquired": ("place",), "placed": ("serve",), **EXIT_TABLE},
    properties=COMMON,
)
"""The lifecycle of evaluation and prediction: no optimizer anywhere."""

SPECS = {spec.name: spec for spec in (TRAINING, INFERENCE)}
