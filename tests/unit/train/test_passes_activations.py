"""Activations and gradients that are coded between stages: what is lost, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decod.clocks import Stopwatch
from decod.config.schema import activation_size_bytes
from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    ActivationCompression,
    ActivationsConfig,
    BatchConfig,
    Documents,
)
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.passes import ActivationCodec
from tests.support.coded import cut
from tests.support.devices import on_devices
from tests.support.reference import train_reference
from tests.unit.train.test_executor_equals_reference import (
    BATCH,
    MODELS,
    OPTIMIZER,
    HashedTokens,
    assert_equals_reference,
    make_pipeline,
    microbatches,
    run_iteration,
    run_microbatch,
    weights_of,
)

BF16, INT8 = ActivationCompression.BF16, ActivationCompression.INT8
coded = pytest.mark.parametrize("compression", [BF16, INT8])
SCALE_BYTES = 4


def config_of(
    compression: ActivationCompression,
    *,
    hidden_size: int = 16,
    dtype: ModelDtype = ModelDtype.FLOAT32,
    documents: Documents = Documents.TOGETHER,
) -> ExecutorConfig:
    return ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(hidden_size=hidden_size, dtype=dtype),
            batch=BatchConfig(sequence_length=3, microbatch_size=2, documents=documents),
            activations=ActivationsConfig(compression=compression),
            seed=1,
        ),
    )


def codec_of(config: ExecutorConfig) -> ActivationCodec:
    return ActivationCodec(config, Stopwatch())


def coded_pipeline(
    compression: ActivationCompression,
    name: str = "llama",
    stages: StagesConfig | None = None,
    device: str = "cpu",
) -> list[StageExecutor]:
    activations = ActivationsConfig(compression=compression)
    return make_pipeline(MODELS[name], stages, activations=activations, device=device)


# --- what is lost ---------------------------------------------------------------------------------


def test_what_is_not_compressed_travels_as_it_is() -> None:
    config = config_of(ActivationCompression.NONE)
    value = torch.randn(config.activation_shape, device=config.device)
    sent = codec_of(config).sent(value, "activation")
    assert sent is value
    assert torch.equal(codec_of(config).received(sent, "activation"), value)


@on_devices
@pytest.mark.parametrize("compression", list(ActivationCompression))
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_an_activation_tells_where_documents_begin(
    compression: ActivationCompression, dtype: ModelDtype, device: str
) -> None:
    """A byte for each position follows what travels else. A gradient has as many."""
    together = replace(config_of(compression, dtype=dtype), device=device)
    apart = replace(config_of(compression, dtype=dtype, documents=Documents.APART), device=device)
    value = torch.randn(apart.activation_shape).to(device, apart.dtype)
    places = torch.tensor([[0, 0, 1], [0, 1, 2]], device=device)
    codec = codec_of(apart)
    sent = codec.sent(value, "activation", places)
    assert (sent.dtype, sent.shape) == apart.activation_wire
    assert sent.nbytes == apart.activation_bytes == activation_size_bytes(apart.run)
    assert sent.nbytes == together.activation_bytes + places.numel()
    plain = codec_of(together)
    assert plain.places(plain.sent(value, "activation"), "activation") is None
    expected = plain.received(plain.sent(value, "activation"), "activation")
    assert torch.equal(codec.received(sent, "activation"), expected)
    found = codec.places(sent, "activation")
    assert found is not None
    assert torch.equal(found, places)
    gradient = codec.sent(value, "gradient")
    assert gradient.shape == sent.shape
    assert torch.equal(codec.received(gradient, "gradient"), expected)
    sent[-1] = 2
    with pytest.raises(ShapeError, match="holds a mark of 2"):
        codec.places(sent, "activation")


@coded
@pytest.mark.parametrize("dtype", list(ModelDtype))
@given(st.sampled_from([16, 48, 256, 320, 512]), st.integers(0, 2**40), st.integers(-60, 60))
def test_a_token_keeps_its_precision_and_has_the_size_that_nodes_expect(
    compression: ActivationCompression,
    dtype: ModelDtype,
    hidden_size: int,
    seed: int,
    power: int,
) -> None:
    """Whatever its neighbours hold: tokens differ by a factor of a million here."""
    config = config_of(compression, hidden_size=hidden_size, dtype=dtype)
    value = torch.randn(config.activation_shape, generator=torch.Generator().manual_seed(seed))
    value *= 2.0**power * torch.logspace(-3, 3, 6).view(2, 3, 1)
    value = value.to(config.device, config.dtype)
    codec = codec_of(config)
    sent = codec.sent(value, "activation")
    run = RunConfig(
        model=config.run.model, batch=config.run.batch, activations=config.run.activations
    )
    assert sent.numel() * sent.element_size() == activation_size_bytes(run)
    assert (sent.dtype, sent.shape) == config.activation_wire
    found = codec.received(sent, "activation")
    assert found.dtype == config.dtype
    error, exact = (found.double() - value.double()).abs(), value.double().abs()
    if compression is BF16:
        assert bool((error <= exact * 2.0**-8).all())
        return
    largest = exact.amax(dim=-1, keepdim=True)
    # A bfloat16 model also rounds what it decodes.
    rounding = exact * 2.0**-8 if dtype is ModelDtype.BFLOAT16 else 0.0
    assert bool((error <= largest / 127 / 2 * (1 + 1e-4) + rounding).all())


@on_devices
@coded
@pytest.mark.parametrize("num_first_blocks", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gpt2 tied"])
def test_coded_stages_train_as_one_process_that_rounds_at_the_same_cuts(
    name: str, num_first_blocks: int, compression: ActivationCompression, device: str
) -> None:
    stages = StagesConfig(num_relay_stages=2, num_first_blocks=num_first_blocks)
    pipeline = coded_pipeline(compression, name, stages, device)
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    source = HashedTokens()
    batches = [
        [source.microbatch(mb, BATCH, 5) for mb in microbatches(iteration)]
        for iteration in range(1, 6)
    ]
    train = partial(train_reference, MODELS[name], OPTIMIZER, 5, batches)
    expected = train(change=partial(cut, stages=stages, compression=compression))
    assert_equals_reference(pipeline, losses, expected)
    plain, _ = train()
    assert abs(losses[-1] / plain[-1] - 1) > 1e-9, "nothing was rounded"


@on_devices
@coded
def test_what_is_computed_again_gives_the_same_bytes(
    compression: ActivationCompression, device: str
) -> None:
    """As for a relay that takes a lost one's place, or that has shed its forward pass."""
    first, second = microbatches(1)[:2]
    pipeline, other = (coded_pipeline(compression, device=device) for _ in range(2))
    entry = pipeline[0].passes.embed(first)
    hidden = pipeline[1].passes.forward(first, entry)
    pipeline[1].passes.drop(first)
    run_microbatch(pipeline, second)
    assert torch.equal(pipeline[1].passes.forward(first, entry), hidden)
    assert torch.equal(other[1].passes.forward(first, entry), hidden)
    gradient, _ = pipeline[0].passes.head(first, pipeline[2].passes.forward(first, hidden))
    assert torch.equal(
        pipeline[0].passes.head(first, other[2].passes.forward(first, hidden))[0], gradient
    )
    back = pipeline[2].passes.backward(first, gradient)
    assert torch.equal(other[2].passes.backward(first, gradient), back)
    assert torch.equal(
        other[1].passes.backward(first, back), pipeline[1].passes.backward(first, back)
    )
    # The substitute's sum holds one microbatch, the other's two.
    run_microbatch(other, second)
    for executor in (pipeline[2], other[2]):
        executor.propose(1, [], weights_total=2)
        executor.commit(1)
    torch.testing.assert_close(weights_of([other[2]]), weights_of([pipeline[2]]))


# --- what is refused ------------------------------------------------------------------------------


def _with_scale(scale: float) -> Callable[[Tensor], Tensor]:
    """Return a change of the second token's scale."""

    def change(sent: Tensor) -> Tensor:
        sent[SCALE_BYTES : 2 * SCALE_BYTES].view(torch.float32)[0] = scale
        return sent

    return change


def _with_element(value: float) -> Callable[[Tensor], Tensor]:
    """Return a change of the second element."""

    def change(sent: Tensor) -> Tensor:
        sent.view(torch.bfloat16)[1] = value
        return sent

    return change


BAD = (
    *((INT8, _with_scale(scale)) for scale in (0.0, -1.0, math.inf, math.nan, 1e38, 1e-42)),
    *((BF16, _with_element(value)) for value in (math.nan, math.inf, -math.inf)),
)


@pytest.mark.parametrize(("compression", "spoil"), BAD)
def test_impossible_numbers_are_refused_and_leave_nothing_behind(
    compression: ActivationCompression, spoil: Callable[[Tensor], Tensor]
) -> None:
    mb = microbatches(1)[0]
    pipeline = coded_pipeline(compression)
    entry = pipeline[0].passes.embed(mb)
    with pytest.raises(NonFiniteError, match="activation received"):
        pipeline[1].passes.forward(mb, spoil(entry.clone()))
    with pytest.raises(TrainingError, match="is not held"):
        pipeline[1].passes.backward(mb, entry)
    with pytest.raises(NonFiniteError, match="activation received"):
        pipeline[0].passes.head(mb, spoil(entry.clone()))
    hidden = pipeline[1].passes.forward(mb, entry)
    with pytest.raises(NonFiniteError, match="gradient received"):
        pipeline[1].passes.backward(mb, spoil(hidden.clone()))
    # The microbatch is still held, and a right gradient is taken.
    pipeline[1].passes.backward(mb, hidden)
    for executor in pipeline[:2]:
        executor.own_mean(1)


@coded
@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_bytes_is_refused(
    compression: ActivationCompression, change: int
) -> None:
    mb = microbatches(1)[0]
    pipeline = coded_pipeline(compression)
    entry = pipeline[0].passes.embed(mb)
    wrong = torch.zeros(entry.numel() + change, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"activation received is torch\.uint8"):
        pipeline[1].passes.forward(mb, wrong)


def test_numbers_as_computed_are_refused_where_coded_ones_travel() -> None:
    mb = microbatches(1)[0]
    plain = make_pipeline(MODELS["llama"])
    with pytest.raises(ShapeError, match=r"exchanges torch\.uint8"):
        coded_pipeline(INT8)[1].passes.forward(mb, plain[0].passes.embed(mb))


@coded
def test_what_is_too_large_for_the_format_is_not_sent(compression: ActivationCompression) -> None:
    config = config_of(compression, dtype=ModelDtype.FLOAT64)
    value = torch.full(config.activation_shape, 1e39, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="gradient of microbatch 7 can't be sent"):
        codec_of(config).sent(value, "gradient of microbatch 7")
