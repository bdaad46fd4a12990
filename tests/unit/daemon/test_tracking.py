"""What TensorBoard and W&B get of a leader's rows, and that their failures disturb nothing."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from decod.cli.main import main
from decod.config.node_config import NodeConfig
from decod.config.run_file import render_run_file
from decod.daemon.metrics import IterationLog
from decod.daemon.tracking import tracking as module
from decod.daemon.tracking.tracking import Tracking, TrackingPlan, require_trackers
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.installation import install_hint
from decod.journal.event_specs import EVENTS
from decod.journal.iteration_file import IterationFile
from tests.support.event_files import numbers_of, read_events
from tests.support.noted import noted
from tests.waiting import wait_until

OWN = NodeId("d0")
TIMEOUT_S = 60.0

FAKE_WANDB = """
import json
def Settings(**given): return given
class Run:
    def __init__(self, **given): self.put("init", given)
    def put(self, *said): open("wandb.jsonl", "a").write(json.dumps(said) + "\\n")
    def define_metric(self, *names, **given): self.put("define", names, given)
    def log(self, numbers): self.put("log", numbers)
    def finish(self): self.put("finish")
def init(**given): return Run(**given)
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a process."""
    monkeypatch.setattr(module, "_END_S", TIMEOUT_S)


class Bench:
    """A process that writes rows, and the events that are noted of it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        given: dict[str, Any] = {"tensorboard_dir": folder / "curves"} | changes
        self.plan = TrackingPlan("wiki", "r" * 26, {"seed": 3}, folder, **given)
        self.noted: list[dict[str, Any]] = []
        self.tracking = Tracking(self.plan, self.note)

    def note(self, event: str, **fields: Any) -> None:
        assert event == "tracking.failed"
        self.noted.append(fields)

    def row(self, iteration: int, loss: float = 2.5, **more: Any) -> None:
        self.tracking.take(
            iteration, {"loss": loss, "num_members": 5, "gradient_norm": None, **more}
        )

    def records(self) -> list[Event]:
        """What is in TensorBoard's files."""
        paths = sorted(self.folder.glob("curves/wiki-rrrrrrrr/events.out.tfevents.*"), key=_age)
        return [event for path in paths for event in read_events(path)]

    def events(self) -> list[Event]:
        """The numbers in TensorBoard's files."""
        return [event for event in self.records() if event.summary.value]


def _age(path: Path) -> int:
    return int(path.suffix[1:])


def play(bench: Callable[[], Bench], act: Callable[[Bench], Any]) -> Bench:
    """Let something happen while rows are tracked."""

    async def run() -> Bench:
        made = bench()
        try:
            if (more := act(made)) is not None:
                await more
        finally:
            await made.tracking.close()
        return made

    return asyncio.run(run())


def with_modules(folder: Path) -> tuple[str, ...]:
    """The command of a process that finds modules in a folder before all others."""
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return ("env", f"PYTHONPATH={paths}", sys.executable, "-P", "-m", "decod.daemon.tracking")


def test_tensorboard_gets_every_row_and_the_loss_on_held_out_text(tmp_path: Path) -> None:
    def act(bench: Bench) -> None:
        bench.row(1)
        bench.row(2, float("nan"), tokens_per_s=4096.0)
        bench.row(3, 2.0)
        bench.tracking.take(2, {"held_out_loss": 3.25})

    bench = play(lambda: Bench(tmp_path), act)
    events = bench.events()
    assert [event.step for event in events] == [1, 2, 3, 2]
    assert numbers_of(events[0]) == {"loss": 2.5, "num_members": 5.0}
    assert str(numbers_of(events[1])["loss"]) == "nan"
    assert numbers_of(events[1])["tokens_per_s"] == 4096.0
    assert numbers_of(events[3]) == {"held_out_loss": 3.25}
    assert abs(events[0].wall_time - events[3].wall_time) < TIMEOUT_S
    assert bench.noted == []


def test_tensorboard_forgets_what_the_run_takes_back(tmp_path: Path) -> None:
    def act(bench: Bench) -> None:
        for iteration in (1, 2, 3, 2, 3):
            bench.row(iteration)

    records = play(lambda: Bench(tmp_path), act).records()
    starts = SessionLog.START
    found = [(e.step, e.session_log.status == starts) for e in records if e.step]
    mark = True
    assert found == [(1, mark), *((i, False) for i in (1, 2, 3)), (2, mark), (2, False), (3, False)]
    # TensorBoard heeds marks in files of this version alone.
    assert [e.file_version for e in records if e.file_version] == ["brain.Event:2"] * 2


def test_the_process_needs_no_torch(tmp_path: Path) -> None:
    """It would take a second to load, and hundreds of megabytes."""
    (tmp_path / "torch.py").write_text("import os; os._exit(3)")
    bench = play(lambda: Bench(tmp_path, command=with_modules(tmp_path)), lambda b: b.row(1))
    assert [event.step for event in bench.events()] == [1]
    assert bench.noted == []


def test_wandb_gets_every_row_and_nothing_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)

    def act(bench: Bench) -> None:
        bench.row(1)
        bench.row(2, float("inf"))
        bench.tracking.take(1, {"held_out_loss": 3.25})

    command = with_modules(tmp_path)
    bench = play(
        lambda: Bench(tmp_path, tensorboard_dir=None, wandb_project="mine", command=command), act
    )
    lines = (tmp_path / "wandb.jsonl").read_text().splitlines()
    init, *defined, first, second, held_out, finish = map(json.loads, lines)
    given = {name: value for name, value in init[1].items() if name != "settings"}
    assert given == {
        "project": "mine",
        "name": "wiki",
        "id": "r" * 26,
        "resume": "allow",
        "config": {"seed": 3},
    }
    quiet = {name for name, value in init[1]["settings"].items() if value is True}
    assert {"x_disable_meta", "x_disable_stats", "disable_git"} <= quiet
    assert defined == [
        ["define", ["iteration"], {}],
        ["define", ["*"], {"step_metric": "iteration"}],
    ]
    assert first == ["log", {"iteration": 1, "loss": 2.5, "num_members": 5.0}]
    assert second[1]["loss"] == float("inf")
    assert held_out == ["log", {"iteration": 1, "held_out_loss": 3.25}]
    assert finish == ["finish"]
    assert bench.noted == []


def test_the_real_wandb_keeps_a_run_while_it_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")

    def act(bench: Bench) -> None:
        for iteration in (1, 2, 1):
            bench.row(iteration)

    play(lambda: Bench(tmp_path, tensorboard_dir=None, wandb_project="mine"), act)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = path.read_bytes()
    assert content.count(b"num_members") >= 3
    for private in (sys.executable, "decod.daemon.tracking", "cryptography"):
        assert private.encode() not in content


def test_a_folder_that_can_not_be_written_is_told_once_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "curves").write_text("in the way")

    async def act(bench: Bench) -> None:
        for iteration in (1, 2, 3):
            bench.row(iteration)
        await wait_until(lambda: bench.noted, timeout_s=TIMEOUT_S)
        (tmp_path / "curves").unlink()
        # Earlier rows may be lost.
        bench.row(4)

    bench = play(lambda: Bench(tmp_path), act)
    assert bench.noted == [{"tracker": "TensorBoard", "reason": "Not a directory"}]
    assert bench.events()[-1].step == 4
    assert "tracking.failed" in EVENTS


def test_what_a_tracker_raises_is_told_and_the_other_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(
        "def Settings(**_): pass\ndef init(**_): raise RuntimeError('api_key not configured')\n"
    )

    def act(bench: Bench) -> None:
        bench.row(1)
        bench.row(2)

    command = with_modules(tmp_path)
    bench = play(lambda: Bench(tmp_path, wandb_project="mine", command=command), act)
    assert bench.noted == [{"tracker": "W&B", "reason": "api_key not configured"}]
    assert [event.step for event in bench.events()] == [1, 2]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "raise SystemExit(9)"), "its process ended with 9"),
        ((sys.executable, "-c", ""), "its process ended with 0"),
        (("/nowhere/python",), "No such file or directory"),
    ],
)
def test_a_process_that_ends_is_told_once(
    tmp_path: Path, command: Sequence[str], reason: str
) -> None:
    async def act(bench: Bench) -> None:
        bench.row(1)
        await wait_until(lambda: bench.noted, timeout_s=TIMEOUT_S)
        for iteration in range(2, 100):
            bench.row(iteration)

    bench = play(lambda: Bench(tmp_path, command=command), act)
    assert bench.noted == [{"tracker": "tracking", "reason": reason}]


def test_a_process_that_hangs_holds_up_neither_rows_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_END_S", 0.05)
    monkeypatch.setattr(module, "ROWS_WAITING_MAX", 100)
    program = 'import os, threading; os.write(1, b\'{"tracker": "t", "reason": "r"}\\n\'); '
    command = (sys.executable, "-c", program + "threading.Event().wait()")

    async def act(bench: Bench) -> None:
        bench.row(1)
        await wait_until(lambda: bench.noted, timeout_s=TIMEOUT_S)
        for iteration in range(2, 20_000):
            bench.row(iteration)
        assert len(bench.tracking._waiting) == 100
        assert bench.tracking._process is not None

    bench = play(lambda: Bench(tmp_path, command=command), act)
    assert bench.tracking._process is None


def test_the_log_of_iterations_hands_its_rows_and_evaluations_on(tmp_path: Path) -> None:
    taken: list[tuple[int, dict[str, object]]] = []

    class Recorder:
        def take(self, iteration: int, told: dict[str, object]) -> None:
            taken.append((iteration, told))

        async def close(self) -> None:
            taken.append((0, {}))

    async def run() -> None:
        file, recorder = IterationFile(tmp_path / "iterations.csv"), Recorder()
        log = IterationLog(file, "run", OWN, lambda *_, **__: None, recorder)  # type: ignore[arg-type]
        async with log:
            fields = {"iteration": "e1:2.1", "num_tokens": 8}
            log.take(noted("iteration.opened", {"num_members": 5}))
            log.take(noted("iteration.committed", fields | {"loss": 2.5}))
            log.take(noted("step.committed", fields | {"num_passes": 3}))
            log.take(noted("evaluation.done", {"iteration": 1, "loss": 3.25, "perplexity": 25.8}))

    asyncio.run(run())
    numbers = {"loss": 2.5, "tokens_per_s": None, "gradient_norm": None}
    numbers |= {"learning_rate": None, "num_members": 5}
    # The last row is complete only at the end, and comes before the trackers are closed.
    assert taken == [(1, {"held_out_loss": 3.25}), (2, numbers), (0, {})]


@pytest.mark.parametrize(
    ("extra", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_missing_package_is_told_before_anything_begins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    run_file, state_dir = tmp_path / "run.toml", tmp_path / "state"
    run_file.write_text(render_run_file())
    arguments = ["leader", str(run_file), "--state-dir", str(state_dir), f"--{extra}", "here"]
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert install_hint(extra) in error
    assert not state_dir.exists()


def test_nothing_is_needed_for_trackers_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    require_trackers(NodeConfig())
    with pytest.raises(ConfigError, match="E-CFG-076"):
        require_trackers(NodeConfig(wandb_project="mine"))
