"""A leader that is asked to leave hands over: the run outlives its founder, in every respect."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from decod.config.run_file import DataSource, render_run_file
from decod.model.shape import model_shapes
from decod.model.stage import TORCH_DTYPES, initial_weight
from decod.run.run_config import RunConfig
from decod.train.checkpoint.store import CheckpointConfig
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod
from tests.support.model_folders import write_folder
from tests.support.reference import train_reference
from tests.support.runs import make_run, microbatches

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

EVERY = 4
KEEP = 2
WEIGHTS_SEED = 99
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def write_run_file(cluster: Cluster, run: RunConfig) -> None:
    config = CheckpointConfig(every_iterations=EVERY, keep=KEEP)
    text = render_run_file(run, DataSource(path=str(cluster.corpus)), config)
    cluster.run_file.write_text(text, encoding="utf-8")


def write_weights(folder: Path, run: RunConfig) -> None:
    """Writes weights that no node could build from the run's own seed."""
    model, dtype = run.model, TORCH_DTYPES[run.model.dtype]
    weights = {
        name: initial_weight(model, seed=WEIGHTS_SEED, name=name, shape=shape).to(dtype)
        for name, shape in model_shapes(model).items()
    }
    write_folder(folder, model, weights)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8], "top_k": 3}')


def assert_exports_what_lay_beside_the_weights(leader: Daemon, folder: Path) -> None:
    """Also where the folder of --init has never been."""
    result = run_decod("export", folder, "--state-dir", leader.state_dir)
    assert result.returncode == 0, result
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [7, 8, 256], "top_k": 3}
    assert 'base_model: "given"' in (folder / "README.md").read_text()


def kept_checkpoints(daemon: Daemon) -> list[int]:
    """Returns what `decod checkpoint list` shows on a node's host, newest first."""
    result = run_decod("checkpoint", "list", "--json", "--state-dir", daemon.state_dir)
    assert result.returncode == 0, result
    return [row["iteration"] for row in json.loads(result.stdout)]


def assert_nothing_is_lost(run: RunConfig, corpus: Path, *daemons: Daemon) -> None:
    """Compares the losses with those of one process that reads all tokens of every iteration."""
    losses = {i: loss for daemon in daemons for i, loss in daemon.losses().items()}
    assert sorted(losses) == list(range(1, len(losses) + 1))
    batches = [microbatches(run, corpus, iteration) for iteration in sorted(losses)]
    expected, _ = train_reference(run.model, run.optimizer, WEIGHTS_SEED, batches)
    worst = max(abs(loss / expected[i - 1] - 1) for i, loss in losses.items())
    print(f"{len(losses)} iterations, losses {worst:.1e}")
    assert worst < 1e-8


def hand_over(cluster: Cluster, leader: Daemon, heir: Daemon) -> None:
    """Asks a leader to leave as Ctrl-C does, and waits until the next has committed."""
    leader.send(signal.SIGINT)
    asked_s = time.monotonic()
    cluster.wait_for(lambda: heir.events("leader.elected"), "another leader", timeout_s=20)
    elected_s = time.monotonic() - asked_s
    assert leader.wait(timeout_s=20) == 0
    left_s = time.monotonic() - asked_s
    cluster.wait_for_iteration(heir.iteration + 1, node=heir)
    committed_s = time.monotonic() - asked_s
    print(f"led after {elected_s:.2f} s, left {left_s:.2f} s, commit {committed_s:.2f} s")
    assert max(elected_s, left_s) < 5.0
    assert "left the run: data-1 leads the run in term 2" in leader.stdout
    assert "go on from iteration" not in leader.stdout, "the run goes on"
    assert not heir.events("member.lost"), "it was not lost, it left"


def assert_resumed_elsewhere(
    folder: Path, run: RunConfig, corpus: Path, founder: Daemon, last_leader: Daemon
) -> None:
    """Goes on from what the last leader of a run has kept, with one data node."""
    last = last_leader.iteration
    alone = replace(run, protocol=replace(run.protocol, min_data_nodes=1, min_nodes_per_stage=1))
    with Cluster(folder, alone, corpus) as cluster:
        write_run_file(cluster, alone)
        (folder / "leader").mkdir()
        last_leader.state_dir.rename(folder / "leader" / "state")
        leader = cluster.start_leader("--resume", "latest")
        assert f"resuming after iteration {last}," in leader.stdout
        cluster.start_relays(1)
        cluster.wait_for_iteration(last + 3)
        assert_exports_what_lay_beside_the_weights(leader, folder / "exported")
        leader.end_run()
        assert leader.wait() == 0
        assert_nothing_is_lost(run, corpus, founder, leader)


def test_the_founder_leaves_and_the_run_goes_on_without_it(tmp_path: Path, corpus: Path) -> None:
    """Begun from given weights, which are nowhere but at the founder: newcomers need them no more.
    What lay beside them is in the exports of those who come after.
    The checkpoints go on at the next leader's host, and so does the run after its end."""
    run = make_run(num_data_nodes=2)
    write_weights(tmp_path / "given", run)
    with Cluster(tmp_path / "cluster", run, corpus) as cluster:
        write_run_file(cluster, run)
        founder = cluster.start_leader("--init", tmp_path / "given")
        other = cluster.start_data_node("data-1")
        relay, *_ = cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        refused = run_decod("drain", "--end-run", "--state-dir", relay.state_dir)
        assert_refused(refused, exit_code=5, holds=["E-REJ-008", "does not lead"])

        hand_over(cluster, founder, other)
        before = other.iteration
        assert_exports_what_lay_beside_the_weights(other, tmp_path / "exported")
        join_string = other.status()["join_string"]
        late = cluster.start("late", "join", join_string, "--stage", "1")
        cluster.wait_for(late.is_ready, "a volunteer whom the founder has never seen")
        cluster.wait_for_iteration(before + 3 * EVERY, node=other)
        kept = kept_checkpoints(other)
        assert len(kept) == KEEP
        assert kept[0] > before
        assert other.status()["checkpoint"]["iteration"] >= kept[0]

        other.send(signal.SIGINT)
        codes = {d.name: d.wait(timeout_s=60) for d in cluster.daemons}
        assert set(codes.values()) == {0}, codes
        last = other.iteration
        assert f"--resume {last}" in other.stdout
        assert kept_checkpoints(other)[0] == last
        assert late.losses().items() <= other.losses().items()
        tokens = {record["num_tokens"] for record in other.events("step.committed")}
        assert len(tokens) == 1, "no iteration misses the founder's share"
        assert_nothing_is_lost(run, corpus, founder, other)
    assert_resumed_elsewhere(tmp_path / "after", run, corpus, founder, other)
