"""What a run file asks of hosts, in the sizes that planners count in."""

from dataclasses import replace

from decod.compression.plan import Method
from decod.config.needs import StageNeeds, layer_flops, stage_needs
from decod.config.schema import activation_size_bytes, average_size_bytes, validate
from decod.errors import ConfigError
from decod.lab.planner.hosts import TrainingWork
from decod.lab.planner.organisations.run_work import WHOLE, PartNeeds, RunWork
from decod.run.model_config import ModelDtype
from decod.run.run_config import Organisation, RunConfig
from decod.run.training_config import SyncConfig, SyncMethod

FORMATS = (Method.NONE, Method.INT8, Method.INT4, Method.LOWRANK_INT4)
"""Formats of averages that are compared."""

_CLIENT_VALUES = 2
"""A client of servers keeps the weights and their gradient."""


def work_of(run: RunConfig, *, num_data: int, head_s: float, step_s: float) -> RunWork:
    """Return the work of an iteration of a run.

    Args:
        run: A valid run.
        num_data: Number of data nodes, each with `batch.num_microbatches`.
        head_s: Time of one microbatch at a data node.
        step_s: Time of the optimizer's step for one layer.
    """
    one = _in_one_stage(run)
    num_layers = one.model.num_hidden_layers - one.stages.num_first_blocks
    outer, relays = _parts(one, num_layers, run.sync.rank)
    head_flops = 6.0 * run.model.vocab_size * run.model.hidden_size
    tokens = run.batch.tokens_per_microbatch
    delay = run.servers.delay
    return RunWork(
        num_layers=num_layers,
        num_microbatches=num_data * run.batch.num_microbatches,
        tokens_per_microbatch=tokens,
        activation_bytes=activation_size_bytes(run),
        layer=relays,
        outer=outer,
        outer_layers=run.stages.num_first_blocks + tokens * head_flops / layer_flops(run),
        delays=(delay, 1 - delay),
        head_s=head_s,
        step_s=step_s,
    )


def training_work(work: RunWork, *, delay: int) -> TrainingWork:
    """Return the same for the planner of the servers organisation."""
    return TrainingWork(
        num_layers=work.num_layers,
        num_microbatches=work.num_microbatches,
        activation_bytes=work.activation_bytes,
        layer_bytes=work.layer.wire_bytes[WHOLE],
        delay=delay,
        head_s=work.head_s,
        step_s=work.step_s,
    )


def _in_one_stage(run: RunConfig) -> RunConfig:
    """Return the run with all relays in one stage, and gradients averaged whole."""
    stages = replace(run.stages, num_relay_stages=1)
    return replace(run, organisation=Organisation.PIPELINE, stages=stages, sync=SyncConfig())


def _local(run: RunConfig, method: Method, rank: int) -> RunConfig:
    return replace(
        run, sync=SyncConfig(method=SyncMethod.DILOCO, every=2, compression=method, rank=rank)
    )


def _parts(run: RunConfig, num_layers: int, rank: int) -> tuple[PartNeeds, PartNeeds]:
    """Return the needs of the data nodes' part, and of one layer."""
    outer_bytes, layer_bytes = dict[str, float](), dict[str, float]()
    for method in FORMATS:
        coded = _local(run, method, rank)
        try:
            validate(coded)
            outer, relays = average_size_bytes(coded)
        except ConfigError:
            # No matrix is large enough for factors.
            continue
        outer_bytes[method.value], layer_bytes[method.value] = outer, relays / num_layers
    local = _local(run, Method.NONE, 1)
    wide_bytes = 8 if run.model.dtype is ModelDtype.FLOAT64 else 4

    def needs(stage: int, sizes: dict[str, float], share: int) -> PartNeeds:
        exact: StageNeeds = stage_needs(run, stage)
        return PartNeeds(
            wire_bytes=sizes,
            state_bytes=exact.device_bytes / share,
            local_state_bytes=stage_needs(local, stage).device_bytes / share,
            weights_bytes=_CLIENT_VALUES * wide_bytes * exact.num_parameters / share,
            microbatch_bytes=exact.microbatch_bytes / share,
        )

    return needs(0, outer_bytes, 1), needs(1, layer_bytes, num_layers)
