"""The limit on this process's open files, and the number of other nodes for which it suffices.

A node dials each peer twice, for control and for tensors, and is dialled twice. Each connection is
an open file. One for control that has come is three, since its bytes are passed on to gRPC, and
those that have come may all be such. So there are eight files for each peer. Some files are
reserved for the node itself: logs, checkpoints, the compute process, the local socket. Peers can't
use these up, so the node can still report that the rest is used.
"""

import errno
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from decod.errors import HardwareError

_PER_PEER = 8
_OWN = 96
_PEERS_LEAST = 4
_CONNECTIONS_MAX = 8192
"""Most connections of all peers together, even under a high limit: each takes some 80 KB."""

_UNLIMITED = 1 << 20

RAISE = "raise the limit: `ulimit -n 65536` before the start, or LimitNOFILE=65536 in a service"


@dataclass(frozen=True, slots=True)
class FileLimit:
    """The grant of the system to this process."""

    limit: int
    """Files that may be open at a time."""

    @property
    def peers_max(self) -> int:
        """Number of other nodes to which this node can be connected."""
        return max(0, self.limit - _OWN) // _PER_PEER

    @property
    def connections_max(self) -> int:
        """Number of connections that others may have open to this node."""
        return min(_CONNECTIONS_MAX, self.peers_max * 2)

    def tell_if_few(self, num_peers: int, note: Callable[..., None]) -> None:
        """Tell the operator if the limit is too low for a number of other nodes.

        Args:
            num_peers: The number of other nodes.
            note: Takes the name of an event, and its fields as keywords.
        """
        if num_peers > self.peers_max:
            reason = f"enough for {self.peers_max} other nodes, and there are {num_peers}"
            note("files.few", limit=self.limit, reason=reason, fix=RAISE)


def raise_limit() -> FileLimit:
    """Raise this process's limit as far as the system allows, and return it.

    Raises:
        HardwareError: The limit is too low for a node (E-HW-011).
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
    """Whether an error means that no more files can be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
