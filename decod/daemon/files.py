"""How many files this process may have open, and how many other nodes that is enough for.

Each connection is an open file. A node dials a peer twice, for control and for tensors, and is
dialled twice. Some files are set aside for the node itself: logs, checkpoints, the compute process,
the local socket. Peers never get those, so the node can say what is wrong when the rest is used.
"""

import errno
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from decod.errors import HardwareError

_PER_PEER = 4
_OWN = 96
_PEERS_LEAST = 4
_CONNECTIONS_MAX = 8192
"""Of all peers together, whatever the limit: each takes some 80 KB of memory."""

_UNLIMITED = 1 << 20

RAISE = "raise the limit: `ulimit -n 65536` before the start, or LimitNOFILE=65536 in a service"


@dataclass(frozen=True, slots=True)
class FileLimit:
    """The grant of the system to this process."""

    limit: int
    """Files that may be open at a time."""

    @property
    def peers_max(self) -> int:
        """Nodes that this one can be connected with."""
        return max(0, self.limit - _OWN) // _PER_PEER

    @property
    def connections_max(self) -> int:
        """Connections that others may open to this node at a time."""
        return min(_CONNECTIONS_MAX, self.peers_max * _PER_PEER // 2)

    def tell_if_few(self, num_peers: int, note: Callable[..., None]) -> None:
        """Tell the operator if the limit is too low for so many other nodes.

        Args:
            num_peers: Other nodes.
            note: Takes the name of an event, and its fields as keywords.
        """
        if num_peers > self.peers_max:
            reason = f"enough for {self.peers_max} other nodes, and there are {num_peers}"
            note("files.few", limit=self.limit, reason=reason, fix=RAISE)


PLENTY = FileLimit(_UNLIMITED)
"""For a process whose limit nobody has looked at."""


def raise_limit() -> FileLimit:
    """Ask the system for as many open files as it gives, and return what it grants.

    Raises:
        HardwareError: That is too little for a node (E-HW-011).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            wanted = _UNLIMITED if hard == resource.RLIM_INFINITY else hard
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = FileLimit(_UNLIMITED if soft == resource.RLIM_INFINITY else soft)
    if files.peers_max < _PEERS_LEAST:
        raise HardwareError(
            f"this process may open only {files.limit} files",
            why=f"a node needs {_OWN} itself and {_PER_PEER} for each other node",
            fix=RAISE,
            code="E-HW-011",
        )
    return files


def is_exhausted(error: object) -> bool:
    """Return whether an error says that no more files can be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
