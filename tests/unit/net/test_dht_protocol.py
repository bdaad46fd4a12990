"""Whatever comes on the UDP port, a node goes on. `scripts/fuzz_wire.py` throws far more."""

import asyncio
import random

import pytest

from tests.support.hostile import bombard

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(2))
def test_hostile_datagrams_do_no_damage(seed: int) -> None:
    damage = asyncio.run(bombard(4000, random.Random(seed)))
    assert not damage.errors
    assert damage.works
    assert damage.num_thrown == 4000
    assert damage.num_kept < 50
    assert damage.grown_bytes < 16 * MIB
