"""Carriers of members, views and what changes in them: a part of `codec`'s table."""

from decod.protocol.core.view import Duty, Member, Reach, Role, View, fault_of
from decod.protocol.core.view_change import ElectorChange, ViewChange
from decod.wire import fields as f
from decod.wire import validate
from decod.wire.v1 import control_pb2 as pb


def _verify_member(member: Member) -> None:
    if (member.role is Role.DATA) != (member.stage_index == 0):
        allowed = "0 for data nodes and only for them"
        raise validate.malformed("stage_index", member.stage_index, allowed=allowed)
    if (member.role is Role.DATA) != (member.data_node_index >= 0):
        allowed = "-1 for relays and only for them"
        raise validate.malformed("data_node_index", member.data_node_index, allowed=allowed)
    if member.duty is not Duty.NONE and member.role is not Role.RELAY:
        raise validate.malformed("duty", member.duty.value, allowed="none but for relays")
    if member.outbound and member.role is Role.DATA:
        raise validate.malformed("reach", member.reach.value, allowed="not for data nodes")


def _verify_view(view: View) -> None:
    """Check a view's rules, unless it is one without members, which a change goes with."""
    if view.members and (fault := fault_of(view)) is not None:
        raise validate.malformed(fault.field, fault.value, allowed=fault.allowed)


def _verify_change(change: ViewChange) -> None:
    nodes = [*change.gone, *(member.node_id for member in change.changed)]
    if len(set(nodes)) != len(nodes):
        allowed = "each node once, gone or changed"
        raise validate.malformed("changed", "a node twice", allowed=allowed)
    if change.base == change.result and nodes:
        raise validate.malformed("result", change.result, allowed="another hash than base's")


def _verify_electors(change: ElectorChange) -> None:
    validate.unique("former", (*change.without_vote, *change.former))
    if change.first in change.without_vote:
        raise validate.malformed("first", change.first, allowed="an elector")


def verify_told(view: View, change: ViewChange | None) -> None:
    """Check that a view is told whole or as a change, and not both."""
    if view.members and change is not None:
        raise validate.malformed("members", "given", allowed="none beside a change of the view")
    if not view.members and change is None:
        raise validate.malformed("members", "0 entries", allowed="1 entry or a change of the view")


ROLE = f.Choice({Role.DATA: pb.ROLE_DATA, Role.RELAY: pb.ROLE_RELAY, Role.CLIENT: pb.ROLE_CLIENT})
DUTY = f.Choice(
    {
        Duty.NONE: pb.DUTY_NONE,
        Duty.FRONTAL: pb.DUTY_FRONTAL,
        Duty.BACKWARD: pb.DUTY_BACKWARD,
    }
)
REACH = f.Choice(
    {
        Reach.DIALLED: pb.REACH_DIALLED,
        Reach.PASSES_ON: pb.REACH_PASSES_ON,
        Reach.OUTBOUND: pb.REACH_OUTBOUND,
    }
)
MEMBER = f.Struct(
    Member,
    {
        "node_id": f.NODE_ID,
        "address": f.ADDRESS,
        "role": ROLE,
        "stage_index": f.STAGE,
        "capacity": f.USABLE_CAPACITY,
        "data_node_index": f.DATA_NODE_INDEX,
        "since_iteration": f.ITERATION,
        "name": f.NAME,
        "duty": DUTY,
        "reach": REACH,
    },
    _verify_member,
)
VIEW = f.Struct(
    View,
    {
        "version": f.ITERATION,
        "leader": f.NODE_ID,
        "term": f.ITERATION,
        "num_stages": f.NUM_STAGES,
        "members": f.Repeated(MEMBER, validate.MEMBERS_MAX),
    },
    _verify_view,
)
NODES = f.Scalars(validate.node_id, validate.MEMBERS_MAX, unique=True)
CHANGE = f.Optional(
    f.Struct(
        ViewChange,
        {
            "base": f.SHA256,
            "result": f.SHA256,
            "gone": NODES,
            "changed": f.Repeated(MEMBER, validate.MEMBERS_MAX),
            "electors": f.Optional(
                f.Struct(
                    ElectorChange,
                    {"first": f.NODE_ID, "without_vote": NODES, "former": NODES},
                    _verify_electors,
                )
            ),
        },
        _verify_change,
    )
)
