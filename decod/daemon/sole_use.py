"""One process at a time uses an identity, even if somebody has copied its key to another folder.

Linux has names for sockets that are no files. A name belongs to one process, and the kernel frees
it when the process ends, however it ends. Elsewhere, only the lock of the state folder protects.
Copies on other hosts are noticed by the nodes that they ask to be let in: `daemon/twins.py`.
"""

import errno
import socket
import sys
from pathlib import Path

from decod.errors import ConfigError
from decod.membership.identity import HostKey


class SoleUse:
    """The right of this process to use an identity, on this host.

    Args:
        identity: Whose.
        state_dir: Where its key lies.

    Raises:
        ConfigError: Another process on this host uses the identity (E-CFG-033).
    """

    def __init__(self, identity: HostKey, state_dir: Path) -> None:
        self._socket: socket.socket | None = None
        if sys.platform != "linux":
            return
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0decod/{identity.node_id}")
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"another process on this host is already {identity.name}",
                    why=f"{state_dir} holds a copy of its key, and two nodes can't have one id",
                    fix="stop the other one, or give this one an empty --state-dir",
                    code="E-CFG-033",
                ) from error
            raise
        self._socket = claim

    def end(self) -> None:
        """Let others use it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
