"""What nodes say to each other. `decod.wire` turns these into protobuf and validates every field.

Each message is idempotent: it names what it belongs to (`scopes`), and a repeat changes nothing.
"""

from decod.protocol.core.messages import (
    audit_messages,
    averaging_messages,
    decision_messages,
    membership_messages,
    microbatch_messages,
    round_messages,
    routing_messages,
    scopes,
    server_messages,
)
from decod.protocol.core.messages.audit_messages import Audit as Audit
from decod.protocol.core.messages.audit_messages import AuditedPart as AuditedPart
from decod.protocol.core.messages.audit_messages import AuditedPass as AuditedPass
from decod.protocol.core.messages.audit_messages import AuditedShares as AuditedShares
from decod.protocol.core.messages.audit_messages import AuditedTensor as AuditedTensor
from decod.protocol.core.messages.audit_messages import AuditResult as AuditResult
from decod.protocol.core.messages.audit_messages import StandOut as StandOut
from decod.protocol.core.messages.averaging_messages import BeginAggregation as BeginAggregation
from decod.protocol.core.messages.averaging_messages import Differs as Differs
from decod.protocol.core.messages.averaging_messages import GradientNorm as GradientNorm
from decod.protocol.core.messages.averaging_messages import GradientSquares as GradientSquares
from decod.protocol.core.messages.averaging_messages import Ready as Ready
from decod.protocol.core.messages.averaging_messages import ReducedPart as ReducedPart
from decod.protocol.core.messages.averaging_messages import ReducePart as ReducePart
from decod.protocol.core.messages.decision_messages import ElectionMessage as ElectionMessage
from decod.protocol.core.messages.decision_messages import Mend as Mend
from decod.protocol.core.messages.decision_messages import NodeLoad as NodeLoad
from decod.protocol.core.messages.decision_messages import Open as Open
from decod.protocol.core.messages.decision_messages import Outcome as Outcome
from decod.protocol.core.messages.decision_messages import UtilisationAnswer as UtilisationAnswer
from decod.protocol.core.messages.decision_messages import UtilisationQuery as UtilisationQuery
from decod.protocol.core.messages.membership_messages import NOT_FINITE as NOT_FINITE
from decod.protocol.core.messages.membership_messages import OF_TENSORS as OF_TENSORS
from decod.protocol.core.messages.membership_messages import SLOW as SLOW
from decod.protocol.core.messages.membership_messages import STANDS_STILL as STANDS_STILL
from decod.protocol.core.messages.membership_messages import TENSOR_REFUSED as TENSOR_REFUSED
from decod.protocol.core.messages.membership_messages import TOO_SLOW as TOO_SLOW
from decod.protocol.core.messages.membership_messages import Assign as Assign
from decod.protocol.core.messages.membership_messages import Average as Average
from decod.protocol.core.messages.membership_messages import Bans as Bans
from decod.protocol.core.messages.membership_messages import Capacity as Capacity
from decod.protocol.core.messages.membership_messages import CapacityAnswer as CapacityAnswer
from decod.protocol.core.messages.membership_messages import CatchUp as CatchUp
from decod.protocol.core.messages.membership_messages import FollowMessage as FollowMessage
from decod.protocol.core.messages.membership_messages import Heartbeat as Heartbeat
from decod.protocol.core.messages.membership_messages import Join as Join
from decod.protocol.core.messages.membership_messages import Leave as Leave
from decod.protocol.core.messages.membership_messages import Ping as Ping
from decod.protocol.core.messages.membership_messages import Pong as Pong
from decod.protocol.core.messages.membership_messages import Prepared as Prepared
from decod.protocol.core.messages.membership_messages import Refuse as Refuse
from decod.protocol.core.messages.membership_messages import Suspect as Suspect
from decod.protocol.core.messages.microbatch_messages import BackwardGradient as BackwardGradient
from decod.protocol.core.messages.microbatch_messages import CanTake as CanTake
from decod.protocol.core.messages.microbatch_messages import Complete as Complete
from decod.protocol.core.messages.microbatch_messages import Deny as Deny
from decod.protocol.core.messages.microbatch_messages import (
    ForwardActivation as ForwardActivation,
)
from decod.protocol.core.messages.microbatch_messages import Mended as Mended
from decod.protocol.core.messages.microbatch_messages import Report as Report
from decod.protocol.core.messages.microbatch_messages import Reroute as Reroute
from decod.protocol.core.messages.microbatch_messages import Unusable as Unusable
from decod.protocol.core.messages.round_messages import RoundMessage as RoundMessage
from decod.protocol.core.messages.routing_messages import FlowAnswer as FlowAnswer
from decod.protocol.core.messages.routing_messages import FlowCost as FlowCost
from decod.protocol.core.messages.routing_messages import LinkProbe as LinkProbe
from decod.protocol.core.messages.routing_messages import LinkReport as LinkReport
from decod.protocol.core.messages.routing_messages import RequestFlow as RequestFlow
from decod.protocol.core.messages.routing_messages import RoutingMessage as RoutingMessage
from decod.protocol.core.messages.routing_messages import Withdraw as Withdraw
from decod.protocol.core.messages.scopes import Message as Message
from decod.protocol.core.messages.scopes import OfDataNodes as OfDataNodes
from decod.protocol.core.messages.scopes import Passed as Passed
from decod.protocol.core.messages.scopes import WithTensor as WithTensor
from decod.protocol.core.messages.server_messages import ServersMessage as ServersMessage
from decod.protocol.core.messages.server_messages import StageActivation as StageActivation
from decod.protocol.core.messages.server_messages import StageGradient as StageGradient

PASSES = (ForwardActivation, BackwardGradient, StageActivation, StageGradient)
"""Messages whose tensors go from stage to stage, for the passes of microbatches."""

_OF_DATACLASSES = "__dataclass_fields__"

MESSAGES: tuple[type[Message], ...] = tuple(
    kind
    for module in (
        membership_messages,
        routing_messages,
        microbatch_messages,
        averaging_messages,
        audit_messages,
        decision_messages,
        scopes,
        server_messages,
        round_messages,
    )
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and hasattr(kind, _OF_DATACLASSES)
    if kind.__module__ == module.__name__
)
"""All kinds of messages."""
