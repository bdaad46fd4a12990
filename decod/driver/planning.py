"""The node's end of its planning process, which chooses flows beside the event loop and the device.

Only a leader needs one, and only now and then. So it is started with the first job, and again when
it has ended. Its end is never fatal: the node loses no more than the answers that it waits for.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from decod.driver.compute import ComputeDiedError, ComputeProcess, Reply
from decod.driver.state_copies import TensorRegion
from decod.protocol.core.durations import Patience
from decod.protocol.core.jobs import BaseJob
from decod.run.protocol_config import ProtocolConfig

_COMMAND = (sys.executable, "-m", "decod.worker.planning")


class _Process(ComputeProcess):
    NAME = "planning process"
    REQUEST_SIZE_MAX_BYTES = 64 << 20
    """It holds the costs of all links that claims have passed: about 1 kB a relay."""


class PlanningProcess:
    """A planning process, which runs from the first job on.

    Args:
        config: Says how long a job may take before the process counts as hung.
        log_path: The file to which its standard error goes; None for this process's.
        command: The program to start. It gets `--socket-fd`.
    """

    def __init__(
        self,
        config: ProtocolConfig,
        log_path: Path | None = None,
        *,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._config = config
        self._log_path = log_path
        self._command = command
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._jobs: set[asyncio.Task[Reply]] = set()

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is no process."""
        return self._process.pid if self._process is not None else None

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job without tensors; the future raises `ComputeDiedError`."""
        assert inputs == outputs == (), "this process has no arena"
        running = asyncio.get_running_loop().create_task(self._run(job))
        self._jobs.add(running)
        running.add_done_callback(self._jobs.discard)
        return running

    async def _run(self, job: BaseJob) -> Reply:
        try:
            async with self._starting:
                process = await self._alive()
        except OSError as error:
            raise ComputeDiedError(f"can't start the planning process: {error}") from error
        return await process.submit(job)

    async def _alive(self) -> _Process:
        if self._process is not None and self._process.ended.done():
            await self._process.close()
            self._process = None
        if self._process is None:
            self._process = await _Process.start(
                None, log_path=self._log_path, command=self._command
            )
            self._process.watch_over(Patience(self._config), lambda *_: None)
        return self._process

    async def close(self) -> None:
        """End the process, and cancel all jobs."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        if self._process is not None:
            self._process.kill()  # It holds nothing, and may be in the middle of a job.
            await self._process.close()
