"""A data node's share of the batch, where stages have servers."""

import pytest

from decod.ids import Iteration, MicrobatchId
from decod.protocol.core.effects import Effect
from decod.protocol.core.jobs import Drop, Embed, EmbedBackward, Forward, Head, Loss
from decod.protocol.core.messages import Report
from decod.protocol.core.messages.server_messages import Leg
from decod.protocol.core.view import View
from decod.protocol.strategy.servers.home import HomeMicrobatches
from tests.unit.protocol.cast import (
    B2A,
    D0,
    F1A,
    F1B,
    F2A,
    configured,
    freed,
    jobs_of,
    mb,
    member,
    notes_of,
    sent,
    settle,
    view_of,
)
from tests.unit.protocol.servers_cast import Bench, activation, gradient, stage

M, N = mb(0), mb(1)
NUM = 2


class HomeBench(Bench):
    """d0 with two microbatches, which go to f1a and f1b and come home from b2a."""

    def __init__(self, view: View | None = None, num: int = NUM) -> None:
        super().__init__(D0, view or stage())
        self.num_home = 0
        self.home = HomeMicrobatches(
            self.context, self.courier, self.kept, self._came_home, num_microbatches=num
        )

    def _came_home(self) -> list[Effect]:
        self.num_home += 1
        return []

    def open(self) -> list[Effect]:
        return self.home.open(self.placement)

    def embedded(self, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.end(Embed(microbatch))

    def come(self, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.home.activation(microbatch, self.new())

    def headed(self, microbatch: MicrobatchId = M) -> list[Effect]:
        """Bring a microbatch to its loss."""
        self.embedded(microbatch)
        self.come(microbatch)
        return self.end(Head(microbatch), result=Loss(2.0, 3))

    def come_back(self, microbatch: MicrobatchId = M) -> list[Effect]:
        return self.home.gradient(microbatch, self.new())

    def finish(self, microbatch: MicrobatchId = M) -> list[Effect]:
        """Bring a microbatch all the way home."""
        effects = self.headed(microbatch) + self.come_back(microbatch)
        return effects + self.end(EmbedBackward(microbatch), num_outputs=0)


def reports(effects: list[Effect]) -> list[Report]:
    return [message for _, message in sent(effects) if isinstance(message, Report)]


# --- a microbatch's way ---------------------------------------------------------------------------


def test_a_share_begins_with_its_embeddings() -> None:
    assert jobs_of(HomeBench().open()) == [Embed(M), Embed(N)]


def test_an_embedding_goes_to_the_first_stages_frontal_server_of_its_index() -> None:
    bench = HomeBench()
    bench.open()
    assert sent(bench.embedded(M)) == [(F1A, activation(M, Leg.ONWARD))]
    assert sent(bench.end(Embed(N))) == [(F1A, activation(N, Leg.ONWARD))]
    assert bench.home.awaited == {B2A}


def test_an_output_that_comes_home_gets_its_loss_and_the_gradient_goes_back() -> None:
    bench = HomeBench()
    bench.open()
    bench.embedded()
    assert jobs_of(bench.come()) == [Head(M)]
    effects = bench.end(Head(M), result=Loss(2.0, 3))
    assert sent(effects) == [(B2A, gradient(M, Leg.ONWARD))]
    assert bench.home.awaited == {F1A}


def test_a_gradient_that_comes_home_is_folded_in() -> None:
    bench = HomeBench()
    bench.open()
    bench.headed()
    assert jobs_of(bench.come_back()) == [EmbedBackward(M)]
    assert not bench.home.all_done
    bench.end(EmbedBackward(M), num_outputs=0)
    assert (bench.home.folded, bench.num_home) == ([M], 1)


def test_the_share_is_reported_when_all_of_it_is_on_its_last_way() -> None:
    bench = HomeBench()
    bench.open()
    assert reports(bench.finish(M)) == []
    bench.headed(N)
    (report,) = reports(bench.come_back(N))
    assert (report.num_committed, report.loss_sum, report.num_tokens) == (2, 4.0, 6)
    bench.end(EmbedBackward(N), num_outputs=0)
    assert bench.home.all_done


@pytest.mark.parametrize(("clients", "num"), [((), 2), (("c2a",), 4), (("c2a", "c1a"), 6)], ids=str)
def test_no_more_are_under_way_than_the_smallest_stage_has_room_for_twice(
    clients: tuple[str, ...], num: int
) -> None:
    servers = [member(name, capacity=1) for name in ("f1a", "b1a", "f2a")]
    bench = HomeBench(view_of(member("d0", capacity=99), *servers, *clients), num=30)
    bench.open()
    assert len(bench.home.held) == num


def test_no_more_are_under_way_than_the_data_node_holds() -> None:
    view = view_of(member("d0", capacity=1), "f1a", "b1a")
    bench = HomeBench(view)
    assert jobs_of(bench.open()) == [Embed(M)]
    assert jobs_of(bench.finish(M)) == [Head(M), EmbedBackward(M), Embed(N)][1:]


def test_data_nodes_share_a_stages_room() -> None:
    room = [member(f"d{index}", capacity=9) for index in range(2)]
    bench = HomeBench(view_of(*room, member("f1a", capacity=1), member("b1a", capacity=1)), 9)
    bench.open()
    assert len(bench.home.held) == 2


def test_who_is_about_to_leave_reads_nothing_and_says_so() -> None:
    bench = HomeBench(view_of(member("d0", capacity=0), "d1", "f1a", "b1a"))
    (report,) = reports(bench.open())
    assert (report.num_committed, bench.home.held) == (0, {})


# --- what comes twice -----------------------------------------------------------------------------


def test_an_output_that_comes_twice_gets_one_loss() -> None:
    bench = HomeBench()
    bench.open()
    bench.embedded()
    bench.come()
    again = bench.come()
    assert (jobs_of(again), sent(again), len(freed(again))) == ([], [], 1)


def test_who_sends_an_output_again_lacks_its_gradient() -> None:
    """It has taken the place of a lost server."""
    bench = HomeBench()
    bench.open()
    bench.headed()
    assert sent(bench.come()) == [(B2A, gradient(M, Leg.ONWARD))]


def test_an_output_of_what_was_never_sent_is_let_go_of() -> None:
    bench = HomeBench()
    bench.open()
    effects = bench.come(mb(77))
    assert (sent(effects), len(freed(effects))) == ([], 1)


def test_a_gradient_that_comes_twice_or_too_early_is_folded_in_once() -> None:
    bench = HomeBench()
    bench.open()
    assert len(freed(bench.come_back())) == 1
    bench.headed()
    bench.come_back()
    again = bench.come_back()
    assert (jobs_of(again), len(freed(again))) == ([], 1)
    bench.end(EmbedBackward(M), num_outputs=0)
    assert len(freed(bench.come_back())) == 1


# --- a device that refuses ------------------------------------------------------------------------


def test_a_refused_embedding_is_put_off_to_a_later_iteration() -> None:
    bench = HomeBench()
    bench.open()
    effects = bench.refuse(Embed(M))
    assert "microbatch.deferred" in notes_of(effects)
    assert Drop(M) in jobs_of(effects)
    (report,) = reports(effects + bench.finish(N))
    assert (report.num_committed, report.num_deferred) == (1, 1)
    bench.home.committed(marked=False)
    bench.home.reset()
    assert M in bench.home.share.deferrals


def test_what_was_put_off_is_sent_first_when_it_is_due() -> None:
    bench = HomeBench()
    bench.open()
    bench.refuse(Embed(M))
    bench.finish(N)
    bench.home.committed(marked=False)
    bench.home.reset()
    bench.context.iteration = Iteration(2, 1)
    assert jobs_of(bench.open())[0] == Embed(M)


def test_after_a_refused_loss_the_iteration_is_repeated() -> None:
    bench = HomeBench()
    bench.open()
    bench.embedded()
    bench.come()
    (report,) = reports(bench.refuse(Head(M), "a value is nan"))
    assert report.failure == f"microbatch {M}: a value is nan"


def test_a_refusal_of_what_is_held_no_more_changes_nothing() -> None:
    bench = HomeBench()
    bench.open()
    bench.home.reset()
    assert [e for e in bench.refuse(Embed(M)) if "deferred" in str(e)] == []


def test_the_leader_is_asked_once_to_repeat_an_iteration() -> None:
    bench = HomeBench()
    bench.open()
    assert len(reports(bench.home.unable(M, "no worker can compute it"))) == 1
    assert bench.home.unable(N, "no worker can compute it") == []
    assert bench.home.mend(bench.lose("f1a")) == []


def test_other_jobs_are_none_of_a_data_nodes() -> None:
    bench = HomeBench()
    bench.context.compute.submit(Forward(M), bench.home)
    with pytest.raises(AssertionError, match="no pass"):
        bench.end(Forward(M))


# --- lost servers ---------------------------------------------------------------------------------


def test_the_place_of_a_lost_first_server_gets_the_activation_again() -> None:
    bench = HomeBench()
    bench.open()
    bench.embedded()
    effects = bench.home.mend(bench.lose("f1a"))
    assert sent(effects) == [(F1B, activation(M, Leg.ONWARD, 2))]


def test_the_place_of_a_lost_last_server_gets_the_gradient_again() -> None:
    bench = HomeBench()
    bench.open()
    bench.headed()
    effects = bench.home.mend(bench.lose("b2a"))
    assert sent(effects) == [(F2A, gradient(M, Leg.ONWARD, 2))]


def test_what_is_home_is_sent_again_as_well_and_reported_again() -> None:
    bench = HomeBench()
    bench.open()
    bench.finish(M)
    bench.finish(N)
    effects = bench.home.mend(bench.lose("f1a", "b2a"))
    ways = [(to, type(message).__name__) for to, message in sent(effects)]
    both = [(F1B, "StageActivation"), (F2A, "StageGradient")]
    assert ways == [*both, *both, (D0, "Report")]


def test_what_has_not_gone_that_far_is_not_sent_again() -> None:
    bench = HomeBench()
    bench.open()
    bench.embedded(N)
    effects = bench.home.mend(bench.lose("f1a", "b2a"))
    assert sent(effects) == [(F1B, activation(N, Leg.ONWARD, 2))]


def test_an_activation_that_is_needed_again_and_was_not_kept_has_the_iteration_repeated() -> None:
    bench = HomeBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.open()
    bench.embedded()
    (report,) = reports(bench.home.mend(bench.lose("f1a")))
    assert report.failure.endswith("an activation that is needed again was not kept")


def test_a_gradient_that_is_needed_again_and_was_not_kept_has_the_iteration_repeated() -> None:
    bench = HomeBench()
    settle(bench.context, protocol=configured(keep_max_bytes=0))
    bench.open()
    bench.headed()
    (report,) = reports(bench.home.mend(bench.lose("b2a")))
    assert report.failure.endswith("a gradient that is needed again was not kept")


def test_a_loss_elsewhere_sends_nothing_again() -> None:
    bench = HomeBench()
    bench.open()
    bench.embedded()
    assert sent(bench.home.mend(bench.lose("c1a"))) == []


# --- iterations -----------------------------------------------------------------------------------


def test_with_the_iteration_all_is_let_go_of() -> None:
    bench = HomeBench()
    bench.open()
    bench.headed()
    bench.home.reset()
    assert bench.num_held == 2, "an activation and a gradient on their way"
    assert (bench.home.held, bench.home.folded, bench.room.used_bytes) == ({}, [], 0)


def test_what_was_put_off_since_then_is_forgotten_when_the_run_goes_back() -> None:
    bench = HomeBench()
    bench.open()
    bench.refuse(Embed(M))
    bench.finish(N)
    bench.home.committed(marked=True)
    bench.home.reset()
    bench.home.go_back(0)
    assert M not in bench.home.share.deferrals
