"""The loop's end of the connection to its node process, which holds core and sockets and no torch.

A thread reads what the node sends. Some messages are answered at once, by `handle`, while the loop
computes. The others wait in the inbox until the loop is between two steps.

Messages are JSON objects, one a line, over a socket pair.

The loop starts the node and says `hello`. `region` is a part of the node's arena, {"offset",
"num_bytes"}: numbers of all parameters, flat, in the `wide` dtype.

    loop -> node
    hello         version, settings, num_elements, wide, shapes, fingerprint, state_hash, round,
                  device
    step          step (from 1), samples (new since the last), seconds {part: s}
    waiting       step: it has waited in vain, and goes on
    contributed   request, samples, base_round, finite; 0 samples: nothing was given
    applied       round, seconds; after `alone` also samples
    failed        round, what: an average could not be used
    state         request, path, size_bytes, description, round; the node removes the file
    state_failed  request, what
    loaded        request, round; what was outstanding is dropped
    state_refused request, what: the state could not be used, and nothing has changed
    bye

    node -> loop
    ready         join_string, fetching (a load_state comes before the first step); with the arena's
                  descriptor. Or refused: code, what, why, fix, exit_code
    go, wait      step: answers to it. A later `go` ends a wait
    contribute    request, region. Not before the average that includes the last contribution was
                  sent, or it was given back
    give_back     region, as it was contributed
    average       round, region, included; the region stays until `applied` or `failed`
    alone         round: step with what is outstanding
    copy_state    request
    load_state    request, path, description, round. No average of a contribution before it follows
    progress      round, peers, samples, target, samples_per_s
    stopped       reason, state_lost: nobody has the run's state, and this host never had it

`contribute`, `give_back`, `copy_state` and `progress` are answered at any time. The others wait,
in their order, until the loop is between two steps. The sender is our own node process, but a slip
there must end in an error and not in wrong parameters: `Message` checks each field.
"""

import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from decod.errors import (
    ConfigError,
    DataError,
    DecodError,
    HardwareError,
    NetworkError,
    NotRunningError,
    RejectedError,
    TrainingError,
)
from decod.protocol.core.job_codec import Region
from decod.worker.device import Arena

LINE_SIZE_MAX_BYTES = 64 << 20
"""Longest message: it holds the hashes of a state's chunks."""

_KINDS = frozenset(
    {"ready", "refused", "stopped", "go", "wait", "contribute", "give_back", "average", "alone"}
    | {"copy_state", "load_state", "progress"}
)

_ERRORS: tuple[type[DecodError], ...] = (
    *(ConfigError, NetworkError, RejectedError, HardwareError),
    *(NotRunningError, DataError),
)
"""Errors that a node may have at its start. Each has an exit code of its own."""


def malformed(what: str) -> TrainingError:
    """Return the error for a message that no node of this version sends."""
    return TrainingError(
        what[:300],
        why="the node process sent a message that this process does not understand",
        fix="report it with the node's log: this is an error in decod",
        code="E-INT-004",
    )


class Message:
    """One message.

    Args:
        line: JSON of an object with a known `kind`.

    Raises:
        TrainingError: It is something else.
    """

    def __init__(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise malformed(f"a line that is no JSON: {line[:100]!r}") from error
        if not isinstance(fields, dict) or fields.get("kind") not in _KINDS:
            raise malformed(f"a message of unknown kind: {line[:100]!r}")
        self._fields: dict[str, Any] = fields
        self.kind: str = fields["kind"]

    def number(self, name: str) -> int:
        """Return a whole number of at least 0."""
        value = self._fields.get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name)
        return value

    def length(self, name: str) -> float:
        """Return a number that is finite and at least 0."""
        value: Any = self._fields.get(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self._wrong(name)
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        if type(value) is not bool:
            raise self._wrong(name)
        return value

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise self._wrong(name)
        return value

    def region(self) -> Region:
        """Return a part of the node's arena."""
        return Region.parse(self._fields.get("region"))

    def error(self) -> DecodError:
        """Return the error that a `refused` message reports."""
        what, why, fix, code = (self.text(name) for name in ("what", "why", "fix", "code"))
        exit_code = self.number("exit_code")
        kind = next((k for k in _ERRORS if k.exit_code == exit_code), DecodError)
        return kind(what, why=why, fix=fix, code=code)

    def _wrong(self, name: str) -> TrainingError:
        return malformed(f"{name} of {self.kind} is {str(self._fields.get(name))[:100]}")


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


_END_S = 10.0
"""The time that a node may take to leave its run before it is killed."""


class NodeLink:
    """An open connection. Make it, then `greet`, then `listen`.

    Args:
        connection: To the node.
        process: The node. None: somebody else ends it.
    """

    def __init__(
        self, connection: socket.socket, process: "subprocess.Popen[bytes] | None"
    ) -> None:
        self._connection = connection
        self._process = process
        self._rest = b""
        """The bytes that have come of the next line."""
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
