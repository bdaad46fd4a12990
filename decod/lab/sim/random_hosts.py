"""Random hosts and links for the planners of the servers organisation.

Used by tests and by `scripts/bench_planner_servers.py`. Hosts stand in regions, as volunteers do:
links within a region are faster than links between two. A host's access to the network limits all
its links together.
"""

import random

from decod.ids import NodeId
from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem, TrainingWork

_REGION_LATENCY_S = (0.002, 0.02)
_WORLD_LATENCY_S = (0.03, 0.15)
_ACCESS_BYTES_PER_S = (2.5e6, 125e6)
"""20 Mbit/s to 1 Gbit/s."""


def draw_problem(
    rng: random.Random,
    *,
    num_reliable: int,
    num_unreliable: int,
    num_layers: int,
    num_data: int = 1,
) -> TrainingProblem:
    """Return a problem with hosts in three regions.

    A third of the reliable hosts have no device. Two thirds of the unreliable ones have no
    memory for all layers. Uplinks are slower than downlinks.
    """
    kinds = [HostKind.DATA] * num_data + [HostKind.RELIABLE] * num_reliable
    kinds += [HostKind.UNRELIABLE] * num_unreliable
    names = {HostKind.DATA: "data", HostKind.RELIABLE: "server", HostKind.UNRELIABLE: "client"}
    regions = [rng.randrange(3) for _ in kinds]
    hosts = []
    for index, kind in enumerate(kinds):
        idle = kind == HostKind.DATA or (kind == HostKind.RELIABLE and rng.random() < 1 / 3)
        small = kind == HostKind.UNRELIABLE and rng.random() < 2 / 3
        limit = rng.randint(1, max(1, num_layers * 2 // 3)) if small else None
        access = _log_uniform(rng, *_ACCESS_BYTES_PER_S)
        hosts.append(
            TrainingHost(
                host_id=NodeId(f"{names[kind]}-{index}"),
                kind=kind,
                speed_layers_per_s=0.0 if idle else _log_uniform(rng, 4.0, 64.0),
                uplink_bytes_per_s=access * rng.uniform(0.3, 1.0),
                downlink_bytes_per_s=access,
                num_layers_max=limit,
            )
        )
    latencies, bandwidths = _draw_links(rng, hosts, regions)
    work = TrainingWork(
        num_layers=num_layers,
        num_microbatches=rng.choice((16, 32, 64)),
        activation_bytes=_log_uniform(rng, 0.1e6, 2e6),
        layer_bytes=_log_uniform(rng, 1e6, 16e6),
        delay=rng.randrange(2),
        head_s=rng.uniform(0.0, 0.05),
        step_s=rng.uniform(0.0, 0.05),
    )
    return TrainingProblem(hosts, latencies, bandwidths, work)


def _draw_links(
    rng: random.Random, hosts: list[TrainingHost], regions: list[int]
) -> tuple[list[list[float]], list[list[float]]]:
    num = len(hosts)
    latencies = [[0.0] * num for _ in range(num)]
    bandwidths = [[0.0] * num for _ in range(num)]
    for i in range(num):
        for j in range(num):
            if i == j:
                continue
            near = regions[i] == regions[j]
            latency = rng.uniform(*(_REGION_LATENCY_S if near else _WORLD_LATENCY_S))
            latencies[i][j] = latencies[j][i] if j < i else latency
            # Connections across the world seldom fill the access of both hosts.
            access = min(hosts[i].uplink_bytes_per_s, hosts[j].downlink_bytes_per_s)
            bandwidths[i][j] = access * (1.0 if near else rng.uniform(0.2, 1.0))
    return latencies, bandwidths


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def draw_small_problem(rng: random.Random) -> TrainingProblem:
    """Return a problem that is small enough for the exact search."""
    return draw_problem(
        rng,
        num_reliable=rng.randint(2, 4),
        num_unreliable=rng.randint(1, 3),
        num_layers=rng.randint(4, 8),
    )
