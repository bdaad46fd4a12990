"""A member does another's passes again: honest work is found right, whatever the format."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decod.ids import MicrobatchId
from decod.protocol.core.fingerprints import SEED_BYTES, added, error_of
from decod.run.model_config import ModelDtype
from decod.run.training_config import ActivationCompression, ActivationsConfig, Documents
from decod.train.executor import StageExecutor
from decod.train.passes import ActivationCodec
from decod.train.reduction import cut
from decod.train.standing_out import error_between, sketch_of
from tests.support.devices import on_devices
from tests.unit.train.test_executor import make_relay, noise

torch.set_num_threads(1)

MICROBATCHES = [MicrobatchId(1, 0, index) for index in range(3)]

FORMATS = {
    "float64": (ModelDtype.FLOAT64, ActivationCompression.NONE, 1e-12),
    "float32": (ModelDtype.FLOAT32, ActivationCompression.NONE, 1e-6),
    "bfloat16": (ModelDtype.BFLOAT16, ActivationCompression.NONE, 1e-6),
    "int8 activations": (ModelDtype.FLOAT32, ActivationCompression.INT8, 1e-6),
    "int4 activations": (ModelDtype.FLOAT32, ActivationCompression.INT4, 1e-6),
}


def make(
    dtype: ModelDtype, compression: ActivationCompression, device: str = "cpu"
) -> StageExecutor:
    plain = make_relay(dtype, device=device)
    run = replace(plain.config.run, activations=ActivationsConfig(compression=compression))
    assert run.audited
    relay = StageExecutor(replace(plain.config, run=run))
    relay.build(1)
    return relay


def travelling(relay: StageExecutor, seed: int) -> Tensor:
    """Return an activation or gradient as another stage sends it."""
    return ActivationCodec(relay.config, relay._watch).sent(noise(relay, seed), "test")


def read(relay: StageExecutor, tensor: Tensor) -> Tensor:
    return ActivationCodec(relay.config, relay._watch).received(tensor, "test")


def inputs(relay: StageExecutor, mb: MicrobatchId) -> tuple[Tensor, Tensor]:
    return travelling(relay, mb.index), travelling(relay, mb.index + 100)


@on_devices
@pytest.mark.parametrize("name", [*FORMATS])
def test_honest_work_is_right(name: str, device: str) -> None:
    dtype, compression, tolerance = FORMATS[name]
    relay, auditor = (make(dtype, compression, device) for _ in range(2))
    seed, num_parts = bytes(SEED_BYTES), 3
    made = list[list[Any]]()
    for mb in MICROBATCHES:
        activation, gradient = inputs(relay, mb)
        sent_on = relay.passes.forward(mb, activation).clone()
        sent_back = relay.passes.backward(mb, gradient).clone()
        on, back, apart_P = auditor.passes.replay(mb, activation, gradient)
        for sent, again in ((sent_on, on), (sent_back, back)):
            assert error_between(read(relay, sent), again) <= tolerance
        made.append([sketch_of(part, seed) for part in cut(apart_P, num_parts)])
    for part, contributed in enumerate(relay.gather(num_parts)):
        whole = added([sketches[part] for sketches in made])
        assert error_of(sketch_of(contributed, seed), whole) < max(tolerance, 1e-6)


@pytest.mark.parametrize("compression", list(ActivationCompression))
def test_a_replay_reads_documents_apart_and_notices_others(
    compression: ActivationCompression,
) -> None:
    plain = make(ModelDtype.FLOAT32, compression)
    batch = replace(plain.config.run.batch, documents=Documents.APART)
    config = replace(plain.config, run=replace(plain.config.run, batch=batch))
    relay, auditor = StageExecutor(config), StageExecutor(config)
    mb = MICROBATCHES[0]
    for each in (relay, auditor):
        each.build(1)
    codec = ActivationCodec(config, relay._watch)
    places = torch.tensor([[0, 1, 0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 0, 0, 1]])
    activation = codec.sent(noise(relay, 0), "test", places)
    gradient = codec.sent(noise(relay, 1), "test")
    sent_on = relay.passes.forward(mb, activation).clone()
    sent_back = relay.passes.backward(mb, gradient).clone()
    on, back, _ = auditor.passes.replay(mb, activation, gradient)
    assert error_between(read(relay, sent_on), on) <= 1e-6
    assert error_between(read(relay, sent_back), back) <= 1e-6
    assert auditor.passes.same_documents(activation, sent_on)
    sent_on[-1] ^= 1
    assert not auditor.passes.same_documents(activation, sent_on)


def test_a_replay_leaves_the_auditors_own_work_alone() -> None:
    alone, auditor = (make(ModelDtype.FLOAT32, ActivationCompression.NONE) for _ in range(2))
    mine, other = MICROBATCHES[0], MICROBATCHES[1]
    for relay in (alone, auditor):
        activation, gradient = inputs(relay, mine)
        relay.passes.forward(mine, activation)
        if relay is auditor:
            relay.passes.replay(other, *inputs(relay, other))
        relay.passes.backward(mine, gradient)
        if relay is auditor:
            relay.passes.replay(other, *inputs(relay, other))
    (one,), (two,) = alone.gather(1), auditor.gather(1)
    assert torch.equal(one, two)
    hashes = [relay.propose(1, [], weights_total=1) for relay in (alone, auditor)]
    assert hashes[0] == hashes[1]
    before = auditor.passes.replay(other, *inputs(auditor, other))
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, alone.passes.replay(other, *inputs(alone, other)), strict=True)
    ), "a proposed step changes no weight until it is final"
