"""The account of a peer's samples, where the loop gives samples before it has told of them.

A loop that accumulates has gradients of half a step. It gives them if it is asked then.
"""

from decod.ids import NodeId, TensorId
from decod.protocol.collaboration.loop import LoopContributed, LoopStepped, RoundConfig
from decod.protocol.collaboration.own_work import OwnWork
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.events import Tensor


def test_samples_of_half_a_step_count_once() -> None:
    own = OwnWork(NodeId("a" * 52), RoundConfig(target_batch_size=64), TensorStore())
    own.stepped(1.0, LoopStepped(32))
    own.ask()
    given = Tensor(TensorId(1), 8)
    own.contributed(LoopContributed(request=1, num_samples=48, base_round=0, tensor=given))
    assert own.held is not None
    assert own.held.weight.num == 48
    assert own.num_outstanding == 32
    own.count()
    assert (own.num_applied, own.num_outstanding) == (48, 0)
    own.stepped(2.0, LoopStepped(32))
    assert (own.num_stepped, own.num_outstanding) == (64, 16)
