"""The only file here that knows the core's constructor and its insides."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from decod.ids import FlowId, NodeId
from decod.protocol.admission import RunShape
from decod.protocol.effects import Effect
from decod.protocol.events import Event
from decod.protocol.flow import DataFlows, RelayFlows
from decod.protocol.identity import Identity, RunFacts
from decod.protocol.node import NodeMachine
from decod.protocol.params import ProtocolConfig
from decod.protocol.view import Role
from decod.sim.compute import ComputeProfile

_MANIFEST_SHA256 = "0" * 64
"""All nodes of a simulated run agree on what they train."""


class Machine(Protocol):
    """What the simulator needs of a core: `NodeMachine`, or a stand-in in a test."""

    @property
    def deadline_s(self) -> float | None: ...

    def start(self, now_s: float) -> list[Effect]: ...

    def step(self, now_s: float, event: Event) -> list[Effect]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """A node and the run that it wants to be part of."""

    name: str
    node_id: NodeId
    leader: NodeId
    data: bool
    """A data node, not a relay."""
    capacity: int
    num_data_nodes: int
    num_relay_stages: int
    num_microbatches: int
    """Of each data node, per iteration."""
    num_iterations: int


def build_machine(
    founding: Founding, config: ProtocolConfig, profile: ComputeProfile, *, rng: random.Random
) -> NodeMachine:
    """Return the core of one node."""
    identity = Identity(
        node_id=founding.node_id,
        address=f"{founding.name}:7700",
        role=Role.DATA if founding.data else Role.RELAY,
        capacity=founding.capacity,
        name=founding.name,
    )
    shape = RunShape(
        num_relay_stages=founding.num_relay_stages,
        num_data_nodes=founding.num_data_nodes,
        num_iterations=founding.num_iterations,
        manifest_sha256=_MANIFEST_SHA256,
    )
    facts = RunFacts(
        shape=shape,
        num_microbatches=founding.num_microbatches,
        activation_size_bytes=profile.activation_bytes,
    )
    compute_s = profile.embed_s + profile.head_s if founding.data else 1.5 * profile.forward_s
    return NodeMachine(
        identity, config, facts, leader=founding.leader, compute_s=compute_s, rng=rng
    )


@dataclass(frozen=True, slots=True)
class FlowTable:
    """A node's flows, as a checker sees them. Not copies: they change with the machine."""

    relay: bool
    version: tuple[int, int]
    """Of the view, and which of its settlements is used: only equal ones fit together."""
    downstream: Mapping[FlowId, object]
    """Where each flow goes on to; see `next_hop`."""
    upstream: Mapping[FlowId, NodeId]
    """Where each flow with an inflow comes from."""
    unpaired: Collection[FlowId]
    """Outflows that wait for an inflow."""
    num_pending: int
    """Requests that may still bring a flow."""
    num_peers: int
    """Nodes of the adjacent stages that this node deals with."""
    flows: RelayFlows | DataFlows

    def next_hop(self, flow_id: FlowId) -> NodeId:
        """Return where a flow goes on to."""
        if isinstance(self.flows, RelayFlows):
            return self.flows.entries[flow_id].downstream
        return self.flows.complete[flow_id].peer


def flow_table(machine: object) -> FlowTable | None:
    """Return a node's flows; None if it has none yet, or is no real core."""
    # A wrapper that a test has put around the core shows it under the same name.
    core = getattr(machine, "wrapped", machine)
    if not isinstance(core, NodeMachine) or core.work.flows is None:
        return None
    flows, context = core.work.flows, core.context
    relay = isinstance(flows, RelayFlows)
    return FlowTable(
        relay=relay,
        version=(context.view.version, core.work.routing.epoch),
        downstream=flows.entries if isinstance(flows, RelayFlows) else flows.complete,
        upstream=flows.outflows.paired,
        unpaired=flows.outflows.unpaired,
        num_pending=flows.num_pending,
        num_peers=len(context.previous) + len(context.next),
        flows=flows,
    )
