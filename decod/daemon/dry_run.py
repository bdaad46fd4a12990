"""`decod join --dry-run`: says what joining would take of this host, and does not join.

Nothing is written, no port is opened, and the join token is not used. The run is the one that its
data node describes, checked as in a real join. The compute process starts to find the device.
"""

import os
import shutil
from dataclasses import dataclass, replace
from typing import Any

from decod.base32 import base32
from decod.config.needs import stage_needs
from decod.config.node import NodeConfig
from decod.config.schema import (
    Manifest,
    RunConfig,
    activation_size_bytes,
    average_size_bytes,
    count_parameters,
)
from decod.config.settings import given_in, with_values
from decod.config.settings_file import read_settings
from decod.daemon.admission import most_telling, token_for, usable_membership
from decod.daemon.contact import find_run, patiently
from decod.daemon.device import (
    CAPACITY_AUTO_MAX,
    arena_bytes,
    require_memory,
    try_device,
)
from decod.daemon.folder import nearest_folder
from decod.daemon.host import Say
from decod.daemon.leaving import Leaving, run_until_left
from decod.daemon.peers import KnownPeers
from decod.daemon.reachability import advertised
from decod.daemon.volunteer import JoinOptions, require_stage
from decod.errors import DecodError, NetworkError, PeerError, RejectedError
from decod.membership.identity import HostKey, kept_identity, new_identity
from decod.net.enrolment import Enrollee
from decod.net.join_string import JoinString
from decod.net.visit import visit
from decod.obs.logs import LOG_SIZE_MAX_BYTES, NUM_OLD_LOGS
from decod.protocol.core.view import Role
from decod.train.checkpoint.states import KEPT_PER_STAGE

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
    return run_until_left(_run(options, say), say)


async def _run(options: JoinOptions, say: Say) -> int:
    kept, join = read_settings(options.node.state_dir), JoinString.parse(options.join_string)
    node = with_values(options.node, kept | given_in(options.node))
    options = replace(options, node=node)
    with Leaving(say) as leaving:
        own = kept_identity(options.node.state_dir)
        host = own or new_identity()
        seen = await leaving.unless_asked(patiently(lambda: _look(options, join, host), say))
        run = seen.manifest.run
        require_stage(options, run)
        trial = try_device(run, options.node, kills=leaving.kills)
        facts = await leaving.unless_asked(trial)
    # The leader may choose any. The first relay stage is the largest, if they differ.
    stage = options.stage_index or 1
    parts = (
        _about_run(seen, join),
        _downloads(run, stage),
        _device(run, stage, options.node, facts),
        _disk(run, stage, node),
        _network(run, stage, options.node),
        _shown(seen, options.node, own, facts["device"]),
    )
    for title, lines in (part for group in parts for part in group.items()):
        for number, line in enumerate(lines):
            say(f"{title if number == 0 else '':<12}{line}")
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
            manifest = Manifest.from_json(info.manifest_json)
        except (NetworkError, RejectedError, PeerError) as error:
            errors.append(error)
        else:
            return _Seen(manifest=manifest, address=address, observed=info.observed_address)
    raise most_telling(errors)


# --- what is said ---------------------------------------------------------------------------------

_Part = dict[str, list[str]]


def _about_run(seen: _Seen, join: JoinString) -> _Part:
    run = seen.manifest.run
    model = f"{run.model.model_type} with {count_parameters(run.model):,} parameters"
    return {
        "run": [f"{run.name}: {model}, {run.stages.num_relay_stages} relay stages"],
        "trusts": [
            f"the organiser's key, {base32(join.root)[:_ROOT_SHOWN]}... in the join string",
            f"data nodes that it has certified, such as the one at {seen.address}",
            "members that these have admitted",
        ],
    }


def _downloads(run: RunConfig, stage: int) -> _Part:
    needs = stage_needs(run, stage)
    return {
        "downloads": [
            f"{size_text(needs.state_bytes)} at the start: weights and optimizer of a stage, "
            "as safetensors, from members",
            "copies of other stages' states, if the run is to survive their loss",
            "no data and no tokenizer, which stay with data nodes, and no code",
        ]
    }


def _device(run: RunConfig, stage: int, config: NodeConfig, facts: dict[str, Any]) -> _Part:
    needs = stage_needs(run, stage)
    if config.capacity is None:
        num = f"of which it takes what half of the free memory holds, at most {CAPACITY_AUTO_MAX}"
    else:
        num = f"of which it takes {config.capacity}"
    threads = f"{config.num_threads}" if config.num_threads else "as many as torch takes"
    return {
        "device": [f"{facts['device_text']}, {size_text(facts['memory_bytes'])} free"],
        "memory": [
            f"at least {size_text(needs.device_bytes)} there for a stage, "
            f"and {size_text(needs.microbatch_bytes)} for each microbatch, {num}",
            f"at most {size_text(arena_bytes(run, config))} of this host's for tensors on their way",
        ],
        "threads": [f"{threads} for computing, of {os.cpu_count() or 1} processors"],
    }


def _disk(run: RunConfig, stage: int, config: NodeConfig) -> _Part:
    state_dir, most_bytes = config.state_dir, config.disk_max_bytes
    cap = [] if most_bytes is None else [f"at most {size_text(most_bytes)} in all: see --disk-max"]
    largest_bytes = max(stage_needs(run, each).state_bytes for each in (0, 1))
    own_bytes = KEPT_PER_STAGE * stage_needs(run, stage).state_bytes
    return {
        "disk": [
            f"{state_dir}: {size_text(shutil.disk_usage(nearest_folder(state_dir)).free)} free",
            f"{size_text(own_bytes)} for the newest {KEPT_PER_STAGE} states of a stage",
            f"at most {size_text(KEPT_PER_STAGE * largest_bytes)} for each other stage of which copies "
            "are kept, usually one or two",
            f"at most {size_text((1 + NUM_OLD_LOGS) * LOG_SIZE_MAX_BYTES)} for node.log",
            *cap,
        ]
    }


def _network(run: RunConfig, stage: int, config: NodeConfig) -> _Part:
    host = f"[{config.listen_host}]" if ":" in config.listen_host else config.listen_host
    port = f"port {config.listen_port}" if config.listen_port else "a free port"
    each = size_text(2 * activation_size_bytes(run))
    often = "each iteration" if run.sync.every == 1 else f"every {run.sync.every} iterations"
    cap = config.upload_max_mbit
    return {
        "opens": [
            f"{port} of {host}, TCP: for members, who show a certificate",
            f"{port} of {host}, UDP: for the DHT, to which anybody can send",
        ],
        "dials": ["other members at their addresses, TCP and UDP"],
        "traffic": [
            f"{each} in and {each} out for each microbatch",
            f"averages of {size_text(average_size_bytes(run)[stage])} {often}, sent once or twice",
            "sends as fast as the link allows: see --upload-max"
            if cap is None
            else f"sends at most {cap:g} Mbit/s",
            "takes as much as the link allows: see --download-max"
            if config.download_max_mbit is None
            else f"takes at most {config.download_max_mbit:g} Mbit/s",
        ],
    }


def _shown(seen: _Seen, config: NodeConfig, own: HostKey | None, device: str) -> _Part:
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
