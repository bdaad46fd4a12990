"""The reasons of failed calls in plain words. gRPC's own texts are written for programmers."""

from datetime import UTC, datetime

import grpc
import grpc.aio

from decod.clocks import wall_clock
from decod.errors import DecodError, NetworkError, RejectedError
from decod.net import channel
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.texts import clean_text, clip

_DETAILS_MAX_CHARACTERS = 120
_BANNED_MAX_CHARACTERS = 400

UNANSWERED = "E-NET-003"
"""Code of the error for a call that nobody has answered."""

_CLOSED = "Socket closed"
"""gRPC's text for a connection that was closed before it could be used."""

UNPROVEN = "E-REJ-005"
"""Code of the error for a call to what can't prove that it is the node that is meant."""

SHARED = "E-REJ-022"
"""Code of the error for an identity that another host has, too."""

_UNTIMELY = {
    "certificate is not yet valid": "it is not valid yet",
    "certificate has expired": "it has expired",
}
"""In gRPC's text if the other end has shown a certificate of another time, and what that means."""

_DISBELIEVED = ("CERTIFICATE_VERIFY_FAILED", "INVALID_SIGNATURE", "Hostname Verification Check")
"""In gRPC's text if the other end has shown a certificate that was not believed."""

_LATE = "no answer in time"
REFUSED = "nobody listens there"
_ANOTHER = ("another node listens there", "what listens there is no node of this run")

# By words in the details, in lower case. The first match counts.
_BY_DETAIL = (
    (("connection refused",), REFUSED),
    (("hostname verification",), _ANOTHER[0]),
    (("certificate_verify", "invalid_signature"), _ANOTHER[1]),
    (("tls handshake", "ssl_error"), "what listens there is no decod node"),
    (("domain name not found", "hostname lookup", "dns"), "its host name is not known"),
    (("unreachable", "no route to host"), "there is no way to it from here"),
    (("failed parsing http", "http2 header"), "what listens there is no decod node"),
    (("reset", "closed", "broken pipe", "goaway", "eof"), "the connection broke"),
    # An attempt to connect may end a moment before its call does. Then this end closes it.
    (("timed out", "timeout", "deadline", "endpoint closing"), _LATE),
)
_BY_CODE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: _LATE,
    grpc.StatusCode.UNIMPLEMENTED: "what listens there is no decod node, or of another release",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the message is too large",
    grpc.StatusCode.CANCELLED: "the call was broken off",
}


class UnansweredError(NetworkError):
    """A node that may exist did not answer in time. It may answer later."""


class ClosedError(UnansweredError):
    """Somebody accepted a connection, and closed it before it could be used."""


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return why a call failed, in a few words."""
    details = " ".join((error.details() or "").split())
    lower = details.lower()
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        for marks, text in _BY_DETAIL:
            if any(mark in lower for mark in marks):
                return text
    if details == channel.TOO_MANY:
        return "too many calls from here are open there"
    if error.code() in _BY_CODE:
        return _BY_CODE[error.code()]
    code = error.code().name.lower().replace("_", " ")
    # The details begin with a list of addresses.
    last = details.rpartition("last error: ")[2]
    return clip(f"{code}: {last}" if last else code, _DETAILS_MAX_CHARACTERS)


def is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Return whether what was called is not there: its port refuses, or another has it."""
    other_run = error.details() == channel.OTHER_RUN
    return other_run or reason_of(error) in (REFUSED, *_ANOTHER)


def failed_call(address: str, error: grpc.aio.AioRpcError) -> DecodError:
    """Return the error for a call that was not answered, or was refused as another run's."""
    details = error.details() or ""
    if details == channel.OTHER_RUN:
        return other_run(address)
    if details.startswith(channel.BANNED):
        return banned(details.removeprefix(channel.BANNED))
    if details == channel.NOT_ALLOWED:
        return RejectedError(
            f"{address} does not allow this call",
            why="this node's certificate is not one that permits it, or has expired",
            fix="check this host's clock; if it is right, ask the organiser for a new join string",
            code="E-REJ-009",
        )
    what, code = f"no answer from {address}", UNANSWERED
    for mark, meaning in _UNTIMELY.items():
        if mark in details:
            return _untimely(address, meaning)
    if any(mark in details for mark in _DISBELIEVED):
        return RejectedError(
            f"what listens at {address} is no data node of this run",
            why="it can't prove that to this node, and only data nodes let others in",
            fix="check the address and this host's clock, or ask for a new join string",
            code=UNPROVEN,
        )
    if _CLOSED in details:
        return ClosedError(
            what,
            why="somebody listens there, but closes new connections: a node that has too many, or "
            "one that does not believe this node's certificate",
            fix="try again in a minute; if that does not help, ask for a new join string",
            code=code,
        )
    why = reason_of(error)
    return (UnansweredError if why == _LATE else NetworkError)(
        what,
        why=why,
        fix="check the address, that the node there runs, and that its TCP port is open",
        code=code,
    )


def _untimely(address: str, meaning: str) -> RejectedError:
    here = datetime.fromtimestamp(wall_clock(), UTC)
    return RejectedError(
        f"{address} shows a certificate of another time",
        why=f"{meaning} by this host's clock, which says {here:%Y-%m-%d %H:%M} UTC",
        fix="set this host's clock; if it is right, tell the organiser that theirs is wrong",
        code=UNPROVEN,
    )


def banned(why: str) -> RejectedError:
    """Return the error for this node's being banned.

    Args:
        why: By whom, until when and why, as another node says it.
    """
    return RejectedError(
        "the run does not take this node",
        why=clean_text(why.strip(), limit=_BANNED_MAX_CHARACTERS) or "nobody says why",
        fix="ask the organiser: `decod node unban` at the leader's host lifts a ban",
        code=channel.BANNED,
    )


def shared_identity(twin_address: str) -> RejectedError:
    """Return the error for this node's having an identity that another host had before it.

    Args:
        twin_address: The other host's.
    """
    return RejectedError(
        f"another host, at {twin_address}, has this node's identity, and was in the run before it",
        why="both have the same key, as after cloning a virtual machine or a state folder, and two "
        "hosts with one identity push each other out of the run",
        fix="on the host that is the copy, delete identity.key in the state folder: it becomes a "
        "node of its own, and needs a join string with a token",
        code=SHARED,
    )


def other_version(address: str, version: int) -> RejectedError:
    """Return the error for a node that speaks another version of the protocol."""
    return RejectedError(
        f"{address} speaks protocol version {version}, this node speaks {PROTOCOL_VERSION}",
        why="they would misread each other",
        fix="install the same version of decod on both",
        code="E-REJ-002",
    )


def other_run(address: str) -> RejectedError:
    """Return the error for a call to a node of another run."""
    return RejectedError(
        f"{address} belongs to another run",
        why="the node there refuses calls of this one",
        fix="ask a node of this run",
        code="E-REJ-003",
    )
