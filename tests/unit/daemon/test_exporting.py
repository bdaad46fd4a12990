"""Weights of other stages go into the file of an export only if they belong there."""

import math
import struct
from contextlib import closing
from pathlib import Path

import pytest

from decod.daemon.exporting import _ModelFile
from decod.errors import CheckpointError
from decod.model.writing import ModelWriter
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from decod.train.checkpoint.description import (
    Description,
    describe_blob,
    description_text,
    entry_json,
    parse_description,
    placed,
)
from decod.train.checkpoint.entries import TensorEntry, weight_tensors
from tests.support.checkpoints import MODEL, STAGES

RUN = RunConfig(name="test", model=MODEL, stages=STAGES, batch=BatchConfig(sequence_length=8))


def weights_of(stage: int) -> Description:
    """Return what a member says of weights that are all zero."""
    tensors = weight_tensors(RunConfig(model=MODEL, stages=STAGES), stage).items()
    entries = placed(
        TensorEntry(name, dtype, shape, 0, 4 * math.prod(shape), "")
        for name, (dtype, shape) in tensors
    )
    last = entries[-1]
    data = memoryview(bytes(last.offset + last.num_bytes))
    described, chunks = describe_blob(entries, data)
    text = description_text([entry_json(entry) for entry in described], "".join(chunks))
    return parse_description(text)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    description = weights_of(1)
    with closing(ModelWriter(tmp_path / "model", MODEL)) as writer:
        target = _ModelFile(writer, RUN).place(1, description)
        entry = description.entries[0]
        place = slice(entry.offset, entry.offset + 8)
        target[place] = struct.pack("<2f", 1.0, 2.0)
        with pytest.raises(CheckpointError, match=r"E-CKP-002 .*not finite"):
            target[place] = struct.pack("<2f", 1.0, value)
        assert target[place] == struct.pack("<2f", 1.0, 2.0)


def test_weights_of_another_stage_are_refused(tmp_path: Path) -> None:
    with closing(ModelWriter(tmp_path / "model", MODEL)) as writer:
        file = _ModelFile(writer, RUN)
        with pytest.raises(CheckpointError, match=r"E-CKP-002 .*missing"):
            file.place(0, weights_of(1))
