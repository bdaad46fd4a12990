"""Audits: a member does the work of another again, and says whether it was right."""

from dataclasses import dataclass, field
from enum import Enum

from decod.ids import AveragingId, MicrobatchId, NodeId
from decod.protocol.core.digest import digest_of
from decod.protocol.core.messages.scopes import OfAveraging
from decod.protocol.core.sketch import SEED_BYTES


@dataclass(frozen=True, slots=True)
class AuditCase:
    """A relay whose work of an iteration is done again."""

    relay: NodeId
    auditors: tuple[NodeId, ...]
    """Members of its stage. They share its microbatches. The first puts together what they find."""
    opinion: int = 1
    """Which one this is of the relay's work in an iteration."""
    seed: bytes = bytes(SEED_BYTES)
    """Of the sketches of contributions and means. Nobody has known it before they were sent."""
    closes: bool = False
    """The auditors are to wait no longer for what the relay says itself."""

    def auditor_of(self, microbatch: MicrobatchId) -> NodeId:
        """Return who does the passes of a microbatch again."""
        return self.auditors[digest_of([microbatch]) % len(self.auditors)]


@dataclass(frozen=True, slots=True)
class Audit(OfAveraging):
    """From the leader, down the tree: some relays' work of the iteration is audited."""

    averaging: AveragingId
    cases: tuple[AuditCase, ...]
    seal: bytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class StandOut(OfAveraging):
    """To the leader: what some members have contributed or reduced stands out from the rest."""

    averaging: AveragingId
    nodes: tuple[NodeId, ...]


class OfOpinion(OfAveraging):
    """About one opinion of an audited relay's work."""

    __slots__ = ()
    relay: NodeId
    opinion: int
    """As in `AuditCase`."""


@dataclass(frozen=True, slots=True)
class AuditedTensor(OfOpinion):
    """To an auditor, with a tensor: what the sender gave the relay for a microbatch. Without one:
    it was not kept."""

    averaging: AveragingId
    relay: NodeId
    opinion: int
    microbatch: MicrobatchId
    is_gradient: bool
    """The tensor is a gradient: the sender is of the stage behind the relay's."""
    sketch: bytes
    """Of what the relay gave the sender for it: its activation if the tensor is a gradient, and its
    gradient if it is an activation."""


@dataclass(frozen=True, slots=True)
class AuditedInput(OfOpinion):
    """From the relay to an auditor: what it got for a microbatch."""

    averaging: AveragingId
    relay: NodeId
    opinion: int
    microbatch: MicrobatchId
    is_gradient: bool
    """It got it from the stage behind; otherwise, from the stage before."""
    sketch: bytes
    """Empty if the relay's device knows of none."""


@dataclass(frozen=True, slots=True)
class AuditedPart(OfOpinion):
    """To an auditor: what the relay has contributed to a part that the sender has reduced."""

    averaging: AveragingId
    relay: NodeId
    opinion: int
    part: int
    num_microbatches: int
    digest: int
    sketch: bytes
    """Empty if it has contributed nothing."""


@dataclass(frozen=True, slots=True)
class AuditedShares(OfOpinion):
    """To the first auditor: contributions to the part that the relay has reduced.

    A contributor says what it has given, and the relay says what it has got of each member.
    """

    averaging: AveragingId
    relay: NodeId
    opinion: int
    shares: tuple[tuple[NodeId, bytes], ...]
    """Contributors, and sketches of what they have contributed. Empty: it was nothing."""


FINDINGS_MAX = 64
"""In one result."""


class AuditedWork(Enum):
    """What of a relay's work is not what it should have been."""

    PASSES = "activations or gradients"
    CONTRIBUTION = "contribution"
    MEAN = "part of the average"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a relay has made is not what it should have been, or others lie about it."""

    work: AuditedWork
    error: float
    """How far it is from that, as a share of its length. The largest of its kind."""
    suspects: tuple[NodeId, ...] = ()
    """Who may have made it look wrong: who gave the relay what it worked with, or got the result.
    None: nobody else could."""


@dataclass(frozen=True, slots=True)
class AuditedPass(OfOpinion):
    """To the first auditor: another one has done the passes of a microbatch again."""

    averaging: AveragingId
    relay: NodeId
    opinion: int
    microbatch: MicrobatchId
    findings: tuple[Finding, ...] = ()
    """How far the relay's activation and gradient are from what they should be."""
    doubted: tuple[NodeId, ...] = ()
    """Who has given the auditor something else than the relay says that it got."""
    sketches: tuple[bytes, ...] = ()
    """Of the gradient of the parameters, part by part."""
    failure: str = ""
    """Why the passes could not be done again; empty if they were."""


@dataclass(frozen=True, slots=True)
class AuditResult(OfOpinion):
    """To the leader: what the auditors of a relay have found."""

    averaging: AveragingId
    relay: NodeId
    opinion: int
    num_microbatches: int
    """So many were replayed."""
    failure: str = ""
    """Why the audit could not be finished; empty if it was."""
    findings: tuple[Finding, ...] = ()
    """The largest error of each kind of work and suspects. There is none within the tolerance."""
