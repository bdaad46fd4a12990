"""A candidate's way in."""

from dataclasses import replace

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context, Identity
from decod.protocol.core.effects import FetchState, Send, StartJob
from decod.protocol.core.events import JobFinished, StateFetchFailed
from decod.protocol.core.jobs import Build, Built
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.membership_messages import Assign, Join, Prepared
from decod.protocol.core.view import Opening, Role, View
from decod.protocol.leadership.joining import Joining
from tests.unit.protocol.cast import D0, FACTS, ITERATION, MANIFEST, R1A, RUN, Heard, view_of

IDENTITY = Identity(node_id=R1A, address="r1a:7700", role=Role.RELAY, capacity=2, compute_s=1.0)
OFFER = Join("r1a:7700", Role.RELAY, 2, None, MANIFEST, incarnation=7)
ASSIGN = Assign(1, -1)


def machine(*, fetches_initial: bool = False) -> tuple[Heard, Context]:
    nobody = View(version=0, leader=NodeId(D0), term=1, num_stages=2, members=())
    links = LinkTable(activation_size_bytes=0, compute_s=1.0)
    context = Context(
        node_id=R1A,
        run=RUN,
        links=links,
        facts=replace(FACTS, initial_from_leader=fetches_initial),
        opening=Opening(ITERATION, Iteration(0, 0), nobody),
    )
    return Heard(Joining(context, IDENTITY, OFFER)), context


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


def test_what_was_built_or_loaded_for_an_earlier_cut_does_not_count() -> None:
    """The leader has the model cut anew while the candidate builds its stage."""
    joining, context = machine()
    recut = replace(ASSIGN, cut=(1, 3))
    given = [*joining.assigned(ASSIGN), *joining.assigned(recut)]
    earlier, build = (each for each in given if isinstance(each, StartJob))
    assert (earlier.job, build.job) == (Build(1), Build(1, cut=recut.cut))
    context.compute.finished(1.0, JobFinished(earlier.job_id, Built("old"), (), 1.0))
    assert context.out.taken() == []
    context.compute.finished(2.0, JobFinished(build.job_id, Built("new"), (), 1.0))
    assert Send(D0, Prepared(1, "new", cut=recut.cut)) in context.out.taken()


def test_a_stage_in_another_cut_begins_its_fetch_anew() -> None:
    joining, _ = machine(fetches_initial=True)
    joining.assigned(ASSIGN)
    joining.built(1.0, Built("seed"), initial=False)
    recut = replace(ASSIGN, cut=(1, 3))
    joining.assigned(recut)
    fetch = FetchState((D0,), 1, 0, cut=recut.cut)
    assert fetch in joining.built(2.0, Built("seed"), initial=False)


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
