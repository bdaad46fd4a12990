"""Batch and optimization settings that all members must share."""

import math
from dataclasses import dataclass
from enum import StrEnum

from decod.compression.plan import (
    BlockCoding,
    Coding,
    CompressionConfig,
    CompressionError,
    FloatCoding,
    Method,
    RotatedCoding,
)
from decod.errors import ConfigError


class Documents(StrEnum):
    """How the documents of a sequence are read."""

    AUTO = "auto"
    """Apart if the corpus tells where they begin, as conversations do. The leader decides that, so
    no running run has it: until then they are together."""
    APART = "apart"
    """No position sees another document, and positions begin anew with each."""
    TOGETHER = "together"
    """As if they were one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Shape of one iteration's batch."""

    sequence_length: int = 256
    """Tokens that a sequence is trained on; one more is read for the last target. At least 2."""
    microbatch_size: int = 4
    """Sequences in a microbatch. Raise it when devices sit idle, lower it when memory runs out."""
    num_microbatches: int = 8
    """Microbatches that each data node injects in an iteration."""
    num_data_nodes: int = 1
    """How many data nodes the run can have; each has an ordinal below this number, and with it
    its own share of every batch."""
    documents: Documents = Documents.AUTO
    """What a token sees of its sequence's documents: `apart` its own alone, `together` all that is
    before it. `auto`: apart if the corpus tells where documents begin."""

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "num_microbatches", "num_data_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"batch.{name} is {getattr(self, name)}",
                    why="a batch holds at least one of each",
                    fix="give a number of at least 1",
                )
        if self.sequence_length < 2:
            raise ConfigError(
                f"batch.sequence_length is {self.sequence_length}",
                why="a sequence must hold at least two tokens to predict anything",
                fix="give at least 2, usually 256 or more",
            )

    def require_devices(self, num_devices: int) -> None:
        """Check that so many devices can divide a microbatch.

        Raises:
            ConfigError: There are more devices than sequences (E-CFG-021).
        """
        num_rows = self.microbatch_size
        if num_devices > num_rows:
            raise ConfigError(
                f"{num_devices} devices for microbatches of {num_rows} sequences",
                why="a device computes at least one sequence of every microbatch",
                fix=f"name {num_rows} devices at most and run another node on the others, or ask "
                "the organiser for a larger batch.microbatch_size",
                code="E-CFG-021",
            )

    @property
    def reads_apart(self) -> bool:
        """Whether no position sees another document than its own."""
        return self.documents is Documents.APART

    @property
    def tokens_per_microbatch(self) -> int:
        return self.sequence_length * self.microbatch_size

    @property
    def microbatches_per_iteration(self) -> int:
        """Of a whole batch, from all data nodes that the run can have."""
        return self.num_microbatches * self.num_data_nodes

    @property
    def tokens_per_iteration(self) -> int:
        """Of a whole batch."""
        return self.tokens_per_microbatch * self.microbatches_per_iteration


SYNC_EVERY_MAX = 100_000


class WireDtype(StrEnum):
    """Format of gradients between the members of a stage. Sums are always in float32 or wider."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Schedule(StrEnum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    """Half a period of a cosine. Source: SGDR (arXiv:1608.03983), without restarts."""


class OptimizerName(StrEnum):
    """How a member steps from a gradient. `decod.train.optimizers` has the steps."""

    ADAMW = "adamw"
    """Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2."""
    SGD = "sgd"
    """With momentum, and decay as that of AdamW. Source: the same, algorithm 1."""
    MUON = "muon"
    """Steps of hidden matrices are made orthogonal; AdamW takes the others. Source: Jordan and
    others, kellerjordan.github.io/posts/muon; inside members MuLoCo (arXiv:2505.23725)."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What it keeps of each parameter from step to step, by torch's names.

        The first resembles a mean of gradients. Each is as wide as the sum of gradients. Muon keeps
        the second only of what is no hidden matrix.
        """
        return _MOMENTS[self]


_MOMENTS = {
    OptimizerName.MUON: ("momentum_buffer", "exp_avg_sq"),
    OptimizerName.ADAMW: ("exp_avg", "exp_avg_sq"),
    OptimizerName.SGD: ("momentum_buffer",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of a run's nodes, with a warm-up and a schedule."""

    name: OptimizerName = OptimizerName.ADAMW
    """`adamw`, or `sgd` with momentum, which needs less memory and traffic to join. `muon` needs
    less memory than `adamw`, and in MuLoCo (arXiv:2505.23725) it learns more from seldom averages:
    only for sync.method = "diloco". All decay weights apart from the gradient."""
    lr: float = 1e-3
    """Peak learning rate. Lower it when the loss jumps."""
    beta1: float = 0.9
    """Decay of the gradient's mean, or for `sgd` and `muon` the momentum. In [0, 1)."""
    beta2: float = 0.95
    """Decay of the gradient's square, for `adamw` and `muon`. In [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator, for `adamw` and `muon`. Positive."""
    weight_decay: float = 0.1
    """Applied to matrices only: norms and biases are not decayed. At least 0."""
    warmup_iterations: int = 0
    """Iterations over which the rate rises linearly from lr / (warmup + 1) to lr."""
    schedule: Schedule = Schedule.CONSTANT
    """The rate after the warm-up: `constant`, or falling as `linear` or `cosine`."""
    decay_iterations: int = 0
    """Iterations, those of the warm-up included, after which the rate has fallen to lr_min_ratio
    times lr. There it stays. Usually num_iterations. 0 with `constant`."""
    lr_min_ratio: float = 0.0
    """Share of lr to which `linear` and `cosine` fall, from 0 to 1. 0.1 is usual."""
    clip_norm: float = 0.0
    """Longest gradient, by the norm over all stages together: a longer one is scaled down to it, as
    torch's `clip_grad_norm_` does. 0: none is. 1.0 is usual. Lower it when the loss jumps."""

    def __post_init__(self) -> None:
        bad = [
            name
            for name, holds in (
                ("lr", math.isfinite(self.lr) and self.lr > 0),
                ("beta1", 0 <= self.beta1 < 1),
                ("beta2", 0 <= self.beta2 < 1),
                ("eps", math.isfinite(self.eps) and self.eps > 0),
                ("weight_decay", math.isfinite(self.weight_decay) and self.weight_decay >= 0),
                ("warmup_iterations", self.warmup_iterations >= 0),
                ("lr_min_ratio", 0 <= self.lr_min_ratio <= 1),
                ("clip_norm", math.isfinite(self.clip_norm) and self.clip_norm >= 0),
            )
            if not holds
        ]
        if bad:
            raise ConfigError(
                f"optimizer.{bad[0]} is {getattr(self, bad[0])}",
                why="no optimizer is defined there",
                fix="see the comments that `decod run init` writes for the range",
            )
        self._check_decay()

    def _check_decay(self) -> None:
        decays = self.schedule is not Schedule.CONSTANT
        if decays and self.decay_iterations <= self.warmup_iterations:
            raise ConfigError(
                f"optimizer.decay_iterations is {self.decay_iterations}",
                why=f"with schedule {self.schedule} the rate falls from the end of the warm-up, "
                f"iteration {self.warmup_iterations}, to there",
                fix="set it to the number of iterations that you want to train, or choose "
                'optimizer.schedule = "constant"',
            )
        if not decays and self.decay_iterations:
            raise ConfigError(
                f"optimizer.decay_iterations is {self.decay_iterations}",
                why="with schedule constant the rate does not fall",
                fix='set it to 0, or choose optimizer.schedule = "cosine"',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionConfig:
    """Settings for the sum of gradients over a stage's members."""

    wire_dtype: WireDtype = WireDtype.FLOAT32
    """What travels. `bfloat16` halves the traffic and rounds each contribution once. Models in
    float64 always travel as float64."""


class ActivationCompression(StrEnum):
    """Format of activations and their gradients on their way between stages."""

    NONE = "none"
    """As the model computes them."""
    BF16 = "bf16"
    INT8 = "int8"
    """Whole numbers, with a scale for each token, or for each 256 elements of it."""
    INT4 = "int4"
    """How far tokens are from their sequence's mean, with a scale for each 128 elements or fewer,
    which are rotated before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig:
    """How activations and their gradients travel between stages."""

    compression: ActivationCompression = ActivationCompression.NONE
    """`none`: as the model computes them, which is exact. `bf16` rounds each element to 8 bits of
    precision. `int8` sends whole numbers with a scale for each token, or for each 256 elements of
    it: 3.9 times less traffic than float32. `int4` sends 7.7 times less, and rounds gradients at
    random, so that they are right on average. What is rounded off is lost, so watch the loss."""

    def coding(self, row_size: int, num_rows: int) -> Coding | None:
        """Return the format for tokens of so many elements. None: as they are computed.

        A block never holds elements of two tokens. A token with large elements would otherwise
        coarsen its neighbour.

        Args:
            row_size: Elements of a token.
            num_rows: Tokens of a sequence.
        """
        match self.compression:
            case ActivationCompression.NONE:
                return None
            case ActivationCompression.BF16:
                return FloatCoding("bfloat16")
            case ActivationCompression.INT8:
                return BlockCoding.of_rows(8, row_size)
            case ActivationCompression.INT4:
                return RotatedCoding(row_size, num_rows)


class SyncMethod(StrEnum):
    """What the members of a stage average."""

    GRADIENTS = "gradients"
    """The gradients of each iteration. All members step from the average: this is exact."""
    DILOCO = "diloco"
    """How far each member has come by steps of its own. Source: DiLoCo (arXiv:2311.08105)."""


class Adapt(StrEnum):
    """What follows from measurements while members train."""

    OFF = "off"
    RANK = "rank"
    """Rank and number of iterations follow the effective rank of the averages."""
    LINKS = "links"
    """As `rank`; and format and number of iterations follow the links: averages just arrive in
    time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersConfig:
    """How the servers of a stage step."""

    delay: int = 0
    """Iterations by which a step is late, 0 or 1. With 0, training is exactly that of one host.
    With 1, servers step, and clients fetch the parameters, while the next batch is computed: nobody
    waits for that, but each gradient is of parameters that lack the last step (delayed parameter
    updates)."""

    def __post_init__(self) -> None:
        if self.delay not in (0, 1):
            raise ConfigError(
                f"servers.delay is {self.delay}",
                why="a step is taken at once, or one iteration later",
                fix="give 0 or 1",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How the members of a stage keep together."""

    method: SyncMethod = SyncMethod.GRADIENTS
    """`gradients`: average the gradients of each iteration, and step as one host would. `diloco`:
    each member steps by itself, and members average how far they have come. That takes much less
    traffic, for links between homes."""
    every: int = 1
    """Iterations from one average to the next. 1 for `gradients`. For `diloco` 20 to 500: more
    saves traffic, fewer learn more from each token. With `adapt`, this is where it starts, and the
    most."""
    fragments: int = 1
    """Parts of each stage's parameters that are averaged in turn, each once in `every` iterations.
    More spread the traffic evenly over time, and averages are smaller. At most `every`."""
    overlap: bool = False
    """Whether an average travels while members train on. It then counts when all have it: nobody
    waits. The later it comes, the less is learnt from each token."""
    quorum: float = 1.0
    """Share of a stage's members whose contributions to an average are enough, in (0, 1]. 1.0: all
    are waited for. With less, contributions have half of the next local phase. Later ones count
    half in the next average. Needs `overlap`."""
    reread: bool = False
    """Whether microbatches are trained on again if a relay is lost that had learnt from them since
    the last average. If not, new ones teach all stages as much; so set it only where every token
    must count."""
    compression: Method = Method.NONE
    """How averages travel: `none`, `fp16`, `bf16`, `int8`, `int4`, `lowrank`, `lowrank+int4` or
    `cocktail`. What a format leaves out is added to the next average."""
    rank: int = 64
    """Of the factors of matrices, for `lowrank` and `lowrank+int4`. Lower it to save traffic. With
    `adapt`, this is where it starts, and the most."""
    adapt: Adapt = Adapt.OFF
    """What follows from measurements. `off`: nothing. `rank`: rank and `every` follow the effective
    rank of the averages, which falls as training goes on (DiLoCoX). `links`: averages travel in 4
    bits, and rank and `every` also follow the links. Members average as often as they can while an
    average takes a fifth of `every` at most. Needs `overlap`."""
    random_ratio: float = 0.1
    """For `cocktail`: share of a matrix's elements that are drawn. In (0, 1]."""
    top_ratio: float = 0.08
    """For `cocktail`: share of the drawn elements that travel, the largest. In (0, 1]."""
    outer_lr: float = 0.7
    """Rate of the outer optimizer, SGD with Nesterov momentum. Start with 0.4 if averages overlap.
    Lower it when the loss rises behind each average."""
    outer_momentum: float = 0.9
    """Share of the last outer step that is taken again, in [0, 1). Start with 0.5 if averages
    overlap."""

    def __post_init__(self) -> None:
        gradients = self.method is SyncMethod.GRADIENTS
        for name, holds, why in (
            ("every", 1 <= self.every <= SYNC_EVERY_MAX, f"it is from 1 to {SYNC_EVERY_MAX}"),
            ("every", self.every == 1 or not gradients, "gradients are averaged in each iteration"),
            ("overlap", not (self.overlap and gradients), "gradients are averaged at once"),
            ("fragments", 1 <= self.fragments <= self.every, "it is from 1 to sync.every"),
            ("quorum", 0 < self.quorum <= 1, "it is a share of members: above 0, at most 1"),
            ("quorum", self.quorum == 1 or self.overlap, "below 1 needs sync.overlap = true"),
            ("adapt", not (self.adapts and gradients), "each iteration's gradients are averaged"),
            (
                "adapt",
                self.adapt is not Adapt.RANK or self.compression.has_factors,
                "only low-rank compression has a rank",
            ),
            (
                "adapt",
                self.adapt is not Adapt.LINKS or self.overlap,
                "it fits averages into the time for which they travel: set sync.overlap = true",
            ),
            (
                "adapt",
                self.adapt is not Adapt.LINKS or self.compression.adapts,
                f"averages can't be made smaller with sync.compression = {self.compression}",
            ),
            (
                "reread",
                not (self.reread and gradients),
                "nothing is lost if gradients are averaged",
            ),
            ("outer_lr", math.isfinite(self.outer_lr) and self.outer_lr > 0, "it is above 0"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "it is from 0, and below 1"),
        ):
            if not holds:
                raise ConfigError(
                    f"sync.{name} is {getattr(self, name)}",
                    why=why,
                    fix="see the comments that `decod run init` writes for the range",
                )

        try:
            self._codec()
        except CompressionError as error:
            raise ConfigError(
                f"sync.{error}",
                why="averages can't be compressed so",
                fix="see the comments that `decod run init` writes for the range",
            ) from error

    def _codec(self) -> CompressionConfig:
        return CompressionConfig(
            method=self.compression,
            rank=self.rank,
            random_ratio=self.random_ratio,
            top_ratio=self.top_ratio,
        )

    @property
    def compression_config(self) -> CompressionConfig | None:
        """How averages are compressed. None: they are not."""
        return self._codec() if self.compresses else None

    @property
    def compresses(self) -> bool:
        """Whether averages travel in a format that loses something."""
        return self.compression is not Method.NONE

    @property
    def adapts(self) -> bool:
        """Whether anything follows from measurements."""
        return self.adapt is not Adapt.OFF

    @property
    def steps_locally(self) -> bool:
        """Whether members step by themselves."""
        return self.method is SyncMethod.DILOCO

    @property
    def num_phases(self) -> int:
        """Of an average: factors of matrices travel one after the other."""
        return 2 if self.compression.has_factors else 1
