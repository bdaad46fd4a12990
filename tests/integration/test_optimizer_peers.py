"""Training scripts that come, go, are killed or can't fit in, while the others train on."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.exit_codes import ExitCode
from tests.support.cluster import run_decod
from tests.support.pages import get
from tests.support.polling import wait_for
from tests.support.scripts import (
    BATCH,
    RunningScript,
    Scripts,
    check_accounts,
    is_running,
    require_equal,
)
from tests.support.training_script import Script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SLOW = pytest.mark.slow

TARGET = 8 * BATCH
STEP_S = 0.03
LATER = 2
"""Rounds after which others have plainly gone on."""

SETTINGS = {"target_batch_size": TARGET, "batch_size_per_step": BATCH, "verbose": False}
USUAL = Script(settings=SETTINGS, step_s=STEP_S, optimizer="adamw")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """Two scripts that train without end, and those that tests add."""
    with Scripts(tmp_path_factory.mktemp("group"), USUAL) as scripts:
        for each in scripts.start_run(2):
            each.train()
        yield scripts


def go_on(scripts: list[RunningScript]) -> None:
    """Wait until scripts have plainly gone on."""
    for each in scripts:
        each.wait_for_round(each.round + LATER)


def test_a_newcomer_gets_the_state_and_goes_along(group: Scripts) -> None:
    first, second = group.all[:2]
    go_on([first, second])
    begun = first.round
    newcomer = group.join(first, replace(USUAL, peer=7, seed=8)).wait_joined()
    (joined,) = newcomer.said("joined")
    assert joined["round"] >= begun
    newcomer.train()
    go_on([newcomer, first])
    assert require_equal([first, second, newcomer]) > 2 * LATER
    assert {"round": joined["round"], "hash": joined["hash"]} in [
        {"round": number, "hash": found} for number, found in first.hashes().items()
    ]
    newcomer.leave()
    assert newcomer.wait() == 0
    left = newcomer.said("left")[-1]
    assert left["contributed"] > 0
    assert left["stepped"] == left["contributed"] + left["outstanding"] + left["dropped"]
    go_on([first, second])


@pytest.mark.parametrize(
    ("script", "settings", "words"),
    [
        pytest.param(replace(USUAL, hidden=9), {}, "number of the model's parameters", marks=SLOW),
        (replace(USUAL, optimizer="sgd"), {}, "kind and options of the optimizer"),
        pytest.param(
            USUAL, {"target_batch_size": TARGET + 1}, f"size: {TARGET + 1} here", marks=SLOW
        ),
        pytest.param(USUAL, {"compression": "int8"}, "int8 here, none there", marks=SLOW),
    ],
    ids=["model", "optimizer", "target", "compression"],
)
def test_who_does_not_fit_is_told_why_and_the_others_go_on(
    group: Scripts, script: Script, settings: dict[str, object], words: str
) -> None:
    first, second = group.all[:2]
    stranger = group.join(first, script, **settings)
    error = stranger.wait_refused()
    assert error["code"] == "E-REJ-031"
    assert words in error["what"]
    assert "same script" in error["fix"]
    go_on([first, second])


@pytest.mark.slow
def test_a_damaged_join_string_is_refused(group: Scripts) -> None:
    first = group.all[0]
    error = group.start(USUAL, join=first.join_string[:-5] + "AAAAA").wait_refused()
    assert error["code"].startswith("E-")
    assert "join string" in error["what"] + error["why"] + error["fix"]


@pytest.mark.slow
def test_gradients_that_are_not_finite_count_nowhere(group: Scripts) -> None:
    first, second = group.all[:2]
    bad = replace(USUAL, peer=9, nan_steps=tuple(range(0, 1 << 10, 2)))
    spoiler = group.join(first, bad).wait_joined()
    spoiler.train()
    go_on([spoiler, first, second])
    account = spoiler.stand_still()
    assert account["dropped"] >= BATCH
    assert account["contributed"] > 0
    require_equal([first, second, spoiler])
    spoiler.leave()
    assert spoiler.wait() == 0
    losses = [each["loss"] for each in first.said("round") if each["loss"] is not None]
    assert all(loss < 100 for loss in losses)


@pytest.mark.parametrize("which", [pytest.param("the last", marks=SLOW), "the first"])
def test_others_go_on_without_a_killed_script(tmp_path: Path, which: str) -> None:
    """The first has begun the run, admits newcomers, and coordinates."""
    with Scripts(tmp_path, USUAL) as group:
        scripts = group.start_run(3)
        for each in scripts:
            each.train()
        go_on(scripts)
        doomed = scripts.pop(0 if which == "the first" else 2)
        doomed.kill()
        go_on(scripts)
        for each in scripts:
            each.stand_still()
        assert check_accounts(scripts, gone=[doomed]) > 2 * LATER
        require_equal([*scripts, doomed])


@pytest.mark.slow
def test_a_host_with_a_data_nodes_token_admits_others_once_the_first_is_gone(
    tmp_path: Path,
) -> None:
    with Scripts(tmp_path, USUAL) as group:
        first = group.start(run="test").wait_joined()
        made = run_decod("token", "create", "--role", "data", "--state-dir", first.state_dir)
        second = group.start(join=made.stdout.strip()).wait_joined()
        for each in (first, second):
            each.train()
        go_on([first, second])
        first.kill()
        third = group.join(second).wait_joined()
        third.train()
        go_on([second, third])
        require_equal([first, second, third])


@pytest.mark.slow
def test_the_first_comes_back_to_those_who_are_still_there(tmp_path: Path) -> None:
    """Scripts without a folder of their choice have one each, and it is theirs again."""
    with Scripts(tmp_path, USUAL) as group:
        first, second = group.start_run(2, state_dir=None)
        loops = sorted((tmp_path / "xdg" / "decod" / "loops").iterdir())
        assert [each.name for each in loops] == ["1", "2"]
        for each in (first, second):
            each.train()
        go_on([first, second])
        first.kill()
        second.wait_for(lambda: second.status()["num_peers"] == 1, "that the first is lost")
        go_on([second])
        again = group.start(run="test", state_dir=None).wait_joined()
        (joined,) = again.said("joined")
        assert joined["round"] > first.round
        again.train()
        go_on([again, second])
        require_equal([again, second])
        assert sorted(loops[0].parent.iterdir()) == loops


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=SLOW),
        pytest.param(signal.SIGTERM, marks=SLOW),
    ],
)
def test_no_process_outlives_its_script(tmp_path: Path, number: signal.Signals) -> None:
    with Scripts(tmp_path, USUAL) as group:
        script = group.start(run="test").wait_joined()
        script.train()
        script.wait_for_round(1)
        processes = script.processes()
        assert len(processes) == 3
        script.process.send_signal(number)
        script.wait()
        wait_for(lambda: not any(map(is_running, processes)), "that all have ended", timeout_s=20.0)
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in script.stderr
            (script.folder / "stderr").write_text("")


@pytest.mark.slow
def test_no_process_outlives_a_script_that_still_looks_for_its_run(tmp_path: Path) -> None:
    with Scripts(tmp_path, USUAL) as group:
        first = group.start(run="test").wait_joined()
        port = int(first.status()["address"].rpartition(":")[2])
        first.kill()
        with socket.create_server(("127.0.0.1", port)) as mute:
            script = group.join(first)
            connection, _ = mute.accept()
            with connection:
                processes = script.processes()
                assert len(processes) > 1
                script.process.kill()
                script.wait()
                wait_for(
                    lambda: not any(map(is_running, processes)), "that all ended", timeout_s=10.0
                )


# --- who has the run's state ----------------------------------------------------------------------

_FIRST = """
import sys, threading, torch, decod
from decod.optimizer.training import Training
Training.copy = lambda self: threading.Event().wait()  # Newcomers wait for it.
model = torch.nn.Linear(4, 2)
optimizer = decod.CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), run="one", target_batch_size=8,
    batch_size_per_step=8, listen="127.0.0.1:0", state_dir=sys.argv[1])
print(optimizer.join_string, flush=True)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
_NEWCOMER = """
import sys, torch, decod
model = torch.nn.Linear(4, 2)
optimizer = decod.CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), join=sys.argv[2], target_batch_size=8,
    batch_size_per_step=8, listen="127.0.0.1:0", state_dir=sys.argv[1])
raise AssertionError("it trains")
"""


def start_python(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_newcomer_whose_only_donor_dies_says_that_nobody_has_the_state(tmp_path: Path) -> None:
    """It does not train on from its own weights. Whoever is gone when it begins is named, too."""
    first = start_python(_FIRST, str(tmp_path / "first"))
    try:
        assert first.stdout is not None
        join = first.stdout.readline().strip()
        newcomer = start_python(_NEWCOMER, str(tmp_path / "new"), join)
        log = tmp_path / "new" / "node.log"
        follows = lambda: log.exists() and "coordinator.followed" in log.read_text()  # noqa: E731
        wait_for(follows, "the newcomer follows", timeout_s=120.0)
    finally:
        first.kill()
        first.communicate()
    output, errors = newcomer.communicate(timeout=150)
    assert newcomer.returncode == ExitCode.NOT_RUNNING, errors
    assert "nobody has the run's state any more" in errors
    assert "begin a new run from a checkpoint" in errors
    assert "Traceback" not in output + errors
    late = start_python(_NEWCOMER, str(tmp_path / "late"), join)
    output, errors = late.communicate(timeout=150)
    assert late.returncode == ExitCode.NETWORK, errors
    assert "E-NET-003" in errors
    assert "Traceback" not in output + errors


_NO_SHARED_MEMORY = """
from pathlib import Path
from decod import memory_files
memory_files._FOLDER = Path("/proc")
"""
_LOADS = _NEWCOMER.replace('raise AssertionError("it trains")', "print('round', optimizer.round)")


@pytest.mark.slow
def test_a_newcomer_loads_though_the_hosts_shared_memory_has_no_room(tmp_path: Path) -> None:
    """The host is told what would give it more."""
    # A round takes long enough to load its state.
    work = "    optimizer.step()\n    torch.randn(2000, 2000) @ torch.randn(2000, 2000)\n"
    trains = _FIRST.replace("Training.copy = ", "_ = ").replace("    optimizer.step()\n", work)
    text = _NO_SHARED_MEMORY + trains
    first = start_python(text, str(tmp_path / "first"))
    try:
        assert first.stdout is not None
        join = first.stdout.readline().strip()
        newcomer = start_python(_LOADS, str(tmp_path / "new"), join)
        output, errors = newcomer.communicate(timeout=150)
    finally:
        first.kill()
        _, told = first.communicate()
    assert newcomer.returncode == 0, errors
    assert int(output.split()[-1]) > 0, "it has what the first has learnt"
    unloaded = [line for line in errors.splitlines() if "could not be loaded" in line]
    assert all("it is at round" in line for line in unloaded), "the first goes on meanwhile"
    assert told.count("/dev/shm has no room for it. In a container, --shm-size gives it more") == 1


def test_a_script_shows_its_run_on_a_page(tmp_path: Path) -> None:
    """Rounds in place of iterations, and who is lost. A page that is not wanted has no port."""
    with Scripts(tmp_path, USUAL) as group:
        first = group.start(run="test", page=True).wait_joined()
        second = group.join(first, name="workshop").wait_joined()
        for each in group.all:
            each.train()
        go_on(group.all)
        address = first.events("page.served")[-1]["url"]
        assert not second.events("page.served")
        port = int(address.rstrip("/").rpartition(":")[2])

        def state() -> Any:
            return get(port, "/state.json").json()

        first.wait_for(lambda: len(state()["history"]["steps"]) > LATER, "rounds on the page")
        shown = state()
        assert shown["run"]["name"] == "test"
        assert shown["run"]["organisation"] == "collaborative"
        assert shown["run"]["iteration"] >= shown["history"]["steps"][-1][0] > 0
        assert shown["history"]["steps"][-1][3] > 0, "samples a second"
        assert [one["own"] for one in shown["members"]].count(True) == 1
        names = [one["name"] for one in shown["members"]]
        assert names == [shown["node"]["name"], "workshop"]
        assert shown["node"]["device"]
        second.kill()

        def lost() -> bool:
            return "lost" in [event["kind"] for event in state()["history"]["events"]]

        first.wait_for(lost, "the loss on the page")
        first.wait_for(lambda: len(state()["members"]) == 1, "the run without it")
