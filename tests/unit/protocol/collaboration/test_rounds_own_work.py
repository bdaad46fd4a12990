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
def out() -> lp.PeerSink:
    return lp.PeerSink()


@pytest.fixture
def own(out: lp.PeerSink) -> OwnWork:
    return OwnWork(A, CONFIG, TensorStore(out), out)


def give(own: OwnWork, request: int, num: int, *, num_dropped: int = 0) -> None:
    tensor = Tensor(TensorId(request), 8) if num else None
    own.contributed(lp.LoopContributed(request, num, 0, tensor, num_dropped))


def test_the_loop_is_asked_once(own: OwnWork, out: lp.PeerSink) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    assert out.taken()
    own.ask()
    assert out.taken() == []
    give(own, 1, 8)
    own.ask()
    assert out.taken() == [], "the contribution is held"


def test_an_answer_to_an_old_question_is_freed(own: OwnWork, out: lp.PeerSink) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    own.restart()
    out.taken()
    give(own, 1, 8)
    assert out.taken() == [FreeTensor(TensorId(1))]
    assert (own.held, own.num_outstanding, own.num_dropped) == (None, 0, 8)


def test_a_new_state_drops_all_that_was_done(own: OwnWork, out: lp.PeerSink) -> None:
    own.stepped(0.0, lp.LoopStepped(8))
    own.ask()
    give(own, 1, 8)
    own.stepped(1.0, lp.LoopStepped(8))
    out.taken()
    own.restart()
    assert out.taken() == [FreeTensor(TensorId(1))]
    assert (own.num_dropped, own.num_outstanding, own.num_stepped) == (16, 0, 16)
