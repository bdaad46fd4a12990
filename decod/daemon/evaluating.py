"""The leader's evaluations: the model's loss on text that is held out, and what it writes now.

The model is exported into the state folder, as `decod export` would, and another process computes
its loss there, or goes on with prompts, behind everything else on this host. Training goes on
meanwhile. What is not ready when the next evaluation is due delays that one.
"""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
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
from decod.tasks import cancelled, in_thread
from decod.texts import clean_text, clip, why_of

_COMMAND = ("nice", "-n", "15", sys.executable, "-P", "-m", "decod")
_REASON_MAX = 300

TEXTS_INTERVAL_S = 180.0
"""Shortest time between two looks at what the model writes."""
TEXTS_COST = 0.01
"""Largest share of the time that they take."""
_TEXTS_TIMEOUT_S = 900.0
_TEXT_TOKENS = 60
_TEXT_MAX = 400
"""Most characters of a text that are shown."""


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


class ModelTexts:
    """Has the model go on with prompts now and then, and tells what it writes.

    Args:
        plan: The prompts, and where the model goes on with them.
        progress: Tells of commits.
        note: Takes the name of an event, and its fields as keywords.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        progress: RunProgress,
        note: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._note, self._clock = plan, note, clock
        self._task: asyncio.Task[None] | None = None
        self._due_s = clock()
        self._last: list[dict[str, Any]] = []
        self._share: float | None = None
        self._problem: str | None = None
        if plan.config.beginnings:
            progress.on_commit.append(self._committed)

    def describe(self) -> dict[str, Any]:
        """Return the part of `decod status` about what the model writes."""
        return {"last": self._last, "share": self._share, "problem": self._problem}

    async def close(self) -> None:
        """Give up the texts in hand."""
        if self._task is not None:
            await cancelled(self._task)

    def _committed(self) -> None:
        if (self._task is None or self._task.done()) and self._clock() >= self._due_s:
            self._task = asyncio.create_task(self._try())

    async def _try(self) -> None:
        begun_s, iteration = self._clock(), 0
        try:
            async with _exported(self._plan) as (folder, iteration):
                texts = await self._texts(folder)
        except _FAILURES as error:
            self._problem = _reason_of(error)
            self._note("text.failed", iteration=iteration, reason=self._problem)
        else:
            self._problem = None
            self._last = [{"iteration": iteration, **each} for each in texts]
            for each in self._last:
                self._note("text.written", **each)
        took_s = self._clock() - begun_s
        interval_s = max(TEXTS_INTERVAL_S, took_s / TEXTS_COST)
        self._share = round(took_s / interval_s, 4)
        self._due_s = begun_s + interval_s

    async def _texts(self, folder: Path) -> list[dict[str, str]]:
        prompts = self._plan.config.beginnings
        command = (
            *("generate", "--model", str(folder), "--interactive", "--json", "--seed", "0"),
            *("--max-tokens", str(_TEXT_TOKENS), "--device", self._plan.config.device),
        )
        given = "".join(f"{prompt}\n" for prompt in prompts).encode()
        try:
            async with asyncio.timeout(_TEXTS_TIMEOUT_S):
                out = await _ended_well(self._plan.command + command, given)
        except TimeoutError as error:
            raise _FailedError(f"it took longer than {_TEXTS_TIMEOUT_S:.0f} s") from error
        try:
            texts = [clean_text(json.loads(line)["text"], limit=_TEXT_MAX) for line in out]
            pairs = list(zip(prompts, texts, strict=True))
        except (ValueError, LookupError, TypeError) as error:
            raise _FailedError("its answer makes no sense") from error
        return [{"prompt": prompt, "text": text} for prompt, text in pairs]


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
            await cancelled(self._task)

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
            async with _exported(self._plan) as (folder, iteration):
                found = await self._evaluated(folder)
        except _FAILURES as error:
            self._problem = _reason_of(error)
            self._note("evaluation.failed", iteration=iteration, reason=self._problem)
            return
        self._problem = None
        self._last = {"iteration": iteration, **found}
        seconds = round(time.monotonic() - begun_s, 3)
        self._note("evaluation.done", **{**self._last, "duration_s": seconds})

    async def _evaluated(self, folder: Path) -> dict[str, Any]:
        """Have another process compute the loss of the model in a folder.

        Raises:
            _FailedError: It failed, or its answer makes no sense.
        """
        plan, config = self._plan, self._plan.config
        command = (
            *("evaluate", str(folder), config.held_out, "--json", "--device", config.device),
            *("--sequences", str(config.num_sequences)),
            *("--sequence-length", str(plan.batch.sequence_length)),
        )
        out = await _ended_well(plan.command + command)
        try:
            answer = json.loads(b"".join(out))
            return {
                "loss": round(answer["loss"], 6),
                "perplexity": round(answer["perplexity"], 4),
                "num_tokens": answer["num_tokens"],
            }
        except (ValueError, LookupError, TypeError) as error:
            raise _FailedError("its answer makes no sense") from error


_FAILURES = (DecodError, OSError, _FailedError)


def _reason_of(error: Exception) -> str:
    return clip(why_of(error) if isinstance(error, OSError) else str(error), _REASON_MAX)


@asynccontextmanager
async def _exported(plan: EvaluationPlan) -> AsyncIterator[tuple[Path, int]]:
    """Yield a folder with the model, for as long as the context lasts, and its iteration."""
    try:
        yield plan.folder, await plan.export(plan.folder)
    finally:
        await asyncio.shield(in_thread(partial(shutil.rmtree, plan.folder, ignore_errors=True)))


async def _ended_well(command: tuple[str, ...], given: bytes = b"") -> list[bytes]:
    """Return the lines that a process prints, which does not outlive this call.

    Raises:
        _FailedError: It failed.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, told = await process.communicate(given)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        lines = told.decode(errors="replace").strip().splitlines()
        raise _FailedError(lines[-1] if lines else f"it ended with {process.returncode}")
    return out.splitlines()


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
