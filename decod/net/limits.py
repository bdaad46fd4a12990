"""Named limits of everything that listens or dials. Tests make them smaller; nobody needs more."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one peer may ask of this node, and how long this node waits for a peer."""

    message_size_max_bytes: int = 4 * MIB + 64 * KIB
    """Largest gRPC message, in both directions."""
    batch_size_max_bytes: int = 4 * MIB
    """Envelopes that are put into one Deliver. The rest of a message is for their frames."""
    batch_length_max: int = 256
    """Envelopes in one Deliver: a receiver handles a whole batch without a pause."""
    request_size_max_bytes: int = 4 * KIB
    """Of a question: Hello and those about states and status."""
    inline_size_max_bytes: int = 8 * KIB
    """A larger message is read in a thread: the event loop would stand still for too long."""
    pass_max_s: float = 0.005
    """Time for messages in one pass of the event loop; what is left over waits for the next."""
    metadata_size_max_bytes: int = 8 * KIB
    frame_size_bytes: int = 1 * MIB
    """Bytes of a tensor in one message. 1 MiB was fastest of 64 KiB to 4 MiB on loopback."""
    tensor_size_max_bytes: int = 64 * 1024 * MIB
    """Refused before anybody is asked for memory."""
    manifest_size_max_bytes: int = 64 * KIB
    """The run's manifest."""
    state_manifest_size_max_bytes: int = 2 * MIB
    """Description of a stage's state."""

    rate_min_bytes_per_s: float = 64 * KIB
    """A slower stream is given up: it holds memory that faster peers could use."""
    rate_grace_s: float = 5.0
    """Time that a stream has before the rate counts."""
    control_timeout_s: float = 5.0
    """For one attempt to deliver control messages."""
    hello_timeout_s: float = 5.0
    """Of somebody who answers at once. Who dials back first may take that much longer."""
    dial_timeout_s: float = 4.0
    """For dialling back a node that wants to be let in."""
    dial_again_s: float = 5.0
    """How long a node is believed to be where a dial has found it."""
    dials_max: int = 64
    """Nodes that are dialled back at a time. Another takes the place of the oldest."""
    retry_delays_s: tuple[float, ...] = (0.1, 0.4, 1.0)
    """Waits before each new attempt at a peer that is unavailable."""
    refused_retries_max: int = 1
    """New attempts at a host that answers, but where nobody listens."""

    concurrent_rpcs_max: int = 4096
    """Of all peers together."""
    rpcs_per_host_max: int = 1024
    """Calls of one host that are open at a time. Many nodes may share its address."""
    connections_max: int = 8192
    """That others open to this node at a time. gRPC closes further ones at once."""
    handshake_timeout_s: float = 10.0
    """How long a new connection may take until it speaks HTTP/2."""
    room_interval_s: float = 2.0
    """Where connections are many, those that have not named the run for so long are closed."""
    streams_per_connection_max: int = 16
    """Calls over one connection at a time. A node needs no more than two."""
    faults_burst: int = 20
    """Messages with faults that a host may send before connections over which more come are
    closed."""
    faults_per_s: float = 1 / 3
    """So many more each second."""
    fault_size_bytes: int = 64 * KIB
    """So much of a large message with a fault counts as one more."""
    streams_per_sender_max: int = 8
    """Tensors that one sender may push at a time."""
    streams_per_peer: int = 2
    """Tensors that this node pushes to one peer at a time: one fills the other's pauses."""
    states_lent_max: int = 4
    """Copies of states that peers may take chunks of at a time: each takes memory."""
    state_streams_max: int = 8
    """Streams of chunks out of this node at a time, of all peers together."""
    state_takers_max: int = 1024
    """Peers that one copy is kept for; of more, those are forgotten that were silent longest."""
    state_lease_s: float = 30.0
    """How long a copy is kept for a peer that says nothing."""
    state_donors_max: int = 8
    """Members that this node takes chunks from at a time: each has to copy its state first."""
    describe_grace_s: float = 1.0
    """How long the other donors may take after the first has described its state: then it is
    decided which state is fetched, if they differ."""
    donor_failures_max: int = 3
    """Failures of a donor in a row after which it is left."""
    donor_pause_s: float = 0.5
    """Wait before a donor that failed, or was busy, is asked again."""
    download_stall_s: float = 60.0
    """How long a download goes on without a byte, while donors are busy."""
    download_share: float = 1.0
    """Part of the time in which a donor is asked for chunks; less leaves the link to others."""
    run_of_chunks_s: float = 2.0
    """How long a donor may take for the chunks that it is asked for at once, as it did so far."""

    blocks_read_max: int = 4
    """Blocks of the prepared data that are read for peers at a time."""

    queue_length_max: int = 8192
    """Messages, and tensors, that wait for one peer. What comes then fails at once."""

    @property
    def frame_timeout_s(self) -> float:
        """How long one frame may take at the lowest rate."""
        return self.rate_grace_s + self.frame_size_bytes / self.rate_min_bytes_per_s

    def stream_timeout_s(self, size_bytes: int) -> float:
        """How long a whole tensor may take at the lowest rate, and its first frame before that."""
        first_bytes = min(size_bytes, self.frame_size_bytes)
        return self.rate_grace_s + (first_bytes + size_bytes) / self.rate_min_bytes_per_s


LIMITS = Limits()
