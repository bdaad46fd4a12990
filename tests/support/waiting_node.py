"""A node whose stage is spread over two ranks. The first waits for the other, which is stopped.

    python -m tests.support.waiting_node

It writes the ids of its compute process and of the other rank in a line, and lives until it is
killed.
"""

import select
import signal
import sys

import psutil

from decod.ids import MicrobatchId
from decod.protocol.core.jobs import Build, Forward, SpreadStage
from tests.support.raw_compute import Node

MB = MicrobatchId(1, 0, 0)
_SIZE = 2 * 8 * 16 * 4
CONFIGURE = {
    "model": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    "stages": {"num_relay_stages": 1},
    "batch": {"sequence_length": 8, "microbatch_size": 2},
    "optimizer": {},
    "reduction": {},
    "seed": 7,
    "num_threads": 2,
    "device": "cpu,cpu",
}
_WAIT_S = 0.5


def main() -> None:
    node = Node()
    (rank,) = node.configure(CONFIGURE)["ranks"]
    node.result(SpreadStage(sharded=True))
    node.result(Build(1))
    psutil.Process(rank["pid"]).send_signal(signal.SIGSTOP)
    regions = [{"offset": index * _SIZE, "num_bytes": _SIZE} for index in range(2)]
    node.send(Forward(MB), regions[:1], regions[1:])
    assert not select.select([node.socket], [], [], _WAIT_S)[0], "it needs the rank's weights"
    print(node.process.pid, rank["pid"], flush=True)
    signal.pause()


if __name__ == "__main__":
    sys.exit(main())
