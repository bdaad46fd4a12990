"""A frontal server: its pool, its workers, and the gradients that come back."""

import pytest

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.scopes import Message
from decod.protocol.core.messages.server_messages import Fetch, Given, Leg, Offer, Taken, Unable
from decod.protocol.strategy.servers.frontal import FrontalServer, InputState
from tests.unit.protocol.cast import (
    B1A,
    B1B,
    C1A,
    C1B,
    D0,
    F1A,
    ITERATION,
    Heard,
    configured,
    mb,
    notes_of,
    sent,
    settle,
)
from tests.unit.protocol.servers_cast import Bench, activation, gradient, stage

M, N = mb(0), mb(1)


class FrontalBench(Bench):
    """f1a, a second after the opening. Each worker takes half a second for a microbatch."""

    def __init__(self, *workers: NodeId, window: int = 4) -> None:
        super().__init__(F1A, stage())
        self.server = Heard(FrontalServer(self.context, self.courier, self.kept))
        self.server.open(self.placement)
        assert self.server.deadline_s is not None
        self.server.overdue(self.server.deadline_s)
        for worker in workers:
            self.offer(worker, window)

    def offer(
        self, worker: NodeId = C1A, window: int = 4, *, pass_s: float = 0.5, idle: bool = False
    ) -> list[Effect]:
        return self.server.offered(worker, Offer(ITERATION, 1, window, pass_s, idle=idle))

    def come(self, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.server.activation(microbatch, self.new())

    def taken(self, microbatch: MicrobatchId = M, by: NodeId = C1A) -> list[Effect]:
        return self.server.taken(Taken(ITERATION, 1, microbatch, by))

    def give_back(self, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.server.gradient(microbatch, self.new())

    def state(self, microbatch: MicrobatchId = M) -> InputState:
        return self.server.entries[microbatch].state


def given(
    microbatch: MicrobatchId, worker: NodeId, *, to: NodeId = B1A, version: int = 1
) -> list[tuple[NodeId, Message]]:
    """Return what is sent when a worker gets a microbatch."""
    return [
        (to, Given(ITERATION, version, microbatch, worker)),
        (worker, activation(microbatch, Leg.TASK, version)),
    ]


def unable(reason: str, version: int = 1) -> Unable:
    return Unable(ITERATION, version, M, reason)


# --- giving work out ------------------------------------------------------------------------------


def test_an_activation_for_which_there_is_no_room_has_the_iteration_repeated() -> None:
    bench = FrontalBench(C1A)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    effects = bench.come()
    assert sent(effects) == [(D0, unable("there is no room to keep an activation"))]
    assert bench.num_held == 0


# --- workers that fail ----------------------------------------------------------------------------


def test_a_failure_of_another_than_the_outputs_maker_changes_nothing() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1B)
    assert sent(bench.server.again(M, C1A)) == []


def test_a_missing_output_whose_making_was_given_up_when_the_batch_came_home_is_made() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.server.begun()
    assert bench.server.deadline_s is None
    assert sent(bench.server.missing(M)) == given(M, C1B)


def test_a_failure_of_a_share_that_nobody_reads_is_told_to_nobody() -> None:
    bench = FrontalBench(C1A)
    foreign = mb(0, data_node_index=7)
    bench.come(foreign)
    assert sent(bench.server.again(foreign, C1A)) == []


def test_what_did_not_reach_the_only_worker_stays_with_it() -> None:
    """It is sent again by itself. To give it to the same worker again would add to that."""
    bench = FrontalBench(C1A)
    bench.come()
    assert sent(bench.server.undelivered(C1A, M)) == []
    assert bench.server.awaited == {C1A}


# --- backward -------------------------------------------------------------------------------------


def test_a_gradient_from_a_client_that_was_not_given_the_microbatch_is_refused() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    effects = bench.server.returned(C1B, M, bench.new())
    assert notes_of(effects) == ["result.refused"]
    assert sent(effects) == []
    assert sent(bench.server.returned(C1A, M, bench.new())) == [(D0, gradient(M, Leg.ONWARD))]


def test_what_is_fetched_before_it_came_is_asked_of_who_takes_a_lost_servers_place() -> None:
    bench = SecondStage()
    bench.server.fetched(C1B, M)
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(B1B, Fetch(ITERATION, 2, M))]


# --- losses ---------------------------------------------------------------------------------------


def test_an_output_whose_activation_is_lost_too_is_made_again_when_that_comes() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.taken()
    bench.server.mend(bench.lose("b1a"))
    assert bench.state() is InputState.WAITING
    assert (B1B, Given(ITERATION, 2, M, C1B)) in sent(bench.come())


@pytest.mark.parametrize("missed_first", [True, False])
def test_an_output_is_not_awaited_from_who_has_done_the_backward_pass(
    *, missed_first: bool
) -> None:
    """It had the gradient when the backward server was lost, and so sends no output again."""
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken()
    bench.server.mend(bench.lose("b1a"))
    if missed_first:
        assert sent(bench.server.missing(M)) == []
        effects = bench.give_back()
    else:
        bench.give_back()
        effects = bench.server.missing(M)
    assert sent(effects)[-2:] == given(M, C1B, to=B1B, version=2)


def test_a_gradient_that_is_needed_again_and_was_not_kept_has_the_iteration_repeated() -> None:
    bench = SecondStage()
    bench.server.activation(M, bench.new())
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.server.gradient(M, bench.new())
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(D0, unable("a gradient that is needed again was not kept", 2))]


class SecondStage(Bench):
    """f2a: the servers of stage 1 stand before it."""

    def __init__(self) -> None:
        super().__init__(NodeId("f2a"), stage())
        self.server = Heard(FrontalServer(self.context, self.courier, self.kept))
        self.server.open(self.placement)
