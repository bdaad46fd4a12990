"""Links are measured over real gRPC, through a proxy that is as slow as the test wants it to be."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import cast

import pytest

from decod.daemon.gateway import Gateway, PeerAnswers
from decod.daemon.open_files import FileLimit
from decod.daemon.run_facts import TensorSizes
from decod.driver.arena import ArenaAllocator, ArenaRegion
from decod.driver.driver import NodeDriver
from decod.ids import AveragingId, Iteration, NodeId, RunId
from decod.net.server import PeerServer
from decod.planner.cost import transfer_rate
from decod.protocol.core.events import Event, LinkMeasured, TensorSent
from decod.protocol.core.messages import Ping, ReducedPart
from tests.support.members import data_node
from tests.support.proxy import Ends, Proxy
from tests.waiting import wait_until

RUN = RunId("r" * 26)
MEMBERS = {each.node_id: each for each in (data_node("alice"), data_node("bob"))}
ALICE, BOB = MEMBERS
LATENCY_S = 0.04
BANDWIDTH_BYTES_PER_S = 4e6
SIZE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 14


class SlowLink(Proxy):
    """Every byte is late by the latency, and the way to the server has a bandwidth."""

    def carry(self, ends: Ends) -> Iterator[Coroutine[None, None, None]]:
        """Return what takes bytes up, and what gives them on later."""
        for source, target, rate in (
            (ends.near, ends.to, BANDWIDTH_BYTES_PER_S),
            (ends.far, ends.back, 1e12),
        ):
            late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
            yield self._take(source, late, rate)
            yield self._give(late, target)

    async def _take(
        self, source: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]], rate: float
    ) -> None:
        loop = asyncio.get_running_loop()
        free_s = 0.0
        while chunk := await source.read(_CHUNK_BYTES):
            free_s = max(free_s, loop.time()) + len(chunk) / rate
            await late.put((free_s + LATENCY_S, chunk))

    async def _give(
        self, late: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while True:
                due_s, chunk = await late.get()
                turn = asyncio.Event()
                asyncio.get_running_loop().call_at(due_s, turn.set)
                await turn.wait()
                target.write(chunk)
                await target.drain()


class Driver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.facts = SimpleNamespace(leading=None)
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.part_bytes_max = 1 << 30
        self.events: list[Event] = []
        self.rates: list[float] = []
        self.durations_s: list[float] = []

    def post(self, event: Event) -> None:
        self.events.append(event)

    def allocate(self, size_bytes: int) -> ArenaRegion | None:
        return ArenaAllocator(size_bytes).allocate(size_bytes)

    def tensor_arrived(self, *_: object) -> None:
        pass

    def tensor_sent(self, sent: TensorSent) -> None:
        self.durations_s.append(sent.duration_s)
        self.rates.append(
            transfer_rate(
                sent.size_bytes,
                duration_s=sent.duration_s,
                latency_s=LATENCY_S,
                share=sent.share,
            )
        )


async def find_nothing(_: object) -> None:
    """Find no state: this host keeps none."""


def gateway(node_id: NodeId) -> tuple[Gateway, Driver]:
    made = Gateway(
        RUN,
        MEMBERS[node_id],
        sizes=TensorSizes(activation_bytes=64, model_bytes=1000),
        answers=PeerAnswers(
            name="",
            hello=lambda _: None,
            address=lambda: "",
            status=lambda: "{}",
            find_kept=find_nothing,
        ),
        files=FileLimit(1 << 20),
    )
    driver = Driver()
    made.attach(cast("NodeDriver", driver))
    return made, driver


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Gateway, Driver]]:
    """Yields Alice's gateway and driver; Bob is behind a slow link."""
    (alice, driver), (bob, _) = gateway(ALICE), gateway(BOB)
    server = PeerServer(MEMBERS[BOB], RUN, bob)
    link = SlowLink(await server.start("127.0.0.1", 0))
    async with link.serving() as address:
        alice.client.set_address(BOB, address)
        try:
            async with asyncio.timeout(60):
                yield alice, driver
        finally:
            await alice.client.close()
            await bob.client.close()
            await server.stop(None)


def close(value: float) -> object:
    """The machine may be busy with other tests, and TCP has its own mind."""
    return pytest.approx(value, rel=0.4)


def test_a_probe_gives_the_links_latency_and_bandwidth() -> None:
    async def test() -> None:
        async with connected() as (alice, driver):
            probes = [await alice.probe(BOB, 1, SIZE_BYTES) for _ in range(5)]
            found = [probe for probe in probes if probe is not None]
            assert len(found) == 5
            # Other work on this machine can only make a link look slower than it is.
            assert min(probe.latency_s for probe in found) == close(LATENCY_S)
            rates = [probe.bandwidth_bytes_per_s for probe in found]
            assert max(rates) == close(BANDWIDTH_BYTES_PER_S)
            assert driver.rates == [], "a probe is no tensor of the core's"

    asyncio.run(test())


def test_tensors_that_overlap_show_the_whole_links_bandwidth_each() -> None:
    """Two streams at a time get half of it each, which is not what equation (1) asks for."""

    async def test() -> None:
        async with connected() as (alice, driver):
            await alice.probe(BOB, 1, 0)  # Opens the connection.
            for part in range(6):
                message = ReducedPart(AveragingId(Iteration(1, 1), 1), part)
                alice.send_tensor(BOB, 1, message, memoryview(bytes(SIZE_BYTES)), part)
            await wait_until(lambda: len(driver.rates) == 6)
            assert sorted(driver.rates)[3] == close(BANDWIDTH_BYTES_PER_S)
            assert sorted(driver.durations_s)[3] > 1.5 * SIZE_BYTES / BANDWIDTH_BYTES_PER_S

    asyncio.run(test())


def test_latency_is_that_of_small_messages_on_an_idle_link() -> None:
    async def test() -> None:
        async with connected() as (alice, driver):
            for nonce in range(4):
                alice.send(BOB, 1, Ping(nonce))
                await alice.client.flush(timeout_s=10)
            message = ReducedPart(AveragingId(Iteration(1, 1), 1), 0)
            alice.send_tensor(BOB, 1, message, memoryview(bytes(SIZE_BYTES)), 0)
            await wait_until(lambda: alice.client._peers[BOB].link.share.num)
            alice.send(BOB, 1, Ping(4))
            await wait_until(lambda: len(driver.rates) == 1)
            await alice.client.flush(timeout_s=10)
            timed = [event for event in driver.events if isinstance(event, LinkMeasured)]
            assert len(timed) == 3, "neither the one that opens the connection nor the last"
            assert min(event.latency_s or 0.0 for event in timed) == close(LATENCY_S)

    asyncio.run(test())
