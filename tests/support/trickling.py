"""A node whose tensors trickle out while a file exists.

    python -m tests.support.trickling join JOINSTRING --state-dir DIR ...

The file is `trickles` in the state folder. A tensor's header leaves at once, and its data follow
at a byte per second. The receiver always gets something, but far too slowly. Control messages,
incoming data and everything else about the node are as usual. Nothing in the node knows of it.
"""

import asyncio
import sys
from pathlib import Path

PROGRAM = (sys.executable, "-u", "-m", "tests.support.trickling")

FLAG = "trickles"

_BYTE_INTERVAL_S = 1.0


def _trickle(flag: Path) -> None:
    from decod.net.tensor_stream import TensorSender

    whole = TensorSender.piece

    def trickles() -> bool:
        return flag.exists()

    async def trickling(sender: TensorSender, data: memoryview) -> None:
        if not trickles() or not data:
            await whole(sender, data)
            return
        for position in range(len(data)):
            await whole(sender, data[position : position + 1])
            await asyncio.sleep(_BYTE_INTERVAL_S)

    TensorSender.piece = trickling  # type: ignore[method-assign]


if __name__ == "__main__":
    from decod.cli.main import main

    _trickle(Path(sys.argv[sys.argv.index("--state-dir") + 1]) / FLAG)
    sys.exit(main())
