"""Who may say which message, on real sockets: by itself, or by way of a third member."""

import logging
from dataclasses import replace

import pytest

from decod.clocks import wall_clock
from decod.ids import RunId
from decod.journal.logs import LogContext, TextFormatter
from decod.membership.papers import Membership
from decod.membership.statements import WayProofs
from decod.net import channel
from decod.protocol.core import messages as m
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.v1 import control_pb2
from tests.support.members import data_node, host_key, volunteer
from tests.support.messages import control_messages
from tests.support.peers import BOB, OURS, RUN, Pair, open_to, with_pair

MALLORY, VICTOR, DIANA = volunteer("mallory"), volunteer("victor"), data_node("diana")

OF_DATA_NODES = [each for each in control_messages() if isinstance(each, m.OfDataNodes)]


async def deliver(both: Pair, by: Membership, message: m.Message, way: Way | None = None) -> bool:
    """Send a message as some member; return whether it was taken."""
    envelope = codec.encode(RUN, by.node_id, 1, 1, message, way)
    request = control_pb2.DeliverRequest(envelopes=[envelope])
    async with open_to(both.address, by=by) as opened:
        call = opened.unary_unary(f"/{channel.CONTROL_SERVICE}/Deliver")
        answer = await call(request.SerializeToString(), metadata=OURS)
    return not control_pb2.DeliverResponse.FromString(answer).num_dropped


def way_of(origin: Membership, message: m.Message, *, run_id: RunId = RUN) -> Way:
    """Return a way to Bob with the origin's proof."""
    way = Way(origin.node_id, BOB, 1, 3)
    return WayProofs(origin, run_id, wall_clock).proven(message, way)


@pytest.mark.parametrize("message", OF_DATA_NODES, ids=lambda each: type(each).__name__)
def test_a_volunteer_does_not_say_what_only_data_nodes_do(message: m.Message) -> None:
    async def test(both: Pair) -> None:
        assert not await deliver(both, MALLORY, message)
        assert both.server.counters.totals() == {"message.forged": 1}
        assert await deliver(both, DIANA, message)

    with_pair(test)


def test_the_terminal_names_the_volunteer(caplog: pytest.LogCaptureFixture) -> None:
    message = next(each for each in OF_DATA_NODES if isinstance(each, m.Assign))

    async def test(both: Pair) -> None:
        await deliver(both, MALLORY, message)

    with caplog.at_level(logging.WARNING):
        with_pair(test)
    (line,) = [each for each in caplog.records if getattr(each, "event", "") == "peer.faulty"]
    known = TextFormatter(LogContext(name_of={MALLORY.node_id: "merry-marlin"}.get))
    end = f"({MALLORY.node_id[:8]}) at 127.0.0.1: Assign of a volunteer (message.forged)"
    assert known.format(line).endswith(f"merry-marlin {end}")


def test_a_member_passes_on_what_another_has_said() -> None:
    async def test(both: Pair) -> None:
        word, decision = m.Ping(1), OF_DATA_NODES[0]
        assert await deliver(both, MALLORY, word, way_of(VICTOR, word))
        assert await deliver(both, MALLORY, decision, way_of(DIANA, decision)), "it is hers"
        assert both.server.counters.totals() == {}

    with_pair(test)


WORD = m.Ping(1)

FALSE = {
    "without a proof": replace(way_of(VICTOR, WORD), proof=b""),
    "with noise for a proof": replace(way_of(VICTOR, WORD), proof=bytes(200)),
    "with its own proof": replace(way_of(MALLORY, WORD), origin=VICTOR.node_id),
    "of another message": way_of(VICTOR, m.Ping(2)),
    "of another run": way_of(VICTOR, WORD, run_id=RunId("x" * 26)),
    "of an earlier ticket": replace(way_of(VICTOR, WORD), ticket=4),
    "for another goal": replace(
        WayProofs(VICTOR, RUN, wall_clock).proven(WORD, Way(VICTOR.node_id, DIANA.node_id, 1, 3)),
        goal=BOB,
    ),
    "of a root of its own": way_of(volunteer("victor", host_key("another root")), WORD),
}


@pytest.mark.parametrize("name", [*FALSE])
def test_a_member_does_not_speak_for_another(name: str) -> None:
    async def test(both: Pair) -> None:
        assert not await deliver(both, MALLORY, WORD, FALSE[name])
        assert both.server.counters.totals() == {"message.forged": 1}

    with_pair(test)


def test_a_volunteer_does_not_say_it_by_way_of_another_either() -> None:
    async def test(both: Pair) -> None:
        message = OF_DATA_NODES[0]
        assert not await deliver(both, DIANA, message, way_of(VICTOR, message))

    with_pair(test)
