"""When the leader evaluates its model, and that nothing which goes wrong with it disturbs it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.config.run_file import DataSource, EvaluationConfig, RunFile
from decod.daemon import evaluating
from decod.daemon.evaluating import (
    TEXTS_COST,
    TEXTS_INTERVAL_S,
    EvaluationPlan,
    Evaluations,
    ModelTexts,
    require_held_out,
)
from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.errors import ConfigError, DataError, NetworkError
from decod.journal.run_progress import RunProgress
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from tests.waiting import wait_until

SAYS = """
import json, sys
_, model, corpus, *options = sys.argv[1:]
assert open(model + "/model").read() == "weights"
assert corpus == "held-out" and "--json" in options
print(json.dumps({"loss": 2.0, "perplexity": 7.389056, "num_tokens": 64, "options": options}))
"""
FAILS = 'import sys; sys.stderr.write("E-DAT-043: a\\nE-DAT-043: what went wrong\\n"); sys.exit(9)'
HANGS = "import threading; print(flush=True); threading.Event().wait()"


class Bench:
    """Evaluations of a leader whose model takes no time to export."""

    def __init__(self, folder: Path, program: str = SAYS, *, every: int = 10) -> None:
        self.folder = folder / "evaluated"
        self.progress = RunProgress()
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.evaluations = Evaluations(
            EvaluationPlan(
                config=EvaluationConfig(held_out="held-out", every_iterations=every),
                batch=BatchConfig(sequence_length=16),
                folder=self.folder,
                export=self._export,
                command=(sys.executable, "-c", program),
            ),
            self.progress,
            lambda event, **fields: self.notes.append((event, fields)),
        )

    async def _export(self, folder: Path) -> int:
        if self.error is not None:
            raise self.error
        _write(folder)
        return self.progress.iteration

    def commit(self, iteration: int) -> None:
        self.progress.iteration = iteration
        for tell in self.progress.on_commit:
            tell()

    async def told(self, num: int) -> dict[str, Any]:
        """Wait for a number of notes; return the last."""
        task = self.evaluations._task
        assert task is not None
        await asyncio.wait_for(task, timeout=60.0)  # The program starts a Python of its own.
        assert (len(self.notes), self.folder.exists()) == (num, False)
        return self.notes[-1][1]


def _write(folder: Path) -> None:
    folder.mkdir()
    (folder / "model").write_text("weights")


@pytest.fixture(name="program")
def _program() -> str:
    return SAYS


@pytest.fixture(name="bench")
@asynccontextmanager
async def _bench(tmp_path: Path, program: str) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, program)
    try:
        yield bench
    finally:
        await bench.evaluations.close()


async def test_the_model_is_evaluated_every_so_many_iterations(bench: Bench) -> None:
    for iteration in range(1, 10):
        bench.commit(iteration)
    assert bench.evaluations.describe() == {"last": None, "problem": None}
    bench.commit(10)
    fields = await bench.told(1)
    assert (fields["iteration"], fields["loss"], fields["num_tokens"]) == (10, 2.0, 64)
    last = bench.evaluations.describe()["last"]
    assert (last["iteration"], last["perplexity"]) == (10, 7.3891)
    bench.commit(19)
    bench.commit(23)
    assert (await bench.told(2))["iteration"] == 23
    assert [event for event, _ in bench.notes] == ["evaluation.done"] * 2


@pytest.mark.parametrize("program", [FAILS])
async def test_what_a_failed_evaluation_said_is_shown_until_one_succeeds(bench: Bench) -> None:
    bench.commit(10)
    assert (await bench.told(1))["reason"] == "E-DAT-043: what went wrong"
    assert bench.evaluations.describe()["problem"] == "E-DAT-043: what went wrong"
    bench.error = NetworkError("stage 1 has no member", why="w", fix="f", code="E-NET-001")
    bench.commit(20)
    assert "stage 1 has no member" in (await bench.told(2))["reason"]
    bench.error = OSError(28, "No space left on device")
    bench.commit(30)
    assert "No space left" in (await bench.told(3))["reason"]
    assert [event for event, _ in bench.notes] == ["evaluation.failed"] * 3


@pytest.mark.parametrize("program", ["print('{}')"])
async def test_an_answer_that_is_no_answer_is_a_failure(bench: Bench) -> None:
    bench.commit(10)
    await bench.told(1)
    assert bench.notes[0][0] == "evaluation.failed"


@pytest.mark.parametrize("program", [HANGS])
async def test_an_evaluation_in_hand_delays_the_next_and_ends_with_the_leader(bench: Bench) -> None:
    bench.commit(10)
    await wait_until(bench.folder.exists)
    bench.commit(20)
    await bench.evaluations.close()
    assert not bench.folder.exists()
    assert bench.notes == []


def test_nothing_is_evaluated_where_nothing_is_held_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=0)
    assert not bench.progress.on_commit


@pytest.mark.parametrize(
    ("changes", "key"), [({"every_iterations": -1}, "every"), ({"num_sequences": 0}, "sequences")]
)
def test_impossible_settings_are_refused(changes: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.*{key}"):
        replace(EvaluationConfig(), **changes)  # type: ignore[arg-type]


def corpus(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "text").write_text(text)
    prepare(folder / "corpus", [folder / "text"], PrepareConfig())
    return folder / "corpus"


@pytest.mark.parametrize(
    ("held_out", "length", "code"),
    [("other", 16, None), ("other", 400, "E-DAT-043"), ("same", 16, "E-DAT-044")],
)
def test_held_out_text_is_looked_at_before_the_run(
    held_out: str, length: int, code: str | None, tmp_path: Path
) -> None:
    texts = {"same": "abc" * 200, "other": "xyz" * 100}
    path = corpus(tmp_path / "held-out", texts[held_out])
    run = RunConfig(batch=BatchConfig(sequence_length=length))
    evaluation = EvaluationConfig(held_out=str(path))
    run_file = RunFile(
        run=run, data=DataSource(), path=tmp_path / "run.toml", evaluation=evaluation
    )
    with Dataset.open(corpus(tmp_path / "trained", texts["same"])) as dataset:
        if code is None:
            require_held_out(run_file, dataset)
            return
        with pytest.raises(DataError) as caught:
            require_held_out(run_file, dataset)
        assert caught.value.code == code


WRITES = """
import json, sys
assert sys.argv[1:4:2] == ["generate", sys.argv[3]] and "--json" in sys.argv
assert open(sys.argv[3] + "/model").read() == "weights"
for line in sys.stdin:
    print(json.dumps({"prompt": line.strip(), "text": " and so on\x1b" + "!" * 1000}))
"""


class TextsBench:
    """What a leader's model writes, on a clock that stands still."""

    def __init__(self, folder: Path, program: str, took_s: float = 1.0) -> None:
        self.progress, self.now_s, self._took_s = RunProgress(), 0.0, took_s
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.plan = EvaluationPlan(
            config=EvaluationConfig(prompts="\nOnce\nThe doctor\n"),
            batch=BatchConfig(sequence_length=16),
            folder=folder / "continued",
            export=self._export,
            command=(sys.executable, "-c", program),
        )
        self.texts = ModelTexts(
            self.plan,
            self.progress,
            lambda event, **fields: self.notes.append((event, fields)),
            lambda: self.now_s,
        )

    async def _export(self, folder: Path) -> int:
        self.now_s += self._took_s
        _write(folder)
        return self.progress.iteration

    async def commit(self, iteration: int) -> int:
        """Commit an iteration; return how many notes there are when its texts are written."""
        self.progress.iteration = iteration
        for tell in self.progress.on_commit:
            tell()
        if self.texts._task is not None:
            await asyncio.wait_for(asyncio.shield(self.texts._task), timeout=60.0)
        return len(self.notes)


def test_the_model_goes_on_with_the_prompts_every_few_minutes(tmp_path: Path) -> None:
    bench = TextsBench(tmp_path, WRITES)

    async def test() -> None:
        assert await bench.commit(1) == 2
        bench.now_s = TEXTS_INTERVAL_S - 0.1
        assert await bench.commit(2) == 2
        bench.now_s = TEXTS_INTERVAL_S
        assert await bench.commit(3) == 4

    asyncio.run(test())
    event, fields = bench.notes[0]
    assert (event, fields["iteration"], fields["prompt"]) == ("text.written", 1, "Once")
    assert fields["text"].startswith(" and so on?!")
    assert len(fields["text"]) < 500
    assert [one["prompt"] for one in bench.texts.describe()["last"]] == ["Once", "The doctor"]
    assert not bench.plan.folder.exists()


def test_what_the_model_writes_takes_one_percent_of_the_time_at_most(tmp_path: Path) -> None:
    bench = TextsBench(tmp_path, WRITES, took_s=10.0)

    async def test() -> None:
        await bench.commit(1)
        bench.now_s = 10.0 / TEXTS_COST - 1
        assert await bench.commit(2) == 2
        bench.now_s = 10.0 / TEXTS_COST
        assert await bench.commit(3) == 4

    asyncio.run(test())
    assert bench.texts.describe()["share"] == TEXTS_COST


@pytest.mark.parametrize("program", [FAILS, "print('x')", "print('{}'); print('{}')", ""])
def test_a_model_that_can_not_write_is_told(tmp_path: Path, program: str) -> None:
    bench = TextsBench(tmp_path, program)
    assert asyncio.run(bench.commit(1)) == 1
    event, fields = bench.notes[0]
    assert (event, bench.texts.describe()["problem"]) == ("text.failed", fields["reason"])
    assert not bench.plan.folder.exists()


@pytest.mark.parametrize("prompts", ["a\nb\nc\nd", "x" * 501])
def test_too_many_prompts_or_too_long_ones_are_refused(prompts: str) -> None:
    with pytest.raises(ConfigError, match="on a line of its own"):
        EvaluationConfig(prompts=prompts)


def test_a_model_that_writes_for_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "_TEXTS_TIMEOUT_S", 0.2)
    bench = TextsBench(tmp_path, HANGS)
    assert asyncio.run(bench.commit(1)) == 1
    assert "took longer" in bench.notes[0][1]["reason"]
    assert not bench.plan.folder.exists()
