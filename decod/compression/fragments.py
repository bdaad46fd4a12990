"""How the averages of one stage travel, by fragment, rank and bits. Imports no torch.

Fragments are averaged in turn, so that the link carries an even load.

Source: Streaming DiLoCo (arXiv:2501.18512), section 3.1. Deviation: a fragment is a run of whole
parameters of the flat buffer, where the paper takes whole blocks of layers.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from decod.compression.coding import CompressionError
from decod.compression.plan import CompressionConfig, Plan, Shape, make_plan


@dataclass(frozen=True, slots=True)
class Fragment:
    """Parameters that are averaged together."""

    index: int
    """From 1. 0: all parameters."""
    here: slice
    """Their elements in the flat buffer."""
    shapes: tuple[Shape, ...]
    """In the order of the flat buffer."""

    @property
    def num_elements(self) -> int:
        """All its elements."""
        return sum(map(math.prod, self.shapes))


class StagePlans:
    """What averages of one stage are of, and how they travel.

    Args:
        shapes: Of its parameters, in the order of the flat buffer.
        num_fragments: At least 1.
        config: The method with its start values. None: averages travel whole.
        wide: Dtype of what isn't rounded: `float32`, or `float64` for models in float64.

    Raises:
        CompressionError: There are more fragments than parameters.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        num_fragments: int = 1,
        config: CompressionConfig | None = None,
        *,
        wide: str = "float32",
    ) -> None:
        self._config, self._wide = config, wide
        shapes = tuple(shapes)
        if not 1 <= num_fragments <= len(shapes):
            raise CompressionError(
                f"fragments are {num_fragments}, but the stage has {len(shapes)} parameters"
            )
        ends = list(itertools.accumulate(map(math.prod, shapes)))
        whole = Fragment(0, slice(0, ends[-1]), shapes)
        cuts = _cuts(ends, num_fragments)
        starts = [0, *ends]
        self.fragments = (
            whole,
            *(
                Fragment(index, slice(starts[first], starts[last]), shapes[first:last])
                for index, (first, last) in enumerate(itertools.pairwise(cuts), 1)
            ),
        )
        """All parameters, and then each fragment. With one fragment, that holds all too."""
        self.plan = lru_cache(maxsize=256)(self._plan)

    @property
    def num_phases(self) -> int:
        """Phases of an average of all parameters. One if no matrix is large enough for factors."""
        plan = self.plan(0, 0, 0)
        return 1 if plan is None else len(plan.phases)

    def _plan(self, fragment: int, rank: int, bits: int) -> Plan | None:
        """Return how an average travels. None: whole.

        Args:
            fragment: From 1. 0: all parameters.
            rank: 0: that of the start.
            bits: 0: those of the method.
        """
        if self._config is None:
            return None
        config = replace(self._config, rank=rank or self._config.rank, bits=bits)
        return make_plan(self.fragments[fragment].shapes, config, wide=self._wide)


def _cuts(ends: Sequence[int], num_fragments: int) -> list[int]:
    """Return the parameters at which fragments begin, and the number of all parameters.

    Fragments are as even as whole parameters allow. Each holds at least one.
    """
    cuts = [0]
    for index in range(1, num_fragments):
        target = ends[-1] * index / num_fragments
        possible = range(cuts[-1] + 1, len(ends) - num_fragments + index + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut - 1] - target)))
    return [*cuts, len(ends)]
