"""GWTF's comparison with SWARM, where relays crash and come back: tables II and III.

The setting has 2 data nodes, and 16 relays in 5 stages; with the data nodes' stage that makes the
paper's 6. Each data node pushes 4 microbatches per iteration. Relays hold 4 microbatches
("homogeneous") or 1 to 3 ("heterogeneous"). In each iteration, each live relay crashes and each
lost relay comes back with a chance of 0, 10 or 20 % (`decod.sim.scenario`). A crashed host
vanishes: it refuses nothing, and only timeouts reveal the crash.

Four policies meet the same hosts, links and losses:

- `flow`: decod, with the machines of real nodes, their messages and timeouts. The iteration itself
  mends the work of a lost relay.
- `restart`: SWARM as GWTF describes it. A pipeline that breaks in the backward pass begins again.
- `closest`: the same, with the wiring of GWTF's baseline: to the closest node.
- `stateless`: SWARM's public code. A trainer calls another server.

The last three are cost models. Wherever the sources are silent, the models are generous:
`decod.lab.sim.swarm` and `decod.lab.sim.cluster` say how.

The paper leaves some points open. The choices here:

- Links, locations and activations are those of table VI (`decod.lab.sim.paper_training`):
  U(50, 500) Mbit/s between 10 locations. Activations are 32 times as large, instead of links 32
  times as slow. `keep_max_bytes`, the activations that a node may keep, is also 32 times its
  default.
- The model of table III differs only in its blocks: the paper calls it a plain MLP, which here
  takes 0.04 s instead of 0.05 s. Both tables thus ask nearly the same question, on other links.
- Timeouts and the intervals of the search for flows fit iterations of minutes. Heartbeats are
  those of every run.
- A microbatch counts as committed if every stage's step contains its gradient. Time per microbatch
  is the mean over all iterations, including the first, in which `flow` has measured no link yet.
- The paper's figures are in minutes. Communication and wasted compute are sums over all nodes here.
  The paper does not say how it adds them up, so compare ratios.

Source: GWTF, section VI, "Node Crashes", tables II and III.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from decod.lab.sim.cluster import Cluster, Policy
from decod.lab.sim.paper import Progress, Row, make_row
from decod.lab.sim.paper_training import ACTIVATION_BYTES, HOME, PARAMETER_BYTES, draw_links
from decod.lab.sim.swarm import Closest, Pipelines, Trainers
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import seeded
from decod.sim.meter import IterationFigures
from decod.sim.network import Links
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import HostSpec, Scenario, draw_churn
from decod.sim.simulation import Simulation

NUM_ITERATIONS = 25

_NUM_DATA_NODES = 2
_NUM_RELAYS = 16
_NUM_RELAY_STAGES = 5
_SHARE = 4
_ENLARGED = 32
"""Factor by which activations are larger than in the paper."""

SWARMS: Mapping[str, Callable[[Cluster], Policy]] = {
    "restart": Pipelines,
    "closest": Closest,
    "stateless": Trainers,
}
"""Readings of SWARM, by policy name."""

HOMOGENEOUS, HETEROGENEOUS = (4, 4), (1, 3)

_FORWARD_S: Mapping[int, float] = {2: 0.05, 3: 0.04}
"""Forward time of a relay's three blocks, by table."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of a table, and the paper's figures for it: GWTF's, then SWARM's."""

    capacities: tuple[int, int]
    """The least and the largest capacity of a relay."""
    churn_ratio: float
    time_min: tuple[float, float]
    microbatches: tuple[float, float]
    communication_min: tuple[float, float] | None = None
    wasted_min: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        kind = "homogeneous" if self.capacities == HOMOGENEOUS else "heterogeneous"
        return f"{kind} {self.churn_ratio:.0%}"


TABLES: Mapping[int, Sequence[Cell]] = {
    2: (
        Cell(HOMOGENEOUS, 0.0, (0.58, 0.53), (7.16, 8.0), (4.2, 6.07), (0.03, 0.27)),
        Cell(HOMOGENEOUS, 0.1, (1.01, 1.26), (5.8, 4.64), (7.76, 12.23), (0.2, 0.75)),
        Cell(HOMOGENEOUS, 0.2, (1.17, 1.76), (5.72, 6.1), (4.57, 17.74), (0.0, 1.75)),
        Cell(HETEROGENEOUS, 0.0, (1.15, 1.59), (3.6, 2.96), (3.65, 10.55), (0.0, 0.57)),
        Cell(HETEROGENEOUS, 0.1, (2.45, 4.53), (2.08, 1.56), (2.62, 3.95), (0.1, 0.33)),
        Cell(HETEROGENEOUS, 0.2, (3.47, 5.36), (2.12, 1.72), (4.28, 7.18), (0.03, 0.33)),
    ),
    3: (
        Cell(HOMOGENEOUS, 0.0, (0.37, 0.68), (8.0, 8.0)),
        Cell(HOMOGENEOUS, 0.1, (0.99, 1.77), (6.39, 4.52)),
        Cell(HOMOGENEOUS, 0.2, (1.32, 1.92), (6.04, 4.35)),
        Cell(HETEROGENEOUS, 0.0, (1.18, 1.4), (4.0, 2.96)),
        Cell(HETEROGENEOUS, 0.1, (2.63, 3.5), (2.26, 1.78)),
        Cell(HETEROGENEOUS, 0.2, (3.16, 5.3), (2.39, 1.83)),
    ),
}


def churn_tests(
    table: int,
    num_seeds: int,
    progress: Progress,
    *,
    cells: Iterable[int] | None = None,
    num_iterations: int = NUM_ITERATIONS,
) -> list[Row]:
    """Return the figures of a table's cells, by policy.

    Each figure has one value per seed. Ratios compare `flow` with SWARM on the same instance.

    Args:
        table: 2 or 3.
        num_seeds: Number of runs per cell and policy.
        progress: Called before each run.
        cells: Indexes of the cells. None: all.
        num_iterations: Length of a run.
    """
    rows: list[Row] = []
    chosen = TABLES[table] if cells is None else [TABLES[table][index] for index in cells]
    for cell in chosen:
        runs: dict[str, list[dict[str, float]]] = {}
        for seed in range(num_seeds):
            progress(f"table {'I' * table}, {cell.name}, seed {seed}")
            scenario = churn_scenario(table, cell, seed, num_iterations=num_iterations)
            for policy, figures in _run_all(scenario).items():
                runs.setdefault(policy, []).append(_summary(figures))
        for policy, found in runs.items():
            printed = _printed(cell, 0 if policy == "flow" else 1)
            rows += [
                make_row(cell.name, policy, key, [v[key] for v in found], printed.get(key))
                for key in found[0]
            ]
        for policy in SWARMS:
            rows += _time_ratios(cell, policy, runs["flow"], runs[policy])
    return rows


def _run_all(scenario: Scenario) -> dict[str, list[IterationFigures]]:
    simulation = Simulation(scenario)
    simulation.run()
    baselines = {name: Cluster(scenario, policy).run() for name, policy in SWARMS.items()}
    return {"flow": simulation.meter.figures, **baselines}


def _summary(figures: Sequence[IterationFigures]) -> dict[str, float]:
    times_s = [f.time_per_microbatch_s for f in figures]
    wasted_s, useful_s = sum(f.wasted_s for f in figures), sum(f.useful_s for f in figures)
    return {
        "time_per_microbatch_min": statistics.mean(t for t in times_s if t is not None) / 60,
        "microbatches_per_iteration": statistics.mean(f.num_microbatches for f in figures),
        "communication_min": statistics.mean(f.communication_s for f in figures) / 60,
        "wasted_min": wasted_s / len(figures) / 60,
        "wasted_ratio": wasted_s / useful_s,
        "wasted_by_living_ratio": (wasted_s - sum(f.lost_s for f in figures)) / useful_s,
    }


def _time_ratios(
    cell: Cell, policy: str, ours: list[dict[str, float]], theirs: list[dict[str, float]]
) -> list[Row]:
    """Return `flow`'s time relative to SWARM's: within each instance, and as the paper prints it.

    The paper has only means over all instances. Its value therefore stands beside the ratio of the
    means.
    """
    key = "time_per_microbatch_min"
    times = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True)]
    ratios = [a / b for a, b in times]
    of_means = sum(a for a, _ in times) / sum(b for _, b in times)
    printed = round(cell.time_min[0] / cell.time_min[1], 3)
    return [
        make_row(cell.name, "flow", f"time_ratio_to_{policy}", ratios),
        make_row(cell.name, "flow", f"ratio_of_mean_times_to_{policy}", [of_means], printed),
    ]


def _printed(cell: Cell, index: int) -> dict[str, float]:
    """Return the paper's figures for GWTF (0) or SWARM (1)."""
    known = {
        "time_per_microbatch_min": cell.time_min,
        "microbatches_per_iteration": cell.microbatches,
        "communication_min": cell.communication_min,
        "wasted_min": cell.wasted_min,
    }
    return {key: both[index] for key, both in known.items() if both is not None}


def churn_scenario(
    table: int, cell: Cell, seed: int, *, num_iterations: int = NUM_ITERATIONS
) -> Scenario:
    """Return a cell's setting. All cells of a table with one seed have the same links."""
    rng = seeded(seed, "table", table)
    profile = ComputeProfile(
        forward_s=_FORWARD_S[table],
        embed_s=0.02,
        head_s=0.05,
        jitter_ratio=0.0,
        activation_bytes=ACTIVATION_BYTES,
        parameter_bytes=PARAMETER_BYTES,
    )
    names = {f"data-{index + 1}": 0 for index in range(_NUM_DATA_NODES)}
    relays = {f"relay-{i + 1}": i % _NUM_RELAY_STAGES + 1 for i in range(_NUM_RELAYS)}
    names.update(relays)
    links = Links(HOME, draw_links(rng, list(names)))
    churn = draw_churn(
        seeded(seed, "churn", table, cell.churn_ratio),
        relays,
        ratio=cell.churn_ratio,
        num_iterations=num_iterations,
    )
    return Scenario(
        seed=seed,
        batch=BatchConfig(num_data_nodes=_NUM_DATA_NODES, num_microbatches=_SHARE),
        num_relays=_NUM_RELAYS,
        stages=StagesConfig(num_relay_stages=_NUM_RELAY_STAGES),
        num_iterations=num_iterations,
        join_spread_s=0.0,
        duration_max_s=1e6,
        profile=profile,
        links=links,
        protocol=_PROTOCOL,
        churn=churn,
        hosts=tuple(
            HostSpec(
                name=name,
                stage_index=stage_index,
                capacity=rng.randint(*cell.capacities) if stage_index else _SHARE,
                profile=profile,
            )
            for name, stage_index in names.items()
        ),
    )


_PROTOCOL = ProtocolConfig(
    min_data_nodes=_NUM_DATA_NODES,
    min_nodes_per_stage=_NUM_RELAYS // _NUM_RELAY_STAGES,
    # Four activations in a row take three minutes on the slowest link.
    complete_timeout_s=600.0,
    iteration_timeout_s=3600.0,
    utilisation_interval_s=30.0,
    negotiation_interval_s=4.0,
    keep_max_bytes=_ENLARGED * ProtocolConfig().keep_max_bytes,
)
