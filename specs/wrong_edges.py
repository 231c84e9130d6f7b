"""Edges that somebody might add to a lifecycle, and that are wrong: data for `mutants`.

Each one carries the effects that an honest author would declare, and the reason why it is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .lifecycles import (
    BUILDS_OPTIMIZER,
    DEVICE,
    HARMLESS,
    LOSES,
    MODEL,
    OPTIMIZER,
    SAVES,
    STEPS,
    USES,
    abandons,
    acquires,
    completes,
    fault_edges,
    needs,
    opens,
    releases,
    spoils,
)
from .model import EVERY, Effect, Guard, Kind, Phase, Status, Transition, Verb, absent, only, whole


@dataclass(frozen=True)
class WrongEdge:
    """Transitions that somebody might add to a spec, and that should be refused.

    Those that leave an exit phase also become the first entry of its row in the table, with a wish.

    Attributes:
        transitions: Left out where the spec lacks one of their phases or resources.
        why: What is wrong with them.
        phases: Added with them.
    """

    transitions: tuple[Transition, ...]
    why: str
    phases: tuple[Phase, ...] = field(default=())


def _edge(
    source: str,
    event: str,
    dest: str,
    effects: tuple[Effect, ...] | None,
    why: str,
    *when: Guard,
) -> WrongEdge:
    return WrongEdge((Transition(event, source, dest, effects, when),), why)


_BOTH = (MODEL, OPTIMIZER)
_OPTIMIZE = (*needs(MODEL), *USES, *acquires(OPTIMIZER))
_TRAIN = (*needs(DEVICE, *_BOTH), *USES)
_PLACE = (*needs(DEVICE), *USES, *acquires(MODEL))
_PREDICT = (*needs(DEVICE, MODEL), *USES)
_LIMBO = Phase("limbo", Kind.STABLE, doc="a phase of the user's")
_EJECTING = Phase("ejecting", Kind.FLIGHT, "ejected", "a phase of the user's")
_WAYS_OUT = ("fail", "interrupt", "abandon")
_HALF = frozenset({Status.PARTIAL})

WRONG_EDGES = (
    _edge("created", "optimize", "optimizing", _OPTIMIZE, "an optimizer before the device is taken"),
    _edge("acquired", "optimize", "optimizing", _OPTIMIZE, "an optimizer of parameters that will move"),
    _edge("placing", "optimize", "optimizing", _OPTIMIZE, "an optimizer of a model that is half there"),
    _edge("ready", "optimize", "optimizing", _OPTIMIZE, "a second optimizer"),
    _edge("acquired", "prebuild", "offloading", BUILDS_OPTIMIZER, "an optimizer built before placement"),
    _edge("training", "rebuild", "training", BUILDS_OPTIMIZER, "a second optimizer, in mid-run"),
    _edge("created", "train", "training", _TRAIN, "training of nothing"),
    _edge("placed", "train", "training", _TRAIN, "training without an optimizer"),
    _edge("placed", "warm_up", "placed", STEPS[:1], "a step before there is an optimizer"),
    _edge("placed", "peek", "placed", needs(OPTIMIZER), "optimizer state is wanted before there is any"),
    _edge("acquiring", "place", "placing", _PLACE, "placement on a device that is half there"),
    _edge("training", "place", "placing", _PLACE, "a second placement in one epoch"),
    _edge("training", "reattach", "offloading", acquires(OPTIMIZER), "what is held is acquired again"),
    _edge("training", "give_up", "finished", HARMLESS, "unfinished work is called finished"),
    _edge("training", "skip", "stopping", HARMLESS, "called stopped, though nobody asked"),
    _edge("training", "unplug", "device_lost", LOSES, "called lost, though it was only in the way"),
    _edge("training", "finish", "closed", HARMLESS, "a second destination of an event"),
    _edge("training", "poke", "training", opens(MODEL), "the model is left half changed"),
    _edge("training", "settle", "training", completes(MODEL), "completed without having begun"),
    _edge("updating", "tweak", "updating", opens(MODEL), "a change within a change"),
    _edge("updating", "step_again", "updating", STEPS, "a step inside an update"),
    _edge("updating", "autosave", "updating", SAVES, "a checkpoint inside an update"),
    _edge("updating", "checkpoint", "checkpointing", (*SAVES, *USES), "a checkpoint inside an update"),
    _edge("updating", "rescue", "rescuing", (*SAVES, *USES), "a rescue inside an update"),
    _edge("adopting", "checkpoint", "checkpointing", (*SAVES, *USES), "a checkpoint inside an adoption"),
    _edge("updating", "pause", "paused", HARMLESS, "a pause in the middle of an update"),
    _edge("suspended", "continue", "training", HARMLESS, "a resume that places nothing"),
    _edge("suspended", "log", "suspended", None, "an undeclared hook where no device is held"),
    _edge("suspended", "quit", "closed", HARMLESS, "an end around offloading"),
    _edge("paused", "vanish", "suspended", HARMLESS, "a suspension that gives nothing back"),
    _edge("created", "lose", "device_lost", LOSES, "a device is lost that was never held"),
    _edge("created", "lose", "closed", LOSES, "a device is lost that was never held"),
    _edge("training", "restore", "restoring", (*_TRAIN, *opens(*_BOTH)), "a second restore, in mid-run"),
    _edge("created", "log", "created", None, "an undeclared hook before the device is taken"),
    _edge("failed", "log", "failed", None, "an undeclared hook after an error"),
    _edge("failed", "retry", "failed", HARMLESS, "waits for ever after an error"),
    _edge("interrupted", "retry", "interrupted", HARMLESS, "waits for ever after an interrupt"),
    _edge("device_lost", "retry", "device_lost", HARMLESS, "waits for ever for a dead device"),
    _edge("finished", "retry", "finished", HARMLESS, "waits for ever after the end"),
    _edge("freeing", "retry", "freeing", HARMLESS, "tries for ever to give the device back"),
    _edge("failed", "train", "training", _TRAIN, "trains on after an error"),
    _edge("failed", "resume", "training", HARMLESS, "error and resume may take turns for ever"),
    _edge("interrupted", "resume", "training", HARMLESS, "an interrupt that can be ignored"),
    _edge("finished", "train", "training", HARMLESS, "a finished run that goes on"),
    _edge("stopping", "train", "training", HARMLESS, "a stop that can be ignored"),
    _edge(
        "failed", "restore", "restoring", (*_TRAIN, *opens(*_BOTH)), "a rescue that leads back to training"
    ),
    _edge("failed", "one_more", "offloading", STEPS, "a last step after an error", *whole(*_BOTH)),
    _edge(
        "failed",
        "settle",
        "failed",
        completes(*_BOTH),
        "half an update taken for whole",
        Guard(MODEL, _HALF),
        Guard(OPTIMIZER, _HALF),
    ),
    _edge("failed", "salvage", "rescuing", (*SAVES, *USES), "a rescue of what may be half changed"),
    _edge(
        "failed",
        "checkpoint",
        "checkpointing",
        (*SAVES, *USES),
        "a checkpoint after an error",
        *whole(*_BOTH),
    ),
    _edge("failed", "leave", "leaving", USES, "a collective after an error"),
    _edge("failed", "validate", "validating", _PREDICT, "a collective after an error", *whole(MODEL)),
    _edge("device_lost", "query", "device_lost", USES, "a memory query on a dead device"),
    _edge("device_lost", "offload", "offloading", HARMLESS, "releases on a dead device"),
    _edge("device_lost", "rescue", "rescuing", (*SAVES, *USES), "a rescue from a dead device"),
    _edge("device_lost", "close", "closed", HARMLESS, "a dead device that is not written off"),
    _edge("training", "close", "closed", HARMLESS, "an end with everything held"),
    _edge("training", "quit", "closed", abandons(EVERY), "an end around offloading"),
    _edge("stopping", "close", "closed", HARMLESS, "an end around offloading", *only()),
    _edge("failed", "close", "closed", HARMLESS, "an end with everything held"),
    _edge("offloading", "quit", "closed", HARMLESS, "an end with something held"),
    _edge("placed", "free", "freeing", HARMLESS, "the device is given back under the model"),
    _edge("offloading", "train", "training", HARMLESS, "trains on while things are released"),
    _edge("offloading", "place", "placing", _PLACE, "placement after release"),
    _edge(
        "offloading",
        "reuse",
        "acquired",
        HARMLESS,
        "a second run in the first one's place",
        *whole(DEVICE),
        *only(DEVICE),
    ),
    _edge("offloading", "home_again", "homing", HARMLESS, "the model is brought home twice"),
    _edge(
        "offloading",
        "keep_half",
        "offloading",
        (Effect(Verb.TRANSFERS, MODEL),),
        "half a model is handed over",
        Guard(MODEL, _HALF),
    ),
    _edge(
        "offloaded",
        "acquire",
        "acquiring",
        acquires(DEVICE),
        "a second run in the first one's place",
        *absent(DEVICE),
    ),
    _edge("offloaded", "query", "offloaded", USES, "a memory query after the device was given back"),
    _edge("offloaded", "free_again", "closed", releases(DEVICE), "given back twice", *only()),
    _edge("offloaded", "spoil", "closed", spoils(MODEL), "a release fails of what is not held", *only()),
    _edge("closed", "report", "closed", None, "an undeclared hook after the end"),
    _edge("created", "predict", "predicting", _PREDICT, "prediction before placement"),
    _edge("acquired", "serve", "serving", _PREDICT, "serving before placement"),
    _edge("failed", "predict", "predicting", _PREDICT, "prediction after an error"),
    _edge("offloaded", "predict", "predicting", _PREDICT, "prediction after release"),
    WrongEdge(
        (
            Transition("unplug", "offloading", "ejecting", releases(DEVICE), (*whole(DEVICE, MODEL),)),
            *(Transition(event, "ejecting", "closed", abandons(EVERY)) for event in ("ejected", *_WAYS_OUT)),
        ),
        "the device is given back under the model",
        (_EJECTING,),
    ),
    WrongEdge(
        (Transition("wander", "placed", "limbo", HARMLESS), *fault_edges((_LIMBO,))),
        "a phase that only a fault can leave",
        (_LIMBO,),
    ),
    WrongEdge(
        (
            Transition("wander", "placed", "limbo", HARMLESS),
            Transition("back", "limbo", "placed", HARMLESS),
        ),
        "a phase that accepts no fault",
        (_LIMBO,),
    ),
)
"""Wrong edges, for the lifecycles of Interlock and their compositions."""
