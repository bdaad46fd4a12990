"""Daemons that train an adapter together, and keep doing so when one of them is killed."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decod.model.shape import trained_shapes
from decod.model.stage import initial_weight
from decod.model.writing import ADAPTER_CONFIG, ADAPTER_FILE, PEFT_PREFIX
from decod.run.model_config import AdapterConfig, AdapterKind
from decod.run.run_config import RunConfig
from tests.support.cluster import Cluster
from tests.support.peft_reference import PeftReference
from tests.support.runs import make_run, microbatches
from tests.unit.train.test_executor_adapter import folder_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_ITERATIONS = 8
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


def test_an_adapter_is_that_of_peft_though_a_volunteer_is_killed(
    tmp_path: Path, corpus: Path
) -> None:
    run = replace(make_run(num_iterations=NUM_ITERATIONS), adapter=LORA)
    base = folder_of(tmp_path / "base", run.model)
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        adapter = tmp_path / "adapter"
        leader = cluster.start_leader("--base", base, "--export", adapter)
        doomed, *others = cluster.start_relays(2)
        cluster.wait_for(lambda: leader.iteration >= 2, "two iterations")
        doomed.send(signal.SIGKILL)
        cluster.wait_for(lambda: leader.process.poll() is not None, "the end", timeout_s=90)
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
