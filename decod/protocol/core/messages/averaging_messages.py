"""One stage's reduction, and the vote on it."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from decod.ids import AveragingId, NodeId, SomeNodeIds
from decod.limits import (
    DATA_NODE_INDEX_MAX,
    MEMBERS_MAX,
    STAGES_MAX,
    AtLeast,
    AtMost,
    Bandwidth,
    Count,
    Duration,
    Each,
    Finite,
    Index,
    Magnitude,
    Number,
    Ordinal,
    ReasonText,
    SealBytes,
    Sha256,
    StageIndex,
    Unique,
    within,
)
from decod.protocol.core.average_spec import RANK_MAX, SlowShares, StageVersions
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages.scopes import OfAveraging, OfRun, WithTensor


@dataclass(frozen=True, slots=True)
class BeginAggregation(OfAveraging):
    """BEGIN AGGREGATION: goes down the tree; the batch is what the digest says."""

    averaging: AveragingId
    num_committed: Count
    """Microbatches in the batch."""
    digest: Number
    """Order-free digest of their ids."""
    loss_sum: Finite = 0.0
    """Of all reports, like what follows: whoever has to finish the iteration can tell of it."""
    num_tokens: Number = 0
    """Trained on in the batch."""
    num_deferred: Count = 0
    """Microbatches put off to the next iteration."""
    num_reread: Count = 0
    """Of the microbatches in the batch: they had been trained on before."""
    seal: SealBytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class ReducePart(OfAveraging, WithTensor):
    """With a tensor (none if `num_microbatches` is 0): one part of the sender's gradient sum."""

    averaging: AveragingId
    part: Index
    """From 0. The receiver reduces it."""
    num_microbatches: Count
    """In the sum."""
    digest: Number
    """Order-free digest of their ids."""
    overlapped: bool = False
    """The average travels while members train on (`averaging.overlap`)."""
    phase: Index = 0
    """Of the average: a compressed one may have two."""


@dataclass(frozen=True, slots=True)
class ReducedPart(OfAveraging, WithTensor):
    """With a tensor: the average of one part over the roster."""

    averaging: AveragingId
    part: Index
    """Of the average. The sender has reduced it."""
    square_sum: Magnitude = 0.0
    """Of the part's elements; 0 where no gradient is clipped."""
    overlapped: bool = False
    """As in `ReducePart`. Then there may be no tensor: nobody can have this average."""
    num_microbatches: Count = 0
    """In the mean, if nobody knows beforehand what contributions add up to."""
    phase: Index = 0
    """As in `ReducePart`."""
    missing: Annotated[tuple[Index, ...], AtMost(DATA_NODE_INDEX_MAX + 1), Unique()] = ()
    """Positions in the roster whose contributions the mean lacks: they came too late, or were
    refused."""


class StageSquares(NamedTuple):
    """How long the gradient of one stage is."""

    stage_index: StageIndex
    square_sum: Magnitude
    """Sum of the squares of the stage's mean gradient."""


@dataclass(frozen=True, slots=True)
class GradientSquares(OfAveraging):
    """From the first of a stage, up the tree: how long its stage's mean gradient is, squared, and
    those of the stages below it."""

    averaging: AveragingId
    square_sums: Annotated[
        tuple[tuple[int, float], ...],
        Each(StageSquares),
        AtLeast(1),
        AtMost(STAGES_MAX),
        Unique("stage_index"),
    ]
    """(stage index, sum of the mean gradient's squares), in order."""


@dataclass(frozen=True, slots=True)
class GradientNorm(OfAveraging):
    """Down the tree: the norm of the mean gradient over all stages. Now the step can be taken."""

    averaging: AveragingId
    gradient_norm: Magnitude
    """Of the mean gradient over all stages."""
    seal: SealBytes = field(default=b"", compare=False)
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class StageAverages:
    """The averages from which a stage steps, if its members step by themselves."""

    stage_index: StageIndex
    num_microbatches: Count
    """In the averages."""
    effective_rank: Annotated[float, within(0.0, RANK_MAX)] = 0.0
    """Directions that the newest average has, as a mean over its matrices. 0: not known."""
    travel_s: Duration = 0.0
    """How long the newest average took at the slowest member."""
    num_late: Count = 0
    """Microbatches of members in the subtree that came too late for the averages. They count in the
    next."""


class MemberHash(NamedTuple):
    """What one member of a stage proposes."""

    node_id: NodeId
    parameter_hash: Sha256
    """SHA-256 of its proposed parameters."""


class StageShare(NamedTuple):
    """Microbatches of an iteration that members of a stage have trained on."""

    stage_index: StageIndex
    num_microbatches: Count
    digest: Number
    """Order-free digest of their ids."""


class MemberRate(NamedTuple):
    """How fast a member sends."""

    node_id: NodeId
    bytes_per_s: Bandwidth


@dataclass(frozen=True, slots=True)
class Ready(OfAveraging):
    """Goes up the tree: the sender's subtree has its next parameters, or why it has not."""

    averaging: AveragingId
    hashes: Hashes
    """(stage index, SHA-256 of the proposed parameters), one for each stage in the subtree."""
    failure: ReasonText = ""
    """Empty if all is well. A stage whose members differ in hash is a failure too."""
    votes: Annotated[tuple[tuple[NodeId, str], ...], Each(MemberHash), AtMost(MEMBERS_MAX)] = ()
    """Each member's hash, if those of the sender's stage in its subtree differ: the first of the
    stage finds out who is right."""
    averages: Annotated[tuple[StageAverages, ...], AtMost(STAGES_MAX), Unique("stage_index")] = ()
    """Of the stages in the subtree, if members step by themselves."""
    folded: Annotated[
        tuple[tuple[int, int, int], ...],
        Each(StageShare),
        AtMost(STAGES_MAX),
        Unique("stage_index"),
    ] = ()
    """(stage index, number, digest) of the microbatches of the iteration that the subtree's members
    have trained on, if members step by themselves. No average shows whether one is missing (I2)."""
    slow: SlowShares = ()
    """Members of the subtree that send slowly: each one's share of an average's parts, in relation
    to `SHARE_FULL`."""
    rates: Annotated[
        tuple[tuple[NodeId, float], ...], Each(MemberRate), AtMost(MEMBERS_MAX), Unique("node_id")
    ] = ()
    """How fast members of the sender's stage send, in bytes a second, as far as it is known. The
    first of the stage finds out who is slow."""
    travelled: StageVersions = ()
    """(stage index, version) of the travelling average that is at all of a stage's members in the
    subtree. Version 0: some lack it. Only in iterations that end without an average."""


@dataclass(frozen=True, slots=True)
class Differs(OfRun):
    """From the first of a stage: these members came to other parameters than most of it.

    They started from the same state, or thought so: they fetch it anew from the others.
    """

    base: Ordinal
    """Number of the iteration whose state that is."""
    nodes: SomeNodeIds
    """Who they are."""
