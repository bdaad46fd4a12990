"""Tensors that come too slowly: they are given up, and whose they were is told."""

import pytest

from decod.net.net_limits import Limits
from decod.net.tensor_stream import PROBES
from tests.support.peers import ALICE, Pair, header, with_pair
from tests.waiting import wait_until

STRICT = Limits(rate_grace_s=0.1, rate_min_bytes_per_s=2**30)


def test_a_tensor_that_stalls_is_given_up_and_its_sender_named() -> None:
    """A peer that sends a header and falls silent must not hold memory for ever."""

    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            await sending.head(header())
            with pytest.raises(ConnectionError):
                await sending.answer()
        await wait_until(lambda: both.bob.late == [ALICE])
        assert both.bob.num_given_back == both.bob.num_allocated == 1

    with_pair(test, STRICT)


def test_a_probe_that_stalls_is_given_up_without_a_word() -> None:
    """That a slow link is slow still is no news."""

    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            await sending.head(header(), PROBES)
            with pytest.raises(ConnectionError):
                await sending.answer()
        assert both.bob.num_allocated == both.bob.num_given_back == 1
        assert both.bob.late == []

    with_pair(test, STRICT)
