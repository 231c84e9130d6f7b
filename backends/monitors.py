"""What each backend adds to the lifecycles: the monitors, free of torch.

Each one stands beside the adapter of the same name and says, as data, what is legal there. They
can be described, drawn and proved on a machine that has none of the hardware.
"""

from __future__ import annotations

from interlock.specs import (
    Automaton,
    Effect,
    Kind,
    Monitor,
    Pattern,
    Phase,
    Property,
    Scope,
    Verb,
    does,
    on,
)
from interlock.specs.lifecycles import (
    HARMLESS,
    USES,
    acquires,
    completes,
    fault_edges,
    flight,
    lose,
    needs,
    quiet,
    release_flight,
)
from interlock.specs.model import only, whole

_TABLE_OUT = ("drop", "keep", "discard", "home", "measure", "free", "close")

CPU = Monitor("cpu", "host memory; nothing to synchronise, nothing to join")

_SYNC_PHASES = (
    Phase("flushing", Kind.FLIGHT, "flushed", "waits, in mid-run, for what is queued on the device"),
    Phase("syncing", Kind.FLIGHT, "synced", "waits, on the way out, for what is queued on the device"),
)
_SYNC = (
    *flight("sync", "training", "flushing", "flushed", "training", begin=USES),
    *fault_edges(_SYNC_PHASES[:1]),
    *flight("sync", "offloading", "syncing", "synced", "offloading", begin=USES, when=whole("device")),
    *quiet("fail", "syncing", "offloading"),
    *quiet("interrupt", "syncing", "offloading"),
    *quiet("abandon", "syncing", "offloading"),
    lose("syncing"),
)


def _synchronised(name: str, *dirtying: str) -> Automaton:
    """Whatever moves home does so after a synchronisation was at least tried since the last work.

    Errors of queued work surface there, under their own name, and not as a failed copy. A run that
    waits has nothing queued either: whoever looks at it then sees a device at rest.
    """
    moving = ("drop", "keep", "discard", "home", "suspend", "pause")
    moves = {("queued", event): "queued" for event in dirtying}
    moves |= {("settled", event): "queued" for event in dirtying}
    moves |= {("queued", "sync"): "settled"}
    moves |= {("settled", event): "settled" for event in moving}
    # Before anything was placed there is nothing to wait for.
    moves |= {("idle", event): "queued" for event in dirtying}
    return Automaton(name, "idle", moves, "sync before anything moves home")


_WORK = ("place", "restore", "train", "update", "validate", "predict", "adopt", "rescue", "resume")

CUDA = Monitor(
    "cuda",
    "one NVIDIA GPU; queued work is synchronised before anything moves home",
    automata=(_synchronised("stream", *_WORK),),
    phases=_SYNC_PHASES,
    transitions=_SYNC,
    table={"offloading": ("sync", *_TABLE_OUT)},
    properties=(
        Property(
            "synced-before-home",
            Pattern.PRECEDENCE,
            # By effects, so that a phase of a user's own that moves things home is held to it too.
            does("releases", "model") | does("releases", "optimizer") | does("transfers", "model"),
            first=on("sync"),
            since=does("acquires", "model") | does("steps"),
            doc="queued work is waited for before anything moves home",
        ),
    ),
)

_MICRO_BATCH = Automaton(
    "graph",
    "cut",
    {
        ("cut", "forward"): "open",
        ("open", "backward"): "traced",
        ("open", "skip"): "traced",
        # What works on the device after a cut begins a graph that must be cut as well. Before the cut
        # it joins the micro-batch's own graph, which is then one program, the update included.
        **{
            (state, event): "traced"
            for state in ("cut", "traced")
            for event in ("unscale", "clip", "update", "apply", "updated", "average")
        },
        # These only drop references or set numbers on the host.
        **{(state, event): state for state in ("cut", "traced") for event in ("zero", "skip", "schedule")},
        ("traced", "sync"): "cut",
        ("cut", "sync"): "cut",
    },
    "the lazy graph is cut after each micro-batch's program, and before the next one begins",
)

XLA = Monitor(
    "xla",
    "a lazy device: each micro-batch's program is cut by a sync, and one more before offload",
    automata=(_synchronised("lazy", *_WORK),),
    phases=_SYNC_PHASES,
    transitions=_SYNC,
    table={"offloading": ("sync", *_TABLE_OUT)},
    properties=CUDA.properties,
    step=(_MICRO_BATCH,),
)

_GROUP = "group"
_JOINING = Phase("joining", Kind.FLIGHT, "joined", "the process group is joined")
_LEAVING = Phase("leaving", Kind.FLIGHT, "left", "the process group is left, all ranks together")
_ABORTING = Phase("aborting", Kind.FLIGHT, "aborted", "the process group is torn down alone")
_NO_SUSPEND = "the ranks of a process group cannot give their devices back one by one"

_TOGETHER = ("optimize", "restore", "update", "validate", "checkpoint", "adopt", "predict", "leave")
"""What all ranks do together, and none can do alone."""

_RANKS_MOVES = {
    ("alone", "join"): "together",
    ("together", "place"): "together",
    **{("together", event): "together" for event in ("shard", *_TOGETHER)},
    ("alone", "fail"): "apart",
    ("alone", "interrupt"): "apart",
    ("alone", "lose"): "apart",
    ("together", "fail"): "apart",
    ("together", "interrupt"): "apart",
    ("together", "lose"): "apart",
    ("together", "peer_fail"): "bereft",
    ("alone", "peer_fail"): "bereft",
    ("apart", "rescue"): "apart",
    ("apart", "abort"): "apart",
    ("apart", "fail"): "apart",
    ("apart", "interrupt"): "apart",
    ("apart", "lose"): "apart",
    ("bereft", "abort"): "bereft",
    ("bereft", "fail"): "bereft",
    ("bereft", "interrupt"): "bereft",
    ("bereft", "lose"): "bereft",
}

_COLLECTIVE = on("join", *_TOGETHER)


def _distributed(name: str, doc: str) -> Monitor:
    """A process group: joined before placement, left together, torn down alone after any fault."""
    gone = only("device", _GROUP)
    return Monitor(
        name,
        doc,
        automata=(Automaton("ranks", "alone", _RANKS_MOVES, "no collective after a fault"),),
        phases=(_JOINING, _LEAVING, _ABORTING),
        resources=(_GROUP,),
        transitions=(
            *flight(
                "join",
                "acquired",
                "joining",
                "joined",
                "acquired",
                begin=(*needs("device"), *USES, *acquires(_GROUP)),
                end=completes(_GROUP),
            ),
            *fault_edges((_JOINING,)),
            *release_flight("leave", "leaving", "left", _GROUP, when=gone),
            *release_flight("abort", "aborting", "aborted", _GROUP, when=gone, uses=HARMLESS),
        ),
        table={
            "acquired": ("join", "place"),
            "offloading": ("drop", "keep", "discard", "home", "leave", "abort", "measure", "free", "close"),
        },
        forbids={"suspend": _NO_SUSPEND},
        everywhere=(("peer_fail", "failed"),),
        properties=(
            Property(
                "joined-before-placed",
                Pattern.PRECEDENCE,
                does("acquires", "model"),
                first=does("completes", _GROUP),
                doc="all ranks are there before the model is placed",
            ),
            Property(
                "no-collective-after-a-fault",
                Pattern.ABSENCE,
                _COLLECTIVE,
                after=on("fail", "interrupt", "lose", "peer_fail"),
                doc="after any fault no collective is entered: it would wait for ever",
            ),
            Property(
                "group-goes-after-the-model",
                Pattern.NESTED,
                does("releases", _GROUP),
                held=("model", "optimizer"),
                doc="the group is there as long as anything that is spread over it",
            ),
            Property(
                "peer-fail-accepted",
                Pattern.UNIVERSALITY,
                on("peer_fail"),
                scope=Scope.RUNNING,
                doc="the failure of a peer is accepted in every phase before the way out",
            ),
            Property(
                "peer-fail-closes",
                Pattern.RESPONSE,
                on("peer_fail"),
                doc="after the failure of a peer, `closed` is inevitable",
            ),
            Property(
                "no-rescue-after-a-peer-failed",
                Pattern.ABSENCE,
                does("saves"),
                after=on("peer_fail"),
                about=("optimizer",),
                doc="when a peer is gone the last checkpoint stands",
            ),
        ),
    )


DDP = _distributed("ddp", "replicas on several devices; gradients averaged over a process group")

_SHARDING = Phase("sharding", Kind.FLIGHT, "sharded", "parameters become shards, on meta or host")
_MATERIALISING = Phase("materialising", Kind.FLIGHT, "materialised", "the shards get their values")
_RESHARDING = Phase("resharding", Kind.FLIGHT, "resharded", "gathered parameters are dropped again")
_SHARDS = Automaton(
    "shards",
    "plain",
    {
        ("plain", "shard"): "sharded",
        ("sharded", "place"): "placed",
        ("placed", "materialise"): "gathered",
        ("gathered", "reshard"): "resharded",
        ("resharded", "optimize"): "trained",
        ("resharded", "serve"): "served",
    },
    "shard, place, materialise, reshard, then optimize or serve: in this order",
)
_FSDP = _distributed("fsdp2", "parameters sharded over several devices")
_CHANGES_MODEL = (Effect(Verb.OPENS, "model"),)

FSDP2 = Monitor(
    "fsdp2",
    _FSDP.doc,
    automata=(*_FSDP.automata, _SHARDS),
    phases=(_SHARDING, _MATERIALISING, _RESHARDING, *_FSDP.phases),
    resources=_FSDP.resources,
    transitions=(
        *_FSDP.transitions,
        *flight("shard", "acquired", "sharding", "sharded", "acquired", begin=(*needs(_GROUP), *USES)),
        *flight(
            "materialise",
            "placed",
            "materialising",
            "materialised",
            "placed",
            begin=(*needs("model"), *USES, *_CHANGES_MODEL),
            end=completes("model"),
        ),
        *flight("reshard", "placed", "resharding", "resharded", "placed", begin=(*needs("model"), *USES)),
        *fault_edges((_SHARDING, _MATERIALISING, _RESHARDING)),
    ),
    table={
        **_FSDP.table,
        "acquired": ("join", "shard", "place"),
        "placed": ("materialise", "reshard", "optimize", "serve"),
    },
    forbids=_FSDP.forbids,
    everywhere=_FSDP.everywhere,
    properties=(
        *_FSDP.properties,
        Property(
            "sharded-before-placed",
            Pattern.PRECEDENCE,
            does("acquires", "model"),
            first=on("sharded"),
            doc="what is placed are shards: the whole model may not fit",
        ),
        Property(
            "materialised-before-used",
            Pattern.PRECEDENCE,
            does("acquires", "optimizer") | on("serve"),
            first=on("materialised"),
            since=does("acquires", "model"),
            doc="parameters have values before they are used",
        ),
        Property(
            "resharded-before-used",
            Pattern.PRECEDENCE,
            does("acquires", "optimizer") | on("serve"),
            first=on("reshard"),
            since=on("materialise"),
            doc="optimizer and predictions see shards, not gathered parameters",
        ),
    ),
)

MONITORS = {monitor.name: monitor for monitor in (CPU, CUDA, DDP, FSDP2, XLA)}
"""The monitors of the backends that Interlock knows, by name."""
