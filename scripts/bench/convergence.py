"""The methods whose convergence is compared, and their settings for one length of training.

The paper (DiLoCoX, arXiv:2506.21263) gives all methods the same compression ratio. So does this:
CocktailSGD's settings are the paper's, and define the ratio. The others' intervals and ranks follow
from it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace

from decod.compression.plan import Method
from decod.config.schema import plans_of, validate
from decod.run.model_config import ModelConfig, StagesConfig
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig, OptimizerConfig, Schedule, SyncConfig, SyncMethod

NUM_REPLICAS = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of a method: what was best in short trials on the model `300k`.

    Attributes:
        inner: Peak of the inner rate, in multiples of all-reduce's.
        outer: Of the outer optimizer.
        momentum: Of the outer optimizer.
    """

    inner: float
    outer: float
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a comparison is.

    Attributes:
        model: What is trained.
        sequence_length: Of the one sequence that each replica reads in an iteration.
        num_iterations: Of each method.
        lr: Peak of the rate, for methods that average each iteration.
        every: DiLoCoX's iterations between averages.
        every_opendiloco: OpenDiLoCo's.
        overlapping: Rates for members that train on meanwhile.
        eager: Rates for members that guess what travels.
        waiting: Rates for DiLoCoX's members that wait for averages.
        seldom: OpenDiLoCo's rates.
        num_held_out: Sequences on which losses are compared.
        report_every: Iterations between two measured losses.
    """

    model: ModelConfig
    sequence_length: int
    num_iterations: int = 1500
    lr: float
    every: int
    every_opendiloco: int
    overlapping: Rates = Rates(2, 0.3, 0.5)
    eager: Rates = Rates(1, 0.7, 0.5)
    waiting: Rates = Rates(1, 1.0, 0.3)
    seldom: Rates = Rates(1, 0.7, 0.9)
    num_held_out: int = 512
    report_every: int = 150


def _llama(*, width: int, inner: int, num_blocks: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
    )


SCALES = {
    "10m": Scale(
        model=_llama(width=320, inner=864, num_blocks=8, num_heads=5),
        sequence_length=128,
        lr=5e-4,
        every=10,
        every_opendiloco=150,
    ),
    "3m": Scale(
        model=_llama(width=192, inner=512, num_blocks=7, num_heads=4),
        sequence_length=128,
        lr=7e-4,
        every=10,
        every_opendiloco=150,
    ),
    "300k": Scale(
        model=_llama(width=96, inner=256, num_blocks=2, num_heads=2),
        sequence_length=64,
        lr=1e-3,
        every=10,
        every_opendiloco=150,
    ),
    "small": Scale(
        model=_llama(width=48, inner=128, num_blocks=2, num_heads=2),
        sequence_length=32,
        num_iterations=60,
        lr=2e-3,
        every=3,
        every_opendiloco=20,
        num_held_out=64,
        report_every=30,
    ),
}


def all_reduce(scale: Scale) -> RunConfig:
    """Return the run that averages each iteration's gradients."""
    run = RunConfig(
        name="bench-convergence",
        num_iterations=scale.num_iterations,
        model=scale.model,
        stages=StagesConfig(
            num_relay_stages=1, num_first_blocks=scale.model.num_hidden_layers // 2
        ),
        batch=BatchConfig(
            sequence_length=scale.sequence_length,
            microbatch_size=1,
            num_microbatches=1,
            num_data_nodes=NUM_REPLICAS,
        ),
        optimizer=OptimizerConfig(
            lr=scale.lr,
            warmup_iterations=scale.num_iterations // 15,
            schedule=Schedule.COSINE,
            decay_iterations=scale.num_iterations,
            lr_min_ratio=0.1,
        ),
    )
    return _checked(run)


def cocktail_sgd(scale: Scale) -> RunConfig:
    """Return the run that averages each iteration's gradients, compressed."""
    return _checked(replace(all_reduce(scale), sync=SyncConfig(compression=Method.COCKTAIL)))


def dilocox(scale: Scale) -> RunConfig:
    """Return the run of the whole method, with the rank that gives CocktailSGD's ratio."""
    least = compression_ratio(cocktail_sgd(scale))
    sync = SyncConfig(
        method=SyncMethod.DILOCO,
        every=scale.every,
        overlap=True,
        compression=Method.LOWRANK_INT4,
        rank=1,
    )
    found = _local(scale, scale.overlapping, sync)
    for rank in range(2, scale.model.hidden_size):
        run = _local(scale, scale.overlapping, replace(sync, rank=rank))
        if compression_ratio(run) < least:
            break
        found = run
    return found


def eager(scale: Scale) -> RunConfig:
    """Return DiLoCoX's run, but members guess what travels. The paper has no such rule."""
    return _local(scale, scale.eager, replace(dilocox(scale).sync, eager=True))


def without_overlap(scale: Scale) -> RunConfig:
    """Return DiLoCoX's run, but members wait for averages."""
    return _local(scale, scale.waiting, replace(dilocox(scale).sync, overlap=False))


def without_compression(scale: Scale) -> RunConfig:
    """Return DiLoCoX's run, but averages travel in float32."""
    sync = replace(dilocox(scale).sync, compression=Method.NONE)
    return _local(scale, scale.overlapping, sync)


def opendiloco(scale: Scale) -> RunConfig:
    """Return the run with long intervals, in float16, whose members wait for averages."""
    sync = SyncConfig(
        method=SyncMethod.DILOCO, every=scale.every_opendiloco, compression=Method.FP16
    )
    return _local(scale, scale.seldom, sync)


METHODS: dict[str, Callable[[Scale], RunConfig]] = {
    "all-reduce": all_reduce,
    "dilocox": dilocox,
    "dilocox-without-overlap": without_overlap,
    "dilocox-without-compression": without_compression,
    "opendiloco": opendiloco,
    "cocktailsgd": cocktail_sgd,
    "dilocox-eager": eager,
}
"""Most important first."""

PAPER_LOSSES = {
    "all-reduce": (4.06, 3.90),
    "dilocox": (4.27, 4.20),
    "dilocox-without-overlap": (None, 4.15),
    "dilocox-without-compression": (None, 4.02),
    "opendiloco": (5.37, None),
    "cocktailsgd": (5.79, 5.23),
    "dilocox-eager": (None, None),
}
"""After 4,000 iterations: of OPT-1.3B, and of Qwen1.5-107B."""


def _local(scale: Scale, rates: Rates, sync: SyncConfig) -> RunConfig:
    """Return a run whose members step by themselves."""
    run = all_reduce(scale)
    optimizer = replace(run.optimizer, lr=rates.inner * scale.lr)
    sync = replace(sync, outer_lr=rates.outer, outer_momentum=rates.momentum)
    return _checked(replace(run, optimizer=optimizer, sync=sync))


def _checked(run: RunConfig) -> RunConfig:
    validate(run)
    return run


def compression_ratio(run: RunConfig) -> float:
    """Return how many times fewer bytes than all-reduce a contribution takes an iteration."""
    stages = plans_of(run).values()
    plans = [plan for stage in stages if (plan := stage.plan(0, 0, 0)) is not None]
    if not plans:
        return float(run.sync.every)
    num_elements = sum(plan.num_elements for plan in plans)
    return run.sync.every * 4 * num_elements / sum(plan.num_bytes for plan in plans)


def settings_of(run: RunConfig) -> dict[str, object]:
    """Return a run's settings as they are kept beside its results."""
    found: dict[str, object] = {"num_iterations": run.num_iterations, "seed": run.seed}
    for name in ("model", "stages", "batch", "optimizer", "sync"):
        values = dataclasses.asdict(getattr(run, name))
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return found
