"""Between peers and driver: what is let in, what is dropped, and who is remembered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.daemon import address_book as module
from decod.daemon.address_book import NEWCOMERS_MAX
from decod.daemon.disk_states import InitialStates
from decod.daemon.gateway import Gateway, PeerAnswers
from decod.daemon.open_files import FileLimit
from decod.daemon.run_facts import TensorSizes
from decod.driver.arena import ArenaAllocator, ArenaRegion
from decod.driver.driver import NodeDriver, ServedState
from decod.errors import DecodError
from decod.ids import FlowId, Iteration, MicrobatchId, NodeId, RunId, TensorId
from decod.limits import StageBlocks
from decod.net.ask import DialBack, Dialled
from decod.net.donor import StateBlob, StateRequest
from decod.protocol.core.effects import FetchState, Note
from decod.protocol.core.events import Received, SendFailed, TensorLate, TensorSent
from decod.protocol.core.messages import (
    BackwardGradient,
    CanTake,
    ForwardActivation,
    Join,
    LinkProbe,
    Message,
    Refuse,
)
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.view import Member, Role
from decod.protocol.links.measuring import PROBE_SIZE_MAX_BYTES
from decod.train.checkpoint.description import StateSink
from decod.wire.codec import Decoded
from tests.support.members import data_node
from tests.waiting import wait_until

MINE = data_node("me")
ME = MINE.node_id
PEER, OTHER, THIRD = (NodeId(letter * 52) for letter in "bcd")
RUN = RunId("r" * 26)
M = MicrobatchId(1, 0, 0)
FLOW = FlowId(ME, 0)
SIZE = 64


class FakeDialBack:
    """Finds everybody who is not said to be away."""

    def __init__(self) -> None:
        self.away: dict[NodeId, str] = {}
        self.dialled: list[tuple[NodeId, str]] = []

    async def dial(self, node: NodeId, address: str, start: int = 0) -> Dialled:
        if not start:  # Else it was found a moment ago.
            self.dialled.append((node, address))
        reason = self.away.get(node, "")
        return Dialled(reason, 0 if reason else 1)

    async def dial_anew(self, node: NodeId, address: str, twin_address: str = "") -> Dialled:
        return Dialled("nobody listens there")

    async def close(self) -> None:
        pass


class FakeDriver:
    """Takes everything."""

    gateway: Gateway

    def __init__(self) -> None:
        self.known: dict[NodeId, object] = {}
        """The candidates of the leader's machine."""
        leading: Any = SimpleNamespace(candidates=self.known)
        self.facts = SimpleNamespace(leading=leading, view=SimpleNamespace(num_stages=3, leader=ME))
        self.stopped: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.part_bytes_max = 100
        self.events: list[Any] = []
        self.arena = ArenaAllocator(1 << 16)
        self.notes: list[Note] = []
        self.state: ServedState | str = "no state"

    def post(self, event: Any) -> None:
        self.events.append(event)

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def allocate(self, size_bytes: int) -> ArenaRegion | None:
        return self.arena.allocate(size_bytes)

    def tensor_arrived(self, received: Any, region: ArenaRegion, digest: bytes) -> None:
        self.events.append(received)

    def tensor_sent(self, sent: TensorSent) -> None:
        self.events.append(sent)

    async def request_state(
        self,
        stage_index: int,
        iteration: int,
        *,
        with_optimizer: bool,
        cut: StageBlocks = (),
    ) -> ServedState | str:
        return self.state


class FakeInitial:
    """The first states of a run that starts from weights."""

    def __init__(self, iteration: int, answer: StateBlob | str) -> None:
        self.iteration, self.answer = iteration, answer

    async def find(self, stage_index: int, cut: StageBlocks = ()) -> StateBlob | str:
        return self.answer


def said(message: Message, sender: NodeId = PEER, *, way: Way | None = None) -> Decoded:
    """Returns what a peer said, in term 1."""
    return Decoded(RUN, sender, 1, 1, message, way)


async def read_nothing(offset: int, num_bytes: int) -> bytes:
    """Read nothing."""
    return b""


async def find_nothing(_: StateRequest) -> None:
    """Find no state: this host keeps none."""


def make_gateway() -> Gateway:
    return Gateway(
        RUN,
        MINE,
        sizes=TensorSizes(activation_bytes=SIZE, model_bytes=1000),
        answers=PeerAnswers(
            name="",
            hello=lambda _: None,
            address=lambda: "",
            status=lambda: "{}",
            find_kept=find_nothing,
        ),
        files=FileLimit(1 << 20),
    )


@asynccontextmanager
async def attached() -> AsyncIterator[FakeDriver]:
    gateway, driver = make_gateway(), FakeDriver()
    gateway._dial_back = cast("DialBack", FakeDialBack())
    gateway.attach(cast("NodeDriver", driver))
    driver.gateway = gateway
    try:
        yield driver
    finally:
        await gateway.close()


@pytest.fixture(name="driver")
def _driver() -> AbstractAsyncContextManager[FakeDriver]:
    return attached()


def offer(address: str = "127.0.0.1:7", name: str = "merry-marlin") -> Join:
    return Join(
        address=address,
        role=Role.RELAY,
        capacity=1,
        stage_index=None,
        manifest_sha256="0" * 64,
        incarnation=1,
        name=name,
    )


async def offered(gateway: Gateway, node: NodeId, message: Join | None = None) -> None:
    """Delivers an offer, and waits until the candidate has been dialled if it has to be."""
    gateway.deliver(said(message or offer(), node))
    await wait_until(lambda: not gateway._dialling)


def member(node: NodeId, address: str = "127.0.0.1:9", name: str = "calm-crane") -> Member:
    return Member(
        node_id=node,
        address=address,
        role=Role.RELAY,
        stage_index=1,
        capacity=1,
        name=name,
        since_iteration=0,
    )


async def test_nothing_is_taken_in_before_the_core_runs() -> None:
    gateway = make_gateway()
    gateway.deliver(said(CanTake(Iteration(1, 1))))
    activation = ForwardActivation(Iteration(1, 1), M, FLOW, (PEER,))
    assert gateway.allocate(said(activation), SIZE) is None
    request = StateRequest(run_id=RUN, sender=PEER, stage_index=1, iteration=1, with_optimizer=True)
    assert await gateway.state(request) == "this node is starting"


async def test_a_node_that_gets_ready_hears_afterwards_that_the_run_has_ended() -> None:
    """Only that: whatever else came is said again."""
    gateway, driver = make_gateway(), FakeDriver()
    over = Refuse("enough", over=True)
    for message in (CanTake(Iteration(1, 1)), Refuse("full"), over):
        gateway.deliver(said(message))
    gateway.attach(cast("NodeDriver", driver))
    assert driver.events == [], "the core is not started yet"
    await asyncio.sleep(0)
    assert driver.events == [Received(PEER, over, term=1)]
    await gateway.client.close()


async def test_the_end_of_the_run_is_told_to_those_who_get_ready(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    """Members and candidates hear of it from the core. Strangers can't make it tell thousands."""
    gateway = driver.gateway
    told: list[tuple[NodeId, int, Message]] = []
    monkeypatch.setattr(gateway.client, "send", lambda *sent: told.append(sent))
    gateway.use_members((member(ME), member(PEER)))
    await offered(gateway, OTHER)
    for node in (ME, PEER, OTHER, THIRD):
        gateway.book.expect(node, "127.0.0.1:8")
    gateway.say_farewell(3, "enough")
    assert told == [(THIRD, 3, Refuse("enough", over=True))]
    told.clear()
    for number in range(2 * NEWCOMERS_MAX):
        gateway.book.expect(NodeId(f"{number:052}"), "127.0.0.1:8")
    gateway.say_farewell(3, "enough")
    assert len(told) == NEWCOMERS_MAX


@pytest.mark.parametrize(
    "message",
    [
        ForwardActivation(Iteration(1, 1), M, FLOW, (PEER,)),
        BackwardGradient(Iteration(1, 1), M, FLOW, (PEER,)),
    ],
    ids=["activation", "gradient"],
)
async def test_an_activation_has_exactly_the_runs_size(
    message: ForwardActivation | BackwardGradient, driver: FakeDriver
) -> None:
    gateway = driver.gateway
    for size_bytes in (0, SIZE - 1, SIZE + 1, 1 << 40):
        assert gateway.allocate(said(message), size_bytes) is None
    assert gateway.allocate(said(message), SIZE) is not None


async def test_another_tensor_is_at_most_as_large_as_the_stage(driver: FakeDriver) -> None:
    gateway = driver.gateway
    assert gateway.allocate(said(CanTake(Iteration(1, 1))), 100) is not None
    assert gateway.allocate(said(CanTake(Iteration(1, 1))), 101) is None


async def test_a_tensor_that_is_passed_on_may_be_of_any_stage(driver: FakeDriver) -> None:
    gateway = driver.gateway
    onwards = said(CanTake(Iteration(1, 1)), way=Way(PEER, OTHER, 1, 1))
    assert gateway.allocate(onwards, 1000) is not None
    assert gateway.allocate(onwards, 1001) is None
    here = said(CanTake(Iteration(1, 1)), OTHER, way=Way(PEER, ME, 1, 1))
    assert gateway.allocate(here, 100) is not None
    assert gateway.allocate(here, 101) is None


async def test_those_whom_a_member_does_not_know_can_not_use_up_its_memory(
    driver: FakeDriver,
) -> None:
    gateway = driver.gateway
    gateway.use_members((member(ME), member(PEER)))
    strangers = [NodeId(f"stranger{number}") for number in range(20)]
    regions = [gateway.allocate(said(CanTake(Iteration(1, 1)), who), 100) for who in strangers]
    held = [region for region in regions if region is not None]
    assert len(held) == 4, "some may have entered a moment ago"
    assert gateway.allocate(said(CanTake(Iteration(1, 1))), 100) is not None
    held[0].release()
    gateway.tensor_arrived(said(CanTake(Iteration(1, 1)), OTHER), held[1])
    for expected in (True, True, False):
        region = gateway.allocate(said(CanTake(Iteration(1, 1)), OTHER), 100)
        assert (region is not None) == expected


async def test_what_was_passed_on_is_said_by_its_origin(driver: FakeDriver) -> None:
    gateway = driver.gateway
    way = Way(PEER, ME, 1, 7)
    gateway.deliver(said(CanTake(Iteration(1, 1)), OTHER, way=way))
    assert driver.events == [Received(PEER, CanTake(Iteration(1, 1)), term=1, way=way)]


async def test_probes_are_read_into_ordinary_memory_few_at_a_time_and_forgotten(
    driver: FakeDriver,
) -> None:
    """A peer must not be able to fill the tensors' memory with bytes that mean nothing."""
    gateway = driver.gateway
    probe, most = LinkProbe(), PROBE_SIZE_MAX_BYTES
    assert gateway.allocate(said(probe), most + 1) is None
    regions = [gateway.allocate(said(probe), most) for _ in range(20)]
    taken = [region for region in regions if region is not None]
    assert 0 < len(taken) < 20
    gateway.tensor_arrived(said(probe), taken[0])
    taken[1].release()
    assert gateway.allocate(said(probe), 0) is not None
    assert gateway.allocate(said(probe), 0) is not None
    assert gateway.allocate(said(probe), 0) is None
    assert driver.events == []
    assert driver.arena.used_bytes == 0


async def test_a_tensor_that_is_given_up_is_told_with_its_sender(driver: FakeDriver) -> None:
    gateway = driver.gateway
    gateway.tensor_late(PEER)
    driver.stopped.set_result(None)
    gateway.tensor_late(PEER)
    assert driver.events == [TensorLate(PEER)]


async def test_after_the_end_messages_are_dropped_and_tensors_given_back(
    driver: FakeDriver,
) -> None:
    gateway = driver.gateway
    message = ForwardActivation(Iteration(1, 1), M, FLOW, (PEER,))
    region = gateway.allocate(said(message), SIZE)
    assert region is not None
    assert not gateway.stopped
    driver.stopped.set_result(None)
    assert gateway.stopped
    gateway.tensor_arrived(said(message), region)
    gateway.deliver(said(CanTake(Iteration(1, 1))))
    gateway.on_latency(PEER, 0.1)
    gateway.on_tensor_sent(TensorSent(PEER, TensorId(1), 1, 1.0), message)
    gateway.on_send_failed(SendFailed(PEER, message, "gone", TensorId(1)))
    assert driver.arena.used_bytes == 0
    assert driver.events == []


async def test_the_leader_remembers_where_a_candidate_is(driver: FakeDriver) -> None:
    gateway = driver.gateway
    await offered(gateway, PEER)
    assert gateway.client.address_of(PEER) == "127.0.0.1:7"
    assert gateway.book.name_of(PEER) == "merry-marlin"
    assert gateway.book.name_of(OTHER) is None
    assert driver.events == [Received(PEER, offer(), term=1)]


async def test_a_candidate_is_dialled_once_in_each_life_and_at_each_address(
    driver: FakeDriver,
) -> None:
    gateway = driver.gateway
    lives = [offer(), offer(), replace(offer(), incarnation=2), offer("127.0.0.1:8")]
    for each in lives:
        await offered(gateway, PEER, each)
    assert [event.message for event in driver.events] == lives
    dialled = cast("FakeDialBack", gateway._dial_back).dialled
    assert dialled == [(PEER, f"127.0.0.1:{port}") for port in (7, 7, 8)]


async def test_who_can_not_be_reached_is_no_candidate_and_the_operator_hears_of_some(
    driver: FakeDriver,
) -> None:
    gateway = driver.gateway
    dial_back = cast("FakeDialBack", gateway._dial_back)
    dial_back.away = {PEER: "nobody listens there"}
    for _ in range(20):
        await offered(gateway, PEER)
    await offered(gateway, OTHER)
    assert [event.sender for event in driver.events] == [OTHER]
    assert gateway.client.address_of(PEER) is None
    assert len(driver.notes) == 5
    assert driver.notes[0].event == "candidate.unreachable"
    fields = {"peer": PEER, "address": "127.0.0.1:7", "reason": "nobody listens there"}
    assert dict(driver.notes[0].fields) == fields
    del dial_back.away[PEER]
    await offered(gateway, PEER)
    assert driver.events[-1].sender == PEER


async def test_offers_that_come_while_a_candidate_is_dialled_are_not_multiplied(
    driver: FakeDriver,
) -> None:
    gateway = driver.gateway
    for _ in range(5):
        gateway.deliver(said(offer()))
    await offered(gateway, PEER)
    assert len(driver.events) == 1


async def test_an_offer_to_a_node_that_does_not_lead_changes_nothing(driver: FakeDriver) -> None:
    """Or a stranger could say where a member is dialled."""
    driver.facts.leading = None
    driver.gateway.use_members((member(PEER),))
    driver.gateway.deliver(said(offer("6.6.6.6:6")))
    assert driver.gateway.client.address_of(PEER) == "127.0.0.1:9"


async def test_offers_of_made_up_nodes_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    monkeypatch.setattr(module, "CANDIDATES_MAX", 1)
    gateway = driver.gateway
    await offered(gateway, PEER)
    driver.known[PEER] = object()
    await offered(gateway, OTHER)
    await offered(gateway, PEER)
    assert [event.sender for event in driver.events] == [PEER, PEER]
    assert gateway.client.address_of(OTHER) is None


async def test_candidates_find_no_room_where_files_are_few_and_the_operator_is_told(
    driver: FakeDriver,
) -> None:
    gateway = driver.gateway
    gateway.book._files = FileLimit(96 + 8 * 3)
    gateway.use_members((member(ME), member(PEER)))
    await offered(gateway, OTHER)
    driver.known[OTHER] = object()
    assert gateway.client.address_of(OTHER) is not None
    assert driver.notes == []
    await offered(gateway, THIRD)
    assert gateway.client.address_of(THIRD) is None
    (told,) = driver.notes
    assert told.event == "files.few"
    assert dict(told.fields)["limit"] == 120


async def test_members_and_whom_the_leader_gave_up_take_no_place_of_a_candidate(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    monkeypatch.setattr(module, "CANDIDATES_MAX", 1)
    gateway = driver.gateway
    await offered(gateway, PEER)
    driver.known[PEER] = object()
    gateway.use_members((member(ME), member(PEER)))
    await offered(gateway, OTHER)
    assert gateway.client.address_of(OTHER) is not None
    assert gateway.client.address_of(PEER) is not None
    await offered(gateway, THIRD)
    assert gateway.client.address_of(OTHER) is None
    assert gateway.client.address_of(THIRD) is not None


async def test_who_left_can_be_reached_a_while_longer_then_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    """A relay that has slept asks what it missed, and the answer must find it."""
    gateway = driver.gateway
    timers: list[tuple[Any, ...]] = []
    loop = asyncio.get_running_loop()
    handle = SimpleNamespace(cancel=lambda: None)
    monkeypatch.setattr(loop, "call_later", lambda *timer: timers.append(timer) or handle)
    gateway.use_members((member(ME), member(PEER), member(OTHER)))
    gateway.use_members((member(ME),))
    monkeypatch.undo()
    assert sorted(timer[2] for timer in timers) == [PEER, OTHER]
    assert [timer[0] for timer in timers] == [900.0, 900.0]
    gateway.use_members((member(ME), member(OTHER)))  # It came back in time.
    assert gateway.client.address_of(PEER) is not None
    for _, forget, node in timers:
        forget(node)
    assert gateway.client.address_of(PEER) is None
    assert gateway.client.address_of(OTHER) is not None
    assert gateway.client.address_of(ME) is None
    assert gateway.book.name_of(PEER) == "calm-crane", "logs still speak of it"


async def test_the_first_that_left_make_room_for_others_that_leave(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    monkeypatch.setattr(module, "GONE_MAX", 2)
    gateway = driver.gateway
    for left in (PEER, OTHER, THIRD):
        gateway.use_members((member(ME), member(left)))
    gateway.use_members((member(ME),))
    addresses = [gateway.client.address_of(node) for node in (PEER, OTHER, THIRD)]
    assert [address is not None for address in addresses] == [False, True, True]


@pytest.mark.parametrize("start_iteration", [0, 40])
async def test_who_asks_for_the_runs_first_state_gets_its_own_stages(
    start_iteration: int, driver: FakeDriver
) -> None:
    """Any later iteration is that of the node's own stage."""
    gateway = driver.gateway
    driver.state = "own stage"
    initial = cast("InitialStates", FakeInitial(start_iteration, "first state"))
    gateway._answers = replace(gateway._answers, initial=initial)
    for iteration, answer in ((0, "first state"), (1, "own stage")):
        request = StateRequest(
            run_id=RUN,
            sender=PEER,
            stage_index=2,
            iteration=start_iteration + iteration,
            with_optimizer=True,
        )
        assert await gateway.state(request) == answer


async def test_if_the_runs_first_state_can_not_be_given_this_node_says_so(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    """Nobody can begin, and volunteers ask every other second: it is told once a minute."""
    gateway = driver.gateway
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    initial = FakeInitial(40, "it is gone")

    async def told(stage_index: int) -> list[object]:
        """Asks for the state; returns what this node said about it."""
        driver.notes.clear()
        request = StateRequest(
            run_id=RUN, sender=PEER, stage_index=stage_index, iteration=40, with_optimizer=True
        )
        assert isinstance(await gateway.state(request), str) == (initial.answer == "it is gone")
        return [(note.event, *dict(note.fields).values()) for note in driver.notes]

    answers = gateway._answers
    gateway._answers = replace(answers, initial=cast("InitialStates", initial))
    assert await told(1) == [("start.failed", 1, "it is gone")]
    assert await told(2) == await told(1) == []
    now_s += 61
    assert await told(2) == [("start.failed", 2, "it is gone")]
    now_s += 61
    initial.answer = StateBlob(manifest="{}", read=read_nothing, release=lambda: None)
    assert await told(1) == []


async def test_a_state_is_given_with_what_releases_it_or_refused(driver: FakeDriver) -> None:
    gateway = driver.gateway
    request = StateRequest(run_id=RUN, sender=PEER, stage_index=1, iteration=3, with_optimizer=True)
    assert await gateway.state(request) == "no state"
    released: list[int] = []
    driver.state = ServedState(3, "{}", memoryview(b"x"), lambda: released.append(1))
    blob = await gateway.state(request)
    assert isinstance(blob, StateBlob)
    assert await blob.read(0, 1) == b"x"
    blob.release()
    assert released == [1]


async def test_a_state_of_an_unknown_donor_is_an_error(driver: FakeDriver) -> None:
    gateway = driver.gateway
    with pytest.raises(DecodError, match="no address"):
        await gateway.fetch_state(FetchState((PEER,), 1, 1), cast("StateSink", None))
