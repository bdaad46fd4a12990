"""The DHT, through which nodes find the leader and each other. Rendezvous only, and best effort.

Every operation ends in bounded time, and none raises because of a peer. A lookup that finds nothing
returns None. A publication that reaches no other node is repeated later. The owner of a record
publishes it again after a third of its life. No other node does, so a dead node's record expires.
"""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from kademlia.node import Node

from decod.errors import MalformedMessageError, NetworkError
from decod.ids import NodeId, RunId
from decod.net.address import Address, join_address, split_address
from decod.net.counters import Counters
from decod.net.dht_protocol import BUCKET_SIZE, DhtProtocol
from decod.net.dht_record import (
    TTL_MAX_S,
    Record,
    RecordStore,
    check_record,
    parse_record,
    record_key,
)

_log = logging.getLogger(__name__)

_PARALLEL = 4
_ITERATIONS_MAX = 12
_ANSWERS_WANTED = 3
_REOPEN_DELAY_S = 1.0
_BOOTSTRAP_MAX = 32


class Dht:
    """This node's part of the DHT of one run.

    Args:
        node_id: This node, the owner of the records that it publishes.
        run_id: The run. Requests and records of other runs are dropped.
        wall_clock: Returns seconds of the Unix epoch. Records carry their end of life on this
            clock. The clocks of two hosts may differ by a minute.
        counters: Counts by IP address: `dht.malformed`, `dht.foreign` (another run), `dht.flood`,
            `dht.unpadded`, `dht.unasked`, `dht.full`.
    """

    def __init__(
        self,
        node_id: NodeId,
        run_id: RunId,
        *,
        wall_clock: Callable[[], float],
        counters: Counters | None = None,
    ) -> None:
        self._node_id = node_id
        self._run_id = run_id
        self._clock = wall_clock
        self.counters = counters or Counters()
        self._store = RecordStore(run_id, wall_clock, self.counters)
        self._kademlia_id = hashlib.sha256(node_id.encode()).digest()[:20]
        self._run_tag = hashlib.sha256(run_id.encode()).digest()[:8]
        self._protocol: DhtProtocol | None = None
        self._local: Address = ("", 0)
        self._bootstrap: dict[str, None] = {}
        self._own: dict[str, tuple[Mapping[str, Any], float]] = {}
        self._sequence = 0
        self._republishing: dict[str, asyncio.Task[None]] = {}
        self._reopening: asyncio.Task[None] | None = None

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
        return bound_port

    async def _open(self, address: Address) -> int:
        transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: DhtProtocol(
                self._kademlia_id, self._run_tag, self._store, self.counters, self._on_lost
            ),
            local_addr=address,
        )
        self._protocol = protocol
        port: int = transport.get_extra_info("sockname")[1]
        return port

    def _on_lost(self) -> None:
        """The system has closed the socket: open another at the same address."""
        _log.warning("dht.lost the UDP socket was closed by the system")
        old, self._protocol = self._protocol, None

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
            await self.bootstrap(())

        self._reopening = _task(reopen())

    async def close(self) -> None:
        """Close the socket and end all tasks. Published records live on until they expire."""
        tasks = list(self._republishing.values())
        if self._reopening is not None:
            tasks.append(self._reopening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._republishing.clear()
        if self._protocol is not None:
            await self._protocol.close()
            self._protocol = None

    # --- contacts ---------------------------------------------------------------------------

    @property
    def num_contacts(self) -> int:
        return len(self._protocol.contacts()) if self._protocol else 0

    def addresses(self) -> list[str]:
        """Return `host:port` of all contacts, for `bootstrap` after the next start."""
        nodes = self._protocol.contacts() if self._protocol else []
        return [join_address(node.ip, node.port) for node in nodes]

    async def bootstrap(self, addresses: Iterable[str]) -> int:
        """Make contact with the nodes at `addresses` and with those near to this node's id.

        At most 32 addresses are remembered. They are asked again whenever this node publishes, so
        that parts of the run that have lost contact find each other again. Addresses that can't be
        read or resolved are skipped.

        Returns:
            The number of contacts.
        """
        for address in addresses:
            if len(self._bootstrap) < _BOOTSTRAP_MAX:
                self._bootstrap[address] = None
        await asyncio.gather(*map(self._greet, self._bootstrap))
        await self._crawl(self._kademlia_id)
        return self.num_contacts

    async def _greet(self, address: str) -> None:
        try:
            host, port = split_address(address)
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except (NetworkError, OSError) as error:
            _log.info("dht.unknown %s: %s", address, error)
            return
        for family, _, _, _, sockaddr in found:
            protocol = self._protocol
            if protocol is None or (family == socket.AF_INET6 and ":" not in self._local[0]):
                continue
            where = (str(sockaddr[0]), int(sockaddr[1]))
            node_id = await protocol.ping(where)
            if node_id is not None:
                protocol.add(Node(node_id, *where))
                return

    # --- records ----------------------------------------------------------------------------

    async def publish(self, name: str, value: Mapping[str, Any], ttl_s: float) -> int:
        """Publish a record now, and again after every third of `ttl_s` until `retract`.

        Args:
            name: `dht_record.LEADER`, or `peer_name` of this node.
            value: For the leader: `node_id` (this node's), `address` and `term`. For a peer:
                `address` and anything else that fits into the record.
            ttl_s: Life of each publication, 3 to 900 seconds.

        Returns:
            How many other nodes hold the record. 0 is no error: it is kept here and published
            again.
        """
        assert 3 <= ttl_s <= TTL_MAX_S, ttl_s
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
            await self.bootstrap(())
            if name in self._own:
                await self._publish_once(name)

    async def _publish_once(self, name: str) -> int:
        value, ttl_s = self._own[name]
        now_s = self._clock()
        # At least the clock, so that a restarted owner continues above its earlier numbers.
        self._sequence = max(self._sequence + 1, int(now_s * 1000))
        record = Record(
            name=name,
            owner=self._node_id,
            sequence=self._sequence,
            expires_s=float(now_s + ttl_s),
            value=value,
        )
        try:
            check_record(record, now_s=now_s)
            data = record.to_bytes()
            parse_record(data, now_s=now_s)
        except (MalformedMessageError, TypeError, ValueError) as error:
            raise AssertionError(f"own record {name}: {error}") from error
        self._store.put_record(record, source="self")
        nodes, _ = await self._crawl(record_key(self._run_id, name))
        protocol = self._protocol
        if protocol is None:
            return 0
        return sum(await asyncio.gather(*(protocol.store(node, data) for node in nodes)))

    async def lookup(self, name: str) -> dict[str, Any] | None:
        """Return the value of the newest live record of that name, or None if none was found.

        Compares the records that a few holders send with the record that is held here.
        """
        key = record_key(self._run_id, name)
        _, answers = await self._crawl(key, value=True)
        records = [record for data in answers if (record := self._checked(data, name))]
        if (stored := self._store.get(key)) is not None:
            records.append(stored)
        if not records:
            return None
        newest = max(records, key=lambda record: record.rank)
        return dict(newest.value)

    def _checked(self, data: bytes, name: str) -> Record | None:
        try:
            record = parse_record(data, now_s=self._clock())
        except MalformedMessageError:
            self.counters.add("dht.malformed", "lookup")
            return None
        return record if record.name == name else None

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
        if protocol is None:
            return [], []
        target = Node(key)
        known = {node.id: node for node in protocol.table.find_neighbors(target, BUCKET_SIZE)}
        # The table leaves out a contact that is the target itself.
        if (exact := protocol.contact(key)) is not None:
            known[key] = exact
        asked: set[bytes] = set()
        answered: dict[bytes, Node] = {}
        values: list[bytes] = []
        for _ in range(_ITERATIONS_MAX):
            nearest = sorted(known.values(), key=target.distance_to)[:BUCKET_SIZE]
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
                        known.setdefault(found.id, found)
        return sorted(answered.values(), key=target.distance_to)[:BUCKET_SIZE], values


def _task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine as a task whose exception, a bug, reaches the loop's handler."""

    def done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "bug in the DHT", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(done)
    return task
