"""A node's tensors are counted by purpose; the time of sends that overlap counts once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.daemon.gateway import TensorTraffic
from decod.ids import AveragingId, FlowId, Iteration, MicrobatchId, NodeId
from decod.protocol.core.durations import BusyTime
from decod.protocol.core.messages import LinkProbe
from decod.protocol.core.messages.averaging_messages import ReducePart
from decod.protocol.core.messages.microbatch_messages import BackwardGradient

SPANS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 40)), max_size=30)


@given(SPANS, st.integers(0, 60))
def test_busy_time_is_that_of_the_union(spans: list[tuple[int, int]], since: int) -> None:
    busy, covered = BusyTime(), set[int]()
    for end, length in sorted(spans):
        busy.add(float(end), float(length))
        covered |= {tick for tick in range(end - length, end) if tick >= since}
    assert busy.take(float(since)) == pytest.approx(len(covered))
    assert busy.take(0.0) == 0


GRADIENT = BackwardGradient(
    Iteration(1, 1), MicrobatchId(1, 0, 0), FlowId(NodeId("a"), 0), (NodeId("b"),)
)
PART = ReducePart(AveragingId(Iteration(1, 1), 1), 0, 1, 5)


async def test_tensors_are_counted_by_purpose_since_the_last_look() -> None:
    traffic, now_s = TensorTraffic(), asyncio.get_running_loop().time()
    traffic.sent(GRADIENT, 0.5, 100)
    traffic.sent(PART, 0.25, 30)
    traffic.received(PART, 7)
    traffic.sent(LinkProbe(), 9.0, 1000)
    passes, averages = traffic.take(now_s - 100)
    assert (passes.sent_bytes, passes.received_bytes) == (100, 0)
    assert passes.sending_s == pytest.approx(0.5)
    assert (averages.sent_bytes, averages.received_bytes) == (30, 7)
    assert averages.sending_s == pytest.approx(0.25)
    passes, averages = traffic.take(now_s)
    assert passes.sent_bytes == averages.sent_bytes == averages.received_bytes == 0
