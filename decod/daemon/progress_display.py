"""Progress of training on the terminal: a line for the last commit, at most one a second.

    12:03:41 brave-otter  iteration 12 of 200  loss 3.2012 (-0.1034)  4029 tokens/s  9 m left

The number in brackets compares the loss with the mean of the iterations before: training goes well
if it is negative. `decod demo` and the benchmarks read these lines.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime

from decod.clocks import wall_clock
from decod.driver.driver import outlook
from decod.journal.run_progress import RunProgress
from decod.journal.terminal import PatientTerminal
from decod.texts import size_text, span
from decod.train.checkpoint.description import Transfer

_INTERVAL_S = 1.0


class ProgressDisplay:
    """The lines on a node's commits. A commit within a second after a line gets none.

    Args:
        progress: The run's progress at the node.
        say: Takes lines for the operator's terminal.
        name: This node's.
    """

    def __init__(self, progress: RunProgress, say: Callable[[str], None], name: str) -> None:
        self._progress, self._say, self._name = progress, say, name
        self._shown_s = 0.0
        self._iteration = progress.iteration
        progress.on_commit.append(self._show)

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _INTERVAL_S:
            self._shown_s = now_s
            self._show_now()

    def stop(self) -> None:
        """Stop showing progress. Another object shows it from now on."""
        self._progress.on_commit.remove(self._show)
        self._iteration = self._progress.iteration

    def show_last(self) -> None:
        """Show the last commit, if it has not been shown."""
        if self._progress.iteration != self._iteration:
            self._show_now()

    def _show_now(self) -> None:
        self._iteration = self._progress.iteration
        now = datetime.fromtimestamp(wall_clock()).astimezone()
        self._say(f"{now:%H:%M:%S} {self._name}  {progress_text(self._progress)}")


def progress_text(progress: RunProgress) -> str:
    """Return the last iteration, its loss and trend, the speed and the time left, in a line."""
    total = f" of {progress.num_iterations}" if progress.num_iterations else ""
    # A node that enters a run after a rollback knows the iteration, but not its loss.
    loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
    change = progress.loss_change
    trend = "" if change is None else f" ({change:+.4f})"
    rate = f"{progress.tokens_per_s:.0f} tokens/s" if progress.tokens_per_s else "-"
    left = f"  {span(progress.left_s)} left" if progress.left_s else ""
    return f"iteration {progress.iteration}{total}  loss {loss}{trend}  {rate}{left}"


# --- a state that is fetched ---------------------------------------------------------------------
# The state that a node fetches, as a bar below the lines of its terminal.


_BAR_INTERVAL_S = 0.5
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
            await asyncio.sleep(_BAR_INTERVAL_S)
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
