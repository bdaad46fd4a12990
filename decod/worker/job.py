"""A job as a message, and the replies to those that can't be run.

The sender is our own node process, but a slip there must end in an error and not in a wrong tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from decod.data.block import BlockError
from decod.errors import DecodError, TrainingError
from decod.protocol.core.job_codec import FormError, fields_of, kind_of, parsed
from decod.protocol.core.jobs import BaseJob
from decod.worker.arena_view import Region

JobT = TypeVar("JobT", bound=BaseJob, covariant=True)

_ENVELOPE = frozenset({"job", "kind", "fields", "inputs", "outputs"})


def malformed(what: str) -> TrainingError:
    """Return the error for a message that no node of this version sends."""
    return TrainingError(
        what,
        why="the node process sent a job that this compute process does not understand",
        fix="report it with both logs: this is an error in decod",
        code="E-INT-003",
    )


class Request(Generic[JobT]):
    """A job that is to be run.

    Args:
        job: What is to be done.
        inputs: Where the tensors are that it reads.
        outputs: Where those go that it writes.
        message: As which it came. None: it is made from the job.
    """

    __slots__ = ("inputs", "job", "message", "outputs")

    def __init__(
        self,
        job: JobT,
        inputs: Sequence[Region] = (),
        outputs: Sequence[Region] = (),
        message: Mapping[str, Any] | None = None,
    ) -> None:
        self.job, self.inputs, self.outputs = job, inputs, outputs
        self.message = message or {"kind": kind_of(type(job)), "fields": fields_of(job)}

    @classmethod
    def parse(cls, message: Mapping[str, Any], job_class: type[JobT]) -> "Request[JobT]":
        """Return the job of a message, checked.

        Raises:
            TrainingError: The message is malformed.
        """
        if not _ENVELOPE.issuperset(message):
            raise malformed(f"a job with {', '.join(map(str, message))[:100]}")
        try:
            job = parsed(job_class, message.get("fields", {}))
        except FormError as error:
            raise malformed(str(error)) from error
        return cls(job, _regions(message, "inputs"), _regions(message, "outputs"), message)

    def expect(self, num_inputs: int | None, num_outputs: int) -> None:
        """Refuse a job with another number of regions. None allows any number of inputs."""
        if num_inputs not in (None, len(self.inputs)) or num_outputs != len(self.outputs):
            raise malformed(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs")


def _regions(message: Mapping[str, Any], name: str) -> list[Region]:
    values = message.get(name, [])
    if not isinstance(values, list):
        raise malformed(f"{name} is no list")
    return [Region.parse(value) for value in values]


def error_reply(job_id: object, error: DecodError) -> dict[str, Any]:
    """Return the reply that reports a failed job."""
    fields = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    blocks = error.blocks if isinstance(error, BlockError) else ()
    return {
        "job": job_id if type(job_id) is int else -1,
        "ok": False,
        "error": fields,
        "blocks": [[block.shard_index, block.offset, block.num_bytes] for block in blocks],
    }
