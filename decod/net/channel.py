"""Agreements of client and server beside the messages: services, metadata, channel options."""

from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from decod.ids import RunId
from decod.membership.certificates import TlsIdentity
from decod.net.net_limits import Limits

CONTROL_SERVICE = "decod.wire.v1.ControlService"
TENSOR_SERVICE = "decod.wire.v1.TensorService"
ENROLL_SERVICE = "decod.wire.v1.EnrollService"
STATE_SERVICE = "decod.wire.v1.StateService"
REVERSE_SERVICE = "decod.wire.v1.ReverseService"

OTHER_RUN = "E-REJ-003"
"""Details of the gRPC status that refuses a call of another run."""
NOT_ALLOWED = "E-REJ-009"
"""Details of the gRPC status that refuses a caller by its certificate."""
BANNED = "E-REJ-020"
"""Begins the details of the gRPC status that refuses a banned caller. Why it is banned follows."""
NOT_HELD = "E-NET-014"
"""Details of the gRPC status of a call for a connection that does not exist, or to a member that
holds no call open there."""
TOO_MANY = "E-NET-012"
"""Details of the gRPC status that refuses a caller with too many open calls."""

_RUN = "decod-run"
_PROBE = "decod-probe"
_CONSENT = "decod-push-from"

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


def server_credentials(
    shown: Callable[[], TlsIdentity], begin: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials:
    """Return credentials for a server that asks each caller for a certificate.

    Args:
        shown: Returns what the server shows, and whom it believes. It is asked at each handshake,
            from another thread.
        begin: Called at the beginning of each handshake, from another thread.
    """
    used = shown()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        begin()
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


def probe_metadata(run_id: RunId) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a probe's push, of which nothing is said if it comes late."""
    return (*run_metadata(run_id), (_PROBE, "1"))


def is_probe(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether a push is a probe's."""
    return _PROBE in dict(metadata or ())


def consent(position: int) -> tuple[tuple[str, str]]:
    """Return the initial metadata with which a receiver says that it has memory for a tensor.

    Args:
        position: The bytes before it have arrived already.
    """
    return ((_CONSENT, str(position)),)


def consented(metadata: Iterable[tuple[str, str | bytes]] | None, size_bytes: int) -> int | None:
    """Return the position from which a receiver wants a tensor, or None if it does not consent."""
    text = str(dict(metadata or ()).get(_CONSENT, ""))
    position = int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else -1
    return position if 0 <= position <= size_bytes else None


def as_is(data: bytes) -> bytes:
    """Return `data` unchanged. Callers encode and decode it themselves, and see the errors."""
    return data
