"""What a peer's loop has done: each sample counts once, or is dropped and counted as such."""

import pytest

from decod.ids import TensorId
from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.own_work import OwnWork
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.effects import FreeTensor
from decod.protocol.core.events import Tensor
from tests.unit.protocol.collaboration.rounds_cast import CONFIG, A


@pytest.fixture
def own() -> OwnWork:
    return OwnWork(A, CONFIG, TensorStore())


def give(own: OwnWork, request: int, num: int, *, num_dropped: int = 0) -> list[lp.PeerEffect]:
    tensor = Tensor(TensorId(request), 8) if num else None
    return own.contributed(lp.LoopContributed(request, num, 0, tensor, num_dropped))


def test_samples_are_outstanding_until_an_average_with_them_is_committed(own: OwnWork) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.stepped(1.0, lp.LoopStepped(8))
    assert own.num_outstanding == 16
    assert own.ask() == [lp.AskContribution(1)]
    assert give(own, 1, 16) == []
    own.stepped(2.0, lp.LoopStepped(8))
    assert (own.held and own.held.weight.num, own.num_outstanding) == (16, 24)
    assert own.count() == [FreeTensor(TensorId(1))]
    assert (own.num_applied, own.num_outstanding, own.num_stepped) == (16, 8, 24)


def test_what_a_round_went_on_without_is_outstanding_again(own: OwnWork) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    give(own, 1, 8)
    assert own.give_back() == [lp.GiveBack(TensorId(1)), FreeTensor(TensorId(1))]
    assert (own.num_outstanding, own.num_applied, own.held) == (8, 0, None)
    assert own.give_back() == [], "it is given back once"
    assert own.ask() == [lp.AskContribution(2)]


def test_the_loop_is_asked_once(own: OwnWork) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    assert own.ask()
    assert own.ask() == []
    give(own, 1, 8)
    assert own.ask() == [], "the contribution is held"


def test_a_loop_that_has_nothing_is_asked_again_for_the_next_round(own: OwnWork) -> None:
    """All of its samples were not finite, say."""
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    give(own, 1, 0, num_dropped=8)
    assert (own.held, own.promised, own.num_dropped, own.num_outstanding) == (None, False, 8, 0)
    assert own.ask() == [lp.AskContribution(2)]


def test_an_answer_to_an_old_question_is_freed(own: OwnWork) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    own.restart()
    assert give(own, 1, 8) == [FreeTensor(TensorId(1))]
    assert (own.held, own.num_outstanding, own.num_dropped) == (None, 0, 8)


def test_a_new_state_drops_all_that_was_done(own: OwnWork) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    give(own, 1, 8)
    own.stepped(1.0, lp.LoopStepped(8))
    assert own.restart() == [FreeTensor(TensorId(1))]
    assert (own.num_dropped, own.num_outstanding, own.num_stepped) == (16, 0, 16)


def test_two_contributions_of_the_same_size_have_different_digests(own: OwnWork) -> None:
    digests = set()
    for request in (1, 2):
        own.stepped(0.0, lp.LoopStepped(8))
        own.ask()
        give(own, request, 8)
        assert own.held is not None
        digests.add(own.held.weight.digest)
        own.count()
    assert len(digests) == 2


def test_a_lone_step_counts_all_that_is_outstanding(own: OwnWork) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    assert own.step_alone(1) == [lp.StepAlone(1)]
    assert own.promised
    own.applied(1)
    assert (own.alone, own.num_applied, own.num_outstanding) == (0, 8, 0)


def test_averages_wait_for_the_loop_in_order(own: OwnWork) -> None:
    store = own._tensors
    for number in (1, 2):
        store.add(Tensor(TensorId(number), 8))
        average = lp.DeliverAverage(number, TensorId(number), 0, 32, 2)
        assert own.deliver(average) == [average]
    assert (own.num_waiting, len(store)) == (2, 0)
    own.applied(2)
    assert own.num_waiting == 2, "they are applied in order"
    own.applied(1)
    own.applied(2)
    assert own.num_waiting == 0


def test_a_step_lasts_from_the_answer_to_the_next_question(own: OwnWork) -> None:
    """Waiting is no work, so it does not count."""
    own.goes_on(0.0)
    own.stepped(2.0, lp.LoopStepped(8))
    own.goes_on(10.0)
    own.stepped(12.0, lp.LoopStepped(8))
    assert own.step_s == pytest.approx(2.0)
    assert own.samples_per_s == pytest.approx(4.0)


def test_a_pause_is_no_step(own: OwnWork) -> None:
    """After it, peers that took it for one would wait for each other for as long."""
    for number in range(10):
        own.goes_on(number)
        own.stepped(number + 0.5, lp.LoopStepped(8))
    own.goes_on(10.0)
    own.stepped(100.0, lp.LoopStepped(8))
    assert own.step_s == pytest.approx(0.6)


def test_a_first_step_that_takes_long_is_forgotten_at_once(own: OwnWork) -> None:
    own.goes_on(0.0)
    own.stepped(60.0, lp.LoopStepped(8))
    own.goes_on(60.0)
    own.stepped(60.5, lp.LoopStepped(8))
    assert (own.step_s, own.samples_per_s) == (pytest.approx(0.5), pytest.approx(16.0))


def test_steps_that_have_become_slower_are_known_soon(own: OwnWork) -> None:
    own.goes_on(0.0)
    own.stepped(0.5, lp.LoopStepped(8))
    for number in range(1, 40):
        own.goes_on(10.0 * number)
        own.stepped(10.0 * number + 5.0, lp.LoopStepped(8))
    assert own.step_s == pytest.approx(5.0, rel=0.05)
