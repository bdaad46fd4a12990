"""What nodes say to each other in GWTF's own search (V-C). All of it belongs to one view version.

Its Request Flow is that of the first flows (`flow_messages`). The paper's queries are `PeerQuery`
and `PeerFlows`; its Request Change is `ExchangeHops`, its Request Redirect `RequestRedirect`. The
other messages are ours: the paper does not say how such a request is answered, and how a decision
reaches everybody who must know it. What was found is settled with the messages of
`negotiation_messages`.

A hop's number names it at its node, with the data node whose flow it is part of.
"""

from dataclasses import dataclass
from typing import Annotated

from decod.ids import NodeId
from decod.limits import AtMost, Count, Number, NumFlows, Ordinal, Unique
from decod.protocol.core.messages.scopes import OfView
from decod.protocol.core.residual import LinkCosts, LinkCostValue

PEER_FLOWS_MAX = 256
"""Most flows that a node tells of in one message."""


@dataclass(frozen=True, slots=True)
class NextHop:
    """Where a flow goes on."""

    peer: NodeId
    """The node."""
    number: Count
    """Of the hop at the peer: with the peer it names the link that the flow takes."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link costs, and how many flows take it: d(i, j) and f(i, j)."""

    cost: LinkCostValue
    """d(i, j)."""
    num_flows: NumFlows
    """f(i, j)."""


@dataclass(frozen=True, slots=True)
class PeerQuery(OfView):
    """Asks a node of the same stage about its flows."""

    view_version: Ordinal


@dataclass(frozen=True, slots=True)
class PeerFlow:
    """One flow at the sender."""

    number: Count
    """Of the hop."""
    version: Number
    """Grows with each change of this hop; a request says which version it saw."""
    data_node: NodeId
    """Where the flow ends."""
    upstream: NodeId
    """Where it comes from."""
    upstream_cost: LinkCostValue
    """Of the link that it comes along."""
    next: NextHop
    """Where it goes on."""
    open: bool
    """No change of it is under way."""


@dataclass(frozen=True, slots=True)
class PeerFlows(OfView):
    """The answer to PeerQuery."""

    view_version: Ordinal
    flows: Annotated[tuple[PeerFlow, ...], AtMost(PEER_FLOWS_MAX), Unique("data_node", "number")]
    """Those that come in and go on; at most `PEER_FLOWS_MAX`."""
    costs: LinkCosts
    """Of the sender's links to the next stage."""


@dataclass(frozen=True, slots=True)
class ExchangeHops(OfView):
    """Request Change: the sender and another node of its stage exchange the next hops of two flows.

    Goes to that node, which judges the change by what it sees, and to both next nodes, for each of
    which another node would be the one before.
    """

    view_version: Ordinal
    change_id: Number
    """Unique per sender within the view, for all its changes; a repeat gets the same answer."""
    data_node: NodeId
    """Where both flows end."""
    number: Count
    """Of the sender's hop."""
    next: NextHop
    """The sender's, before."""
    other: NodeId
    """The other node."""
    other_number: Count
    """Of its hop."""
    other_version: Number
    """What the sender saw. If the hop has changed since, the request is refused."""
    other_next: NextHop
    """The other node's, before."""
    less: LinkUse
    """The sender's link that the flow leaves."""
    more: LinkUse
    """The sender's link that it would take."""


@dataclass(frozen=True, slots=True)
class RequestRedirect(OfView):
    """Request Redirect: the sender offers to carry a flow in another node's place.

    Goes to that node, which judges the change, and to the nodes before and after it.
    """

    view_version: Ordinal
    change_id: Number
    """As in `ExchangeHops`."""
    data_node: NodeId
    """Where the flow ends."""
    number: Count
    """Of the sender's new hop."""
    other: NodeId
    """The node that carries it."""
    other_number: Count
    """Of its hop."""
    other_version: Number
    """As in `ExchangeHops`."""
    upstream: NodeId
    """Where the flow comes from."""
    next: NextHop
    """Where it goes on."""
    more: tuple[LinkUse, LinkUse]
    """The links that the flow would take, from `upstream` to the sender and on to `next`."""


@dataclass(frozen=True, slots=True)
class HopsAnswer(OfView):
    """Whether the sender takes part in a change. Repeated until it is told what became of it."""

    view_version: Ordinal
    change_id: Number
    """Of the request."""
    agreed: bool
    """False: refused, nothing is promised."""


@dataclass(frozen=True, slots=True)
class HopsDecision(OfView):
    """The one decision on a change, by the node that asked for it. It never changes."""

    view_version: Ordinal
    change_id: Number
    """Of the request."""
    made: bool
    """False: nothing has changed, promises are void."""


HopsRequest = ExchangeHops | RequestRedirect

GwtfMessage = PeerQuery | PeerFlows | ExchangeHops | RequestRedirect | HopsAnswer | HopsDecision
