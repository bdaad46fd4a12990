"""Both ways to keep a stage's members together train as they do by hand.

Whole cores run on real stages.
"""

import hashlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from decod.compression.plan import Method
from decod.ids import MicrobatchId, NodeId
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    BatchConfig,
    OptimizerConfig,
    OptimizerName,
    SyncConfig,
    SyncMethod,
)
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from tests.support.diloco_reference import Reference
from tests.support.reference import train_reference
from tests.support.torch_device import TorchDevice
from tests.unit.protocol.cast import CONFIG
from tests.unit.protocol.world import Host, World

SEED = 5
BATCH = BatchConfig(sequence_length=8, microbatch_size=2, num_microbatches=3)
STAGES = StagesConfig(num_relay_stages=2)
ERROR_MAX = {
    Method.FP16: 1e-5,
    Method.BF16: 1e-3,
    Method.INT8: 1e-3,
    Method.INT4: 0.03,
    Method.LOWRANK: 0.3,
    Method.LOWRANK_INT4: 0.3,
    Method.COCKTAIL: 0.6,
}
"""Squared distance from uncompressed training, over the squared way that it has come."""

OPTIMIZER = OptimizerConfig(lr=1e-2)
PLAIN_SGD = OptimizerConfig(name=OptimizerName.SGD, lr=1e-2, beta1=0.0, weight_decay=0.0)
MODEL = ModelConfig(
    dtype=ModelDtype.FLOAT64,
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
)


class HashedTokens:
    """Tokens drawn from the microbatch's name."""

    def marks(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        return np.ones((batch.microbatch_size, batch.sequence_length + 1), np.uint8)

    def microbatch(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        digest = hashlib.sha256(f"{seed} {mb}".encode()).digest()
        shape = (batch.microbatch_size, batch.sequence_length + 1)
        return np.random.default_rng(list(digest)).integers(0, MODEL.vocab_size, shape)


def torch_world(
    sync: SyncConfig, *, num_iterations: int, width: int = 2, optimizer: OptimizerConfig = OPTIMIZER
) -> World:
    """Return a world of a data node and two stages of `width` relays, whose devices compute."""

    def device() -> TorchDevice:
        config = ExecutorConfig(
            run=RunConfig(
                model=MODEL,
                stages=STAGES,
                batch=BATCH,
                optimizer=optimizer,
                sync=sync,
                seed=SEED,
            ),
        )
        return TorchDevice(StageExecutor(config, tokens=HashedTokens()))

    world = World(
        config=replace(CONFIG, min_nodes_per_stage=width),
        num_stages=2,
        num_microbatches=BATCH.num_microbatches,
        num_iterations=num_iterations,
        sync=sync,
        device=device,
    )
    world.start("d0", capacity=3)
    for stage, letter in itertools.product((1, 2), "abc"[:width]):
        world.start(f"r{stage}{letter}", capacity=3)
    return world


def batches(num_iterations: int) -> list[list[np.ndarray]]:
    tokens = HashedTokens()
    return [
        [
            tokens.microbatch(MicrobatchId(number, 0, index), BATCH, SEED)
            for index in range(BATCH.num_microbatches)
        ]
        for number in range(1, num_iterations + 1)
    ]


def reference(
    world: World, sync: SyncConfig, num_iterations: int, optimizer: OptimizerConfig = OPTIMIZER
) -> dict[str, Tensor]:
    """Return the weights of the same training by hand, along the paths that the world took."""
    by_hand = Reference(MODEL, STAGES, optimizer, sync, seed=SEED)
    paths = dict[MicrobatchId, dict[int, str]]()
    for node, host in world.hosts.items():
        stage = host.machine.context.member.stage_index
        by_hand.add(node, stage)
        for mb in device_of(host).folded:
            paths.setdefault(mb, {})[stage] = node
    lines = "\n".join(world.seen)
    used = re.findall(r"iteration\.committed iteration=(\d+)\..* average_delay=", lines)
    arrivals = set(map(int, used))
    for number, batch in enumerate(batches(num_iterations), start=1):
        named = [
            (tokens, tuple(node for _, node in sorted(paths[MicrobatchId(number, 0, k)].items())))
            for k, tokens in enumerate(batch)
        ]
        last = number == num_iterations
        by_hand.iterate(number, named, arrival=number in arrivals, last=last)
    return by_hand.anchors


def stage_of(host: Host) -> int:
    return host.machine.context.member.stage_index


def device_of(host: Host) -> TorchDevice:
    assert isinstance(host.device, TorchDevice)
    return host.device


def weights_of(host: Host) -> dict[str, Tensor]:
    return dict(device_of(host).executor.weights())


@pytest.mark.parametrize("name", [OptimizerName.ADAMW, OptimizerName.SGD])
def test_the_present_policy_trains_as_a_plain_loop_does(name: OptimizerName) -> None:
    optimizer = replace(OPTIMIZER, name=name)
    world = torch_world(SyncConfig(), num_iterations=4, optimizer=optimizer)
    go_on(world, lambda: opened(world, 5))
    world.settle()
    _, expected = train_reference(MODEL, optimizer, SEED, batches(4))
    assert_equal(world, expected)


@pytest.mark.parametrize("name", OptimizerName)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_diloco_trains_as_by_hand(every: int, name: OptimizerName, *, overlap: bool) -> None:
    sync = SyncConfig(method=SyncMethod.DILOCO, every=every, overlap=overlap)
    optimizer = replace(OPTIMIZER, name=name)
    world = torch_world(sync, num_iterations=12, optimizer=optimizer)
    go_on(world, lambda: opened(world, 13))
    world.settle()
    assert_equal(world, reference(world, sync, 12, optimizer))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fragments", [1, 3])
def test_fragments_train_as_by_hand(fragments: int, *, overlap: bool) -> None:
    sync = SyncConfig(method=SyncMethod.DILOCO, every=6, fragments=fragments, overlap=overlap)
    world = torch_world(sync, num_iterations=16)
    go_on(world, lambda: opened(world, 17))
    world.settle()
    assert_equal(world, reference(world, sync, 16))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compression", [method for method in Method if method is not Method.NONE])
def test_compressed_averages_lead_nearly_where_whole_ones_do(
    compression: Method, *, overlap: bool
) -> None:
    """Members that come to different bits would not commit. What is left out comes later."""
    sync = SyncConfig(
        method=SyncMethod.DILOCO,
        every=2,
        overlap=overlap,
        compression=compression,
        rank=4,
        random_ratio=0.5,
        top_ratio=0.5,
    )
    world = torch_world(sync, num_iterations=12)
    go_on(world, lambda: opened(world, 13))
    world.settle()
    expected = reference(world, sync, 12)
    begun = Reference(MODEL, STAGES, OPTIMIZER, sync, seed=SEED).anchors
    for host in world.hosts.values():
        found = weights_of(host)
        error = sum(float((found[name] - expected[name]).square().sum()) for name in found)
        moved = sum(float((begun[name] - expected[name]).square().sum()) for name in found)
        assert error < ERROR_MAX[compression] * moved
    by_stage = [
        [weights_of(host) for host in world.hosts.values() if stage_of(host) == stage]
        for stage in (1, 2)
    ]
    for first, second in by_stage:
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_local_step_of_sgd_is_plain_sgd() -> None:
    """Averages of pseudo-gradients are then averages of gradients."""
    sync = SyncConfig(method=SyncMethod.DILOCO, outer_lr=1.0, outer_momentum=0.0)
    world = torch_world(sync, num_iterations=4, optimizer=PLAIN_SGD)
    go_on(world, lambda: opened(world, 5))
    world.settle()
    _, expected = train_reference(MODEL, PLAIN_SGD, SEED, batches(4))
    assert_equal(world, expected)


@pytest.mark.parametrize("iteration", [4, 5, 6])
def test_whoever_is_lost_takes_along_what_it_has_learnt(iteration: int) -> None:
    """The others average what they have, agree on the result, and go on."""
    sync = SyncConfig(method=SyncMethod.DILOCO, every=3)
    world = torch_world(sync, num_iterations=9, width=3)
    go_on(world, lambda: opened(world, iteration))
    world.kill("r1a")
    lost = weights_of(world.hosts[NodeId("r1a")])
    go_on(world, lambda: opened(world, 10))
    world.settle()
    left = [weights_of(host) for host in world.hosts.values() if host.alive]
    first, other = (weights for weights in left if weights.keys() == lost.keys())
    assert all(torch.equal(first[name], other[name]) for name in lost)


def go_on(world: World, condition: Callable[[], bool]) -> None:
    """Let things happen, and time pass where nothing else does."""
    for _ in range(5000):
        if condition():
            return
        if world.flight or any(host.alive and host.queue for host in world.hosts.values()):
            world.turn()
        else:
            world.expire()
    raise AssertionError("it never happened")


def opened(world: World, number: int) -> bool:
    """Whether everybody has begun this iteration."""
    living = (host for host in world.hosts.values() if host.alive)
    return all(host.machine.context.iteration.number >= number for host in living)


def assert_equal(world: World, expected: dict[str, Tensor]) -> None:
    """Compare the weights of all members with those of the oracle."""
    for host in world.hosts.values():
        for name, weights in weights_of(host).items():
            torch.testing.assert_close(weights, expected[name], rtol=0, atol=1e-11)
