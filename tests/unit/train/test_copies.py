"""Copies to and from a device, numbers from it, and its tensors on the host piece by piece."""

import pytest
import torch

from decod.ids import MicrobatchId
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from decod.train import copies
from decod.train.copies import Departure, arrived, arriving, number, on_host
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import Layout
from tests.support.devices import ACCELERATOR, on_devices, refused_waits


@on_devices
def test_what_arrives_is_what_was_sent(device: str) -> None:
    source = torch.arange(1000.0)
    with arriving(source, device):
        here = source.to(device, non_blocking=True)
        doubled = here * 2
    assert torch.equal(arrived(doubled).cpu(), 2 * source)


@on_devices
def test_a_departure_brings_the_value_of_its_instant(device: str) -> None:
    value, target = torch.ones(1000, device=device), torch.zeros(1000)
    departure = Departure(target, value * 3)
    departure.wait_for_value()
    departure.wait()
    assert torch.equal(target, torch.full((1000,), 3.0))


@on_devices
@pytest.mark.parametrize("value", [2.5, 0.0, float("inf"), True])
def test_a_number_is_read(device: str, value: float) -> None:
    assert number(torch.tensor(value, device=device)) == value
    assert number(torch.tensor([value], device=device)) == value


@on_devices
@pytest.mark.parametrize("size", [1, 16, 17, 100])
def test_pieces_are_the_whole_in_order(
    device: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_STAGED_BYTES", 64)
    flat = torch.arange(float(size))
    pieces = [piece.clone() for piece in on_host(flat.to(device))]
    assert torch.equal(torch.cat(pieces), flat)
    layout = Layout({"weight": (size,)})
    assert layout.hash(flat.to(device)) == layout.hash(flat)


@pytest.mark.gpu
def test_passes_never_wait_for_the_whole_device() -> None:
    """Torch raises at every call that does. Waits for an event, which end sooner, are allowed."""
    config = ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(dtype=ModelDtype.BFLOAT16, hidden_size=64, intermediate_size=128),
            stages=StagesConfig(num_relay_stages=1),
            batch=BatchConfig(sequence_length=32, microbatch_size=2),
            optimizer=OptimizerConfig(lr=1e-3),
            seed=1,
        ),
        device=ACCELERATOR,
    )
    relay = StageExecutor(config)
    relay.build(1)
    entry, gradient, result = (
        torch.randn(config.activation_shape).to(config.dtype).pin_memory() for _ in range(3)
    )

    def both_passes(index: int) -> None:
        mb = MicrobatchId(1, 0, index)
        Departure(result, relay.passes.forward(mb, entry)).wait()
        departure = Departure(result, relay.passes.backward(mb, gradient))
        departure.wait()

    both_passes(0)  # Libraries are loaded, and tables are made.
    with refused_waits():
        both_passes(1)
    assert torch.isfinite(result).all()
