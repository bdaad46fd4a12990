"""Proofs of what members have sent from stage to stage, for audits.

Nobody but its ends sees what travels over a link. So who sends an activation or a gradient signs
the hash of its bytes, and the receiver uses no other. If the work of one of them is audited, its
neighbour shows the proof: then nobody can say that something else has travelled.

Where a run has no audits, nothing is hashed or signed. Whoever drives the core makes proofs: a
tensor leaves with one, and one that comes has its hash (`Tensor.digest`). The core only checks.
"""

from dataclasses import dataclass
from typing import Protocol

from decod.ids import Iteration, MicrobatchId, NodeId
from decod.limits import DIGEST_BYTES
from decod.protocol.core.messages.audit_messages import AuditedTensor
from decod.protocol.core.messages.microbatch_messages import (
    BackwardGradient,
    Travelling,
    Unusable,
)

Hashed = Travelling | AuditedTensor | Unusable
"""Messages whose receivers compare the hash of the tensor with proofs."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the tensor is of which a proof tells the digest. The attempt is in the iteration."""

    iteration: Iteration
    microbatch: MicrobatchId
    is_gradient: bool


class Proofs(Protocol):
    """Checks proofs. A function of its arguments, and may take 1 ms."""

    def signer_of(self, proof: bytes, subject: Subject) -> NodeId | None:
        """Return who has signed a proof; None if nobody has, or it is of something else."""


class NoProofs:
    """Believes nothing, as where nothing is audited."""

    def signer_of(self, proof: bytes, subject: Subject) -> NodeId | None:  # noqa: ARG002
        return None


NO_PROOFS = NoProofs()


def digest_in(proof: bytes) -> bytes:
    """Return the digest of the tensor that a proof is of."""
    return proof[:DIGEST_BYTES]


def subject_of(message: Travelling) -> Subject:
    """Return what the tensor is that travels with a message."""
    is_gradient = isinstance(message, BackwardGradient)
    return Subject(message.iteration, message.microbatch, is_gradient)
