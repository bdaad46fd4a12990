"""What nodes do when a relay is lost and the iteration goes on without it."""

from dataclasses import replace

import pytest

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, SendTensor
from decod.protocol.core.jobs import Backward, Embed, Forward, Loss
from decod.protocol.core.messages import (
    BackwardGradient,
    Complete,
    Deny,
    ForwardActivation,
    Mended,
    Report,
    Reroute,
)
from decod.protocol.core.messages.routing_messages import Hop
from decod.protocol.core.view import View
from decod.protocol.flows.building import Granted, RelayFlow
from decod.protocol.flows.substitutes import Substitutes, replaced
from decod.protocol.strategy.data_microbatches import DataMicrobatches
from decod.protocol.strategy.microbatch import Phase
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from tests.support.flows import data_flows, relay_flows
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R2A,
    R2B,
    configured,
    context_of,
    end_job,
    flow,
    freed,
    jobs_of,
    mb,
    member,
    notes_of,
    sent,
    tensor,
    view_of,
)

M = mb(0)
OLD, NEW = (R1A, R2A), (R1A, R2B)
FORWARD = ForwardActivation(ITERATION, M, flow(0), OLD)
AGAIN = ForwardActivation(ITERATION, M, flow(0), NEW, 2)
GRADIENT = BackwardGradient(ITERATION, M, flow(0), OLD)
BACK_AGAIN = BackwardGradient(ITERATION, M, flow(0), NEW, 2)
REROUTE = Reroute(ITERATION, M, flow(0), NEW, 2, (R2B,))
MENDED = Mended(ITERATION, M)


def without(view: View, *lost: NodeId) -> View:
    left = [m for m in view.members if m.node_id not in lost]
    return View.of(
        left, version=view.version + 1, leader=view.leader, term=1, num_stages=view.num_stages
    )


def view() -> View:
    small = member("r2b", capacity=1)
    return view_of(member("d0", capacity=4), "r1a", "r1b", "r2a", small)


class Relay:
    """A relay with flow 0, if it is on its path."""

    def __init__(self, node: NodeId, *, keep_max_bytes: int = 1 << 30) -> None:
        self.context = context_of(node, view(), config=configured(keep_max_bytes=keep_max_bytes))
        self.flows = relay_flows(self.context)
        self.loaded = True
        if node == R1A:
            self.flows.entries[flow(0)] = RelayFlow(flow(0), R2A, 2.0)
            self.flows.outflows.paired[flow(0)] = D0
        self.machine = RelayMicrobatches(self.context, lambda: self.flows, lambda: self.loaded)
        self.num_tensors = 0

    def tensor(self) -> int:
        self.num_tensors += 1
        return self.num_tensors

    def forward(self, sender: NodeId = D0, message: ForwardActivation = FORWARD) -> list[Effect]:
        effects = self.machine.activation(sender, message, tensor(self.tensor()))
        out = tensor(self.tensor())
        end_job(self.context, effects, out)
        return self.machine.forwarded(0.0, M, out.id, 1.0)

    def end_backward(self, effects: list[Effect]) -> list[Effect]:
        assert jobs_of(effects) == [Backward(M)]
        out = tensor(self.tensor())
        end_job(self.context, effects, out)
        return self.machine.returned(M, out.id)

    def backward(self, sender: NodeId = R2A) -> list[Effect]:
        return self.end_backward(self.machine.gradient(sender, GRADIENT, tensor(self.tensor())))

    def lose(self, node: NodeId) -> None:
        self.context.adopt(without(self.context.view, node))


# --- the neighbour before -------------------------------------------------------------------------


def test_what_was_sent_is_sent_to_who_takes_over() -> None:
    relay = Relay(R1A)
    relay.forward()
    relay.machine.complete(1.0, R2A, Complete(ITERATION, M, 1.0))
    relay.lose(R2A)
    effects = relay.machine.reroute(5.0, D0, REROUTE)
    assert effects == [SendTensor(R2B, AGAIN, tensor(2).id)]
    assert relay.machine.held[M].phase is Phase.SENT
    assert relay.machine.held[M].complete_by_s == 35.0, "another COMPLETE is due"


def test_what_is_not_computed_yet_goes_to_who_takes_over_at_once() -> None:
    relay = Relay(R1A)
    effects = relay.machine.activation(D0, FORWARD, tensor(1))
    relay.lose(R2A)
    assert relay.machine.reroute(5.0, D0, REROUTE) == []
    end_job(relay.context, effects, tensor(2))
    assert SendTensor(R2B, AGAIN, tensor(2).id) in relay.machine.forwarded(6.0, M, 2, 1.0)


def test_a_new_path_may_be_known_before_the_microbatch_comes() -> None:
    relay = Relay(R1A)
    relay.lose(R2A)
    assert relay.machine.reroute(5.0, D0, REROUTE) == []
    assert SendTensor(R2B, AGAIN, tensor(2).id) in relay.forward()


def test_what_has_been_folded_in_is_sent_again_and_not_computed() -> None:
    relay = Relay(R1A)
    relay.forward()
    relay.backward()
    relay.lose(R2A)
    assert relay.machine.reroute(5.0, D0, REROUTE) == [SendTensor(R2B, AGAIN, tensor(2).id)]
    repeat = relay.machine.gradient(R2B, GRADIENT, tensor(9))
    assert (freed(repeat), jobs_of(repeat)) == ([9], [])
    assert relay.machine.folded == [M]


def test_a_path_is_changed_by_its_data_node_alone_and_by_no_older_word() -> None:
    relay = Relay(R1A)
    relay.forward()
    assert relay.machine.reroute(5.0, R1B, REROUTE) == []
    newer = replace(REROUTE, path_version=3)
    assert len(relay.machine.reroute(5.0, D0, newer)) == 1
    assert relay.machine.reroute(6.0, D0, replace(REROUTE, path=OLD)) == []
    assert relay.machine.reroute(6.0, D0, newer) == [], "a repeat"
    assert relay.machine.held[M].path == NEW


def test_what_was_not_kept_is_told_to_the_data_node() -> None:
    relay = Relay(R1A, keep_max_bytes=0)
    relay.forward()
    relay.lose(R2A)
    reason = "what the lost node had been sent was not kept"
    deny = Send(D0, Deny(ITERATION, M, flow(0), reason))
    assert relay.machine.reroute(5.0, D0, REROUTE) == [deny]


# --- who takes over -------------------------------------------------------------------------------


def test_who_takes_over_computes_and_says_so_to_the_data_node() -> None:
    relay = Relay(R2B)
    relay.lose(R2A)
    relay.machine.reroute(5.0, D0, REROUTE)
    effects = relay.forward(R1A, AGAIN)
    assert [to for to, _ in sent(effects)] == [D0, R1A], "on to the data node, COMPLETE back"
    effects = relay.backward(D0)
    assert sent(effects) == [(R1A, BACK_AGAIN), (D0, MENDED)]


def test_a_gradient_may_come_before_the_activation() -> None:
    """The node behind had finished: what it gets is not sent again."""
    relay = Relay(R2B)
    relay.lose(R2A)
    assert relay.machine.gradient(D0, BACK_AGAIN, tensor(50)) == []
    assert relay.machine.gradient(D0, BACK_AGAIN, tensor(51)) != [], "a repeat is freed"
    effects = relay.forward(R1A, AGAIN)
    assert [type(m) for _, m in sent(effects)] == [Complete]
    assert sent(relay.end_backward(effects)) == [(R1A, BACK_AGAIN)]
    assert relay.machine.reroute(5.0, D0, REROUTE) == [Send(D0, MENDED)], "told late, it still says"


def test_who_has_a_lost_nodes_gradient_early_still_feeds_the_one_that_takes_its_place() -> None:
    """Both neighbours are lost, one after the other, while an activation is on its way here."""
    relay = Relay(R1B)
    first = ForwardActivation(ITERATION, M, flow(0), (R1B, R2A), 2)
    relay.lose(R1A)
    assert relay.machine.gradient(R2A, GRADIENT, tensor(50)) == []
    effects = relay.machine.activation(D0, first, tensor(1))
    relay.lose(R2A)
    path = (R1B, R2B)
    relay.machine.reroute(5.0, D0, Reroute(ITERATION, M, flow(0), path, 3, path))
    end_job(relay.context, effects, tensor(2))
    effects = relay.machine.forwarded(6.0, M, 2, 1.0)
    again = ForwardActivation(ITERATION, M, flow(0), path, 3)
    assert SendTensor(R2B, again, tensor(2).id) in effects, "nobody else has it to send"
    back = BackwardGradient(ITERATION, M, flow(0), path, 3)
    assert sent(relay.end_backward(effects)) == [(D0, back), (D0, MENDED)]


def test_who_is_full_takes_over_when_there_is_room() -> None:
    relay = Relay(R2B)
    assert relay.context.member.capacity == 1
    relay.lose(R2A)
    relay.forward(R1A, AGAIN)
    other = ForwardActivation(ITERATION, mb(1), flow(1), NEW, 2)
    assert relay.machine.activation(R1A, other, tensor(60)) == []
    assert relay.machine.held[mb(1)].phase is Phase.QUEUED
    effects = relay.backward(D0)
    assert jobs_of(effects) == [Forward(mb(1))]


def test_a_newcomer_takes_over_when_its_parameters_are_there() -> None:
    relay = Relay(R2B)
    relay.loaded = False
    relay.lose(R2A)
    assert relay.machine.activation(R1A, AGAIN, tensor(1)) == []
    relay.loaded = True
    assert jobs_of(relay.machine.admit()) == [Forward(M)]


def test_what_its_device_refuses_is_told_to_the_data_node() -> None:
    relay = Relay(R2B)
    relay.lose(R2A)
    effects = relay.machine.activation(R1A, AGAIN, tensor(1))
    end_job(relay.context, effects, refused=True)
    deny = Deny(ITERATION, M, flow(0), "not finite")
    effects = relay.machine.job_failed(1.0, Backward(M), "not finite")
    assert notes_of(effects) == ["microbatch.refused"]
    assert sent(effects) == [(D0, deny)]


def test_when_the_iteration_is_over_nothing_is_left() -> None:
    relay = Relay(R2B)
    relay.lose(R2A)
    relay.forward(R1A, AGAIN)
    relay.backward(D0)
    relay.machine.activation(R1A, replace(AGAIN, microbatch=mb(1)), tensor(60))
    relay.machine.activation(R1A, replace(AGAIN, microbatch=mb(2)), tensor(61))
    relay.machine.gradient(D0, replace(GRADIENT, microbatch=mb(3)), tensor(62))
    relay.machine.reset()
    relay.context.compute.reset()
    assert relay.machine.held == {}
    # One is computed on, one is being sent forward, one backward.
    assert len(relay.context.tensors) == 3


# --- the data node --------------------------------------------------------------------------------


class Data:
    """d0 with a share of one microbatch, under way along r1a and r2a."""

    def __init__(self, *, keep_max_bytes: int = 1 << 30, num_microbatches: int = 1) -> None:
        self.context: Context = context_of(
            D0, view(), config=configured(keep_max_bytes=keep_max_bytes)
        )
        self.flows = data_flows(self.context)
        self.flows.complete[flow(0)] = Granted(flow(0), R1A, 1.0, OLD)
        self.machine = DataMicrobatches(
            self.context, lambda: self.flows, list, num_microbatches=num_microbatches
        )
        self.machine.open(0.0)
        effects = self.machine.can_take(R1A)
        end_job(self.context, effects, tensor(1))
        self.machine.embedded(0.0, M, tensor(1).id)

    def head(self) -> None:
        effects = self.machine.activation(R2A, FORWARD, tensor(2))
        end_job(self.context, effects, tensor(3))
        self.machine.headed(M, Loss(2.5, 10), tensor(3).id, 1.0)

    def come_home(self, first: NodeId = R1A) -> list[Effect]:
        effects = self.machine.gradient(first, GRADIENT, tensor(4))
        end_job(self.context, effects)
        return effects + self.machine.returned(M)

    def lose(self, *nodes: NodeId) -> list[Effect]:
        self.context.adopt(without(self.context.view, *nodes))
        return self.machine.mend(5.0)


def reports(effects: list[Effect]) -> list[Report]:
    return [m for _, m in sent(effects) if isinstance(m, Report)]


def test_a_microbatch_under_way_gets_another_path() -> None:
    data = Data()
    assert sent(data.lose(R2A)) == [(R1A, REROUTE), (R2B, REROUTE)]
    assert data.flows.complete[flow(0)].path == NEW, "and so do those that follow it"


def test_the_data_node_sends_again_what_its_new_neighbours_lack() -> None:
    data = Data()
    new = (R1B, R2A)
    reroute, again = replace(REROUTE, path=new, owing=(R1B,)), replace(AGAIN, path=new)
    assert sent(data.lose(R1A)) == [(R1B, reroute), (R2A, reroute), (R1B, again)]
    data = Data()
    data.head()
    assert sent(data.lose(R2A)) == [(R1A, REROUTE), (R2B, REROUTE), (R2B, BACK_AGAIN)]


def test_what_is_home_counts_again_when_all_is_mended() -> None:
    data = Data()
    data.head()
    (report,) = reports(data.come_home())
    assert report.view_version == 1
    effects = data.lose(R2A)
    assert reports(effects) == []
    assert (R2B, BACK_AGAIN) in sent(effects)
    assert data.machine.mended(R1A, MENDED) == [], "it does not owe it"
    (again,) = reports(data.machine.mended(R2B, MENDED))
    assert again == replace(report, view_version=2)
    assert data.machine.mended(R2B, MENDED) == [], "a repeat"


def test_the_work_counts_for_the_relay_that_did_it_in_the_end() -> None:
    data = Data()
    assert data.machine.relays_work() == {}, "under way"
    data.head()
    data.come_home()
    assert data.machine.relays_work() == {R1A: 1, R2A: 1}
    data.lose(R2A)
    assert data.machine.relays_work() == {R1A: 1, R2B: 1}


def test_who_owes_and_is_lost_is_replaced_too() -> None:
    data = Data()
    data.head()
    data.come_home()
    data.context.adopt(view_of(member("d0", capacity=4), "r1a", "r2a", "r2b", "r2c"))
    data.lose(R2A)
    data.lose(R2B)
    path = data.machine.share.done[M].path
    assert path == (R1A, NodeId("r2c"))
    assert data.machine.mended(R2B, MENDED) == []
    assert len(reports(data.machine.mended(path[1], MENDED))) == 1


def test_a_loss_that_did_not_touch_the_share_is_reported_after() -> None:
    data = Data()
    data.head()
    data.come_home()
    (report,) = reports(data.lose(R1B))
    assert report.view_version == 2


def test_what_was_not_kept_repeats_the_iteration() -> None:
    data = Data(keep_max_bytes=0)
    (report,) = reports(data.lose(R1A))
    assert "not kept" in report.failure
    assert report.num_deferred == 1
    assert not data.machine.share.deferrals.microbatches, "it is not the microbatch's fault"


@pytest.mark.parametrize("home", [False, True])
def test_a_change_of_path_that_is_refused_repeats_the_iteration(home: bool) -> None:
    data = Data()
    data.head()
    if home:
        data.come_home()
    data.lose(R2A)
    (report,) = reports(data.machine.denied(6.0, R2B, Deny(ITERATION, M, flow(0), "no memory")))
    assert report.failure == "microbatch 1/0/0: no memory"


def test_without_any_flow_a_loss_repeats_the_iteration() -> None:
    data = Data(num_microbatches=2)
    data.flows.complete.clear()
    (report,) = reports(data.lose(R2A))
    assert report.failure == "relays were lost before flows had been found"


def test_flows_go_on_along_their_new_path() -> None:
    data = Data(num_microbatches=2)
    data.head()
    data.lose(R1A)
    effects = data.come_home(R1B)
    assert jobs_of(effects)[-1] == Embed(mb(1))
    assert data.machine.held[mb(1)].path == (R1B, R2A)
    assert data.machine.held[mb(1)].path_version == 2


# --- who is chosen --------------------------------------------------------------------------------


def test_the_lost_ones_work_is_shared_out_by_capacity() -> None:
    small, big = member("r1b", capacity=1), member("r1c", capacity=3)
    left = view_of("d0", small, big, "r2a")
    others = Substitutes(context_of(D0, left), [OLD] * 8, newest=0)
    chosen = [others.mend(OLD)[0] for _ in range(8)]
    assert chosen.count(NodeId("r1c")) == 6
    assert chosen.count(R1B) == 2


def test_newcomers_are_chosen_only_where_there_is_nobody_else() -> None:
    new = replace(member("r1b"), since_iteration=4)
    left = view_of("d0", new, "r1c", "r2a")
    others = Substitutes(context_of(D0, left), [OLD] * 9, newest=4)
    assert others.mend(OLD)[0] == NodeId("r1c")
    left = view_of("d0", new, "r2a")
    assert Substitutes(context_of(D0, left), [OLD], newest=4).mend(OLD)[0] == R1B


def far(left: View, between: dict[tuple[str, str], float], *, compute_s: float = 0.5) -> Context:
    """Return a data node's context that has heard what links between relays cost."""
    context = context_of(D0, left)
    for begin in {begin for begin, _ in between}:
        costs = tuple((NodeId(e), cost) for (b, e), cost in between.items() if b == begin)
        context.remote_links.heard([Hop(NodeId(begin), costs, (), compute_s)])
    return context


def test_who_would_be_done_first_takes_over_where_the_links_are_known() -> None:
    """And not always the same, since microbatches take turns on its links."""
    left = view_of(member("d0", capacity=8), "r1b", "r1c", "r2a")
    context = far(left, {("r1b", "r2a"): 9.0, ("r1c", "r2a"): 4.0})
    others = Substitutes(context, [OLD] * 4, newest=0)
    chosen = [others.mend(OLD)[0] for _ in range(4)]
    assert chosen[0] == NodeId("r1c")
    assert chosen.count(NodeId("r1c")) == 3


def test_a_device_that_has_much_to_do_is_not_first() -> None:
    left = view_of(member("d0", capacity=8), "r1b", "r1c", "r2a")
    context = far(left, {("r1b", "r2a"): 9.0, ("r1c", "r2a"): 8.0}, compute_s=30.0)
    others = Substitutes(context, [(NodeId("r1c"), R2B), OLD], newest=0)
    assert others.mend(OLD)[0] == R1B


def test_of_two_lost_in_a_row_each_has_another() -> None:
    """Whom the second has before it is who has just been chosen."""
    left = view_of("d0", "r1b", "r1c", "r2b", "r2c")
    between = {(b, e): 5.0 for b in ("r1b", "r1c") for e in ("r2b", "r2c")}
    context = far(left, {**between, ("r1b", "r2c"): 1.0})
    assert Substitutes(context, [OLD], newest=0).mend(OLD) == (R1B, NodeId("r2c"))
    context.remote_links.forget_others({D0, R1B})
    assert context.distance_s(R1B, NodeId("r2c")) is None
    assert context.distance_s(D0, R1B) is not None


# --- flows of an earlier view ---------------------------------------------------------------------


def test_a_relay_that_loads_its_state_first_is_replaced_on_flows_of_an_earlier_view() -> None:
    late = member("r1a", since_iteration=4)
    after = view_of("d0", late, "r1b", "r2a", "r2b", version=2)
    assert replaced(context_of(D0, after), [OLD], newest=4) == [(R1B, R2A)]
    alone = view_of("d0", late, "r2b", version=3)
    others = replaced(context_of(D0, alone), [OLD], newest=4)
    assert others == [(R1A, R2B)], "nobody else serves the stage"


def test_microbatches_go_along_flows_of_an_earlier_view_at_once() -> None:
    data = Data(num_microbatches=2)
    data.flows.carried = {flow(0): Granted(flow(0), R1B, 1.0, (R1B, R2B), 3)}
    effects = data.machine.open(10.0)
    assert [j for j in jobs_of(effects) if isinstance(j, Embed)], "nobody has said CAN TAKE"
    assert {held.path for held in data.machine.held.values()} == {(R1B, R2B)}
    assert {held.path_version for held in data.machine.held.values()} == {3}
    assert len(data.machine.held) == 2, "the second follows without a wait"


def test_what_is_refused_on_a_flow_of_an_earlier_view_is_put_off() -> None:
    """Or the iteration would be repeated with it again and again."""
    data = Data()
    data.flows.carried = {flow(0): Granted(flow(0), R1B, 1.0, (R1B, R2B), 3)}
    data.machine.open(10.0)
    deny = Deny(ITERATION, M, flow(0), "its loss is not finite")
    assert [r.failure != "" for r in reports(data.machine.denied(11.0, R1B, deny))] == [True]
    data.machine.open(12.0)
    assert M not in data.machine.held
