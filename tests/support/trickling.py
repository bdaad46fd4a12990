"""A node whose tensors trickle out while a file exists.

    python -m tests.support.trickling join JOINSTRING --state-dir DIR ...

The file is `trickles` in the state folder. A tensor's header leaves, but none of its data. The
receiver never gets a whole frame, as on a link with a byte per second. Control messages, incoming
data and everything else about the node are as usual. Nothing in the node knows of it.
"""

import sys
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-u", "-m", "tests.support.trickling")

FLAG = "trickles"


def _trickle(flag: Path) -> None:
    from decod.net import channel
    from decod.net.client import PeerClient

    whole, path = PeerClient._push_whole, "/decod.wire.v1.TensorService/Push"

    def trickles() -> bool:
        return flag.exists()

    async def trickling(client: PeerClient, link: Any, first: bytes, item: Any) -> bytes:
        if not trickles():
            return await whole(client, link, first, item)
        push = link.bulk.stream_unary(path, channel.as_is, channel.as_is)
        timeout_s = client._limits.stream_timeout_s(len(item.data))
        call = push(None, timeout=timeout_s, metadata=client._metadata_of(item))
        await call.write(first)
        answer: bytes = await call
        return answer

    PeerClient._push_whole = trickling  # type: ignore[method-assign]


if __name__ == "__main__":
    from decod.cli.main import main

    _trickle(Path(sys.argv[sys.argv.index("--state-dir") + 1]) / FLAG)
    sys.exit(main())
