"""What nodes say to each other. `decod.wire` turns these into protobuf and validates every field.

Each message is idempotent: it names what it belongs to (`scopes`), and a repeat changes nothing.
"""

from decod.protocol.core.messages import (
    audits,
    averaging,
    election,
    flows,
    forwarding,
    gwtf,
    links,
    membership,
    microbatches,
    negotiation,
    openings,
    replay,
    rounds,
    servers,
    utilisation,
)
from decod.protocol.core.messages.audits import Audit as Audit
from decod.protocol.core.messages.audits import AuditedPart as AuditedPart
from decod.protocol.core.messages.audits import AuditedPass as AuditedPass
from decod.protocol.core.messages.audits import AuditedShares as AuditedShares
from decod.protocol.core.messages.audits import AuditedTensor as AuditedTensor
from decod.protocol.core.messages.audits import AuditResult as AuditResult
from decod.protocol.core.messages.audits import StandOut as StandOut
from decod.protocol.core.messages.averaging import BeginAggregation as BeginAggregation
from decod.protocol.core.messages.averaging import Differs as Differs
from decod.protocol.core.messages.averaging import GradientNorm as GradientNorm
from decod.protocol.core.messages.averaging import GradientSquares as GradientSquares
from decod.protocol.core.messages.averaging import Ready as Ready
from decod.protocol.core.messages.averaging import ReducedPart as ReducedPart
from decod.protocol.core.messages.averaging import ReducePart as ReducePart
from decod.protocol.core.messages.election import ElectionMessage as ElectionMessage
from decod.protocol.core.messages.flows import FlowAnswer as FlowAnswer
from decod.protocol.core.messages.flows import FlowCost as FlowCost
from decod.protocol.core.messages.flows import RequestFlow as RequestFlow
from decod.protocol.core.messages.flows import Withdraw as Withdraw
from decod.protocol.core.messages.forwarding import Passed as Passed
from decod.protocol.core.messages.links import LinkProbe as LinkProbe
from decod.protocol.core.messages.links import LinkReport as LinkReport
from decod.protocol.core.messages.membership import NOT_FINITE as NOT_FINITE
from decod.protocol.core.messages.membership import OF_TENSORS as OF_TENSORS
from decod.protocol.core.messages.membership import SLOW as SLOW
from decod.protocol.core.messages.membership import STANDS_STILL as STANDS_STILL
from decod.protocol.core.messages.membership import TENSOR_REFUSED as TENSOR_REFUSED
from decod.protocol.core.messages.membership import TOO_SLOW as TOO_SLOW
from decod.protocol.core.messages.membership import Assign as Assign
from decod.protocol.core.messages.membership import Bans as Bans
from decod.protocol.core.messages.membership import Capacity as Capacity
from decod.protocol.core.messages.membership import CapacityAnswer as CapacityAnswer
from decod.protocol.core.messages.membership import CatchUp as CatchUp
from decod.protocol.core.messages.membership import Heartbeat as Heartbeat
from decod.protocol.core.messages.membership import Join as Join
from decod.protocol.core.messages.membership import Leave as Leave
from decod.protocol.core.messages.membership import Ping as Ping
from decod.protocol.core.messages.membership import Pong as Pong
from decod.protocol.core.messages.membership import Prepared as Prepared
from decod.protocol.core.messages.membership import Refuse as Refuse
from decod.protocol.core.messages.membership import Suspect as Suspect
from decod.protocol.core.messages.microbatches import BackwardGradient as BackwardGradient
from decod.protocol.core.messages.microbatches import CanTake as CanTake
from decod.protocol.core.messages.microbatches import Complete as Complete
from decod.protocol.core.messages.microbatches import Deny as Deny
from decod.protocol.core.messages.microbatches import ForwardActivation as ForwardActivation
from decod.protocol.core.messages.microbatches import Mended as Mended
from decod.protocol.core.messages.microbatches import Report as Report
from decod.protocol.core.messages.microbatches import Reroute as Reroute
from decod.protocol.core.messages.microbatches import Unusable as Unusable
from decod.protocol.core.messages.negotiation import RoutingMessage as RoutingMessage
from decod.protocol.core.messages.openings import Mend as Mend
from decod.protocol.core.messages.openings import Open as Open
from decod.protocol.core.messages.openings import Outcome as Outcome
from decod.protocol.core.messages.replay import Average as Average
from decod.protocol.core.messages.replay import FollowMessage as FollowMessage
from decod.protocol.core.messages.rounds import RoundMessage as RoundMessage
from decod.protocol.core.messages.scopes import Message as Message
from decod.protocol.core.messages.scopes import OfDataNodes as OfDataNodes
from decod.protocol.core.messages.scopes import WithTensor as WithTensor
from decod.protocol.core.messages.servers import ServersMessage as ServersMessage
from decod.protocol.core.messages.servers import StageActivation as StageActivation
from decod.protocol.core.messages.servers import StageGradient as StageGradient
from decod.protocol.core.messages.utilisation import NodeLoad as NodeLoad
from decod.protocol.core.messages.utilisation import UtilisationAnswer as UtilisationAnswer
from decod.protocol.core.messages.utilisation import UtilisationQuery as UtilisationQuery

_OF_DATACLASSES = "__dataclass_fields__"

MESSAGES: tuple[type[Message], ...] = tuple(
    kind
    for module in (
        membership,
        replay,
        links,
        flows,
        negotiation,
        gwtf,
        microbatches,
        averaging,
        audits,
        openings,
        utilisation,
        election,
        forwarding,
        servers,
        rounds,
    )
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and hasattr(kind, _OF_DATACLASSES)
    if kind.__module__ == module.__name__
)
"""All kinds of messages."""
