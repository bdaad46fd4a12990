"""Daemons that train an adapter together, and keep doing so when one of them is killed."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decod.config.run_file import DataSource, EvaluationConfig, render_run_file
from decod.data.prepare import PrepareConfig, prepare
from decod.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_FILE, PEFT_PREFIX
from decod.model.shape import trained_shapes
from decod.model.stage import initial_weight
from decod.run.adapter_config import AdapterConfig, AdapterKind
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from tests.support import dying
from tests.support.cluster import Cluster, assert_refused, run_decod
from tests.support.oracle import assert_agreement
from tests.support.peft_reference import PeftReference
from tests.support.runs import make_run, microbatches
from tests.unit.train.test_executor_adapter import folder_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS = 20
LORA = AdapterConfig(kind=AdapterKind.LORA, rank=4, alpha=8.0)


def reference(run: RunConfig, base: Path, corpus: Path) -> tuple[list[float], PeftReference]:
    """Return the losses of the same training by PEFT in one process, and its adapter."""
    torch.set_num_threads(1)
    shapes = {}
    for stage in range(run.stages.num_relay_stages + 1):
        shapes |= trained_shapes(run, stage)
    first = {
        name: initial_weight(run.model, seed=run.seed, name=name, shape=shape)
        for name, shape in shapes.items()
    }
    peft = PeftReference(base, run.adapter, first)
    batches = (microbatches(run, corpus, index + 1) for index in range(NUM_ITERATIONS))
    return peft.train(run.optimizer, batches), peft


def test_an_adapter_is_that_of_peft_though_a_volunteer_is_killed_in_a_backward_pass(
    tmp_path: Path, corpus: Path
) -> None:
    """Three stages, each relay stage with two members."""
    run = replace(make_run(num_iterations=NUM_ITERATIONS), adapter=LORA)
    base = folder_of(tmp_path / "base", run.model)
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        adapter = tmp_path / "adapter"
        leader = cluster.start_leader("--base", base, "--export", adapter)
        doomed = cluster.start_relay("doomed", "--stage", "1", program=dying.program(3))
        others = [cluster.start_relay(f"relay-{k}", "--stage", str(k // 2)) for k in (2, 4, 5)]
        cluster.wait_for(lambda: leader.process.poll() is not None, "the end", timeout_s=90)
        assert doomed.wait() == -signal.SIGKILL
        assert leader.process.returncode == 0
        losses = leader.losses()
        fetched = [each.events("base.fetched") for each in (doomed, *others)]
        assert all(len(each) == 1 for each in fetched), "each has got its part from members"
    expected, peft = reference(run, base, corpus)
    assert [losses[i + 1] for i in range(NUM_ITERATIONS)] == pytest.approx(expected, rel=1e-12)
    stored = load_file(adapter / ADAPTER_FILE)
    assert {PEFT_PREFIX + name for name in peft.weights} == stored.keys()
    for name, weight in peft.weights.items():
        torch.testing.assert_close(stored[PEFT_PREFIX + name], weight, rtol=0, atol=1e-12)
    assert json.loads((adapter / ADAPTER_CONFIG).read_text())["r"] == LORA.rank


def test_the_model_beside_an_adapter_is_cut_anew(tmp_path: Path, corpus: Path) -> None:
    """Members fetch the weights of blocks that are new to them, which nobody trains."""
    run = replace(make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1), adapter=LORA)
    base = folder_of(tmp_path / "base", run.model)
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        leader = cluster.start_leader("--base", base)
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)
        command = ("run", "recut", "--blocks", "3,1", "--state-dir", leader.state_dir)
        assert run_decod(*command).returncode == 0
        assert set(cluster.wait_for_end().values()) == {0}
        assert leader.events("run.recut")
        assert [len(relay.events("base.fetched")) for relay in relays] == [2, 1]
        losses = leader.losses()
    expected, _ = reference(run, base, corpus)
    assert losses == pytest.approx(dict(enumerate(expected, 1)), rel=1e-12)


def test_a_run_is_resumed_and_only_beside_the_same_weights(tmp_path: Path, corpus: Path) -> None:
    run = replace(make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1), adapter=LORA)
    base = folder_of(tmp_path / "base", run.model)
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        leader = cluster.start_leader("--base", base)
        cluster.start_relays(1)
        cluster.wait_for(lambda: leader.iteration >= 3, "three iterations")
        leader.send(signal.SIGINT)
        leader.wait()
        state = leader.state_dir
        again = [line for line in leader.stdout.splitlines() if "go on from iteration" in line]
        assert f"--base {base}" in again[0]
    other = folder_of(tmp_path / "other", run.model, seed=10)
    command = ("leader", cluster.run_file, "--resume", "latest", "--state-dir", state)
    holds = ["E-CKP-013", "base is "]
    assert_refused(run_decod(*command, "--base", other), exit_code=9, holds=holds)
    with Cluster(tmp_path / "after", run, corpus) as cluster:
        (tmp_path / "after" / "leader").mkdir()
        shutil.copytree(state, tmp_path / "after" / "leader" / "state")
        leader = cluster.start_leader(
            "--base", base, "--resume", "latest", "--export", tmp_path / "adapter"
        )
        cluster.start_relays(1)
        assert set(cluster.wait_for_end().values()) == {0}
        losses = leader.losses()
    expected, _ = reference(run, base, corpus)
    assert "resuming after iteration" in leader.stdout
    assert losses == pytest.approx(dict(enumerate(expected, 1)), rel=1e-12)


def test_commands_use_base_and_adapter(tmp_path: Path, corpus: Path) -> None:
    run = replace(make_run(dtype=ModelDtype.FLOAT32, min_nodes_per_stage=1), adapter=LORA)
    base = folder_of(tmp_path / "base", run.model)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    (tmp_path / "held-out.txt").write_text("alpha beta gamma stage flow " * 200)
    held_out = tmp_path / "held-out"
    prepare(held_out, [tmp_path / "held-out.txt"], PrepareConfig())
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        text = render_run_file(
            run,
            DataSource(path=str(corpus)),
            evaluation=EvaluationConfig(held_out=str(held_out), every_iterations=2),
        )
        cluster.run_file.write_text(text, encoding="utf-8")
        leader = cluster.start_leader("--base", base)
        cluster.start_relays(1)
        cluster.wait_for(lambda: leader.events("evaluation.done"), "an evaluation")
        for out, options in ((adapter, []), (merged, ["--merge"])):
            result = run_decod("export", out, *options, "--state-dir", leader.state_dir)
            assert result.returncode == 0, result
        result = run_decod("generate", "al", "--temperature", "0", "--state-dir", leader.state_dir)
        assert result.returncode == 0, result
    assert not (merged / ADAPTER_FILE).exists()
    assert_agreement(merged)
    length = str(run.batch.sequence_length)
    losses = {}
    for folder in (adapter, merged, base):
        result = run_decod("evaluate", folder, held_out, "--sequence-length", length, "--json")
        assert result.returncode == 0, result
        losses[folder] = json.loads(result.stdout)["loss"]
    assert losses[adapter] == pytest.approx(losses[merged], abs=0.05)
    assert max(losses[adapter], losses[merged]) < losses[base] - 0.01


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, corpus: Path) -> None:
    run = replace(make_run(min_nodes_per_stage=1), adapter=LORA)
    base = folder_of(tmp_path / "base", run.model)
    other = folder_of(tmp_path / "other", replace(run.model, hidden_size=16))
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        for arguments, holds in (
            ((), ["E-CFG-110", "--base FOLDER"]),
            (("--init", base), ["E-CFG-110", f"--base {base}"]),
            (("--base", other), ["E-DAT-017", "hidden_size"]),
        ):
            command = ("leader", cluster.run_file, *arguments, "--state-dir", tmp_path / "s")
            code = 9 if "--base" in arguments else 3
            assert_refused(run_decod(*command), exit_code=code, holds=holds)
        leader = cluster.start_leader("--base", base)
        altered = folder_of(tmp_path / "altered", run.model, seed=10)
        relay = cluster.start_relay("relay-2", "--stage", "2", "--base", altered)
        assert relay.wait() == 9
        assert "E-DAT-054" in relay.stderr
        assert leader.process.poll() is None
