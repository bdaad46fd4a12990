"""State that is handed to a newcomer: whole, or refused."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decod.errors import CheckpointError
from decod.ids import MicrobatchId
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from decod.train.checkpoint.description import CHUNK_SIZE_BYTES, entry_json, placed
from decod.train.checkpoint.entries import TensorEntry, parse_entries
from decod.train.committed_state import SnapshotLayout
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import byte_view
from tests.support.devices import on_devices

torch.set_num_threads(1)


def make_relay(
    dtype: ModelDtype = ModelDtype.FLOAT32, seed: int = 3, device: str = "cpu"
) -> StageExecutor:
    config = ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(
                dtype=dtype,
                vocab_size=19,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
            ),
            stages=StagesConfig(num_relay_stages=1),
            batch=BatchConfig(sequence_length=8, microbatch_size=2),
            optimizer=OptimizerConfig(lr=1e-2),
            seed=seed,
        ),
        device=device,
    )
    relay = StageExecutor(config)
    relay.build(1)
    return relay


def train(relay: StageExecutor, iteration: int) -> str:
    generator = torch.Generator().manual_seed(iteration)
    mb = MicrobatchId(iteration, 0, 0)
    relay.passes.forward(mb, torch.randn(2, 8, 16, generator=generator).to(relay.config.dtype))
    relay.passes.backward(mb, torch.randn(2, 8, 16, generator=generator).to(relay.config.dtype))
    digest = relay.propose(iteration, [], weights_total=1)
    relay.commit(iteration)
    return digest


def take(
    relay: StageExecutor, with_optimizer: bool = True
) -> tuple[torch.Tensor, list[TensorEntry]]:
    snapshot = relay.snapshot(with_optimizer=with_optimizer)
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    entries, _ = snapshot.write(blob)
    return blob, entries


def hand_over(donor: StageExecutor, newcomer: StageExecutor, iteration: int) -> str:
    blob, entries = take(donor)
    return newcomer.load([(byte_view(blob), entries)], iteration)


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_a_newcomer_goes_on_bit_for_bit(dtype: ModelDtype, device: str) -> None:
    donor, newcomer = make_relay(dtype, device=device), make_relay(dtype, seed=4, device=device)
    digest = train(donor, 1)
    blob, entries = take(donor)
    assert parse_entries([entry_json(entry) for entry in entries]) == entries
    assert newcomer.load([(byte_view(blob), entries)], 1) == digest
    assert newcomer.anchor == 1
    assert train(newcomer, 2) == train(donor, 2)


@on_devices
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_a_copy_in_a_file_equals_one_in_memory(
    dtype: ModelDtype, with_optimizer: bool, device: str, tmp_path: Path
) -> None:
    relay = make_relay(dtype, device=device)
    train(relay, 1)
    snapshot, path = relay.snapshot(with_optimizer=with_optimizer), tmp_path / "copy"
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    path.touch()
    assert snapshot.write_file(path) == snapshot.write(blob)
    content = path.read_bytes()
    assert content.ljust(snapshot.num_bytes, b"\0") == bytes(byte_view(blob))


def test_tensors_of_several_chunks_are_written_whole(tmp_path: Path) -> None:
    values_N = torch.randn(CHUNK_SIZE_BYTES + 3, generator=torch.Generator().manual_seed(1))
    places = placed(
        TensorEntry(name, kind, (len(values_N),), 0, len(values_N) * size, "")
        for name, kind, size in [("rounded", "bfloat16", 2), ("wide", "float32", 4)]
    )
    snapshot = SnapshotLayout(places, (values_N, values_N), places[1].offset + 4 * len(values_N))
    path, blob = tmp_path / "copy", torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    path.touch()
    entries, chunks = snapshot.write_file(path)
    assert (entries, chunks) == snapshot.write(blob)
    assert len(chunks) == 3 + 5
    assert path.read_bytes() == bytes(byte_view(blob))


def test_a_disk_that_refuses_a_copy_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"can't be written to .*missing"):
        make_relay().snapshot(with_optimizer=True).write_file(tmp_path / "missing")


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_a_state_is_the_same_on_every_device(dtype: ModelDtype, device: str) -> None:
    """A stage's members need not have the same kind of device, and neither need who comes later."""
    here, there = make_relay(dtype), make_relay(dtype, seed=4, device=device)
    digest = train(here, 1)
    assert hand_over(here, there, 1) == digest
    assert torch.equal(take(there)[0], take(here)[0])
    digest = train(there, 2)
    assert hand_over(there, here, 2) == digest
    assert torch.equal(take(there)[0], take(here)[0])


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_weights_alone_can_be_loaded(dtype: ModelDtype, device: str) -> None:
    donor, newcomer = make_relay(dtype, device=device), make_relay(dtype, seed=4, device=device)
    train(donor, 1)
    blob, entries = take(donor, with_optimizer=False)
    newcomer.load([(byte_view(blob), entries)], 1)
    for name, weight in donor.weights().items():
        assert torch.equal(newcomer.weights()[name], weight.to(donor.config.dtype).to(weight.dtype))


def alter_byte(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    blob[-70] ^= 1


def drop_entry(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    del entries[1]


def rename(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    entries[0] = replace(entries[0], name="lm_head.weight")


def reshape(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    entries[0] = replace(entries[0], shape=(4, 4))


def change_dtype(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    entries[0] = replace(entries[0], dtype="int32")


def move_outside(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    entries[0] = replace(entries[0], offset=blob.numel())


def shorten(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    blob.resize_(blob.numel() // 2)


def spoil_value(blob: torch.Tensor, entries: list[TensorEntry]) -> None:
    """A donor that diverged describes its NaN correctly."""
    import hashlib

    entry = entries[0]
    blob[entry.offset : entry.offset + 4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)
    data = blob[entry.offset : entry.offset + entry.num_bytes].numpy().tobytes()
    entries[0] = replace(entry, sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "damage",
    [
        alter_byte,
        drop_entry,
        rename,
        reshape,
        change_dtype,
        move_outside,
        shorten,
        spoil_value,
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: Any) -> None:
    donor, newcomer = make_relay(seed=8), make_relay()
    blob, entries = take(donor)
    before = take(newcomer)
    damage(blob, entries)
    with pytest.raises(CheckpointError, match="E-CKP-002"):
        newcomer.load([(byte_view(blob), entries)], 1)
    after = take(newcomer)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert newcomer.anchor == 0


def test_at_most_three_problems_are_named() -> None:
    relay = make_relay()
    blob, _ = take(relay)
    with pytest.raises(CheckpointError, match=r"is missing.*is missing.*is missing and 6 more"):
        relay.load([(byte_view(blob), [])], 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3),
        ("dtype", None),
        ("shape", "16"),
        ("shape", [True]),
        ("offset", -1),
        ("num_bytes", 1.5),
        ("sha256", "zz"),
        ("extra", 1),
    ],
)
def test_a_malformed_description_is_refused(field: str, value: Any) -> None:
    entry = asdict(take(make_relay())[1][0])
    entry["shape"] = list(entry["shape"])
    assert parse_entries([entry])
    with pytest.raises(CheckpointError):
        parse_entries([entry | {field: value}])
    with pytest.raises(CheckpointError):
        parse_entries([entry, entry])
    with pytest.raises(CheckpointError):
        parse_entries({"tensors": entry})
