"""Who dials whom: members that nobody can dial, as the daemon treats them."""

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from decod.daemon.gateway import Gateway
from decod.ids import NodeId
from decod.net.net_limits import LIMITS
from decod.net.rate_caps import UNLIMITED
from decod.net.reverse_keeper import ReverseKeeper
from decod.protocol.core.messages import CanTake, Join
from decod.protocol.core.messages.membership_messages import Follow
from decod.protocol.core.view import Member, Reach
from tests.unit.daemon.test_gateway import (
    ME,
    OTHER,
    PEER,
    THIRD,
    FakeDriver,
    Iteration,
    attached,
    member,
    offer,
    said,
)

SERVER = ("127.0.0.1", 7700)


class FakeKeeper(ReverseKeeper):
    """Is told who holds a call open."""

    def __init__(self) -> None:
        super().__init__(LIMITS, UNLIMITED, lambda _: True)
        self.held: set[NodeId] = set()
        self.ended: list[NodeId] = []

    def holds(self, node: NodeId) -> bool:
        return node in self.held

    def cut(self, node: NodeId) -> None:
        self.ended.append(node)


@pytest.fixture(name="driver")
def _driver() -> AbstractAsyncContextManager[FakeDriver]:
    return attached()


def begin(gateway: Gateway, reach: Reach = Reach.PASSES_ON) -> FakeKeeper:
    keeper = FakeKeeper()
    gateway.dialling.listen(keeper, SERVER)
    gateway.dialling.use(reach)
    return keeper


def address_of(gateway: Gateway, node: NodeId) -> str:
    return gateway.client.address_of(node) or ""


def hidden(node: NodeId) -> Member:
    return replace(member(node), reach=Reach.OUTBOUND)


def passing(node: NodeId) -> Member:
    return replace(member(node), reach=Reach.PASSES_ON)


async def test_a_candidate_that_nobody_can_dial_is_heard_once_it_holds_a_call_open(
    driver: FakeDriver,
) -> None:
    hidden_offer: Join = replace(offer(), reach=Reach.OUTBOUND)
    gateway = driver.gateway
    keeper = begin(gateway)
    gateway.deliver(said(hidden_offer))
    assert not driver.events
    assert not gateway._dialling, "nobody is dialled"
    keeper.held.add(PEER)
    gateway.deliver(said(hidden_offer))
    assert len(driver.events) == 1
    assert address_of(gateway, PEER).startswith("unix:")


async def test_a_candidate_that_nobody_can_dial_may_follow_a_member(driver: FakeDriver) -> None:
    gateway = driver.gateway
    begin(gateway)
    gateway.deliver(said(Follow(1, 1, "h:1", Reach.OUTBOUND)))
    assert len(driver.events) == 1
    assert address_of(gateway, PEER).startswith("unix:")


async def test_a_member_is_dialled_from_when_it_can_be(driver: FakeDriver) -> None:
    gateway = driver.gateway
    begin(gateway)
    gateway.use_members((hidden(PEER),))
    first = address_of(gateway, PEER)
    gateway.use_members((hidden(PEER), member(OTHER)))
    assert address_of(gateway, PEER) == first, "its connections stay"
    gateway.use_members((member(PEER), member(OTHER)))
    assert address_of(gateway, PEER) == "127.0.0.1:9"


@pytest.mark.parametrize("reach", [Reach.OUTBOUND, Reach.DIALLED])
async def test_calls_are_kept_to_hosts_in_between_and_to_those_that_are_dealt_with(
    reach: Reach, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    gateway = driver.gateway
    driver.facts.leading = None
    begin(gateway, reach)
    met: list[NodeId] = []
    holder = gateway.dialling._holder

    async def keep(node: NodeId, peer: Any) -> None:
        met.append(node)

    monkeypatch.setattr(holder, "_keep", keep)
    gateway.use_members((passing(OTHER), member(PEER), hidden(THIRD)))
    kept = {OTHER} if reach is Reach.OUTBOUND else set()
    assert set(holder._peers) == kept
    gateway.deliver(said(CanTake(Iteration(1, 1)), PEER))
    gateway.deliver(said(CanTake(Iteration(1, 1)), THIRD))
    kept |= {PEER} if reach is Reach.OUTBOUND else set()
    assert set(holder._peers) == kept, "nobody can dial the third"


async def test_a_candidate_asks_the_leader_for_connections(driver: FakeDriver) -> None:
    gateway = driver.gateway
    driver.facts.leading = None
    begin(gateway, Reach.OUTBOUND)
    driver.facts.view.leader = OTHER
    gateway.client.set_address(OTHER, "127.0.0.1:9")
    assert gateway.dialling._hosts_between(THIRD) == [(OTHER, "127.0.0.1:9")]
    gateway.use_members((passing(PEER), passing(ME)))
    assert gateway.dialling._hosts_between(THIRD) == [(PEER, "127.0.0.1:9")], "not itself"


async def test_a_banned_member_loses_its_calls(driver: FakeDriver) -> None:
    gateway = driver.gateway
    keeper = begin(gateway)
    gateway.use_members((hidden(PEER),))
    gateway.dialling.cut(PEER)
    assert keeper.ended == [PEER]
    assert address_of(gateway, PEER) == ""


async def test_the_status_says_what_is_open(driver: FakeDriver) -> None:
    gateway = driver.gateway
    nothing = {"calls_kept": 0, "calls_taken": 0, "passed_bytes": 0}
    assert gateway.dialling.describe() == nothing
    begin(gateway)
    assert gateway.dialling.reach is Reach.PASSES_ON
