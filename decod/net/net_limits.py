"""Named limits of everything that listens or dials, and the accounts that keep others to them.

Tests lower the limits. No run should raise them.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from decod.train.checkpoint.description import copy_max_s

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a peer's use of this node, and on this node's waits for a peer."""

    header_size_max_bytes: int = 64 * KIB
    """The header of a tensor."""
    message_size_max_bytes: int = 4 * MIB + 64 * KIB
    """Largest gRPC message, in both directions."""
    batch_size_max_bytes: int = 4 * MIB
    """Total size of the envelopes in one Deliver. The rest of the message is for their frames."""
    batch_length_max: int = 256
    """Number of envelopes in one Deliver."""
    request_size_max_bytes: int = 4 * KIB
    """Largest request of Hello and of the calls about states, blocks and status."""
    register_size_max_bytes: int = 1 * MIB + 32 * KIB
    """Largest request about join tokens: a batch of records, and the digests of all."""
    inline_size_max_bytes: int = 8 * KIB
    """A larger message is parsed in a thread, since it would block the event loop for too long."""
    pass_max_s: float = 0.005
    """Time for messages in one pass of the event loop. Further messages wait for the next pass."""
    metadata_size_max_bytes: int = 8 * KIB
    frame_size_bytes: int = 1 * MIB
    """Bytes of a tensor in one message. 1 MiB was fastest of 64 KiB to 4 MiB on loopback."""
    tensor_size_max_bytes: int = 64 * 1024 * MIB
    """A larger tensor is refused before memory is allocated for it."""
    manifest_size_max_bytes: int = 256 * KIB
    """Largest manifest of a run."""
    state_manifest_size_max_bytes: int = 2 * MIB
    """Largest description of a stage's state."""

    rate_min_bytes_per_s: float = 64 * KIB
    """A slower stream is given up, since it holds memory that faster peers could use."""
    rate_grace_s: float = 5.0
    """Time that a stream has before its rate counts."""
    control_timeout_s: float = 5.0
    """Timeout of one attempt to deliver control messages."""
    hello_timeout_s: float = 5.0
    """Timeout of a Hello. A node that dials back first has `dial_timeout_s` more."""
    dial_timeout_s: float = 4.0
    """Timeout of dialling back a node that wants to be let in."""
    dial_again_s: float = 5.0
    """A node that was reached by a dial is not dialled again for this long."""
    dials_max: int = 64
    """Nodes that are dialled back at a time. One more cancels the oldest dial."""
    retry_delays_s: tuple[float, ...] = (0.1, 0.4, 1.0)
    """Waits between attempts to reach a peer that is unavailable."""
    refused_retries_max: int = 1
    """Further attempts at a host that refuses connections to the peer's port."""

    concurrent_rpcs_max: int = 4096
    """Open calls of all peers together."""
    rpcs_per_host_max: int = 1024
    """Open calls of one host. Many nodes may share its address."""
    calls_per_node_max: int = 8
    """Open calls of one member to one service: control messages, tensors, or enrolment. A node
    needs no more than two of each."""
    state_calls_per_node_max: int = 4
    """Open calls of one member about states, blocks and status, so that one can't take all."""
    connections_per_node_max: int = 8
    """Open connections of one member. The one that was silent longest gives way. A node needs two,
    twice as many after a renewal of its papers, and one for each state that it fetches."""
    connections_max: int = 8192
    """Open connections of others to this node. Further ones are closed at once."""
    connects_burst: int = 1000
    """Connections that a host may begin at once. Many nodes may share its address."""
    connects_per_s: float = 100.0
    """Further ones each second. Those beyond are closed at once."""
    handshake_timeout_s: float = 10.0
    """The time that a new connection may take to say what it is for, and to prove who calls."""
    room_interval_s: float = 2.0
    """The time that a connection has to name the run before it makes room for another."""
    streams_per_connection_max: int = 80
    """Open calls over one connection. A node needs no more than two, and a member that nobody can
    dial has one for each connection to it."""
    reverse_calls_per_node_max: int = 64
    """Open calls of one member for connections to members that nobody can dial. Such a member has
    two for each peer, and a host in between has the calls of both."""
    holds_max: int = 1024
    """Members that nobody can dial and that keep a call open to this node."""
    holds_kept_max: int = 256
    """Peers to which a member that nobody can dial keeps a call open. One more replaces the peer
    that it has not dealt with for longest."""
    hold_age_max_s: float = 900.0
    """After so long, such a call is made anew, so that the member shows its papers again."""
    hold_pause_s: float = 1.0
    """A call that has failed is made again after so long. The wait doubles each time."""
    hold_pause_max_s: float = 30.0
    hold_wait_s: float = 0.5
    """The time that a call of a member is waited for before a host in between is asked."""
    reverse_open_timeout_s: float = 4.0
    """The time that a connection to a member that nobody can dial may take to come about."""
    reverse_handshake_timeout_s: float = 10.0
    """The time that two ends may take to find each other once a host in between passes bytes on."""
    passed_max: int = 256
    """Connections between others that this node passes on at a time."""
    faults_burst: int = 20
    """Faulty messages that a host may send before further ones cost it the connection."""
    faults_per_s: float = 1 / 3
    """Further faulty messages that are tolerated each second."""
    fault_size_bytes: int = 64 * KIB
    """Each full multiple of this size makes a faulty message count as one more fault."""
    streams_per_peer: int = 2
    """Tensors that this node sends to one peer at a time. While one is written, the result of the
    other is awaited."""
    states_lent_max: int = 4
    """Copies of states that are lent to peers at a time. Each takes memory."""
    state_streams_max: int = 8
    """Streams of chunks that this node sends at a time, to all peers together."""
    state_takers_max: int = 1024
    """Peers for which one copy is kept. One more replaces the peer that was silent longest."""
    state_lease_s: float = 30.0
    """The time that a copy is kept for a silent peer."""
    store_stall_s: float = 120.0
    """The time that a member may write nothing more into the store that members share. Stores
    answer slowly, and are asked again when they fail."""
    state_donors_max: int = 8
    """Members from which this node fetches a state at a time. Each has to copy its state first."""
    describe_grace_s: float = 1.0
    """Once the first donor has described its state, the others have this long to do so too. Then
    this node decides which state to fetch, if the descriptions differ."""
    donor_failures_max: int = 3
    """Consecutive failures after which a donor is dropped."""
    donor_pause_s: float = 0.5
    """Wait before a donor that failed or was busy is asked again."""
    download_stall_s: float = 60.0
    """The time that a download goes on without progress while donors are busy."""
    download_share: float = 1.0
    """Part of the time in which a donor is asked for chunks. Below 1, it leaves the link to
    others."""
    run_of_chunks_s: float = 2.0
    """A donor is asked for as many chunks at once as it sends in this time, at its last rate."""

    blocks_read_max: int = 4
    """Blocks of the prepared data that are read for peers at a time."""

    broken_max: int = 16
    """Tensors whose stream broke off that are kept for their senders, of all peers together."""
    broken_kept_s: float = 10.0
    """The time that such a tensor is kept."""

    queue_length_max: int = 8192
    """Messages, and as many tensors, that may wait for one peer. Further ones fail at once."""

    @property
    def frame_timeout_s(self) -> float:
        """Return the time that one frame may take at `rate_min_bytes_per_s`."""
        return self.rate_grace_s + self.frame_size_bytes / self.rate_min_bytes_per_s

    def describe_timeout_s(self, size_bytes: int) -> float:
        """Return the time that a donor may take to describe a state of about this size.

        It may first have to copy the state, behind other work of its device.
        """
        return 10 * self.frame_timeout_s + copy_max_s(size_bytes)

    def stream_timeout_s(self, size_bytes: int) -> float:
        """Return the time that a tensor may take at the lowest rate: its first frame, then the
        whole tensor."""
        first_bytes = min(size_bytes, self.frame_size_bytes)
        return self.rate_grace_s + (first_bytes + size_bytes) / self.rate_min_bytes_per_s


LIMITS = Limits()


_SOURCES_MAX = 4096


class RateLimiter:
    """A token bucket for each source. Forgets the sources that were silent longest.

    Args:
        clock: Returns monotonic seconds.
        rate_per_s: Tokens that come back each second.
        burst: Tokens in a full bucket.
    """

    def __init__(self, clock: Callable[[], float], *, rate_per_s: float, burst: float) -> None:
        self._clock = clock
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allow(self, source: Hashable, cost: float = 1.0) -> bool:
        """Take `cost` tokens from the bucket of `source`; return False if it has fewer."""
        now_s = self._clock()
        tokens, then_s = self._buckets.pop(source, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - then_s) * self._rate_per_s)
        allowed = tokens >= cost
        self._buckets[source] = (tokens - cost if allowed else tokens, now_s)
        if len(self._buckets) > _SOURCES_MAX:
            self._buckets.popitem(last=False)
        return allowed


PEERS_MAX = 1024
LINES_PER_MINUTE_MAX = 20


class Counters:
    """Numbers of events by name and peer.

    Bounded: from 1024 pairs of name and peer on, further peers are counted together as "other".
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, peer: str, num: int = 1) -> None:
        """Count one event `name`, or several, that `peer` (an IP address or node id) caused."""
        if len(self._counts) >= PEERS_MAX and (name, peer) not in self._counts:
            peer = "other"
        self._counts[name, peer] += num

    def total(self, name: str) -> int:
        """Return how often `name` happened, over all peers."""
        return sum(count for (key, _), count in self._counts.items() if key == name)

    def totals(self) -> dict[str, int]:
        """Return how often each event happened."""
        totals: Counter[str] = Counter()
        for (name, _), num in self._counts.items():
            totals[name] += num
        return dict(sorted(totals.items()))

    def by_peer(self, name: str) -> dict[str, int]:
        """Return how often each peer caused `name`."""
        return {peer: count for (key, peer), count in self._counts.items() if key == name}


class PeerLog:
    """A log of peers' faults: at most 20 lines a minute for each peer.

    Args:
        logger: Receives the lines, as warnings.
        clock: Returns monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._instants_s: dict[str, deque[float]] = {}

    def warn(self, peer: str, event: str, reason: str, node: str = "") -> None:
        """Write one line, unless `peer` has used up its lines of the last minute.

        Args:
            peer: Whose lines are counted: an IP address.
            event: The counter.
            reason: What was wrong.
            node: The node's id, if it has proven one. The terminal shows its name.
        """
        address = peer.partition(":")[2] or peer
        now_s = self._clock()
        if len(self._instants_s) >= PEERS_MAX and peer not in self._instants_s:
            peer = "other"
        instants_s = self._instants_s.setdefault(peer, deque())
        while instants_s and instants_s[0] <= now_s - 60:
            instants_s.popleft()
        if len(instants_s) < LINES_PER_MINUTE_MAX:
            instants_s.append(now_s)
            fields = {"fault": event, "peer": node or "a node without a certificate"}
            fields |= {"address": address, "reason": reason}
            extra = {"event": "peer.faulty", "fields": fields}
            self._logger.warning("%s %s: %s", event, peer, reason, extra=extra)
