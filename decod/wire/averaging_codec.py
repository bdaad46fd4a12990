"""Carriers of iterations, averages and votes: a part of `codec`'s table."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from decod.ids import AveragingId, Iteration, NodeId
from decod.planner.shares import SHARE_FULL
from decod.protocol.core import messages as m
from decod.protocol.core.average_spec import BITS, FRAGMENTS_MAX, RANK_MAX, AverageSpec
from decod.protocol.core.messages.audits import FINDINGS_MAX, AuditCase, AuditedWork, Finding
from decod.protocol.core.messages.averaging import StageAverages
from decod.protocol.core.proofs import PROOF_BYTES
from decod.protocol.core.sketch import ERROR_MAX, SEED_BYTES, SKETCH_BYTES
from decod.wire import fields as f
from decod.wire import validate
from decod.wire.v1 import control_pb2 as pb

_AUDITORS_MAX = 16


class _StageHash(NamedTuple):
    stage_index: int
    parameter_hash: str


class _StageShare(NamedTuple):
    stage_index: int
    num_microbatches: int
    digest: int


class _SlowMember(NamedTuple):
    node_id: NodeId
    share: int


class _MemberRate(NamedTuple):
    node_id: NodeId
    bytes_per_s: float


class _StageVersion(NamedTuple):
    stage_index: int
    version: int


class _StageSquares(NamedTuple):
    stage_index: int
    square_sum: float


class _AuditShare(NamedTuple):
    contributor: NodeId
    sketch: bytes


class _MemberHash(NamedTuple):
    node_id: NodeId
    parameter_hash: str


def _verify_squares(message: m.GradientSquares) -> None:
    validate.unique("square_sums", [stage_index for stage_index, _ in message.square_sums])


def _verify_ready(message: m.Ready) -> None:
    validate.unique("averages", [averages.stage_index for averages in message.averages])
    validate.unique("folded", [stage_index for stage_index, _, _ in message.folded])
    validate.unique("rates", [node_id for node_id, _ in message.rates])
    validate.unique("slow", [node_id for node_id, _ in message.slow])
    validate.unique("travelled", [stage_index for stage_index, _ in message.travelled])


def _verify_audit(message: m.Audit) -> None:
    validate.unique("cases", [case.relay for case in message.cases])


def _verify_audited_shares(message: m.AuditedShares) -> None:
    validate.unique("shares", [contributor for contributor, _ in message.shares])


def _verify_audit_result(message: m.AuditResult) -> None:
    validate.unique("findings", [(each.work, each.suspects) for each in message.findings])


ITERATION = f.Struct(Iteration, {"number": f.ITERATION, "attempt": f.COUNT, "era": f.COUNT})
AVERAGING = f.Struct(AveragingId, {"iteration": ITERATION, "view_version": f.ITERATION})
_HASH = f.Struct(_StageHash, {"stage_index": f.STAGE, "parameter_hash": f.SHA256})
_SHARE = f.Struct(
    _StageShare, {"stage_index": f.STAGE, "num_microbatches": f.COUNT, "digest": f.NUMBER}
)
_AVERAGES = f.Struct(
    StageAverages,
    {
        "stage_index": f.STAGE,
        "num_microbatches": f.COUNT,
        "effective_rank": f.Plain(validate.within(0.0, RANK_MAX)),
        "travel_s": f.DURATION,
        "num_late": f.COUNT,
    },
)
SPEC = f.Struct(
    AverageSpec,
    {
        "fragment": f.Plain(validate.integer(0, FRAGMENTS_MAX)),
        "rank": f.Plain(validate.integer(0, RANK_MAX)),
        "bits": f.Plain(validate.one_of(BITS)),
    },
)
_SQUARES = f.Struct(_StageSquares, {"stage_index": f.STAGE, "square_sum": f.MAGNITUDE})
STAGES_MAX = validate.STAGE_INDEX_MAX + 1
HASHES = f.Tuples(f.Repeated(_HASH, STAGES_MAX))
_MEMBER_HASH = f.Struct(_MemberHash, {"node_id": f.NODE_ID, "parameter_hash": f.SHA256})

SLOW = f.Tuples(
    f.Repeated(
        f.Struct(
            _SlowMember,
            {"node_id": f.NODE_ID, "share": f.Plain(validate.integer(0, SHARE_FULL - 1))},
        ),
        validate.MEMBERS_MAX,
    )
)

VERSIONS = f.Tuples(
    f.Repeated(
        f.Struct(_StageVersion, {"stage_index": f.STAGE, "version": f.ITERATION}), STAGES_MAX
    )
)

_AUDITORS = f.Scalars(validate.node_id, _AUDITORS_MAX, num_min=1, unique=True)


def _seed(field: str, value: bytes) -> bytes:
    if len(value) != SEED_BYTES:
        raise validate.malformed(field, f"{len(value)} bytes", allowed=f"{SEED_BYTES} bytes")
    return value


_CASE = f.Struct(
    AuditCase,
    {
        "relay": f.NODE_ID,
        "auditors": _AUDITORS,
        "opinion": f.COUNT,
        "seed": f.Plain(_seed),
        "closes": f.BOOLEAN,
    },
)
_ERROR = f.Plain(validate.within(0.0, ERROR_MAX))
_WORK = f.Choice(
    {
        AuditedWork.PASSES: pb.AUDITED_WORK_PASSES,
        AuditedWork.CONTRIBUTION: pb.AUDITED_WORK_CONTRIBUTION,
        AuditedWork.MEAN: pb.AUDITED_WORK_MEAN,
        AuditedWork.SILENCE: pb.AUDITED_WORK_SILENCE,
        AuditedWork.GIFT: pb.AUDITED_WORK_GIFT,
        AuditedWork.WORD: pb.AUDITED_WORK_WORD,
    },
)
_FINDING = f.Struct(
    Finding,
    {
        "work": _WORK,
        "error": _ERROR,
        "suspects": f.Scalars(validate.node_id, validate.MEMBERS_MAX, unique=True),
    },
)


def _none_or(num_bytes: int, field: str, value: bytes) -> bytes:
    if len(value) not in (0, num_bytes):
        allowed = f"none, or {num_bytes} bytes"
        raise validate.malformed(field, f"{len(value)} bytes", allowed=allowed)
    return value


_sketch = partial(_none_or, SKETCH_BYTES)
_SKETCH = f.Plain(_sketch)
PROOF = f.Plain(partial(_none_or, PROOF_BYTES))
_AUDIT_SHARE = f.Struct(_AuditShare, {"contributor": f.NODE_ID, "sketch": _SKETCH})

_RATE = f.Struct(_MemberRate, {"node_id": f.NODE_ID, "bytes_per_s": f.Plain(validate.bandwidth)})

BODIES: Mapping[str, f.Struct] = {
    "begin_aggregation": f.Struct(
        m.BeginAggregation,
        {
            "seal": f.SEAL,
            "averaging": AVERAGING,
            "num_committed": f.COUNT,
            "digest": f.NUMBER,
            "loss_sum": f.FINITE,
            "num_tokens": f.NUMBER,
            "num_deferred": f.COUNT,
            "num_reread": f.COUNT,
        },
    ),
    "reduce_part": f.Struct(
        m.ReducePart,
        {
            "averaging": AVERAGING,
            "part": f.INDEX,
            "num_microbatches": f.COUNT,
            "digest": f.NUMBER,
            "overlapped": f.BOOLEAN,
            "phase": f.INDEX,
        },
    ),
    "reduced_part": f.Struct(
        m.ReducedPart,
        {
            "averaging": AVERAGING,
            "part": f.INDEX,
            "square_sum": f.MAGNITUDE,
            "overlapped": f.BOOLEAN,
            "num_microbatches": f.COUNT,
            "phase": f.INDEX,
            "missing": f.Scalars(validate.index, validate.DATA_NODE_INDEX_MAX + 1, unique=True),
        },
    ),
    "gradient_squares": f.Struct(
        m.GradientSquares,
        {
            "averaging": AVERAGING,
            "square_sums": f.Tuples(f.Repeated(_SQUARES, STAGES_MAX, num_min=1)),
        },
        _verify_squares,
    ),
    "gradient_norm": f.Struct(
        m.GradientNorm,
        {"seal": f.SEAL, "averaging": AVERAGING, "gradient_norm": f.MAGNITUDE},
    ),
    "ready": f.Struct(
        m.Ready,
        {
            "averaging": AVERAGING,
            "hashes": HASHES,
            "failure": f.REASON,
            "votes": f.Tuples(f.Repeated(_MEMBER_HASH, validate.MEMBERS_MAX)),
            "averages": f.Repeated(_AVERAGES, STAGES_MAX),
            "folded": f.Tuples(f.Repeated(_SHARE, STAGES_MAX)),
            "slow": SLOW,
            "rates": f.Tuples(f.Repeated(_RATE, validate.MEMBERS_MAX)),
            "travelled": VERSIONS,
        },
        _verify_ready,
    ),
    "audit": f.Struct(
        m.Audit,
        {
            "seal": f.SEAL,
            "averaging": AVERAGING,
            "cases": f.Repeated(_CASE, validate.MEMBERS_MAX, num_min=1),
        },
        _verify_audit,
    ),
    "stand_out": f.Struct(
        m.StandOut,
        {
            "averaging": AVERAGING,
            "nodes": f.Scalars(validate.node_id, validate.MEMBERS_MAX, num_min=1, unique=True),
        },
    ),
    "audited_tensor": f.Struct(
        m.AuditedTensor,
        {
            "averaging": AVERAGING,
            "relay": f.NODE_ID,
            "opinion": f.COUNT,
            "microbatch": f.MICROBATCH,
            "is_gradient": f.BOOLEAN,
            "proof": PROOF,
        },
    ),
    "audited_part": f.Struct(
        m.AuditedPart,
        {
            "averaging": AVERAGING,
            "relay": f.NODE_ID,
            "opinion": f.COUNT,
            "part": f.INDEX,
            "num_microbatches": f.COUNT,
            "digest": f.NUMBER,
            "sketch": _SKETCH,
        },
    ),
    "audited_shares": f.Struct(
        m.AuditedShares,
        {
            "averaging": AVERAGING,
            "relay": f.NODE_ID,
            "opinion": f.COUNT,
            "shares": f.Tuples(f.Repeated(_AUDIT_SHARE, validate.MEMBERS_MAX)),
        },
        _verify_audited_shares,
    ),
    "audited_pass": f.Struct(
        m.AuditedPass,
        {
            "averaging": AVERAGING,
            "relay": f.NODE_ID,
            "opinion": f.COUNT,
            "microbatch": f.MICROBATCH,
            "findings": f.Repeated(_FINDING, 3),
            "doubted": f.BOOLEAN,
            "sketches": f.Scalars(_sketch, validate.MEMBERS_MAX),
            "failure": f.REASON,
        },
    ),
    "audit_result": f.Struct(
        m.AuditResult,
        {
            "averaging": AVERAGING,
            "relay": f.NODE_ID,
            "opinion": f.COUNT,
            "num_microbatches": f.COUNT,
            "failure": f.REASON,
            "findings": f.Repeated(_FINDING, FINDINGS_MAX),
        },
        _verify_audit_result,
    ),
    "differs": f.Struct(
        m.Differs,
        {
            "base": f.ITERATION,
            "nodes": f.Scalars(validate.node_id, validate.MEMBERS_MAX, num_min=1, unique=True),
        },
    ),
}
