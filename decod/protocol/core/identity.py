"""Who a node is, what it needs to know of the run, and the states that people see it in."""

from dataclasses import dataclass
from enum import StrEnum

from decod.ids import NodeId
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.bans import NO_BANS, BanList, ReadBans, disbelieve
from decod.protocol.core.params import NO_AUDITS, AuditConfig
from decod.protocol.core.proofs import NO_PROOFS, Proofs
from decod.protocol.core.seals import NO_SEALS, Seals
from decod.protocol.core.view import Duty, Reach, Role

DEVICE_LENGTH_MAX = 64


class Organisation(StrEnum):
    """How the members of a stage share its work."""

    PIPELINE = "pipeline"
    """Each takes whole microbatches, and keeps the stage's whole state."""
    SERVERS = "servers"
    """Servers keep the state and share the work out; clients come and go."""


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
    """What it computes on, for people: at most `DEVICE_LENGTH_MAX` printable characters."""
    seals: Seals = NO_SEALS
    """How it proves its decisions, and has others prove theirs."""
    proofs: Proofs = NO_PROOFS
    """How others prove what they have sent."""
    bans: BanList = NO_BANS
    """Who is banned, as its host has kept it."""
    read_bans: ReadBans = disbelieve
    """Reads later lists."""


class Adapt(StrEnum):
    """What follows from measurements while members train."""

    OFF = "off"
    RANK = "rank"
    """Rank and number of iterations follow the effective rank of the averages."""
    LINKS = "links"
    """As `rank`; and format and number of iterations follow the links: averages just arrive in
    time."""


@dataclass(frozen=True, slots=True)
class AverageFormat:
    """A format in which averages can travel."""

    spec: AverageSpec
    num_bytes: int
    """Of one member's contribution, in the largest stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFacts:
    """How the members of a stage keep together."""

    every: int = 1
    """Iterations from one average of a parameter to the next."""
    num_fragments: int = 1
    """Parts of the parameters that are averaged in turn."""
    adapt: Adapt = Adapt.OFF
    """What follows from measurements."""
    rank: int = 0
    """Of the factors of matrices, at the start. 0: there are none."""
    formats: tuple[AverageFormat, ...] = ()
    """In which averages may travel, the largest first. None: there is no choice."""
    steps_locally: bool = False
    """Members step by themselves, and average how far they have come."""
    num_phases: int = 1
    """Of an average: 2 if matrices travel as factors."""
    compresses: bool = False
    """Averages travel in a format that loses something, which the device adds to the next."""
    overlaps: bool = False
    """An average travels while members train on, and is used one outer step later."""
    quorum_ratio: float = 1.0
    """Share of a stage's members whose contributions are enough, once a grace window is over."""
    rereads: bool = False
    """What a lost relay had learnt from since the last average is trained on again."""


DEFAULT_SYNC = SyncFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What the leader must know of the run's manifest."""

    num_relay_stages: int
    num_data_nodes: int
    num_iterations: int
    """0: until stopped."""
    manifest_sha256: str
    start_iteration: int = 0
    """The committed iteration whose state the run starts from; 0 for one that begins anew."""
    sync: SyncFacts = DEFAULT_SYNC
    """How the members of a stage keep together."""
    audits: AuditConfig = NO_AUDITS
    """How much of the relays' work is audited."""
    organisation: Organisation = Organisation.PIPELINE
    """How the members of a stage share its work."""
    delay: int = 0
    """Iterations by which a step is late."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The last vote of a node. It outlives the process."""

    term: int = 0
    candidate: NodeId | None = None


NO_PROMISE = Promise()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the core must know of the run's manifest."""

    shape: RunShape
    num_microbatches: int
    """Per data node and iteration."""
    activation_size_bytes: int
    clips: bool = False
    """A step scales the gradient by its norm over all stages."""
    rounded: bool = False
    """Parameters without the optimizer's state are rounded, and have another hash."""
    initial_from_leader: bool = False
    """The run starts from a given state: the leader has it, and candidates fetch their part."""
    promise: Promise = NO_PROMISE
    """The vote that this node has kept of an earlier life in this run."""
