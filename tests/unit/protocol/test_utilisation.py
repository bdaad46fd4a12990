"""The leader's flooding query goes down the tree, its answers come back up (GWTF V-B)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.protocol.effects import Send
from decod.protocol.messages import NodeLoad, UtilisationAnswer, UtilisationQuery
from decod.protocol.utilisation import Utilisation
from tests.unit.protocol.cast import (
    D0,
    R1A,
    R1B,
    R2A,
    ROUND,
    configured,
    context_of,
    sent,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r2a")
QUERY = UtilisationQuery(1, ROUND)


def load(node: NodeId) -> NodeLoad:
    return NodeLoad(node, 1, 2, 3, "training")


def machine(node: NodeId) -> Utilisation:
    return Utilisation(context_of(node, VIEW))


def test_a_leaf_answers_at_once() -> None:
    leaf = machine(R1B)
    assert leaf.queried(QUERY, load(R1B)) == [Send(R1A, UtilisationAnswer(1, ROUND, (load(R1B),)))]
    assert leaf.complete() is None


def test_a_node_answers_when_its_children_have() -> None:
    inner = machine(R1A)
    assert inner.queried(QUERY, load(R1A)) == [Send(R1B, QUERY)]
    answer = UtilisationAnswer(1, ROUND, (load(R1B),))
    both = UtilisationAnswer(1, ROUND, (load(R1A), load(R1B)))
    assert inner.answered(R1B, answer) == [Send(D0, both)]
    assert inner.answered(R1B, answer) == [], "a repeat changes nothing"


@pytest.mark.parametrize(("sender", "query_id"), [(R2A, 1), (R1B, 2), (R1B, 0)])
def test_answers_of_others_or_to_other_queries_are_dropped(sender: NodeId, query_id: int) -> None:
    inner = machine(R1A)
    assert inner.answered(R1B, UtilisationAnswer(1, ROUND, ())) == []
    inner.queried(QUERY, load(R1A))
    assert inner.answered(sender, UtilisationAnswer(query_id, ROUND, ())) == []
    assert sent(inner.answered(R1B, UtilisationAnswer(1, ROUND, ())))


def test_a_newer_query_replaces_an_older_one_and_a_repeat_is_dropped() -> None:
    inner = machine(R1A)
    inner.queried(QUERY, load(R1A))
    assert inner.queried(QUERY, load(R1A)) == []
    newer = UtilisationQuery(2, ROUND)
    assert inner.queried(newer, load(R1A)) == [Send(R1B, newer)]
    assert inner.queried(QUERY, load(R1A)) == []
    assert inner.answered(R1B, UtilisationAnswer(1, ROUND, (load(R1B),))) == []
    assert len(sent(inner.answered(R1B, UtilisationAnswer(2, ROUND, (load(R1B),))))) == 1


def test_the_leader_gets_everybodys_answer_once() -> None:
    leader = machine(D0)
    assert leader.complete() is None
    assert sent(leader.queried(QUERY, load(D0))) == [(R1A, QUERY), (R2A, QUERY)]
    assert leader.complete() is None
    assert leader.answered(R2A, UtilisationAnswer(1, ROUND, (load(R2A),))) == []
    assert leader.complete() is None
    leader.answered(R1A, UtilisationAnswer(1, ROUND, (load(R1A), load(R1B))))
    assert leader.complete() == (load(D0), load(R2A), load(R1A), load(R1B))
    assert leader.complete() is None


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.randoms())
def test_every_member_is_counted_once_in_whatever_order_answers_come(
    num_first: int, num_second: int, fanout: int, rng: object
) -> None:
    names = [f"r1{k:02}" for k in range(num_first)] + [f"r2{k:02}" for k in range(num_second)]
    view = view_of("d0", *names)
    config = configured(tree_fanout=fanout)
    nodes = {n: Utilisation(context_of(n, view, config=config)) for n in view.by_id}
    flight = [(D0, D0, QUERY)]
    while flight:
        at = rng.randrange(len(flight))  # type: ignore[attr-defined] # Hypothesis's own Random.
        sender, to, message = flight.pop(at)
        if isinstance(message, UtilisationQuery):
            effects = nodes[to].queried(message, load(to))
        else:
            effects = nodes[to].answered(sender, message)
        flight += [(to, other, m) for other, m in sent(effects)]  # type: ignore[misc]
    loads = nodes[D0].complete()
    assert loads is not None
    assert sorted(each.node_id for each in loads) == sorted(view.by_id)
