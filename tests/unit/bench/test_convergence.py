"""The comparison of convergence trains what it says, and can be stopped."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decod.compression.plan import Method
from decod.data.dataset import Dataset
from decod.ids import MicrobatchId
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from decod.run.training_config import SyncConfig, SyncMethod
from tests.support.diloco_reference import Reference
from tests.support.runs import prepare_corpus

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

import bench_convergence  # noqa: E402
from bench.convergence import (  # noqa: E402
    METHODS,
    NUM_REPLICAS,
    SCALES,
    Scale,
    all_reduce,
    cocktail_sgd,
    compression_ratio,
    dilocox,
    opendiloco,
)
from bench.replicas import Replicas  # noqa: E402

torch.set_num_threads(1)

SMALL = SCALES["small"]
EXACT = replace(SMALL, model=replace(SMALL.model, dtype=ModelDtype.FLOAT64), num_iterations=16)


def make_run(sync: SyncConfig, scale: Scale = EXACT) -> RunConfig:
    return replace(all_reduce(scale), sync=sync)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.open(prepare_corpus(tmp_path_factory.mktemp("data")))


@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_learn_what_diloco_by_hand_learns(dataset: Dataset, *, overlap: bool) -> None:
    """In float64, to the end of a run, which uses all averages."""
    run = make_run(SyncConfig(method=SyncMethod.DILOCO, every=4, overlap=overlap))
    replicas = Replicas(run, dataset)
    reference = Reference(run.model, run.stages, run.optimizer, run.sync, seed=run.seed)
    for replica in range(NUM_REPLICAS):
        for stage in range(2):
            reference.add(f"{replica}.{stage}", stage)
    for iteration in range(1, run.num_iterations + 1):
        replicas.iterate()
        batch = [
            (
                dataset.microbatch(MicrobatchId(iteration, replica, 0), run.batch, run.seed),
                (f"{replica}.0", f"{replica}.1"),
            )
            for replica in range(NUM_REPLICAS)
        ]
        reference.iterate(iteration, batch, last=iteration == run.num_iterations)
    for name, weights in replicas.weights().items():
        torch.testing.assert_close(weights, reference.anchors[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(),
        SyncConfig(compression=Method.COCKTAIL),
        SyncConfig(
            method=SyncMethod.DILOCO,
            every=3,
            overlap=True,
            compression=Method.LOWRANK_INT4,
            rank=8,
        ),
    ],
)
def test_a_training_that_was_stopped_goes_on_with_the_same_bits(
    dataset: Dataset, tmp_path: Path, sync: SyncConfig
) -> None:
    run = make_run(sync, replace(SMALL, num_iterations=9))
    replicas = Replicas(run, dataset)
    for _ in range(6):
        replicas.iterate()
    replicas.save(tmp_path / "checkpoint.safetensors", "so far")
    expected = [replicas.iterate() for _ in range(3)]
    others = Replicas(run, dataset)
    assert others.load(tmp_path / "checkpoint.safetensors") == "so far"
    assert [others.iterate() for _ in range(3)] == expected
    for name, weights in replicas.weights().items():
        assert torch.equal(others.weights()[name], weights)


@pytest.mark.parametrize("scale", ["10m", "3m"])
def test_methods_send_the_same_bytes_an_iteration(scale: str) -> None:
    ratios = [compression_ratio(m(SCALES[scale])) for m in (cocktail_sgd, dilocox, opendiloco)]
    assert max(ratios) < 1.05 * min(ratios)


@pytest.mark.slow
def test_the_comparison_puts_methods_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the smallest model. What is finished is not trained again."""
    arguments = ["--small", "--cache", str(tmp_path), "--plot", str(tmp_path / "losses.svg")]
    assert bench_convergence.main(arguments) == 0
    losses = {
        method: json.loads((tmp_path / "small" / f"{method}.json").read_text())["held_out"]
        for method in METHODS
    }
    last = {method: found[str(SMALL.num_iterations)] for method, found in losses.items()}
    assert last["dilocox"] < 1.1 * last["all-reduce"]
    text = capsys.readouterr().out
    assert all(f"{loss:.4f}" in text for loss in last.values())
    assert "<svg" in (tmp_path / "losses.svg").read_text()
    assert not list((tmp_path / "small").glob("*.safetensors"))
    assert bench_convergence.main(arguments) == 0
    assert capsys.readouterr().out.count("is finished") == len(METHODS)
