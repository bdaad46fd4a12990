"""The hashes of what travels from stage to stage: audits need them (`protocol.core.proofs`)."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace

from decod.membership.statements import TensorProofs
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.proofs import Hashed, subject_of
from decod.tasks import TaskSet

_INLINE_MAX_BYTES = 1 << 18
"""The hash of so much takes less time than a thread."""


class Proving:
    """Hashes tensors beside the event loop, on their way out and in.

    Args:
        proofs: This node's. None: nothing is audited, and nothing hashed.
    """

    def __init__(self, proofs: TensorProofs | None) -> None:
        self._proofs = proofs
        self._tasks = TaskSet()

    async def close(self) -> None:
        """Drop what is being hashed."""
        await self._tasks.close()

    def leaves(self, message: Message, data: memoryview, then: Callable[[Message], None]) -> None:
        """Call back with a message that is to be sent: with a proof, if it needs one."""
        proofs = self._proofs
        if proofs is None or not isinstance(message, Travelling) or message.proof:
            # Who passes it on has not computed it.
            then(message)
            return
        subject = subject_of(message)
        self._hash(
            data,
            lambda digest: then(replace(message, proof=proofs.proof_of(digest, subject))),
        )

    def comes(self, message: Message, data: memoryview, then: Callable[[bytes], None]) -> None:
        """Call back with the hash of a tensor that has come; with nothing if nobody needs it."""
        if self._proofs is None or not isinstance(message, Hashed):
            then(b"")
        else:
            self._hash(data, then)

    def _hash(self, data: memoryview, then: Callable[[bytes], None]) -> None:
        if data.nbytes <= _INLINE_MAX_BYTES:
            then(_sha256(data))
        else:
            self._tasks.start(self._hash_beside(data, then))

    @staticmethod
    async def _hash_beside(data: memoryview, then: Callable[[bytes], None]) -> None:
        then(await asyncio.to_thread(_sha256, data))


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()
