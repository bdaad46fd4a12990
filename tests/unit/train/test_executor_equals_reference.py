"""Stages together must train exactly as one plain process does."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typing_extensions import override

from decod.data.index import BEGINS
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.protocol.core.jobs import Loss, Propose
from decod.protocol.strategy.data_share import summed
from decod.run.model_config import Architecture, ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    ActivationsConfig,
    BatchConfig,
    Documents,
    OptimizerConfig,
    ReductionConfig,
)
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.passes import mean_loss
from tests.support.devices import ACCELERATOR, on_devices
from tests.support.model_folders import write_folder
from tests.support.oracle import Float64Transformers
from tests.support.reference import documents_apart, train_on_targets, train_reference

torch.set_num_threads(1)

BATCH = BatchConfig(sequence_length=8, microbatch_size=2, num_microbatches=3)
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_iterations=2)
SMALL = {
    "dtype": ModelDtype.FLOAT64,
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
MODELS = {
    "llama": ModelConfig(**SMALL),
    "llama tied, grouped": ModelConfig(**SMALL, tie_word_embeddings=True, num_key_value_heads=2),
    "qwen2": ModelConfig(**SMALL, attention_bias=True, num_key_value_heads=1),
    "qwen3": ModelConfig(**SMALL, qk_norm=True, head_dim=6, num_key_value_heads=2),
    "gpt2": ModelConfig(**SMALL, model_type=Architecture.GPT2),
    "gpt2 tied": ModelConfig(**SMALL, model_type=Architecture.GPT2, tie_word_embeddings=True),
}

TOLERANCES = {"cpu": (1e-12, 1e-11), ACCELERATOR: (1e-10, 1e-9)}
"""Of losses, relative, and of weights, absolute, after five iterations in float64.

On a CPU, both sides round alike. CUDA adds up in another order. Where a gradient is nothing but
rounding (of a key's bias, which changes no output: 1e-17), Adam divides it by little more than its
`eps` of 1e-8 and moves the weight by up to `lr` x 1e-9 an iteration, in another direction on each
device. Noise of 4 units in the last place, put into every product and gradient on a CPU, changed
losses by 3e-13 and weights by 1e-11. An error that is not rounding is larger than 1e-6.
"""


class HashedTokens:
    """Tokens drawn from the microbatch's name."""

    def marks(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        return np.ones((batch.microbatch_size, batch.sequence_length + 1), np.uint8)

    def microbatch(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        digest = hashlib.sha256(f"{seed} {mb}".encode()).digest()
        generator = np.random.default_rng(list(digest))
        return generator.integers(0, 19, (batch.microbatch_size, batch.sequence_length + 1))


def make_pipeline(
    model: ModelConfig,
    stages: StagesConfig | None = None,
    reduction: ReductionConfig | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    device: str = "cpu",
    activations: ActivationsConfig | None = None,
    batch: BatchConfig = BATCH,
    recompute: bool = False,
) -> list[StageExecutor]:
    config = ExecutorConfig(
        run=RunConfig(
            model=model,
            stages=stages or StagesConfig(num_relay_stages=2),
            batch=batch,
            optimizer=optimizer,
            reduction=reduction or ReductionConfig(),
            activations=activations or ActivationsConfig(),
            seed=5,
        ),
        device=device,
        recompute=recompute,
    )
    executors = []
    for index in range(config.run.stages.num_relay_stages + 1):
        executor = StageExecutor(config, tokens=HashedTokens() if index == 0 else None)
        executor.build(index)
        executors.append(executor)
    return executors


def run_microbatch(pipeline: list[StageExecutor], mb: MicrobatchId) -> float:
    hidden = pipeline[0].passes.embed(mb)
    for relay in pipeline[1:]:
        hidden = relay.passes.forward(mb, hidden)
    gradient, loss = pipeline[0].passes.head(mb, hidden)
    for relay in reversed(pipeline[1:]):
        gradient = relay.passes.backward(mb, gradient)
    pipeline[0].passes.embed_backward(mb, gradient)
    return loss


def microbatches(iteration: int) -> list[MicrobatchId]:
    return [MicrobatchId(iteration, 0, index) for index in range(BATCH.num_microbatches)]


def run_iteration(pipeline: list[StageExecutor], iteration: int) -> float:
    losses = [run_microbatch(pipeline, mb) for mb in microbatches(iteration)]
    num = len(losses)
    norm = math.sqrt(sum(executor.square_sum(executor.own_mean(num)) for executor in pipeline))
    for executor in pipeline:
        executor.propose(iteration, [], weights_total=num, gradient_norm=norm)
        executor.commit(iteration)
    return sum(losses) / len(losses)


def reference(
    model: ModelConfig, num_iterations: int, optimizer: OptimizerConfig = OPTIMIZER
) -> tuple[list[float], dict[str, torch.Tensor]]:
    source = HashedTokens()
    return train_reference(
        model,
        optimizer,
        5,
        [
            [source.microbatch(mb, BATCH, 5) for mb in microbatches(iteration)]
            for iteration in range(1, num_iterations + 1)
        ],
    )


class MarkedTokens(HashedTokens):
    """Of which some are no targets: none at all of every third microbatch."""

    @override
    def marks(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        generator = np.random.default_rng(list(hashlib.sha256(f"{mb}".encode()).digest()))
        shape = (batch.microbatch_size, batch.sequence_length + 1)
        return generator.integers(0, 2 if mb.index else 1, shape).astype(np.uint8)

    def targets(self, mb: MicrobatchId) -> np.ndarray:
        """Targets, (B, T), and -100 where there is none."""
        chosen = self.marks(mb, BATCH, 5)[:, 1:] & 1
        return np.where(chosen, self.microbatch(mb, BATCH, 5)[:, 1:], -100)


class DocumentTokens(MarkedTokens):
    """Of several documents a sequence."""

    @override
    def marks(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> np.ndarray:
        targets = super().marks(mb, batch, seed)
        begins = targets.reshape(-1)[::-1].reshape(targets.shape) * BEGINS
        return targets | begins

    def documents(self, mb: MicrobatchId) -> list[tuple[np.ndarray, np.ndarray]]:
        return documents_apart(self.microbatch(mb, BATCH, 5), self.marks(mb, BATCH, 5))


def train_targets(pipeline: list[StageExecutor], source: MarkedTokens) -> list[float]:
    """Train three iterations with means over targets. Return their losses."""
    pipeline[0].tokens = source
    pipeline[0].build(0)
    num_positions = BATCH.tokens_per_microbatch
    losses = []
    for iteration in (1, 2, 3):
        found = []
        for mb in microbatches(iteration):
            num = int((source.targets(mb) >= 0).sum())
            found.append(mean_loss([Loss(run_microbatch(pipeline, mb), num)], num_positions))
        num_targets = sum(each.num_tokens for each in found)
        losses.append(summed([(each.loss, 1, each.num_tokens) for each in found]) / len(found))
        squares = [executor.square_sum(executor.own_mean(len(found))) for executor in pipeline]
        job = Propose(iteration, 0, len(found), math.sqrt(sum(squares)), num_targets=num_targets)
        for executor in pipeline:
            executor.propose(
                iteration,
                [],
                weights_total=job.weights_total,
                gradient_norm=job.gradient_norm,
                share=job.share(num_positions),
            )
            executor.commit(iteration)
    return losses


@on_devices
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_documents_apart_train_as_each_alone(name: str, recompute: bool, device: str) -> None:
    """Positions begin anew with each, and none sees another."""
    source = DocumentTokens()
    batches = [[d for mb in microbatches(n) for d in source.documents(mb)] for n in (1, 2, 3)]
    assert {inputs.shape[1] for batch in batches for inputs, _ in batch} > {1, 2, 3, 4, 5}
    expected = train_on_targets(MODELS[name], OPTIMIZER, 5, batches)
    batch = replace(BATCH, documents=Documents.APART)
    pipeline = make_pipeline(MODELS[name], batch=batch, recompute=recompute, device=device)
    losses = train_targets(pipeline, source)
    assert_equals_reference(pipeline, losses, expected)


@pytest.mark.parametrize("name", ["llama tied, grouped", "qwen3", "gpt2"])
def test_the_gradient_is_that_of_transformers_with_labels_of_minus_100(
    name: str, tmp_path: Path
) -> None:
    """Each document by itself there, and packed here."""
    source, model = DocumentTokens(), MODELS[name]
    batch = replace(BATCH, documents=Documents.APART)
    pipeline = make_pipeline(model, batch=batch)
    pipeline[0].tokens = source
    pipeline[0].build(0)
    write_folder(tmp_path / "model", model, weights_of(pipeline))
    theirs = Float64Transformers(tmp_path / "model")
    documents = [each for mb in microbatches(1) for each in source.documents(mb)]
    logits = [theirs(torch.from_numpy(inputs))[0] for inputs, _ in documents]
    labels = torch.cat([torch.from_numpy(targets[0]) for _, targets in documents])
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), labels, ignore_index=-100)
    torch.autograd.backward([loss])
    own = sum(run_microbatch(pipeline, mb) for mb in microbatches(1))
    scale = BATCH.tokens_per_microbatch / int((labels >= 0).sum())
    assert own * scale == pytest.approx(float(loss.detach()), rel=1e-12)
    for executor in pipeline:
        views = executor._built.state.layout.views(executor.passes.own_parts(1)[0])
        for key, summed_gradient in views:
            expected = theirs.model.get_parameter(key).grad
            torch.testing.assert_close(summed_gradient * scale, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_the_gradient_is_the_mean_over_the_targets_of_the_whole_batch(clip_norm: float) -> None:
    """As transformers has it for labels of -100; and not the mean of the microbatches' means."""
    source = MarkedTokens()
    optimizer = replace(OPTIMIZER, clip_norm=clip_norm)
    pipeline = make_pipeline(MODELS["llama"], optimizer=optimizer)
    losses = train_targets(pipeline, source)
    batches = [
        [
            (source.microbatch(mb, BATCH, 5)[:, :-1], source.targets(mb))
            for mb in microbatches(number)
        ]
        for number in (1, 2, 3)
    ]
    expected = train_on_targets(MODELS["llama"], optimizer, 5, batches)
    assert_equals_reference(pipeline, losses, expected)


def weights_of(pipeline: list[StageExecutor]) -> dict[str, torch.Tensor]:
    """Return the weights of all stages, on the CPU."""
    return {
        name: tensor.cpu() for executor in pipeline for name, tensor in executor.weights().items()
    }


def assert_equals_reference(
    pipeline: list[StageExecutor],
    losses: list[float],
    expected: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    """Compare losses and weights with those of one process on the CPU."""
    expected_losses, expected_weights = expected
    loss_rtol, weight_atol = TOLERANCES[pipeline[0].config.device]
    np.testing.assert_allclose(losses, expected_losses, rtol=loss_rtol)
    found = weights_of(pipeline)
    assert found.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-8, atol=weight_atol)


@on_devices
@pytest.mark.parametrize(("num_first_blocks", "is_even"), [(0, True), (1, True), (0, False)])
@pytest.mark.parametrize("name", MODELS)
def test_stages_train_as_one_process_does(
    name: str, num_first_blocks: int, device: str, *, is_even: bool
) -> None:
    model = MODELS[name]
    blocks = "auto" if is_even else f"1, {model.num_hidden_layers - 1}"
    stages = StagesConfig(num_first_blocks=num_first_blocks, blocks=blocks)
    pipeline = make_pipeline(model, stages, device=device)
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    assert_equals_reference(pipeline, losses, reference(model, 5))


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
@pytest.mark.parametrize("name", ["llama tied, grouped", "gpt2"])
def test_two_runs_on_one_device_learn_the_same_bits(
    name: str, dtype: ModelDtype, device: str
) -> None:
    """With the embedding's gradient, which adds up rows in whatever order tokens repeat."""
    model = replace(MODELS[name], dtype=dtype)
    runs = [make_pipeline(model, device=device) for _ in range(2)]
    first, second = ([run_iteration(run, iteration) for iteration in (1, 2, 3)] for run in runs)
    assert first == second
    plain, again = (weights_of(run) for run in runs)
    assert all(torch.equal(plain[key], again[key]) for key in plain)


@on_devices
@pytest.mark.parametrize("clip_norm", [0.01, 0.8, 1e6])
@pytest.mark.parametrize("name", ["llama", "gpt2 tied"])
def test_clipped_stages_train_as_one_process_does(name: str, clip_norm: float, device: str) -> None:
    """With limits that each step exceeds, that some do, and that none does."""
    optimizer = replace(OPTIMIZER, clip_norm=clip_norm)
    pipeline = make_pipeline(MODELS[name], optimizer=optimizer, device=device)
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    assert_equals_reference(pipeline, losses, reference(MODELS[name], 5, optimizer))
    unclipped, _ = reference(MODELS[name], 5)
    assert np.allclose(losses, unclipped, rtol=1e-9, atol=0) == (clip_norm == 1e6)


@on_devices
def test_what_was_shed_and_computed_again_gives_the_same_bits(device: str) -> None:
    """A relay lets go of a forward pass, computes another microbatch's, and the first's again."""
    first, second = microbatches(1)[:2]
    found: list[dict[str, torch.Tensor]] = []
    for sheds in (False, True):
        pipeline = make_pipeline(MODELS["llama"], device=device)
        entry = pipeline[0].passes.embed(first)
        hidden = pipeline[1].passes.forward(first, entry)
        if sheds:
            pipeline[1].passes.drop(first)
        run_microbatch(pipeline, second)
        if sheds:
            assert torch.equal(pipeline[1].passes.forward(first, entry), hidden)
        gradient, _ = pipeline[0].passes.head(first, pipeline[2].passes.forward(first, hidden))
        for relay in reversed(pipeline[1:]):
            gradient = relay.passes.backward(first, gradient)
        pipeline[0].passes.embed_backward(first, gradient)
        for executor in pipeline:
            executor.propose(1, [], weights_total=2)
            executor.commit(1)
        found.append(weights_of(pipeline))
    plain, again = found
    assert all(torch.equal(plain[key], again[key]) for key in plain)


@on_devices
def test_bfloat16_follows_the_float32_reference(device: str) -> None:
    """Activations have 8 bits: losses agree to about a percent, and training makes progress."""
    model = ModelConfig(**{**SMALL, "dtype": ModelDtype.BFLOAT16})
    pipeline = make_pipeline(model, device=device)
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    expected, _ = reference(ModelConfig(**{**SMALL, "dtype": ModelDtype.FLOAT32}), 5)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert pipeline[1].weights()["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


@on_devices
def test_float32_gradients_add_up_in_place(device: str) -> None:
    """The flat buffer is what is sent: autograd must not put its sums anywhere else."""
    pipeline = make_pipeline(ModelConfig(**{**SMALL, "dtype": ModelDtype.FLOAT32}), device=device)
    for mb in microbatches(1):
        run_microbatch(pipeline, mb)
    for executor in pipeline:
        (flat,) = executor.gather(1)
        grads = [p.grad for p in executor._built.stage.parameters_by_name().values()]
        torch.testing.assert_close(torch.cat([g.reshape(-1) for g in grads]), flat, rtol=0, atol=0)
        assert flat.abs().sum() > 0


@on_devices
def test_a_repeated_head_answers_again_and_adds_nothing(device: str) -> None:
    """As when the relay before it died after the head had run."""
    first, relay = make_pipeline(MODELS["llama"], StagesConfig(num_relay_stages=1), device=device)
    mb = microbatches(1)[0]
    hidden = relay.passes.forward(mb, first.passes.embed(mb))
    gradient, loss = first.passes.head(mb, hidden)
    (total,) = first.gather(1)
    total = total.clone()
    again, loss_again = first.passes.head(mb, hidden)
    assert loss_again == loss
    assert torch.equal(again, gradient)
    assert torch.equal(first.gather(1)[0], total)


def test_stages_start_from_a_model_folder(tmp_path: Path) -> None:
    model = MODELS["qwen2"]
    weights = weights_of(make_pipeline(model))
    write_folder(tmp_path, model, weights)
    config = make_pipeline(model)[0].config
    config = replace(config, run=replace(config.run, seed=99))
    found = {}
    for index in range(3):
        executor = StageExecutor(config, init_dir=tmp_path)
        executor.build(index)
        found |= executor.weights()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    other = StageExecutor(
        replace(config, run=replace(config.run, model=MODELS["llama"])), init_dir=tmp_path
    )
    with pytest.raises(DataError, match="E-DAT-017"):
        other.build(0)


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    """They would read past the embedding's end."""
    model = replace(MODELS["llama"], vocab_size=5)
    first = make_pipeline(model)[0]
    with pytest.raises(DataError, match="E-DAT-018"):
        first.passes.embed(microbatches(1)[0])
