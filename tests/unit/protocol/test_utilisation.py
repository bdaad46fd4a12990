"""The leader's flooding query goes down the tree, its answers come back up (GWTF V-B)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import ReadKept, Send
from decod.protocol.core.era import Kept, Mark
from decod.protocol.core.events import KeptRead, StateForgotten, StateKept
from decod.protocol.core.messages import NodeLoad, UtilisationAnswer, UtilisationQuery
from decod.protocol.core.view import Opening
from decod.protocol.leadership.utilisation import Utilisation
from decod.protocol.state.rollback import Mirrors, inventory
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R2A,
    configured,
    context_of,
    sent,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r2a")
QUERY = UtilisationQuery(1, ITERATION)


def load(node: NodeId) -> NodeLoad:
    return NodeLoad(node, 1, 2, 3, "training")


def utilisation(context: Context) -> Utilisation:
    def own(*, with_kept: bool) -> NodeLoad:
        return replace(load(context.node_id), kept=inventory(context) if with_kept else ())

    return Utilisation(context, Mirrors(context), own)


def machine(node: NodeId) -> Utilisation:
    return utilisation(context_of(node, VIEW))


def test_a_leaf_answers_at_once() -> None:
    leaf = machine(R1B)
    assert leaf.queried(QUERY) == [Send(R1A, UtilisationAnswer(1, ITERATION, (load(R1B),)))]
    assert leaf.complete() is None


def test_a_node_answers_when_its_children_have() -> None:
    inner = machine(R1A)
    assert inner.queried(QUERY) == [Send(R1B, QUERY)]
    answer = UtilisationAnswer(1, ITERATION, (load(R1B),))
    both = UtilisationAnswer(1, ITERATION, (load(R1A), load(R1B)))
    assert inner.answered(R1B, answer) == [Send(D0, both)]
    assert inner.answered(R1B, answer) == [], "a repeat changes nothing"


@pytest.mark.parametrize(("sender", "query_id"), [(R2A, 1), (R1B, 2), (R1B, 0)])
def test_answers_of_others_or_to_other_queries_are_dropped(sender: NodeId, query_id: int) -> None:
    inner = machine(R1A)
    assert inner.answered(R1B, UtilisationAnswer(1, ITERATION, ())) == []
    inner.queried(QUERY)
    assert inner.answered(sender, UtilisationAnswer(query_id, ITERATION, ())) == []
    assert sent(inner.answered(R1B, UtilisationAnswer(1, ITERATION, ())))


def test_a_newer_query_replaces_an_older_one_and_a_repeat_is_dropped() -> None:
    inner = machine(R1A)
    inner.queried(QUERY)
    assert inner.queried(QUERY) == []
    newer = UtilisationQuery(2, ITERATION)
    assert inner.queried(newer) == [Send(R1B, newer)]
    assert inner.queried(QUERY) == []
    assert inner.answered(R1B, UtilisationAnswer(1, ITERATION, (load(R1B),))) == []
    assert len(sent(inner.answered(R1B, UtilisationAnswer(2, ITERATION, (load(R1B),))))) == 1


def test_the_leader_gets_everybodys_answer_once() -> None:
    leader = machine(D0)
    assert leader.complete() is None
    assert sent(leader.queried(QUERY)) == [(R1A, QUERY), (R2A, QUERY)]
    assert leader.complete() is None
    assert leader.answered(R2A, UtilisationAnswer(1, ITERATION, (load(R2A),))) == []
    assert leader.complete() is None
    leader.answered(R1A, UtilisationAnswer(1, ITERATION, (load(R1A), load(R1B))))
    assert leader.complete() == (load(D0), load(R2A), load(R1A), load(R1B))
    assert leader.complete() is None


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.randoms())
def test_every_member_is_counted_once_in_whatever_order_answers_come(
    num_first: int, num_second: int, fanout: int, rng: object
) -> None:
    names = [f"r1{k:02}" for k in range(num_first)] + [f"r2{k:02}" for k in range(num_second)]
    view = view_of("d0", *names)
    config = configured(tree_fanout=fanout)
    nodes = {n: utilisation(context_of(n, view, config=config)) for n in view.by_id}
    flight = [(D0, D0, QUERY)]
    while flight:
        at = rng.randrange(len(flight))  # type: ignore[attr-defined] # Hypothesis's own Random.
        sender, to, message = flight.pop(at)
        if isinstance(message, UtilisationQuery):
            effects = nodes[to].queried(message)
        else:
            effects = nodes[to].answered(sender, message)
        flight += [(to, other, m) for other, m in sent(effects)]  # type: ignore[misc]
    loads = nodes[D0].complete()
    assert loads is not None
    assert sorted(each.node_id for each in loads) == sorted(view.by_id)


# --- what hosts keep ---------------------------------------------------------------------------

KEPT = UtilisationQuery(1, ITERATION, with_kept=True)
WHOLE, BAD, USELESS = Kept(1, 20, "a"), Kept(2, 20, "b"), Kept(1, 20, "of another future")


def holder(node: NodeId, *states: Kept) -> tuple[Context, Mirrors, Utilisation]:
    """A host with states on its disk, in the iteration after a mark at 20."""
    context = context_of(node, VIEW)
    keeping = Mirrors(context)

    def own(*, with_kept: bool) -> NodeLoad:
        return replace(load(node), kept=inventory(context) if with_kept else ())

    for state in states:
        keeping.told(StateKept(state.stage_index, state.iteration, state.parameter_hash))
    marks = (Mark(10, ((1, "x"),)), Mark(20, ((1, "a"), (2, "b"))))
    opening = Opening(Iteration(22, 1), Iteration(21, 1), VIEW, marks=marks)
    keeping.opened(opening, stepped=False)
    return context, keeping, Utilisation(context, keeping, own)


def kept_of(effects: object) -> tuple[Kept, ...]:
    ((_, answer),) = sent(effects)  # type: ignore[arg-type]
    assert isinstance(answer, UtilisationAnswer)
    return answer.loads[0].kept


def test_a_host_reads_what_it_keeps_before_it_tells_of_it() -> None:
    *_, leaf = holder(R1B, WHOLE, BAD)
    assert leaf.queried(KEPT) == [ReadKept((WHOLE, BAD))]
    assert leaf.told(StateForgotten(2, 20)) == []
    assert kept_of(leaf.told(KeptRead((WHOLE, BAD)))) == (WHOLE,)
    assert kept_of(leaf.queried(replace(KEPT, query_id=2))) == (WHOLE,), "once in an iteration"


def test_a_newer_question_waits_for_the_same_reading() -> None:
    *_, leaf = holder(R1B, WHOLE)
    assert leaf.queried(KEPT) == [ReadKept((WHOLE,))]
    assert leaf.queried(replace(KEPT, query_id=2)) == []
    (answer,) = sent(leaf.told(KeptRead((WHOLE,))))
    assert answer == (R1A, UtilisationAnswer(2, ITERATION, (replace(load(R1B), kept=(WHOLE,)),)))
    assert leaf.told(KeptRead((WHOLE,))) == []


def test_what_nobody_can_go_back_to_is_not_read() -> None:
    *_, leaf = holder(R1B, USELESS, Kept(1, 10, "not what was committed"))
    assert len(kept_of(leaf.queried(KEPT))) == 2


def test_each_iteration_reads_anew() -> None:
    """Whoever found a state bad meanwhile has asked for that."""
    _, keeping, leaf = holder(R1B, WHOLE)
    leaf.queried(KEPT)
    leaf.told(KeptRead((WHOLE,)))
    opening = Opening(Iteration(22, 2), Iteration(21, 1), VIEW, marks=(Mark(20, ((1, "a"),)),))
    keeping.opened(opening, stepped=False)
    assert leaf.queried(replace(KEPT, query_id=2)) == [ReadKept((WHOLE,))]


def test_who_reads_keeps_its_parent_waiting_and_its_children_do_not_wait_for_it() -> None:
    *_, inner = holder(R1A, WHOLE)
    assert inner.queried(KEPT) == [Send(R1B, KEPT), ReadKept((WHOLE,))]
    assert inner.answered(R1B, UtilisationAnswer(1, ITERATION, (load(R1B),))) == []
    ((to, answer),) = sent(inner.told(KeptRead((WHOLE,))))
    assert isinstance(answer, UtilisationAnswer)
    assert (to, {each.node_id for each in answer.loads}) == (D0, {R1A, R1B})
