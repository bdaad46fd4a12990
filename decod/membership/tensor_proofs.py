"""Proofs of what has been sent from stage to stage (see `protocol.core.proofs`).

A proof is the SHA-256 of the tensor, the signer's public key, and a signature over the run, what
the tensor is, and the hash. A node's id is the hash of its key, so nothing else is needed to know
whose it is, also when that node is gone.
"""

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.limits import DIGEST_BYTES, PROOF_BYTES
from decod.membership.credential import verify
from decod.membership.identity import HostKey, node_id_of
from decod.protocol.core.proofs import Subject, digest_in

_KEY_END = DIGEST_BYTES + 32


class TensorProofs:
    """The proofs that one node makes and checks.

    Args:
        host: This node's key.
        run_id: The run. A proof of another run is nobody's.
    """

    def __init__(self, host: HostKey, run_id: RunId) -> None:
        self._host, self._run_id = host, run_id

    def proof_of(self, digest: bytes, subject: Subject) -> bytes:
        """Return this node's proof of a tensor of its own.

        Args:
            digest: The tensor's SHA-256.
            subject: What it is.
        """
        return digest + self._host.public + self._host.sign(self._text(digest, subject))

    def signer_of(self, proof: bytes, subject: Subject) -> NodeId | None:
        """Return who has signed a proof; None if nobody has, or it is of something else."""
        if len(proof) != PROOF_BYTES:
            return None
        public, signature = proof[DIGEST_BYTES:_KEY_END], proof[_KEY_END:]
        try:
            verify(public, signature, self._text(digest_in(proof), subject))
        except MalformedMessageError:
            return None
        return node_id_of(public)

    def _text(self, digest: bytes, subject: Subject) -> bytes:
        iteration, microbatch = subject.iteration, subject.microbatch
        kind = "gradient" if subject.is_gradient else "activation"
        of = (microbatch.iteration, microbatch.data_node_index, microbatch.index)
        text = f"{self._run_id} {iteration} {' '.join(map(str, of))} {kind}"
        return b"decod tensor 1\0" + text.encode() + b"\0" + digest
