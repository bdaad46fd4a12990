"""A frontal server: its pool, its workers, and the gradients that come back."""

import pytest

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Given,
    Leg,
    Offer,
    Taken,
    Unable,
)
from decod.protocol.strategy.servers.frontal import FrontalServer, InputState
from tests.unit.protocol.cast import (
    B1A,
    B1B,
    C1A,
    C1B,
    D0,
    F1A,
    ITERATION,
    configured,
    freed,
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
        self.server = FrontalServer(self.context, self.courier, self.kept)
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


def test_an_activation_goes_to_a_worker_and_the_backward_server_hears_to_whom() -> None:
    bench = FrontalBench(C1A)
    assert sent(bench.come()) == given(M, C1A)
    assert (bench.state(), bench.server.awaited) == (InputState.GIVEN, {C1A})


def test_without_a_worker_it_waits_for_the_first() -> None:
    bench = FrontalBench()
    assert sent(bench.come()) == []
    assert sent(bench.offer(C1B)) == given(M, C1B)


def test_the_server_itself_may_be_the_worker() -> None:
    bench = FrontalBench(F1A)
    effects = bench.come()
    assert sent(effects) == [(B1A, Given(ITERATION, 1, M, F1A))]
    assert bench.own == [activation(M, Leg.TASK)]


def test_who_has_enough_gets_no_more_until_something_is_done() -> None:
    bench = FrontalBench(C1A, window=1)
    bench.come(M)
    assert sent(bench.come(N)) == []
    assert sent(bench.taken(M)) == given(N, C1A)


def test_an_activation_that_comes_twice_is_given_out_once() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    again = bench.come()
    assert (sent(again), len(freed(again))) == ([], 1)


def test_an_activation_for_which_there_is_no_room_has_the_iteration_repeated() -> None:
    bench = FrontalBench(C1A)
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    effects = bench.come()
    assert sent(effects) == [(D0, unable("there is no room to keep an activation"))]
    assert bench.num_held == 0


def test_what_is_done_leaves_the_pool() -> None:
    """Its output has come from a worker that counted as silent."""
    bench = FrontalBench()
    bench.come()
    bench.taken(by=C1B)
    assert sent(bench.offer()) == []


def test_an_output_that_is_known_before_its_activation_came_is_not_made_again() -> None:
    """The stage before sends it again to the place of a lost server."""
    bench = FrontalBench(C1A)
    bench.taken()
    assert sent(bench.come()) == []


def test_when_the_batch_is_home_nothing_is_given_out() -> None:
    bench = FrontalBench()
    bench.come()
    bench.server.begun()
    assert sent(bench.offer()) == []
    assert bench.server.deadline_s is None


def test_at_first_work_is_left_for_workers_that_have_not_offered_themselves_yet() -> None:
    """Else the first of them would get all of it."""
    bench = FrontalBench()
    bench.server.reset()
    bench.server.open(bench.placement)
    soon_s = bench.server.deadline_s
    assert soon_s == 1.0
    bench.come(M)
    bench.come(N)
    assert len(sent(bench.offer(C1B, pass_s=60.0))) == 0
    assert sent(bench.server.overdue(soon_s)) == given(M, C1B) + given(N, C1B)


def test_an_idle_worker_gets_what_another_will_not_have_done_for_some_time() -> None:
    bench = FrontalBench(C1A)
    bench.offer(C1A, pass_s=30.0)
    bench.come(M)
    bench.come(N)
    assert sent(bench.offer(C1B)) == [], "it has something to do"
    assert sent(bench.offer(C1B, idle=True)) == given(N, C1B), "the last of the other's"


def test_an_idle_worker_gets_nothing_that_another_would_have_done_before() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    assert sent(bench.offer(C1B, pass_s=30.0, idle=True)) == []


# --- workers that fail ----------------------------------------------------------------------------


def test_what_a_worker_can_not_compute_goes_to_another() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    assert sent(bench.server.again(M, C1A)) == given(M, C1B)


def test_what_nobody_can_compute_has_the_iteration_repeated() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.server.again(M, C1A)
    effects = bench.server.again(M, C1B)
    assert sent(effects) == [(D0, unable("no worker can compute it"))]


def test_a_failure_of_another_than_the_outputs_maker_changes_nothing() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1B)
    assert sent(bench.server.again(M, C1A)) == []


def test_an_output_whose_maker_fails_after_all_is_made_again() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1A)
    assert sent(bench.server.again(M, C1A)) == given(M, C1B)


def test_a_missing_output_is_made_again_even_if_the_batch_is_home() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1A)
    bench.server.begun()
    assert sent(bench.server.missing(M)) == given(M, C1B)
    assert sent(bench.server.missing(M)) == [], "it is being made"
    bench.taken(by=C1B)
    assert bench.server.deadline_s is not None
    assert sent(bench.server.overdue(bench.server.deadline_s)) == []


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


def test_a_microbatch_that_is_refused_before_it_came_waits_for_its_activation() -> None:
    bench = FrontalBench(C1A, C1B)
    assert sent(bench.server.again(M, C1A)) == []
    assert sent(bench.come()) == given(M, C1B)


def test_what_did_not_reach_its_worker_goes_to_another() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    assert sent(bench.server.undelivered(C1A, M)) == given(M, C1B)


def test_what_did_not_reach_the_only_worker_stays_with_it() -> None:
    """It is sent again by itself. To give it to the same worker again would add to that."""
    bench = FrontalBench(C1A)
    bench.come()
    assert sent(bench.server.undelivered(C1A, M)) == []
    assert bench.server.awaited == {C1A}


def test_what_did_not_arrive_and_is_done_is_not_sent_again() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1B)
    assert sent(bench.server.undelivered(C1A, M)) == []
    assert sent(bench.server.undelivered(C1A, N)) == [], "nor what was never here"


def test_what_a_worker_is_silent_about_goes_to_another_too() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    due_s = bench.server.deadline_s
    assert due_s is not None
    assert bench.server.overdue(due_s - 0.1) == []
    bench.context.now_s = due_s
    effects = bench.server.overdue(due_s)
    assert notes_of(effects) == ["task.pooled"]
    assert sent(effects) == given(M, C1B)
    assert bench.server.deadline_s is not None
    assert bench.server.deadline_s > due_s


def test_a_worker_has_a_few_times_as_long_as_is_expected_of_it() -> None:
    bench = FrontalBench(C1A)
    bench.offer(C1A, pass_s=10.0)
    expected_s = bench.server.workers.expected_s(C1A)
    bench.come()
    assert bench.server.deadline_s == pytest.approx(4 * expected_s)


def test_a_fast_worker_is_not_doubted_for_a_short_pause() -> None:
    bench = FrontalBench(C1A)
    bench.offer(C1A, pass_s=0.001)
    bench.come()
    assert bench.server.deadline_s == 2.0


def test_what_is_not_late_yet_stays_with_its_worker() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come(M)
    first_s = bench.server.deadline_s
    assert first_s is not None
    bench.context.now_s = first_s - 0.5
    bench.come(N)
    effects = bench.server.overdue(first_s)
    assert len(notes_of(effects)) == 1
    assert bench.state(N) is InputState.GIVEN


# --- backward -------------------------------------------------------------------------------------


def test_a_gradient_goes_to_the_stage_before_once() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    assert sent(bench.give_back()) == [(D0, gradient(M, Leg.ONWARD))]
    again = bench.give_back()
    assert (sent(again), len(freed(again))) == ([], 1)


def test_a_gradient_from_a_client_that_was_not_given_the_microbatch_is_refused() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    effects = bench.server.returned(C1B, M, bench.new())
    assert notes_of(effects) == ["result.refused"]
    assert sent(effects) == []
    assert sent(bench.server.returned(C1A, M, bench.new())) == [(D0, gradient(M, Leg.ONWARD))]


def test_the_place_of_a_lost_frontal_server_takes_what_workers_have_of_it() -> None:
    bench = FrontalBench(C1A)
    bench.server.mend(bench.lose("f1b"))
    effects = bench.server.returned(C1A, mb(2), bench.new())
    assert sent(effects) == [(D0, gradient(mb(2), Leg.ONWARD, version=2))]


def test_an_activation_that_comes_again_for_a_gradient_gets_the_gradient() -> None:
    """Whoever took a lost server's place in the stage before lacks it."""
    bench = FrontalBench(C1A)
    bench.come()
    bench.give_back()
    assert sent(bench.come()) == [(D0, gradient(M, Leg.ONWARD))]


def test_a_worker_that_fetches_an_activation_gets_it() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    assert sent(bench.server.fetched(C1B, M)) == [(C1B, activation(M, Leg.TASK))]


def test_what_is_fetched_before_it_came_is_sent_when_it_does() -> None:
    bench = FrontalBench()
    bench.taken(by=C1A)
    fetch = Fetch(ITERATION, 1, M)
    assert sent(bench.server.fetched(C1B, M)) == [(D0, fetch)], "it may be lost, too"
    assert bench.server.fetched(C1B, M) == [], "asked for before"
    assert sent(bench.come()) == [(C1B, activation(M, Leg.TASK))]


def test_what_a_lost_worker_asked_for_is_not_sent_to_it() -> None:
    bench = FrontalBench(C1A)
    bench.taken(by=C1A)
    bench.server.fetched(C1B, M)
    bench.server.mend(bench.lose("c1b"))
    assert sent(bench.come()) == []


def test_what_is_fetched_before_it_came_is_asked_of_who_takes_a_lost_servers_place() -> None:
    bench = SecondStage()
    bench.server.fetched(C1B, M)
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(B1B, Fetch(ITERATION, 2, M))]


# --- losses ---------------------------------------------------------------------------------------


def test_what_a_lost_worker_had_goes_to_another() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    effects = bench.server.mend(bench.lose("c1a"))
    assert sent(effects) == given(M, C1B, version=2)


def test_what_only_the_lost_worker_could_compute_has_the_iteration_repeated() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.server.again(M, C1A)
    effects = bench.server.mend(bench.lose("c1b"))
    assert sent(effects) == [(D0, unable("no worker can compute it", version=2))]


def test_what_a_living_worker_has_stays_with_it() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    assert sent(bench.server.mend(bench.lose("c1b"))) == []


def test_a_lost_workers_output_still_counts() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1A)
    assert sent(bench.server.mend(bench.lose("c1a"))) == []


def test_after_a_loss_work_is_given_out_again() -> None:
    bench = FrontalBench(C1A, window=1)
    bench.come(M)
    bench.come(N)
    bench.server.begun()
    bench.taken(M)
    assert sent(bench.server.mend(bench.lose("c1b"))) == given(N, C1A, version=2)


def test_a_new_backward_server_hears_who_makes_an_output() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(B1B, Given(ITERATION, 2, M, C1A))]


def test_a_new_backward_server_hears_who_has_made_an_output() -> None:
    bench = FrontalBench(C1A)
    bench.come()
    bench.taken()
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(B1B, Given(ITERATION, 2, M, C1A))]
    assert bench.state() is InputState.GIVEN, "it has not arrived there"


def test_an_output_whose_activation_is_lost_too_is_made_again_when_that_comes() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.taken()
    bench.server.mend(bench.lose("b1a"))
    assert bench.state() is InputState.WAITING
    assert (B1B, Given(ITERATION, 2, M, C1B)) in sent(bench.come())


def test_an_output_that_did_not_reach_a_new_backward_server_before_its_maker_was_lost() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken()
    bench.server.mend(bench.lose("b1a"))
    effects = bench.server.mend(bench.lose("b1a", "c1a", version=3))
    assert (B1B, Given(ITERATION, 3, M, C1B)) in sent(effects)


def test_an_output_that_is_lost_with_its_maker_is_made_again() -> None:
    bench = FrontalBench(C1A, C1B)
    bench.come()
    bench.taken(by=C1A)
    effects = bench.server.mend(bench.lose("b1a", "c1a"))
    assert sent(effects) == given(M, C1B, to=B1B, version=2)


def test_an_activation_that_waits_concerns_no_backward_server() -> None:
    bench = FrontalBench()
    bench.come()
    assert sent(bench.server.mend(bench.lose("b1a"))) == []


def test_the_place_of_a_lost_server_of_the_stage_before_gets_the_gradient_again() -> None:
    bench = SecondStage()
    bench.server.activation(M, bench.new())
    bench.server.gradient(M, bench.new())
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(B1B, gradient(M, Leg.ONWARD, 2))]


def test_a_gradient_that_is_needed_again_and_was_not_kept_has_the_iteration_repeated() -> None:
    bench = SecondStage()
    bench.server.activation(M, bench.new())
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.server.gradient(M, bench.new())
    effects = bench.server.mend(bench.lose("b1a"))
    assert sent(effects) == [(D0, unable("a gradient that is needed again was not kept", 2))]


def test_with_the_iteration_all_is_let_go_of() -> None:
    bench = FrontalBench(C1A)
    bench.come(M)
    bench.come(N)
    bench.give_back(M)
    bench.server.reset()
    assert bench.num_held == 3, "two activations and a gradient on their way"
    assert (bench.server.entries, bench.server.awaited, bench.room.used_bytes) == ({}, set(), 0)


class SecondStage(Bench):
    """f2a: the servers of stage 1 stand before it."""

    def __init__(self) -> None:
        super().__init__(NodeId("f2a"), stage())
        self.server = FrontalServer(self.context, self.courier, self.kept)
        self.server.open(self.placement)
