"""What the page shows of a run of collaborative optimizers: rounds in place of iterations."""

from collections.abc import Mapping
from typing import Any

from decod.journal.told_status import number_in, sequence_in


def as_run_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a peer's status in the form of a node of a pipeline, as far as they are alike."""
    own_id, coordinator = str(status.get("node_id")), str(status.get("coordinator"))
    if status.get("averaging") is True:
        state = "aggregating"
    else:
        state = "training" if status.get("level") is True else "syncing"
    num, target = number_in(status, "num_samples"), number_in(status, "target_batch_size")
    peers = [
        {
            "id": each.get("id"),
            "name": each.get("name"),
            "role": "peer",
            "state": "training" if each.get("level") is True else "syncing",
        }
        for each in sequence_in(status, "peers")
    ]
    names = {each["id"]: each["name"] for each in peers}
    return {
        "run_name": status.get("run"),
        "run_id": status.get("run_id"),
        "run_state": state,
        "message": f"{num} of {target} samples of this round" if num is not None else "",
        "organisation": "collaborative",
        "iteration": number_in(status, "round"),
        "tokens_per_s": number_in(status, "samples_per_s"),
        "waits": status.get("waits"),
        "decod_version": status.get("decod_version"),
        "leader": {"id": coordinator, "name": names.get(coordinator)},
        "node": {
            "id": own_id,
            "name": status.get("name"),
            "role": "peer",
            "state": state,
            "device": status.get("device"),
            "address": status.get("address"),
        },
        "stages": [{"index": 0, "nodes": peers}],
    }
