"""The bar of a state that a node fetches."""

import asyncio
from typing import cast

import pytest

from decod.daemon import progress_display as module
from decod.daemon.progress_display import show_transfer, transfer_text
from decod.journal.terminal import PatientTerminal
from decod.train.checkpoint.description import Transfer
from tests.waiting import wait_until

MIB = 1 << 20


class FakeTerminal:
    """Remembers what is shown."""

    def __init__(self, *, redraws: bool = True) -> None:
        self.redraws = redraws
        self.shown: list[str] = []

    def show(self, text: str) -> None:
        self.shown.append(text)


def half() -> Transfer:
    return Transfer(2, 7, num_bytes=200 * MIB, num_arrived=100 * MIB, begun_s=10.0)


def test_the_bar_shows_how_much_is_here_and_how_long_it_takes() -> None:
    bar = "#" * 12 + "-" * 12
    text = f"state of stage 2 [{bar}] 100.0 MiB of 200.0 MiB, 2.0 MiB/s, 51 s left"
    assert transfer_text(half(), 60.0) == text


async def test_nothing_is_shown_but_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, box = FakeTerminal(), list[Transfer | None]([None])
    monkeypatch.setattr(module, "_BAR_INTERVAL_S", 0.001)
    showing = asyncio.create_task(show_transfer(lambda: box[0], cast("PatientTerminal", terminal)))
    await asyncio.sleep(0)
    assert terminal.shown == []
    box[0] = half()
    await wait_until(lambda: len(terminal.shown) > 2)
    assert terminal.shown[0].startswith("state of stage 2 [")
    box[0] = None
    await wait_until(lambda: terminal.shown[-1] == "")
    num_shown = len(terminal.shown)
    showing.cancel()
    await asyncio.wait({showing})
    assert terminal.shown[num_shown:] == [""]


async def test_a_log_gets_no_bar() -> None:
    terminal = FakeTerminal(redraws=False)
    await show_transfer(half, cast("PatientTerminal", terminal))
    assert terminal.shown == [""]
