"""A node whose tensors trickle out while a file exists.

    python -m tests.support.trickling join JOINSTRING --state-dir DIR ...

The file is `trickles` in the state folder. A tensor's header leaves at once, and its data follow
at a byte per second. The receiver always gets something, but far too slowly. Control messages,
incoming data and everything else about the node are as usual. Nothing in the node knows of it.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-u", "-m", "tests.support.trickling")

FLAG = "trickles"

_BYTE_INTERVAL_S = 1.0


def _trickle(flag: Path) -> None:
    from decod.net import channel
    from decod.net.client import Transmission
    from decod.net.stream import frames_of

    whole, path = Transmission._push_whole, "/decod.wire.v1.TensorService/Push"

    def trickles() -> bool:
        return flag.exists()

    async def trickling(sender: Transmission, link: Any, first: bytes, item: Any) -> bytes:
        if not trickles():
            return await whole(sender, link, first, item)
        push = link.bulk.stream_unary(path, channel.as_is, channel.as_is)
        timeout_s = sender._limits.stream_timeout_s(len(item.data))
        call = push(None, timeout=timeout_s, metadata=sender._metadata_of(item))
        try:
            await call.write(first)
            for frame in frames_of(item.data, 1, sender._watch):
                await call.write(frame)
                await asyncio.sleep(_BYTE_INTERVAL_S)
            await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # The receiver has given it up. Its answer says why.
        answer: bytes = await call
        return answer

    Transmission._push_whole = trickling  # type: ignore[method-assign]


if __name__ == "__main__":
    from decod.cli.main import main

    _trickle(Path(sys.argv[sys.argv.index("--state-dir") + 1]) / FLAG)
    sys.exit(main())
