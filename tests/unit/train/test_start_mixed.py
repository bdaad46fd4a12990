"""The weights of a lost stage from those of its neighbours."""

import torch

from decod.train.layout import Layout
from decod.train.start import mixed_weights


def layout(*blocks: int) -> Layout:
    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        shapes |= {f"model.layers.{block}.a.weight": (2, 2), f"model.layers.{block}.b": (2,)}
    return Layout(shapes)


def weights(of: Layout) -> torch.Tensor:
    """Every parameter of block k holds k."""
    flat_P = torch.zeros(of.num_elements, dtype=torch.float64)
    for name, tensor in of.views(flat_P):
        tensor.fill_(float(name.split(".")[2]))
    return flat_P


def blocks_of(of: Layout, flat_P: torch.Tensor) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for name, tensor in of.views(flat_P):
        found.setdefault(int(name.split(".")[2]), set()).update(tensor.reshape(-1).tolist())
    return found


def test_each_block_is_the_mean_of_those_at_its_place() -> None:
    before, own, behind = layout(2, 3), layout(4, 5), layout(6, 7)
    donors = [(before, weights(before)), (behind, weights(behind))]
    mixed = mixed_weights(own, donors)
    assert mixed.dtype == torch.float64
    assert blocks_of(own, mixed) == {4: {4.0}, 5: {5.0}}


def test_one_neighbour_is_copied() -> None:
    own, behind = layout(0, 1), layout(2, 3)
    assert blocks_of(own, mixed_weights(own, [(behind, weights(behind))])) == {0: {2.0}, 1: {3.0}}


def test_stages_of_other_depths_give_their_nearest_blocks() -> None:
    own, deep, flat = layout(9, 10, 11), layout(0, 1, 2, 3, 4, 5), layout(20)
    assert blocks_of(own, mixed_weights(own, [(deep, weights(deep))])) == {
        9: {1.0},
        10: {3.0},
        11: {5.0},
    }
    assert blocks_of(own, mixed_weights(own, [(flat, weights(flat))]))[10] == {20.0}


def test_blocks_with_numbers_of_two_digits_keep_their_order() -> None:
    own, behind = layout(8, 9), layout(10, 11)
    assert blocks_of(own, mixed_weights(own, [(behind, weights(behind))])) == {8: {10.0}, 9: {11.0}}
