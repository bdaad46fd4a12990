"""What passes between a peer's core and the training loop on its host."""

from dataclasses import dataclass

from decod.ids import NodeId, TensorId
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event, Tensor
from decod.protocol.core.messages.round_messages import Height

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerFound:
    """Another node of the run has been found, in the DHT or by what it says."""

    node_id: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class LoopStepped:
    """The loop has finished a step, and asks whether to go on."""

    num_samples: int


@dataclass(frozen=True, slots=True)
class LoopContributed:
    """The loop has given what was outstanding. The machine owns the tensor."""

    request: int
    num_samples: int
    """0: there was nothing, or nothing that could be used."""
    base_round: int
    """The first round whose average is not in the parameters of some of these samples."""
    tensor: Tensor | None
    num_dropped: int = 0
    """Samples that were outstanding, and can't be used."""


@dataclass(frozen=True, slots=True)
class LoopApplied:
    """The average of a round is in the loop's parameters."""

    round: int


@dataclass(frozen=True, slots=True)
class LoopLoaded:
    """The loop has replaced its state."""

    height: Height


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The loop can't apply an average. Its state is not the others' any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class CopyRequested:
    """A peer wants a copy of a state."""

    request: int
    height: Height


@dataclass(frozen=True, slots=True)
class StateCame:
    """A state was fetched for the loop, or could not be."""

    height: Height
    failure: str = ""


@dataclass(frozen=True, slots=True)
class LoadRefused:
    """A state has come that the loop can't use. It keeps its own."""

    height: Height
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The loop has ended, or the operator wants the peer to leave."""


LoopEvent = (
    PeerFound
    | LoopStepped
    | LoopContributed
    | LoopApplied
    | LoopLoaded
    | LoopFailed
    | CopyRequested
    | StateCame
    | LoadRefused
    | LeaveRequested
)
PeerEvent = Event | LoopEvent

# --- effects ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerLoop:
    """The answer to the last `LoopStepped`, or a later one."""

    waits: bool
    """The loop is to wait for the next average. Otherwise it trains on."""


@dataclass(frozen=True, slots=True)
class AskContribution:
    """Have the loop give what is outstanding, whatever it does: then `LoopContributed`."""

    request: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """What the loop gave is outstanding again. The driver keeps the tensor until the loop has read
    it, even if it is freed at once."""

    tensor: TensorId


@dataclass(frozen=True, slots=True)
class DeliverAverage:
    """Have the loop apply an average. The driver owns the tensor from now on."""

    round: int
    tensor: TensorId
    num_samples: int
    """This loop's own in it."""
    total: int
    """Samples in it."""
    num_peers: int
    """That contributed."""


@dataclass(frozen=True, slots=True)
class StepAlone:
    """Nobody else is there: the loop steps from what is outstanding, then `LoopApplied`."""

    round: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """Give a copy of the loop's state to who asked for it, unless the loop has gone on."""

    request: int


@dataclass(frozen=True, slots=True)
class RefuseCopy:
    """This peer does not have, and will not have, the state."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Fetch a state from these peers: then `StateCame`, and once the loop has it `LoopLoaded`, or
    `LoadRefused`."""

    donors: tuple[NodeId, ...]
    height: Height


@dataclass(frozen=True, slots=True)
class UseAddresses:
    """From now on these are the peers, and here they can be dialled."""

    addresses: tuple[tuple[NodeId, str], ...]


LoopEffect = (
    AnswerLoop
    | AskContribution
    | GiveBack
    | DeliverAverage
    | StepAlone
    | CopyState
    | RefuseCopy
    | LoadState
    | UseAddresses
)
PeerEffect = Effect | LoopEffect
