"""The node's side of tracking: hands numbers of iterations to the process that writes them.

The process is started by the first row, since only a leader has rows. Nothing here waits for it:
rows that it does not take in time are dropped.
"""

import asyncio
import importlib.util
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.daemon.run_facts import RunPart
from decod.errors import ConfigError
from decod.installation import install_hint
from decod.tasks import cancelled
from decod.texts import clean_text, why_of

ROWS_WAITING_MAX = 10_000
"""Rows that wait for the process. Of more, the oldest are dropped."""

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package that each extra installs."""

_COMMAND = (sys.executable, "-P", "-m", "decod.daemon.tracking")
"""Without the working directory among its modules: it works in the state folder."""

_PIPE_MAX_BYTES = 1 << 18
"""What the pipe to the process may hold beside what the system takes. More rows wait."""

_LINE_MAX_BYTES = 1 << 16
_END_S = 10.0
"""Timeout of the process's end. W&B sends its last rows meanwhile."""


@dataclass(frozen=True, slots=True)
class TrackingPlan:
    """Where rows go, and what they are called there."""

    run_name: str
    run_id: str
    config: dict[str, Any]
    """What the run file says. W&B shows it beside the curves."""
    folder: Path
    """Working directory of the process. W&B keeps its files there."""
    tensorboard_dir: Path | None = None
    wandb_project: str | None = None
    command: tuple[str, ...] = _COMMAND

    @property
    def wanted(self) -> bool:
        """Whether rows go anywhere."""
        return self.tensorboard_dir is not None or self.wandb_project is not None

    def to_json(self) -> str:
        """Return the first line for the process."""
        folder = self.tensorboard_dir
        return json.dumps(
            {
                "run_name": self.run_name,
                "run_id": self.run_id,
                "config": self.config,
                "tensorboard_dir": None if folder is None else str(folder),
                "wandb_project": self.wandb_project,
            }
        )


def tracking_plan(config: NodeConfig, part: RunPart) -> TrackingPlan:
    """Return where a node's rows go."""
    return TrackingPlan(
        part.run.name,
        part.run_id,
        json.loads(part.manifest.to_json()),
        config.state_dir,
        config.tensorboard_dir,
        config.wandb_project,
    )


def require_trackers(config: NodeConfig) -> None:
    """Check that the packages are installed which a node's configuration needs.

    Raises:
        ConfigError: One is not (E-CFG-076).
    """
    wanted = {"tensorboard": config.tensorboard_dir, "wandb": config.wandb_project}
    for extra, place in wanted.items():
        if place is not None and importlib.util.find_spec(_PACKAGES[extra]) is None:
            raise ConfigError(
                f"can't write to --{extra} {place}",
                why=f"the package {_PACKAGES[extra]} is not installed",
                fix=f"{install_hint(extra)}, or leave --{extra} out",
                code="E-CFG-076",
            )


class Tracking:
    """Hands rows on to the process that writes them.

    Args:
        plan: Where they go.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(self, plan: TrackingPlan, note: Callable[..., None]) -> None:
        self._plan, self._note = plan, note
        self._waiting: deque[str] = deque(maxlen=ROWS_WAITING_MAX)
        self._process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[None] | None = None
        self._ending = False

    async def close(self) -> None:
        """Let the process take what waits and end, for a while; then end it."""
        self._ending = True
        if self._running is not None:
            self._push()
            await asyncio.wait({self._running}, timeout=_END_S)
            await cancelled(self._running)

    def take(self, iteration: int, told: Mapping[str, object]) -> None:
        """Take in numbers of an iteration; what is none is left out. Never waits, never raises."""
        numbers = {
            # JSON has no NaN and no infinity; `float` reads their names.
            name: value if math.isfinite(value) else str(value)
            for name, value in told.items()
            if isinstance(value, int | float)
        }
        line = {"iteration": iteration, "time_s": wall_clock(), "numbers": numbers}
        self._waiting.append(json.dumps(line))
        if self._running is None:
            self._waiting.appendleft(self._plan.to_json())
            self._running = asyncio.create_task(self._run())
        self._push()

    def _push(self) -> None:
        """Hand over what the process takes now; at the end, also that there is no more."""
        if self._process is None:
            return
        pipe = self._process.stdin
        assert pipe is not None
        while self._waiting and (
            self._ending or pipe.transport.get_write_buffer_size() < _PIPE_MAX_BYTES
        ):
            pipe.write(self._waiting.popleft().encode() + b"\n")
        if self._ending:
            pipe.close()

    async def _run(self) -> None:
        """Start the process, and note what it says until it ends."""
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._plan.command,
                cwd=self._plan.folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE_MAX_BYTES,
                # Ctrl-C is for the node, which ends the process when it has all rows.
                start_new_session=True,
            )
        except OSError as error:
            self._note("tracking.failed", tracker="tracking", reason=why_of(error))
            return
        try:
            self._push()
            await self._note_problems(process)
            code = await process.wait()
            if code or not self._ending:
                reason = f"its process ended with {code}"
                self._note("tracking.failed", tracker="tracking", reason=reason)
        finally:
            self._process = None
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _note_problems(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            told = json.loads(line)
            self._note(
                "tracking.failed",
                tracker=clean_text(told["tracker"]),
                reason=clean_text(told["reason"], limit=500),
            )
