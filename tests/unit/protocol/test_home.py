"""A data node's share of the batch, where stages have servers."""

import pytest

from decod.ids import Iteration, MicrobatchId
from decod.protocol.core.effects import Effect
from decod.protocol.core.jobs import Embed, EmbedBackward, Forward, Head, Loss
from decod.protocol.core.messages.microbatch_messages import Report
from decod.protocol.core.view import View
from decod.protocol.strategy.servers.home import HomeMicrobatches
from tests.unit.protocol.cast import D0, Heard, configured, freed, jobs_of, mb, reopen, sent, settle
from tests.unit.protocol.servers_cast import Bench, stage

M, N = mb(0), mb(1)
NUM = 2


class HomeBench(Bench):
    """d0 with two microbatches, which go to f1a and f1b and come home from b2a."""

    def __init__(self, view: View | None = None, num: int = NUM) -> None:
        super().__init__(D0, view or stage())
        self.num_home = 0
        self.home = Heard(
            HomeMicrobatches(
                self.context, self.courier, self.kept, self._came_home, num_microbatches=num
            )
        )

    def _came_home(self) -> None:
        self.num_home += 1

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


# --- what comes twice -----------------------------------------------------------------------------


def test_an_output_of_what_was_never_sent_is_let_go_of() -> None:
    bench = HomeBench()
    bench.open()
    effects = bench.come(mb(77))
    assert (sent(effects), len(freed(effects))) == ([], 1)


# --- a device that refuses ------------------------------------------------------------------------


def test_what_was_put_off_is_sent_first_when_it_is_due() -> None:
    bench = HomeBench()
    bench.open()
    bench.refuse(Embed(M))
    bench.finish(N)
    bench.home.committed(marked=False)
    bench.home.reset()
    reopen(bench.context, iteration=Iteration(2, 1))
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
