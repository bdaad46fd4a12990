"""Writes the model of one commit while training goes on: every stage's state, put together.

Commits are held for as long as it takes the stages to hand over their copies, so that all are of
one iteration; microbatches go on meanwhile. The compute process writes the folder, since it is the
one that knows tensors.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decod.daemon.errors import no_member
from decod.driver.driver import ServedState
from decod.errors import CheckpointError, DecodError, NetworkError
from decod.protocol.events import CommitsHeld
from decod.protocol.view import View

if TYPE_CHECKING:
    from decod.daemon.host import Node


async def export_model(node: "Node", folder: Path) -> int:
    """Write `config.json` and `model.safetensors` of the last commit; return its iteration.

    Args:
        node: The leader's.
        folder: Created if missing.

    Raises:
        NetworkError: A stage has no member, or none that answers.
        DecodError: The folder can't be written.
    """
    driver = node.driver
    leader = driver.machine.leader if driver is not None else None
    if driver is None or leader is None or not leader.view.members:
        raise NetworkError(
            "the run has not begun",
            why="there is no model yet",
            fix="wait for the first iteration",
            code="E-NET-021",
        )
    view, iteration = leader.view, leader.committed.iteration
    if view.empty_stages:
        raise no_member(view.empty_stages[0])
    buffers: list[memoryview] = []
    own: list[ServedState] = []
    driver.post(CommitsHeld(held=True))
    try:
        manifests = await _gather(node, view, iteration, buffers, own)
        driver.post(CommitsHeld(held=False))
        stages = [
            {"stage_index": stage, "tensors": json.loads(manifest)["tensors"]}
            for stage, manifest in enumerate(manifests)
        ]
        await node.ask(
            "export", {"path": str(folder), "stages": stages}, inputs=driver.regions(buffers)
        )
    finally:
        driver.post(CommitsHeld(held=False))
        for buffer in buffers:
            if all(buffer is not state.data for state in own):
                driver.tensor_failed(buffer)
        for state in own:
            state.release()
    node.note("model.exported", iteration=iteration, path=str(folder))
    return iteration


async def _gather(
    node: "Node",
    view: View,
    iteration: int,
    buffers: list[memoryview],
    own: list[ServedState],
) -> list[str]:
    """Return every stage's manifest, and put its blob into `buffers`."""
    driver = node.driver
    assert driver is not None
    served = await driver.request_state(iteration, with_optimizer=False)
    if isinstance(served, str):
        raise _not_there(0, served)
    own.append(served)
    buffers.append(served.data)
    manifests = [served.manifest]
    for stage in range(1, view.num_stages):
        manifest, buffer = await _fetch_stage(node, view, stage, iteration)
        manifests.append(manifest)
        buffers.append(buffer)
    return manifests


async def _fetch_stage(
    node: "Node", view: View, stage: int, iteration: int
) -> tuple[str, memoryview]:
    """Return manifest and blob of a stage from the first member that gives them."""
    driver = node.driver
    assert driver is not None
    reason = "no member"
    for member in view.roster(stage):
        taken: list[memoryview] = []

        def allocate(size_bytes: int, taken: list[memoryview] = taken) -> memoryview | None:
            buffer = driver.allocate(size_bytes)
            if buffer is not None:
                taken.append(buffer)
            return buffer

        try:
            manifest, buffer = await node.gateway.fetch_state(
                member.node_id, iteration, allocate, with_optimizer=False
            )
            _check_manifest(manifest)
        except DecodError as error:
            for left in taken:
                driver.tensor_failed(left)
            reason = str(error)
            continue
        return manifest, buffer
    raise _not_there(stage, reason)


def _check_manifest(text: str) -> None:
    try:
        manifest: Any = json.loads(text)
        tensors = manifest["tensors"]
    except (ValueError, KeyError, TypeError, RecursionError):
        tensors = None
    if not isinstance(tensors, list):
        raise CheckpointError(
            "a member's description of its state is unreadable",
            why="its tensors can't be told apart",
            fix="nothing: another member is asked",
        )


def _not_there(stage: int, reason: str) -> NetworkError:
    return NetworkError(
        f"stage {stage} did not give its state",
        why=reason[:200],
        fix="try again",
        code="E-NET-022",
    )
