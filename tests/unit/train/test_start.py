"""States that are read piece by piece: the same bits as if they were read at once, or refused."""

import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.files import PieceFile
from decod.run.training_config import OptimizerName
from decod.train.checkpoint import description
from decod.train.checkpoint.entries import (
    BytesInFile,
    StateBytes,
    TensorEntry,
    moment_prefixes,
)
from decod.train.committed_state import take_snapshot
from decod.train.layout import Layout, SharedState, byte_view
from decod.train.start import StateForm, blob_pieces, loaded_state
from tests.support.devices import on_devices

MOMENTS = moment_prefixes(OptimizerName.ADAMW)
LAYOUT = Layout({"a.weight": (7, 9), "b": (3,), "c.weight": (20, 5)})
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several chunks, the last of which is shorter."""
    monkeypatch.setattr(description, "CHUNK_SIZE_BYTES", 64)


def state_of(dtype: torch.dtype) -> SharedState:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(1)
    flats = [torch.randn(LAYOUT.num_elements, generator=generator, dtype=wide) for _ in range(3)]
    return SharedState(flats[0], dict(zip(MOMENTS, flats[1:], strict=True)))


def blob_of(
    state: SharedState, dtype: torch.dtype, *, with_optimizer: bool = True
) -> tuple[Tensor, list[TensorEntry]]:
    snapshot = take_snapshot(state, LAYOUT, dtype, with_optimizer=with_optimizer)
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    entries, _ = snapshot.write(blob)
    return blob, entries


def load(
    data: StateBytes, entries: list[TensorEntry], dtype: torch.dtype, device: str = "cpu"
) -> SharedState:
    form = StateForm(LAYOUT, dtype, MOMENTS, device)
    return loaded_state(entries, blob_pieces(data), form)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_state_is_loaded_bit_for_bit(
    dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    state = state_of(dtype)
    blob, entries = blob_of(state, dtype)
    path = tmp_path / "state"
    path.write_bytes(byte_view(blob))
    with closing(PieceFile(os.open(path, os.O_RDONLY))) as file:
        in_file = load(BytesInFile(file, len(blob)), entries[::-1], dtype, device)
    for found in (load(byte_view(blob), entries, dtype, device), in_file):
        assert torch.equal(found.weights.cpu(), state.weights)
        assert found.weights.device.type == torch.device(device).type
        assert list(found.moments) == list(MOMENTS)
        for prefix in MOMENTS:
            assert torch.equal(found.moments[prefix].cpu(), state.moments[prefix])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_alone_become_the_weights_and_the_moments_are_zero(dtype: torch.dtype) -> None:
    state = state_of(dtype)
    blob, entries = blob_of(state, dtype, with_optimizer=False)
    found = load(byte_view(blob), entries, dtype)
    assert torch.equal(found.weights, state.weights.to(dtype).to(state.weights.dtype))
    assert not any(moment.any() for moment in found.moments.values())


def spoil_master(state: SharedState) -> None:
    state.weights[-1] = torch.nan


def spoil_moment(state: SharedState) -> None:
    state.moments[MOMENTS[1]][5] = torch.inf


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(spoil_master, "weights not finite"), (spoil_moment, "exp_avg_sq. not finite")],
)
def test_what_is_not_finite_is_refused(spoil: Callable[[SharedState], None], problem: str) -> None:
    state = state_of(torch.bfloat16)
    spoil(state)
    blob, entries = blob_of(state, torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"E-CKP-002 .*{problem}"):
        load(byte_view(blob), entries, torch.bfloat16)


def test_parameters_that_are_not_the_rounded_masters_are_refused() -> None:
    """The last element of the last tensor, behind several chunks that are right."""
    state, dtype = state_of(torch.bfloat16), torch.bfloat16
    blob, entries = blob_of(state, dtype)
    place = next(k for k, entry in enumerate(entries) if entry.name == "c.weight")
    entry = entries[place]
    end = entry.offset + entry.num_bytes
    blob[end - 2] ^= 1
    content = byte_view(blob)[entry.offset : end]
    entries[place] = replace(entry, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(CheckpointError, match="not the rounded master weights"):
        load(byte_view(blob), entries, dtype)


def test_every_tensor_is_verified() -> None:
    state, dtype = state_of(torch.bfloat16), torch.bfloat16
    blob, entries = blob_of(state, dtype)
    for entry in entries:
        altered = blob.clone()
        altered[entry.offset + entry.num_bytes - 1] ^= 1
        with pytest.raises(CheckpointError, match=f"state refused: {entry.name} was altered: "):
            load(byte_view(altered), entries, dtype)


@pytest.mark.parametrize("size", [1, 64, 100])
def test_a_tensor_that_ends_too_early_is_refused(size: int) -> None:
    state = state_of(torch.float32)
    blob, entries = blob_of(state, torch.float32)
    with pytest.raises(CheckpointError, match=r"has not the .* bytes that"):
        load(byte_view(blob)[:size], entries, torch.float32)


def test_a_disk_that_fails_meanwhile_is_named(tmp_path: Path) -> None:
    blob, entries = blob_of(state_of(torch.float32), torch.float32)
    path = tmp_path / "state"
    path.write_bytes(byte_view(blob))
    file = PieceFile(os.open(path, os.O_RDONLY))
    file.close()
    with pytest.raises(CheckpointError, match="can't be read from this host's disk"):
        load(BytesInFile(file, len(blob)), entries, torch.float32)
