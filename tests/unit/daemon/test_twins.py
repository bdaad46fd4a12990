"""Two hosts with one identity are told from one host that was started again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from decod.daemon import twins as module
from decod.daemon.gateway import Gateway, PeerAnswers
from decod.daemon.open_files import FileLimit
from decod.daemon.peer.peer_gateway import PeerGateway
from decod.daemon.reachability import why_unreached
from decod.daemon.run_facts import TensorSizes
from decod.daemon.twins import Twins
from decod.driver.driver import NodeDriver
from decod.errors import RejectedError
from decod.membership.papers import Membership
from decod.net.ask import Found, HelloInfo, HelloRequest, hello
from decod.net.rate_caps import UNLIMITED
from decod.net.server import PeerServer
from decod.protocol.core.messages import Join
from tests.support.members import new_data_node
from tests.support.peers import ALICE, BOB, MEMBERS, RUN, Host
from tests.unit.daemon.test_gateway import FakeDriver, find_nothing, member, offer, said
from tests.waiting import wait_until

NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is about to end is given no time for that."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)


class Started(Host):
    """Bob's daemon, from one start on."""

    def __init__(self, by: Membership | None = None) -> None:
        super().__init__()
        self.membership = by or new_data_node("bob")
        self.num_answers: float = float("inf")
        """How often it still answers."""
        self.address = ""

    @property
    def start(self) -> int:
        return self.membership.host.start

    @property
    def told(self) -> list[str]:
        """What it was told of other hosts with its identity."""
        return [each.twin_address for each in self.hellos if each.twin_address]

    def hello(self, request: HelloRequest) -> HelloInfo | None:
        info = super().hello(request)
        assert info is not None
        self.num_answers -= 1
        return replace(info, node_id=self.membership.node_id) if self.num_answers >= 0 else None


@dataclass
class Scene:
    """Alice, who leads, and starts of Bob's daemon."""

    stack: AsyncExitStack
    gateway: Gateway
    driver: FakeDriver
    address: str = ""
    servers: dict[str, PeerServer] = field(default_factory=dict)

    async def start(self, bob: Started | None = None) -> Started:
        """Starts Bob's daemon at an address of its own."""
        bob = bob or Started()
        server = PeerServer(bob.membership, RUN, bob)
        bob.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        self.servers[bob.address] = server
        self.stack.push_async_callback(server.stop, None)
        return bob

    async def end(self, bob: Started) -> None:
        await self.servers[bob.address].stop(None)

    async def ask(self, bob: Started) -> str:
        """Has a daemon ask whether it can be reached, as each does; returns why not."""
        return await why_unreached(bob.membership, RUN, self.address, bob.address)

    async def refuses(self, bob: Started, *, names: str) -> None:
        """Checks that a daemon is refused, with the address of the other host."""
        with pytest.raises(RejectedError, match=rf"E-REJ-022 another host, at {names}, has this"):
            await self.ask(bob)

    async def offered(self, bob: Started) -> list[Any]:
        """Has a daemon offer itself; returns the offers that have come through to the core."""
        self.driver.events.clear()
        self.gateway.deliver(said(offer(bob.address), BOB))
        await wait_until(lambda: not self.gateway._dialling)
        return [each.message for each in self.driver.events if isinstance(each.message, Join)]

    def notes(self) -> list[tuple[Any, ...]]:
        """Returns what the operator was told of shared identities, with both addresses."""
        notes = [dict(note.fields) for note in self.driver.notes if note.event == "identity.shared"]
        return [(each["peer"], each["known_at"], each["address"]) for each in notes]


@pytest.fixture(name="scene")
@asynccontextmanager
async def _scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        host = Host()
        assert host.info is not None
        scene_address = ""
        answers = PeerAnswers(
            name="alice",
            hello=lambda _: replace(host.info or never(), node_id=ALICE),
            address=lambda: scene_address,
            status=lambda: "{}",
            find_kept=find_nothing,
        )
        sizes = TensorSizes(activation_bytes=1, model_bytes=1)
        gateway = Gateway(
            RUN, MEMBERS[ALICE], sizes=sizes, answers=answers, files=FileLimit(1 << 20)
        )
        stack.push_async_callback(gateway.close)
        driver = FakeDriver()
        gateway.attach(cast("NodeDriver", driver))
        server = PeerServer(MEMBERS[ALICE], RUN, gateway)
        scene_address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        stack.push_async_callback(server.stop, None)
        yield Scene(stack, gateway, driver, scene_address)


def never() -> HelloInfo:
    raise AssertionError


async def test_a_second_host_is_refused_and_all_are_told(scene: Scene) -> None:
    first, second = await scene.start(), await scene.start()
    assert await scene.ask(first) == ""
    assert await scene.offered(first) == [offer(first.address)]
    await scene.refuses(second, names=first.address)
    assert scene.notes() == [(BOB, first.address, second.address)]
    assert first.told == [second.address]
    assert scene.gateway.client.address_of(BOB) == first.address
    # It does not offer itself then. If it did, nobody would hear it.
    assert await scene.offered(second) == []
    assert scene.gateway.client.address_of(BOB) == first.address
    assert len(scene.notes()) == 1, "once a minute is enough"


async def test_a_host_that_only_gets_ready_was_there_first_as_well(scene: Scene) -> None:
    first, second = await scene.start(), await scene.start()
    assert await scene.ask(first) == ""
    await scene.refuses(second, names=first.address)


async def test_of_two_hosts_that_ask_at_once_one_is_let_in(scene: Scene) -> None:
    bobs = await scene.start(), await scene.start()
    answers = await asyncio.gather(*map(scene.ask, bobs), return_exceptions=True)
    assert sorted(map(str, answers))[0] == ""
    assert sum(isinstance(each, RejectedError) for each in answers) == 1


async def test_the_address_of_a_member_is_known_to_a_new_leader(scene: Scene) -> None:
    """The second host may have asked the leader before it, which did not reach the first one."""
    first, second = await scene.start(), await scene.start()
    scene.gateway.use_members((member(BOB, first.address),))
    assert await scene.offered(second) == []
    assert scene.notes() == [(BOB, first.address, second.address)]
    assert await scene.offered(first) == [offer(first.address)]


async def test_one_host_that_is_started_again_elsewhere_is_let_in(scene: Scene) -> None:
    first, second = await scene.start(), await scene.start()
    assert await scene.ask(first) == ""
    assert await scene.offered(first)
    await scene.end(first)
    assert await scene.ask(second) == ""
    assert await scene.offered(second) == [offer(second.address)]
    assert scene.gateway.client.address_of(BOB) == second.address
    assert scene.notes() == []


async def test_an_old_process_that_is_about_to_end_is_no_other_host(scene: Scene) -> None:
    first, second = await scene.start(), await scene.start()
    assert await scene.ask(first) == ""
    first.num_answers = 1
    assert await scene.ask(second) == ""
    assert await scene.offered(second)
    assert scene.notes() == []


async def test_one_host_that_answers_at_two_addresses_is_let_in_at_both(scene: Scene) -> None:
    old, first = await scene.start(), await scene.start()
    second = await scene.start(Started(first.membership))
    for each in (old, first, second, first):
        assert await scene.ask(each) == ""
        assert await scene.offered(each) == [offer(each.address)]
        if each is old:
            await scene.end(old)
    assert scene.notes() == []


async def test_another_node_at_the_old_address_does_not_count(scene: Scene) -> None:
    """Its certificate is not that of the node."""
    stranger, second = await scene.start(Started(new_data_node("carol"))), await scene.start()
    scene.gateway.use_members((member(BOB, stranger.address),))
    assert await scene.ask(second) == ""
    assert await scene.offered(second)
    assert scene.notes() == []


async def test_a_host_that_was_out_of_reach_and_returns_is_the_later_one(scene: Scene) -> None:
    first, second = await scene.start(), await scene.start()
    assert await scene.ask(first) == ""
    first.num_answers = 0
    assert await scene.ask(second) == ""
    first.num_answers = 10
    await scene.refuses(first, names=second.address)


async def test_starts_that_take_turns_are_two_hosts_even_if_neither_is_in_reach(
    scene: Scene,
) -> None:
    """A new start of one host is none that was there before."""
    first, second = Started(), Started()
    first.address, second.address = "127.0.0.1:1", "127.0.0.1:2"
    twins = scene.gateway._twins
    for each in (first, first, second, first):
        assert await twins.twin_of(BOB, each.address, each.start) == ""
    assert await twins.twin_of(BOB, second.address, second.start) == first.address
    assert scene.notes() == [(BOB, first.address, second.address)]
    assert await twins.twin_of(BOB, "127.0.0.1:3", first.start) == "", "it has moved"
    assert await twins.twin_of(BOB, second.address, Started().start) == "", "started again"


async def test_two_hosts_that_say_that_they_are_at_one_address_are_told(scene: Scene) -> None:
    """As behind a router that passes a port on to one of them."""
    first, second = await scene.start(), Started()
    second.address = first.address
    assert await scene.ask(first) == ""
    await scene.refuses(second, names=first.address)


async def test_a_host_with_the_leaders_own_identity_is_told(scene: Scene) -> None:
    clone = await scene.start(Started(new_data_node("alice")))
    await scene.refuses(clone, names=scene.address)
    assert scene.notes() == [(ALICE, scene.address, clone.address)]


async def test_only_the_leader_is_believed_about_this_nodes_own_identity(scene: Scene) -> None:
    request = HelloRequest(sender=BOB, twin_address="h:2")
    await hello(scene.address, request, MEMBERS[BOB])
    assert scene.notes() == []
    scene.driver.facts.view.leader = BOB
    await hello(scene.address, request, MEMBERS[BOB])
    assert scene.notes() == [(ALICE, scene.address, "h:2")]


async def test_nobody_is_dialled_again_where_it_was_not_found_before(scene: Scene) -> None:
    """Or a member could have a node dial whomever it likes, by naming one address after another."""
    victim, bob = await scene.start(Started(new_data_node("carol"))), await scene.start()
    bob.address, own = victim.address, bob.address
    await scene.ask(bob)
    num_hellos = len(victim.hellos)
    bob.address = own
    assert await scene.ask(bob) == ""
    assert len(victim.hellos) == num_hellos


async def test_who_does_not_say_which_start_it_is_is_only_dialled(scene: Scene) -> None:
    """`decod doctor` asks beside a node that runs."""
    first, doctor = await scene.start(), await scene.start()
    assert await scene.ask(first) == ""
    request = HelloRequest(sender=BOB, sender_address=doctor.address)
    assert (await hello(scene.address, request, doctor.membership)).unreached == ""


async def test_a_peer_of_a_collaborative_run_refuses_a_second_host_too(scene: Scene) -> None:
    notes: list[tuple[str, Any]] = []

    def twins(*found: Any) -> Twins:
        own = MEMBERS[ALICE]
        return Twins(own, lambda: "h:1", lambda event, **_: notes.append((event, _)), *found)

    gateway = PeerGateway(
        MEMBERS[ALICE],
        RUN,
        hello=lambda _: None,
        status=lambda: "{}",
        twins=twins,
        pace=UNLIMITED,
    )
    scene.stack.push_async_callback(gateway.close)
    first, second = await scene.start(), await scene.start()
    gateway.use_addresses({BOB: first.address})
    request = HelloRequest(sender=BOB, sender_address=second.address, start=second.start)
    assert await gateway.dial_back(request) == Found(twin_address=first.address)
    assert [event for event, _ in notes] == ["identity.shared"]
    request = replace(request, sender_address=first.address, start=first.start)
    assert await gateway.dial_back(request) == Found()
