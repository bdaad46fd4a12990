"""Writes loss and rates of the iterations that this node commits as the leader into a file.

A row is collected from the core's notes on a commit. A thread writes it, so a slow or full disk
does not disturb training: rows wait in memory until they can be written. TensorBoard and W&B get
the same rows, if the operator wants that.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self

from decod.config.node_config import NodeConfig
from decod.daemon.run_facts import RunPart
from decod.daemon.tracking.tracking import Tracking, tracking_plan
from decod.ids import NodeId, iteration_of
from decod.journal.iteration_file import FILE_NAME, IterationFile
from decod.protocol.core.effects import CountWork
from decod.tasks import in_thread
from decod.texts import why_of
from decod.train.checkpoint.store import run_folder, run_id_of
from decod.wall_clock import wall_clock

ROWS_WAITING_MAX = 10_000
"""Rows that wait for the disk. Of more, the oldest are dropped."""

TRACKED = ("loss", "tokens_per_s", "gradient_norm", "num_members")
"""Columns that trackers get."""

_PASSES_PER_MICROBATCH = 3
"""Of a data node: embedding, head with loss, and the embedding's backward pass."""

_END_S = 2.0
"""How long the end waits for a disk that hangs."""


class IterationLog:
    """Writes the iterations of a leader. Use it in `async with`. Elsewhere it writes nothing.

    Args:
        file: Gets the rows.
        run_id: Of the run.
        own: This node.
        note: Takes the name of an event, and its fields as keywords.
        clock: Returns monotonic seconds.
        tracking: Gets the rows too.
    """

    def __init__(
        self,
        file: IterationFile,
        run_id: str,
        own: NodeId,
        note: Callable[..., None],
        clock: Callable[[], float],
        tracking: Tracking | None = None,
    ) -> None:
        self._file, self._run_id, self._own = file, run_id, own
        self._note, self._clock, self._tracking = note, clock, tracking
        self._row: dict[str, object] | None = None
        """Of the iteration that has just been committed, until all of it is known."""
        self._num_members: object = None
        self._committed_s: float | None = None
        self._num_passes = 0
        self._waiting: deque[dict[str, object]] = deque(maxlen=ROWS_WAITING_MAX)
        self.writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nothing is being written."""
        self.writing.set_result(None)
        self._told = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._finish_row()
        self._start_writing()
        await asyncio.wait({self.writing}, timeout=_END_S)
        if self.writing.done():
            self._file.close()
        if self._tracking is not None:
            await self._tracking.close()

    def take(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in one note of the core, or of an evaluation. Never waits and never raises."""
        if event == "iteration.opened":
            self._finish_row()
            self._num_members = fields["num_members"]
        elif event == "iteration.committed":
            self._finish_row()
            self._row = self._begun_row(fields)
        elif event == "step.committed":
            self._take_step(fields)
        elif event == "evaluation.done" and self._tracking is not None:
            self._tracking.take(int(fields["iteration"]), {"held_out_loss": fields["loss"]})

    def count(self, work: CountWork) -> None:
        """Take in how much this node has worked in an iteration that is committed."""
        row = self._row
        if row is not None and row["iteration"] == work.iteration and "num_passes" in row:
            needed = _PASSES_PER_MICROBATCH * dict(work.work).get(self._own, 0)
            row["num_passes_wasted"] = max(0, int(str(row["num_passes"])) - needed)

    def _begun_row(self, fields: Mapping[str, Any]) -> dict[str, object]:
        now = datetime.fromtimestamp(wall_clock(), UTC)
        era, _, numbered = str(fields["iteration"]).rpartition(":")
        number, _, attempt = numbered.partition(".")
        told = ("loss", "num_tokens", "duration_s", "num_microbatches", "num_deferred")
        return {
            "iteration": int(number),
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **{name: fields.get(name) for name in told},
            "num_reread": fields.get("num_reread", 0),
            "num_members": self._num_members,
            "attempt": int(attempt),
            "era": int(era.removeprefix("e") or 0),
            "run_id": self._run_id,
        }

    def _take_step(self, fields: Mapping[str, Any]) -> None:
        """Take in this node's own step, which every member notes. It tells of rates."""
        now_s, before_s = self._clock(), self._committed_s
        num_passes = int(fields["num_passes"]) - self._num_passes
        self._committed_s, self._num_passes = now_s, int(fields["num_passes"])
        row = self._row
        if row is None or row["iteration"] != iteration_of(str(fields["iteration"])):
            return
        row["num_passes"], row["gradient_norm"] = num_passes, fields.get("gradient_norm")
        if before_s is not None and now_s > before_s:
            row["tokens_per_s"] = round(fields["num_tokens"] / (now_s - before_s), 3)

    def _finish_row(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._waiting.append(row)
            self._start_writing()
            if self._tracking is not None:
                self._tracking.take(
                    int(str(row["iteration"])), {name: row.get(name) for name in TRACKED}
                )

    def _start_writing(self) -> None:
        if self.writing.done():
            self.writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        """Write what waits. After a failure, the next row brings the next try."""
        while self._waiting:
            rows = list(self._waiting)
            self._waiting.clear()
            try:
                await in_thread(partial(self._file.add, rows))
            except OSError as error:
                self._waiting = deque([*rows, *self._waiting], maxlen=ROWS_WAITING_MAX)
                if not self._told:
                    self._note("iterations.unkept", reason=f"{FILE_NAME}: {why_of(error)}")
                self._told = True
                return
            self._told = False


def iteration_log(part: RunPart, config: NodeConfig, note: Callable[..., None]) -> IterationLog:
    """Return the log of a node, with the trackers of its configuration.

    Its file goes on from that of the run that this run resumes.
    """
    came_from = part.checkpoint_dir
    earlier = None
    if came_from is not None:
        earlier = run_folder(config.state_dir, run_id_of(came_from)).with_name(FILE_NAME)
    file = IterationFile(
        run_folder(config.state_dir, part.run_id).with_name(FILE_NAME),
        earlier=earlier,
        start_iteration=part.manifest.start_iteration,
    )
    plan, own = tracking_plan(config, part), part.membership.node_id
    tracking = Tracking(plan, note) if plan.wanted else None
    return IterationLog(file, part.run_id, own, note, time.monotonic, tracking)
