"""A candidate's way in."""

from decod.ids import NodeId
from decod.protocol.core.context import Context, Identity
from decod.protocol.core.effects import FetchState, Send
from decod.protocol.core.events import StateFetchFailed
from decod.protocol.core.jobs import Built
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.membership_messages import Assign, Join, Prepared
from decod.protocol.core.view import Role, View
from decod.protocol.leadership.joining import Joining
from tests.unit.protocol.cast import D0, ITERATION, MANIFEST, R1A, RUN

IDENTITY = Identity(node_id=R1A, address="r1a:7700", role=Role.RELAY, capacity=2, compute_s=1.0)
OFFER = Join("r1a:7700", Role.RELAY, 2, None, MANIFEST, incarnation=7)
ASSIGN = Assign(1, -1)


def machine(*, fetches_initial: bool = False) -> tuple[Joining, Context]:
    nobody = View(version=0, leader=NodeId(D0), term=1, num_stages=2, members=())
    links = LinkTable(activation_size_bytes=0, compute_s=1.0)
    context = Context(
        node_id=R1A,
        run=RUN,
        links=links,
        view=nobody,
        iteration=ITERATION,
        fetches_initial=fetches_initial,
    )
    return Joining(context, IDENTITY, OFFER), context


def test_given_weights_are_fetched_from_the_leader_before_the_node_is_ready() -> None:
    joining, _ = machine(fetches_initial=True)
    joining.assigned(ASSIGN)
    offer = Send(D0, OFFER)
    fetch = FetchState((D0,), 1, 0)
    assert joining.built(1.0, Built("seed"), initial=False) == [offer, fetch]
    assert joining.knock(3.0) == [offer], "one fetch at a time"
    joining.fetch_failed(3.0, StateFetchFailed(1, 0, "busy"))
    assert joining.knock(5.0) == [offer, fetch]
    assert joining.built(6.0, Built("given"), initial=True) == [Send(D0, Prepared(1, "given"))]
    assert joining.knock(8.0) == [Send(D0, Prepared(1, "given"))]
