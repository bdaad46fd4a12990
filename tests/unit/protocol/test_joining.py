"""A candidate's way in."""

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context, Identity
from decod.protocol.core.effects import FetchState, Send, Stop, StopReason
from decod.protocol.core.events import Received, StateFetchFailed
from decod.protocol.core.jobs import Built
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages import (
    Assign,
    Join,
    Ping,
    Prepared,
)
from decod.protocol.core.messages.membership_messages import Follow, Followed
from decod.protocol.core.view import Role, View
from decod.protocol.leadership.joining import Joining
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.stage_state import StageState
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    MANIFEST,
    R1A,
    R1B,
    RUN,
    STRANGER,
    not_called,
    view_of,
)

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


def test_a_member_ignores_assignments_and_stops_knocking() -> None:
    joining, context = machine()
    joining.knock(0.0)
    joining.entered()
    assert joining.deadline_s is None
    joining.knock(1.0)
    context.adopt(view_of("d0", "r1a"))
    assert joining.knock(2.0) == []
    assert joining.deadline_s is None
    assert joining.assigned(ASSIGN) == []


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


def test_given_weights_are_not_waited_for_once_the_run_has_begun() -> None:
    """Who had them may be gone by then; whoever enters loads a later state from members."""
    begun = Assign(1, -1, begun=True)
    joining, _ = machine(fetches_initial=True)
    joining.assigned(begun)
    assert joining.built(1.0, Built("seed"), initial=False) == [Send(D0, Prepared(1, "seed"))]
    waiting, _ = machine(fetches_initial=True)
    waiting.assigned(ASSIGN)
    waiting.built(1.0, Built("seed"), initial=False)
    assert waiting.assigned(begun) == [Send(D0, Prepared(1, "seed"))], "it begins meanwhile"
    assert waiting.knock(3.0) == [Send(D0, Prepared(1, "seed"))]


def test_a_candidate_gives_up_when_the_leader_is_silent_for_long() -> None:
    joining, _ = machine()
    joining.knock(10.0)
    joining.heard(20.0, Received(D0, Ping(1)))
    joining.heard(70.0, Received(STRANGER, Ping(1)))
    assert joining.knock(80.0) == [Send(D0, OFFER)]
    stop = Stop(StopReason.LEADER_LOST, "the leader has not answered for 61 s")
    assert joining.knock(81.0) == [stop]


def test_a_candidate_is_followed_by_nobody() -> None:
    """Who asks means the member that it was before it started again."""
    joining, context = machine()
    replay_source = ReplaySource(context, StageState(context, not_called))
    wish = Received(R1B, Follow(3, 1, "r1b:7700"))
    answer = Followed(3, 1, Iteration(0, 0), "it is no member")
    assert joining.exchanged(1.0, wish, replay_source) == [Send(R1B, answer)]
