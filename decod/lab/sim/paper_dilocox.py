"""DiLoCoX's throughput, on modelled devices and links: figure 4 and table 1.

Each of the paper's nodes is a site of 8 devices: a data node and 7 relays, which make one pipeline
of 8 stages. Sites train on their own shares of the batch. The members of a stage average over
1 Gbit/s for each site and direction. The sizes of averages follow from the shapes of the model's
parameters.

Two numbers are fitted for each model:

- Tokens of an iteration (`Experiment.tokens_each`): all-reduce has the paper's throughput.
- Speed of the devices (`Experiment.peak_ratio`): DiLoCoX has the paper's throughput.

All other throughputs follow from them. The paper leaves some points open. The choices here:

- All 8 devices of a node share 1 Gbit/s, gradients are float32, and each node holds the whole model
  once. The paper counts like that in its section 2.4: 533.3 GB for 100 billion parameters in three
  clusters. It doesn't say how 107 billion parameters fit into 8 devices of 40 GB, so memory is not
  modelled. OpenDiLoCo therefore has a throughput at 107 B, too.
- OPT-1.3B has GPT-2's shapes. The "modified" Qwen1.5 is Qwen1.5-110B with 77 of its 80 blocks,
  which makes 107.1 billion parameters.
- DiLoCoX has rank 2,048 at both sizes. At 1.3 B that leaves every matrix whole, so `int4` alone
  compresses, as in the paper.
- Optimizer steps and compression take no time of their own: the fitted speed contains them.
- Rank and H stay at their first values. They would adapt after a window of 5 outer steps. The paper
  doesn't say how far they fall.
- "Without compression" still overlaps, and "without overlap" still compresses.
- Links between nodes have 1 ms; links inside a node have 200 GB/s.

To save time, one simulated iteration stands for many: see `NUM_LOCAL`.

Source: DiLoCoX (arXiv:2506.21263), section 4.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from decod.compression.plan import CompressionConfig, Method, Plan, make_plan
from decod.lab.sim.layouts import with_routing
from decod.lab.sim.paper import Progress, Row, make_row
from decod.model.shape import block_shapes, stage_shapes
from decod.run.model_config import Architecture, ModelConfig
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig, stage_blocks
from decod.run.training_config import BatchConfig
from decod.sim.network import Links, LinkSpec, Site
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import HostSpec, Scenario, sync_of
from decod.sim.simulation import Simulation

NUM_LOCAL = 5
"""Simulated iterations from one average to the next, if there are more than one. Each stands for
H / 5 of the paper's: its microbatches have so many times the tokens. The votes after the iterations
in between are left out. They take about 60 ms each at 1.3 B."""

_NUM_RELAY_STAGES = 7
_PEAK_FLOPS = 312e12
"""An A800 in bfloat16."""
_SITE_BYTES_PER_S = 125e6
_INSIDE = LinkSpec(latency_s=1e-5, bandwidth_bytes_per_s=200e9)
_BETWEEN = LinkSpec(latency_s=1e-3, bandwidth_bytes_per_s=_SITE_BYTES_PER_S)

_ITERATION_S = 4.0
"""About what an iteration takes in virtual time. Devices and links are all faster or slower by the
same factor, so heartbeats do not fill hours."""
_PATIENCE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingMethod:
    """A way to average."""

    compression: CompressionConfig
    every: int = 1
    """H: iterations from one average to the next."""
    overlap: bool = False


ALL_REDUCE = AveragingMethod(compression=CompressionConfig())
OPEN_DILOCO = AveragingMethod(compression=CompressionConfig(method=Method.FP16), every=500)
DILOCOX = AveragingMethod(
    compression=CompressionConfig(method=Method.LOWRANK_INT4, rank=2048),
    every=125,
    overlap=True,
)


def _cocktail(top_ratio: float) -> AveragingMethod:
    chosen = CompressionConfig(method=Method.COCKTAIL, random_ratio=0.1, top_ratio=top_ratio)
    return AveragingMethod(compression=chosen)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One model on its devices."""

    name: str
    model: ModelConfig
    num_nodes: int
    num_microbatches: int
    """Of a node and iteration."""
    tokens_each: int
    """Of a microbatch. Fitted to all-reduce."""
    peak_ratio: float
    """Share of its peak that a device reaches while it computes. Fitted to DiLoCoX."""

    @cached_property
    def stages(self) -> StagesConfig:
        """Return the cut, in which every stage has about as many blocks."""
        num = self.model.num_hidden_layers // (_NUM_RELAY_STAGES + 1)
        return StagesConfig(num_relay_stages=_NUM_RELAY_STAGES, num_first_blocks=num)

    @property
    def num_tokens(self) -> int:
        """Tokens of an iteration, over all nodes."""
        return self.num_nodes * self.num_microbatches * self.tokens_each

    def plan(self, stage_index: int, compression: CompressionConfig) -> Plan:
        """Return what a stage's averages send."""
        shapes = stage_shapes(self.model, self.stages, stage_index)
        return make_plan([*shapes.values()], compression)

    def forward_s(self, stage_index: int) -> float:
        """Return the time of a stage's blocks for a microbatch: 2 operations for each parameter."""
        blocks = stage_blocks(self.model, self.stages)[stage_index]
        num = sum(_num_elements(block_shapes(self.model, index)) for index in blocks)
        return 2 * num * self.tokens_each / (_PEAK_FLOPS * self.peak_ratio)

    @property
    def head_s(self) -> float:
        """Time of the head for a microbatch, forward and backward."""
        num = self.model.vocab_size * self.model.hidden_size
        return 6 * num * self.tokens_each / (_PEAK_FLOPS * self.peak_ratio)


def _num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


OPT = Experiment(
    name="1.3B",
    model=ModelConfig(
        model_type=Architecture.GPT2,
        vocab_size=50_272,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    num_nodes=2,
    num_microbatches=8,
    tokens_each=2048,
    peak_ratio=0.0695,
)
QWEN = Experiment(
    name="107B",
    model=ModelConfig(
        vocab_size=152_064,
        hidden_size=8192,
        intermediate_size=49_152,
        num_hidden_layers=77,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        attention_bias=True,
    ),
    num_nodes=20,
    num_microbatches=2,
    tokens_each=1690,
    peak_ratio=0.2105,
)


@dataclass(frozen=True, slots=True)
class Line:
    """A method in a figure or table, with the paper's results."""

    method: AveragingMethod
    tokens_per_s: float | None = None
    """None: the paper has no figure."""
    loss: float | None = None
    small_model_loss: float | None = None
    """Of the model with 271,008 parameters after 1,500 iterations, as
    docs/research/benchmarks.md has it:
    measured by scripts/bench_convergence.py, not here."""


FIGURE_4: Mapping[str, Mapping[str, Line]] = {
    OPT.name: {
        "all-reduce": Line(ALL_REDUCE, 745.0),
        "opendiloco": Line(OPEN_DILOCO),
        "cocktailsgd": Line(_cocktail(0.08), 16_161.0),
        "dilocox": Line(DILOCOX, 23_880.0),
    },
    QWEN.name: {
        "all-reduce": Line(ALL_REDUCE, 10.4),
        "opendiloco": Line(OPEN_DILOCO),
        "cocktailsgd": Line(_cocktail(0.04), 2_427.0),
        "dilocox": Line(DILOCOX, 3_728.0),
    },
}
TABLE_1: Mapping[str, Line] = {
    "dilocox": Line(DILOCOX, 3_728.0, 4.20, 2.011),
    "without overlap": Line(
        replace(DILOCOX, overlap=False),
        2_197.0,
        4.15,
        1.876,
    ),
    "without compression": Line(
        replace(DILOCOX, compression=ALL_REDUCE.compression), 1_168.0, 4.02, 1.992
    ),
    "all-reduce": Line(ALL_REDUCE, 10.4, 3.90, 1.784),
}


def figure4(
    num_seeds: int, progress: Progress, *, experiments: Iterable[Experiment] = (OPT, QWEN)
) -> list[Row]:
    """Return figure 4: the throughput of each model, by method."""
    rows = []
    for experiment in experiments:
        rows += _rows(experiment, FIGURE_4[experiment.name], num_seeds, progress)
    return rows


def table1(num_seeds: int, progress: Progress, *, experiment: Experiment = QWEN) -> list[Row]:
    """Return table 1: throughput, and loss of the small model, without parts of DiLoCoX."""
    return _rows(experiment, TABLE_1, num_seeds, progress)


def _rows(
    experiment: Experiment, lines: Mapping[str, Line], num_seeds: int, progress: Progress
) -> list[Row]:
    rows, setting = list[Row](), experiment.name
    for policy, line in lines.items():
        values = []
        for seed in range(num_seeds):
            progress(f"{setting}, {policy}, seed {seed}")
            values.append(tokens_per_s(experiment, line.method, seed=seed))
        rows.append(make_row(setting, policy, "tokens_per_s", values, line.tokens_per_s))
        if line.small_model_loss is not None:
            losses = [line.small_model_loss]
            rows.append(make_row(setting, policy, "small_model_loss", losses, line.loss))
    return rows


def scenario_of(
    experiment: Experiment, method: AveragingMethod, *, seed: int, num_local: int, pace: float
) -> Scenario:
    """Return a run of more than two outer steps.

    Args:
        experiment: The model and its devices.
        method: How they average.
        seed: Draws the nodes' ids.
        num_local: Simulated iterations from one average to the next.
        pace: How many times faster everything is.
    """
    stages = range(_NUM_RELAY_STAGES + 1)
    plans = [experiment.plan(stage_index, method.compression) for stage_index in stages]
    grouped = _grouped(experiment, method, num_local, pace)
    shared = ComputeProfile(
        optimizer_s=0.0,
        reduce_s=0.0,
        jitter_ratio=0.0,
        activation_bytes=2 * grouped.model.hidden_size * grouped.tokens_each,
        # The bound of I6 counts in sums that are as large as the largest stage's.
        parameter_bytes=max(4 * plan.num_elements for plan in plans),
    )
    hosts = [
        HostSpec(
            name=f"node{node}-{stage_index}",
            stage_index=stage_index,
            capacity=grouped.num_microbatches,
            profile=_profile(grouped, shared, stage_index, plans[stage_index]),
        )
        for stage_index in stages
        for node in range(grouped.num_nodes)
    ]
    sites = [
        tuple(f"node{node}-{stage_index}" for stage_index in stages)
        for node in range(grouped.num_nodes)
    ]
    scenario = Scenario(
        seed=seed,
        batch=BatchConfig(
            num_data_nodes=grouped.num_nodes, num_microbatches=grouped.num_microbatches
        ),
        num_relays=grouped.num_nodes * _NUM_RELAY_STAGES,
        stages=StagesConfig(num_relay_stages=_NUM_RELAY_STAGES),
        num_iterations=2 * num_local + 1,
        sync=sync_of(num_local, overlap=method.overlap, num_phases=len(plans[0].phases)),
        join_spread_s=0.0,
        duration_max_s=10_000.0,
        profile=shared,
        links=_links(sites, pace),
        protocol=_protocol(grouped.num_nodes),
        hosts=tuple(hosts),
    )
    return with_routing(scenario, "closest")


def _grouped(
    experiment: Experiment, method: AveragingMethod, num_local: int, pace: float
) -> Experiment:
    """Return an experiment with fewer and longer iterations, on faster devices."""
    assert method.every % num_local == 0
    tokens_each = experiment.tokens_each * method.every // num_local
    return replace(experiment, tokens_each=tokens_each, peak_ratio=experiment.peak_ratio * pace)


def _pace(experiment: Experiment, method: AveragingMethod, num_local: int) -> float:
    """Return a pace at which an iteration takes about `_ITERATION_S`."""
    grouped = _grouped(experiment, method, num_local, 1.0)
    stages = range(_NUM_RELAY_STAGES + 1)
    num_bytes = sum(grouped.plan(index, method.compression).num_bytes for index in stages)
    passes_s = 3 * sum(map(grouped.forward_s, stages)) + grouped.head_s
    return (passes_s + 2 * num_bytes / _SITE_BYTES_PER_S / num_local) / _ITERATION_S


def _profile(
    experiment: Experiment, shared: ComputeProfile, stage_index: int, plan: Plan
) -> ComputeProfile:
    """Return the times of a stage's device, and what its averages send."""
    forward_s = experiment.forward_s(stage_index)
    if stage_index:
        return replace(shared, plan=plan, forward_s=forward_s)
    return replace(shared, plan=plan, embed_s=forward_s, head_s=experiment.head_s)


def _links(sites: Sequence[tuple[str, ...]], pace: float) -> Links:
    inside, between = (
        LinkSpec(spec.latency_s / pace, spec.bandwidth_bytes_per_s * pace)
        for spec in (_INSIDE, _BETWEEN)
    )
    rate = between.bandwidth_bytes_per_s
    return Links(between, sites=tuple(Site(hosts, inside, rate, rate) for hosts in sites))


def _protocol(num_nodes: int) -> ProtocolConfig:
    """Return the protocol's numbers: nobody fails here, and waits are long."""
    return ProtocolConfig(
        min_data_nodes=num_nodes,
        min_nodes_per_stage=num_nodes,
        complete_timeout_s=_PATIENCE_S,
        iteration_timeout_s=_PATIENCE_S,
        heartbeat_interval_s=20.0,
        heartbeat_timeout_s=120.0,
        election_timeout_s=60.0,
        leader_timeout_s=600.0,
        utilisation_interval_s=_PATIENCE_S,
        snapshot_every_iterations=0,
    )


def tokens_per_s(
    experiment: Experiment, method: AveragingMethod, *, seed: int, num_local: int | None = None
) -> float:
    """Return the throughput over one outer step of a simulated run.

    That is the first, or the second if averages overlap: only then has one travelled.

    Args:
        experiment: The model and its devices.
        method: How they average.
        seed: Draws the nodes' ids.
        num_local: Simulated iterations from one average to the next. None: see `NUM_LOCAL`.
    """
    num_local = num_local or min(method.every, NUM_LOCAL)
    pace = _pace(experiment, method, num_local)
    scenario = scenario_of(experiment, method, seed=seed, num_local=num_local, pace=pace)
    simulation, last = Simulation(scenario), num_local * (1 + method.overlap)
    # What comes after that step takes as long as the step itself, and tells nothing.
    reached = simulation.kernel.run(
        until_s=scenario.duration_max_s,
        done=lambda: all(host.compute.iteration >= last for host in simulation.data_hosts),
    )
    assert reached, f"{experiment.name}: iteration {last} was not committed"
    figures = simulation.meter.figures[last - num_local : last]
    assert len(figures) == num_local
    num_tokens = experiment.num_tokens * method.every
    return num_tokens / (sum(found.duration_s for found in figures) * pace)
