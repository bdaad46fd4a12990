"""What simulated devices can tell of each other's work, the lies of some, and proofs.

A part of the simulated compute process (`decod.sim.simulated_compute`) and of its host. A symbolic
sketch says how many microbatches are in a tensor. That of a false tensor says -1, and so does that
of each microbatch in the sum of a false mean.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from decod.ids import MicrobatchId, NodeId
from decod.limits import DIGEST_BYTES, PROOF_BYTES
from decod.protocol.core import jobs
from decod.protocol.core.events import Received
from decod.protocol.core.fingerprints import ERROR_MAX, NUM_SUMS, Sketch
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.proofs import Hashed, Subject, subject_of
from decod.sim.averages import (
    AveragedPart,
    GradientPart,
    MisuseError,
    SimulatedState,
    manifest_of,
    num_in,
)
from decod.sim.profile import Activation, Content, Gradient

_FALSE = -1

_STALE_EVERY = 4


class SimulatedWitness:
    """One device's knowledge of what others have computed in an iteration."""

    def __init__(self) -> None:
        self.lies = False
        """The device's results are false."""
        self.is_stale = False
        """Some activations and gradients are those of before."""
        self.accuses = False
        """The host says so of those of others."""
        self.spoils_means = False
        """The means of what others have contributed are false, and nothing else."""
        self._beside = -1
        """The stage that stands beside the own, for a judge."""

    def makes_false(self, microbatch: MicrobatchId) -> bool:
        """Return whether the device's result of a pass is false."""
        stale = self.is_stale and (microbatch.iteration + microbatch.index) % _STALE_EVERY == 0
        return self.lies or stale

    def sketch_part(self, job: jobs.SketchPart, inputs: Sequence[object]) -> jobs.Sketched:
        """Tell what is in contributions, or in a mean."""
        kind = AveragedPart if job.is_mean else GradientPart
        if any(not isinstance(each, kind) or each.part != job.part for each in inputs):
            raise MisuseError(f"{job} of {inputs}")
        told = [_FALSE if self.accuses else _told_by(each) for each in inputs]
        return jobs.Sketched(tuple(_sketch_of(each, job.seed) for each in told))

    def clear(self) -> None:
        """Forget the iteration."""
        self._beside = -1

    def stand_in(self, job: jobs.StandIn, blob: SimulatedState, iteration: int) -> jobs.Built:
        """Have another stage beside the own."""
        if manifest_of(blob) != job.manifest or blob.stage_index != job.stage_index:
            raise MisuseError(f"{job} with the blob {blob}")
        if (blob.iteration, blob.with_optimizer) != (iteration, job.with_optimizer):
            raise MisuseError(f"{job} after {iteration} with the blob {blob}")
        self._beside = job.stage_index
        return jobs.Built(blob.parameter_hash)

    def replay(self, job: jobs.ReplayPasses, own: int, inputs: Sequence[object]) -> jobs.Replayed:
        """Compare another device's results with what they should be.

        Args:
            job: What of that device's is compared.
            own: This device's stage.
            inputs: What that device got and has sent.
        """
        here = self._beside if job.beside else own
        m = job.microbatch
        given = (Activation(m, here - 1), Gradient(m, here + 1))
        made = [Activation(m, here)] * job.with_activation + [Gradient(m, here)] * job.with_gradient
        if tuple(inputs) != (*given, *made):
            raise MisuseError(f"{job} at stage {here} on {inputs}")
        sent = [getattr(each, "false", False) for each in inputs[2:]]
        wrong = [ERROR_MAX if self.accuses or false else 0.0 for false in sent]
        on = wrong.pop(0) if job.with_activation else 0.0
        back = wrong.pop(0) if job.with_gradient else 0.0
        sketches = (_sketch_of(_FALSE if self.accuses else 1, job.seed),) * job.num_parts
        return jobs.Replayed(on, back, sketches)

    def averaged(self, average: AveragedPart, inputs: Sequence[object]) -> AveragedPart:
        """Return a mean that says what is in it."""
        told = math.fsum(_told_by(each) for each in inputs) / average.weights_total
        return replace(average, told=_FALSE if self.spoils_means else told)


def _told_by(content: object) -> float:
    if isinstance(content, AveragedPart):
        return content.told
    assert isinstance(content, GradientPart), content
    return _FALSE if content.false else num_in(content.counts)


def _sketch_of(num: float, seed: bytes) -> bytes:
    return Sketch(seed, (float(num),) * NUM_SUMS).to_bytes()


class SimulatedProofs:
    """Proofs that nobody forges here: who has signed what stands in them."""

    def signer_of(self, proof: bytes, subject: Subject) -> NodeId | None:
        """Return who has signed a proof; see `decod.protocol.core.proofs`."""
        about = proof[DIGEST_BYTES : 2 * DIGEST_BYTES]
        signer = proof[2 * DIGEST_BYTES :]
        return NodeId(signer.rstrip(b"\0").decode()) if about == _sha256(subject) else None


def proven(message: Message, content: Content, sender: NodeId) -> Message:
    """Return a message as it leaves its sender: with a proof, if it needs one and has none."""
    if not isinstance(message, Travelling) or message.proof:
        return message
    proof = _digest_of(content) + _sha256(subject_of(message)) + sender.encode()
    return replace(message, proof=proof.ljust(PROOF_BYTES, b"\0"))


def with_digest(received: Received, content: Content) -> Received:
    """Return what has come, with the hash of its tensor if audits need it."""
    if received.tensor is None or not isinstance(received.message, Hashed):
        return received
    return replace(received, tensor=replace(received.tensor, digest=_digest_of(content)))


def _digest_of(content: Content) -> bytes:
    return _sha256(content, getattr(content, "false", False), getattr(content, "made", 0))


def _sha256(*values: object) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()
