"""The methods whose convergence is compared, and their settings for one length of training.

A method's name says what it is:

    all-reduce       gradients are averaged in each iteration
    all-reduce/4     the same with a quarter of the iterations
    cocktailsgd      gradients are averaged in each iteration, compressed to a 230th
    h10              members step by themselves, and average after each 10 iterations (DiLoCo)
    h10-d3           an average travels, and counts 3 iterations later; members go on meanwhile
    h10-d10-back     ... and go back to the anchor when it begins to travel (DiLoCoX)
    h10-d3-int4      ... and averages travel as `int4`; or `-lowrank`: as `lowrank+int4`
    h10-muon         members step with Muon; so with all of the above
    h10-d5-late50    one member misses every other average, and what it has counts half in the next
    h10-churn        at each average a newcomer, with moments of zero, takes one member's place
    h10-resumed      the run stops three times; all members go on with moments of zero
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from decod.compression.plan import Method as Compression
from decod.config.schema import count_parameters, validate
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    BatchConfig,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    SyncConfig,
    SyncMethod,
)

NUM_REPLICAS = 4

RATES_FILE = Path(__file__).with_name("convergence_rates.json")
"""What `bench_convergence.py --search` has found, by scale and method: best rates, and trials."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of a method."""

    inner: float
    """Peak of the inner rate."""
    outer: float = 0.45
    """Of the outer optimizer."""
    momentum: float = 0.5
    """Of the outer optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a comparison is."""

    model: ModelConfig
    sequence_length: int
    microbatch_size: int = 4
    """Sequences that each replica reads in an iteration."""
    tokens_per_parameter: float = 10.0
    lr: float
    """Peak of the rate of all-reduce, where a search begins."""
    num_held_out: int = 256
    """Microbatches on which losses are compared."""

    @property
    def batch(self) -> BatchConfig:
        return BatchConfig(
            sequence_length=self.sequence_length,
            microbatch_size=self.microbatch_size,
            num_microbatches=1,
            num_data_nodes=NUM_REPLICAS,
        )

    @property
    def num_iterations(self) -> int:
        """Of a method, unless its name says that it has fewer."""
        num_tokens = self.tokens_per_parameter * count_parameters(self.model)
        return math.ceil(num_tokens / self.batch.tokens_per_iteration)


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
        model=_llama(width=320, inner=864, num_blocks=8, num_heads=5), sequence_length=128, lr=1e-3
    ),
    "1m": Scale(
        model=_llama(width=128, inner=344, num_blocks=5, num_heads=4), sequence_length=128, lr=2e-3
    ),
    "300k": Scale(
        model=_llama(width=96, inner=256, num_blocks=2, num_heads=2), sequence_length=64, lr=2e-3
    ),
    "small": Scale(
        model=_llama(width=48, inner=128, num_blocks=2, num_heads=2),
        sequence_length=32,
        microbatch_size=1,
        tokens_per_parameter=0.1,
        lr=2e-3,
        num_held_out=64,
    ),
}


@dataclass(frozen=True, slots=True)
class Method:
    """How members average."""

    name: str
    every: int = 1
    """Iterations from one average to the next. 1: of gradients."""
    delay: int = 0
    """Iterations after which an average counts."""
    goes_back: bool = False
    """Whether members go back to the anchor while an average travels."""
    compression: Compression = Compression.NONE
    optimizer: OptimizerName = OptimizerName.ADAMW
    share: float = 1.0
    """Of the iterations."""
    anew: str = ""
    """Whose moments become zero: `churn`: those of one member at each average, as of a newcomer.
    `resumed`: those of all after each quarter, as in a run that has stopped."""
    late: float | None = None
    """What comes too late for an average counts so much in the next. None: nothing is late."""

    @property
    def is_local(self) -> bool:
        """Whether members step by themselves."""
        return self.name.startswith("h")

    def run(self, scale: Scale, rates: Rates, seed: int = 0, length: float = 1.0) -> RunConfig:
        """Return the run of the method, or one of another length."""
        num_iterations = max(1, round(scale.num_iterations * self.share * length))
        sync = SyncConfig(compression=self.compression)
        if self.is_local:
            sync = SyncConfig(
                method=SyncMethod.DILOCO,
                every=self.every,
                overlap=self.delay > 0,
                compression=self.compression,
                rank=max(1, scale.model.hidden_size // 6),
                outer_lr=rates.outer,
                outer_momentum=rates.momentum,
            )
        run = RunConfig(
            name="bench-convergence",
            seed=seed,
            num_iterations=num_iterations,
            model=scale.model,
            stages=StagesConfig(
                num_relay_stages=1, num_first_blocks=scale.model.num_hidden_layers // 2
            ),
            batch=scale.batch,
            optimizer=OptimizerConfig(
                name=self.optimizer,
                lr=rates.inner,
                beta1=0.95 if self.optimizer is OptimizerName.MUON else 0.9,
                warmup_iterations=num_iterations // 20,
                schedule=Schedule.COSINE,
                decay_iterations=num_iterations,
                lr_min_ratio=0.1,
                # Nobody knows the norm of a compressed gradient.
                clip_norm=1.0 if self.is_local or not sync.compresses else 0.0,
            ),
            sync=sync,
        )
        validate(run)
        return run


_NAME = re.compile(
    r"h(\d+)(?:-d(\d+))?(-back)?(-muon)?(?:-(int4|lowrank))?(?:-late(\d+))?(?:-(churn|resumed))?\Z"
)
_COMPRESSIONS = {
    None: Compression.NONE,
    "int4": Compression.INT4,
    "lowrank": Compression.LOWRANK_INT4,
}


def method_of(name: str) -> Method:
    """Return the method of a name.

    Raises:
        ValueError: There is none.
    """
    if name == "cocktailsgd":
        return Method(name, compression=Compression.COCKTAIL)
    if (found := re.fullmatch(r"all-reduce(?:/(\d+))?", name)) is not None:
        return Method(name, share=1 / int(found[1] or 1))
    if (found := _NAME.match(name)) is None:
        raise ValueError(f"{name!r} is no method")
    every, delay = int(found[1]), int(found[2] or 0)
    if every < 2 or delay > every or (found[3] and not delay):
        raise ValueError(f"{name!r} is no method: an average counts before the next is made")
    optimizer = OptimizerName.MUON if found[4] else OptimizerName.ADAMW
    if found[6] and not delay:
        raise ValueError(f"{name!r} is no method: nobody is late for what all wait for")
    if found[7] and delay:
        raise ValueError(f"{name!r} is no method: newcomers and resumed runs begin with the anchor")
    return Method(
        name,
        every,
        delay,
        bool(found[3]),
        _COMPRESSIONS[found[5]],
        optimizer,
        anew=found[7] or "",
        late=int(found[6]) / 100 if found[6] else None,
    )


ROWS = (
    *("all-reduce", "all-reduce/2", "all-reduce/4", "all-reduce/8"),
    *("h10", "h30", "h60", "h10-int4", "h30-int4"),
    *(f"h{every}-d{delay}" for every in (10, 30) for delay in (1, 2, 5, 10)),
    *("h30-d30", "h10-d2-int4", "h30-d5-int4"),
    *("h10-d10-back", "h10-d10-back-lowrank", "cocktailsgd"),
    *("h30-muon", "h30-d5-muon", "h30-d5-muon-int4"),
)
"""The rows of the table."""

SEARCHED = (
    *("all-reduce", "cocktailsgd", "h10", "h30", "h60", "h10-d2", "h10-d10", "h30-d5", "h30-d30"),
    *("h10-d10-back", "h30-muon", "h30-d5-muon"),
)
"""The methods for which rates are searched. Others take those of the nearest of them."""


def known_rates(scale: str) -> dict[str, Rates]:
    """Return the rates that a search has found, by method."""
    found = json.loads(RATES_FILE.read_text("utf-8")) if RATES_FILE.exists() else {}
    return {name: Rates(*each["best"]) for name, each in found.get(scale, {}).items()}


def rates_of(method: Method, scale: str) -> Rates:
    """Return a method's rates: found by a search, for it or for the nearest method.

    A size that has not been searched takes the rates of the size that has.
    """
    known = known_rates(scale) or known_rates("300k")
    if method.name in known:
        return known[method.name]
    kind = [
        (_distance(method, other), name)
        for name in known
        if (other := method_of(name)).is_local == method.is_local
        and other.goes_back == method.goes_back
        and other.optimizer is method.optimizer
        and (method.is_local or other.compression is method.compression)
    ]
    return known[min(kind)[1]] if kind else Rates(SCALES[scale].lr)


def _distance(one: Method, other: Method) -> float:
    delays = abs(one.delay / one.every - other.delay / other.every)
    return abs(math.log(one.every / other.every)) + 2 * delays


def keep_rates(scale: str, method: str, best: Rates, trials: list[tuple[Rates, float]]) -> None:
    """Write what a search has found."""
    found = json.loads(RATES_FILE.read_text("utf-8")) if RATES_FILE.exists() else {}
    told = [[*dataclasses.astuple(rates), round(loss, 4)] for rates, loss in trials]
    found.setdefault(scale, {})[method] = {"best": dataclasses.astuple(best), "trials": told}
    lines = [
        f' "{size}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(each)}' for name, each in sorted(methods.items()))
        + "\n }"
        for size, methods in found.items()
    ]
    RATES_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


GRIDS = {
    "outer": (0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.4),
    "momentum": (0.0, 0.3, 0.5, 0.7, 0.9),
    "inner": (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2),
}
"""The rates that a search tries, of what matters most first."""


def neighbours(rates: Rates, method: Method) -> list[Rates]:
    """Return the rates that a search tries next to some, in this order."""
    found = []
    for name, grid in GRIDS.items():
        if name == "inner" or method.is_local:
            value = getattr(rates, name)
            place = min(range(len(grid)), key=lambda k: abs(grid[k] - value))
            beside = [grid[k] for k in (place - 1, place + 1) if 0 <= k < len(grid)]
            found += [replace(rates, **{name: each}) for each in beside]
    return found


def settings_of(run: RunConfig) -> dict[str, object]:
    """Return a run's settings as they are kept beside its results."""
    found: dict[str, object] = {"num_iterations": run.num_iterations, "seed": run.seed}
    for name in ("model", "stages", "batch", "optimizer", "sync"):
        values = dataclasses.asdict(getattr(run, name))
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return found
