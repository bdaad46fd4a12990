"""The settings of a collaborative run; what passes between a peer's core and its training loop."""

from dataclasses import dataclass

from decod.ids import NodeId, TensorId
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.events import Event, Tensor
from decod.protocol.core.messages.round_messages import Height


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """How a run goes from round to round."""

    target_batch_size: int
    """Samples of all peers together after which they average. At least 1."""
    num_phases: int = 1
    """Of an average: two if it travels as factors."""
    compresses: bool = False
    """The device keeps what coding leaves out, even if it contributes nothing."""
    share: int = 0
    """Samples after which this peer waits for the average. 0: it goes on as long as that is worth
    its while."""
    overlap: bool = False
    """This peer trains on while an average travels, and never waits."""
    heartbeat_max_s: float = 1.0
    """Longest time between two signs of life."""
    heartbeat_min_s: float = 0.1
    """Shortest time between two of them that tell no news."""
    heartbeat_busy_s: float = 0.2
    """Time between two signs of life while a round closes, and while an average is under way."""
    silence_max_s: float = 5.0
    """A peer that is silent for so long is lost."""
    seeking_max_s: float = 30.0
    """How long a newcomer looks for somebody who has the run's state, before it gives up."""
    closing_max_s: float = 2.0
    """How long a round waits for the contribution of a peer that lives."""
    averaging_timeout_s: float = 60.0
    """How long an average may take before it is tried without the peers that it waits for."""
    backlog_max: int = 8
    """Averages that are kept for a loop that does not apply them, or while a state is loaded. From
    half as many on, a coordinator has another peer take its place."""
    load_pause_s: float = 1.0
    """Between two attempts to load a state."""
    held_max_bytes: int = 1 << 62
    """A peer that holds more takes part in no further round until it has sent some of it: rounds
    are shorter than its averages travel."""
    loads_max: int = 3
    """States in a row that the loop can't use, after which the peer gives up."""


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
PeerSink = EffectSink[PeerEffect]
