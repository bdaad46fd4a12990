"""Writes loss and rates of the iterations that this node commits as the leader into a file.

A row is collected from the entries of a commit. Rows wait in memory until the disk takes them.
TensorBoard and W&B get the same rows, if the operator wants that.
"""

from datetime import UTC, datetime
from typing import Self

from decod.config.node_config import NodeConfig
from decod.daemon.run_facts import RunPart
from decod.daemon.tracking.tracking import Tracking, tracking_plan
from decod.ids import NodeId, iteration_of
from decod.journal.iteration_file import FILE_NAME, IterationFile, Row
from decod.journal.journal import JournalEntry, Spool, TakeNote
from decod.journal.step_metrics import STEP_METRIC_NAMES
from decod.protocol.core.effects import CountWork
from decod.train.checkpoint.store import run_folder, run_id_of

ROWS_WAITING_MAX = 10_000
"""Rows that wait for the disk. Further ones are dropped."""

TRACKED = ("loss", "tokens_per_s", *STEP_METRIC_NAMES, "num_members")
"""Columns that trackers get."""

_PASSES_PER_MICROBATCH = 3
"""Of a data node: embedding, head with loss, and the embedding's backward pass."""


class IterationLog:
    """Writes the iterations of a leader. Use it in `async with`. Elsewhere it writes nothing.

    Args:
        file: Gets the rows.
        run_id: Of the run.
        own: This node.
        note: Takes the name of an event, and its fields as keywords.
        tracking: Gets the rows too.
    """

    def __init__(
        self,
        file: IterationFile,
        run_id: str,
        own: NodeId,
        note: TakeNote,
        tracking: Tracking | None = None,
    ) -> None:
        self._run_id, self._own, self._tracking = run_id, own, tracking
        self._rows = Spool[Row](
            lambda rows, _: file.add(rows), file.close, waiting_max=ROWS_WAITING_MAX
        )
        self._rows.on_failed.append(
            lambda outage: note("iterations.unkept", reason=f"{FILE_NAME}: {outage.reason}")
        )
        self._row: dict[str, object] | None = None
        """Of the iteration that has just been committed, until all of it is known."""
        self._num_members: object = None
        self._committed_s: float | None = None
        self._num_passes = 0

    async def __aenter__(self) -> Self:
        await self._rows.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._finish_row()
        await self._rows.__aexit__(*exc_info)
        if self._tracking is not None:
            await self._tracking.close()

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry. Never waits and never raises."""
        event, fields = entry.event, entry.fields
        if event == "iteration.opened":
            self._finish_row()
            self._num_members = fields["num_members"]
        elif event == "iteration.committed":
            self._finish_row()
            self._row = self._begun_row(entry)
        elif event == "step.committed":
            self._take_step(entry)
        elif event == "evaluation.done" and self._tracking is not None:
            self._tracking.take(int(fields["iteration"]), {"held_out_loss": fields["loss"]})

    def count(self, work: CountWork) -> None:
        """Take in how much this node has worked in an iteration that is committed."""
        row = self._row
        if row is not None and row["iteration"] == work.iteration and "num_passes" in row:
            needed = _PASSES_PER_MICROBATCH * dict(work.work).get(self._own, 0)
            row["num_passes_wasted"] = max(0, int(str(row["num_passes"])) - needed)

    def _begun_row(self, entry: JournalEntry) -> dict[str, object]:
        fields, now = entry.fields, datetime.fromtimestamp(entry.time_s, UTC)
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

    def _take_step(self, entry: JournalEntry) -> None:
        """Take in this node's own step, which every member notes. It tells of rates."""
        fields, now_s, before_s = entry.fields, entry.now_s, self._committed_s
        num_passes = int(fields["num_passes"]) - self._num_passes
        self._committed_s, self._num_passes = now_s, int(fields["num_passes"])
        row = self._row
        if row is None or row["iteration"] != iteration_of(str(fields["iteration"])):
            return
        row["num_passes"] = num_passes
        row.update((name, fields.get(name)) for name in STEP_METRIC_NAMES)
        if before_s is not None and now_s > before_s:
            row["tokens_per_s"] = round(fields["num_tokens"] / (now_s - before_s), 3)

    def _finish_row(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._rows.add(row)
            if self._tracking is not None:
                self._tracking.take(
                    int(str(row["iteration"])), {name: row.get(name) for name in TRACKED}
                )


def iteration_log(part: RunPart, config: NodeConfig, note: TakeNote) -> IterationLog:
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
    return IterationLog(file, part.run_id, own, note, tracking)
