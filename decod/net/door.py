"""Admission of calls and connections: refuses strangers, counts faults, drops faulty connections.

A call is refused before its body is read if it does not name this run, or if its host has too many
calls open.

Each fault costs the sender's host a token, or more if the message is large. Tokens come back
slowly. A fault without a token left costs its sender the connection. Other nodes behind the same
address keep theirs.

Strangers could use up the number of connections that a node can have, and shut out the members. So
the oldest connection that does not name the run makes room for a new one.
"""

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from urllib.parse import unquote

import grpc.aio

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.certificates import Caller, Purpose, caller_of
from decod.net.channel import REVERSE_SERVICE, STATE_SERVICE, run_metadata
from decod.net.net_limits import Counters, Limits, PeerLog, RateLimiter
from decod.wire import validate

# --- callers -------------------------------------------------------------------------------------
# The peer that made a call: who it is, and from where it calls.


def plain_ip(host: str) -> str:
    """Return an IP address in canonical form, IPv4-mapped as IPv4; empty if `host` is none."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


# Only the stubs' class takes parameters, so the alias is a string.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class FarEnd(Protocol):
    """The far end of a connection: gRPC's context of a call, or a `TensorCaller`."""

    def peer(self) -> str:
        """Return its address, as gRPC writes it."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return its certificate as PEM, below `x509_pem_cert`."""


@dataclass(slots=True)
class TensorCaller:
    """The far end of a connection for tensors."""

    address: str
    certificate: bytes = b""
    """Once both ends have shaken hands."""

    def peer(self) -> str:
        return self.address

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self.certificate]} if self.certificate else {}


def caller_in(context: FarEnd) -> Caller | None:
    """Return the caller as its certificate proves it; None if that is no node's of decod."""
    found = list(context.auth_context().get("x509_pem_cert", ()))
    try:
        return caller_of(found[0]) if found else None
    except MalformedMessageError:
        return None


def proven_id(context: FarEnd) -> str:
    """Return a caller's id. The holder of a join token has not proven its own yet: empty."""
    caller = caller_in(context)
    return "" if caller is None or caller.purpose is Purpose.JOINING else caller.node_id


def require_caller(field: str, value: str, context: FarEnd) -> NodeId:
    """Check that a field with the sender's node id names the caller; return the id.

    Raises:
        MalformedMessageError: It names another node, or none.
    """
    caller = caller_in(context)
    if caller is None or caller.node_id != value:
        allowed = "that of a node" if caller is None else str(caller.node_id)
        raise validate.malformed(field, value, allowed=allowed)
    return caller.node_id


_passed_on = dict[str, str]()
"""Far ends, by the end from which this process passes their bytes on: that is all gRPC sees."""


@contextmanager
def passed_on(near: str, peer: str) -> Iterator[None]:
    """Note that what gRPC takes for a call from `near` comes from `peer`."""
    _passed_on[near] = peer
    try:
        yield
    finally:
        del _passed_on[near]


def peer_of(context: FarEnd) -> str:
    """Return where a call comes from, as gRPC writes it."""
    peer = context.peer()
    return _passed_on.get(peer, peer)


def host_of(context: FarEnd) -> str:
    """Return the peer's address without its port, which differs for each connection."""
    return _host_in(peer_of(context))


def _host_in(peer: str) -> str:
    return unquote(peer).rpartition(":")[0]


def ip_of(context: FarEnd) -> str:
    """Return the peer's IP address in canonical form, or an empty text if it has none."""
    return ip_in(host_of(context))


def ip_in(host: str) -> str:
    """Return the IP address in what `host_of` returns, in canonical form; empty if it has none."""
    return plain_ip(host.partition(":")[2].strip("[]"))


# --- the door ------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerFault:
    """Something that went wrong with a call or connection of a peer."""

    name: str
    """The counter."""
    node: str
    """The caller's id; empty if it has not proven one."""
    address: str
    """The peer's IP address."""
    reason: str


@dataclass(slots=True)
class Connection:
    """A connection of somebody to this node."""

    peer: str
    """Its far end, as gRPC writes it."""
    begun_s: float
    task: "asyncio.Task[None] | None" = None
    """Serves it. None: not yet."""
    node: str = ""
    """Who has named the run over it. Empty: nobody yet."""
    heard: bool = False
    """A call has come over it, or a tensor."""


class Door:
    """The callers of one server: their open calls, faults and connections.

    Args:
        run_id: Calls that name another run are refused.
        counters: Counts faults by the peer's IP address.
        limits: Numbers of calls, connections and faults.
    """

    def __init__(self, run_id: RunId, counters: Counters, limits: Limits) -> None:

        def clock() -> float:
            return asyncio.get_running_loop().time()

        self._clock = clock
        self._run = run_metadata(run_id)[0]
        self._counters = counters
        self._limits = limits
        self._log = PeerLog(_log, clock)
        self._patience = RateLimiter(
            clock, rate_per_s=limits.faults_per_s, burst=float(limits.faults_burst)
        )
        self._newcomers = RateLimiter(
            clock, rate_per_s=limits.connects_per_s, burst=float(limits.connects_burst)
        )
        self._num_open: Counter[str] = Counter()
        """Open calls of each host."""
        self._num_of: Counter[tuple[str, str]] = Counter()
        """Open calls of each node to each service."""
        self._num_all = 0
        self._connections: dict[str, Connection] = {}
        self._strangers: dict[str, Connection] = {}
        """Those over which nobody has named the run, the oldest first."""
        self._of_node: dict[str, dict[str, Connection]] = {}
        """The others by node, the latest used at the end."""
        self.on_fault: list[Callable[[PeerFault], None]] = []
        """Called with each event that is counted."""

    def admit(self, connection: Connection) -> bool:
        """Take note of a new connection; return False if there are too many.

        If there are, the oldest stranger's is ended, provided that it had time to name the run.
        """
        if not self._newcomers.allow(_host_in(connection.peer)):
            return False
        if len(self._connections) >= self._limits.connections_max:
            oldest = next(iter(self._strangers.values()), None)
            if oldest is None or self._clock() - oldest.begun_s < self._limits.room_interval_s:
                return False
            self._end(oldest, "there are many, and it does not name the run")
        self._connections[connection.peer] = self._strangers[connection.peer] = connection
        return True

    def forget(self, connection: Connection) -> None:
        """Take note that a connection is over."""
        self._remove(connection)
        if not connection.heard:
            # Whoever proves not to be of this run is refused in the handshake.
            self._counters.add("connection.refused", _host_in(connection.peer))

    def _remove(self, connection: Connection) -> None:
        peer, node = connection.peer, connection.node
        if self._connections.get(peer) is not connection:
            # It was ended before. Another one may come from there by now.
            return
        del self._connections[peer]
        self._strangers.pop(peer, None)
        own = self._of_node.get(node, {})
        if own.pop(peer, None) is not None and not own:
            del self._of_node[node]

    def _end(self, connection: Connection, reason: str) -> None:
        self._remove(connection)
        if connection.task is not None:
            connection.task.cancel()
        reason = f"the connection from port {connection.peer.rpartition(':')[2]}: {reason}"
        self._note("peer.dropped", _host_in(connection.peer), reason, connection.node)

    def names_run(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata name this run."""
        return self._run in metadata

    def hear(self, context: FarEnd) -> bool:
        """Take note of a call over a connection; return False if it has not come by the door."""
        connection = self._connections.get(peer_of(context))
        if connection is not None:
            connection.heard = True
        return connection is not None

    def know(self, context: FarEnd) -> None:
        """Take note of a connection over which a call has named the run."""
        connection = self._connections.get(peer_of(context))
        if connection is None:
            return
        self._strangers.pop(connection.peer, None)
        connection.node = proven_id(context)
        own = self._of_node.setdefault(connection.node, {})
        own.pop(connection.peer, None)
        own[connection.peer] = connection
        if len(own) > self._limits.connections_per_node_max:
            self._end(next(iter(own.values())), "too many of one node")

    def enter(self, host: str, node: str = "", service: str = "") -> bool:
        """Count a call as open until `leave`; return False if its caller has too many.

        A host may take half of the calls that other hosts leave free, so a few hosts can't take
        all. A node may have a few calls open to each service, wherever it calls from.
        """
        limits = self._limits
        num = self._num_open[host]
        room = limits.concurrent_rpcs_max - (self._num_all - num)
        if num >= min(limits.rpcs_per_host_max, room // 2):
            return False
        most = {
            STATE_SERVICE: limits.state_calls_per_node_max,
            REVERSE_SERVICE: limits.reverse_calls_per_node_max,
        }.get(service, limits.calls_per_node_max)
        if node and self._num_of[node, service] >= most:
            return False
        self._num_open[host] += 1
        self._num_of[node, service] += 1
        self._num_all += 1
        return True

    def leave(self, host: str, node: str = "", service: str = "") -> None:
        """End a call for which `enter` returned True."""
        self._num_open[host] -= 1
        self._num_of[node, service] -= 1
        self._num_all -= 1
        if not self._num_open[host]:
            del self._num_open[host]
        if not self._num_of[node, service]:
            del self._num_of[node, service]

    def note(self, name: str, context: FarEnd, reason: str) -> None:
        """Count and log an event that need not be the peer's fault."""
        self._note(name, host_of(context), reason, proven_id(context))

    def _note(self, name: str, host: str, reason: str, node: str = "") -> None:
        self._counters.add(name, host)
        self._log.warn(host, name, reason, node)
        for told in self.on_fault:
            told(PeerFault(name, node, ip_in(host), reason))

    def blame(self, name: str, context: FarEnd, reason: str, *, size_bytes: int = 0) -> None:
        """Count and log a fault: a message that no node of this version and run sends.

        Args:
            name: The counter.
            context: The call.
            reason: A text for the log.
            size_bytes: How many bytes this node had to read to find the fault.
        """
        self.note(name, context, reason)
        cost = 1 + size_bytes // self._limits.fault_size_bytes
        if not self._patience.allow(host_of(context), cost):
            self._drop(context)

    def _drop(self, context: FarEnd) -> None:
        """End the connection over which a call came."""
        if (connection := self._connections.get(peer_of(context))) is not None:
            self._end(connection, "many faults")
