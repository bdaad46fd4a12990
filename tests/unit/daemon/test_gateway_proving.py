"""What goes from stage to stage leaves with a proof, and comes with its hash."""

import asyncio
import hashlib
from collections.abc import Callable

import pytest

from decod.daemon.gateway import _INLINE_MAX_BYTES, Proving
from decod.ids import FlowId, Iteration, MicrobatchId, NodeId, RunId
from decod.membership.identity import new_identity
from decod.membership.statements import TensorProofs
from decod.protocol.core.messages import BackwardGradient, ForwardActivation, Message
from decod.protocol.core.messages.microbatch_messages import Complete
from decod.protocol.core.proofs import digest_in, subject_of

OWN = new_identity()
PROOFS = TensorProofs(OWN, RunId("r" * 26))
HEAD = (Iteration(1, 1), MicrobatchId(1, 0, 0), FlowId(NodeId("d"), 0), (NodeId("r"),))
SIZES = [10, _INLINE_MAX_BYTES, _INLINE_MAX_BYTES + 1]


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("kind", [ForwardActivation, BackwardGradient])
def test_a_tensor_leaves_with_a_proof_and_comes_with_its_hash(
    size_bytes: int, kind: Callable[..., ForwardActivation]
) -> None:
    data = memoryview(bytes(size_bytes))

    async def main() -> tuple[Message, bytes]:
        proving, said, digests = Proving(PROOFS), list[Message](), list[bytes]()
        proving.leaves(kind(*HEAD), data, said.append)
        proving.comes(kind(*HEAD), data, digests.append)
        await asyncio.gather(*proving._tasks._tasks)
        return said[0], digests[0]

    message, digest = asyncio.run(main())
    assert isinstance(message, ForwardActivation | BackwardGradient)
    assert digest == digest_in(message.proof) == hashlib.sha256(data).digest()
    assert PROOFS.signer_of(message.proof, subject_of(message)) == OWN.node_id


def test_who_passes_a_tensor_on_does_not_sign_it() -> None:
    said = list[Message]()
    message = ForwardActivation(*HEAD, proof=b"another's")
    Proving(PROOFS).leaves(message, memoryview(b"x"), said.append)
    assert said == [message]
    assert said[0].proof == b"another's"


@pytest.mark.parametrize(
    ("proofs", "message"),
    [(None, ForwardActivation(*HEAD)), (PROOFS, Complete(*HEAD[:2], 0.0))],
    ids=["nothing is audited", "another message"],
)
def test_nothing_else_is_hashed(proofs: TensorProofs | None, message: Message) -> None:
    said, digests = list[Message](), list[bytes]()
    proving = Proving(proofs)
    proving.leaves(message, memoryview(b"x"), said.append)
    proving.comes(message, memoryview(b"x"), digests.append)
    assert said[0] is message
    assert digests == [b""]
