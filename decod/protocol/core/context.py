"""Who a node is, what it must know of the run, and what its machines share.

`NodeMachine` alone replaces the opening and the view of a `Context`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from decod.ids import AveragingId, Iteration, NodeId
from decod.limits import StageBlocks
from decod.planner.partition import SHARE_FULL, owners_of
from decod.protocol.core.average_spec import AverageFormat
from decod.protocol.core.bans import NO_BANS, BanList, ReadBans, disbelieve
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.detours import BYWAYS_MAX, Detours
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.membership_messages import CatchUp, Heartbeat
from decod.protocol.core.proofs import NO_PROOFS, Proofs
from decod.protocol.core.seals import NO_SEALS, Seals
from decod.protocol.core.view import (
    Duty,
    Member,
    Opening,
    Reach,
    Role,
    View,
    next_peers,
    previous_peers,
)
from decod.run.run_config import Organisation, RunConfig


class NodeState(StrEnum):
    """What `decod status` shows of a node. The daemon adds `starting`."""

    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this node is, and what it offers."""

    node_id: NodeId
    address: str
    role: Role
    capacity: int
    compute_s: float
    """Measured time for one microbatch: c_i of equation (1)."""
    stage_index: int | None = None
    """The relay stage it insists on, or None."""
    duty: Duty = Duty.NONE
    """The one that it insists on, as a server."""
    reach: Reach = Reach.DIALLED
    """Whether others can dial it, and whether it passes on what is for those whom nobody can."""
    name: str = ""
    device: str = ""
    """What the node computes on, for people: at most `DEVICE_LENGTH_MAX` printable characters."""
    memory_bytes: int = 0
    """Of the device, for the run. 0: it is not known."""
    decod_version: str = ""
    seals: Seals = NO_SEALS
    """How the node proves its decisions, and has others prove theirs."""
    proofs: Proofs = NO_PROOFS
    """How others prove what they have sent."""
    bans: BanList = NO_BANS
    """Who is banned, as its host has kept it."""
    read_bans: ReadBans = disbelieve
    """Reads later lists."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The last vote of a node. It outlives the process."""

    term: int = 0
    candidate: NodeId | None = None


NO_PROMISE = Promise()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the core must know of a run beside its settings."""

    manifest_sha256: str
    activation_size_bytes: int
    """Of a microbatch, on its way."""
    formats: tuple[AverageFormat, ...] = ()
    """In which averages may travel, the largest first. None: there is no choice."""
    start_iteration: int = 0
    """The committed iteration whose state the run starts from; 0 for one that begins anew."""
    initial_from_leader: bool = False
    """The run starts from a given state: the leader has it, and candidates fetch their part."""
    promise: Promise = NO_PROMISE
    """The vote that this node has kept of an earlier life in this run."""


PARTS_PER_MEMBER = 4
"""Of an average among members that step by themselves. With more, contributions and means overlap
better, and shares are finer. Each costs a message to and from every member."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """With whom a member deals in a view."""

    previous: tuple[NodeId, ...] = ()
    """Peers that may send this node microbatches."""
    next: tuple[NodeId, ...] = ()
    """Peers that this node may send microbatches to."""
    nodes: tuple[NodeId, ...] = ()
    """All of these, each once, without this node itself."""
    byways: tuple[NodeId, ...] = ()
    """Data nodes by way of which this node may send to others (`detours`)."""

    @classmethod
    def of(cls, view: View, node_id: NodeId, run: RunConfig) -> "Neighbours":
        """Return a member's, in a view."""
        previous: tuple[NodeId, ...] = ()
        behind: tuple[NodeId, ...] = ()
        limit = run.protocol.max_peers_per_stage
        if run.organisation is Organisation.PIPELINE:
            previous = previous_peers(view, node_id, max_peers=limit)
            behind = next_peers(view, node_id, max_peers=limit)
        both = dict.fromkeys((*previous, *behind))
        others = [m.node_id for m in view.data_nodes if m.node_id != node_id]
        nodes = tuple(node for node in both if node != node_id)
        return cls(previous, behind, nodes, tuple(others[:BYWAYS_MAX]))


@dataclass(slots=True)
class Context:
    """One node's place in the run, its resources, and the protocol's numbers."""

    node_id: NodeId
    run: RunConfig
    """The settings of the run."""
    facts: RunFacts
    """What else is known of it. Whoever leads it at first needs no state from the leader."""
    links: LinkTable
    opening: Opening
    """Of the iteration. Members may have been lost since."""
    view: View = field(init=False)
    neighbours: Neighbours = Neighbours()
    bans: BanList = NO_BANS
    """Who is banned, as far as this node knows."""
    now_s: float = 0.0
    """When the event in hand happened."""
    why: str = ""
    """Why this node serves its stage, for people."""
    built_in: StageBlocks = ()
    """The cut of which this node's device has built a stage."""
    kept: dict[tuple[int, int], str] = field(default_factory=dict)
    """States on this host's disk: stage index and iteration, and the hash of the parameters."""
    proofs: Proofs = NO_PROOFS
    """How others prove what they have sent, where work is audited."""
    out: EffectSink[Effect] = field(default_factory=EffectSink)
    """Where the node's machines say what they want done. `NodeMachine` hands it on."""
    tensors: TensorStore = field(init=False)
    compute: ComputeQueue = field(init=False)
    detours: Detours = field(init=False)

    def __post_init__(self) -> None:
        self.view = self.opening.view
        self.tensors = TensorStore(self.out)
        self.compute = ComputeQueue(self.tensors, self.out, self.run.protocol)
        self.detours = Detours(self.links)

    @property
    def iteration(self) -> Iteration:
        return self.opening.iteration

    @property
    def averaging(self) -> AveragingId:
        """The average of the iteration, among the members of the view."""
        return AveragingId(self.iteration, self.view.version)

    def owners(self, roster: Sequence[NodeId]) -> tuple[int, ...]:
        """Return who reduces which part of an average among members that step by themselves."""
        if not self.run.sync.steps_locally:
            return ()
        slow = dict(self.opening.slow)
        shares = [slow.get(node, SHARE_FULL) for node in roster]
        return owners_of(shares, PARTS_PER_MEMBER * len(roster) if len(roster) > 1 else 1)

    @property
    def member(self) -> Member:
        return self.view.by_id[self.node_id]

    def distance_s(self, begin: NodeId, end: NodeId) -> float | None:
        """Return d(i, j) of a link between neighbouring stages; None if it is unknown here."""
        if self.node_id in (begin, end):
            return self.links.cost_s(end if begin == self.node_id else begin)
        return self.links.remote.cost_s(begin, end)

    @property
    def catch_up(self) -> CatchUp:
        """What asks another for what this node may have missed."""
        return CatchUp(self.iteration, self.view.hash if self.node_id in self.view else "")

    @property
    def heartbeat(self) -> Heartbeat:
        """What tells others that this node lives, and how far it is."""
        return Heartbeat(self.iteration, self.bans.version, self.view.version)

    def adopt(self, view: View) -> None:
        """Use a new view. This node must be in it."""
        assert self.node_id in view, "who is no member has no place among peers"
        assert view.term >= self.view.term, (view.term, self.view.term)
        self.view = view
        self.neighbours = Neighbours.of(view, self.node_id, self.run)
