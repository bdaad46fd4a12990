"""The step is a policy: a second one, made here, trains as its own plain loop does.

Its members add up gradients over three iterations. At the end of every third they average them,
and take a step of plain SGD. Whole cores run it on real stages.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from decod.data.params import BatchConfig
from decod.ids import MicrobatchId, NodeId
from decod.model.config import ModelConfig, ModelDtype, StagesConfig
from decod.model.initial import initial_weight
from decod.model.shape import model_shapes
from decod.model.stage import empty_model
from decod.train.adamw import AdamWState, Segment
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.params import OptimizerConfig, ReductionConfig
from decod.train.update_rule import UpdateRule
from tests.support.reference import train_reference
from tests.support.torch_device import TorchDevice
from tests.unit.protocol.cast import CONFIG
from tests.unit.protocol.world import Host, World

EVERY = 3
LR = 0.5
SEED = 5
BATCH = BatchConfig(sequence_length=8, microbatch_size=2, num_microbatches=3)
OPTIMIZER = OptimizerConfig(lr=1e-2)
MODEL = ModelConfig(
    dtype=ModelDtype.FLOAT64,
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
)


class PlainSgd:
    """Add up gradients, and step from their average."""

    def __init__(self) -> None:
        self._kept_P: Tensor | None = None

    def contribution(self, gradient_P: Tensor) -> Tensor:
        return gradient_P if self._kept_P is None else self._kept_P + gradient_P

    def average(
        self,
        old: AdamWState,
        new: AdamWState,
        mean_P: Tensor,
        *,
        segments: Sequence[Segment],
        iteration: int,
    ) -> None:
        self.local(old, new, mean_P, iteration=iteration)
        new.weights.sub_(mean_P * LR)

    def local(
        self, old: AdamWState, new: AdamWState, gradient_P: Tensor, *, iteration: int
    ) -> None:
        for target, source in ((new.weights, old.weights), (new.mean, old.mean)):
            target.copy_(source)
        new.square.copy_(old.square)

    def committed(self, gradient_P: Tensor, *, averaged: bool) -> None:
        self._kept_P = None if averaged else self.contribution(gradient_P).clone()


class HashedTokens:
    """Tokens drawn from the microbatch's name."""

    def microbatch(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        digest = hashlib.sha256(f"{seed} {mb}".encode()).digest()
        shape = (batch.microbatch_size, batch.sequence_length + 1)
        return np.random.default_rng(list(digest)).integers(0, MODEL.vocab_size, shape)


def torch_world(
    rule: type[UpdateRule] | None, *, sync_every: int, num_iterations: int, width: int = 2
) -> World:
    """Return a world of a data node and two stages of `width` relays, whose devices compute."""

    def device() -> TorchDevice:
        config = ExecutorConfig(
            model=MODEL,
            stages=StagesConfig(num_relay_stages=2),
            batch=BATCH,
            optimizer=OPTIMIZER,
            reduction=ReductionConfig(),
            seed=SEED,
        )
        made = rule() if rule is not None else None
        return TorchDevice(StageExecutor(config, tokens=HashedTokens(), rule=made))

    world = World(
        config=replace(CONFIG, min_nodes_per_stage=width),
        num_stages=2,
        num_microbatches=BATCH.num_microbatches,
        num_iterations=num_iterations,
        sync_every=sync_every,
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


def plain_loop(num_iterations: int) -> dict[str, Tensor]:
    """Return the weights of the same training in one process: one SGD step for three batches."""
    module = empty_model(MODEL)
    module.place(
        {
            name: initial_weight(MODEL, seed=SEED, name=name, shape=shape).double()
            for name, shape in model_shapes(MODEL).items()
        }
    )
    sgd = torch.optim.SGD(module.parameters(), lr=LR)
    for number, batch in enumerate(batches(num_iterations), start=1):
        for tokens in batch:
            whole = torch.from_numpy(tokens)
            logits = module(whole[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, MODEL.vocab_size), whole[:, 1:].reshape(-1)
            )
            torch.autograd.backward([loss / (EVERY * len(batch))])
        if number % EVERY == 0:
            sgd.step()
            sgd.zero_grad()
    return {name: parameter.detach() for name, parameter in module.parameters_by_name().items()}


def weights_of(host: Host) -> dict[str, Tensor]:
    assert isinstance(host.device, TorchDevice)
    return dict(host.device.executor.weights())


def test_the_present_policy_trains_as_a_plain_loop_does() -> None:
    world = torch_world(None, sync_every=1, num_iterations=4)
    go_on(world, lambda: opened(world, 5))
    world.settle()
    _, expected = train_reference(MODEL, OPTIMIZER, SEED, batches(4))
    assert_equal(world, expected)


def test_a_policy_of_three_iterations_and_sgd_trains_as_a_plain_loop_does() -> None:
    world = torch_world(PlainSgd, sync_every=EVERY, num_iterations=6)
    go_on(world, lambda: opened(world, 7))
    world.settle()
    assert_equal(world, plain_loop(6))


@pytest.mark.parametrize("iteration", [4, 5, 6])
def test_whoever_is_lost_takes_along_what_it_has_added_up(iteration: int) -> None:
    """The others average what they have, agree on the result, and go on."""
    world = torch_world(PlainSgd, sync_every=EVERY, num_iterations=9, width=3)
    go_on(world, lambda: opened(world, iteration))
    world.kill("r1a")
    lost = weights_of(world.hosts[NodeId("r1a")])
    go_on(world, lambda: opened(world, 10))
    world.settle()
    left = [weights_of(host) for host in world.hosts.values() if host.alive]
    first, other = (weights for weights in left if weights.keys() == lost.keys())
    assert all(torch.equal(first[name], other[name]) for name in lost)
    undisturbed = plain_loop(9)
    assert not all(torch.equal(first[name], undisturbed[name]) for name in lost)


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
