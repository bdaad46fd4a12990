"""Turns the core's messages into envelopes and back. Nothing else reads or writes control.proto.

One table says which protobuf message stands for which dataclass and how each field is checked.
Names of fields are the same on both sides; a test compares the table with the dataclasses and with
the descriptors, so that no field can be forgotten.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from decod.errors import MalformedMessageError
from decod.ids import FlowId, MicrobatchId, NodeId, Round, RunId
from decod.protocol import messages as m
from decod.protocol.view import Member, Opening, Role, View
from decod.wire import validate
from decod.wire.v1 import control_pb2 as pb

P = TypeVar("P", bound=Proto)


class _Field(Protocol):
    """How one field travels. Both directions raise `MalformedMessageError` on a bad value."""

    def write(self, target: Proto, field: str, value: Any) -> None: ...

    def read(self, source: Proto, field: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Plain:
    check: Callable[[str, Any], Any]

    def write(self, target: Proto, field: str, value: Any) -> None:
        setattr(target, field, self.check(field, value))

    def read(self, source: Proto, field: str) -> Any:
        return self.check(field, getattr(source, field))


class _Reason:
    """A text for people. Ours may quote an exception, so it is cut to what may travel."""

    def write(self, target: Proto, field: str, value: str) -> None:
        setattr(target, field, validate.clip_reason(value))

    def read(self, source: Proto, field: str) -> str:
        return validate.reason(field, getattr(source, field))


@dataclass(frozen=True, slots=True)
class _Optional:
    """None is an absent field."""

    inner: _Field

    def write(self, target: Proto, field: str, value: Any) -> None:
        if value is not None:
            self.inner.write(target, field, value)

    def read(self, source: Proto, field: str) -> Any:
        return self.inner.read(source, field) if source.HasField(field) else None


class _Role:
    _to_proto: Mapping[Role, int] = MappingProxyType(
        {Role.DATA: pb.ROLE_DATA, Role.RELAY: pb.ROLE_RELAY}
    )
    _from_proto: Mapping[int, Role] = MappingProxyType({v: k for k, v in _to_proto.items()})

    def write(self, target: Proto, field: str, value: Role) -> None:
        setattr(target, field, self._to_proto[value])

    def read(self, source: Proto, field: str) -> Role:
        role = self._from_proto.get(getattr(source, field))
        if role is None:
            raise validate.malformed(field, getattr(source, field), allowed="1 or 2")
        return role


@dataclass(frozen=True, slots=True)
class _Struct:
    """A message within a message, and the root of each: its fields and what relates them."""

    cls: type[Any]
    parts: Mapping[str, _Field]
    verify: Callable[[Any], None] = lambda _value: None

    def fill(self, target: Proto, value: Any) -> None:
        self.verify(value)
        for field, part in self.parts.items():
            part.write(target, field, getattr(value, field))

    def take(self, source: Proto) -> Any:
        value = self.cls(**{field: part.read(source, field) for field, part in self.parts.items()})
        self.verify(value)
        return value

    def write(self, target: Proto, field: str, value: Any) -> None:
        inner = getattr(target, field)
        inner.SetInParent()
        self.fill(inner, value)

    def read(self, source: Proto, field: str) -> Any:
        if not source.HasField(field):
            raise validate.malformed(field, None, allowed="there")
        return self.take(getattr(source, field))


@dataclass(frozen=True, slots=True)
class _Repeated:
    struct: _Struct
    num_max: int
    num_min: int = 0

    def write(self, target: Proto, field: str, value: Sequence[Any]) -> None:
        self._check_length(field, len(value))
        items = getattr(target, field)
        for item in value:
            self.struct.fill(items.add(), item)

    def read(self, source: Proto, field: str) -> tuple[Any, ...]:
        items = getattr(source, field)
        self._check_length(field, len(items))
        return tuple(map(self.struct.take, items))

    def _check_length(self, field: str, length: int) -> None:
        if not self.num_min <= length <= self.num_max:
            allowed = f"{self.num_min} to {self.num_max} entries"
            raise validate.malformed(field, f"{length} entries", allowed=allowed)


@dataclass(frozen=True, slots=True)
class _StageHash:
    """`Ready.hashes` is a tuple of pairs; on the wire each pair is a message."""

    stage_index: int
    parameter_hash: str


class _StageHashes:
    def __init__(self, items: _Repeated) -> None:
        self._items = items

    def write(self, target: Proto, field: str, value: Sequence[tuple[int, str]]) -> None:
        self._items.write(target, field, [_StageHash(*pair) for pair in value])

    def read(self, source: Proto, field: str) -> tuple[tuple[int, str], ...]:
        items: tuple[_StageHash, ...] = self._items.read(source, field)
        return tuple((item.stage_index, item.parameter_hash) for item in items)


def _verify_member(member: Member) -> None:
    if (member.role is Role.DATA) != (member.stage_index == 0):
        allowed = "0 for data nodes and only for them"
        raise validate.malformed("stage_index", member.stage_index, allowed=allowed)
    if (member.role is Role.DATA) != (member.data_node_index >= 0):
        allowed = "-1 for relays and only for them"
        raise validate.malformed("data_node_index", member.data_node_index, allowed=allowed)


def _verify_view(view: View) -> None:
    """Checks what every node derives its place from; see `decod.protocol.view`."""
    if len(view.by_id) != len(view.members):
        raise validate.malformed("members", "a node twice", allowed="each node once")
    leader = view.by_id.get(view.leader)
    if leader is None or leader.stage_index != 0:
        raise validate.malformed("leader", view.leader, allowed="a member at stage 0")
    stage_index_max = max(member.stage_index for member in view.members)
    if stage_index_max >= view.num_stages:
        allowed = f"less than num_stages, which is {view.num_stages}"
        raise validate.malformed("stage_index", stage_index_max, allowed=allowed)
    data_node_indexes = [m.data_node_index for m in view.members if m.role is Role.DATA]
    if len(set(data_node_indexes)) != len(data_node_indexes):
        raise validate.malformed("data_node_index", "given twice", allowed="each given once")
    ordered = View.of(
        view.members, version=0, leader=view.leader, term=0, num_stages=view.num_stages
    )
    if view.members != ordered.members:
        raise validate.malformed("members", "unordered", allowed="by stage, leader first, node id")


_PLAIN = {
    check: _Plain(check)
    for check in (
        validate.node_id,
        validate.address,
        validate.name,
        validate.sha256,
        validate.iteration,
        validate.number,
        validate.count,
        validate.stage_index,
        validate.capacity,
        validate.num_flows,
        validate.index,
        validate.data_node_index,
        validate.duration,
        validate.latency,
        validate.bandwidth,
        validate.compute_time,
        validate.cost,
        validate.finite,
        validate.boolean,
        validate.num_stages,
        validate.state,
    )
}
_NODE_ID = _PLAIN[validate.node_id]
_ADDRESS = _PLAIN[validate.address]
_NAME = _PLAIN[validate.name]
_SHA256 = _PLAIN[validate.sha256]
_ITERATION = _PLAIN[validate.iteration]
_NUMBER = _PLAIN[validate.number]
_COUNT = _PLAIN[validate.count]
_STAGE = _PLAIN[validate.stage_index]
_CAPACITY = _PLAIN[validate.capacity]
_NUM_FLOWS = _PLAIN[validate.num_flows]
_INDEX = _PLAIN[validate.index]
_DATA_NODE_INDEX = _PLAIN[validate.data_node_index]
_DURATION = _PLAIN[validate.duration]
_COST = _PLAIN[validate.cost]
_LATENCY = _PLAIN[validate.latency]
_BANDWIDTH = _PLAIN[validate.bandwidth]
_COMPUTE_TIME = _PLAIN[validate.compute_time]
_FINITE = _PLAIN[validate.finite]
_NUM_STAGES = _PLAIN[validate.num_stages]
_STATE = _PLAIN[validate.state]
_BOOLEAN = _PLAIN[validate.boolean]
_REASON = _Reason()
_ROLE = _Role()

_ROUND = _Struct(Round, {"iteration": _ITERATION, "attempt": _COUNT})
_MICROBATCH = _Struct(
    MicrobatchId, {"iteration": _ITERATION, "data_node_index": _INDEX, "index": _COUNT}
)
_FLOW = _Struct(FlowId, {"data_node": _NODE_ID, "slot": _INDEX})
_MEMBER = _Struct(
    Member,
    {
        "node_id": _NODE_ID,
        "address": _ADDRESS,
        "role": _ROLE,
        "stage_index": _STAGE,
        "capacity": _CAPACITY,
        "data_node_index": _DATA_NODE_INDEX,
        "since_iteration": _ITERATION,
        "name": _NAME,
    },
    _verify_member,
)
_VIEW = _Struct(
    View,
    {
        "version": _ITERATION,
        "leader": _NODE_ID,
        "term": _ITERATION,
        "num_stages": _NUM_STAGES,
        "members": _Repeated(_MEMBER, validate.MEMBERS_MAX, num_min=1),
    },
    _verify_view,
)
_OPENING = _Struct(
    Opening,
    {
        "round": _ROUND,
        "committed": _ROUND,
        "view": _VIEW,
        "paused": _BOOLEAN,
        "finished": _BOOLEAN,
        "failed": _BOOLEAN,
    },
)
_LOAD = _Struct(
    m.NodeLoad,
    {
        "node_id": _NODE_ID,
        "num_flows": _NUM_FLOWS,
        "capacity": _NUM_FLOWS,
        "num_microbatches": _NUMBER,
        "state": _STATE,
    },
)
_HASH = _Struct(_StageHash, {"stage_index": _STAGE, "parameter_hash": _SHA256})
_STAGES_MAX = validate.STAGE_INDEX_MAX + 1
_TRAVELLING: Mapping[str, _Field] = {"round": _ROUND, "microbatch": _MICROBATCH, "flow_id": _FLOW}

_BODIES: Mapping[str, _Struct] = {
    "join": _Struct(
        m.Join,
        {
            "address": _ADDRESS,
            "role": _ROLE,
            "capacity": _CAPACITY,
            "stage_index": _Optional(_STAGE),
            "manifest_sha256": _SHA256,
            "incarnation": _NUMBER,
            "name": _NAME,
        },
    ),
    "assign": _Struct(m.Assign, {"stage_index": _STAGE, "data_node_index": _DATA_NODE_INDEX}),
    "refuse": _Struct(m.Refuse, {"reason": _REASON}),
    "prepared": _Struct(m.Prepared, {"stage_index": _STAGE, "parameter_hash": _SHA256}),
    "heartbeat": _Struct(m.Heartbeat, {"round": _ROUND}),
    "suspect": _Struct(m.Suspect, {"node_id": _NODE_ID, "reason": _REASON}),
    "ping": _Struct(m.Ping, {"nonce": _NUMBER}),
    "pong": _Struct(m.Pong, {"nonce": _NUMBER}),
    "leave": _Struct(m.Leave, {"reason": _REASON, "at_once": _BOOLEAN}),
    "catch_up": _Struct(m.CatchUp, {"round": _ROUND}),
    "link_report": _Struct(
        m.LinkReport,
        {
            "view_version": _ITERATION,
            "latency_s": _LATENCY,
            "bandwidth_bytes_per_s": _BANDWIDTH,
            "compute_s": _COMPUTE_TIME,
        },
    ),
    "link_probe": _Struct(m.LinkProbe, {}),
    "flow_cost": _Struct(
        m.FlowCost,
        {
            "view_version": _ITERATION,
            "data_node": _NODE_ID,
            "cost_s": _COST,
            "num_unpaired": _NUM_FLOWS,
            "compute_s": _DURATION,
        },
    ),
    "request_flow": _Struct(
        m.RequestFlow,
        {
            "view_version": _ITERATION,
            "request_id": _NUMBER,
            "data_node": _NODE_ID,
            "cost_s": _DURATION,
        },
    ),
    "flow_answer": _Struct(
        m.FlowAnswer,
        {
            "view_version": _ITERATION,
            "request_id": _NUMBER,
            "flow_id": _Optional(_FLOW),
            "cost_s": _COST,
            "num_unpaired": _NUM_FLOWS,
        },
    ),
    "withdraw": _Struct(m.Withdraw, {"view_version": _ITERATION, "request_id": _NUMBER}),
    "forward_activation": _Struct(m.ForwardActivation, _TRAVELLING),
    "backward_gradient": _Struct(m.BackwardGradient, _TRAVELLING),
    "complete": _Struct(
        m.Complete, {"round": _ROUND, "microbatch": _MICROBATCH, "compute_s": _DURATION}
    ),
    "deny": _Struct(m.Deny, {**_TRAVELLING, "reason": _REASON}),
    "report": _Struct(
        m.Report,
        {
            "round": _ROUND,
            "num_committed": _COUNT,
            "digest": _NUMBER,
            "num_deferred": _COUNT,
            "loss_sum": _FINITE,
            "num_tokens": _NUMBER,
            "failure": _REASON,
        },
    ),
    "begin_aggregation": _Struct(
        m.BeginAggregation, {"round": _ROUND, "num_committed": _COUNT, "digest": _NUMBER}
    ),
    "reduce_part": _Struct(
        m.ReducePart,
        {"round": _ROUND, "part": _INDEX, "num_microbatches": _COUNT, "digest": _NUMBER},
    ),
    "reduced_part": _Struct(m.ReducedPart, {"round": _ROUND, "part": _INDEX}),
    "ready": _Struct(
        m.Ready,
        {
            "round": _ROUND,
            "hashes": _StageHashes(_Repeated(_HASH, _STAGES_MAX)),
            "failure": _REASON,
        },
    ),
    "commit": _Struct(
        m.Commit,
        {"round": _ROUND, "opening": _OPENING, "loss": _FINITE, "num_tokens": _NUMBER},
    ),
    "abort": _Struct(m.Abort, {"round": _ROUND, "opening": _OPENING, "reason": _REASON}),
    "can_take": _Struct(m.CanTake, {"round": _ROUND}),
    "utilisation_query": _Struct(m.UtilisationQuery, {"query_id": _NUMBER, "round": _ROUND}),
    "utilisation_answer": _Struct(
        m.UtilisationAnswer,
        {"query_id": _NUMBER, "round": _ROUND, "loads": _Repeated(_LOAD, validate.MEMBERS_MAX)},
    ),
}

_BODY_NAMES: Mapping[type[Any], str] = {struct.cls: name for name, struct in _BODIES.items()}


@dataclass(frozen=True, slots=True)
class Decoded:
    """A peer's message, every field of it checked. Whether it is legal now, the core decides."""

    run_id: RunId
    sender: NodeId
    term: int
    sequence: int
    message: m.Message


def encode(
    run_id: RunId, sender: NodeId, term: int, sequence: int, message: m.Message
) -> pb.Envelope:
    """Returns the envelope of a message of this node.

    Reasons are cut to one printable line of 200 characters. An opening takes about 90 bytes a
    member, so that the limit of 4 MiB a message is reached at some 45000 members.

    Raises:
        AssertionError: A field is not what a peer would accept, which is a bug of this node.
    """
    name = _BODY_NAMES[type(message)]
    envelope = pb.Envelope(run_id=run_id, sender_id=sender, term=term, sequence=sequence)
    try:
        _BODIES[name].write(envelope, name, message)
    except MalformedMessageError as error:
        raise AssertionError(f"outgoing {name}: {error.what}, but {error.why}") from error
    return envelope


def decode(envelope: pb.Envelope) -> Decoded:
    """Returns the message of an envelope.

    Raises:
        MalformedMessageError: A field is missing or out of range, or there is no message that
            this version knows.
    """
    run_id = validate.run_id("run_id", envelope.run_id)
    sender = validate.node_id("sender_id", envelope.sender_id)
    term = validate.iteration("term", envelope.term)
    sequence = validate.number("sequence", envelope.sequence)
    name = envelope.WhichOneof("body")
    if name is None:
        raise validate.malformed("body", None, allowed="a message that this version knows")
    message = _BODIES[name].take(getattr(envelope, name))
    return Decoded(run_id, sender, term, sequence, message)


def parse(cls: type[P], data: bytes) -> P:
    """Returns a protobuf message read from a peer's bytes; fields are not checked yet.

    Raises:
        MalformedMessageError: The bytes are not such a message.
    """
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(
            f"{len(data)} bytes are no {cls.DESCRIPTOR.name}",
            why="protobuf can't read them",
            fix="run the same version of decod on every node",
        ) from error
