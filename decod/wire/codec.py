"""Encoding of the core's messages as envelopes, and decoding. The only user of control.proto.

One table says which protobuf message stands for which dataclass and how each field is checked.
`view_codec` contains its part about members, `routing_codec` and `gwtf_codec` those about the
search for better flows. Fields have the same names on both sides. A test compares the table with
the dataclasses and the descriptors, so that no field can be forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.protocol.core import messages as m
from decod.protocol.core.detours import BYWAYS_MAX
from decod.protocol.core.era import (
    HOLDERS_MAX,
    KEPT_MAX,
    MARKS_MAX,
    Kept,
    Mark,
    Origin,
    Source,
    StateHolders,
)
from decod.protocol.core.identity import DEVICE_LENGTH_MAX
from decod.protocol.core.messages import election as em
from decod.protocol.core.messages.forwarding import Passed, Way
from decod.protocol.core.messages.replay import DONORS_MAX, Average, Follow, Followed
from decod.protocol.core.spent_time import ITERATION_MAX_S, IterationTimes
from decod.protocol.core.view import Opening
from decod.protocol.links.failure_detector import SLACK_MAX
from decod.protocol.links.liveness import AWAITED_MAX
from decod.wire import (
    averaging_codec,
    gwtf_codec,
    rounds_codec,
    routing_codec,
    servers_codec,
    validate,
    view_codec,
)
from decod.wire import fields as f
from decod.wire.v1 import control_pb2 as pb

P = TypeVar("P", bound=Proto)


class _Byway(NamedTuple):
    node_id: NodeId
    bandwidth_bytes_per_s: float


def _verify_open(message: m.Open) -> None:
    view_codec.verify_told(message.opening.view, message.change)
    if message.change is not None and message.opening.electors:
        raise validate.malformed("electors", "given", allowed="none beside a change of the view")


def _verify_mend(message: m.Mend) -> None:
    view_codec.verify_told(message.view, message.change)
    if message.change is not None and message.change.electors is not None:
        raise validate.malformed("electors", "given", allowed="none: only an opening tells them")


def _verify_mark(mark: Mark) -> None:
    validate.unique("hashes", [stage_index for stage_index, _ in mark.hashes])


def _verify_origin(origin: Origin) -> None:
    validate.unique("holders", [each.stage_index for each in origin.holders])


def _verify_opening(opening: Opening) -> None:
    validate.unique("slow", [node_id for node_id, _ in opening.slow])
    validate.unique("travelled", [stage_index for stage_index, _ in opening.travelled])
    iterations = [mark.iteration for mark in opening.marks]
    if iterations != sorted(set(iterations)):
        raise validate.malformed("marks", iterations, allowed="in order, each iteration once")


def _verify_report(report: m.LinkReport) -> None:
    validate.unique("byways", [node_id for node_id, _ in report.byways])


def _verify_average(average: Average) -> None:
    if average.part >= max(average.num_parts, 1):
        raise validate.malformed("part", average.part, allowed="less than num_parts")


_OUTCOME = f.Choice(
    {
        m.Outcome.BEGUN: pb.OUTCOME_BEGUN,
        m.Outcome.COMMITTED: pb.OUTCOME_COMMITTED,
        m.Outcome.REPEATED: pb.OUTCOME_REPEATED,
        m.Outcome.ROLLED_BACK: pb.OUTCOME_ROLLED_BACK,
        m.Outcome.ENDED: pb.OUTCOME_ENDED,
    },
)
_SOURCE = f.Choice(
    {
        Source.KEPT: pb.SOURCE_KEPT,
        Source.CHECKPOINT: pb.SOURCE_CHECKPOINT,
        Source.START: pb.SOURCE_START,
        Source.NEIGHBOURS: pb.SOURCE_NEIGHBOURS,
    }
)
_SLACK = f.Plain(validate.within(1.0, SLACK_MAX))

_KEPT = f.Repeated(
    f.Struct(
        Kept,
        {"stage_index": f.STAGE, "iteration": f.ITERATION, "parameter_hash": f.SHA256},
    ),
    KEPT_MAX,
)
_MARK = f.Struct(Mark, {"iteration": f.ITERATION, "hashes": averaging_codec.HASHES}, _verify_mark)
_HOLDERS = f.Struct(
    StateHolders,
    {
        "stage_index": f.STAGE,
        "nodes": f.Scalars(validate.node_id, HOLDERS_MAX, num_min=1, unique=True),
    },
)
_ORIGIN = f.Struct(
    Origin,
    {
        "source": _SOURCE,
        "lost": f.Scalars(validate.stage_index, averaging_codec.STAGES_MAX, num_min=1, unique=True),
        "num_repeated": f.ITERATION,
        "holders": f.Repeated(_HOLDERS, averaging_codec.STAGES_MAX),
    },
    _verify_origin,
)
_OPENING = f.Struct(
    Opening,
    {
        "iteration": averaging_codec.ITERATION,
        "committed": averaging_codec.ITERATION,
        "view": view_codec.VIEW,
        "paused": f.BOOLEAN,
        "epoch": f.NUMBER,
        "electors": view_codec.NODES,
        "marks": f.Repeated(_MARK, MARKS_MAX),
        "origin": f.Optional(_ORIGIN),
        "averaged": f.Optional(averaging_codec.ITERATION),
        "due": f.ITERATION,
        "spec": averaging_codec.SPEC,
        "travelling": averaging_codec.SPEC,
        "slow": averaging_codec.SLOW,
        "travelled": averaging_codec.VERSIONS,
    },
    _verify_opening,
)
_SPENT_S = f.Plain(validate.within(0.0, ITERATION_MAX_S))
_TIMES = f.Struct(
    IterationTimes, {"computing_s": _SPENT_S, "waiting_s": _SPENT_S, "sending_s": _SPENT_S}
)
_LOAD = f.Struct(
    m.NodeLoad,
    {
        "node_id": f.NODE_ID,
        "num_flows": f.NUM_FLOWS,
        "capacity": f.NUM_FLOWS,
        "num_microbatches": f.NUMBER,
        "state": f.STATE,
        "kept": _KEPT,
        "awaited": f.Scalars(validate.node_id, AWAITED_MAX, unique=True),
        "times": f.Optional(_TIMES),
        "device": f.Plain(validate.printable(DEVICE_LENGTH_MAX)),
    },
)
_PLACE: Mapping[str, f.Field] = {
    "view_term": f.ITERATION,
    "iteration": averaging_codec.ITERATION,
    "view_version": f.ITERATION,
}
_TRAVELLING: Mapping[str, f.Field] = {
    "iteration": averaging_codec.ITERATION,
    "microbatch": f.MICROBATCH,
    "flow_id": f.FLOW,
}
_PATH = f.Scalars(validate.node_id, validate.STAGE_INDEX_MAX, num_min=1, unique=True)
_NEW_PATH: Mapping[str, f.Field] = {"path": _PATH, "path_version": f.ITERATION}
_PROVEN: Mapping[str, f.Field] = {**_TRAVELLING, **_NEW_PATH, "proof": averaging_codec.PROOF}

_BYWAYS = f.Tuples(
    f.Repeated(
        f.Struct(
            _Byway,
            {"node_id": f.NODE_ID, "bandwidth_bytes_per_s": f.Plain(validate.bandwidth)},
        ),
        BYWAYS_MAX,
    )
)

BODIES: Mapping[str, f.Struct] = {
    **routing_codec.BODIES,
    **gwtf_codec.BODIES,
    **averaging_codec.BODIES,
    **rounds_codec.BODIES,
    **servers_codec.BODIES,
    "join": f.Struct(
        m.Join,
        {
            "address": f.ADDRESS,
            "role": view_codec.ROLE,
            "capacity": f.CAPACITY,
            "stage_index": f.Optional(f.STAGE),
            "manifest_sha256": f.SHA256,
            "incarnation": f.NUMBER,
            "name": f.NAME,
            "kept": _KEPT,
            "duty": view_codec.DUTY,
            "reach": view_codec.REACH,
        },
    ),
    "assign": f.Struct(
        m.Assign,
        {
            "stage_index": f.STAGE,
            "data_node_index": f.DATA_NODE_INDEX,
            "reason": f.REASON,
            "begun": f.BOOLEAN,
            "donors": f.Repeated(view_codec.MEMBER, DONORS_MAX),
            "view_term": f.ITERATION,
            "view_version": f.ITERATION,
        },
    ),
    "refuse": f.Struct(m.Refuse, {"reason": f.REASON, "again_s": f.DURATION, "over": f.BOOLEAN}),
    "prepared": f.Struct(
        m.Prepared,
        {"stage_index": f.STAGE, "parameter_hash": f.SHA256, "state_at": averaging_codec.ITERATION},
    ),
    "follow": f.Struct(
        Follow,
        {
            "request_id": f.NUMBER,
            "stage_index": f.STAGE,
            "address": f.ADDRESS,
            "reach": view_codec.REACH,
        },
    ),
    "followed": f.Struct(
        Followed,
        {
            "request_id": f.NUMBER,
            "stage_index": f.STAGE,
            "committed": averaging_codec.ITERATION,
            "refusal": f.REASON,
        },
    ),
    "average": f.Struct(
        Average,
        {
            "averaging": averaging_codec.AVERAGING,
            "part": f.INDEX,
            "num_parts": f.COUNT,
            "num_microbatches": f.COUNT,
            "base_hash": f.Plain(validate.known_sha256),
            "gradient_norm": f.MAGNITUDE,
            "num_local": f.NUMBER,
            "num_ahead": f.INDEX,
            "spec": averaging_codec.SPEC,
            "ahead_spec": averaging_codec.SPEC,
        },
        _verify_average,
    ),
    "heartbeat": f.Struct(
        m.Heartbeat,
        {"iteration": averaging_codec.ITERATION, "bans": f.NUMBER, "view_version": f.NUMBER},
    ),
    "bans": f.Struct(
        m.Bans,
        {"version": f.NUMBER, "statement": f.Plain(validate.blob(validate.BANS_SIZE_MAX_BYTES))},
    ),
    "suspect": f.Struct(m.Suspect, {"node_id": f.NODE_ID, "reason": f.REASON, "slack": _SLACK}),
    "passed": f.Struct(Passed, {"ticket": f.NUMBER, "arrived": f.BOOLEAN}),
    "ping": f.Struct(m.Ping, {"nonce": f.NUMBER}),
    "pong": f.Struct(m.Pong, {"nonce": f.NUMBER}),
    "leave": f.Struct(m.Leave, {"reason": f.REASON, "at_once": f.BOOLEAN}),
    "capacity": f.Struct(m.Capacity, {"request_id": f.NUMBER, "capacity": f.USABLE_CAPACITY}),
    "capacity_answer": f.Struct(m.CapacityAnswer, {"request_id": f.NUMBER, "refusal": f.REASON}),
    "catch_up": f.Struct(
        m.CatchUp,
        {"iteration": averaging_codec.ITERATION, "view_hash": f.Plain(validate.known_sha256)},
    ),
    "link_report": f.Struct(
        m.LinkReport,
        {
            "view_version": f.ITERATION,
            "latency_s": f.Plain(validate.latency),
            "bandwidth_bytes_per_s": f.Plain(validate.bandwidth),
            "compute_s": f.Plain(validate.compute_time),
            "byways": _BYWAYS,
        },
        _verify_report,
    ),
    "link_probe": f.Struct(m.LinkProbe, {}),
    "flow_cost": f.Struct(
        m.FlowCost,
        {
            "view_version": f.ITERATION,
            "data_node": f.NODE_ID,
            "cost_s": f.COST,
            "num_unpaired": f.NUM_FLOWS,
            "compute_s": f.DURATION,
        },
    ),
    "request_flow": f.Struct(
        m.RequestFlow,
        {
            "view_version": f.ITERATION,
            "request_id": f.NUMBER,
            "data_node": f.NODE_ID,
            "cost_s": f.DURATION,
        },
    ),
    "flow_answer": f.Struct(
        m.FlowAnswer,
        {
            "view_version": f.ITERATION,
            "request_id": f.NUMBER,
            "flow_id": f.Optional(f.FLOW),
            "cost_s": f.COST,
            "num_unpaired": f.NUM_FLOWS,
            "path": f.Scalars(validate.node_id, validate.STAGE_INDEX_MAX, unique=True),
        },
    ),
    "withdraw": f.Struct(m.Withdraw, {"view_version": f.ITERATION, "request_id": f.NUMBER}),
    "forward_activation": f.Struct(m.ForwardActivation, _PROVEN),
    "backward_gradient": f.Struct(m.BackwardGradient, _PROVEN),
    "unusable": f.Struct(
        m.Unusable,
        {
            "iteration": averaging_codec.ITERATION,
            "microbatch": f.MICROBATCH,
            "is_gradient": f.BOOLEAN,
            "proof": averaging_codec.PROOF,
        },
    ),
    "complete": f.Struct(
        m.Complete,
        {
            "iteration": averaging_codec.ITERATION,
            "microbatch": f.MICROBATCH,
            "compute_s": f.DURATION,
        },
    ),
    "deny": f.Struct(m.Deny, {**_TRAVELLING, "reason": f.REASON}),
    "reroute": f.Struct(
        m.Reroute,
        {
            **_TRAVELLING,
            **_NEW_PATH,
            "owing": f.Scalars(validate.node_id, validate.STAGE_INDEX_MAX, unique=True),
        },
    ),
    "mended": f.Struct(
        m.Mended, {"iteration": averaging_codec.ITERATION, "microbatch": f.MICROBATCH}
    ),
    "report": f.Struct(
        m.Report,
        {
            "iteration": averaging_codec.ITERATION,
            "num_committed": f.COUNT,
            "digest": f.NUMBER,
            "num_deferred": f.COUNT,
            "loss_sum": f.FINITE,
            "num_tokens": f.NUMBER,
            "view_version": f.ITERATION,
            "failure": f.REASON,
            "num_reread": f.COUNT,
        },
    ),
    "open": f.Struct(
        m.Open,
        {
            "seal": f.SEAL,
            "closed": averaging_codec.ITERATION,
            "outcome": _OUTCOME,
            "opening": _OPENING,
            "reason": f.REASON,
            "hashes": averaging_codec.HASHES,
            "loss": f.FINITE,
            "num_tokens": f.NUMBER,
            "view_version": f.ITERATION,
            "view_term": f.ITERATION,
            "failed": f.BOOLEAN,
            "change": view_codec.CHANGE,
        },
        _verify_open,
    ),
    "mend": f.Struct(
        m.Mend,
        {
            "seal": f.SEAL,
            "iteration": averaging_codec.ITERATION,
            "view": view_codec.VIEW,
            "reason": f.REASON,
            "change": view_codec.CHANGE,
        },
        _verify_mend,
    ),
    "can_take": f.Struct(m.CanTake, {"iteration": averaging_codec.ITERATION}),
    "utilisation_query": f.Struct(
        m.UtilisationQuery,
        {
            "seal": f.SEAL,
            "query_id": f.NUMBER,
            "iteration": averaging_codec.ITERATION,
            "with_kept": f.BOOLEAN,
        },
    ),
    "utilisation_answer": f.Struct(
        m.UtilisationAnswer,
        {
            "query_id": f.NUMBER,
            "iteration": averaging_codec.ITERATION,
            "loads": f.Repeated(_LOAD, validate.MEMBERS_MAX),
        },
    ),
    "canvass": f.Struct(em.Canvass, _PLACE),
    "canvass_answer": f.Struct(em.CanvassAnswer, {**_PLACE, "silent": f.BOOLEAN}),
    "candidacy": f.Struct(em.Candidacy, {"term": f.ITERATION, **_PLACE}),
    "vote": f.Struct(
        em.Vote,
        {
            "term": f.ITERATION,
            "granted": f.BOOLEAN,
            **_PLACE,
            "hashes": averaging_codec.HASHES,
            "confirmed_term": f.ITERATION,
        },
    ),
    "confirm": f.Struct(em.Confirm, {"term": f.ITERATION, **_PLACE}),
    "leader_is": f.Struct(
        em.LeaderIs,
        {
            "term": f.ITERATION,
            "leader": f.Optional(f.NODE_ID),
            "address": f.Optional(f.ADDRESS),
        },
    ),
}

NOBODY = NodeId("")

_BODY_NAMES: Mapping[type[Any], str] = {struct.cls: name for name, struct in BODIES.items()}


@dataclass(frozen=True, slots=True)
class Decoded:
    """A peer's message with every field checked. The core decides whether it is legal now."""

    run_id: RunId
    sender: NodeId
    term: int
    sequence: int
    message: m.Message
    way: Way | None = None
    """Set if the sender has passed the message on for another node, or if the receiver is to do
    so."""


def encode(
    run_id: RunId,
    sender: NodeId,
    term: int,
    sequence: int,
    message: m.Message,
    way: Way | None = None,
) -> pb.Envelope:
    """Return the envelope of this node's own message, or of a message that it passes on.

    Reasons are cut to one printable line of 200 characters. A whole view takes about 90 bytes a
    member, and 54 bytes an elector if the electors differ from the members. So an opening with one
    reaches the limit of 4 MiB a message at some 29000 members. A message with a `way` carries the
    way's term.

    Raises:
        AssertionError: A peer would not accept a field, which is a bug of this node.
    """
    name = _BODY_NAMES[type(message)]
    envelope = pb.Envelope(run_id=run_id, sender_id=sender, term=term, sequence=sequence)
    if way is not None:
        envelope.term, envelope.ticket, envelope.proof = way.term, way.ticket, way.proof
        if way.origin == sender:
            envelope.goal_id = way.goal
        else:
            envelope.origin_id = way.origin
    try:
        BODIES[name].write(envelope, name, message)
    except MalformedMessageError as error:
        raise AssertionError(f"outgoing {name}: {error.what}, but {error.why}") from error
    return envelope


def content_of(message: m.Message) -> bytes:
    """Return the bytes that stand for a message wherever it comes from: equal for equal ones."""
    envelope, name = pb.Envelope(), _BODY_NAMES[type(message)]
    BODIES[name].write(envelope, name, message)
    return envelope.SerializeToString(deterministic=True)


def decode(envelope: pb.Envelope, *, receiver: NodeId = NOBODY) -> Decoded:
    """Check an envelope and return its message.

    Args:
        envelope: The envelope as it came.
        receiver: This node. It is the goal of a message that another node has passed on.

    Raises:
        MalformedMessageError: A field is missing or out of range, or the envelope holds no message
            that this version knows.
    """
    run_id = validate.run_id("run_id", envelope.run_id)
    sender = validate.node_id("sender_id", envelope.sender_id)
    term = validate.iteration("term", envelope.term)
    sequence = validate.number("sequence", envelope.sequence)
    name = envelope.WhichOneof("body")
    if name is None:
        raise validate.malformed("body", None, allowed="a message that this version knows")
    message = BODIES[name].take(getattr(envelope, name))
    way = _way_of(envelope, sender, receiver)
    return Decoded(run_id, sender, term, sequence, message, way)


_proof = validate.blob(validate.SEAL_SIZE_MAX_BYTES)


def _way_of(envelope: pb.Envelope, sender: NodeId, receiver: NodeId) -> Way | None:
    if not (envelope.goal_id or envelope.origin_id):
        return None
    ticket = validate.number("ticket", envelope.ticket)
    proof = _proof("proof", envelope.proof)
    if not envelope.origin_id:
        goal = validate.node_id("goal_id", envelope.goal_id)
        return Way(sender, goal, envelope.term, ticket, proof)
    if envelope.goal_id:
        raise validate.malformed("goal_id", envelope.goal_id, allowed="nothing beside an origin")
    origin = validate.node_id("origin_id", envelope.origin_id)
    return Way(origin, receiver, envelope.term, ticket, proof)


def parse(cls: type[P], data: bytes) -> P:
    """Parse a protobuf message from a peer's bytes. Its fields are not checked yet.

    Raises:
        MalformedMessageError: protobuf can't read the bytes as a `cls`.
    """
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(
            f"{len(data)} bytes are no {cls.DESCRIPTOR.name}",
            why="protobuf can't read them",
            fix="run the same version of decod on every node",
        ) from error
