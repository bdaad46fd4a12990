"""Audits: a member does the work of another again, and says whether it was right."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, NamedTuple

from decod.ids import AveragingId, MicrobatchId, NodeId, NodeIds, SomeNodeIds
from decod.limits import (
    MEMBERS_MAX,
    AtLeast,
    AtMost,
    Count,
    Each,
    Index,
    Number,
    ProofBytes,
    ReasonText,
    SealBytes,
    Unique,
    exactly,
    within,
)
from decod.protocol.core.fingerprints import ERROR_MAX, SEED_BYTES, SketchBytes, digest_of
from decod.protocol.core.messages.scopes import OfAveraging, WithTensor

AUDITORS_MAX = 16
"""Of one relay's work."""


@dataclass(frozen=True, slots=True)
class AuditCase:
    """A relay whose work of an iteration is done again."""

    relay: NodeId
    """Whose work it is."""
    auditors: Annotated[tuple[NodeId, ...], AtLeast(1), AtMost(AUDITORS_MAX), Unique()]
    """Other members of its stage, which share its microbatches. The first puts together what they
    find. Or the leader alone, which judges between the only two of a stage."""
    opinion: Count = 1
    """Which one this is of the relay's work in an iteration."""
    seed: Annotated[bytes, exactly(SEED_BYTES)] = bytes(SEED_BYTES)
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
    cases: Annotated[tuple[AuditCase, ...], AtLeast(1), AtMost(MEMBERS_MAX), Unique("relay")]
    seal: SealBytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class StandOut(OfAveraging):
    """To the leader: what some members have contributed or reduced stands out from the rest."""

    averaging: AveragingId
    nodes: SomeNodeIds
    """Who they are."""


class OfOpinion(OfAveraging):
    """About one opinion of an audited relay's work."""

    __slots__ = ()
    relay: NodeId
    """Whose work is audited."""
    opinion: int
    """As in `AuditCase`."""


@dataclass(frozen=True, slots=True)
class AuditedTensor(OfOpinion, WithTensor):
    """To an auditor, from one end of a link of the relay's: what it has sent to the other end for a
    microbatch, as a tensor. Without one: it was not kept."""

    averaging: AveragingId
    relay: NodeId
    opinion: Count
    microbatch: MicrobatchId
    is_gradient: bool
    """The tensor is a gradient: the sender is of the stage behind the other end's."""
    proof: ProofBytes
    """Of what the sender got from the other end: an activation if the tensor is a gradient, and a
    gradient if it is an activation. Empty if it got nothing."""


@dataclass(frozen=True, slots=True)
class AuditedPart(OfOpinion):
    """To an auditor: what the relay has contributed to a part that the sender has reduced."""

    averaging: AveragingId
    relay: NodeId
    opinion: Count
    part: Index
    """Of the average."""
    num_microbatches: Count
    """In the contribution."""
    digest: Number
    """Order-free digest of their ids."""
    sketch: SketchBytes
    """Empty if it has contributed nothing."""


class AuditShare(NamedTuple):
    """A contribution to a part of an average."""

    contributor: NodeId
    """Who has contributed it."""
    sketch: SketchBytes
    """Of the contribution. None: it has contributed nothing."""


@dataclass(frozen=True, slots=True)
class AuditedShares(OfOpinion):
    """To the first auditor: contributions to the part that the relay has reduced.

    A contributor says what it has given, and the relay says what it has got of each member.
    """

    averaging: AveragingId
    relay: NodeId
    opinion: Count
    shares: Annotated[
        tuple[tuple[NodeId, bytes], ...],
        Each(AuditShare),
        AtMost(MEMBERS_MAX),
        Unique("contributor"),
    ]
    """Contributors, and sketches of what they have contributed. Empty: it was nothing."""


FINDINGS_MAX = 64
"""In one result."""


class AuditedWork(Enum):
    """What is not what it should have been."""

    PASSES = "activations or gradients"
    """They are not what the relay should have computed."""
    CONTRIBUTION = "contribution"
    """What the relay has contributed to the average."""
    MEAN = "part of the average"
    """The part of the average that it has reduced."""
    WORD = "word about its passes"
    """The relay has no proof of what it says it got, or has told something else than it signed."""
    SILENCE = "silence about its passes"
    """The relay has not said in time what it has sent."""
    GIFT = "word about what it gave"
    """Of another: it has given the auditor something else than it has signed for the relay."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a relay has made is not what it should have been, or others lie about it."""

    work: AuditedWork
    """What it is."""
    error: Annotated[float, within(0.0, ERROR_MAX)]
    """How far it is from that, as a share of its length. The largest of its kind."""
    suspects: NodeIds = ()
    """Who may have made it look wrong: who says what the relay has contributed, or contributed for
    it to reduce. None: nobody else could. Of a gift: its giver, who alone has lied."""


@dataclass(frozen=True, slots=True)
class AuditedPass(OfOpinion):
    """To the first auditor: another one has done the passes of a microbatch again."""

    averaging: AveragingId
    relay: NodeId
    opinion: Count
    microbatch: MicrobatchId
    findings: Annotated[tuple[Finding, ...], AtMost(3)] = ()
    """What is wrong."""
    doubted: bool = False
    """The relay has worked with what a member gave it that is gone. Others know about what that
    was, but not for sure."""
    sketches: Annotated[tuple[SketchBytes, ...], AtMost(MEMBERS_MAX)] = ()
    """Of the gradient of the parameters, part by part. None: it was not computed, since it is known
    already who lies."""
    failure: ReasonText = ""
    """Why the passes could not be done again; empty if they were."""


@dataclass(frozen=True, slots=True)
class AuditResult(OfOpinion):
    """To the leader: what the auditors of a relay have found."""

    averaging: AveragingId
    relay: NodeId
    opinion: Count
    num_microbatches: Count
    """So many were replayed."""
    failure: ReasonText = ""
    """Why the audit could not be finished; empty if it was."""
    findings: Annotated[tuple[Finding, ...], AtMost(FINDINGS_MAX), Unique("work", "suspects")] = ()
    """The largest error of each kind of work and suspects. There is none within the tolerance."""
