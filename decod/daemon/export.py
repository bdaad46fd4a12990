"""Export of the model of one commit, from every stage's weights, while training goes on.

The compute process writes the folder, since the node process does not handle tensors.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from decod.daemon.snapshot import SnapshotSources, run_snapshot

Run = Callable[..., Awaitable[dict[str, Any]]]
"""Runs a job of the compute process: its kind, its fields, and its inputs as `inputs`."""


async def export_model(sources: SnapshotSources, run: Run, folder: Path) -> int:
    """Write `config.json` and `model.safetensors` of the last commit; return its iteration.

    Args:
        sources: The leader's sources of states.
        run: Runs a job at the leader's compute process.
        folder: The folder to write to. It is created if missing.

    Raises:
        NetworkError: A stage has no member, or no member of it answers.
        DecodError: The folder can't be written.
    """
    async with run_snapshot(sources, with_optimizer=False) as states:
        stages = [
            {"stage_index": index, "tensors": stage.tensors}
            for index, stage in enumerate(states.stages)
        ]
        driver = sources.core.driver
        regions = driver.regions([stage.data for stage in states.stages])
        await run("export", {"path": str(folder), "stages": stages}, inputs=regions)
    return states.iteration
