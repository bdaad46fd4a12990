"""Members that step by themselves learn over sockets what they learn by hand, in plain torch."""

import itertools
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decod.compression.plan import Method
from decod.config.presets import PRESETS
from decod.ids import MicrobatchId
from decod.model.adapter_folder import ADAPTER_FILE, PEFT_PREFIX
from decod.model.weights import WEIGHTS_FILE
from decod.protocol.core.fingerprints import digest_of
from decod.run.run_config import RunConfig
from decod.run.training_config import Adapt, OptimizerName, SyncConfig, SyncMethod
from tests.support.cluster import Cluster, Daemon, takes_part
from tests.support.diloco_reference import Reference
from tests.support.quick import first_of
from tests.support.reference import train_reference
from tests.support.runs import make_run, microbatches, weight_error
from tests.unit.train.test_executor_adapter import LORA, folder_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

DILOCO = SyncConfig(method=SyncMethod.DILOCO, every=4)
NUM_OUTER_STEPS = 5


def make_diloco_run(sync: SyncConfig, num_iterations: int) -> RunConfig:
    """Return a run of two data nodes with four microbatches each."""
    run = make_run(num_iterations=num_iterations, num_data_nodes=2)
    batch = replace(run.batch, num_microbatches=4)
    return replace(run, batch=batch, sync=sync)


@dataclass
class Trained:
    """What six daemons did."""

    paths: dict[MicrobatchId, dict[int, str]] = field(default_factory=dict)
    """Which of them served each microbatch, by stage."""
    arrivals: set[int] = field(default_factory=set)
    """Iterations that used an average that had travelled."""


def train(run: RunConfig, tmp_path: Path, corpus: Path, *options: str | Path) -> Trained:
    """Run six daemons to the end."""
    with Cluster(tmp_path, run, corpus) as cluster:
        cluster.start_leader("--export", tmp_path / "model", *options)
        cluster.start_data_node("data-1")
        cluster.start_relays(2)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        done = Trained()
        for daemon in cluster.daemons:
            for stage, mb in shares(daemon, run):
                done.paths.setdefault(mb, {})[stage] = daemon.name
            for commit in daemon.events("iteration.committed"):
                if commit.get("average_delay"):
                    done.arrivals.add(int(commit["iteration"].split(".")[0]))
    return done


def shares(daemon: Daemon, run: RunConfig) -> list[tuple[int, MicrobatchId]]:
    """Return what a daemon has trained on. Its log names the microbatches by their digest."""
    found = []
    for commit in daemon.events("step.committed"):
        number = int(commit["iteration"].split(".")[0])
        batch = [
            MicrobatchId(number, data_node, index)
            for data_node in range(run.batch.num_data_nodes)
            for index in range(run.batch.num_microbatches)
        ]
        share = next(
            share
            for share in itertools.combinations(batch, commit["num_folded"])
            if digest_of(share) == commit["digest_folded"]
        )
        found += [(commit["stage"], mb) for mb in share]
    return found


def by_hand(
    run: RunConfig,
    corpus: Path,
    done: Trained,
    base: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the weights of the same training in one process, along the same paths."""
    paths = done.paths
    torch.set_num_threads(1)
    reference = Reference(
        run.model,
        run.stages,
        run.optimizer,
        run.sync,
        seed=run.seed,
        adapter=run.adapter,
        base=base,
    )
    nodes = {(name, stage) for path in paths.values() for stage, name in path.items()}
    for name, stage in sorted(nodes):
        reference.add(name, stage)
    for number in range(1, run.num_iterations + 1):
        ids = sorted(mb for mb in paths if mb.iteration == number)
        tokens = microbatches(run, corpus, number)
        ways = [tuple(name for _, name in sorted(paths[mb].items())) for mb in ids]
        batch = list(zip(tokens, ways, strict=True))
        last = number == run.num_iterations
        reference.iterate(number, batch, arrival=number in done.arrivals, last=last)
    return reference.anchors


@pytest.mark.parametrize("overlap", first_of([True, False]))
def test_six_daemons_learn_what_is_learnt_by_hand(
    tmp_path: Path, corpus: Path, *, overlap: bool
) -> None:
    sync = replace(DILOCO, overlap=overlap)
    run = make_diloco_run(sync, NUM_OUTER_STEPS * sync.every)
    done = train(run, tmp_path, corpus)
    assert len({name for path in done.paths.values() for name in path.values()}) == 6
    assert bool(done.arrivals) is overlap
    error = weight_error(tmp_path / "model", by_hand(run, corpus, done))
    print(f"weights differ by {error:.1e}")
    assert error < 1e-8


@pytest.mark.slow
def test_an_adapter_is_what_is_learnt_by_hand(tmp_path: Path, corpus: Path) -> None:
    run = replace(make_diloco_run(DILOCO, NUM_OUTER_STEPS * DILOCO.every), adapter=LORA)
    folder = folder_of(tmp_path / "base", run.model)
    done = train(run, tmp_path, corpus, "--base", folder)
    expected = by_hand(run, corpus, done, load_file(folder / WEIGHTS_FILE))
    found = load_file(tmp_path / "model" / ADAPTER_FILE)
    assert {PEFT_PREFIX + name for name in expected} == found.keys()
    worst = max(
        float((found[PEFT_PREFIX + name] - weight).abs().max()) for name, weight in expected.items()
    )
    print(f"weights differ by {worst:.1e}")
    assert worst < 1e-11


def test_one_step_of_sgd_between_averages_is_plain_sgd(tmp_path: Path, corpus: Path) -> None:
    run = make_diloco_run(SyncConfig(method=SyncMethod.DILOCO, outer_lr=1.0, outer_momentum=0.0), 6)
    plain = replace(run.optimizer, name=OptimizerName.SGD, beta1=0.0, weight_decay=0.0)
    run = replace(run, optimizer=plain)
    train(run, tmp_path, corpus)
    tokens = [microbatches(run, corpus, number) for number in range(1, 7)]
    _, weights = train_reference(run.model, run.optimizer, run.seed, tokens)
    error = weight_error(tmp_path / "model", weights)
    print(f"weights differ by {error:.1e}")
    assert error < 1e-9


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compression": Method.INT4}, marks=pytest.mark.slow),
        pytest.param(
            {"compression": Method.LOWRANK_INT4, "adapt": Adapt.RANK},
            marks=pytest.mark.slow,
        ),
        {
            "compression": Method.LOWRANK_INT4,
            "adapt": Adapt.LINKS,
            "fragments": 2,
            "quorum": 0.6,
        },
    ],
    ids=["int4", "lowrank, rank", "lowrank, links, fragments, quorum"],
)
def test_compressed_averages_travel_while_daemons_train_and_die(
    tmp_path: Path, corpus: Path, options: dict[str, Any]
) -> None:
    """Members vote on what they have made of the same bytes; a relay is lost in between."""
    num_iterations = 24
    sync = replace(DILOCO, overlap=True, rank=8, **options)
    run = make_diloco_run(sync, num_iterations)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_data_node("data-1")
        relays = cluster.start_relays(2)
        extra = cluster.start_relay("extra", "--stage", "1")
        cluster.wait_for_iteration(9)
        extra.send(signal.SIGKILL)
        codes = cluster.wait_for_end()
        assert codes.pop("extra") == -signal.SIGKILL
        assert set(codes.values()) == {0}, codes
        losses = leader.losses()
        assert len(relays) == 4
        assert sorted(losses) == list(range(1, num_iterations + 1))
        assert losses[num_iterations] < 0.9 * losses[1]
        assert not leader.events("average.dropped")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_who_leaves_politely_takes_nothing_along_and_the_end_of_the_run_neither(
    tmp_path: Path, corpus: Path, *, overlap: bool
) -> None:
    """No average is due for a long time: one comes early, and the model holds it."""
    run = replace(make_run(), sync=replace(DILOCO, every=100, overlap=overlap))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_relays(2)
        extra = cluster.start_relay("extra", "--stage", "1")
        cluster.wait_for(lambda: takes_part(cluster, extra), "a third relay of stage 1")
        cluster.wait_for_iteration(leader.iteration + 2)
        extra.send(signal.SIGINT)
        assert extra.wait() == 0
        left = leader.iteration
        assert extra.events("contribution.awaited")
        assert leader.events("average.hastened")
        assert not leader.events("member.lost")
        cluster.wait_for_iteration(left + 3)
        leader.send(signal.SIGINT)
        assert set(cluster.wait_for_end().values()) == {0}
        (shared,) = leader.events("learning.shared")
        (exported,) = leader.events("model.exported")
        averaged = [e for e in leader.events("average.hastened") if e["time"] < shared["time"]]
        if overlap:
            averaged = [e for e in leader.events("iteration.committed") if e.get("average_delay")]
        assert averaged[-1]["iteration"] == f"{exported['iteration']}.1"
        assert exported["iteration"] > left
        assert not leader.events("learning.lost")
        assert not leader.events("average.dropped")


@pytest.mark.slow
def test_gradients_travel_as_cocktails(tmp_path: Path, corpus: Path) -> None:
    """The preset `cocktailsgd`: members vote on the same weights in each iteration."""
    num_iterations = 20
    run = make_diloco_run(PRESETS["cocktailsgd"].sync, num_iterations)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        cluster.start_data_node("data-1")
        cluster.start_relays(2)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses = leader.losses()
        assert sorted(losses) == list(range(1, num_iterations + 1))
        assert losses[num_iterations] < losses[1]
        aborted = [event for d in cluster.daemons for event in d.events("iteration.aborted")]
        assert not aborted
