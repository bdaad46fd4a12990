"""A state folder with the records of a node, as its daemon leaves them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decod.journal.iteration_file import FILE_NAME, IterationFile
from decod.journal.journal_file import FOLDER, JournalFile
from decod.journal.records import Mode, RoundRow, line_of

RUN_ID = "r" * 26
OWN = "own" + "a" * 49
OTHER = "other" + "b" * 47

ROUND = RoundRow(
    mode=Mode.PIPELINE,
    time_s=1000.0,
    run=RUN_ID,
    peer=OWN,
    name="otter",
    stage=1,
    round=1,
    round_s=1.0,
    steps=8,
    samples=16,
    round_samples=16,
    data_s=0.0,
    forward_s=0.1,
    backward_s=0.1,
    optimizer_s=0.0,
    other_s=0.0,
    matchmaking_s=0.0,
    averaging_s=0.0,
    averaging_compute_s=0.0,
    sending_s=0.0,
    average_sending_s=0.0,
    peers=3,
)
"""An iteration of 1 s, of which the device computes 0.2 s."""


def write_log(folder: Path, *events: tuple[float, str, Mapping[str, Any]]) -> Path:
    """Add events to the node's log: when each was, in seconds of the epoch, name and fields."""
    path = folder / "node.log"
    with path.open("a") as file:
        for time_s, event, fields in events:
            told = {"level": "info", **fields}
            time = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
            line = {"time": time, "event": event, "node_id": OWN, **told}
            file.write(json.dumps(line) + "\n")
    return path


def write_rounds(folder: Path, num: int = 10, *, row: RoundRow = ROUND) -> None:
    """Write the node's metrics of so many equal iterations."""
    file = JournalFile(folder / FOLDER)
    for number in range(1, num + 1):
        file.add([line_of(replace(row, round=number, time_s=row.time_s + number * row.round_s))])
    file.close()


def write_iterations(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a leader's `iterations.csv`; what a row does not name is made up."""
    run = folder / "runs" / RUN_ID
    run.mkdir(parents=True)
    begin = {"loss": 3.0, "num_tokens": 100, "attempt": 1, "era": 0, "run_id": RUN_ID}
    file = IterationFile(run / FILE_NAME)
    file.add([{**begin, **row} for row in rows])
    file.close()


def status_of(**changes: Any) -> dict[str, Any]:
    """Return the status of a relay that trains in stage 1, beside another."""
    node = {
        "id": OWN,
        "name": "otter",
        "state": "training",
        "stage_index": 1,
        "capacity": 4,
        "device_free": False,
    }
    members = [
        {"id": OWN, "name": "otter", "capacity": 4, "flows": 4, "microbatches": 10},
        {"id": OTHER, "name": "badger", "capacity": 4, "flows": 4, "microbatches": 10},
    ]
    data = {"id": "d" * 52, "name": "leader", "capacity": 8, "flows": 8, "microbatches": 20}
    status: dict[str, Any] = {
        "schema_version": 1,
        "run_id": RUN_ID,
        "run_state": "training",
        "state": "training",
        "node": node,
        "stages": [{"index": 0, "nodes": [data]}, {"index": 1, "nodes": members}],
        "flows": [
            {
                "data_node": data["id"],
                "slot": 0,
                "path": [data["id"], OWN, data["id"]],
                "costs_s": [0.02, 0.3],
            }
        ],
        "message": "",
        "recent": [],
        "syncing": None,
    }
    return status | changes
