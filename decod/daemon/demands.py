"""What `decod join` is asked for, and what a run takes of a volunteer's host, in words: downloads,
ports, memory, disk and traffic.

`decod join` says the most important of it before it starts, and `decod join --dry-run` says all.
"""

import asyncio
import shutil
from dataclasses import dataclass, replace
from typing import Any

from decod.config.needs import StageNeeds, stage_needs
from decod.config.node_config import NodeConfig, Recompute
from decod.config.node_settings import given_in, with_values
from decod.config.schema import (
    Manifest,
    activation_size_bytes,
    average_size_bytes,
    count_parameters,
)
from decod.config.settings_file import read_settings
from decod.daemon.contact import find_run, patiently
from decod.daemon.device_owner import arena_bytes, try_device
from decod.daemon.host import Leaving, Say, run_until_left
from decod.daemon.member_admission import most_telling, token_for, usable_membership
from decod.daemon.node_folder import KnownPeers, nearest_folder
from decod.daemon.reachability import MORE_PORTS, advertised
from decod.daemon.stage_memory import (
    CAPACITY_AUTO_MAX,
    needs_here,
    require_memory,
    ways_here,
)
from decod.driver.arena import goes_to_file
from decod.errors import DecodError, NetworkError, PeerError, RejectedError
from decod.host_limits import num_processors
from decod.journal.logs import LOG_SIZE_MAX_BYTES, NUM_OLD_LOGS
from decod.membership.identity import HostKey, kept_identity, new_identity
from decod.net.enrolment import Enrollee, visit
from decod.net.join_string import JoinString
from decod.protocol.core.view import Duty, Role
from decod.run.run_config import Organisation, RunConfig
from decod.texts import base32, counted, size_text
from decod.train.checkpoint.stage_states import KEPT_PER_STAGE

Demands = dict[str, list[str]]
"""Lines by title. The first line of a title says the most important."""

_IN_SHORT = ("downloads", "opens", "device", "memory", "disk", "upload")
"""Titles that `decod join` shows before it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of `decod join`."""

    join_string: str
    node: NodeConfig
    stage_index: int | None = None
    """The relay stage that the operator demands; None for any."""
    serves: bool = False
    """The host is reliable: it may be a server."""
    duty: Duty = Duty.NONE
    """The server's duty that the operator demands."""


def require_stage(options: JoinOptions, run: RunConfig) -> None:
    """Check that a run has the stage that the operator demands.

    Raises:
        RejectedError: It has not (E-REJ-006).
    """
    stages = run.stages.num_relay_stages
    if options.stage_index is not None and not 1 <= options.stage_index <= stages:
        raise RejectedError(
            f"--stage {options.stage_index} is not a stage of this run",
            why=f"its relay stages are 1 to {stages}",
            fix="choose one of them, or auto",
            code="E-REJ-006",
        )
    if options.serves and run.organisation is not Organisation.SERVERS:
        raise RejectedError(
            "--server is for runs whose stages have servers",
            why=f"in {run.name}, all members of a stage share its work alike",
            fix="leave it out",
            code="E-REJ-015",
        )


def tell_demands(run: RunConfig, stage_index: int | None, config: NodeConfig, say: Say) -> None:
    """Tell the operator what the run takes of this host, before it takes anything."""
    # The leader may choose any stage. The first relay stage is the largest, if they differ.
    stage = stage_index or 1
    say(f"joining {about(run)}; Ctrl-C leaves it")
    for line in short_lines(run, stage, config):
        say(line)


def about(run: RunConfig) -> str:
    """Return the name of a run, its model and its number of relay stages."""
    model = f"{run.model.model_type} with {count_parameters(run.model):,} parameters"
    if not run.trains_all:
        model = f"an adapter of rank {run.adapter.rank} of {model}"
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
        device = "the first GPU if it works, and otherwise the CPU"
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
    size = size_text(needs.base_bytes)
    base = f", and once {size} of weights that are not trained, from the Hub or members"
    return {
        "downloads": [
            f"{size_text(needs.state_bytes)} at the start: weights and optimizer of a stage, "
            f"as safetensors, from members{base if needs.base_bytes else ''}",
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
    needs = stage_needs(run, stage)
    state_bytes = needs.state_bytes
    own_bytes = KEPT_PER_STAGE * state_bytes
    passing = f"{size_text(state_bytes)} more, while such a state is fetched or copied"
    base = f"{size_text(needs.base_bytes)} for weights that are not trained"
    free_bytes = shutil.disk_usage(nearest_folder(state_dir)).free
    return {
        "disk": [
            f"{size_text(own_bytes)} for the newest {KEPT_PER_STAGE} states of a stage, in "
            f"{state_dir}, where {size_text(free_bytes)} are free",
            f"at most {size_text(KEPT_PER_STAGE * largest_bytes)} for each other stage of which "
            "copies are kept, usually one or two",
            *([passing] if goes_to_file(state_bytes) else []),
            *([base] if needs.base_bytes and config.base_dir is None else []),
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
        "dials": [
            "other members at their addresses, TCP and UDP",
            *([] if run.trains_all else ["the Hugging Face Hub, if the model is from there"]),
        ],
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


# --- decod join --dry-run ------------------------------------------------------------------------
# `decod join --dry-run`: says what joining would take of this host, and does not join.
#
# Nothing is written, no port is opened, and the join token is not used. The run is the one that its
# data node describes, checked as in a real join. The compute process starts to find the device.


_ROOT_SHOWN = 12
"""Characters of the root's key that are shown, as docs show join strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A run as one of its nodes describes it to this host."""

    manifest: Manifest
    address: str
    """The leader's, or that of the node that was asked."""
    observed: str
    """This host's IP address as that node sees it."""


def run_dry(options: JoinOptions, say: Say) -> int:
    """Tell the operator what `run_join` would do with these options; return the exit code.

    Raises:
        DecodError: The run can't be found, does not take this node, or does not fit onto this host.
    """
    return run_until_left(_run_dry(options, say), say)


async def _run_dry(options: JoinOptions, say: Say) -> int:
    kept, join = read_settings(options.node.state_dir), JoinString.parse(options.join_string)
    node = with_values(options.node, kept | given_in(options.node))
    options = replace(options, node=node)
    with Leaving(say) as leaving:
        own = kept_identity(options.node.state_dir)
        host = own or new_identity()
        looking = patiently(lambda: _look(options, join, host), say, join=join)
        seen = await leaving.unless_asked(looking)
        run = seen.manifest.run
        require_stage(options, run)
        trial = try_device(run, options.node, kills=leaving.kills)
        facts = await leaving.unless_asked(trial)
    # The leader may choose any. The first relay stage is the largest, if they differ.
    stage = options.stage_index or 1
    demands = {
        **_about_run(seen, join),
        **downloads(run, stage),
        "device": _tried(node, facts),
        **memory(run, stage, node, facts["memory_bytes"]),
        **disk(run, stage, node),
        **network(run, stage, node),
        **_shown(seen, node, own, facts["device"]),
    }
    for line in lines_of(demands):
        say(line)
    say("Nothing was written, no port was opened, and no invitation was used.")
    require_memory(run, stage, options.node, facts)
    return 0


async def _look(options: JoinOptions, join: JoinString, host: HostKey) -> _Seen:
    """Ask for the run: as its member if this host is one, and else with the token."""
    state_dir = options.node.state_dir
    addresses = KnownPeers(state_dir).addresses_of(join)
    member = await usable_membership(join, Role.RELAY, state_dir, host, keeps=False)
    if member is not None:
        found = await find_run(addresses, member)
        return _Seen(
            manifest=found.manifest, address=found.leader_address, observed=found.observed_address
        )
    visitor = Enrollee.with_token(join.root, host, token_for(Role.RELAY, join))
    errors = list[DecodError]()
    for address in addresses:
        try:
            info = await visit(address, visitor)
            manifest = await asyncio.to_thread(Manifest.from_json, info.manifest_json)
        except (NetworkError, RejectedError, PeerError) as error:
            errors.append(error)
        else:
            return _Seen(manifest=manifest, address=address, observed=info.observed_address)
    raise most_telling(errors)


# --- what is said ---------------------------------------------------------------------------------


def _tried(node: NodeConfig, facts: dict[str, Any]) -> list[str]:
    """Say what the compute process has found of this host's devices."""
    found = f"{facts['device_text']}, {size_text(facts['memory_bytes'])} free"
    if node.num_devices == 1:
        return [found]
    host = f"{size_text(facts['host_memory_bytes'])} of this host's memory are free"
    return [f"{found} on each", host]


def _about_run(seen: _Seen, join: JoinString) -> Demands:
    return {
        "run": [about(seen.manifest.run)],
        "trusts": [
            f"the organiser's key, {base32(join.root)[:_ROOT_SHOWN]}... in the join string",
            f"data nodes that it has certified, such as the one at {seen.address}",
            "members that these have admitted",
        ],
    }


def _shown(seen: _Seen, config: NodeConfig, own: HostKey | None, device: str) -> Demands:
    address = advertised(config, config.listen_port, seen.observed).removesuffix(":0")
    if config.name or own:
        name = f"the name {config.name or (own and own.name)}"
    else:
        name = "two words for a name, from the key that it makes at its first start"
    return {
        "others see": [
            f"the address {address}",
            name,
            f"the device, {device}, its stage, and how fast it is",
        ],
        "never": [
            "runs code from others: the model is one of those in decod, chosen by name",
            "opens a file or an address that the run's description names: it names none",
            "reads pickle: states are safetensors, all else is protobuf and JSON within limits",
        ],
    }
