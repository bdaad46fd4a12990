"""Whatever comes on a method, a server goes on. `scripts/fuzz_wire.py` throws far more."""

import asyncio
import random

import pytest

from tests.support.garbled import METHODS, besiege

MIB = 1 << 20
NUM = 400


@pytest.mark.parametrize("method", [*METHODS], ids=lambda each: each.rpartition("/")[2])
def test_garbled_requests_do_no_damage(method: str, caplog: pytest.LogCaptureFixture) -> None:
    siege = asyncio.run(besiege(NUM, random.Random(method), [method]))
    assert not siege.errors
    assert siege.num_thrown[method] >= NUM
    assert 0 < siege.num_malformed < NUM
    assert siege.grown_bytes < 32 * MIB
    assert max(siege.beats_s, default=0.0) < 2.0
    assert not [record for record in caplog.records if record.exc_info], "no traceback"
