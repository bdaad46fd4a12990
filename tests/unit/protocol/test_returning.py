"""How a member comes to the state that an era begins with."""

from dataclasses import dataclass, field, replace

from decod.ids import Iteration, NodeId
from decod.protocol.core.effects import Effect, FetchState, Send, StartJob, Stop
from decod.protocol.core.era import Mark, Origin, Source, StateHolders
from decod.protocol.core.events import JobFinished, StateFetched, StateFetchFailed
from decod.protocol.core.jobs import Built, Load, Mix
from decod.protocol.core.messages.membership_messages import Leave, Suspect
from decod.protocol.core.view import Opening, View
from decod.protocol.state.rollback import Rollback
from decod.protocol.state.stage_state import StageState
from tests.unit.protocol.cast import (
    D0,
    FACTS,
    R1A,
    R1B,
    R2A,
    R2B,
    Heard,
    context_of,
    freed,
    jobs_of,
    notes_of,
    tensor,
    told_end,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r2a", "r2b", "r3a")
MARK = Mark(20, tuple((stage, f"h{stage}") for stage in range(4)))
HOLDERS = (StateHolders(1, (R2A, R2B)), StateHolders(2, (R2A, R2B)))


def opening(
    source: Source, *, lost: int = 1, holders: tuple[StateHolders, ...] = (), view: View = VIEW
) -> Opening:
    origin = Origin(source, (lost,), 5, holders)
    return Opening(Iteration(21, 1, 1), Iteration(20, 0, 1), view, marks=(MARK,), origin=origin)


@dataclass
class Node:
    """A member after iteration 25, on its way."""

    node_id: NodeId = R1A
    fetches_initial: bool = False
    view: View = VIEW
    tensors: int = field(default=0)

    def __post_init__(self) -> None:
        self.context = context_of(self.node_id, self.view)
        self.context.facts = replace(FACTS, initial_from_leader=self.fetches_initial)
        self.stage = StageState(self.context, self.came)
        self.stage.iteration, self.stage.loaded = 25, True
        self.rollback = Heard(Rollback(self.context, self.stage, self.came))
        self.here = False

    def came(self, now_s: float) -> None:
        self.here = True

    def fetched(self, stage: int, iteration: int = 20) -> list[Effect]:
        self.tensors += 1
        event = StateFetched(stage, iteration, f"manifest {stage}", tensor(self.tensors))
        assert self.rollback.takes(event)
        return self.rollback.fetched(event)

    def end(self, effects: list[Effect], parameter_hash: str) -> tuple[bool, list[Effect]]:
        """End the job that was started, well."""
        (start,) = (e for e in effects if isinstance(e, StartJob))
        event = JobFinished(start.job_id, Built(parameter_hash), (), 1.0)
        effects = told_end(self.context, event)
        return self.here, effects


def fetches(effects: list[Effect]) -> list[FetchState]:
    return [effect for effect in effects if isinstance(effect, FetchState)]


def test_the_own_disk_comes_first_if_it_holds_what_was_committed() -> None:
    node = Node()
    node.context.kept[1, 20] = "h1"
    (fetch,) = fetches(
        node.rollback.begin(opening(Source.KEPT, holders=HOLDERS), entering=False, moved=False)
    )
    assert fetch == FetchState((R1A, R2A, R2B), 1, 20, "h1")
    assert not node.stage.loaded
    other = Node(R1B)
    other.context.kept[1, 20] = "of a future that was given up"
    (fetch,) = fetches(
        other.rollback.begin(opening(Source.KEPT, holders=HOLDERS), entering=False, moved=False)
    )
    assert fetch.donors == (R2B, R2A), "it begins with another donor"


def test_what_comes_is_loaded_and_anything_else_is_fetched_again() -> None:
    node = Node()
    node.rollback.begin(opening(Source.KEPT, holders=HOLDERS), entering=False, moved=False)
    effects = node.fetched(1)
    assert jobs_of(effects) == [Load(20, ("manifest 1",))]
    here, effects = node.end(effects, "not h1")
    assert not here
    assert "state.failed" in notes_of(effects)
    (fetch,) = fetches(effects)
    assert fetch.donors == (R2B, R2A)
    here, _ = node.end(node.fetched(1), "h1")
    assert here
    assert not node.rollback.active


def test_who_holds_the_state_has_nothing_to_do() -> None:
    node = Node()
    node.stage.iteration = 20
    begun = opening(Source.KEPT, holders=HOLDERS)
    assert node.rollback.begin(begun, entering=False, moved=False) == []
    assert node.stage.loaded


def test_a_given_start_comes_from_the_leader() -> None:
    node = Node(fetches_initial=True)
    effects = node.rollback.begin(opening(Source.START), entering=False, moved=False)
    here, effects = node.end(effects, "h")
    assert not here
    assert [fetch.donors for fetch in fetches(effects)] == [(D0,)]


def test_neighbours_are_mixed_and_the_others_stay_where_they_are() -> None:
    other = Node(R1B)
    begun = opening(Source.NEIGHBOURS, lost=2)
    assert other.rollback.begin(begun, entering=False, moved=False) == []
    assert other.stage.loaded
    node = Node(R2A)
    effects = node.rollback.begin(begun, entering=False, moved=True)
    _, effects = node.end(effects, "the first weights")
    assert [(f.stage_index, f.parameter_hash) for f in fetches(effects)] == [(1, ""), (3, "")]
    assert fetches(effects)[0].donors == (R1A, R1B)
    assert node.fetched(3) == []
    effects = node.fetched(1)
    assert jobs_of(effects) == [Mix(20, (1, 3), ("manifest 1", "manifest 3"))]
    here, _ = node.end(effects, "mixed")
    assert here


def test_a_later_era_lets_go_of_what_an_earlier_one_fetched() -> None:
    node = Node(R2A)
    begun = opening(Source.NEIGHBOURS, lost=2)
    node.end(node.rollback.begin(begun, entering=False, moved=True), "h")
    node.fetched(3)
    effects = node.rollback.begin(
        opening(Source.KEPT, holders=HOLDERS), entering=False, moved=False
    )
    assert freed(effects) == [1]
    late = StateFetched(3, 20, "late", tensor(9))
    assert not node.rollback.takes(late)


def fail_to_fetch(node: Node, source: Source = Source.KEPT) -> list[Effect]:
    node.rollback.begin(opening(source, holders=HOLDERS), entering=False, moved=False)
    return node.rollback.fetch_failed(StateFetchFailed(1, 20, "refused"))


REASON = "the state of iteration 20 could not be had: refused"


def test_who_can_not_get_its_state_tells_the_leader_and_leaves_if_it_can_not_again() -> None:
    node = Node()
    told = [Send(D0, Suspect(R1A, REASON))]
    assert fail_to_fetch(node) == told
    assert not node.rollback.active
    assert node.rollback.tell() == told, "to whoever leads in the next iteration"
    again = fail_to_fetch(node)
    assert isinstance(again[-1], Stop)
    assert again[-2] == Send(D0, Leave(REASON, at_once=True))


def test_who_could_not_go_back_is_helped_by_its_stage_if_the_neighbours_stand_in() -> None:
    node = Node()
    fail_to_fetch(node)
    (fetch,) = fetches(
        node.rollback.begin(opening(Source.NEIGHBOURS, lost=2), entering=False, moved=False)
    )
    assert (fetch.donors, fetch.iteration) == ((R1B,), 20)
    assert not node.rollback.active


def test_a_state_that_can_not_be_loaded_is_fetched_three_times() -> None:
    node = Node()
    node.rollback.begin(opening(Source.KEPT, holders=HOLDERS), entering=False, moved=False)
    for _ in range(2):
        node.fetched(1)
        assert fetches(node.rollback.load_failed("not a state"))
    node.fetched(1)
    assert node.rollback.load_failed("not a state")[-1] == Send(D0, Suspect(R1A, "not a state"))
