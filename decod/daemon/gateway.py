"""The adapter between `net` and `driver`, which do not know each other.

It passes messages, tensors and states in both directions.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from decod.clocks import Stopwatch
from decod.daemon.address_book import AddressBook, Dialling
from decod.daemon.disk_states import InitialStates
from decod.daemon.open_files import FileLimit
from decod.daemon.run_facts import TensorSizes
from decod.daemon.twins import Twins
from decod.driver.arena import ArenaRegion
from decod.driver.driver import NodeDriver, ServedState
from decod.errors import DecodError
from decod.ids import NodeId, RunId, TensorId
from decod.membership.papers import Membership
from decod.membership.statements import TensorProofs
from decod.net.address import LOCAL
from decod.net.ask import DialBack, Found, HelloInfo, HelloRequest
from decod.net.client import PeerClient, Probed
from decod.net.donor import StateBlob, StateRequest, reader_of
from decod.net.download import Donor, DownloadTerms, download
from decod.net.net_limits import LIMITS, Limits, RateLimiter
from decod.net.rate_caps import Paces
from decod.net.storing import PartRequest, write_part
from decod.net.stream import IncomingRegion
from decod.protocol.core.durations import BusyTime
from decod.protocol.core.effects import FetchState, Note
from decod.protocol.core.events import (
    Fault,
    LinkMeasured,
    Received,
    SendFailed,
    TensorLate,
    TensorSent,
)
from decod.protocol.core.messages import (
    PASSES,
    AuditedTensor,
    Bans,
    Join,
    LinkProbe,
    Message,
    Refuse,
    Unusable,
)
from decod.protocol.core.messages.averaging_messages import ReducedPart, ReducePart
from decod.protocol.core.messages.decision_messages import LeaderIs
from decod.protocol.core.messages.membership_messages import Follow
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.proofs import Hashed, subject_of
from decod.protocol.core.view import Member, Reach
from decod.protocol.links.measuring import PROBE_SIZE_MAX_BYTES
from decod.tasks import TaskSet
from decod.train.checkpoint.description import Description, StateSink
from decod.wire.codec import Decoded

# --- traffic of tensors --------------------------------------------------------------------------
# What a node's tensors have cost its links since somebody last looked.


_AVERAGES = (ReducePart, ReducedPart)


@dataclass(slots=True)
class _Kind:
    """Tensors for one purpose."""

    busy: BusyTime = field(default_factory=BusyTime)
    sent_bytes: int = 0
    received_bytes: int = 0

    def sent(self, duration_s: float, size_bytes: int) -> None:
        self.sent_bytes += size_bytes
        self.busy.add(asyncio.get_running_loop().time(), duration_s)

    def received(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class Transferred:
    """What has travelled for one purpose."""

    sending_s: float
    """How long at least one tensor was on its way from here."""
    sent_bytes: int
    received_bytes: int


class TensorTraffic:
    """Counts the tensors that a node sends and receives. Probes and states are left out."""

    def __init__(self) -> None:
        self._passes, self._averages = _Kind(), _Kind()

    def sent(self, message: Message, duration_s: float, size_bytes: int) -> None:
        """Count a tensor that has arrived at its receiver."""
        kind = self._kind(message)
        if kind is not None:
            kind.sent(duration_s, size_bytes)

    def received(self, message: Message, size_bytes: int) -> None:
        """Count a tensor that has arrived here."""
        kind = self._kind(message)
        if kind is not None:
            kind.received(size_bytes)

    def _kind(self, message: Message) -> _Kind | None:
        if isinstance(message, PASSES):
            return self._passes
        return self._averages if isinstance(message, _AVERAGES) else None

    def take(self, since_s: float) -> tuple[Transferred, Transferred]:
        """Return what was counted for passes and for averages, and begin anew.

        Args:
            since_s: Time before this instant does not count, on the loop's clock.
        """
        passes, averages = self._passes, self._averages
        self._passes, self._averages = _Kind(), _Kind()
        passed, averaged = (
            Transferred(kind.busy.take(since_s), kind.sent_bytes, kind.received_bytes)
            for kind in (passes, averages)
        )
        return passed, averaged


# --- proofs of tensors ---------------------------------------------------------------------------
# The hashes of what travels from stage to stage: audits need them (`protocol.core.proofs`).


_INLINE_MAX_BYTES = 1 << 18
"""The hash of so much takes less time than a thread."""


class Proving:
    """Hashes tensors beside the event loop, on their way out and in.

    Args:
        proofs: This node's. None: nothing is audited, and nothing hashed.
    """

    def __init__(self, proofs: TensorProofs | None) -> None:
        self._proofs = proofs
        self._tasks = TaskSet()

    async def close(self) -> None:
        """Drop what is being hashed."""
        await self._tasks.close()

    def leaves(self, message: Message, data: memoryview, then: Callable[[Message], None]) -> None:
        """Call back with a message that is to be sent: with a proof, if it needs one."""
        proofs = self._proofs
        if proofs is None or not isinstance(message, Travelling) or message.proof:
            # Who passes it on has not computed it.
            then(message)
            return
        subject = subject_of(message)
        self._hash(
            data,
            lambda digest: then(replace(message, proof=proofs.proof_of(digest, subject))),
        )

    def comes(self, message: Message, data: memoryview, then: Callable[[bytes], None]) -> None:
        """Call back with the hash of a tensor that has come; with nothing if nobody needs it."""
        if self._proofs is None or not isinstance(message, Hashed):
            then(b"")
        else:
            self._hash(data, then)

    def _hash(self, data: memoryview, then: Callable[[bytes], None]) -> None:
        if data.nbytes <= _INLINE_MAX_BYTES:
            then(_sha256(data))
        else:
            self._tasks.start(self._hash_beside(data, then))

    @staticmethod
    async def _hash_beside(data: memoryview, then: Callable[[bytes], None]) -> None:
        then(await asyncio.to_thread(_sha256, data))


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


# --- incoming tensors ----------------------------------------------------------------------------
# The tensors that peers push to this node, and the memory that it takes for them.


_OF_MICROBATCHES = (*PASSES, AuditedTensor, Unusable)
"""Messages with an activation, or the gradient of one."""

_PROBES_MAX = 16
"""Probes of peers that are received at a time, of 1 MiB each at most. Others are refused."""

_FROM_STRANGERS_MAX = 4
"""Tensors that nodes unknown to this member may push at a time. Such nodes may have entered a
moment ago, or be strangers, which must not use up the memory of the members."""


class _ProbeRegion:
    """Ordinary memory, since the arena is for tensors.

    Args:
        size_bytes: Of the probe.
        others: The probes that are being read. This one is among them until it is released.
    """

    def __init__(self, size_bytes: int, others: "list[_ProbeRegion]") -> None:
        self.view = memoryview(bytearray(size_bytes))
        self._others = others
        others.append(self)

    def release(self) -> None:
        self._others.remove(self)


class IncomingTensors:
    """The tensors that are being read. A tensor's size is checked before it gets memory.

    Args:
        own: This node.
        sizes: Sizes of the run's tensors.
        book: Knows the members.
    """

    def __init__(self, own: NodeId, sizes: TensorSizes, book: AddressBook) -> None:
        self._own, self._sizes, self._book = own, sizes, book
        self._probes = list[_ProbeRegion]()
        """Memory into which probes of peers are being read."""
        self._from_strangers = list[ArenaRegion]()
        """Memory into which tensors of unknown nodes are being read, and some that was released."""

    def allocate(
        self, driver: NodeDriver, received: Decoded, size_bytes: int
    ) -> ArenaRegion | _ProbeRegion | None:
        """Return memory for a tensor, or None if the tensor is refused."""
        message, way = received.message, received.way
        if isinstance(message, LinkProbe):
            fits = size_bytes <= PROBE_SIZE_MAX_BYTES and len(self._probes) < _PROBES_MAX
            return _ProbeRegion(size_bytes, self._probes) if fits else None
        if isinstance(message, _OF_MICROBATCHES):
            expected = size_bytes == self._sizes.activation_bytes
        elif way is not None and way.goal != self._own:
            expected = size_bytes <= self._sizes.model_bytes
        else:
            expected = size_bytes <= driver.part_bytes_max
        members = self._book.members
        stranger = self._own in members and received.sender not in members
        self._from_strangers = [each for each in self._from_strangers if not each.released]
        if not expected or (stranger and len(self._from_strangers) >= _FROM_STRANGERS_MAX):
            return None
        region = driver.allocate(size_bytes)
        if stranger and region is not None:
            self._from_strangers.append(region)
        return region

    def arrived(self, region: ArenaRegion) -> None:
        """Forget a tensor that has been read."""
        if region in self._from_strangers:
            self._from_strangers.remove(region)


# --- the gateway ---------------------------------------------------------------------------------


_REACHED_MAX = 20_000

_LAST_WORD_S = 2.0
"""How long connections to a banned node last, for it to be told."""

_SHUNNED = "it is banned"

_TELL_AGAIN_S = 60.0
"""How often to report that the initial state of the run can't be given."""


def _clock() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswers:
    """What a node answers other nodes."""

    name: str
    """This node's name, for its own log."""
    hello: Callable[[HelloRequest], HelloInfo | None]
    """Returns the answer to strangers."""
    address: Callable[[], str]
    """Returns where this node tells others that it is."""
    status: Callable[[], str]
    """Returns the status for members, as JSON."""
    find_kept: Callable[[StateRequest], Awaitable[StateBlob | str | None]]
    """Finds a state, or weights that are not trained, on this host's disk. A text says why there is
    none. None: the device may have it."""
    initial: InitialStates | None = None
    """The initial states, if this node gives them to all others: at the leader of a run that starts
    from weights."""


class Gateway:
    """The driver's `Transport`, and the handler of the server's and the client's events.

    Until `attach` is called, messages are dropped. Their senders repeat them.

    Args:
        run_id: The run, named in every message.
        membership: This node's.
        sizes: Sizes of the run's tensors.
        answers: What this node answers other nodes.
        files: The limit on open files. Candidates get the files that members leave free.
        paces: Cap the rates at which this node sends and takes.
    """

    def __init__(
        self,
        run_id: RunId,
        membership: Membership,
        *,
        sizes: TensorSizes,
        answers: PeerAnswers,
        files: FileLimit,
        paces: Paces = Paces(),  # noqa: B008 - a frozen value.
    ) -> None:
        self.pace, self.intake = paces.upload, paces.download
        self.watch = Stopwatch()
        """Measures the time that this node spends on messages and tensors, in and out."""
        self.traffic = TensorTraffic()
        proofs = TensorProofs(membership.host, run_id) if sizes.proven else None
        self._proving = Proving(proofs)
        self.client = PeerClient(membership, run_id, self, watch=self.watch)
        self.dialling = Dialling(membership, run_id, self.client, self._leader)
        """How this node and the others connect."""
        self.book = AddressBook(membership.node_id, answers.name, self.dialling, files, self._note)
        """The other nodes that this node knows."""
        self._told_s = -math.inf
        """When it was last reported that the initial state can't be given."""
        self._answers = answers
        self._run_id, self._sizes = run_id, sizes
        self._membership, self._node_id = membership, membership.node_id
        self._incoming = IncomingTensors(self._node_id, sizes, self.book)
        self._driver: NodeDriver | None = None
        self._dial_back = DialBack(run_id, membership)
        self._twins = Twins(
            membership, answers.address, self._note, self._dial_back, self._known_at
        )
        self._reached: dict[NodeId, tuple[str, int]] = {}
        """Address and incarnation of each candidate that was reached by a dial."""
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._told_of = RateLimiter(_clock, rate_per_s=0.1, burst=5.0)
        """Bounds reports on candidates, since strangers can invent any number of them."""
        self._farewell: Received | None = None
        """The message that the run has ended, if it came while this node was getting ready."""

    def attach(self, driver: NodeDriver) -> None:
        """Begin to hand messages on. The caller must start the driver before it awaits anything."""
        self._driver = driver
        if self._farewell is not None:
            asyncio.get_running_loop().call_soon(driver.post, self._farewell)

    def detach(self) -> None:
        """Stop handing messages on. Timers may keep this object alive, but not the driver."""
        self._driver = None
        self.book.close()

    # --- from the server ----------------------------------------------------------------------

    def deliver(self, received: Decoded) -> None:
        """Take a control message."""
        sender, message = received.sender, received.message
        if self._driver is None:
            if isinstance(message, Refuse) and message.over:
                self._farewell = _received(received)
            return
        if self._driver.stopped.done():
            return
        if isinstance(message, Join) and not self._meet(received, message):
            return
        self.dialling.meet(sender)
        if isinstance(message, Follow) and not self._take_in(
            sender, message.address, message.reach
        ):
            return
        self.book.hear(sender)
        if isinstance(message, LeaderIs) and message.leader and message.address:
            self.book.remember_leader(message.leader, message.address)
        self._driver.post(_received(received))

    def _meet(self, received: Decoded, offer: Join) -> bool:
        """Take in a candidate's address; return whether its offer can go to the core."""
        assert self._driver is not None
        sender = received.sender
        if self._driver.facts.leading is None:
            # Only the leader answers offers. No other node needs the stranger's address.
            return False
        if offer.reach is Reach.OUTBOUND:
            # Its offer is repeated. By then it may keep a call open to this node.
            if not self.dialling.holds(sender):
                return False
        elif self._reached.get(sender) != (offer.address, offer.incarnation):
            if sender not in self._dialling:
                self._dialling[sender] = asyncio.create_task(self._reach(received, offer))
                self._dialling[sender].add_done_callback(lambda _: self._dialling.pop(sender))
            return False
        if not self._take_in(sender, offer.address, offer.reach):
            return False
        self.book.remember_name(sender, offer.name)
        return True

    def _leader(self) -> NodeId | None:
        if self._driver is None:
            return None
        view = self._driver.facts.view
        return view.leader

    def _take_in(self, sender: NodeId, address: str, reach: Reach) -> bool:
        """Take in a candidate's address; return whether there is room for the candidate."""
        assert self._driver is not None
        leading = self._driver.facts.leading
        wanted = leading.candidates if leading is not None else ()
        return self.book.take_in(sender, address, wanted, reach)

    async def _reach(self, received: Decoded, offer: Join) -> None:
        """Dial a candidate at its address. If it is there, deliver its offer again."""
        sender = received.sender
        dialled = await self._dial_back.dial(sender, offer.address)
        if dialled is None or self._running is None:
            return
        if not (unreached := dialled.unreached):
            if await self._twins.twin_of(sender, offer.address, dialled.start):
                # Its next life asks before it offers itself, and ends with the answer.
                return
            self._reached.pop(sender, None)
            self._reached[sender] = (offer.address, offer.incarnation)
            if len(self._reached) > _REACHED_MAX:
                del self._reached[next(iter(self._reached))]
            self.deliver(received)
        elif self._told_of.allow("unreachable"):
            address = offer.address
            self._note("candidate.unreachable", peer=sender, address=address, reason=unreached)

    async def dial_back(self, request: HelloRequest) -> Found:
        return await self._twins.look(request)

    def _known_at(self, node: NodeId) -> tuple[str, str] | None:
        """Return where a node is dialled, and by which address others know it; see `Twins`."""
        if (way := self.client.address_of(node)) is None:
            return None
        return way, self.book.address_of(node) if way.startswith(LOCAL) else way

    async def close(self) -> None:
        """End all dials, and close all connections that this node has opened."""
        await self._proving.close()
        await self._dial_back.close()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)
        await self.dialling.close()

    def say_farewell(self, term: int, reason: str) -> None:
        """Tell the nodes that are still getting ready that the run has ended."""
        word = Refuse(reason, over=True)
        for node, address in self.book.newcomers().items():
            self.client.set_address(node, address)
            self.client.send(node, term, word)

    def _note(self, event: str, **fields: object) -> None:
        if self._driver is not None:
            self._driver.note(Note(event, tuple(fields.items())))

    @property
    def stopped(self) -> bool:
        return self._driver is not None and self._running is None

    @property
    def _running(self) -> NodeDriver | None:
        """The driver of a core that has started and not stopped."""
        driver = self._driver
        return None if driver is None or driver.stopped.done() else driver

    def allocate(self, received: Decoded, size_bytes: int) -> IncomingRegion | None:
        driver = self._running
        if driver is None:
            return None
        self.dialling.meet(received.sender)
        return self._incoming.allocate(driver, received, size_bytes)

    def tensor_arrived(self, received: Decoded, region: IncomingRegion) -> None:
        if not isinstance(region, ArenaRegion):
            region.release()  # Only the sender measures a probe.
            return
        self._incoming.arrived(region)
        self.traffic.received(received.message, region.num_bytes)
        take = partial(self._take_tensor, received, region)
        self._proving.comes(received.message, region.view, take)

    def _take_tensor(self, received: Decoded, region: ArenaRegion, digest: bytes) -> None:
        if (driver := self._running) is None:
            region.release()
        else:
            driver.tensor_arrived(_received(received), region, digest)

    def tensor_late(self, sender: NodeId) -> None:
        if (driver := self._running) is not None:
            driver.post(TensorLate(sender))

    def hello(self, request: HelloRequest) -> HelloInfo | None:
        if not request.twin_address or self._leader() in (None, request.sender):
            self._twins.hear(request)
        return self._answers.hello(request)

    def status(self) -> str:
        return self._answers.status()

    async def state(self, request: StateRequest) -> StateBlob | str:
        """Give a copy of a state: from disk, any stage's initial one, or this stage's own."""
        if self._driver is None:
            return "this node is starting"
        kept = await self._answers.find_kept(request)
        if kept is not None:
            return kept
        initial = self._answers.initial
        if initial is not None and request.iteration == initial.iteration:
            found = await initial.find(request.stage_index, request.cut)
            if isinstance(found, str):
                self._tell_failed(request.stage_index, found)
            return found
        served = await self._driver.request_state(
            request.stage_index,
            request.iteration,
            with_optimizer=request.with_optimizer,
            cut=request.cut,
        )
        return served if isinstance(served, str) else _blob_of(served)

    def _tell_failed(self, stage_index: int, reason: str) -> None:
        """Report now and then why no node can begin. Nodes that want to begin ask all the time."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s >= _TELL_AGAIN_S:
            self._told_s = now_s
            self._note("start.failed", stage=stage_index, reason=reason)

    # --- from the client ----------------------------------------------------------------------

    def on_tensor_sent(self, sent: TensorSent, message: Message) -> None:
        self.traffic.sent(message, sent.duration_s, sent.size_bytes)
        if (driver := self._running) is not None:
            driver.tensor_sent(sent)

    def on_send_failed(self, failed: SendFailed) -> None:
        if (driver := self._running) is not None:
            driver.post(failed)

    def on_latency(self, to: NodeId, seconds: float) -> None:
        if (driver := self._running) is not None:
            driver.post(LinkMeasured(to, latency_s=seconds / 2))

    # --- from the driver ----------------------------------------------------------------------

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        if self._shuns(to) and not isinstance(message, Bans):
            self._fail_soon(SendFailed(to, message, _SHUNNED, way=way, fault=Fault.NONE))
        else:
            self.dialling.meet(to)
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
        if self._shuns(to):
            self._fail_soon(SendFailed(to, message, _SHUNNED, tensor, way, Fault.NONE))
        else:
            self.dialling.meet(to)

            def send(said: Message) -> None:
                self.client.send_tensor(to, term, said, data, tensor, way)

            self._proving.leaves(message, data, send)

    def _shuns(self, node: NodeId) -> bool:
        return not self._membership.bans.allowed(node)

    def _fail_soon(self, failed: SendFailed) -> None:
        asyncio.get_running_loop().call_soon(self.on_send_failed, failed)

    def cut(self, nodes: Collection[NodeId]) -> None:
        """End the connections to nodes that have been banned, once they have been told."""
        for node in nodes:
            asyncio.get_running_loop().call_later(_LAST_WORD_S, self._forget_banned, node)

    def _forget_banned(self, node: NodeId) -> None:
        if self._shuns(node):
            self.dialling.cut(node)

    async def probe(self, to: NodeId, term: int, size_bytes: int) -> Probed | None:
        return None if self._shuns(to) else await self.client.probe(to, term, size_bytes)

    def use_members(self, members: tuple[Member, ...]) -> None:
        self.book.use_members(members)
        self.dialling.use_members(members)

    async def fetch_state(
        self,
        wanted: FetchState,
        sink: StateSink,
        *,
        with_optimizer: bool = True,
        limits: Limits = LIMITS,
    ) -> str:
        """Fetch a state into the sink's last buffer; return its description.

        Raises:
            DecodError: No donor can be reached, or none gave the whole state.
        """
        donors = self._addressed(wanted.donors)
        request = self._request(wanted, with_optimizer=with_optimizer and wanted.with_optimizer)
        # Rounded parameters can't be compared with the hash of those that are stepped.
        checked = request.with_optimizer or not self._sizes.rounded
        part = wanted.part
        names = None if part is None else self._sizes.names(part.stage_index, part.cut)
        fetched = await download(
            request,
            donors,
            sink,
            self._membership.tls,
            DownloadTerms(
                wanted_hash=wanted.parameter_hash if checked else "",
                names=names,
                size_bytes=self._sizes.state_bytes,
                limits=limits,
                pace=self.intake,
            ),
        )
        return fetched.description.text

    async def fetch_base(self, sha256: str, donors: Sequence[NodeId], sink: StateSink) -> None:
        """Fetch a part of the weights that the run does not train into the sink's last buffer.

        Raises:
            DecodError: No donor can be reached, or none gave the whole part.
        """
        request = StateRequest(
            run_id=self._run_id,
            sender=self._node_id,
            stage_index=0,
            iteration=0,
            with_optimizer=False,
            base_hash=sha256,
        )
        terms = DownloadTerms(wanted_hash=sha256, pace=self.intake)
        await download(request, self._addressed(donors), sink, self._membership.tls, terms)

    async def write_part(
        self, wanted: FetchState, folder: str, described: Callable[[Description], None]
    ) -> Description:
        """Have a member write a state into the store that members share; see `write_part`.

        Args:
            wanted: Says which state, and names the member.
            folder: The folder in the store.
            described: Called once the member has its copy.

        Raises:
            NoStoreError: The member has no store.
            DecodError: It can't be reached, or did not write it.
        """
        [member] = self._addressed(wanted.donors)
        request = PartRequest(
            state=self._request(wanted, with_optimizer=True),
            folder=folder,
            size_bytes=self._sizes.state_bytes,
        )
        return await write_part(request, member, described, self._membership.tls)

    def _addressed(self, nodes: Sequence[NodeId]) -> list[Donor]:
        """Return those of some nodes from which this one may fetch.

        Raises:
            DecodError: There are none.
        """
        allowed = [node for node in nodes if not self._shuns(node)]
        addresses = {donor: self.client.address_of(donor) for donor in allowed}
        donors = [Donor(node, address) for node, address in addresses.items() if address]
        if not donors:
            raise DecodError(
                f"no address of {', '.join(node[:8] for node in nodes) or 'a donor'}",
                why="they have left the run, or are banned",
                fix="nothing: others are asked",
                code="E-NET-007",
            )
        return donors

    def _request(self, wanted: FetchState, *, with_optimizer: bool) -> StateRequest:
        return StateRequest(
            run_id=self._run_id,
            sender=self._node_id,
            stage_index=wanted.stage_index,
            iteration=wanted.iteration,
            with_optimizer=with_optimizer,
            cut=wanted.cut,
        )


def _received(decoded: Decoded) -> Received:
    """Return the event of a message. Its sender is the origin, not a node that passed it on."""
    way = decoded.way
    sender = decoded.sender if way is None else way.origin
    return Received(sender, decoded.message, term=decoded.term, way=way)


def _blob_of(served: ServedState) -> StateBlob:
    read = reader_of(served.data)
    return StateBlob(manifest=served.manifest, read=read, release=served.release)
