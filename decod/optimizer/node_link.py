"""The loop's end of the connection to its node process.

A thread reads what the node sends. Some messages are answered at once, by `handle`, while the loop
computes. The others wait in the inbox until the loop is between two steps.
"""

import json
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from decod.errors import DecodError, NotRunningError
from decod.optimizer.messages import LINE_SIZE_MAX_BYTES, Message, malformed
from decod.worker.arena_view import Arena

_END_S = 10.0
"""How long a node may take to leave its run before it is killed."""


class NodeLink:
    """An open connection. Make it, then `greet`, then `listen`.

    Args:
        connection: To the node.
        process: The node. None: somebody else ends it.
    """

    def __init__(
        self, connection: socket.socket, process: "subprocess.Popen[bytes] | None"
    ) -> None:
        self._connection, self._process = connection, process
        self._rest = b""
        """What has come of the next line."""
        self._arena_fd = -1
        self._inbox: deque[Message] = deque()
        self._error: DecodError | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def greet(self, hello: dict[str, Any]) -> tuple[Message, Arena]:
        """Introduce this loop. Return the node's answer, and the memory that both share.

        Raises:
            DecodError: The node refuses, or ends.
        """
        self.send("hello", **hello)
        line = self._read_line(with_descriptor=True)
        if line is None:
            raise self._ended()
        message = Message(line)
        if message.kind == "refused":
            raise message.error()
        if message.kind != "ready" or self._arena_fd < 0:
            raise malformed(f"{message.kind} as an answer to hello, or no memory")
        return message, Arena(self._arena_fd)

    def listen(self, handle: Callable[[Message], bool]) -> None:
        """Begin to read.

        Args:
            handle: Takes each message in the thread. Returns False if the loop must take it.
        """
        self._thread = threading.Thread(
            target=self._listen, args=(handle,), name="decod-node-link", daemon=True
        )
        self._thread.start()

    def _listen(self, handle: Callable[[Message], bool]) -> None:
        error: DecodError | None = None
        try:
            while (line := self._read_line()) is not None:
                message = Message(line)
                if not handle(message):
                    with self._changed:
                        self._inbox.append(message)
                        self._changed.notify()
        except DecodError as found:
            error = found
        finally:
            # Also after an error of ours, which the thread shows: the loop must not wait for it.
            error = error or self._ended()
            with self._changed:
                self._error = error
                self._changed.notify()

    def _read_line(self, *, with_descriptor: bool = False) -> bytes | None:
        """Return the next line. None: the node has closed the connection."""
        while b"\n" not in self._rest:
            if len(self._rest) > LINE_SIZE_MAX_BYTES:
                raise malformed(f"a line of more than {LINE_SIZE_MAX_BYTES} bytes")
            try:
                if with_descriptor and self._arena_fd < 0:
                    data, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
                    self._arena_fd = descriptors[0] if descriptors else -1
                else:
                    data = self._connection.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. If the node has ended, `next` says so."""
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._sending, suppress(OSError):
            self._connection.sendall(line)

    def next(self, until_s: float | None = None) -> Message | None:
        """Return the next message for the loop.

        Args:
            until_s: When to give up, on the monotonic clock. None: if there is none now.

        Returns:
            None: there is none.

        Raises:
            DecodError: The node has ended, or is broken.
        """
        with self._changed:
            while not self._inbox:
                if self._error is not None:
                    raise self._error
                left_s = 0.0 if until_s is None else until_s - monotonic()
                if left_s <= 0:
                    return None
                # On the main thread, Ctrl-C ends this wait.
                self._changed.wait(left_s)
            return self._inbox.popleft()

    def _ended(self) -> NotRunningError:
        how = ""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                how = f" (exit code {self._process.wait(1.0)})"
        return NotRunningError(
            f"the node process has ended{how}",
            why="without it this host neither gives nor gets averages",
            fix="look at its log, which says why, and start the script again: it goes on from the "
            "state of the other hosts. To go on alone, train with the wrapped optimizer",
            code="E-RUN-041",
        )

    def close(self) -> None:
        """Say goodbye, and wait until the node has left its run."""
        self.send("bye")
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_END_S)
        self._connection.close()
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1
