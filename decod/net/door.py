"""Admission of calls and connections: refuses strangers, counts faults, drops faulty connections.

A call is refused before its body is read if it does not name this run, or if its host has too many
calls open.

Each fault costs the sender's host a token, or more if the message is large. Tokens come back
slowly. A fault without a token left costs its sender the connection. Other nodes behind the same
address keep theirs.

gRPC closes connections beyond a fixed number as soon as they come. Strangers could use up that
number and shut out the members, so connections that do not name the run are closed before it is
reached.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar
from urllib.parse import unquote

import grpc.aio

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.certificates import Caller, Purpose, caller_of
from decod.net.address import Address
from decod.net.channel import REVERSE_SERVICE, STATE_SERVICE, run_metadata
from decod.net.net_limits import Counters, Limits, PeerLog, RateLimiter
from decod.wire import validate

# Count and end connections that gRPC has accepted. gRPC's Python interface can't do that.
#
# They are found among the process's open files, by the address of their far end. To gRPC, a
# connection that is shut down here looks closed by the peer.

_OPEN_FILES = Path("/dev/fd")
"""Lists the open files of the process that reads it, on Linux and macOS."""


def plain_ip(host: str) -> str:
    """Return an IP address in canonical form, IPv4-mapped as IPv4; empty if `host` is none."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def num_open_files() -> int:
    """Return how many files this process has open."""
    return len(os.listdir(_OPEN_FILES))


def shut_down(local_port: int, is_meant: Callable[[Address], bool]) -> set[Address]:
    """End the TCP connections to a local port that `is_meant` selects; return their far ends.

    Looks at all open files, so call it in a thread.

    Args:
        local_port: The port of this host's end.
        is_meant: Decides from the address of the far end whether a connection is ended.
    """
    ended = set()
    for connection in _sockets():
        with connection, suppress(OSError):
            near_end = connection.getsockname()
            far_end = connection.getpeername()
            far = (plain_ip(far_end[0]), far_end[1])
            if near_end[1] == local_port and is_meant(far):
                connection.shutdown(socket.SHUT_RDWR)
                ended.add(far)
    return ended


def _sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's IP sockets. gRPC may close its own meanwhile.

    The number of a closed file can be reused for another one at once. A duplicate can't change.
    """
    for name in os.listdir(_OPEN_FILES):
        copy = -1
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                copy = os.dup(int(name))
                found = socket.socket(fileno=copy)
                copy = -1
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
                else:
                    found.close()
        if copy >= 0:
            os.close(copy)


# The peer that made a call: who it is, and from where it calls.

# Only the stubs' class takes parameters, so the alias is a string.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def caller_in(context: Context) -> Caller | None:
    """Return the caller as its certificate proves it; None if that is no node's of decod."""
    found = list(context.auth_context().get("x509_pem_cert", ()))
    try:
        return caller_of(found[0]) if found else None
    except MalformedMessageError:
        return None


def proven_id(context: Context) -> str:
    """Return a caller's id. The holder of a join token has not proven its own yet: empty."""
    caller = caller_in(context)
    return "" if caller is None or caller.purpose is Purpose.JOINING else caller.node_id


def require_caller(field: str, value: str, context: Context) -> NodeId:
    """Check that a field with the sender's node id names the caller; return the id.

    Raises:
        MalformedMessageError: It names another node, or none.
    """
    caller = caller_in(context)
    if caller is None or caller.node_id != value:
        allowed = "that of a node" if caller is None else str(caller.node_id)
        raise validate.malformed(field, value, allowed=allowed)
    return caller.node_id


def host_of(context: Context) -> str:
    """Return the peer's address without its port, which differs for each connection."""
    return unquote(context.peer()).rpartition(":")[0]


def ip_of(context: Context) -> str:
    """Return the peer's IP address in canonical form, or an empty text if it has none."""
    return ip_in(host_of(context))


def ip_in(host: str) -> str:
    """Return the IP address in what `host_of` returns, in canonical form; empty if it has none."""
    return plain_ip(host.partition(":")[2].strip("[]"))


def far_end_of(peer: str) -> Address | None:
    """Return the far end of a connection that `Context.peer` names; None if it has no port."""
    host, _, port = unquote(peer).rpartition(":")
    return (ip_in(host), int(port)) if port.isdecimal() else None


# How often somebody connects who does not prove to be of this run.
#
# gRPC ends such a connection itself, during the handshake, and tells nobody. But it asks for this
# node's certificate at the beginning of each handshake. A connection that has begun and over
# which no call comes in time was refused, or had nothing to say.

_PENDING_MAX = 10_000
_PEERS_MAX = 16_384
_PEER_KEPT_S = 60.0
"""After a silence that long, the far end's port may belong to another connection."""


class Knocks:
    """Connections over which no call has come.

    Args:
        clock: Returns monotonic seconds. It is also asked from other threads.
        patience_s: The time that a connection has from its beginning to its first call.
        refuse: Called with a number of connections that were refused.
    """

    def __init__(
        self, clock: Callable[[], float], patience_s: float, refuse: Callable[[int], None]
    ) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._refuse = refuse
        self._begun_s: deque[float] = deque()
        """The instants when connections began over which no call has come yet, the oldest first."""
        self._heard_s: dict[str, float] = {}
        """The instant when something last came from each far end, the latest at the end."""

    def begin(self) -> None:
        """A handshake begins. May be called from any thread."""
        self._begun_s.append(self._clock())

    def hear(self, peer: str) -> None:
        """A call comes over a connection.

        Args:
            peer: Its far end, as gRPC calls it.
        """
        now_s = self._clock()
        last_s = self._heard_s.pop(peer, None)
        self._heard_s[peer] = now_s
        if len(self._heard_s) > _PEERS_MAX:
            del self._heard_s[next(iter(self._heard_s))]
        is_new = last_s is None or now_s - last_s > _PEER_KEPT_S
        if is_new and self._begun_s:
            # Which one it was does not matter: it is their number that counts.
            self._begun_s.popleft()

    def settle(self) -> None:
        """Count connections whose time is over."""
        until_s = self._clock() - self._patience_s
        num = 0
        while self._begun_s and (self._begun_s[0] <= until_s or len(self._begun_s) > _PENDING_MAX):
            self._begun_s.popleft()
            num += 1
        if num:
            self._refuse(num)


_log = logging.getLogger(__name__)

T = TypeVar("T")


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


_MANY = 0.75
"""Strangers' connections are closed once this part of `connections_max` is in use."""


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

        self._run = run_metadata(run_id)[0]
        self._counters = counters
        self._limits = limits
        self._log = PeerLog(_log, clock)
        self._patience = RateLimiter(
            clock, rate_per_s=limits.faults_per_s, burst=float(limits.faults_burst)
        )
        self._num_open: Counter[str] = Counter()
        """Open calls of each host."""
        self._num_of: Counter[tuple[str, str]] = Counter()
        """Open calls of each node to each service."""
        self._num_all = 0
        self._dropping: dict[Address, asyncio.Task[None]] = {}
        self._known: dict[str, str] = {}
        """Connections over which the run was named, with the node, the latest used at the end."""
        self._known_of: dict[str, dict[str, None]] = {}
        """The same of each node."""
        self._thinning: dict[str, asyncio.Task[None]] = {}
        self.knocks = Knocks(time.monotonic, limits.handshake_timeout_s, self._count_refused)
        """Connections over which no call comes."""
        self.port = 0
        """The port on which the server listens."""
        self.on_fault: list[Callable[[PeerFault], None]] = []
        """Called with each event that is counted."""

    def _count_refused(self, num: int) -> None:
        # gRPC does not say where they came from.
        self._counters.add("connection.refused", "", num)

    def names_run(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata name this run."""
        return self._run in metadata

    def know(self, context: Context) -> None:
        """Take note of a connection over which a call has named the run."""
        peer = context.peer()
        node = proven_id(context)
        is_new = self._known.get(peer) != node
        self._forget(peer)
        self._known[peer] = node
        own = self._known_of.setdefault(node, {})
        own[peer] = None
        if len(self._known) > 2 * self._limits.connections_max:
            self._forget(next(iter(self._known)))
        many = len(own) > self._limits.connections_per_node_max
        if is_new and many and node not in self._thinning:
            self._thinning[node] = asyncio.get_running_loop().create_task(self._thin(node))

    def _forget(self, peer: str) -> None:
        node = self._known.pop(peer, None)
        if node is not None:
            del self._known_of[node][peer]
            if not self._known_of[node]:
                del self._known_of[node]

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

    def note(self, name: str, context: Context, reason: str) -> None:
        """Count and log an event that need not be the peer's fault."""
        self._note(name, host_of(context), reason, proven_id(context))

    def _note(self, name: str, host: str, reason: str, node: str = "") -> None:
        self._counters.add(name, host)
        self._log.warn(host, name, reason, node)
        for told in self.on_fault:
            told(PeerFault(name, node, ip_in(host), reason))

    def blame(self, name: str, context: Context, reason: str, *, size_bytes: int = 0) -> None:
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

    def _drop(self, context: Context) -> None:
        """End the connection over which a call came."""
        far = far_end_of(context.peer())
        host = host_of(context)
        node = proven_id(context)
        if far is None or far in self._dropping:
            return

        async def drop() -> None:
            if await self._looked(partial(shut_down, self.port, far.__eq__)):
                reason = f"the connection from port {far[1]}: many faults"
                self._note("peer.dropped", host, reason, node)

        task = asyncio.get_running_loop().create_task(drop())
        self._dropping[far] = task
        task.add_done_callback(lambda _: self._dropping.pop(far))

    async def _thin(self, node: str) -> None:
        """End those connections of a node that it has beyond its number."""
        try:
            # A connection may come while a look is under way.
            while len(peers := self._ends_of(node)) > self._limits.connections_per_node_max:
                looked = await self._looked(partial(self._close_surplus, tuple(peers)))
                if looked is None:
                    return
                still_open, ended = looked
                for far in peers.keys() - still_open:
                    self._forget(peers[far])
                for far in ended:
                    reason = f"the connection from port {far[1]}: too many of one node"
                    self._note("peer.dropped", peers[far].rpartition(":")[0], reason, node)
        finally:
            del self._thinning[node]

    def _ends_of(self, node: str) -> dict[Address, str]:
        """Return a node's known connections by their far ends, the latest used at the end."""
        fars = ((far_end_of(peer), peer) for peer in self._known_of.get(node, ()))
        return {far: peer for far, peer in fars if far is not None}

    def _close_surplus(self, ends: tuple[Address, ...]) -> tuple[set[Address], set[Address]]:
        """End those of some connections that are too many.

        Args:
            ends: Their far ends. The end that was silent longest comes first.

        Returns:
            Those that stay open, and those that were ended.
        """
        still_open = set[Address]()

        def look(far: Address) -> bool:
            still_open.add(far)
            return False

        shut_down(self.port, look)
        still = [far for far in ends if far in still_open]
        surplus = still[: -self._limits.connections_per_node_max]
        ended = shut_down(self.port, surplus.__contains__) if surplus else set()
        return set(still) - ended, ended

    async def _looked(self, look: Callable[[], T]) -> T | None:
        """Run `look` at the open files in a thread; return None if no file is left for it.

        In that state gRPC can't accept connections either, but does not say so.
        """
        try:
            return await asyncio.to_thread(look)
        except OSError as error:
            _log.error("connections can't be looked at, or accepted: %s", error.strerror)
            return None

    async def keep_room(self) -> None:
        """Count refused connections, and close strangers' whenever there are many. Never returns.

        A connection has at least `room_interval_s` to name the run.
        """
        strangers: set[Address] = set()
        while True:
            await asyncio.sleep(self._limits.room_interval_s)
            self.knocks.settle()
            close = partial(self._close_strangers, tuple(self._known), strangers)
            strangers, ended = await self._looked(close) or (set(), set())
            for host, num in Counter(host for host, _ in ended).items():
                reason = f"{num} connections: there are many, and these do not name the run"
                self._note("peer.dropped", host, reason)

    def _close_strangers(
        self, known: tuple[str, ...], before: set[Address]
    ) -> tuple[set[Address], set[Address]]:
        """If there are many connections, end those of strangers that the last look has seen too.

        Args:
            known: Connections over which the run was named, as `Context.peer` gives them.
            before: Strangers that were connected at the last look.

        Returns:
            The strangers that are still connected, and those whose connection was ended.
        """
        if num_open_files() < _MANY * self._limits.connections_max:
            return set(), set()
        known_ends = set(map(far_end_of, known))
        strangers = set()

        def was_stranger(far: Address) -> bool:
            if far in known_ends:
                return False
            strangers.add(far)
            return far in before

        ended = shut_down(self.port, was_stranger)
        return strangers - ended, ended
