"""Weights for a lost stage, mixed from those of the neighbouring stages.

Source: CheckFree (arXiv:2506.15461), section 4. Deviation: both neighbours have the same weight.
The paper weighs them by the norms of their last gradients. The first and the last relay stage have
one neighbour among the relays, and get its weights.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from decod.train.layout import Layout

_BLOCK = re.compile(r"\.(\d+)\.")
"""The number of a block in the names of its parameters."""


def mixed_weights(layout: Layout, donors: Sequence[tuple[Layout, Tensor]]) -> Tensor:
    """Return the mean of other stages' weights, block by block, (P,) in the donors' dtype.

    Args:
        layout: Layout of the new stage, which contains only blocks. If a donor has another number
            of blocks, each block comes from the donor's block at the nearest place.
        donors: Layouts and weights, (their P,), float32 or float64 on CPU. Not changed. At least 1.
    """
    mixed_P = torch.zeros(layout.num_elements, dtype=donors[0][1].dtype)
    own = _blocks(layout)
    for donor, weights_P in donors:
        theirs, views = _blocks(donor), dict(donor.views(weights_P))
        for name, target in layout.views(mixed_P):
            place = own.index(_block_of(name))
            nearest = theirs[(2 * place + 1) * len(theirs) // (2 * len(own))]
            target.add_(views[_BLOCK.sub(f".{nearest}.", name, count=1)])
    return mixed_P / len(donors)


def _blocks(layout: Layout) -> list[int]:
    return sorted({_block_of(name) for name in layout.shapes})


def _block_of(name: str) -> int:
    found = _BLOCK.search(name)
    assert found is not None, name
    return int(found[1])
