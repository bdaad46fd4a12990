"""Takes from Python what only Linux has, in the tests' process and in all that they start.

The tests put this folder on the path if `DECOD_PORTABLE` is set. Whoever calls what is missing
fails, as on another system.
"""

import mmap
import os
import socket
from typing import Any

for _module, _names in (
    (os, ("memfd_create", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "eventfd")),
    (mmap, ("MADV_REMOVE",)),
    (socket, ("SO_PEERCRED",)),
):
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)

if hasattr(os, "process_cpu_count"):
    # Python chose its body by whether there is `sched_getaffinity`.
    os.process_cpu_count = os.cpu_count


class _PortableSocket(socket.socket):
    def bind(self, address: Any, /) -> None:
        _refuse_abstract(self, address)
        super().bind(address)

    def connect(self, address: Any, /) -> None:
        _refuse_abstract(self, address)
        super().connect(address)


def _refuse_abstract(opened: socket.socket, address: Any) -> None:
    if opened.family == socket.AF_UNIX and address[:1] in ("\0", b"\0"):
        raise OSError("only Linux has local sockets that are no files")


socket.socket = _PortableSocket  # type: ignore[misc]
