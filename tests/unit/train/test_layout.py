"""What members vote on follows from the hashes of the tensors alone, and from every bit of them."""

import pytest
import torch

from decod.train.checkpoint.description import describe_blob, described_hash, parameter_hash, placed
from decod.train.checkpoint.entries import MASTER_PREFIX, MOMENTUM_PREFIX, TensorEntry
from decod.train.layout import Layout, byte_view

LAYOUT = Layout({"b.weight": (3, 4), "a": (5,), "c": (2, 2), "z": (1,)})


def described(*sections: tuple[str, torch.Tensor]) -> tuple[list[TensorEntry], memoryview]:
    """Returns flat buffers as a state describes them, each with its prefix."""
    tensors = {
        prefix + name: tensor for prefix, flat in sections for name, tensor in LAYOUT.views(flat)
    }
    entries = placed(
        TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0, t.nbytes, "")
        for name, t in tensors.items()
    )
    blob = bytearray(entries[-1].offset + 64)
    for entry in entries:
        blob[entry.offset : entry.offset + entry.num_bytes] = byte_view(tensors[entry.name])
    found, _ = describe_blob(entries, memoryview(blob))
    return found, memoryview(blob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_description_tells_what_was_voted_on(dtype: torch.dtype) -> None:
    flat_P = torch.randn(LAYOUT.num_elements, dtype=dtype)
    entries, blob = described(("", flat_P))
    assert LAYOUT.hash(flat_P) == parameter_hash(entries, blob) == described_hash(entries)


def test_the_vote_is_on_master_weights_and_momentum() -> None:
    flat_P, momentum_P = torch.randn(2, LAYOUT.num_elements)
    rounded = ("", flat_P.bfloat16())
    entries, blob = described(rounded, (MASTER_PREFIX, flat_P), (MOMENTUM_PREFIX, momentum_P))
    assert parameter_hash(entries, blob) == described_hash(entries)
    without, _ = described(rounded, (MASTER_PREFIX, flat_P))
    assert described_hash(without) == LAYOUT.hash(flat_P) != described_hash(entries)


def test_every_element_and_the_names_count() -> None:
    flat_P = torch.randn(LAYOUT.num_elements)
    hashes = {LAYOUT.hash(flat_P)}
    for index in range(LAYOUT.num_elements):
        other_P = flat_P.clone()
        other_P[index] += 1
        hashes.add(LAYOUT.hash(other_P))
    hashes.add(Layout({"a": (LAYOUT.num_elements,)}).hash(flat_P))
    assert len(hashes) == LAYOUT.num_elements + 2


def test_a_description_that_lies_is_not_what_the_bytes_are() -> None:
    """Whoever has the bytes doesn't believe what is said of them."""
    entries, blob = described(("", torch.randn(LAYOUT.num_elements)))
    told = described_hash(entries)
    blob[0] ^= 1
    assert described_hash(entries) == told != parameter_hash(entries, blob)
