"""The DHT, through which nodes find the leader and each other. Rendezvous only, and best effort.

Only members of the run take part. `dht_protocol` says how they know each other, and `dht_record`
what a record proves. Every operation ends in bounded time, and none raises because of a peer. A
lookup that finds nothing returns None. A publication that reaches no other node is repeated later.
The owner of a record publishes it again after a third of its life. No other node does, so a dead
node's record expires.

Two parts of a run that have lost contact, or never had any, find each other within a minute. Every
25 seconds, each node *looks around*. It asks a member that it knows from elsewhere (the leader, if
it answers) which nodes are nearest to its own place. It also asks a contact that it has lost, and
an address that it was started with. If one of them names a member that this node has not met, both
parts have touched: this node enters the DHT anew from there, and publishes its records again.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kademlia.node import Node

from decod.clocks import wall_clock
from decod.errors import MalformedMessageError, NetworkError
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.membership.statements import Authors, everybody
from decod.net.address import Address, join_address, split_address
from decod.net.dht_datagram import Sessions, run_tag
from decod.net.dht_protocol import DhtProtocol
from decod.net.dht_record import (
    LEADER,
    RECORD_SIZE_MAX_BYTES,
    TTLS_MAX_S,
    Record,
    RecordReader,
    RecordStore,
    is_equivocal,
    record_body,
    record_key,
    record_statement,
)
from decod.net.dht_table import ContactTable, DhtLimits
from decod.net.net_limits import Counters

_log = logging.getLogger(__name__)

_PARALLEL = 4
_ITERATIONS_MAX = 12
_ANSWERS_WANTED = 3
_REOPEN_DELAY_S = 1.0
_BOOTSTRAP_MAX = 32
_KNOWN_MAX = 3
_GREETED_MAX = 64


def _nobody() -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtPorts:
    """The things that the DHT takes from the node around it."""

    clock: Callable[[], float] = wall_clock
    """Returns seconds of the Unix epoch. The clocks of two hosts may differ by a minute."""
    known: Callable[[], Iterable[str]] = _nobody
    """Returns addresses of members that the node knows from elsewhere, the leader's first."""
    allowed: Callable[[NodeId], bool] = everybody
    """Tells whether a member may take part. All datagrams and records of others are dropped."""
    counters: Counters = field(default_factory=Counters)
    """Counts by IP address: `dht.malformed`, `dht.foreign` (another run), `dht.unproven` (no
    member), `dht.unknown` (no session), `dht.unasked`, `dht.flood`. By node id: `dht.malformed`,
    `dht.flood`, `dht.unpadded`, `dht.full`, `dht.equivocal`."""


class Dht:
    """This node's part of the DHT of one run.

    Args:
        membership: This node's, the owner of the records that it publishes.
        run_id: The run. Records of other runs are refused.
        ports: What it takes from the node around it.
        limits: Limits on what others can have of this node.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        ports: DhtPorts | None = None,
        limits: DhtLimits | None = None,
    ) -> None:
        self._membership = membership
        self._run_id = run_id
        self._ports = ports or DhtPorts()
        self._limits = limits or DhtLimits()
        self.counters = self._ports.counters
        clock = self._ports.clock
        authors = Authors(membership.root, clock, self._ports.allowed)
        self._reader = RecordReader(run_id, clock, authors)
        self._store = RecordStore(self._reader, self.counters)
        self._sessions = Sessions(membership, run_id, clock, authors)
        self._place = self._sessions.kademlia_id
        self._table = ContactTable(self._place, self._ping, self._limits)
        self._protocol: DhtProtocol | None = None
        self._quiet = False
        self._local: Address = ("", 0)
        self._bootstrap: dict[str, None] = {}
        self._num_tried = 0
        self._greeted: OrderedDict[str, Node] = OrderedDict()
        """Members by the address at which they were found, the latest at the end."""
        self._own: dict[str, tuple[Mapping[str, Any], int]] = {}
        self._sequence = 0
        self._republishing: dict[str, asyncio.Task[None]] = {}
        self._reopening: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Open the UDP socket and return its port. If `port` is 0, the system chooses a free one.

        Raises:
            NetworkError: The port is in use, or the address is not this host's (E-NET-002).
        """
        try:
            bound_port = await self._open((host, port))
        except OSError as error:
            raise NetworkError(
                f"can't listen on UDP {join_address(host, port)}",
                why=f"{error.strerror or error}",
                fix="end the other program, or choose another with --listen HOST:PORT",
                code="E-NET-002",
            ) from error
        self._local = (host, bound_port)
        self._looking = _task(self._look_around_forever())
        return bound_port

    async def _open(self, address: Address) -> int:
        def make() -> DhtProtocol:
            return DhtProtocol(
                run_tag(self._run_id),
                self._sessions,
                self._table,
                self._store,
                self.counters,
                self._limits,
            )

        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_datagram_endpoint(make, local_addr=address)
        self._protocol = protocol
        protocol.on_lost = self._on_lost
        protocol.is_quiet = lambda: self._quiet
        port: int = transport.get_extra_info("sockname")[1]
        return port

    def _on_lost(self) -> None:
        """The system has closed the socket: open another at the same address."""
        _log.warning("dht.lost the UDP socket was closed by the system")
        old = self._protocol
        self._protocol = None

        async def reopen() -> None:
            if old is not None:
                await old.close()
            while True:
                try:
                    await self._open(self._local)
                except OSError as error:
                    _log.warning("dht.lost can't open the UDP socket: %s", error.strerror)
                    await asyncio.sleep(_REOPEN_DELAY_S)
                else:
                    break

        self._reopening = _task(reopen())

    async def close(self) -> None:
        """Close the socket and end all tasks. Published records live on until they expire."""
        tasks = [*self._republishing.values(), self._reopening, self._looking]
        begun = [task for task in tasks if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        self._republishing.clear()
        if self._protocol is not None:
            await self._protocol.close()
            self._protocol = None

    def answer_nobody(self) -> None:
        """Only ask others from now on: nobody can dial this node.

        It gets into no contact table then, and nobody is sent to it in vain.
        """
        self._quiet = True

    # --- contacts ---------------------------------------------------------------------------

    @property
    def num_contacts(self) -> int:
        return len(self._table)

    def addresses(self) -> list[str]:
        """Return `host:port` of all contacts."""
        return [join_address(node.ip, node.port) for node in self._table.contacts()]

    async def bootstrap(self, addresses: Iterable[str]) -> int:
        """Make contact with the nodes at `addresses` and with those near to this node's place.

        At most 32 addresses are remembered, to be tried again when this node looks around.
        Addresses that can't be read or resolved are skipped.

        Returns:
            The number of contacts.
        """
        for address in addresses:
            if len(self._bootstrap) < _BOOTSTRAP_MAX:
                self._bootstrap[address] = None
        await asyncio.gather(*map(self._greet, self._bootstrap))
        await self._crawl(self._place)
        return self.num_contacts

    async def _greet(self, address: str) -> Node | None:
        """Return the member at `host:port`; None if there is none."""
        try:
            host, port = split_address(address)
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except (NetworkError, OSError) as error:
            _log.info("dht.unknown %s: %s", address, error)
            return None
        for family, _, _, _, sockaddr in found:
            protocol = self._protocol
            if protocol is None or (family == socket.AF_INET6 and ":" not in self._local[0]):
                continue
            node = await protocol.greet((str(sockaddr[0]), int(sockaddr[1])))
            if node is not None:
                return node
        return None

    async def _ping(self, node: Node) -> None:
        if self._protocol is not None:
            await self._protocol.ping(node)

    async def _look_around_forever(self) -> None:
        # Nodes that were started together shall not look around together.
        interval_s = self._limits.look_around_s * (0.75 + self._place[0] / 1024)
        while True:
            await asyncio.sleep(interval_s)
            await self.look_around()

    async def look_around(self) -> bool:
        """Look for members that this node has not met, and enter the DHT anew if there are any.

        Returns:
            Whether there are.
        """
        found = await self._meets_others()
        if found:
            await self._crawl(self._place)
            await asyncio.gather(*map(self._publish_once, list(self._own)))
        return found

    async def _meets_others(self) -> bool:
        found = False
        for address in islice(self._ports.known(), _KNOWN_MAX):
            compared = await self._compare(address)
            if compared is not None:
                found = compared
                break
        return found | any(await asyncio.gather(*map(self._compare, self._absent())))

    def _absent(self) -> list[str]:
        """Return two addresses of members that are no contacts now, each time others."""
        self._num_tried += 1
        contacts = set(self.addresses())
        lost = [join_address(*address) for address in self._table.lost()]
        begun_with = [address for address in self._bootstrap if address not in contacts]
        return [each[self._num_tried % len(each)] for each in (lost, begun_with) if each]

    async def _compare(self, address: str) -> bool | None:
        """Ask the member at `host:port` which members are nearest to this node.

        Returns:
            Whether this node meets one that it had not met; None if no member answers there.
        """
        protocol = self._protocol
        node = self._greeted.pop(address, None)
        if node is None or self._sessions.of(node.id) is None:
            node = await self._greet(address)
        if protocol is None or node is None:
            return None
        nodes = await protocol.find(node, self._place, value=False)
        if not isinstance(nodes, list):
            return None
        self._greeted[address] = node
        if len(self._greeted) > _GREETED_MAX:
            self._greeted.popitem(last=False)
        new = [each for each in nodes if self._sessions.of(each.id) is None]
        met = await asyncio.gather(*(protocol.greet((each.ip, each.port)) for each in new))
        return any(each is not None for each in met)

    # --- records ----------------------------------------------------------------------------

    async def publish(self, name: str, value: Mapping[str, Any], ttl_s: int) -> int:
        """Publish a record now, and again after every third of `ttl_s` until `retract`.

        Args:
            name: `dht_record.PEER`, or at a data node also `dht_record.LEADER`.
            value: `address`, for the leader also `term`, and anything else that fits.
            ttl_s: Life of each publication: from 3 s to what `dht_record.TTLS_MAX_S` says.

        Returns:
            How many other nodes hold the record. 0 is no error: it is kept here and published
            again.
        """
        assert 3 <= ttl_s <= TTLS_MAX_S[name], ttl_s
        self._own[name] = (dict(value), ttl_s)
        num_holders = await self._publish_once(name)
        if name in self._own and name not in self._republishing:
            self._republishing[name] = _task(self._republish(name))
        return num_holders

    async def retract(self, name: str) -> None:
        """Stop publishing. Published copies of the record live on until they expire."""
        self._own.pop(name, None)
        task = self._republishing.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _republish(self, name: str) -> None:
        while name in self._own:
            await asyncio.sleep(self._own[name][1] / 3)
            if name in self._own:
                await self._publish_once(name)

    async def _publish_once(self, name: str) -> int:
        if name not in self._own:
            return 0
        data = self._new_record(name)
        # Refused like anybody's if this node's papers have expired.
        self._store.put(data, source="self")
        nodes, _ = await self._crawl(self._key(name, self._membership.node_id))
        protocol = self._protocol
        if protocol is None:
            return 0
        return sum(await asyncio.gather(*(protocol.store(node, data) for node in nodes)))

    def _new_record(self, name: str) -> bytes:
        """Return this node's record of that name, signed with its present papers."""
        value, ttl_s = self._own[name]
        now_s = self._ports.clock()
        # At least the clock, so that a restarted owner continues above its earlier numbers. Not
        # far above it, if the clock was set back: nobody would take the record.
        now_ms = int(now_s * 1000)
        following = self._sequence + 1
        self._sequence = following if now_ms < following < now_ms + 30_000 else now_ms
        body = record_body(
            self._run_id, name, value, sequence=self._sequence, expires_s=int(now_s + ttl_s)
        )
        data = record_statement(body, self._membership.state)
        assert len(data) <= RECORD_SIZE_MAX_BYTES, data
        return data

    async def lookup(self, name: str, owner: NodeId | None = None) -> Record | None:
        """Return the newest live record of that name, or None if none was found.

        Compares the records that a few holders send with the record that is held here.

        Args:
            name: `dht_record.LEADER` or `dht_record.PEER`.
            owner: Whose record to look up, if it is a peer's.
        """
        key = self._key(name, owner)
        _, answers = await self._crawl(key, value=True)
        records = [record for data in dict.fromkeys(answers) if (record := self._read(data, key))]
        if (stored := self._store.get(key)) is not None:
            records.insert(0, stored)
        newest: Record | None = None
        for record in records:
            if newest is not None and is_equivocal(newest, record):
                self.counters.add("dht.equivocal", record.owner)
            if newest is None or record.rank > newest.rank:
                newest = record
        return newest

    def _key(self, name: str, owner: NodeId | None) -> bytes:
        return record_key(self._run_id, name, None if name == LEADER else owner)

    def _read(self, data: bytes, key: bytes) -> Record | None:
        try:
            record = self._reader.read(data)
        except MalformedMessageError:
            self.counters.add("dht.malformed", "lookup")
            return None
        return record if record.key == key else None

    # --- search -----------------------------------------------------------------------------

    async def _crawl(self, key: bytes, *, value: bool = False) -> tuple[list[Node], list[bytes]]:
        """Ask nodes nearer and nearer to `key`; return the nearest that answered, and their
        records.

        Ends after 12 iterations of 4 requests, however many contacts the answers invent.

        Args:
            key: A place in the DHT, 20 bytes.
            value: Ask for the record at `key` too. Stops once three nodes have sent one.
        """
        protocol = self._protocol
        table = self._table
        if protocol is None:
            return [], []
        distance = Node(key).distance_to
        known = {node.id: node for node in table.nearest(key)}
        asked: set[bytes] = set()
        answered: dict[bytes, Node] = {}
        values: list[bytes] = []
        for _ in range(_ITERATIONS_MAX):
            nearest = table.spread(sorted(known.values(), key=distance))
            batch = [node for node in nearest if node.id not in asked][:_PARALLEL]
            if not batch or len(values) >= _ANSWERS_WANTED:
                break
            asked.update(node.id for node in batch)
            replies = await asyncio.gather(*(protocol.find(n, key, value=value) for n in batch))
            for node, reply in zip(batch, replies, strict=True):
                if reply is None:
                    del known[node.id]
                    continue
                answered[node.id] = node
                if isinstance(reply, bytes):
                    values.append(reply)
                    continue
                for found in reply:
                    # A peer's word about a contact must not replace what is known of it.
                    if found.id not in asked:
                        known.setdefault(found.id, table.contact(found.id) or found)
        return table.spread(sorted(answered.values(), key=distance)), values


def _task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine as a task whose exception, a bug, reaches the loop's handler."""

    def done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "bug in the DHT", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(done)
    return task
