"""The leader's flooding query goes down the tree, its answers come back up (GWTF V-B)."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import ReadKept
from decod.protocol.core.era import Kept, Mark
from decod.protocol.core.events import KeptRead, StateForgotten, StateKept
from decod.protocol.core.messages.decision_messages import (
    NodeLoad,
    UtilisationAnswer,
    UtilisationQuery,
)
from decod.protocol.core.view import Opening
from decod.protocol.leadership.utilisation import Utilisation
from decod.protocol.state.rollback import Mirrors, inventory
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1B,
    Heard,
    configured,
    context_of,
    sent,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r2a")
QUERY = UtilisationQuery(1, ITERATION)


def load(node: NodeId) -> NodeLoad:
    return NodeLoad(node, 1, 2, 3, "training")


def utilisation(context: Context) -> Heard:
    def own(*, with_kept: bool) -> NodeLoad:
        return replace(load(context.node_id), kept=inventory(context) if with_kept else ())

    return Heard(Utilisation(context, Mirrors(context), own))


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


def holder(node: NodeId, *states: Kept) -> tuple[Context, Mirrors, Heard]:
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
    return context, keeping, Heard(Utilisation(context, keeping, own))


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


def test_what_nobody_can_go_back_to_is_not_read() -> None:
    *_, leaf = holder(R1B, USELESS, Kept(1, 10, "not what was committed"))
    assert len(kept_of(leaf.queried(KEPT))) == 2
