"""What a daemon waits for is told while it lasts, and by its log if it lasts for long."""

import asyncio
from typing import Any

import pytest

from decod.daemon.waits import PATIENCE_S, OpenWaits
from decod.journal.event_specs import render_note
from tests.waiting import wait_until


def test_a_wait_is_told_as_long_as_it_lasts() -> None:
    notes = list[tuple[str, dict[str, Any]]]()
    waits = OpenWaits(lambda event, **fields: notes.append((event, fields)), patience_s=0.0)

    async def test() -> None:
        async with waits.of("torch to load"):
            assert [one["what"] for one in waits.describe()] == ["torch to load"]
            async with waits.of("a friend"):
                assert len(waits.describe()) == 2
            await wait_until(lambda: bool(notes))
        assert waits.describe() == []

    asyncio.run(test())
    assert notes[0] == ("wait.lasting", {"what": "torch to load", "seconds": 0})
    assert render_note(*notes[0]) == "waiting for torch to load, for 0 s so far"


def test_a_short_wait_is_not_in_the_log_and_an_error_ends_a_wait() -> None:
    notes = list[str]()
    waits = OpenWaits(lambda event, **_: notes.append(event))

    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with waits.of("nothing"), asyncio.timeout(0):
                await asyncio.Event().wait()
        assert waits.describe() == []

    asyncio.run(test())
    assert not notes
    assert PATIENCE_S == 2.0
