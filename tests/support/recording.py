"""A `decod` that records every control message that it sends, as it is on the wire.

    python -m tests.support.recording FILE join JOINSTRING ...

A line of FILE is a JSON list: the destination address, and a DeliverRequest in hexadecimal digits.
"""

import json
import sys
from pathlib import Path
from typing import Any

from decod.cli.main import main
from decod.net.transmission import Transmission
from decod.wire.v1 import control_pb2


def record(path: Path) -> None:
    """Write all control messages of this process to a file."""
    deliver = Transmission._deliver
    file = path.open("a", encoding="utf-8", buffering=1)

    async def recorded(transmission: Transmission, link: Any, batch: Any) -> None:
        request = control_pb2.DeliverRequest(envelopes=[item.envelope for item in batch])
        file.write(json.dumps([link.address, request.SerializeToString().hex()]) + "\n")
        await deliver(transmission, link, batch)

    Transmission._deliver = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(sys.argv[1]))
    del sys.argv[1]
    sys.exit(main())
