"""Microbatches on their way through the stages."""

from dataclasses import dataclass, field
from typing import Annotated

from decod.ids import FlowId, Iteration, MicrobatchId, NodeId, RelayPath
from decod.limits import (
    STAGE_INDEX_MAX,
    AtMost,
    Count,
    Duration,
    Finite,
    Number,
    Ordinal,
    ProofBytes,
    ReasonText,
    Unique,
)
from decod.protocol.core.messages.scopes import OfBatch, OfDataNodes, OfPath, OfRun, WithTensor


@dataclass(frozen=True, slots=True)
class ForwardActivation(OfPath, WithTensor):
    """With a tensor: an activation for the next stage (for the data node: the last one)."""

    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    """The flow that it travels along."""
    path: RelayPath
    """The relays that it passes, one for each stage."""
    path_version: Ordinal = 0
    """0: the flow's own path. Else the version of the view in which its data node chose it."""
    proof: ProofBytes = field(default=b"", compare=False)
    """Who has computed the tensor: see `protocol.core.proofs`. Empty where nothing is audited."""


@dataclass(frozen=True, slots=True)
class BackwardGradient(OfBatch, WithTensor):
    """With a tensor: the gradient of the activation that the receiver sent."""

    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    """The flow that it travels along."""
    path: RelayPath
    """The relays that it passes, one for each stage, the first stage's first."""
    path_version: Ordinal = 0
    """As in `ForwardActivation`."""
    proof: ProofBytes = field(default=b"", compare=False)
    """As in `ForwardActivation`."""


Travelling = ForwardActivation | BackwardGradient
"""Messages whose tensors go from stage to stage."""


@dataclass(frozen=True, slots=True)
class Unusable(OfBatch, WithTensor):
    """To the leader, with a tensor: what another member has sent the sender is not finite."""

    iteration: Iteration
    microbatch: MicrobatchId
    is_gradient: bool
    """The tensor is a gradient, and not an activation."""
    proof: ProofBytes
    """Who has computed the tensor: see `protocol.core.proofs`."""


@dataclass(frozen=True, slots=True)
class Complete(OfBatch):
    """COMPLETE: the sender has computed the forward pass of what the receiver sent it."""

    iteration: Iteration
    microbatch: MicrobatchId
    compute_s: Duration
    """How long the sender's device took: the rest of the time was the link and the queue."""


@dataclass(frozen=True, slots=True)
class Deny(OfBatch):
    """DENY: the microbatch can't go on along this flow; goes upstream to the data node."""

    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    """Which flow."""
    reason: ReasonText
    """Why."""


@dataclass(frozen=True, slots=True)
class Reroute(OfPath, OfDataNodes):
    """From a data node: a microbatch of its takes another path, since a relay of it was lost.

    Goes to the relays that take a lost one's place and to those next to them.
    """

    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    """The flow along which it began."""
    path: RelayPath
    """The relays that it passes, one for each stage."""
    path_version: Ordinal
    """Of the view without the lost relay. A path of an earlier version no longer counts."""
    owing: Annotated[tuple[NodeId, ...], AtMost(STAGE_INDEX_MAX), Unique()]
    """Relays of the path that must say `Mended`: they have taken a lost one's place."""


@dataclass(frozen=True, slots=True)
class Mended(OfBatch):
    """To the data node: what a lost relay had folded in, the sender has folded in instead."""

    iteration: Iteration
    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class CanTake(OfBatch):
    """CAN TAKE: the sender and all behind it have committed and take microbatches of
    `iteration`.
    """

    iteration: Iteration


@dataclass(frozen=True, slots=True)
class Report(OfRun, OfDataNodes):
    """A data node tells the leader that its share of the batch is done."""

    iteration: Iteration
    """The attempt that it belongs to."""
    num_committed: Count
    """Microbatches that came home."""
    digest: Number
    """Order-free digest of the ids of the microbatches that came home."""
    num_deferred: Count
    """Microbatches put off to the next iteration because no flow took them."""
    loss_sum: Finite
    """Over the number of microbatches, this is the mean loss over the tokens."""
    num_tokens: Number
    """That are learnt, in the microbatches that came home."""
    view_version: Ordinal
    """Of the view of which all relays are done: not counted after a later one has lost some."""
    failure: ReasonText = ""
    """Not empty: this share can't be finished; the iteration must be repeated without it."""
    num_reread: Count = 0
    """Of those that came home: they had been trained on before."""
