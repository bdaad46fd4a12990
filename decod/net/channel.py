"""What client and server agree on beside the messages: names of methods, options of channels."""

from collections.abc import Iterable

import grpc.aio

from decod.ids import NodeId, RunId
from decod.net.limits import Limits

CONTROL_SERVICE = "decod.wire.v1.ControlService"
TENSOR_SERVICE = "decod.wire.v1.TensorService"
ENROLL_SERVICE = "decod.wire.v1.EnrollService"
STATE_SERVICE = "decod.wire.v1.StateService"

OTHER_RUN = "E-REJ-003"
"""Details of the status with which a call of another run is refused."""

CONSENT = ("decod-push", "accepted")
"""Initial metadata of a push whose tensor the receiver has made room for."""

_RUN = "decod-run"
_SENDER = "decod-sender"

# A client pings at most this often; a server takes no offence at pings half as far apart.
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
        # Without it a frozen peer is not noticed: an earlier ping of gRPC's own, with a timeout of
        # a minute, stands in the way of the keepalive ping.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limits: Limits) -> Options:
    """Returns the options of the server's socket."""
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
    """Returns a channel with a connection of its own; it dials when it is first used."""
    options = [
        *_common_options(limits),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        # Dial again soon after a failure; an attempt itself may take as long as a call.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(limits.control_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def run_metadata(run_id: RunId) -> tuple[tuple[str, str]]:
    """Returns what a call carries to say which run it is about, before any of its body is read."""
    return ((_RUN, run_id),)


def tensor_metadata(run_id: RunId, sender: NodeId) -> tuple[tuple[str, str], ...]:
    """Returns what a push of a tensor carries: whose it is, should it never arrive."""
    return (*run_metadata(run_id), (_SENDER, sender))


def sender_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes | None:
    """Returns whose tensor a push carries, as the metadata say; None if they don't."""
    return dict(metadata or ()).get(_SENDER)


def as_is(data: bytes) -> bytes:
    """Serializes nothing: protobuf is read and written around the call, where errors are ours."""
    return data
