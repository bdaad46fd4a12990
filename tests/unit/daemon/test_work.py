"""Work that is counted at data nodes, and receipts that relays ask for over real sockets."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.daemon.run_facts import RunPart
from decod.daemon.work import WorkLedger
from decod.driver.driver import CoreHandle
from decod.errors import NetworkError
from decod.ids import NodeId
from decod.membership.papers import Membership
from decod.membership.receipts import ReceiptAnswer, load_receipts
from decod.membership.statements import new_charter
from decod.net.ask import ask_receipt
from decod.net.server import DataServices, PeerServer
from decod.protocol.core.effects import CountWork, StopReason
from decod.protocol.core.view import Member, Role
from tests.support.members import new_data_node, new_volunteer, registrar_of
from tests.support.peers import Host
from tests.unit.daemon.nodes import RUN_ID, make_manifest
from tests.waiting import wait_until

MANIFEST = make_manifest()
TOKENS = MANIFEST.run.batch.tokens_per_microbatch


class Bench:
    """A relay and two data nodes, which count; `reach` is how the relay asks."""

    def __init__(self, folder: Path) -> None:
        self.events: list[str] = []
        self.folder = folder
        self.members = {name: new_data_node(name) for name in ("alice", "bob")}
        self.relay = new_volunteer("relay")
        self.relay.folder = folder
        self.data = {m.node_id: self.ledger(m) for m in self.members.values()}
        self.alice, self.bob = (self.data[m.node_id] for m in self.members.values())
        self.num_asked = 0
        self.gone: set[NodeId] = set()

    def ledger(self, member: Membership) -> WorkLedger:
        part = RunPart(
            membership=member,
            run_id=RUN_ID,
            manifest=MANIFEST,
            charter=new_charter(self.members["alice"], RUN_ID, MANIFEST.to_json()),
            leader=self.members["alice"].node_id,
        )
        shown = [self._member(m, Role.DATA) for m in self.members.values()]
        view = SimpleNamespace(
            data_nodes=shown, members=(*shown, self._member(self.relay, Role.RELAY))
        )
        core = SimpleNamespace(facts=SimpleNamespace(view=view))
        return WorkLedger(part, cast("CoreHandle", core), self._ask, self._note)

    def _member(self, member: Membership, role: Role) -> Member:
        return cast("Member", SimpleNamespace(node_id=member.node_id, address="", role=role))

    async def _ask(self, issuer: Member) -> ReceiptAnswer:
        self.num_asked += 1
        if issuer.node_id in self.gone:
            raise NetworkError("no answer", why="it is gone", fix="nothing")
        return self.data[issuer.node_id].receipt_of(self.relay.node_id)

    def _note(self, event: str, **_: Any) -> None:
        self.events.append(event)

    def commit(self, relay: WorkLedger, iteration: int, *, alices: int, bobs: int) -> None:
        """Count an iteration everywhere."""
        own = self.relay.node_id
        for ledger, number in ((self.alice, alices), (self.bob, bobs)):
            ledger.count(CountWork(iteration, ((ledger._own, number), (own, number))))
        relay.count(CountWork(iteration, ((own, alices + bobs),)))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "membership")


async def test_a_relays_work_is_vouched_for_by_all_data_nodes_and_kept(bench: Bench) -> None:
    relay = bench.ledger(bench.relay)
    await relay.collect()
    assert bench.num_asked == 0, "nothing was done yet"
    bench.commit(relay, 1, alices=2, bobs=1)
    bench.commit(relay, 2, alices=2, bobs=0)
    said = relay.describe()
    assert said == {"num_microbatches": 5, "num_tokens": 5 * TOKENS, "num_vouched": 0}
    await relay.collect()
    assert relay.describe() == said | {"num_vouched": 5}
    await relay.collect()
    assert bench.num_asked == 2, "there is nothing new to ask for"
    kept = load_receipts(bench.folder, bench.relay.root).receipts.rows()
    assert sorted(row["num_microbatches"] for row in kept) == [1, 4]
    assert {row["last_iteration"] for row in kept} == {1, 2}


async def test_what_was_not_asked_for_before_a_crash_is_asked_for_after_it(bench: Bench) -> None:
    first = bench.ledger(bench.relay)
    bench.commit(first, 1, alices=3, bobs=3)
    await first.collect()
    bench.commit(first, 2, alices=4, bobs=4)
    second = bench.ledger(bench.relay)
    assert second.describe()["num_vouched"] == 6, "from disk"
    bench.commit(second, 3, alices=1, bobs=0)
    await second.collect()
    assert second.describe()["num_vouched"] == 15
    assert second.num_unkept == 0


async def test_counts_of_a_data_node_that_started_again_add_up(bench: Bench) -> None:
    relay = bench.ledger(bench.relay)
    bench.commit(relay, 1, alices=3, bobs=0)
    await relay.collect()
    alice = bench.members["alice"]
    bench.alice._since_ms -= 1000  # The clock has gone on since.
    bench.alice = bench.data[alice.node_id] = bench.ledger(alice)
    bench.commit(relay, 2, alices=2, bobs=0)
    await relay.collect()
    assert relay.describe()["num_vouched"] == 5


async def test_a_relay_that_leaves_stays_until_all_its_work_is_vouched_for(bench: Bench) -> None:
    """A data node may hear of the last commit later than the relay that it sets free."""
    relay, own = bench.ledger(bench.relay), bench.relay.node_id
    bench.commit(relay, 1, alices=1, bobs=1)
    relay.count(CountWork(2, ((own, 2),)))
    bench.alice.count(CountWork(2, ((own, 2),)))
    settling = asyncio.create_task(relay.settle(StopReason.DRAINED))
    await wait_until(lambda: relay.describe()["num_vouched"] == 4)
    assert not settling.done(), "bob has not counted iteration 2"
    bench.bob.count(CountWork(2, ()))
    await settling
    assert relay.num_unkept == 0


async def test_a_relay_that_leaves_gets_its_last_iteration_vouched_for_too(bench: Bench) -> None:
    """It has left before it could be told that the iteration counts."""
    relay = bench.ledger(bench.relay)
    bench.commit(relay, 1, alices=2, bobs=1)
    await relay.collect()
    assert not relay.num_unkept
    for ledger, number in ((bench.alice, 2), (bench.bob, 2)):
        ledger.count(CountWork(2, ((bench.relay.node_id, number),)))
    await relay.settle(StopReason.DRAINED)
    assert relay.describe()["num_vouched"] == 7


async def test_nobody_stays_for_long_for_a_data_node_that_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decod.daemon.work.SETTLE_S", 0.01)
    relay = bench.ledger(bench.relay)
    bench.commit(relay, 1, alices=2, bobs=1)
    bench.gone.add(bench.members["bob"].node_id)
    await relay.settle(StopReason.FINISHED)
    assert relay.describe()["num_vouched"] == 2
    assert relay.num_unkept == 3, "whose these are is not known without bob"
    await bench.bob.settle(StopReason.FINISHED)


async def test_a_data_node_stays_until_its_relays_have_asked(bench: Bench) -> None:
    relay = bench.ledger(bench.relay)
    bench.commit(relay, 1, alices=2, bobs=1)
    settling = asyncio.create_task(bench.alice.settle(StopReason.FINISHED))
    await relay.settle(StopReason.FINISHED)
    await settling


async def test_a_data_nodes_own_work_is_its_own_word(bench: Bench) -> None:
    relay = bench.ledger(bench.relay)
    bench.commit(relay, 1, alices=2, bobs=1)
    await bench.alice.collect()
    said = bench.alice.describe()
    assert (said["num_microbatches"], said["num_vouched"]) == (2, 0)


def for_another(bench: Bench) -> ReceiptAnswer:
    bench.alice.count(CountWork(1, ((NodeId("z" * 52), 9),)))
    return bench.alice.receipt_of(NodeId("z" * 52))


def by_another(bench: Bench) -> ReceiptAnswer:
    return bench.bob.receipt_of(bench.relay.node_id)


@pytest.mark.parametrize("answer", [for_another, by_another])
async def test_a_receipt_that_is_not_the_relays_own_is_not_taken(
    bench: Bench, answer: Callable[[Bench], ReceiptAnswer]
) -> None:
    relay = bench.ledger(bench.relay)
    bench.commit(relay, 1, alices=2, bobs=1)
    wrong = answer(bench)
    bench.alice.receipt_of = lambda _: wrong  # type: ignore[method-assign]
    await relay.collect()
    assert relay.describe()["num_vouched"] == 1, "bob's word"
    assert relay.num_unkept == 3


async def test_receipts_that_can_not_be_kept_are_told(bench: Bench) -> None:
    relay = bench.ledger(bench.relay)
    bench.folder.write_text("in the way")
    bench.commit(relay, 1, alices=2, bobs=1)
    await relay.collect()
    assert bench.events == ["receipts.unkept"]
    assert relay.describe()["num_vouched"] == 3


def test_what_waits_for_a_receipt_is_bounded(bench: Bench) -> None:
    relay = bench.ledger(bench.relay)
    for iteration in range(20_000):
        relay.count(CountWork(iteration, ((bench.relay.node_id, 1),)))
    assert relay.num_unkept == 20_000
    assert len(relay._unkept) <= 10_000


async def test_members_ask_over_tls_and_get_nobody_elses_receipt(bench: Bench) -> None:
    bench.commit(bench.ledger(bench.relay), 4, alices=7, bobs=0)
    alice, stranger = bench.members["alice"], new_volunteer("stranger")

    async def read(_: object) -> str:
        return "no block"

    services = DataServices(registrar_of(alice), read, bench.alice.receipt_of)
    server = PeerServer(alice, RUN_ID, Host(), services=services)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        answers = [
            await ask_receipt(address, alice.node_id, RUN_ID, asker, timeout_s=10.0)
            for asker in (bench.relay, stranger)
        ]
    finally:
        await server.stop(0)
    assert answers[0] == ReceiptAnswer(answers[0].receipt, 4)
    assert answers[0].receipt is not None
    assert bench.relay.node_id.encode() in answers[0].receipt.body
    assert answers[1] == ReceiptAnswer(None, 4)
