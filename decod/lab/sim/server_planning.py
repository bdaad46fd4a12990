"""The stages that decod's planner chooses for the instances of the paper on parameter servers."""

from dataclasses import replace

from decod.ids import NodeId
from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem, TrainingWork
from decod.lab.planner.servers.servers_layout import ServersLayout
from decod.lab.planner.servers.servers_search import plan_layout
from decod.lab.sim.server_instances import Allocation, Instance
from decod.sim.kernel import seeded

HOME = NodeId("home")
_FREE_BYTES_PER_S = 1e15
_EVALUATIONS = 6000
"""Enough for 16 hosts. The default is for 200."""


def problem_of(instance: Instance, *, delay: int) -> TrainingProblem:
    """Return what the planner knows of an instance. The data node costs nothing."""
    model = instance.model
    names = [HOME, *(host.name for host in instance.hosts)]
    hosts = [_host(HOME, HostKind.DATA, 0.0, None)]
    for host in instance.hosts:
        kind = HostKind.RELIABLE if host.reliable else HostKind.UNRELIABLE
        speed = 1 / (host.forward_s + host.backward_s)
        known = _host(NodeId(host.name), kind, speed, instance.num_layers_max(host))
        hosts.append(replace(known, lost_ratio=host.disconnect_ratio))
    rows = [[instance.links.get((begin, end)) for end in names] for begin in names]
    return TrainingProblem(
        hosts,
        [[spec.latency_s if spec is not None else 0.0 for spec in row] for row in rows],
        [
            [spec.bandwidth_bytes_per_s if spec is not None else _FREE_BYTES_PER_S for spec in row]
            for row in rows
        ],
        TrainingWork(
            num_layers=model.num_layers,
            num_microbatches=model.num_microbatches,
            activation_bytes=model.activation_bytes,
            layer_bytes=model.layer_bytes / (model.num_layers if model.shares_layers else 1),
            delay=delay,
        ),
    )


def _host(host_id: NodeId, kind: HostKind, speed: float, num_layers: int | None) -> TrainingHost:
    return TrainingHost(
        host_id=host_id,
        kind=kind,
        speed_layers_per_s=speed,
        uplink_bytes_per_s=_FREE_BYTES_PER_S,
        downlink_bytes_per_s=_FREE_BYTES_PER_S,
        num_layers_max=num_layers,
    )


def planned_layout(instance: Instance, *, delay: int = 1) -> ServersLayout:
    """Return the layout that decod's planner chooses."""
    rng = seeded(instance.seed, "plan", instance.name)
    layout = plan_layout(problem_of(instance, delay=delay), rng, evaluations=_EVALUATIONS)
    assert layout is not None, f"{instance.name}: no layout is possible"
    return layout


def allocation_of(layout: ServersLayout) -> Allocation:
    """Return the hosts and layers of a layout's stages. Hosts in no stage are idle."""
    stages = tuple((*stage.servers, *stage.clients) for stage in layout.stages)
    return Allocation(stages, tuple(stage.num_layers for stage in layout.stages))
