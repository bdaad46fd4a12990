"""The node process of a loop, behind a link that delays what it says to other nodes.

    python -m tests.support.late_node SECONDS --socket-fd FD

Only control messages are late. Tensors, which the link's rate would delay, are not.
"""

import asyncio
import sys

from decod.daemon.peer.__main__ import main
from decod.daemon.peer.gateway import PeerGateway
from decod.ids import NodeId
from decod.protocol.core.messages import Message


def _delay(seconds: float) -> None:
    send = PeerGateway.send

    def late(self: PeerGateway, to: NodeId, term: int, message: Message) -> None:
        asyncio.get_running_loop().call_later(seconds, send, self, to, term, message)

    PeerGateway.send = late  # type: ignore[method-assign]


if __name__ == "__main__":
    _delay(float(sys.argv.pop(1)))
    sys.exit(main())
