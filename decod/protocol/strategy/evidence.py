"""What the proofs of a microbatch show of an audited relay and its neighbours.

Each end of a link of the relay's tells the auditor what it has sent, and shows the other's proof of
what came (`decod.protocol.core.proofs`). So it is known for sure what the relay has worked with,
and what it has made of it:

    a neighbour has told other bytes than it has signed      -> it lies
    the relay has no proof of what came                      -> the relay lies
    the relay has told other bytes than it has signed        -> the relay lies
    the neighbour shows no proof of what the relay has sent  -> nobody has used it

If a member is lost, another of its stage tells what it has in its stead. That is about the same,
but not to the bit. So then nobody is found to lie because of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.events import Tensor
from decod.protocol.core.messages.audit_messages import AuditedWork, Finding
from decod.protocol.core.proofs import Subject, digest_in
from decod.protocol.core.sketch import ERROR_MAX
from decod.protocol.core.view import Role

_OWN_PER_MICROBATCH = 3
"""Tensors of a microbatch that a relay keeps at most."""

_LIES = Finding(AuditedWork.WORD, ERROR_MAX)


@dataclass(frozen=True, slots=True)
class Told:
    """What one end of a link has told of a microbatch."""

    tensor: Tensor | None
    """What it has sent to the other end. None: it has not kept it."""
    proof: bytes
    """Of what came from there."""

    @property
    def digest(self) -> bytes:
        """Of the tensor."""
        return self.tensor.digest if self.tensor is not None else b""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known for sure of a relay's passes of a microbatch."""

    findings: tuple[Finding, ...] = ()
    """Somebody lies. Then nothing else is known."""
    failure: str = ""
    """Why nothing is known; empty if something is."""
    given: tuple[Tensor, ...] = ()
    """What the relay has worked with: an activation and a gradient."""
    activation: Tensor | None = None
    """What it has made of it, if somebody has used that."""
    gradient: Tensor | None = None
    doubted: bool = False
    """A member that is gone gave the relay something else."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that is to be computed with."""
        made = (self.activation, self.gradient)
        return [*self.given, *(each for each in made if each is not None)]


_SILENT = Evidence((Finding(AuditedWork.SILENCE, ERROR_MAX),))


class PassProofs:
    """Weighs what is told of a relay's passes.

    Args:
        context: Of an auditor, which is of the relay's stage.
        relay: The relay.
        lost: Who was a member when the iteration was opened, and is gone.
    """

    def __init__(self, context: Context, relay: NodeId, lost: Collection[NodeId]) -> None:
        self._context, self._relay, self._lost = context, relay, lost

    def is_neighbour(self, node: NodeId | None, *, is_gradient: bool) -> bool:
        """Whether a member is of the stage that has given the relay what it worked with."""
        view = self._context.view
        member = view.by_id.get(node) if node is not None else None
        there = view.by_id[self._relay].stage_index + (1 if is_gradient else -1)
        return member is not None and member.stage_index == there % view.num_stages

    def weigh(
        self,
        microbatch: MicrobatchId,
        told: Mapping[tuple[bool, NodeId], Told],
        *,
        num_microbatches: int,
        closes: bool,
    ) -> Evidence | None:
        """Return what is known of a microbatch; None: more is awaited.

        Args:
            microbatch: It.
            told: By whether it is a gradient that was sent, and who tells.
            num_microbatches: The most that a relay can have worked on.
            closes: The relay is not waited for any longer.
        """
        on, back = (told.get((is_gradient, self._relay)) for is_gradient in (False, True))
        if on is None or back is None:
            # A neighbour on either side must say that the relay has worked on it.
            sides = {is_gradient for is_gradient, node in told if node != self._relay}
            return _SILENT if closes and len(sides) == 2 else None
        # Who has sent an activation has got a gradient, and the other way round.
        signers = [
            self._giver(back.proof, microbatch, is_gradient=False),
            self._giver(on.proof, microbatch, is_gradient=True),
        ]
        given = [self._told_by(signer, told, g) for g, signer in enumerate(signers)]
        if None in signers:
            return Evidence((_LIES,))
        before, behind = given
        if before is None or behind is None:
            return None
        if None in (before.tensor, behind.tensor):
            return Evidence(failure="a neighbour has not kept what it gave the relay")
        if on.tensor is None or back.tensor is None:
            return self._not_kept(before, num_microbatches)
        return self._compared(microbatch, signers, (before, behind), (on, back))

    def _not_kept(self, before: Told, num_microbatches: int) -> Evidence:
        """Return what follows if the relay says that it has not kept what it has sent."""
        size_bytes = before.tensor.size_bytes if before.tensor is not None else 0
        room_bytes = self._context.run.protocol.keep_max_bytes
        if _OWN_PER_MICROBATCH * num_microbatches * size_bytes <= room_bytes:
            return _SILENT
        return Evidence(failure="the relay had no room to keep what it has sent")

    def _compared(
        self,
        microbatch: MicrobatchId,
        signers: Sequence[NodeId | None],
        given: tuple[Told, Told],
        own: tuple[Told, Told],
    ) -> Evidence:
        """Compare tensors with their proofs: activations, and then gradients."""
        findings, doubted, used = list[Finding](), False, list[Tensor | None]()
        for giver, told, shown in zip(signers, given, own[::-1], strict=True):
            if giver == self._context.node_id or told.digest == digest_in(shown.proof):
                continue  # What this node gives itself has not travelled, and has no hash.
            if giver in self._lost:
                doubted = True
                continue
            assert giver is not None
            if self._context.view.by_id[giver].role is Role.DATA:
                return Evidence(failure="a data node has told something else than it has signed")
            findings.append(Finding(AuditedWork.GIFT, ERROR_MAX, (giver,)))
        for is_gradient, (told, shown) in enumerate(zip(own, given[::-1], strict=True)):
            subject = Subject(self._context.iteration, microbatch, bool(is_gradient))
            signed = self._context.proofs.signer_of(shown.proof, subject) == self._relay
            used.append(told.tensor if signed else None)
            if signed and told.digest != digest_in(shown.proof):
                findings.append(_LIES)
        if findings:
            return Evidence(tuple(dict.fromkeys(findings)))
        tensors = tuple(told.tensor for told in given if told.tensor is not None)
        on, back = used
        return Evidence(given=tensors, activation=on, gradient=back, doubted=doubted)

    def _giver(self, proof: bytes, microbatch: MicrobatchId, *, is_gradient: bool) -> NodeId | None:
        """Return who has signed what the relay has worked with; None if nobody could have."""
        subject = Subject(self._context.iteration, microbatch, is_gradient)
        signer = self._context.proofs.signer_of(proof, subject)
        known = signer in self._lost or self.is_neighbour(signer, is_gradient=is_gradient)
        return signer if known else None

    def _told_by(
        self, giver: NodeId | None, told: Mapping[tuple[bool, NodeId], Told], is_gradient: int
    ) -> Told | None:
        """Return what a giver tells, or another of its stage in its stead."""
        if giver in self._lost:
            others = (told[g, n] for g, n in told if g == is_gradient and n != self._relay)
            return next(others, None)
        return None if giver is None else told.get((bool(is_gradient), giver))
