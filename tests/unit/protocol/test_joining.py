"""A candidate's way in."""

from dataclasses import replace

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context, Identity
from decod.protocol.core.effects import FetchState, Note, Send, Stop, StopReason
from decod.protocol.core.era import Kept
from decod.protocol.core.events import LeaderFound, Received, StateFetchFailed
from decod.protocol.core.jobs import Build, Built
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages import (
    Assign,
    CatchUp,
    FlowCost,
    Heartbeat,
    Join,
    Message,
    Ping,
    Prepared,
    Refuse,
)
from decod.protocol.core.messages.decision_messages import LeaderIs
from decod.protocol.core.messages.membership_messages import Follow, Followed
from decod.protocol.core.view import Opening, Role, View
from decod.protocol.leadership.joining import Joining
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.stage_state import StageState
from tests.unit.protocol.cast import (
    CONFIG,
    D0,
    D1,
    ITERATION,
    MANIFEST,
    R1A,
    R1B,
    RUN,
    STRANGER,
    jobs_of,
    not_called,
    notes_of,
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


def test_an_offer_is_repeated_until_it_is_answered() -> None:
    joining, _ = machine()
    assert joining.deadline_s is None
    assert joining.knock(0.0) == [Send(D0, OFFER)]
    assert joining.deadline_s == 2.0
    assert joining.knock(2.0) == [Send(D0, OFFER)]
    assert joining.deadline_s == 4.0


def test_a_candidate_builds_its_stage_and_says_that_it_stands_ready() -> None:
    joining, _ = machine()
    joining.knock(0.0)
    effects = joining.assigned(ASSIGN)
    assert effects[0] == Note("stage.assigned", (("stage", 1), ("reason", "")))
    assert jobs_of(effects) == [Build(1)]
    assert joining.knock(2.0) == []
    assert joining.built(3.0, Built("h"), initial=False) == [Send(D0, Prepared(1, "h"))]
    assert joining.deadline_s == 5.0
    assert joining.knock(5.0) == [Send(D0, Prepared(1, "h"))]


def test_what_is_found_on_the_disk_after_the_first_offer_is_told_too() -> None:
    """The leader may be waiting for that very state, and looking through a disk takes a while."""
    joining, context = machine()
    joining.knock(0.0)
    joining.assigned(ASSIGN)
    context.kept[1, 20] = "20"
    offer = Send(D0, replace(OFFER, kept=(Kept(1, 20, "20"),)))
    assert joining.knock(2.0) == [offer]
    assert joining.built(3.0, Built("h"), initial=False) == [offer, Send(D0, Prepared(1, "h"))]


def test_a_candidate_is_patient_while_it_asks_nothing_and_while_it_is_answered() -> None:
    joining, _ = machine()
    joining.knock(0.0)
    joining.assigned(ASSIGN)
    assert joining.knock(500.0) == [], "a large stage takes its time"
    joining.built(900.0, Built("h"), initial=False)
    joining.heard(950.0, Received(D0, Ping(1)))
    assert joining.knock(955.0) == [Send(D0, Prepared(1, "h"))]
    assert joining.knock(1005.0) == [Send(D0, OFFER), Send(D0, Prepared(1, "h"))], "forgotten?"
    (stop,) = joining.knock(1011.0)
    assert isinstance(stop, Stop)
    assert stop.reason is StopReason.LEADER_LOST


def test_who_hears_the_leader_only_as_its_donor_offers_itself_again() -> None:
    """The leader may have forgotten it, and goes on sending it averages."""
    joining, _ = machine()
    joining.knock(0.0)
    joining.assigned(ASSIGN)
    ready = Send(D0, Prepared(1, "h"))
    assert joining.built(3.0, Built("h"), initial=False) == [ready]
    for now_s in (4.0, 6.0, 8.0):
        joining.heard(now_s, Received(D0, Followed(1, 1, ITERATION)))
    assert joining.knock(9.0) == [Send(D0, OFFER), ready]
    joining.heard(9.1, Received(D0, ASSIGN))
    assert joining.knock(11.0) == [ready]


def test_a_repeated_assignment_builds_nothing_again_another_one_does() -> None:
    joining, _ = machine()
    joining.assigned(ASSIGN)
    joining.built(1.0, Built("h"), initial=False)
    assert joining.assigned(ASSIGN) == []
    assert jobs_of(joining.assigned(Assign(2, -1))) == [Build(2)]
    assert joining.knock(9.0) == []


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


def test_another_stage_needs_its_own_given_state() -> None:
    joining, context = machine(fetches_initial=True)
    context.start_iteration = 40
    joining.assigned(ASSIGN)
    assert joining.built(1.0, Built("seed"), initial=False)[1:] == [FetchState((D0,), 1, 40)]
    joining.built(2.0, Built("given"), initial=True)
    joining.assigned(Assign(2, -1))
    assert joining.built(3.0, Built("seed"), initial=False)[1:] == [FetchState((D0,), 2, 40)]


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


def test_a_candidate_begins_again_at_the_leader_that_was_elected_meanwhile() -> None:
    joining, context = machine()
    joining.knock(0.0)
    joining.assigned(ASSIGN)
    joining.built(1.0, Built("h"), initial=False)
    assert joining.redirected(2.0, LeaderFound(D1, 2)) == [Send(D1, OFFER)]
    assert context.view.leader == D1
    assert joining.redirected(3.0, LeaderFound(D1, 2)) == [], "it knows"
    assert joining.knock(50.0) == [Send(D1, OFFER)], "the new one has its time too"


def test_who_is_treated_as_a_member_asks_since_when_it_is_one() -> None:
    """What let it in was lost, and so may be the leader that would have said it again."""
    joining, context = machine()
    beat, asked = Received(R1B, Heartbeat(ITERATION)), [Send(R1B, CatchUp(ITERATION))]
    joining.knock(0.0)
    joining.assigned(ASSIGN)
    assert joining.heard(0.0, beat) == joining.heard(2.0, beat) == [], "it has not built anything"
    joining.built(3.0, Built("h"), initial=False)
    assert joining.heard(10.0, beat) == joining.heard(10.9, beat) == [], "it may be on its way"
    assert joining.heard(11.0, Received(R1B, FlowCost(1, D0, 1.0, 1, 1.0))) == asked
    assert joining.heard(11.9, beat) == []
    outsiders: list[Message] = [Ping(1), LeaderIs(2, D1), ASSIGN]
    assert not any(joining.heard(13.0, Received(R1B, message)) for message in outsiders)
    assert joining.heard(13.0, beat) == asked
    context.adopt(view_of("d0", "r1a", "r1b"))
    assert joining.heard(15.0, beat) == []


def test_a_refusal_that_may_pass_is_asked_about_for_a_while() -> None:
    """A data node that comes within seconds of another's death finds that one's place taken."""
    joining, _ = machine()
    full, given_up_s = Refuse("it has them all", again_s=2.0), 3.0 + CONFIG.leader_timeout_s
    joining.knock(0.0)
    assert notes_of(joining.refused(1.0, full)) == ["candidate.refused"]
    joining.heard(2.0, Received(D0, full))
    assert joining.knock(2.0) == [Send(D0, OFFER)], "it asks on"
    assert joining.refused(given_up_s, full) == []
    (stop,) = joining.refused(given_up_s + 1.0, full)
    assert stop == Stop(StopReason.REFUSED, "it has them all")
    joining.assigned(ASSIGN)
    assert notes_of(joining.refused(given_up_s + 2.0, full)) == ["candidate.refused"]


def test_nobody_enters_in_the_place_of_its_earlier_life() -> None:
    """That one may have voted in the iteration; and openings are repeated by whoever knows them."""
    joining, _ = machine()
    joining.assigned(replace(ASSIGN, view_term=2, view_version=7))
    joining.built(1.0, Built("h"), initial=False)

    def lets_in(version: int, term: int) -> bool:
        view = replace(view_of("d0", "r1a", version=version), term=term)
        return joining.admitted(Opening(ITERATION, Iteration(0, 0), view))

    assert not lets_in(7, 2)
    assert not lets_in(9, 1)
    assert lets_in(8, 2)
    assert lets_in(6, 3)


def test_a_candidate_is_followed_by_nobody() -> None:
    """Who asks means the member that it was before it started again."""
    joining, context = machine()
    replay_source = ReplaySource(context, StageState(context, not_called))
    wish = Received(R1B, Follow(3, 1, "r1b:7700"))
    answer = Followed(3, 1, Iteration(0, 0), "it is no member")
    assert joining.exchanged(1.0, wish, replay_source) == [Send(R1B, answer)]
