"""Any message that a node may send: Hypothesis strategies, made from what its class says."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from operator import attrgetter, itemgetter
from typing import Any, get_args

from hypothesis import strategies as st

from decod import limits
from decod.ids import NodeId
from decod.limits import PROOF_BYTES
from decod.protocol.core import messages as m
from decod.protocol.core.average_spec import BITS, AverageSpec
from decod.protocol.core.fingerprints import SEED_BYTES, SKETCH_BYTES, SketchBytes
from decod.protocol.core.messages.audit_messages import AuditCase
from decod.protocol.core.messages.membership_messages import Average
from decod.protocol.core.messages.round_messages import BeginRound
from decod.protocol.core.messages.routing_messages import ClaimTable, Hop, SettledFlow
from decod.protocol.core.messages.server_messages import Holding
from decod.protocol.core.residual import LINK_COST_MAX, MAX_STEPS, Place, Walk, WalkSteps
from decod.protocol.core.view import (
    Duty,
    ElectorChange,
    Member,
    Opening,
    Reach,
    Role,
    View,
    ViewChange,
)
from decod.wire import validate
from decod.wire.message_schema import Part, struct_of

BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
ENTRIES_MAX = 4
"""Of a tuple that may have more."""

_Strategy = st.SearchStrategy[Any]

node_ids = st.text(BASE32, min_size=52, max_size=52).map(NodeId)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
names = st.text("abcxyz0189-", max_size=32)
addresses = st.one_of(
    st.builds("10.1.2.{}:{}".format, st.integers(0, 255), st.integers(1, 65535)),
    st.builds("[2001:db8::{:x}]:{}".format, st.integers(1, 65535), st.integers(1, 65535)),
)


def none_or(num_bytes: int) -> _Strategy:
    return st.just(b"") | st.binary(min_size=num_bytes, max_size=num_bytes)


_OF_TYPES: dict[Any, _Strategy] = {
    limits.Address: addresses,
    limits.NodeName: names,
    limits.StateName: st.text("abc_-", max_size=32),
    limits.Sha256: hashes,
    limits.SomeSha256: st.just("") | hashes,
    limits.ReasonText: st.text(max_size=200).map(validate.clip_reason),
    limits.SealBytes: st.binary(max_size=limits.SEAL_SIZE_MAX_BYTES),
    limits.ProofBytes: none_or(PROOF_BYTES),
    SketchBytes: none_or(SKETCH_BYTES),
}
_OF_LIMITS = {id(get_args(hint)[1]): strategy for hint, strategy in _OF_TYPES.items()}
_OF_LIMITS[id(limits.NODE_ID)] = node_ids
_OF_FIELDS: dict[tuple[type, str], _Strategy] = {
    (AverageSpec, "bits"): st.sampled_from(BITS),
    (AuditCase, "seed"): st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES),
    (m.Bans, "statement"): st.binary(max_size=1000),
    (m.NodeLoad, "device"): names,
    (m.NodeLoad, "decod_version"): names,
}
"""Of fields whose limit is their own."""


def objects_of(cls: type) -> _Strategy:
    """Return objects of a class that travels, which keep all of its rules."""
    found = {part.name: _values_of(cls, part) for part in struct_of(cls).parts}
    built = st.builds(cls, **found)
    rule = _RULES.get(cls)
    return built if rule is None else rule(built)


def _values_of(cls: type, part: Part) -> _Strategy:
    key = (cls, part.name)
    entries = _OF_FIELDS[key] if key in _OF_FIELDS else _entries_of(part)
    if part.repeated:
        size_max = max(part.num_min, min(part.num_max, ENTRIES_MAX))
        lists = st.lists(entries, min_size=part.num_min, max_size=size_max, unique_by=_key_of(part))
        entries = lists.map(tuple)
    return st.none() | entries if part.optional else entries


def _entries_of(part: Part) -> _Strategy:
    allowed = part.allowed
    if part.struct is not None:
        if part.is_plain:
            return objects_of(part.struct.cls).map(tuple)
        return _FORMS[part.form] if part.form is not None else objects_of(part.struct.cls)
    if allowed is None:
        is_enum = issubclass(part.of, Enum)
        return st.sampled_from(part.of) if is_enum else st.booleans()
    if allowed.low is not None and allowed.high is not None:
        if part.of is int:
            return st.integers(int(allowed.low), int(allowed.high))
        return st.floats(allowed.low, allowed.high, allow_nan=False)
    return _OF_LIMITS[id(allowed)]


def _key_of(part: Part) -> Callable[[Any], Any] | None:
    """Return what of an entry may not come twice."""
    if not part.unique:
        return None if part.unique is None else lambda entry: entry
    if not part.is_plain:
        return attrgetter(*part.unique)
    assert part.struct is not None
    return itemgetter(*([each.name for each in part.struct.parts].index(by) for by in part.unique))


# --- rules about several fields ---------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> View:
    num_stages = draw(st.integers(1, 5))
    ids = draw(st.lists(node_ids, min_size=1, max_size=6, unique=True))
    num_data = draw(st.integers(1, len(ids))) if num_stages > 1 else len(ids)
    versions = st.integers(0, limits.ORDINAL_MAX)
    members = [
        Member(
            node_id=node_id,
            address=draw(addresses),
            role=Role.DATA if i < num_data else Role.RELAY,
            stage_index=0 if i < num_data else draw(st.integers(1, num_stages - 1)),
            capacity=draw(st.integers(1 if i < num_data else 0, 65536)),
            data_node_index=i if i < num_data else -1,
            since_iteration=draw(versions),
            name=draw(names),
            duty=draw(st.sampled_from(Duty)) if i >= num_data else Duty.NONE,
            reach=draw(st.sampled_from(Reach)) if i >= num_data else Reach.PASSES_ON,
        )
        for i, node_id in enumerate(ids)
    ]
    term = draw(versions)
    return View.of(members, version=draw(versions), leader=ids[0], term=term, num_stages=num_stages)


@st.composite
def _view_changes(draw: st.DrawFn, *, electors: bool = True) -> ViewChange:
    nodes = draw(st.lists(node_ids, max_size=3, unique=True))
    new = draw(views()).members
    gone = tuple(node for node in nodes if node not in {m.node_id for m in new})
    told = draw(st.none() | objects_of(ElectorChange)) if electors else None
    base, result = draw(st.lists(hashes, min_size=2, max_size=2, unique=True))
    return ViewChange(base, result, gone, new, told)


@st.composite
def _opens(draw: st.DrawFn, built: st.SearchStrategy[m.Open]) -> m.Open:
    """Openings with a whole view, or with a change."""
    message = draw(built)
    if message.change is None:
        return message
    told = replace(message.opening, view=message.opening.view.outline, electors=())
    return replace(message, opening=told)


@st.composite
def _mends(draw: st.DrawFn, built: st.SearchStrategy[m.Mend]) -> m.Mend:
    message, change = draw(built), draw(st.none() | _view_changes(electors=False))
    view = message.view if change is None else message.view.outline
    return replace(message, view=view, change=change)


def _elector_changes(_built: _Strategy) -> _Strategy:
    ids = st.lists(node_ids, min_size=1, max_size=6, unique=True)
    return ids.map(lambda ids: ElectorChange(ids[0], tuple(ids[1:3]), tuple(ids[3:])))


def _openings(built: st.SearchStrategy[Opening]) -> st.SearchStrategy[Opening]:
    def in_order(opening: Opening) -> Opening:
        marks = {mark.iteration: mark for mark in opening.marks}
        return replace(opening, marks=tuple(marks[at] for at in sorted(marks)))

    return built.map(in_order)


@st.composite
def _begun_rounds(draw: st.DrawFn, built: st.SearchStrategy[BeginRound]) -> BeginRound:
    """Give each of the roster a weight."""
    begun = draw(built)
    num = len(begun.roster)
    weights = draw(st.lists(st.integers(0, limits.COUNT_MAX), min_size=num, max_size=num))
    digests = draw(st.lists(st.integers(0, limits.NUMBER_MAX), min_size=num, max_size=num))
    rows, others = draw(st.integers(1, num)), {*begun.listeners} - {*begun.roster}
    return replace(
        begun,
        weights=tuple(weights),
        digests=tuple(digests),
        num_rows=rows,
        listeners=tuple(sorted(others)),
    )


def _holdings(built: st.SearchStrategy[Holding]) -> st.SearchStrategy[Holding]:
    """Return what a worker has of a lost server's microbatches, each in one list."""

    def apart(holding: Holding) -> Holding:
        made, folding = {*holding.made}, {*holding.folding} - {*holding.made}
        folded = {*holding.folded} - made - folding
        return replace(
            holding, made=(*sorted(made),), folding=(*sorted(folding),), folded=(*sorted(folded),)
        )

    return built.map(apart)


@st.composite
def _settled_flows(draw: st.DrawFn, built: st.SearchStrategy[SettledFlow]) -> SettledFlow:
    flow = draw(built)
    num = len(flow.path) + 1
    costs = draw(st.lists(st.floats(0, LINK_COST_MAX), min_size=num, max_size=num))
    return replace(flow, costs=tuple(costs))


@st.composite
def _walks(draw: st.DrawFn) -> Walk:
    places = st.tuples(node_ids, st.booleans())
    on_it: list[Place] = draw(st.lists(places, min_size=1, max_size=MAX_STEPS, unique=True))
    steps = st.floats(-1e110, 1e110) | st.floats(-10, 10)
    costs = [0.0]
    for _ in on_it[1:]:
        costs.append(costs[-1] + draw(steps))
    return Walk(tuple(on_it), tuple(costs), draw(st.integers(1, 65536)))


@st.composite
def _claim_lists(draw: st.DrawFn) -> tuple[tuple[Hop, ...], ...]:
    """Claims share hops, as they do where they meet."""
    hops = st.lists(objects_of(Hop), min_size=1, max_size=3, unique_by=lambda hop: hop.node_id)
    pool = draw(hops)
    claims = st.lists(st.sampled_from(pool), min_size=1, unique_by=lambda hop: hop.node_id)
    return tuple(draw(st.lists(claims.map(tuple) | hops.map(tuple), max_size=4)))


_FORMS: dict[Any, _Strategy] = {WalkSteps: _walks(), ClaimTable: _claim_lists()}
_RULES: dict[type, Callable[[Any], _Strategy]] = {
    View: lambda _built: views(),
    Member: lambda _built: views().map(lambda view: view.members[-1]),
    ViewChange: lambda _built: _view_changes(),
    ElectorChange: _elector_changes,
    Opening: _openings,
    m.Open: _opens,
    m.Mend: _mends,
    BeginRound: _begun_rounds,
    Holding: _holdings,
    SettledFlow: _settled_flows,
    Average: lambda built: built.map(
        lambda average: replace(average, part=average.part % max(average.num_parts, 1))
    ),
}
