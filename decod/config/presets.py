"""Known ways to keep the members of a stage together, as settings of `[sync]`.

`decod run init --preset` writes one into a run file, key by key. Nothing else knows presets.
"""

from typing import Final

from decod.compression.plan import Method
from decod.run.training_config import SyncConfig, SyncMethod

PRESETS: Final = {
    "all-reduce": SyncConfig(),
    # Source: DiLoCo (arXiv:2311.08105), section 3. Nesterov's rates of 0.7 and 0.9 are defaults.
    "diloco": SyncConfig(method=SyncMethod.DILOCO, every=500),
    # Source: OpenDiLoCo (arXiv:2407.07852).
    "opendiloco": SyncConfig(method=SyncMethod.DILOCO, every=500, compression=Method.FP16),
    # Source: DiLoCoX (arXiv:2506.21263), section 4.1.3. Its rank, 2,048, is for 107 B parameters.
    # The paper doesn't name the outer optimizer's rates. These are stable with overlap.
    "dilocox": SyncConfig(
        method=SyncMethod.DILOCO,
        every=125,
        overlap=True,
        compression=Method.LOWRANK_INT4,
        outer_lr=0.4,
        outer_momentum=0.5,
    ),
    # Source: CocktailSGD (ICML 2023), with DiLoCoX's ratios for 1.3 B parameters.
    "cocktailsgd": SyncConfig(compression=Method.COCKTAIL, random_ratio=0.1, top_ratio=0.08),
}
"""By name."""
