"""The codec's table for the messages of `decod.protocol.core.messages.negotiation`.

**Size.** A control message has at most 4 MiB. The number of places bounds a walk or a change
(9 kB). A claim gathers the costs of all links that it could have taken: 65 bytes for each relay of
the run. So a claim fits in every run whose view fits in a message. The claims of a data node name
the same nodes and hops again and again. `Claims` holds each node and hop once, and 16 bytes for the
cost of each link. So it has room for some 250000 costs: 64 flows through 12 stages of 300 relays.
`Routes` has room for 70000 relays: 4096 flows through 16 stages.

The limits of single fields may allow a larger message than 4 MiB or `ENTRIES_MAX`. The codec
encodes such messages, but the transport refuses to send them.

**Values that are passed on.** A node tells one peer what it heard from another: hops, paths, the
begin of a walk, costs to the sink. The limits ensure that every accepted value can be sent on. A
node cuts its own costs to the limit, and the costs of a walk are checked step by step. So no peer
can drive a sum beyond its limit.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from google.protobuf.message import Message as Proto
from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.core.messages import negotiation as m
from decod.protocol.core.residual import MAX_STEPS, Place, Walk
from decod.protocol.flows.position import LINK_COST_MAX
from decod.wire import fields as f
from decod.wire import validate

PATH_COST_MAX = (validate.STAGE_INDEX_MAX + 1) * LINK_COST_MAX
"""Largest cost of a unit from a node to its sink, over one link for each stage."""

STEP_COST_MAX = 1e111
"""More than any step of a walk costs: (65536 * 1e9) ** 8 for the dearest link under
`Objective.MAX`. The reward of a further flow must be below it too."""

CHANGE_COST_MAX = 2e113
"""Largest cost of one node's links on a walk, which are at most `MAX_STEPS` steps."""


class _Place(NamedTuple):
    node_id: NodeId
    exit: bool


class _Step(NamedTuple):
    node_id: NodeId
    exit: bool
    cost: float


class _Steps(NamedTuple):
    """The wire form of a walk: each place with its cost."""

    steps: tuple[_Step, ...]
    units: int


class _LinkCost(NamedTuple):
    node_id: NodeId
    cost: float


class _IndexedCost(NamedTuple):
    node_index: int
    cost: float


class _IndexedHop(NamedTuple):
    node_index: int
    costs: tuple[_IndexedCost, ...]
    inward: tuple[_IndexedCost, ...]
    compute_s: float


class _IndexedClaim(NamedTuple):
    hop_indexes: tuple[int, ...]


class _Table(NamedTuple):
    node_ids: tuple[NodeId, ...]
    hops: tuple[_IndexedHop, ...]
    claims: tuple[_IndexedClaim, ...]


def _verify_steps(walk: _Steps) -> None:
    validate.unique("steps", [(step.node_id, step.exit) for step in walk.steps])
    if not -STEP_COST_MAX <= walk.steps[0].cost <= 0:
        allowed = f"from {-STEP_COST_MAX} to 0 at a walk's begin"
        raise validate.malformed("cost", walk.steps[0].cost, allowed=allowed)
    for before, after in pairwise(walk.steps):
        if not abs(after.cost - before.cost) <= STEP_COST_MAX:
            allowed = f"at most {STEP_COST_MAX} from the one before"
            raise validate.malformed("cost", after.cost, allowed=allowed)


def _verify_change(change: m.RequestChange) -> None:
    validate.unique("places", change.places)


def _verify_ends(value: m.Hop | m.Claims) -> None:
    validate.unique("costs", [node_id for node_id, _ in value.costs])
    validate.unique("inward", [node_id for node_id, _ in value.inward])


def _verify_indexed_hop(hop: _IndexedHop) -> None:
    validate.unique("costs", [cost.node_index for cost in hop.costs])
    validate.unique("inward", [cost.node_index for cost in hop.inward])


def _verify_hops(claim: m.Claim | m.Claimed) -> None:
    validate.unique("hops", [hop.node_id for hop in claim.hops])


def _verify_settled_flow(flow: m.SettledFlow) -> None:
    validate.length("costs", len(flow.costs), low=len(flow.path) + 1, high=len(flow.path) + 1)


_UNITS = f.NUM_FLOWS
_UNITS_ONE_UP = f.CAPACITY
LINK_COST = f.Capped(LINK_COST_MAX)
_EXIT = f.BOOLEAN
_STEPS = f.Struct(
    _Steps,
    {
        "steps": f.Repeated(
            f.Struct(_Step, {"node_id": f.NODE_ID, "exit": _EXIT, "cost": f.FINITE}),
            MAX_STEPS,
            num_min=1,
        ),
        "units": _UNITS_ONE_UP,
    },
    _verify_steps,
)
_PLACES = f.Tuples(
    f.Repeated(f.Struct(_Place, {"node_id": f.NODE_ID, "exit": _EXIT}), MAX_STEPS, num_min=2)
)
LINK_COSTS = f.Tuples(
    f.Repeated(f.Struct(_LinkCost, {"node_id": f.NODE_ID, "cost": LINK_COST}), validate.MEMBERS_MAX)
)
_COMPUTE_S = f.Plain(validate.compute_time)
_ENDS: Mapping[str, f.Field] = {
    "costs": LINK_COSTS,
    "inward": LINK_COSTS,
    "compute_s": _COMPUTE_S,
}
_HOP = f.Struct(m.Hop, {"node_id": f.NODE_ID, **_ENDS}, _verify_ends)
_PATH = f.Scalars(validate.node_id, m.HOPS_MAX, num_min=1, unique=True)
_SETTLED_FLOW = f.Struct(
    m.SettledFlow,
    {
        "path": _PATH,
        "costs": f.Scalars(validate.within(0.0, LINK_COST_MAX), m.HOPS_MAX + 1, num_min=2),
    },
    _verify_settled_flow,
)
_INDEXED_COSTS = f.Repeated(
    f.Struct(_IndexedCost, {"node_index": f.COUNT, "cost": LINK_COST}), validate.MEMBERS_MAX
)
_INDEXED_HOP = f.Struct(
    _IndexedHop,
    {
        "node_index": f.COUNT,
        "costs": _INDEXED_COSTS,
        "inward": _INDEXED_COSTS,
        "compute_s": _COMPUTE_S,
    },
    _verify_indexed_hop,
)
_INDEXED_CLAIM = f.Struct(
    _IndexedClaim, {"hop_indexes": f.Scalars(validate.count, m.HOPS_MAX, num_min=1)}
)
_TABLE = f.Struct(
    _Table,
    {
        "node_ids": f.Scalars(validate.node_id, validate.ENTRIES_MAX, unique=True),
        "hops": f.Repeated(_INDEXED_HOP, validate.ENTRIES_MAX),
        "claims": f.Repeated(_INDEXED_CLAIM, validate.CAPACITY_MAX),
    },
)


class _Walk(f.Converted):
    """A `Walk`, whose places and costs are paired on the wire."""

    struct = _STEPS

    @override
    def write(self, target: Proto, field: str, value: Walk) -> None:
        if len(value.places) != len(value.costs):
            raise validate.malformed("costs", len(value.costs), allowed="one for each place")
        pairs = zip(value.places, value.costs, strict=True)
        steps = tuple(_Step(*place, cost) for place, cost in pairs)
        _STEPS.write(target, field, _Steps(steps, value.units))

    @override
    def read(self, source: Proto, field: str) -> Walk:
        walk: _Steps = _STEPS.read(source, field)
        places: tuple[Place, ...] = tuple((step.node_id, step.exit) for step in walk.steps)
        return Walk(places, tuple(step.cost for step in walk.steps), walk.units)


class _Claims(f.Converted):
    """Claims, on the wire a table of nodes and hops with the rows of each claim."""

    struct = _TABLE

    @override
    def write(self, target: Proto, field: str, value: Sequence[tuple[m.Hop, ...]]) -> None:
        nodes: dict[NodeId, int] = {}
        hops: dict[m.Hop, int] = {}
        claims = []
        for claim in value:
            validate.unique("hops", [hop.node_id for hop in claim])
            indexes = tuple(hops.setdefault(hop, len(hops)) for hop in claim)
            claims.append(_IndexedClaim(indexes))

        def index_of(node_id: NodeId) -> int:
            return nodes.setdefault(node_id, len(nodes))

        def indexed_costs(costs: Sequence[tuple[NodeId, float]]) -> tuple[_IndexedCost, ...]:
            return tuple(_IndexedCost(index_of(node_id), cost) for node_id, cost in costs)

        indexed = tuple(
            _IndexedHop(
                index_of(hop.node_id),
                indexed_costs(hop.costs),
                indexed_costs(hop.inward),
                hop.compute_s,
            )
            for hop in hops
        )
        _TABLE.write(target, field, _Table(tuple(nodes), indexed, tuple(claims)))

    @override
    def read(self, source: Proto, field: str) -> tuple[tuple[m.Hop, ...], ...]:
        table: _Table = _TABLE.read(source, field)
        hops = [
            m.Hop(
                _entry("node_index", table.node_ids, hop.node_index),
                _named(table.node_ids, hop.costs),
                _named(table.node_ids, hop.inward),
                hop.compute_s,
            )
            for hop in table.hops
        ]
        return tuple(self._claim(hops, claim.hop_indexes) for claim in table.claims)

    def _claim(self, hops: Sequence[m.Hop], indexes: Sequence[int]) -> tuple[m.Hop, ...]:
        claim = tuple(_entry("hop_indexes", hops, index) for index in indexes)
        validate.unique("hops", [hop.node_id for hop in claim])
        return claim


def _named(
    node_ids: Sequence[NodeId], costs: Sequence[_IndexedCost]
) -> tuple[tuple[NodeId, float], ...]:
    return tuple((_entry("node_index", node_ids, cost.node_index), cost.cost) for cost in costs)


def _entry(field: str, table: Sequence[Any], index: int) -> Any:
    if index >= len(table):
        raise validate.malformed(field, index, allowed=f"less than {len(table)}")
    return table[index]


_VIEW: Mapping[str, f.Field] = {"view_version": f.ITERATION}
_REQUEST: Mapping[str, f.Field] = {**_VIEW, "request_id": f.NUMBER, "units": _UNITS}
_CHANGE: Mapping[str, f.Field] = {**_VIEW, "change_id": f.NUMBER}
_EPOCH: Mapping[str, f.Field] = {**_VIEW, "epoch": f.NUMBER}

BODIES: Mapping[str, f.Struct] = {
    "draft_offer": f.Struct(
        m.DraftOffer,
        {**_VIEW, "sequence": f.NUMBER, "units": _UNITS, "cost": f.Capped(PATH_COST_MAX)},
    ),
    "request_units": f.Struct(m.RequestUnits, _REQUEST),
    "units_answer": f.Struct(m.UnitsAnswer, _REQUEST),
    "draft_units": f.Struct(
        m.DraftUnits,
        {
            **_VIEW,
            "outward": f.BOOLEAN,
            "link_version": f.NUMBER,
            "units": _UNITS,
            "agreed": f.BOOLEAN,
        },
    ),
    "residual_walk": f.Struct(
        m.ResidualWalk,
        {**_VIEW, "sequence": f.NUMBER, "exit": _EXIT, "walk": f.Optional(_Walk())},
    ),
    "request_change": f.Struct(
        m.RequestChange,
        {**_CHANGE, "places": _PLACES, "is_closed": f.BOOLEAN, "units": _UNITS_ONE_UP},
        _verify_change,
    ),
    "change_answer": f.Struct(
        m.ChangeAnswer,
        {
            **_CHANGE,
            "units": _UNITS,
            "cost": f.Plain(validate.within(-CHANGE_COST_MAX, CHANGE_COST_MAX)),
        },
    ),
    "change_decision": f.Struct(m.ChangeDecision, {**_CHANGE, "units": _UNITS}),
    "claim": f.Struct(
        m.Claim,
        {**_EPOCH, "flow_id": f.FLOW, "hops": f.Repeated(_HOP, m.HOPS_MAX)},
        _verify_hops,
    ),
    "claimed": f.Struct(
        m.Claimed,
        {**_EPOCH, "flow_id": f.FLOW, "hops": f.Repeated(_HOP, m.HOPS_MAX)},
        _verify_hops,
    ),
    "claims": f.Struct(
        m.Claims,
        {**_EPOCH, "capacity": _UNITS, **_ENDS, "claims": _Claims()},
        _verify_ends,
    ),
    "routes": f.Struct(
        m.Routes, {**_EPOCH, "routes": f.Repeated(_SETTLED_FLOW, validate.CAPACITY_MAX)}
    ),
    "settle": f.Struct(m.Settle, _EPOCH),
    "install": f.Struct(m.Install, {**_EPOCH, "flow_id": f.FLOW, "path": _PATH}),
    "installed": f.Struct(m.Installed, _EPOCH),
}
