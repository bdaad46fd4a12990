"""The node process of a loop that is slow to agree with others on what a round averages.

    python -m tests.support.late_node SECONDS --socket-fd FD

The messages that close a round are late. All others are not.
"""

import asyncio
import sys

from decod.daemon.peer.__main__ import main
from decod.daemon.peer.peer_gateway import PeerGateway
from decod.ids import NodeId
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.round_messages import CloseRound, RoundClosed


def _delay(seconds: float) -> None:
    send = PeerGateway.send

    def late(self: PeerGateway, to: NodeId, term: int, message: Message) -> None:
        late_s = seconds if isinstance(message, CloseRound | RoundClosed) else 0.0
        asyncio.get_running_loop().call_later(late_s, send, self, to, term, message)

    PeerGateway.send = late  # type: ignore[method-assign]


if __name__ == "__main__":
    _delay(float(sys.argv.pop(1)))
    sys.exit(main())
