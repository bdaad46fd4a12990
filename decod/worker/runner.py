"""Runs jobs one after another: a message in, a reply out.

Whoever derives from `Runner` has one method for each class of jobs, marked `@runs`. It takes a
`Request`, and returns an object of the job's `result` class, or None for `Nothing`.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from decod.clocks import Purpose, Stopwatch
from decod.errors import OUT_OF_MEMORY, DecodError, HardwareError
from decod.protocol.core.job_codec import fields_of, kind_of, methods_of, runs
from decod.protocol.core.jobs import BaseJob, DoNothing, Nothing
from decod.train.copies import Departure
from decod.worker.arena_view import Arena
from decod.worker.job import Request, error_reply, malformed
from decod.worker.memory import free_unused, ran_out

_TIMED: tuple[Purpose, ...] = ("copy", "data", "backward")
"""Parts of a job's time that its reply names."""


class Runner:
    """A runner of jobs.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._watch = Stopwatch()
        self._kind = ""
        """Of the job in hand, or of the last one."""
        self._departures: list[Departure] = []
        """Results of the job in hand that are on their way from the device into the arena."""
        self.ends: Callable[[str], None] = lambda _: None
        """Ends the process from any thread, and tells the node process why."""
        self._kinds: dict[str, tuple[type[BaseJob], Callable[..., object]]] = {
            kind_of(each): (each, run) for each, run in methods_of(self).items()
        }

    @runs(DoNothing)
    def _do_nothing(self, _: Request[DoNothing]) -> None: ...

    def run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one request. Raises only errors that are bugs, not DecodErrors."""
        job_id, kind = message.get("job"), message.get("kind")
        try:
            if type(job_id) is not int or not isinstance(kind, str) or kind not in self._kinds:
                raise malformed(f"job {str(job_id)[:20]} is of kind {str(kind)[:100]}")
            job_class, method = self._kinds[kind]
            request = Request.parse(message, job_class)
            self._kind = kind
            start_s, before = perf_counter(), dict(self._watch.seconds)
            self._begin()
            result = method(request) or Nothing()
            assert isinstance(result, job_class.result), f"{kind} ended with {result}"
            self._all_told()
            self._await_results()
            copy_s = self._watch.seconds["copy"] - before["copy"]
            seconds = self._busy_s(perf_counter() - start_s, copy_s)
        except DecodError as error:
            return error_reply(job_id, error)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or self._ends_with_others:
                raise
            failed = error_reply(job_id, _out_of_memory(str(kind), error))
        else:
            spent = self._watch.seconds
            parts = {f"{purpose}_seconds": spent[purpose] - before[purpose] for purpose in _TIMED}
            times = {"seconds": seconds, **parts}
            return {"job": job_id, "ok": True, **times, "result": fields_of(result)}
        # Only now is the error gone, whose traceback refers to all that the job has made.
        free_unused()
        return failed

    @property
    def _ends_with_others(self) -> bool:
        """Whether other processes may wait in vain for one that fails in a job."""
        return False

    def close(self) -> None:
        """Give up what the jobs have started. No more will come."""

    def _begin(self) -> None:
        """A job begins."""

    def _all_told(self) -> None:
        """The job has told the device all its work. Wait for what no departure waits for."""

    def _busy_s(self, wall_s: float, copy_s: float) -> float:  # noqa: ARG002 - a device's clock needs it.
        """Return how long the job took, of `wall_s` by the host's clock."""
        return wall_s

    def _await_results(self) -> None:
        """Wait until the job's results are in the arena."""
        for departure in self._departures:
            # Otherwise the copy would include the wait for the device.
            departure.wait_for_value()
            with self._watch.measure("copy"):
                departure.wait()
        self._departures.clear()


def _out_of_memory(kind: str, error: Exception) -> HardwareError:
    reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
    return HardwareError(
        f"out of memory in a {kind} job",
        why=reason,
        fix="lower this node's --capacity, use --recompute on, or lower batch.microbatch_size",
        code=OUT_OF_MEMORY,
    )
