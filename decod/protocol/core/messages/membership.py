"""Joining, leaving, and whether a member lives."""

from dataclasses import dataclass, field

from decod.ids import Iteration, NodeId
from decod.protocol.core.era import Kept
from decod.protocol.core.messages.scopes import OfRun
from decod.protocol.core.view import Duty, Member, Reach, Role

_NOTHING = Iteration(0, 0)


@dataclass(frozen=True, slots=True)
class Join(OfRun):
    """A candidate offers itself to the leader. Repeated until answered."""

    address: str
    role: Role
    capacity: int
    """Microbatches that it can hold, at least 1."""
    stage_index: int | None
    """The stage it insists on, or None for the one that needs it most."""
    manifest_sha256: str
    incarnation: int
    """Drawn at each start of the daemon, 63 bits: tells a repeat from a restart."""
    name: str = ""
    kept: tuple[Kept, ...] = ()
    """States on its disk, from an earlier life in the run."""
    duty: Duty = Duty.NONE
    """The one that it insists on, as a server. None: that which its stage needs."""
    reach: Reach = Reach.DIALLED
    """Who can connect to it."""


@dataclass(frozen=True, slots=True)
class Assign(OfRun):
    """The leader's answer: prepare this stage. Repeated answers to repeated joins are equal."""

    stage_index: int
    data_node_index: int
    """-1 for relays."""
    reason: str = field(default="", compare=False)
    """Why this stage, for people: another reason does not make another assignment."""
    begun: bool = field(default=False, compare=False)
    """The run has committed iterations: who enters has their state from members, and does not need
    the one that the run started from."""
    donors: tuple[Member, ...] = field(default=(), compare=False)
    """Members that hold the stage's state, best first, once the run has committed anything: the
    candidate fetches it from them, and follows one of them until it is level."""
    view_term: int = field(default=0, compare=False)
    view_version: int = field(default=0, compare=False)
    """Of the leader's view: the candidate enters with a later one."""


@dataclass(frozen=True, slots=True)
class Refuse(OfRun):
    """The leader's other answer: the run does not take this candidate."""

    reason: str
    again_s: float = 0.0
    """After so long the reason has passed, or may have: ask again until then. 0: never."""
    over: bool = False
    """The run has ended, for everybody."""


@dataclass(frozen=True, slots=True)
class Prepared(OfRun):
    """The candidate has built its stage and can enter the next view."""

    stage_index: int
    parameter_hash: str
    """Of the stage built from the seed: all members of a stage must agree on it."""
    state_at: Iteration = _NOTHING
    """The newest iteration whose step the candidate has taken, as a follower; or what it was built
    with, attempt 0."""


@dataclass(frozen=True, slots=True)
class Heartbeat(OfRun):
    """I live. Sent to the node's watchers."""

    iteration: Iteration
    """Where the sender is. A receiver that is behind asks the leader what it missed."""
    bans: int = 0
    """The version of the list of bans that the sender has."""
    view_version: int = 0
    """The version of its view, which changes within an iteration when that is mended."""


@dataclass(frozen=True, slots=True)
class Bans(OfRun):
    """Who is banned from the run, as the leader has signed it. Later versions count."""

    version: int
    statement: bytes
    """As in `protocol.core.bans`."""


SLOW = "no COMPLETE in time"
"""Why a node is suspected that was reached, but has not done its work yet."""


TOO_SLOW = "a tensor took too long"
"""Why a node is suspected to or from which a transfer fell short of the least rate."""


TENSOR_REFUSED = "it refuses a tensor"
"""Why a node is suspected that answers, but does not take what is sent to it."""


NOT_FINITE = "what it computes is not finite"
"""Why a member is suspected that lives, and whose work can't be used: its receiver says so."""


STANDS_STILL = "its compute process stands still"
"""Why a member suspects itself: others should do its work."""


OF_TENSORS = (TOO_SLOW, TENSOR_REFUSED)
"""Reasons that say nothing of whether the node lives."""


@dataclass(frozen=True, slots=True)
class Suspect(OfRun):
    """A watcher or a disappointed sender tells the leader that a node may be gone.

    Of itself: its compute process stands still, or it can't get the state that the era begins with
    (`protocol.state.rollback`).
    """

    node_id: NodeId
    reason: str
    slack: float = 1.0
    """How many times as long as usual the sender has waited: the node is known to be irregular."""


@dataclass(frozen=True, slots=True)
class Ping(OfRun):
    """Answer at once. Also measures the link."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong(OfRun):
    nonce: int


@dataclass(frozen=True, slots=True)
class Leave(OfRun):
    """The sender asks to be left out of the next view; it finishes the iteration it is in."""

    reason: str
    at_once: bool = False
    """It can't finish the iteration (its compute process died): the iteration goes on without
    it."""


@dataclass(frozen=True, slots=True)
class Capacity(OfRun):
    """A member asks the leader for another capacity from the next opening on.

    Repeated until a view shows it, or the leader refuses.
    """

    request_id: int
    """Grows with each wish of the sender; a repeat gets the first answer again."""
    capacity: int
    """0: it wants no microbatches, and stays a member."""


@dataclass(frozen=True, slots=True)
class CapacityAnswer(OfRun):
    """The leader's answer to Capacity."""

    request_id: int
    refusal: str
    """Empty: agreed. Else why not; it may follow on an agreement that can't be kept."""


@dataclass(frozen=True, slots=True)
class CatchUp(OfRun):
    """The sender may have missed a commit or abort: the leader repeats the last one to it."""

    iteration: Iteration
    view_hash: str = ""
    """Of its view: what is repeated may change that. Empty: it needs the whole view."""
