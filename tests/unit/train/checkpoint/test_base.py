"""Weights that a run does not train: parts, their hashes, and what a host keeps of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decod.errors import CheckpointError, DataError
from decod.model.hf_folder import read_weights
from decod.model.shape import frozen_shapes
from decod.run.model_config import ModelDtype
from decod.train.checkpoint.base import BaseSource, base_hashes, parts_of, split_hashes
from decod.train.checkpoint.description import (
    described_hash,
    description_text,
    entry_json,
    parse_description,
    placed,
)
from decod.train.checkpoint.entries import TensorEntry
from decod.train.checkpoint.places import DiskRoom
from decod.train.start import frozen_weights
from tests.unit.train.test_executor_adapter import folder_of, run_of
from tests.unit.train.test_executor_equals_reference import MODELS

MODEL = MODELS["llama"]
RUN = run_of(MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "model", MODEL)


@pytest.fixture
def source(folder: Path, tmp_path: Path) -> BaseSource:
    return BaseSource(base_hashes(folder, MODEL), tmp_path / "state", folder)


def carry(part: int, source: BaseSource, target: BaseSource) -> None:
    """Bring a part from a host with a folder to one without."""
    given = source.find(MODEL, part)
    assert given is not None
    arriving = target.arriving(MODEL, part)
    arriving.expect(given.description)
    buffer = arriving.allocate(given.description.num_bytes)
    for chunk in given.description.chunks:
        buffer[chunk.offset : chunk.offset + chunk.num_bytes] = given.read(chunk.offset)
    arriving.close()
    arriving.keep()


def test_a_stage_holds_its_blocks_and_stage_0_all_else() -> None:
    assert [parts_of(RUN, stage) for stage in range(3)] == [[0], [1, 2], [3]]


def test_every_part_has_a_hash_of_its_own_which_depends_on_the_dtype(folder: Path) -> None:
    hashes = base_hashes(folder, MODEL)
    assert len({*hashes}) == MODEL.num_hidden_layers + 1
    assert split_hashes("".join(hashes)) == hashes
    narrow = base_hashes(folder, replace(MODEL, dtype=ModelDtype.BFLOAT16))
    assert {*narrow}.isdisjoint(hashes)


def test_what_was_fetched_is_what_the_folder_holds(source: BaseSource) -> None:
    here = replace(source, folder=None)
    assert here.find(MODEL, 1) is None
    for stage in range(3):
        for part in parts_of(RUN, stage):
            carry(part, source, here)
        found = dict(frozen_weights(RUN, stage, here))
        assert source.folder is not None
        expected = dict(read_weights(source.folder, MODEL, frozen_shapes(RUN, stage)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_other_weights_are_refused(source: BaseSource, tmp_path: Path) -> None:
    path = tmp_path / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    part = next(k for k in range(4) if base_hashes(path.parent, MODEL)[k] != source.hashes[k])
    with pytest.raises(DataError, match="are not those that the run adapts"):
        source.find(MODEL, part)


@pytest.mark.parametrize("damage", ["altered", "cut", "lost", "undescribed"])
def test_what_is_damaged_on_the_disk_is_fetched_again(source: BaseSource, damage: str) -> None:
    here = replace(source, folder=None)
    carry(3, source, here)
    place = here.cache / "base" / here.hashes[3]
    content = bytearray((place / "blob").read_bytes())
    content[0] ^= 1
    if damage == "altered":
        (place / "blob").write_bytes(content)
    elif damage == "cut":
        (place / "blob").write_bytes(content[:100])
    elif damage == "lost":
        (place / "blob").unlink()
    else:
        (place / "state.json").write_text('{"tens')
    assert here.find(MODEL, 3) is None
    with pytest.raises(CheckpointError, match="is not on this host"):
        dict(frozen_weights(RUN, 2, here))
    carry(3, source, here)
    assert here.find(MODEL, 3) is not None


def test_a_description_with_more_than_the_part_is_refused(source: BaseSource) -> None:
    """The hash of a state leaves out the tensors of an optimizer."""
    given = source.find(MODEL, 1)
    assert given is not None
    junk = TensorEntry("optimizer.junk", "float64", (1,), 0, 8, "0" * 64)
    entries = placed([*given.description.entries, junk])
    chunks = "".join(chunk.sha256 for chunk in given.description.chunks) + "0" * 64
    text = description_text([entry_json(entry) for entry in entries], chunks)
    description = parse_description(text)
    assert described_hash(description.entries) == source.hashes[1]
    with pytest.raises(CheckpointError, match="junk is unknown"):
        replace(source, folder=None).arriving(MODEL, 1).expect(description)


def test_a_weight_that_is_too_large_for_the_models_dtype_is_refused(tmp_path: Path) -> None:
    wide = folder_of(tmp_path / "wide", MODEL)
    weights = load_file(wide / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = 1e300
    save_file(weights, wide / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="too large for float32"):
        base_hashes(wide, replace(MODEL, dtype=ModelDtype.FLOAT32))


def test_what_arrived_before_an_interruption_is_there_after_it(source: BaseSource) -> None:
    here = replace(source, folder=None)
    given = source.find(MODEL, 1)
    assert given is not None
    chunks = given.description.chunks
    arriving = here.arriving(MODEL, 1)
    arriving.expect(given.description)
    first = chunks[0]
    place = slice(first.offset, first.offset + first.num_bytes)
    arriving.allocate(given.description.num_bytes)[place] = given.read(first.offset)
    arriving.close()
    assert here.find(MODEL, 1) is None, "it is not complete"
    again = here.arriving(MODEL, 1)
    again.expect(given.description)
    again.allocate(given.description.num_bytes)
    assert again.local(first) == given.read(first.offset)
    assert again.local(chunks[-1]) != given.read(chunks[-1].offset)
    again.close()


def test_a_part_for_which_there_is_no_room_is_refused(source: BaseSource) -> None:
    here = replace(source, folder=None, room=DiskRoom(source.cache, 100))
    given = source.find(MODEL, 1)
    assert given is not None
    arriving = here.arriving(MODEL, 1)
    arriving.expect(given.description)
    with pytest.raises(CheckpointError, match="can't be kept"):
        arriving.allocate(given.description.num_bytes)
