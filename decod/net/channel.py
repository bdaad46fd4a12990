"""Agreements of client and server beside the messages, and what it means when a call fails.

Services, metadata and channel options come first. gRPC's own texts are written for programmers, so
the reasons of failed calls are put into plain words here.
"""

from collections.abc import Callable
from datetime import UTC, datetime

import grpc
import grpc.aio

from decod.clocks import wall_clock
from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import RunId
from decod.membership.certificates import TlsIdentity
from decod.net.net_limits import Limits
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.texts import clean_text, clip

CONTROL_SERVICE = "decod.wire.v1.ControlService"
ENROLL_SERVICE = "decod.wire.v1.EnrollService"
STATE_SERVICE = "decod.wire.v1.StateService"
REVERSE_SERVICE = "decod.wire.v1.ReverseService"

OTHER_RUN = "E-REJ-003"
"""Details of the gRPC status that refuses a call of another run."""
NOT_ALLOWED = "E-REJ-009"
"""Details of the gRPC status that refuses a caller by its certificate."""
BANNED = "E-REJ-020"
"""The beginning of the details of the gRPC status that refuses a banned caller. Why it is banned
follows."""
NOT_HELD = "E-NET-014"
"""Details of the gRPC status of a call for a connection that does not exist, or to a member that
holds no call open there."""
TOO_MANY = "E-NET-012"
"""Details of the gRPC status that refuses a caller with too many open calls."""

_RUN = "decod-run"

# A client pings at most this often. The server tolerates pings that are twice as frequent.
_KEEPALIVE_INTERVAL_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000

Options = list[tuple[str, int | str]]


def _common_options(limits: Limits) -> Options:
    return [
        ("grpc.max_receive_message_length", limits.message_size_max_bytes),
        ("grpc.max_send_message_length", limits.message_size_max_bytes),
        ("grpc.max_metadata_size", limits.metadata_size_max_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_size_max_bytes),
        # Bit 0 is "identity". Tensors don't shrink, and a compressed message can be a bomb.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", _KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # Without it a frozen peer goes unnoticed: while an earlier ping of gRPC's own, with a
        # timeout of a minute, is unanswered, no keepalive ping is sent.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limits: Limits) -> Options:
    """Return the options of the server's socket."""
    return [
        *_common_options(limits),
        # With it, a second daemon would bind the same port without an error.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_INTERVAL_MS // 2),
        ("grpc.max_concurrent_streams", limits.streams_per_connection_max),
        ("grpc.max_allowed_incoming_connections", limits.connections_max),
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_timeout_s * 1000)),
    ]


def server_credentials(shown: Callable[[], TlsIdentity]) -> grpc.ServerCredentials:
    """Return credentials for a server that asks each caller for a certificate.

    Args:
        shown: Returns what the server shows, and whom it believes. It is asked at each handshake,
            from another thread.
    """
    used = shown()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (now := shown()) == used:
            return None
        used = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        changed,  # type: ignore[arg-type]  # The stubs forget None, for "as before".
        require_client_authentication=True,
    )


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    pairs = [(identity.key, identity.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, identity.anchors)


def open_channel(address: str, limits: Limits, shown: TlsIdentity, name: str) -> grpc.aio.Channel:
    """Return a channel with a connection of its own. It dials at its first call.

    Args:
        address: `host:port`.
        limits: Sizes and timeouts.
        shown: This node's certificate, and those that it believes.
        name: The name that must be in the other end's certificate: `peer_name` of a node, or
            `MEMBER_NAME` for any member.
    """
    options: Options = [
        *_common_options(limits),
        ("grpc.ssl_target_name_override", name),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        # Dial again soon after a failure. One attempt may take as long as a call.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(limits.control_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    credentials = grpc.ssl_channel_credentials(shown.anchors, shown.key, shown.chain)
    return grpc.aio.secure_channel(address, credentials, options=options)


def run_metadata(run_id: RunId) -> tuple[tuple[str, str]]:
    """Return the metadata with which a call names its run. They arrive before its body."""
    return ((_RUN, run_id),)


def as_is(data: bytes) -> bytes:
    """Return `data` unchanged. Callers encode and decode it themselves, and see the errors."""
    return data


# The reasons of failed calls in plain words. gRPC's own texts are written for programmers.

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
"""Words in gRPC's text if the other end has shown a certificate of another time; their meaning."""

_DISBELIEVED = ("CERTIFICATE_VERIFY_FAILED", "INVALID_SIGNATURE", "Hostname Verification Check")
"""Words in gRPC's text if the other end has shown a certificate that was not believed."""

BROKEN = "the connection broke"
LATE = "no answer in time"
TOO_MANY_OPEN = "too many calls from here are open there"
REFUSED = "nobody listens there"
_ANOTHER = ("another node listens there", "what listens there is no node of this run")

# By words in the details, in lower case. The first match counts.
_BY_DETAIL = (
    (("connection refused",), REFUSED),
    (("hostname verification", "hostname mismatch"), _ANOTHER[0]),
    (("certificate_verify", "invalid_signature"), _ANOTHER[1]),
    (("tls handshake", "ssl_error"), "what listens there is no decod node"),
    (("domain name not found", "hostname lookup", "dns"), "its host name is not known"),
    (("unreachable", "no route to host"), "there is no way to it from here"),
    (("failed parsing http", "http2 header"), "what listens there is no decod node"),
    (("reset", "closed", "broken pipe", "goaway", "eof"), BROKEN),
    # An attempt to connect may end a moment before its call does. Then this end closes it.
    (("timed out", "timeout", "deadline", "endpoint closing"), LATE),
)
_BY_CODE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: LATE,
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
    if error.code() is grpc.StatusCode.UNAVAILABLE and (known := _known_reason(details)):
        return known
    if details == TOO_MANY:
        return TOO_MANY_OPEN
    if error.code() in _BY_CODE:
        return _BY_CODE[error.code()]
    code = error.code().name.lower().replace("_", " ")
    # The details begin with a list of addresses.
    last = details.rpartition("last error: ")[2]
    return clip(f"{code}: {last}" if last else code, _DETAILS_MAX_CHARACTERS)


GONE = (REFUSED, *_ANOTHER)
"""Why a node is not where it was called."""


def reason_of_os(error: OSError) -> str:
    """Return why a connection failed, in a few words."""
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if isinstance(error, TimeoutError):
        return LATE
    text = " ".join(str(error).split())
    return _known_reason(text) or clip(text, _DETAILS_MAX_CHARACTERS) or BROKEN


def _known_reason(text: str) -> str:
    """Return what a text of gRPC or TLS means; empty if that is not known."""
    lower = text.lower()
    found = (reason for marks, reason in _BY_DETAIL if any(mark in lower for mark in marks))
    return next(found, "")


def is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Return whether what was called is not there: its port refuses, or another has it."""
    other_run = error.details() == OTHER_RUN
    return other_run or reason_of(error) in GONE


def failed_call(address: str, error: grpc.aio.AioRpcError) -> DecodError:
    """Return the error for a call that was not answered, or was refused as another run's."""
    details = error.details() or ""
    if details == OTHER_RUN:
        return other_run(address)
    if details.startswith(BANNED):
        return banned(details.removeprefix(BANNED))
    if details == NOT_ALLOWED:
        return RejectedError(
            f"{address} does not allow this call",
            why="this node's certificate is not one that permits it, or has expired",
            fix="check this host's clock; if it is right, ask the organiser for a new join string",
            code="E-REJ-009",
        )
    what = f"no answer from {address}"
    code = UNANSWERED
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
    return (UnansweredError if why == LATE else NetworkError)(
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
        code=BANNED,
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
