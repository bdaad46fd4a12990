"""The runs of `bench_slow_links.py`, and the figures that follow from their samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

from bench.hosts import Moment
from bench.job import BATCH, MODEL, NUM_FIRST_BLOCKS, NUM_RELAY_STAGES
from bench.subject import Sample
from decod.compression.plan import Method
from decod.run.adapter_config import AdapterConfig, AdapterKind
from decod.run.model_config import ModelConfig
from decod.run.protocol_config import NO_AUDITS, ProtocolConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    ActivationCompression,
    ActivationsConfig,
    BatchConfig,
    OptimizerConfig,
    SyncConfig,
    SyncMethod,
)

NUM_MEMBERS = 2
"""Relays in each stage, in both measurements."""

WIDE_MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=2752,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)
"""Many parameters for each byte of an activation, as in the paper's model of 107 B parameters."""
WIDE_BATCH = BatchConfig(sequence_length=64, microbatch_size=2, num_microbatches=NUM_MEMBERS)
"""A microbatch for each member of the only relay stage."""

THIN_MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=1,
)
"""Many bytes of an activation for each parameter: links are the bottleneck, not devices."""
THIN_BATCH = BatchConfig(sequence_length=256, microbatch_size=1)

PROTOCOL = ProtocolConfig(
    heartbeat_timeout_s=30.0,
    probe_timeout_s=20.0,
    election_timeout_s=30.0,
    # States that are mirrored would take the links from training.
    snapshot_every_iterations=0,
    min_nodes_per_stage=NUM_MEMBERS,
)
"""Five nodes on two cores stall now and then. No failure is measured here."""

INT8 = ActivationsConfig(compression=ActivationCompression.INT8)


def home_run(num_microbatches: int, every: int, rank: int, num_iterations: int) -> RunConfig:
    """Return the run between homes: the job of `bench_throughput.py` with DiLoCoX."""
    return RunConfig(
        name=f"home-{num_microbatches}",
        num_iterations=num_iterations,
        model=MODEL,
        stages=StagesConfig(num_relay_stages=NUM_RELAY_STAGES, num_first_blocks=NUM_FIRST_BLOCKS),
        batch=replace(BATCH, num_microbatches=num_microbatches),
        optimizer=OptimizerConfig(lr=1e-3),
        activations=INT8,
        sync=dilocox(every, rank),
        protocol=PROTOCOL,
    )


def adapter_run(num_microbatches: int, num_iterations: int) -> RunConfig:
    """Return the same run with an adapter, whose gradients are averaged in every iteration."""
    run = home_run(num_microbatches, 1, 1, num_iterations)
    return replace(
        run,
        name=f"adapter-{num_microbatches}",
        adapter=AdapterConfig(kind=AdapterKind.LORA),
        sync=SyncConfig(),
        # Relays are new in so short a run. Their audits would take a quarter of it on both nets.
        audits=NO_AUDITS,
    )


def activations_run(
    compression: ActivationCompression, num_microbatches: int, num_iterations: int
) -> RunConfig:
    """Return a run of one relay stage that sends little but activations and their gradients."""
    return RunConfig(
        name=f"activations-{compression.value}",
        num_iterations=num_iterations,
        model=THIN_MODEL,
        stages=StagesConfig(num_relay_stages=1),
        batch=replace(THIN_BATCH, num_microbatches=num_microbatches),
        optimizer=OptimizerConfig(lr=1e-3),
        activations=ActivationsConfig(compression=compression),
        sync=dilocox(num_iterations, 32),
        protocol=PROTOCOL,
    )


def dilocox(every: int, rank: int) -> SyncConfig:
    """Return the settings of DiLoCoX, with the paper's compression."""
    return SyncConfig(
        method=SyncMethod.DILOCO,
        every=every,
        overlap=True,
        compression=Method.LOWRANK_INT4,
        rank=rank,
        outer_lr=0.5,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the speed table."""

    name: str
    sync: SyncConfig
    num_warmup: int
    num_measured: int

    def run(self, index: int, model: ModelConfig = WIDE_MODEL) -> RunConfig:
        return RunConfig(
            name=f"table-{index}",
            num_iterations=self.num_warmup + self.num_measured + 1,
            model=model,
            stages=StagesConfig(num_relay_stages=1),
            batch=WIDE_BATCH,
            optimizer=OptimizerConfig(lr=1e-4),
            activations=INT8,
            sync=self.sync,
            protocol=PROTOCOL,
        )


def rows(every: int, rank: int, num_phases: int) -> list[Row]:
    """Return the rows of the speed table, in the order in which they are measured.

    Args:
        every: DiLoCoX's H.
        rank: Of its factors.
        num_phases: Local phases of DiLoCoX that are measured. Slower rows get fewer.
    """
    full = dilocox(every, rank)
    whole = replace(full, compression=Method.NONE)
    seldom = replace(full, every=4 * every, overlap=False, compression=Method.FP16)
    gradients = SyncConfig()
    cocktail = replace(gradients, compression=Method.COCKTAIL)
    several = num_phases * every
    return [
        # The first phase sends nothing. From then on, an average always travels.
        Row("DiLoCoX", full, every, several),
        Row("without overlap", replace(full, overlap=False), every, several),
        Row("CocktailSGD", cocktail, 1, max(4, several // 3)),
        # It waits for the average of the first phase at the end of the second.
        Row("without compression", whole, every, every),
        Row("OpenDiLoCo", seldom, 1, 4 * every),
        Row("all-reduce", gradients, 1, 1),
    ]


def compute_busy(sample: Sample, nodes: Sequence[str]) -> float:
    """Return the share of time in which the compute processes of these nodes work."""
    return mean(sample.timing.get(node, {}).get("compute_s", 0.0) for node in nodes) / (
        sample.iteration_s
    )


def cores_busy(sample: Sample, num_cores: int) -> float:
    """Return the share of the machine's processor time that its compute processes use."""
    return sum(cpu_s for name, cpu_s in sample.cpu_s.items() if name.endswith(" compute")) / (
        num_cores * sample.iteration_s
    )


def sent_mb(first: Moment, last: Moment) -> Mapping[str, float]:
    """Return the megabytes that each node has sent an iteration, from one moment to another."""
    num_iterations = last.iteration - first.iteration
    return {
        node: (last.sent_bytes[node] - sent_bytes) / 1e6 / num_iterations
        for node, sent_bytes in first.sent_bytes.items()
        if node in last.sent_bytes
    }


def durations(moments: Sequence[Moment]) -> list[float]:
    """Return the duration of each iteration between moments."""
    return [after.instant_s - before.instant_s for before, after in pairwise(moments)]


def overhead_s(few: tuple[int, float], many: tuple[int, float]) -> tuple[float, float]:
    """Return what an iteration takes without microbatches, and what each takes, in seconds.

    Args:
        few: Microbatches of an iteration, and its duration in seconds.
        many: The same with more microbatches.
    """
    each_s = (many[1] - few[1]) / (many[0] - few[0])
    return few[1] - few[0] * each_s, each_s
