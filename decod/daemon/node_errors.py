"""Translation of a node's end, and of its compute process's errors, into the command's errors."""

from pathlib import Path
from typing import Any

from decod.driver.compute import ComputeDiedError, ComputeProcess, JobError
from decod.errors import (
    ConfigError,
    DataError,
    DecodError,
    HardwareError,
    NetworkError,
    RejectedError,
)
from decod.exit_codes import ExitCode
from decod.net.channel import banned
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.job_codec import kind_of
from decod.protocol.core.jobs import BaseJob

_KINDS: dict[str, type[DecodError]] = {
    "CFG": ConfigError,
    "HW": HardwareError,
    "DAT": DataError,
    "CKP": DataError,
}


class TemporaryError(DecodError):
    """This node is out of the run, or the run has no leader now. Trying again may work."""

    exit_code = ExitCode.TEMPORARY
    code = "E-RUN-005"


def exit_code_of(stop: Stop) -> int:
    """Return exit code 0 if a node ended well; else raise the error that explains its end."""
    match stop.reason:
        case StopReason.FINISHED | StopReason.DRAINED | StopReason.PAUSED:
            return ExitCode.OK
        case StopReason.REFUSED:
            raise RejectedError(
                "the run does not take this node", why=stop.detail, fix="ask the run's organiser"
            )
        case StopReason.BANNED:
            raise banned(stop.detail)
        case StopReason.REMOVED | StopReason.LEADER_LOST:
            raise TemporaryError(
                "this node is no longer part of the run",
                why=stop.detail,
                fix="run the same command again",
            )
        case StopReason.SUPERSEDED:
            raise TemporaryError(
                "this node leads the run no more",
                why=f"the others did not hear from it for a while: {stop.detail}",
                fix="run decod leader with --join and the join string, to go on as one of them",
            )
        case StopReason.FAILED | StopReason.CRIPPLED | StopReason.STATE_LOST:
            raise DecodError(
                "this node can't go on",
                why=stop.detail,
                fix="read node.log and compute.log in the state folder",
                code="E-RUN-004",
            )


def error_of(error: JobError) -> DecodError:
    """Return a compute process's error as an instance of the class that its code names."""
    text = error.error
    parts = text["code"].split("-")
    kind = _KINDS.get(parts[1], DecodError) if len(parts) == 3 else DecodError
    return kind(text["what"], why=text["why"], fix=text["fix"], code=text["code"])


async def run_job(compute: ComputeProcess, job: BaseJob, process: str, log: Path) -> Any:
    """Run a job outside the core, and return its result.

    Args:
        compute: Runs it.
        job: The job.
        process: What its operator calls the process.
        log: Of the process.

    Raises:
        DecodError: The job has failed, in a way on which the operator can act.
    """
    try:
        reply = await compute.submit(job)
    except JobError as error:
        raise error_of(error) from error
    except ComputeDiedError as error:
        raise HardwareError(
            f"the {process} process failed at {kind_of(type(job))}",
            why=str(error),
            fix=f"read {log}",
            code="E-HW-002",
        ) from error
    return reply.result


def no_member(stage: int) -> NetworkError:
    """Return the error for an operation that needs a member in every stage."""
    return NetworkError(
        f"stage {stage} has no member",
        why="the model has a gap there",
        fix="wait until a volunteer serves it",
        code="E-NET-020",
    )


def not_kept(told: str, why: NetworkError, last: int | None) -> DecodError:
    """Return the error for a run that has ended, and whose last iteration is lost.

    Args:
        told: Says what is not kept.
        why: The error of the stage that is missing.
        last: Iteration of the checkpoint to go on from, if there is one.
    """
    anew = "begin anew, with a checkpoint.every_iterations that leaves something to go on from"
    return DecodError(
        told,
        why=why.why,
        fix=anew if last is None else f"go on from the last checkpoint with --resume {last}",
        code="E-RUN-009",
    )


def not_begun() -> NetworkError:
    """Return the error for an operation that needs a committed iteration."""
    return NetworkError(
        "the run has not committed an iteration yet",
        why="there is no trained model to write",
        fix="ask again when `decod status` shows the next iteration",
        code="E-NET-021",
    )
