"""The node's end of the connection to its training loop.

Messages are JSON, one a line: `decod/optimizer/node_link.py` lists them. The loop is our own code,
in another process. It may end at any moment.
"""

import asyncio
import json
import math
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from decod.compression.plan import CompressionConfig, Method, StagePlans
from decod.config.terms import RunTerms
from decod.daemon.control import describe_error
from decod.driver.arena import ArenaAllocator, Sizes
from decod.errors import DecodError, MalformedMessageError
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.core.messages.round_messages import Height

# --- what a training loop says of itself ---------------------------------------------------------
# What a training loop says of itself, and what follows from it for its node.


_HELD_MAX = 6
"""Models in contributions, parts and averages of which a node can hold as much at a time as it
takes part in rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What a loop says of itself in its hello."""

    terms: RunTerms
    shapes: tuple[tuple[int, ...], ...]
    height: Height
    rounds: RoundConfig
    """What the loop chooses of these."""
    batch_size_per_step: int
    accumulation_steps: int
    device: str

    @property
    def compression(self) -> CompressionConfig:
        return CompressionConfig(method=Method(self.terms.compression))

    @property
    def plans(self) -> StagePlans:
        codec = None if self.compression.method is Method.NONE else self.compression
        return StagePlans(self.shapes, 1, codec, wide=self.terms.wide)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of a contribution or average."""
        return 8 if self.terms.wide == "float64" else 4

    @property
    def model_bytes(self) -> int:
        return self.terms.num_elements * self.element_bytes

    def config(self) -> RoundConfig:
        """Return the numbers of the core."""
        return replace(
            self.rounds,
            num_phases=self.plans.num_phases,
            compresses=self.compression.method is not Method.NONE,
            held_max_bytes=_HELD_MAX * self.model_bytes,
        )

    def sizes(self) -> Sizes:
        """Return the sizes of the averaging process's outputs."""
        return Sizes(
            activation_bytes=0,
            wire_element_bytes=self.element_bytes,
            sum_element_bytes=self.element_bytes,
            num_parameters=self.terms.num_elements,
            plans=self.plans,
        )


# --- the connection ------------------------------------------------------------------------------


_LINE_SIZE_MAX_BYTES = 64 << 20
"""Longest message: it holds the hashes of a state's chunks."""

_ANSWERS = ("go", "wait")
"""They answer the loop's steps. A loop that has not been welcomed has asked nothing."""


class LoopMessage:
    """One message of the loop, with checked access to its fields."""

    def __init__(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _malformed(f"a line that is no JSON: {line[:60]!r}") from error
        if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
            raise _malformed(f"a line without a kind: {line[:60]!r}")
        self.fields: dict[str, Any] = fields
        self.kind: str = fields["kind"]

    def number(self, name: str) -> int:
        """Return a whole number of at least 0."""
        value = self.fields.get(name)
        if type(value) is not int or value < 0:
            raise _malformed(f"{name} of {self.kind} is {str(value)[:60]}")
        return value

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise _malformed(f"{name} of {self.kind} is {str(value)[:60]}")
        return value

    def seconds(self, name: str) -> dict[str, float]:
        """Return lengths of time by their names."""
        value = self.fields.get(name)
        if not isinstance(value, dict) or not all(map(_is_duration, value.values())):
            raise _malformed(f"{name} of {self.kind} is {str(value)[:60]}")
        return value


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _malformed(what: str) -> MalformedMessageError:
    return MalformedMessageError(
        what,
        why="the training loop sent a message that its node does not understand",
        fix="report it with node.log: this is an error in decod",
        code="E-INT-004",
    )


class LoopLink:
    """An open connection. Use `open` to make one.

    Args:
        connection: The socket.
        reader: Reads from it.
        writer: Writes to it.
    """

    def __init__(
        self, connection: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._socket, self._reader, self._writer = connection, reader, writer
        self._early: list[bytes] | None = []
        """What was said before the loop was welcomed. None: it has been."""

    @classmethod
    async def open(cls, descriptor: int) -> "LoopLink":
        """Open the connection over an inherited socket."""
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)  # noqa: FBT003 - the standard library's signature.
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE_SIZE_MAX_BYTES)
        return cls(connection, reader, writer)

    async def next(self) -> LoopMessage | None:
        """Return the loop's next message. None: the loop has ended.

        Raises:
            MalformedMessageError: It is none.
        """
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        except ValueError as error:
            raise _malformed("a line that is too long") from error
        return LoopMessage(line) if line.endswith(b"\n") else None

    def tell(self, kind: str, **fields: Any) -> None:
        """Send the loop a message, if it still runs, once it has been welcomed."""
        line = _line(kind, fields)
        if self._early is not None:
            if kind not in _ANSWERS:
                self._early.append(line)
        elif not self._writer.is_closing():
            self._writer.write(line)

    def welcome(self, arena: ArenaAllocator, **fields: Any) -> None:
        """Answer the loop's hello, and share the node's memory."""
        # The first answer: nothing waits to be written before it.
        socket.send_fds(self._socket, [_line("ready", fields)], [arena.fd])
        early, self._early = self._early or [], None
        self._writer.writelines(early)

    def refuse(self, error: DecodError) -> None:
        """Answer the loop's hello with an error, which its script raises."""
        self._early = None
        self.tell("refused", **describe_error(error))

    async def close(self) -> None:
        """Send what waits, and end the connection."""
        with suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
