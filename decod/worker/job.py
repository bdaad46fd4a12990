"""A job as a message: its fields with their checks, and the replies to those that can't be run.

The sender is our own node process, but a slip there must end in an error and not in a wrong tensor.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from decod.data.block import BlockError
from decod.errors import DecodError, TrainingError
from decod.ids import MicrobatchId
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.sketch import SEED_BYTES
from decod.worker.arena import Region

Result = dict[str, Any]

_SEED = re.compile(f"[0-9a-f]{{{2 * SEED_BYTES}}}")


def malformed(what: str) -> TrainingError:
    """Return the error for a message that no node of this version sends."""
    return TrainingError(
        what,
        why="the node process sent a job that this compute process does not understand",
        fix="report it with both logs: this is an error in decod",
        code="E-INT-003",
    )


class Job:
    """One request, with checked access to its fields."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.inputs = self._regions("inputs")
        self.outputs = self._regions("outputs")

    def _regions(self, name: str) -> list[Region]:
        values = self.message.get(name, [])
        if not isinstance(values, list):
            raise malformed(f"{name} is no list")
        return [Region.parse(value) for value in values]

    def number(self, name: str, minimum: int = 0) -> int:
        """Return a whole number of at least `minimum`."""
        value = self.message.get(name)
        if type(value) is not int or value < minimum:
            raise malformed(f"{name} is {str(value)[:100]}")
        return value

    def length(self, name: str) -> float:
        """Return a number that is finite and at least 0."""
        value: Any = self.message.get(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise malformed(f"{name} is {str(value)[:100]}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        value = self.message.get(name)
        if type(value) is not bool:
            raise malformed(f"{name} is {str(value)[:100]}")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return whole numbers of at least 0."""
        values = self.message.get(name)
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
            raise malformed(f"{name} is {str(values)[:100]}")
        return tuple(values)

    def spec(self, name: str) -> AverageSpec:
        """Return what an average is of, and how it travels."""
        value = self.message.get(name)
        names = tuple(each.name for each in fields(AverageSpec))
        if not isinstance(value, dict) or not all(
            type(value.get(each)) is int and value[each] >= 0 for each in names
        ):
            raise malformed(f"{name} is {str(value)[:100]}")
        return AverageSpec(*(value[each] for each in names))

    def flags(self, name: str, num: int) -> tuple[bool, ...]:
        """Return so many truth values."""
        values = self.message.get(name)
        if not isinstance(values, list) or [type(v) for v in values] != [bool] * num:
            raise malformed(f"{name} is {str(values)[:100]}")
        return tuple(values)

    def seed(self) -> bytes:
        """Return the seed of a sketch."""
        value = self.message.get("seed")
        if not isinstance(value, str) or not _SEED.fullmatch(value):
            raise malformed(f"seed is {str(value)[:100]}")
        return bytes.fromhex(value)

    def microbatch(self) -> MicrobatchId:
        """Return the microbatch that the job is about."""
        value = self.message.get("mb")
        names = ("iteration", "data_node_index", "index")
        if not isinstance(value, dict) or not all(
            type(value.get(name)) is int and value[name] >= 0 for name in names
        ):
            raise malformed(f"mb is {str(value)[:100]}")
        return MicrobatchId(*(value[name] for name in names))

    def expect(self, num_inputs: int | None, num_outputs: int) -> None:
        """Refuse a job with another number of regions. None allows any number of inputs."""
        if num_inputs not in (None, len(self.inputs)) or num_outputs != len(self.outputs):
            raise malformed(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs")


def error_reply(job_id: object, error: DecodError) -> Result:
    """Return the reply that reports a failed job."""
    fields = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    blocks = error.blocks if isinstance(error, BlockError) else ()
    return {
        "job": job_id if type(job_id) is int else -1,
        "ok": False,
        "error": fields,
        "blocks": [[block.shard_index, block.offset, block.num_bytes] for block in blocks],
    }
