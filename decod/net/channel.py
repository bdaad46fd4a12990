"""Agreements of client and server beside the messages: services, metadata, channel options."""

from collections.abc import Iterable

import grpc.aio

from decod.ids import NodeId, RunId
from decod.net.limits import Limits

CONTROL_SERVICE = "decod.wire.v1.ControlService"
TENSOR_SERVICE = "decod.wire.v1.TensorService"
ENROLL_SERVICE = "decod.wire.v1.EnrollService"
STATE_SERVICE = "decod.wire.v1.StateService"

OTHER_RUN = "E-REJ-003"
"""Details of the gRPC status that refuses a call of another run."""

_RUN = "decod-run"
_SENDER = "decod-sender"
_CONSENT = "decod-push-from"

# A client pings at most this often. The server tolerates pings that are twice as frequent.
_KEEPALIVE_INTERVAL_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000

Options = list[tuple[str, int]]


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


def open_channel(address: str, limits: Limits) -> grpc.aio.Channel:
    """Return a channel with a connection of its own. It dials at its first call."""
    options = [
        *_common_options(limits),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        # Dial again soon after a failure. One attempt may take as long as a call.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(limits.control_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def run_metadata(run_id: RunId) -> tuple[tuple[str, str]]:
    """Return the metadata with which a call names its run. They arrive before its body."""
    return ((_RUN, run_id),)


def tensor_metadata(run_id: RunId, sender: NodeId) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a tensor's push. They name the sender even if no body arrives."""
    return (*run_metadata(run_id), (_SENDER, sender))


def sender_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes | None:
    """Return the sender that a push names in its metadata, or None if it names none."""
    return dict(metadata or ()).get(_SENDER)


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
