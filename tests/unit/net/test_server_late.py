"""Tensors that come too slowly: they are given up, and whose they were is told."""

import grpc
import grpc.aio
import pytest

from decod.net import channel
from decod.net.net_limits import Limits
from tests.support.peers import ALICE, OURS, RUN, Pair, header, with_pair


@pytest.mark.parametrize("first", [[], [header()]], ids=["nothing", "header"])
def test_a_stalled_stream_is_given_up_and_its_sender_named(first: list[bytes]) -> None:
    """A peer that sends a header and falls silent must not hold memory for ever."""

    async def test(both: Pair) -> None:
        opened, push = both.push()
        async with opened:
            call = push(metadata=OURS)
            for frame in first:
                await call.write(frame)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.ABORTED
        assert both.bob.num_given_back == both.bob.num_allocated == len(first)
        assert both.bob.late == [ALICE]

    with_pair(test, Limits(rate_grace_s=0.1, rate_min_bytes_per_s=2**30))


def test_a_stalled_probe_is_given_up_without_a_word() -> None:
    """That a slow link is slow still is no news."""

    async def test(both: Pair) -> None:
        opened, push = both.push()
        async with opened:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await push(metadata=channel.probe_metadata(RUN))
            assert caught.value.code() is grpc.StatusCode.ABORTED
        assert both.bob.late == []

    with_pair(test, Limits(rate_grace_s=0.1, rate_min_bytes_per_s=2**30))
