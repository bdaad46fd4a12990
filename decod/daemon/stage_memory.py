"""How the memory of a device is shared out between a stage and its microbatches.

Before anything is built or fetched, estimates tell whether the stage fits, and whether passes are
recomputed. Once the stage is built, a measured microbatch tells how many fit.
"""

from dataclasses import replace
from typing import Any

from decod.config.needs import StageNeeds, stage_needs
from decod.config.node_config import NodeConfig, Recompute, Spread
from decod.config.schema import activation_size_bytes
from decod.errors import OUT_OF_MEMORY, ConfigError, HardwareError
from decod.protocol.core.jobs import Measured
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from decod.texts import size_text

CAPACITY_AUTO_MAX = 64
"""Most microbatches that a node takes at a time if the operator has not set the capacity."""

_MEMORY_SHARE = 0.5
"""Part of the memory beside the stage for microbatches, if the operator has not set the
capacity."""

_RECOMPUTING_SPEED = 0.75
"""Of a device that computes forward passes twice: a backward pass takes as long as two of them."""

_NUM_COPIES = 4
"""Of an activation, on its way in and out in both passes."""


def require_memory(run: RunConfig, stage: int, config: NodeConfig, facts: dict[str, Any]) -> None:
    """Check that a stage may fit onto the device, and the host. Nothing is allocated for it yet.

    Args:
        run: The run, as the organiser describes it.
        stage: The stage.
        config: This host's choices.
        facts: The compute process's reply to `configure`.

    Raises:
        HardwareError: It does not fit (E-HW-003).
    """
    num, free_bytes = config.capacity or 1, facts["memory_bytes"]
    needs = needs_here(run, stage, config, free_bytes)
    if needs.fits(free_bytes, num, recompute=config.recompute is not Recompute.OFF):
        _require_host_memory(run, stage, config, needs, facts)
        return
    raise HardwareError(
        f"{size_text(free_bytes)} are free on {_each(config)}{facts['device']}",
        why=f"stage {stage} of this run takes at least {size_text(needs.device_bytes)} there "
        f"({_parts_text(needs)}), and {_microbatches_text(needs, num, config.recompute)}"
        f"{_otherwise_text(run, stage, config, needs)}",
        fix=_remedy(needs, num, config, free_bytes, _smaller_stage(run, stage)),
        code=OUT_OF_MEMORY,
    )


def _require_host_memory(
    run: RunConfig, stage: int, config: NodeConfig, needs: StageNeeds, facts: dict[str, Any]
) -> None:
    """Check that the host has the memory that a stage takes which is spread over its devices.

    Raises:
        HardwareError: It has not (E-HW-003).
    """
    if not needs.sharded:
        return
    needed_bytes, free_bytes = needs.host_bytes, facts["host_memory_bytes"]
    what = "weights, gradients and optimizer of the whole stage"
    if config.device.startswith("cpu"):
        # These devices are processes that have their parts in the same memory.
        needed_bytes += config.num_devices * needs.memory_min_bytes
        what += f", and {size_text(needs.memory_min_bytes)} for each device"
    if needed_bytes <= free_bytes:
        return
    ways = ["free memory of the host", "add some", *_smaller_stage(run, stage)]
    auto = replace(config, spread=Spread.AUTO)
    if not needs_here(run, stage, auto, facts["memory_bytes"]).sharded:
        ways.insert(0, "leave out --spread shard")
    raise HardwareError(
        f"{size_text(free_bytes)} of this host's memory are free",
        why=f"stage {stage} of this run, spread over {config.num_devices} devices, takes at least "
        f"{size_text(needed_bytes)} of it ({what})",
        fix=_one_of(ways),
        code=OUT_OF_MEMORY,
    )


def needs_here(run: RunConfig, stage: int, config: NodeConfig, free_bytes: int) -> StageNeeds:
    """Return what a stage needs of each device of this host, copied there or spread over them.

    With `auto`, it is spread if it fits only so.

    Args:
        run: The run.
        stage: The stage.
        config: This host's choices.
        free_bytes: Memory of the device with least of it, before anything is built.

    Raises:
        ConfigError: The stage can't be spread as asked (E-CFG-021).
    """
    ways = ways_here(run, stage, config)
    num, again = config.capacity or 1, config.recompute is not Recompute.OFF
    fitting = (each for each in ways if each.fits(free_bytes, num, recompute=again))
    return next(fitting, ways[0])


def ways_here(run: RunConfig, stage: int, config: NodeConfig) -> list[StageNeeds]:
    """Return what a stage may need of each device of this host. The first way that fits is used.

    Args and errors are those of `needs_here`.
    """
    num_devices, spread = config.num_devices, config.spread
    if spread is Spread.SHARD and num_devices == 1:
        raise ConfigError(
            "--spread shard with one device",
            why="a stage is spread over several",
            fix="leave out --spread, or name several devices, such as --device cuda:0,cuda:1",
            code="E-CFG-021",
        )
    copied, sharded = spread is not Spread.SHARD, spread is not Spread.COPY and num_devices > 1
    kinds = [each for each, possible in ((False, copied), (True, sharded)) if possible]
    return [stage_needs(run, stage, num_devices, sharded=each) for each in kinds]


def _each(config: NodeConfig) -> str:
    return "each of " if config.num_devices > 1 else ""


def _parts_text(needs: StageNeeds) -> str:
    moments_bytes = needs.optimizer_bytes - needs.gradient_bytes
    text = f"weights {size_text(needs.weights_bytes)}, gradients {size_text(needs.gradient_bytes)}"
    if not needs.sharded:
        text += f", optimizer {size_text(moments_bytes)}"
    return f"{text}, loss {size_text(needs.loss_bytes)}" if needs.loss_bytes else text


def _otherwise_text(run: RunConfig, stage: int, config: NodeConfig, needs: StageNeeds) -> str:
    """Say what the other way of several devices takes, if the node may choose it."""
    others = [each for each in ways_here(run, stage, config) if each != needs]
    return "".join(
        f"; spread over all of them, it takes {size_text(each.device_bytes)} of each"
        for each in others
        if each.sharded
    )


def _microbatches_text(needs: StageNeeds, num: int, kind: Recompute) -> str:
    batches = f"{num} microbatches" if num > 1 else "a microbatch"
    kept = f"{batches} {size_text(needs.held_bytes(num))}"
    if num == 1 or kind is Recompute.OFF:
        return kept
    return f"{kept}, or {size_text(needs.held_bytes(num, recompute=True))} with recomputation"


def _smaller_stage(run: RunConfig, stage: int) -> list[str]:
    """Return what makes a stage smaller. Stage 0 always holds the embedding and the head."""
    if stage:
        return ["ask the organiser for more stages"]
    return ["set stages.num_first_blocks = 0"] if run.stages.num_first_blocks else []


def _remedy(
    needs: StageNeeds, num: int, config: NodeConfig, free_bytes: int, smaller: list[str]
) -> str:
    ways = []
    if config.device_memory_max_bytes is not None:
        ways.append("allow more with --device-memory-max")
    if config.recompute is Recompute.OFF and needs.fits(free_bytes, num, recompute=True):
        ways.append("leave out --recompute off")
    if num > 1:
        ways.append("give a smaller --capacity")
    ways += ["free memory", "use a larger device", *smaller]
    return _one_of(ways)


def _one_of(ways: list[str]) -> str:
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def recomputes(run: RunConfig, stage: int, config: NodeConfig, free_bytes: int) -> bool:
    """Return whether this host computes forward passes again, for their backward passes.

    With `auto` it does if memory is short: if the given capacity does not fit otherwise, or if so
    many more microbatches fit that the stage is busier, although each of them takes longer.

    Args:
        run: The run.
        stage: The stage, which fits.
        config: This host's choices.
        free_bytes: Memory of the device before anything is built.
    """
    if config.recompute is not Recompute.AUTO:
        return config.recompute is Recompute.ON
    needs = needs_here(run, stage, config, free_bytes)
    if config.capacity is not None:
        return not needs.fits(free_bytes, config.capacity)
    enough, room_bytes = _num_enough(run, stage), free_bytes - needs.device_bytes
    copies_bytes = _NUM_COPIES * activation_size_bytes(run)
    kept = _num_that_fit(room_bytes, needs.microbatch_bytes + copies_bytes)
    once_bytes = needs.microbatch_bytes - needs.input_bytes
    again = _num_that_fit(room_bytes, needs.input_bytes + copies_bytes, once_bytes)
    return _RECOMPUTING_SPEED * min(enough, again) > min(enough, kept)


def capacity_of(
    run: RunConfig, role: Role, room_bytes: int, measured: Measured, device: str
) -> int:
    """Return how many microbatches a node takes at a time.

    Args:
        run: The run.
        role: The node's.
        room_bytes: Memory of the device beside the stage.
        measured: The compute process's reply to `measure`.
        device: Its name.

    Raises:
        HardwareError: Not even one fits (E-HW-003).
    """
    once_bytes = max(0, measured.recomputed_bytes - measured.microbatch_memory_bytes)
    each_bytes = measured.microbatch_memory_bytes + _NUM_COPIES * activation_size_bytes(run)
    if once_bytes + each_bytes > room_bytes:
        raise HardwareError(
            f"{size_text(max(0, room_bytes))} are free on {device} beside the stage",
            why=f"one microbatch of this run takes {size_text(once_bytes + each_bytes)} there",
            fix="free memory, use a larger device, or set --capacity 1 to try anyway",
            code=OUT_OF_MEMORY,
        )
    wanted = run.batch.num_microbatches if role is Role.DATA else CAPACITY_AUTO_MAX
    return min(wanted, CAPACITY_AUTO_MAX, _num_that_fit(room_bytes, each_bytes, once_bytes))


def _num_that_fit(room_bytes: int, each_bytes: int, once_bytes: int = 0) -> int:
    """Return how many microbatches find room: at least the one that was checked to do so."""
    return max(1, int((_MEMORY_SHARE * room_bytes - once_bytes) / max(1, each_bytes)))


def _num_enough(run: RunConfig, stage: int) -> int:
    """Return how many microbatches keep a stage busy.

    A relay's pass back comes when the microbatch has been through all stages behind it.

    Source: PipeDream (arXiv:1806.03377), one forward and one backward pass in turn (1F1B).
    """
    batch = run.batch
    if stage == 0:
        return batch.num_microbatches
    behind = run.stages.num_relay_stages - stage + 1
    return min(behind, batch.microbatches_per_iteration)
