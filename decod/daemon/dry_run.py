"""`decod join --dry-run`: says what joining would take of this host, and does not join.

Nothing is written, no port is opened, and the join token is not used. The run is the one that its
data node describes, checked as in a real join. The compute process starts to find the device.
"""

from dataclasses import dataclass, replace
from typing import Any

from decod.config.node_config import NodeConfig
from decod.config.node_settings import given_in, with_values
from decod.config.schema import Manifest
from decod.config.settings_file import read_settings
from decod.daemon.contact import find_run, patiently
from decod.daemon.demands import Demands, about, disk, downloads, lines_of, memory, network
from decod.daemon.device_owner import try_device
from decod.daemon.host import Say
from decod.daemon.leaving import Leaving, run_until_left
from decod.daemon.member_admission import most_telling, token_for, usable_membership
from decod.daemon.peers import KnownPeers
from decod.daemon.reachability import advertised
from decod.daemon.stage_memory import require_memory
from decod.daemon.volunteer import JoinOptions, require_stage
from decod.errors import DecodError, NetworkError, PeerError, RejectedError
from decod.membership.identity import HostKey, kept_identity, new_identity
from decod.net.enrolment import Enrollee, visit
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.texts import base32, size_text

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
            manifest = Manifest.from_json(info.manifest_json)
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
