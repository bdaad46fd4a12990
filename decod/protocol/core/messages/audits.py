"""Audits: a member does the work of another again, and says whether it was right."""

from dataclasses import dataclass, field

from decod.ids import AveragingId, MicrobatchId, NodeId
from decod.protocol.core.messages.scopes import OfAveraging


@dataclass(frozen=True, slots=True)
class Audit(OfAveraging):
    """From the leader, down the tree: some relays' work of the iteration is audited."""

    averaging: AveragingId
    pairs: tuple[tuple[NodeId, NodeId], ...]
    """(relay, auditor), both of one stage."""
    seal: bytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class AuditedTensor(OfAveraging):
    """To an auditor, with a tensor: what the sender gave the relay for a microbatch. Without one:
    it was not kept."""

    averaging: AveragingId
    relay: NodeId
    microbatch: MicrobatchId
    is_gradient: bool
    """The tensor is a gradient: the sender is of the stage behind the relay's."""
    sketch: bytes
    """Of what the relay gave the sender for it: its activation if the tensor is a gradient, and its
    gradient if it is an activation."""


@dataclass(frozen=True, slots=True)
class AuditedPart(OfAveraging):
    """To an auditor: what the relay has contributed to a part that the sender has reduced."""

    averaging: AveragingId
    relay: NodeId
    part: int
    num_microbatches: int
    digest: int
    sketch: bytes
    """Empty if it has contributed nothing."""


@dataclass(frozen=True, slots=True)
class AuditResult(OfAveraging):
    """To the leader: what an auditor has found."""

    averaging: AveragingId
    relay: NodeId
    num_microbatches: int
    """So many were replayed."""
    failure: str = ""
    """Why the audit could not be finished; empty if it was."""
    doubts: tuple[tuple[NodeId, float], ...] = ()
    """Members that have got something else from the relay than they should have, and how far it was
    from that. The auditor may be among them. Within the tolerance there is no doubt."""
