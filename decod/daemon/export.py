"""Export of the model of one commit, from every stage's weights, while training goes on.

The compute process writes the folder, since the node process does not handle tensors.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from decod.daemon.snapshot import run_snapshot

if TYPE_CHECKING:
    from decod.daemon.host import Node


async def export_model(node: "Node", folder: Path) -> int:
    """Write `config.json` and `model.safetensors` of the last commit; return its iteration.

    Args:
        node: The leader.
        folder: The folder to write to. It is created if missing.

    Raises:
        NetworkError: A stage has no member, or no member of it answers.
        DecodError: The folder can't be written.
    """
    async with run_snapshot(node, with_optimizer=False) as states:
        assert node.driver is not None
        stages = [
            {"stage_index": index, "tensors": stage.tensors}
            for index, stage in enumerate(states.stages)
        ]
        regions = node.driver.regions([stage.data for stage in states.stages])
        await node.ask("export", {"path": str(folder), "stages": stages}, inputs=regions)
    node.note("model.exported", iteration=states.iteration, path=str(folder))
    return states.iteration
