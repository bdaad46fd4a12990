"""The state that a node fetches, as a bar below the lines of its terminal."""

import asyncio
from collections.abc import Callable

from decod.driver.fetching import outlook
from decod.obs.terminal import PatientTerminal
from decod.texts import size_text, span
from decod.train.checkpoint.description import Transfer

_INTERVAL_S = 0.5
_BAR_CHARACTERS = 24


async def show_transfer(transfer: Callable[[], Transfer | None], terminal: PatientTerminal) -> None:
    """Show a transfer while there is one. Never returns; cancel it.

    Args:
        transfer: Returns the transfer that is under way, if there is one.
        terminal: Shows it, if it is a terminal.
    """
    loop, shown = asyncio.get_running_loop(), False
    try:
        while terminal.redraws:
            found = transfer()
            if found is not None or shown:
                terminal.show("" if found is None else transfer_text(found, loop.time()))
            shown = found is not None
            await asyncio.sleep(_INTERVAL_S)
    finally:
        terminal.show("")


def transfer_text(transfer: Transfer, now_s: float) -> str:
    """Return the progress of a transfer at `now_s`, on the loop's clock, in a line."""
    found = outlook(transfer, now_s)
    done = round(_BAR_CHARACTERS * found.percent / 100)
    bar = "#" * done + "-" * (_BAR_CHARACTERS - done)
    size = f"{size_text(transfer.num_arrived)} of {size_text(transfer.num_bytes)}"
    rate = f"{size_text(found.bytes_per_s)}/s"
    left = "" if found.left_s is None else f", {span(found.left_s)} left"
    return f"state of stage {transfer.stage_index} [{bar}] {size}, {rate}{left}"
