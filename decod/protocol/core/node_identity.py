"""Who a node is, what it must know of the run, and the states that people see it in."""

from dataclasses import dataclass
from enum import StrEnum

from decod.ids import NodeId
from decod.protocol.core.average_spec import AverageFormat
from decod.protocol.core.bans import NO_BANS, BanList, ReadBans, disbelieve
from decod.protocol.core.proofs import NO_PROOFS, Proofs
from decod.protocol.core.seals import NO_SEALS, Seals
from decod.protocol.core.view import Duty, Reach, Role


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
