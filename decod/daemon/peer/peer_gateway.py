"""The adapter between `net` and the driver of a peer, which do not know each other."""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from decod.clocks import Stopwatch
from decod.daemon.gateway import TensorTraffic
from decod.daemon.twins import Twins
from decod.driver.arena import ArenaRegion
from decod.driver.peer_driver import PeerDriver, StateCopy
from decod.errors import DecodError
from decod.ids import NodeId, RunId, TensorId
from decod.membership.papers import Membership
from decod.memory_files import is_in_memory, new_memory_file
from decod.net.ask import DialBack, Found, HelloInfo, HelloRequest
from decod.net.client import PeerClient
from decod.net.donor import StateBlob, StateRequest
from decod.net.download import Donor, DownloadTerms, download
from decod.net.rate_caps import UNLIMITED, Pace
from decod.net.stream import IncomingRegion
from decod.protocol.collaboration.loop import LoadState
from decod.protocol.core.events import Received, SendFailed, TensorLate, TensorSent
from decod.protocol.core.messages import Message, ReducedPart, ReducePart
from decod.protocol.core.messages.round_messages import PEERS_MAX, Greeting, Height, RoundMessage
from decod.protocol.core.messages.scopes import Way
from decod.train.checkpoint.description import QuietSink
from decod.wire.codec import Decoded

# --- copies of states ----------------------------------------------------------------------------
# Copies of a loop's state on their way between hosts. They lie in memory, as files.


class CopyNotes:
    """Tells the host once what each newcomer would cause again: little room for copies.

    Args:
        note: Logs an event.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._told: set[str] = set()

    def made(self, path: Path) -> None:
        """A copy lies there."""
        if not is_in_memory(path):
            self._once("state.on_disk", folder=str(path.parent))

    def failed(self, reason: str) -> None:
        """There is no room for a copy."""
        self._once("state.uncopied", reason=reason)

    def _once(self, event: str, **fields: str) -> None:
        if event not in self._told:
            self._told.add(event)
            self._note(event, **fields)


class _FileSink(QuietSink):
    """Puts a state that arrives into a file."""

    path: Path | None = None

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return the file's content.

        Raises:
            OSError: There is no room for it.
        """
        self.remove()
        descriptor, self.path = new_memory_file(size_bytes)
        try:
            return memoryview(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


async def fetch_state(
    wanted: LoadState,
    membership: Membership,
    run_id: RunId,
    address_of: Callable[[NodeId], str | None],
) -> StateCopy:
    """Fetch a state from several peers at once.

    Args:
        wanted: Names the state, and the peers that may have it.
        membership: This node's.
        run_id: The run.
        address_of: Returns a peer's address, if it is known.

    Raises:
        DecodError: No peer gave it.
    """
    found = {donor: address_of(donor) for donor in wanted.donors}
    donors = [Donor(node, address) for node, address in found.items() if address]
    if not donors:
        raise DecodError(
            "no peer with the run's state can be reached",
            why="their addresses are not known",
            fix="nothing: it is tried again",
            code="E-NET-007",
        )
    request = StateRequest(
        run_id=run_id,
        sender=membership.node_id,
        stage_index=0,
        iteration=wanted.height.round,
        with_optimizer=True,
        past_hash=wanted.height.state_id,
    )
    sink = _FileSink()
    try:
        fetched = await download(request, donors, sink, membership.tls, DownloadTerms())
    except BaseException:
        sink.remove()
        raise
    assert sink.path is not None
    return StateCopy(sink.path, fetched.description.text, wanted.height.round)


# --- the gateway ---------------------------------------------------------------------------------


class PeerGateway:
    """A peer's transport, and the handler of the server's and the client's events.

    Args:
        membership: This node's.
        run_id: The run.
        hello: Returns the answer to strangers.
        status: Returns the status for members, as JSON.
        twins: Makes what notices that two hosts have one identity, of its last two arguments.
        pace: Caps the rate at which this node sends.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        *,
        hello: Callable[[HelloRequest], HelloInfo | None],
        status: Callable[[], str],
        twins: Callable[[DialBack, Callable[[NodeId], tuple[str, str] | None]], Twins],
        pace: Pace,
    ) -> None:
        self.pace, self.intake, self.watch = pace, UNLIMITED, Stopwatch()
        self._hello, self.status = hello, status
        self.client = PeerClient(membership, run_id, self, watch=self.watch)
        self._bans = membership.bans
        self._dial_back = DialBack(run_id, membership)
        self._twins = twins(self._dial_back, self._known_at)
        self._driver: PeerDriver | None = None
        self._addresses: dict[NodeId, str] = {}
        self.traffic = TensorTraffic()

    def attach(self, driver: PeerDriver) -> None:
        """Begin to hand messages on."""
        self._driver = driver

    def detach(self) -> None:
        """Stop handing messages on."""
        self._driver = None

    async def close(self) -> None:
        """End all dials, and close all connections that this node has opened."""
        await self._dial_back.close()
        await self.client.close()

    @property
    def _running(self) -> PeerDriver | None:
        driver = self._driver
        return None if driver is None or driver.stopped.done() else driver

    # --- from the server ----------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._driver is not None and self._running is None

    def deliver(self, received: Decoded) -> None:
        """Take a control message."""
        driver, sender, message = self._running, received.sender, received.message
        if driver is None or received.way is not None:
            return
        if isinstance(message, Greeting) and sender not in self._addresses:
            if len(self._addresses) >= PEERS_MAX:
                return
            self.client.set_address(sender, message.address)
        if isinstance(message, (ReducePart, ReducedPart, RoundMessage)):
            driver.post(Received(sender, message, term=received.term))

    def allocate(self, received: Decoded, size_bytes: int) -> ArenaRegion | None:
        driver = self._running
        if driver is None or received.sender not in self._addresses:
            return None
        if not isinstance(received.message, (ReducePart, ReducedPart)):
            return None
        return None if size_bytes > driver.part_bytes_max else driver.allocate(size_bytes)

    def tensor_arrived(self, received: Decoded, region: IncomingRegion) -> None:
        assert isinstance(region, ArenaRegion), "that is what it was given"
        self.traffic.received(received.message, region.num_bytes)
        if (driver := self._running) is None:
            region.release()
        else:
            event = Received(received.sender, received.message, term=received.term)
            driver.tensor_arrived(event, region)

    def tensor_late(self, sender: NodeId) -> None:
        if (driver := self._running) is not None:
            driver.post(TensorLate(sender))

    def hello(self, request: HelloRequest) -> HelloInfo | None:
        self._twins.hear(request)
        return self._hello(request)

    async def dial_back(self, request: HelloRequest) -> Found:
        return await self._twins.look(request)

    def _known_at(self, node: NodeId) -> tuple[str, str] | None:
        address = self._addresses.get(node)
        return None if address is None else (address, address)

    async def state(self, request: StateRequest) -> StateBlob | str:
        """Give a copy of the loop's state."""
        driver = self._running
        if driver is None:
            return "this node is starting, or has stopped"
        copy = await driver.request_copy(Height(request.iteration, request.past_hash))
        return copy if isinstance(copy, str) else _blob_of(copy)

    # --- from the client ----------------------------------------------------------------------

    def on_tensor_sent(self, sent: TensorSent, message: Message) -> None:
        self.traffic.sent(message, sent.duration_s, sent.size_bytes)
        if (driver := self._running) is not None:
            driver.tensor_sent(sent)

    def on_send_failed(self, failed: SendFailed) -> None:
        if (driver := self._running) is not None:
            driver.post(failed)

    def on_latency(self, to: NodeId, seconds: float) -> None:
        """Nobody asks how far peers are from each other."""

    # --- from the driver ----------------------------------------------------------------------

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        self.client.send(to, term, message, way)

    def send_tensor(
        self,
        to: NodeId,
        term: int,
        message: Message,
        data: memoryview,
        tensor: TensorId,
        way: Way | None = None,
    ) -> None:
        self.client.send_tensor(to, term, message, data, tensor, way)

    def use_addresses(self, addresses: Mapping[NodeId, str]) -> None:
        """Dial these peers from now on, and forget all others."""
        for gone in self._addresses.keys() - addresses.keys():
            self.client.forget(gone)
        allowed = self._bans.allowed
        self._addresses = {node: each for node, each in addresses.items() if allowed(node)}
        for node, address in self._addresses.items():
            self.client.set_address(node, address)

    def address_of(self, node: NodeId) -> str | None:
        return self._addresses.get(node)


def _blob_of(copy: StateCopy) -> StateBlob:
    """Return a copy as the server sends it. Its file lies in memory, so it is read at once."""
    with copy.path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    async def read(offset: int, num_bytes: int) -> bytes:
        return data[offset : offset + num_bytes]

    def release() -> None:
        data.close()
        copy.release()

    return StateBlob(manifest=copy.description, read=read, release=release)
