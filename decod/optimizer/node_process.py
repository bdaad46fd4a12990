"""Starts the node process of a loop: core, sockets and no torch."""

import socket
import subprocess
import sys

COMMAND = (sys.executable, "-P", "-m", "decod.daemon.peer")
"""The node, by name: this package imports nothing of it. Modules in the script's folder must not
stand in for others (`-P`)."""


def start_node() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Start a node process. Return this end of its socket pair, and the process."""
    here, there = socket.socketpair()
    try:
        process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter.
            (*COMMAND, "--socket-fd", str(there.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            # Keeps the terminal's Ctrl-C from the node: the script answers it, and says bye.
            start_new_session=True,
        )
    except BaseException:
        here.close()
        raise
    finally:
        there.close()
    return here, process
