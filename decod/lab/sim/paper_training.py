"""GWTF's comparison with an arrangement that is laid out beforehand: training in virtual time.

The setting has 3 data nodes, and 15 relays in 5 stages; with the data nodes' stage that makes the
paper's 6 stages of 3 nodes. Every node holds 4 microbatches. Every data node injects 4 per
iteration.

The paper leaves some points open. The choices here:

- Hosts are drawn onto 10 locations. Links within a location have 1 ms and 500 Mbit/s, the most
  that the paper gives between two. Links between two locations have U(10, 150) ms and U(50, 500)
  Mbit/s, the same in both directions. Every ordered pair of hosts has a link of its own.
- An activation is 4 x 512 tokens of width 1024 in float32, times 32: 256 MiB. The paper divides the
  bandwidth instead, which would also slow the averaging of gradients. The 3 blocks of a relay have
  150 MB of gradients.
- A relay's forward pass takes 0.05 s, and backward twice that. This hardly matters next to 4 to
  43 s for each activation.
- Table VI has no unit. The text says seconds, but the figures are those of table II, in minutes.
- The paper's data nodes commit 9.0 and 8.08 microbatches per iteration. It does not say what keeps
  them from the 12 that have room.

Source: GWTF, section VI, "Optimality" and table VI.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

from decod.lab.sim.layouts import ROUTING_NAMES, with_routing
from decod.lab.sim.paper import Progress, Row, make_row
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import seeded
from decod.sim.meter import mean_figures
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import HostSpec, Scenario
from decod.sim.simulation import Simulation

NUM_ITERATIONS = 25
"""Number of iterations over which the paper's other training tests take the mean."""

_NUM_DATA_NODES = 3
_NUM_RELAY_STAGES = 5
_NUM_PER_STAGE = 3
_CAPACITY = 4
_NUM_LOCATIONS = 10
ACTIVATION_BYTES = 32 * 4 * 512 * 1024 * 4
PARAMETER_BYTES = 150_000_000
"""Size of the gradients of a relay's three blocks."""

_MBIT_BYTES = 125_000.0

HOME = LinkSpec(0.001, 500 * _MBIT_BYTES)
"""A link within a location."""

_PATIENCE_S = 3600.0
"""Four activations in a row take three minutes on the slowest link."""

_PAPER: Mapping[tuple[str, str], float] = {
    ("fixed", "time_per_microbatch_min"): 0.44,
    ("flow", "time_per_microbatch_min"): 0.51,
    ("gwtf", "time_per_microbatch_min"): 0.51,
    ("fixed", "microbatches_per_iteration"): 9.0,
    ("flow", "microbatches_per_iteration"): 8.08,
    ("gwtf", "microbatches_per_iteration"): 8.08,
}


def training_tests(
    num_seeds: int,
    progress: Progress,
    *,
    routings: Iterable[str] = ROUTING_NAMES,
    num_iterations: int = NUM_ITERATIONS,
) -> list[Row]:
    """Return table VI: the time and number of microbatches, by routing.

    Each seed gives one value: the mean over its iterations, including the first, in which `flow`
    has measured nothing yet. The ratio compares with `fixed` on the same links, if `fixed` is among
    the routings.
    """
    rows: list[Row] = []
    base: list[float] = []
    for routing in sorted(routings, key=lambda name: name != "fixed"):
        times_min, numbers = [], []
        for seed in range(num_seeds):
            progress(f"table VI, {routing}, seed {seed}")
            scenario = replace(table6(seed, routing), num_iterations=num_iterations)
            simulation = Simulation(scenario)
            simulation.run()
            means = mean_figures(simulation.meter.figures)
            times_min.append((means["time_per_microbatch_s"] or 0.0) / 60)
            numbers.append(means["microbatches"] or 0.0)
        if routing == "fixed":
            base = times_min
        values = {
            "time_per_microbatch_min": times_min,
            "time_ratio_to_fixed": [t / b for t, b in zip(times_min, base, strict=False) if b],
            "microbatches_per_iteration": numbers,
        }
        rows += [
            make_row("VI", routing, metric, found, _PAPER.get((routing, metric)))
            for metric, found in values.items()
            if found
        ]
    return rows


def table6(seed: int, routing: str) -> Scenario:
    """Return the setting of table VI, on links drawn from a seed. All routings have the same."""
    rng = seeded(seed, "table 6")
    profile = ComputeProfile(
        forward_s=0.05,
        embed_s=0.02,
        head_s=0.05,
        jitter_ratio=0.0,
        activation_bytes=ACTIVATION_BYTES,
        parameter_bytes=PARAMETER_BYTES,
    )
    names = {f"data-{index + 1}": 0 for index in range(_NUM_DATA_NODES)}
    for stage_index in range(1, _NUM_RELAY_STAGES + 1):
        for index in range(_NUM_PER_STAGE):
            names[f"relay-{stage_index}-{index + 1}"] = stage_index
    scenario = Scenario(
        seed=seed,
        batch=BatchConfig(num_data_nodes=_NUM_DATA_NODES, num_microbatches=_CAPACITY),
        num_relays=len(names) - _NUM_DATA_NODES,
        stages=StagesConfig(num_relay_stages=_NUM_RELAY_STAGES),
        num_iterations=NUM_ITERATIONS,
        join_spread_s=0.0,
        duration_max_s=1e6,
        profile=profile,
        links=Links(HOME, draw_links(rng, list(names))),
        protocol=ProtocolConfig(
            min_data_nodes=_NUM_DATA_NODES,
            min_nodes_per_stage=_NUM_PER_STAGE,
            complete_timeout_s=_PATIENCE_S,
            iteration_timeout_s=_PATIENCE_S,
            heartbeat_interval_s=10.0,
            heartbeat_timeout_s=60.0,
            utilisation_interval_s=60.0,
        ),
        hosts=tuple(
            HostSpec(name=name, stage_index=stage_index, capacity=_CAPACITY, profile=profile)
            for name, stage_index in names.items()
        ),
    )
    return with_routing(scenario, routing)


def draw_links(rng: random.Random, names: list[str]) -> dict[tuple[str, str], LinkSpec]:
    """Return the links between hosts that are drawn onto locations. Within a location: `HOME`."""
    located = {name: rng.randrange(_NUM_LOCATIONS) for name in names}
    between: dict[tuple[int, int], LinkSpec] = {}
    for here in range(_NUM_LOCATIONS):
        for there in range(here):
            spec = LinkSpec(rng.uniform(0.01, 0.15), rng.uniform(50, 500) * _MBIT_BYTES)
            between[here, there] = between[there, here] = spec
    return {
        (begin, end): between[located[begin], located[end]]
        for begin in names
        for end in names
        if located[begin] != located[end]
    }
