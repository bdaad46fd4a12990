"""The leader's evaluations: every so many iterations, the model's loss on text that is held out.

The model is exported into the state folder, as `decod export` would, and another process computes
its loss there, behind everything else on this host. Training goes on meanwhile. What is not ready
when the next evaluation is due delays that one.
"""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from decod.config.run_file import EvaluationConfig, RunFile
from decod.data.corpus import open_corpus
from decod.data.dataset import Dataset
from decod.errors import DataError, DecodError
from decod.journal.run_progress import RunProgress
from decod.run.training_config import BatchConfig
from decod.tasks import in_thread
from decod.texts import clip, why_of

_COMMAND = ("nice", "-n", "15", sys.executable, "-P", "-m", "decod", "evaluate")
_REASON_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is evaluated, and where."""

    config: EvaluationConfig
    batch: BatchConfig
    """Its sequences are as long as those that are evaluated."""
    folder: Path
    """The model is exported into it, and removed after its evaluation."""
    export: Callable[[Path], Awaitable[int]]
    """Writes the model into a folder; returns its iteration."""
    command: tuple[str, ...] = _COMMAND


class _FailedError(Exception):
    """The process that evaluates has failed."""


class Evaluations:
    """Evaluates the model now and then, and shows how that went.

    Args:
        plan: What is evaluated.
        progress: Tells of commits.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self, plan: EvaluationPlan, progress: RunProgress, note: Callable[..., None]
    ) -> None:
        self._plan, self._progress, self._note = plan, progress, note
        self._task: asyncio.Task[None] | None = None
        self._last: dict[str, Any] | None = None
        self._problem: str | None = None
        self._due = self._next_due()
        if plan.config.held_out and plan.config.every_iterations:
            progress.on_commit.append(self._committed)
            progress.on_return.append(self._returned)

    def describe(self) -> dict[str, Any]:
        """Return the evaluation part of `decod status`."""
        return {"last": self._last, "problem": self._problem}

    async def close(self) -> None:
        """Give up the evaluation in hand."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _next_due(self) -> int:
        every = max(1, self._plan.config.every_iterations)
        return (self._progress.iteration // every + 1) * every

    def _committed(self) -> None:
        idle = self._task is None or self._task.done()
        if idle and self._progress.iteration >= self._due:
            self._due = self._next_due()
            self._task = asyncio.create_task(self._try())

    def _returned(self) -> None:
        self._due = self._next_due()

    async def _try(self) -> None:
        begun_s, iteration = time.monotonic(), self._progress.iteration
        try:
            iteration = await self._plan.export(self._plan.folder)
            found = await self._evaluated()
        except (DecodError, OSError, _FailedError) as error:
            what = why_of(error) if isinstance(error, OSError) else str(error)
            self._problem = clip(what, _REASON_MAX)
            self._note("evaluation.failed", iteration=iteration, reason=self._problem)
            return
        finally:
            remove = partial(shutil.rmtree, self._plan.folder, ignore_errors=True)
            await asyncio.shield(in_thread(remove))
        self._problem = None
        self._last = {"iteration": iteration, **found}
        seconds = round(time.monotonic() - begun_s, 3)
        self._note("evaluation.done", **{**self._last, "duration_s": seconds})

    async def _evaluated(self) -> dict[str, Any]:
        """Have another process compute the loss of the model in the folder.

        Raises:
            _FailedError: It failed, or its answer makes no sense.
        """
        plan, config = self._plan, self._plan.config
        process = await asyncio.create_subprocess_exec(
            *plan.command,
            str(plan.folder),
            config.held_out,
            *("--sequences", str(config.num_sequences)),
            *("--sequence-length", str(plan.batch.sequence_length)),
            *("--device", config.device),
            "--json",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, told = await process.communicate()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            lines = told.decode(errors="replace").strip().splitlines()
            raise _FailedError(lines[-1] if lines else f"it ended with {process.returncode}")
        try:
            answer = json.loads(out)
            return {
                "loss": round(answer["loss"], 6),
                "perplexity": round(answer["perplexity"], 4),
                "num_tokens": answer["num_tokens"],
            }
        except (ValueError, LookupError, TypeError) as error:
            raise _FailedError("its answer makes no sense") from error


def require_held_out(run_file: RunFile, corpus: Dataset) -> None:
    """Refuse held-out text that the model of a corpus can't be evaluated on, before a run begins.

    Raises:
        DataError: It can't be read, was made with another tokenizer, is too short (E-DAT-043), or
            is what the model is trained with (E-DAT-044).
    """
    config, batch = run_file.evaluation, run_file.run.batch
    if not (config.held_out and config.every_iterations):
        return
    with open_corpus(config.held_out) as held_out:
        if held_out.index.tokenizer != corpus.index.tokenizer:
            raise DataError(
                f"{held_out.place} was made with another tokenizer than {corpus.place}",
                why="the model would read other tokens than those that it learns",
                fix="prepare the held-out text with the same --tokenizer",
                code="E-DAT-043",
            )
        if not held_out.num_windows(batch.sequence_length):
            raise DataError(
                f"{held_out.place} has {held_out.num_tokens} tokens, fewer than one sequence",
                why=f"a sequence of this run has {batch.sequence_length}",
                fix="prepare more held-out text",
                code="E-DAT-043",
            )
        if held_out.index_sha256 == corpus.index_sha256:
            raise DataError(
                f"{held_out.place} holds what the model is trained with",
                why="a loss on it would not show what the model makes of other text",
                fix="keep some text out of the corpus, and prepare that for evaluation.held_out",
                code="E-DAT-044",
            )
