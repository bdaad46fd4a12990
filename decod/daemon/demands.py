"""What a run takes of a volunteer's host, in words: downloads, ports, memory, disk and traffic.

`decod join` says the most important of it before it starts, and `decod join --dry-run` says all.
"""

import shutil

from decod.config.needs import StageNeeds, stage_needs
from decod.config.node_config import NodeConfig, Recompute
from decod.config.schema import activation_size_bytes, average_size_bytes, count_parameters
from decod.daemon.device_owner import arena_bytes
from decod.daemon.node_folder import nearest_folder
from decod.daemon.reachability import MORE_PORTS
from decod.daemon.stage_memory import CAPACITY_AUTO_MAX, needs_here, ways_here
from decod.driver.arena import goes_to_file
from decod.host_limits import num_processors
from decod.journal.logs import LOG_SIZE_MAX_BYTES, NUM_OLD_LOGS
from decod.run.run_config import RunConfig
from decod.texts import counted, size_text
from decod.train.checkpoint.stage_states import KEPT_PER_STAGE

Demands = dict[str, list[str]]
"""Lines by title. The first line of a title says the most important."""

_IN_SHORT = ("downloads", "opens", "device", "memory", "disk", "upload")
"""Titles that `decod join` shows before it starts."""


def about(run: RunConfig) -> str:
    """Return the name of a run, its model and its number of relay stages."""
    model = f"{run.model.model_type} with {count_parameters(run.model):,} parameters"
    return f"{run.name}: {model}, {counted(run.stages.num_relay_stages, 'relay stage')}"


def short_lines(run: RunConfig, stage: int, config: NodeConfig) -> list[str]:
    """Return the lines that `decod join` shows before it starts, when no device has been tried.

    Args:
        run: The run.
        stage: The stage, or the largest of those that the leader may choose.
        config: This host's choices.
    """
    device = config.device
    if device == "auto":
        device = "the first GPU if CUDA works there, and otherwise the CPU"
    demands = {
        **downloads(run, stage),
        "device": [device],
        **memory(run, stage, config),
        **disk(run, stage, config),
        **network(run, stage, config),
    }
    return lines_of({title: demands[title][:1] for title in _IN_SHORT})


def lines_of(demands: Demands) -> list[str]:
    """Return the lines, with each title before its first line."""
    return [
        f"{title if number == 0 else '':<12}{line}"
        for title, lines in demands.items()
        for number, line in enumerate(lines)
    ]


def downloads(run: RunConfig, stage: int) -> Demands:
    """Return what a newcomer of a stage fetches."""
    needs = stage_needs(run, stage)
    return {
        "downloads": [
            f"{size_text(needs.state_bytes)} at the start: weights and optimizer of a stage, "
            "as safetensors, from members",
            "copies of other stages' states, if the run is to survive their loss",
            "no data and no tokenizer, which stay with data nodes, and no code",
        ]
    }


def memory(
    run: RunConfig, stage: int, config: NodeConfig, free_bytes: int | None = None
) -> Demands:
    """Return the memory and threads that a stage takes.

    Args:
        run: The run.
        stage: The stage.
        config: This host's choices.
        free_bytes: Memory of the device with least of it. None: no device has been tried.
    """
    if free_bytes is None:
        ways = ways_here(run, stage, config)
    else:
        ways = [needs_here(run, stage, config, free_bytes)]
    needs = ways[0]
    least = ", or if that does not fit ".join(_least(each, config.num_devices) for each in ways)
    if config.capacity is None:
        num = f"of which it takes what half of the rest holds, at most {CAPACITY_AUTO_MAX}"
    else:
        num = f"of which it takes {config.capacity}"
    again = {
        Recompute.AUTO: "if memory is short, ",
        Recompute.ON: "recomputed: ",
        Recompute.OFF: "not chosen: ",
    }[config.recompute]
    threads = f"{config.num_threads}" if config.num_threads else "as many as torch takes"
    divided = f", divided among {config.num_devices} devices" if config.num_devices > 1 else ""
    return {
        "memory": [
            f"at least {least} for a stage, "
            f"and {size_text(needs.microbatch_bytes)} for each microbatch, {num}",
            f"{again}{size_text(needs.input_bytes)} for each microbatch, and "
            f"{size_text(needs.microbatch_bytes)} once: see --recompute",
            f"at most {size_text(arena_bytes(run, config))} of this host's "
            "for tensors on their way",
        ],
        "threads": [f"{threads} for computing, of {num_processors()} processors{divided}"],
    }


def _least(needs: StageNeeds, num_devices: int) -> str:
    """Return where a stage takes how much memory, in words."""
    there = "there" if num_devices == 1 else f"on each of {num_devices} devices"
    text = f"{size_text(needs.device_bytes)} {there}"
    return f"{text} and {size_text(needs.host_bytes)} of this host's" if needs.sharded else text


def disk(run: RunConfig, stage: int, config: NodeConfig) -> Demands:
    """Return what the state folder comes to hold."""
    state_dir, most_bytes = config.state_dir, config.disk_max_bytes
    cap = [] if most_bytes is None else [f"at most {size_text(most_bytes)} in all: see --disk-max"]
    largest_bytes = max(stage_needs(run, each).state_bytes for each in (0, 1))
    state_bytes = stage_needs(run, stage).state_bytes
    own_bytes = KEPT_PER_STAGE * state_bytes
    passing = f"{size_text(state_bytes)} more, while such a state is fetched or copied"
    free_bytes = shutil.disk_usage(nearest_folder(state_dir)).free
    return {
        "disk": [
            f"{size_text(own_bytes)} for the newest {KEPT_PER_STAGE} states of a stage, in "
            f"{state_dir}, where {size_text(free_bytes)} are free",
            f"at most {size_text(KEPT_PER_STAGE * largest_bytes)} for each other stage of which "
            "copies are kept, usually one or two",
            *([passing] if goes_to_file(state_bytes) else []),
            f"at most {size_text((1 + NUM_OLD_LOGS) * LOG_SIZE_MAX_BYTES)} for node.log",
            *cap,
        ]
    }


def network(run: RunConfig, stage: int, config: NodeConfig) -> Demands:
    """Return the ports that a node opens, and its traffic."""
    host = f"[{config.listen_host}]" if ":" in config.listen_host else config.listen_host
    port = f"port {config.listen_port}" if config.listen_port else "a free port"
    if config.moves_port:
        port += f", or one of the next {MORE_PORTS} if it is in use,"
    each = size_text(2 * activation_size_bytes(run))
    often = "each iteration" if run.sync.every == 1 else f"every {run.sync.every} iterations"
    up, down = config.upload_max_mbit, config.download_max_mbit
    return {
        "opens": [
            f"{port} of {host}, TCP and UDP",
            "TCP is for members, who show a certificate",
            "UDP is for the DHT, to which anybody can send",
        ],
        "dials": ["other members at their addresses, TCP and UDP"],
        "traffic": [
            f"{each} in and {each} out for each microbatch",
            f"averages of {size_text(average_size_bytes(run)[stage])} {often}, sent once or twice",
        ],
        "upload": [
            "as fast as the link allows: see --upload-max"
            if up is None
            else f"at most {up:g} Mbit/s"
        ],
        "download": [
            "as fast as the link allows: see --download-max"
            if down is None
            else f"at most {down:g} Mbit/s"
        ],
    }
