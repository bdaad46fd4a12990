"""Writes a leader's rows for TensorBoard and Weights & Biases, until its standard input ends.

The node process starts it. The first line is what `TrackingPlan.to_json` returns, each further one
a row. If a tracker fails, one line on standard output says so; rows go on to be tried, and only a
failure after a success is told again. Nobody types this command.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from decod.texts import why_of


class Tracker(Protocol):
    """Takes the numbers of iterations."""

    def write(self, iteration: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Write some numbers. `time_s` is in seconds of the Unix epoch. May raise anything."""

    def close(self) -> None:
        """Write what is left. May raise anything."""


class Careful:
    """A tracker that is opened by the first row, and whose failures are told and no more.

    Args:
        name: Of the tracker.
        open_tracker: Returns it, or raises.
        tell: Takes the name, and the reason of a failure.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], tell: Callable[[str, str], None]
    ) -> None:
        self._name, self._open, self._tell = name, open_tracker, tell
        self._tracker: Tracker | None = None
        self._told = False

    def write(self, iteration: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Write some numbers, or say why not."""

        def work() -> None:
            self._tracker = self._tracker or self._open()
            self._tracker.write(iteration, time_s, numbers)

        self._try(work)

    def close(self) -> None:
        """Write what is left, or say why not."""
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a foreign library; told, and tried again.
            if not self._told:
                reason = why_of(error) if isinstance(error, OSError) else str(error)
                self._tell(self._name, reason or type(error).__name__)
            self._told = True
        else:
            self._told = False


def trackers_of(plan: Mapping[str, Any], tell: Callable[[str, str], None]) -> list[Careful]:
    """Return the trackers that a plan names."""
    found = []
    if (folder := plan["tensorboard_dir"]) is not None:

        def tensorboard() -> Tracker:
            from decod.daemon.tracking.tensorboard import TensorBoardFolder

            return TensorBoardFolder(Path(folder) / f"{plan['run_name']}-{plan['run_id'][:8]}")

        found.append(Careful("TensorBoard", tensorboard, tell))
    if (project := plan["wandb_project"]) is not None:

        def wandb() -> Tracker:
            from decod.daemon.tracking.weights_and_biases import WandbRun

            return WandbRun(project, plan["run_name"], plan["run_id"], plan["config"])

        found.append(Careful("W&B", wandb, tell))
    return found


def main() -> None:
    """Write rows until standard input ends."""
    # tensorboardX loads torch if it finds it. Here nobody needs it, and it is large.
    sys.modules.update({"torch": None})  # type: ignore[dict-item]  # As if it were missing.
    # Standard output is for failures alone: libraries that print do it elsewhere.
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(tracker: str, reason: str) -> None:
        said.write(json.dumps({"tracker": tracker, "reason": reason[:500]}) + "\n")

    trackers = trackers_of(json.loads(sys.stdin.readline()), tell)
    for line in sys.stdin:
        row = json.loads(line)
        numbers = {name: float(value) for name, value in row["numbers"].items()}
        for tracker in trackers:
            tracker.write(row["iteration"], row["time_s"], numbers)
    for tracker in trackers:
        tracker.close()


if __name__ == "__main__":
    main()
