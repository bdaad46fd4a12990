"""`decod join`: finds the run of a join string, and gives this host to it or says what it takes."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from decod.config.node_config import NodeConfig
from decod.config.node_settings import given_in, with_values
from decod.config.schema import Manifest
from decod.config.settings_file import read_settings
from decod.daemon.checkpointing import store_of
from decod.daemon.contact import Contact, find_run, patiently
from decod.daemon.demands import (
    Demands,
    about,
    disk,
    downloads,
    lines_of,
    memory,
    network,
    short_lines,
)
from decod.daemon.desk import Desk
from decod.daemon.device_owner import try_device
from decod.daemon.host import Host, Say
from decod.daemon.leaving import Leaving, run_until_left
from decod.daemon.member_admission import enter, most_telling, token_for, usable_membership
from decod.daemon.node_folder import KnownPeers
from decod.daemon.page.page_server import page_served
from decod.daemon.pipeline_node import PipelineNode
from decod.daemon.progress_display import ProgressDisplay, show_transfer
from decod.daemon.reachability import (
    advertised,
    not_reached,
    reach_advice,
    why_unreached,
)
from decod.daemon.rejoining import Rejoining
from decod.daemon.run_facts import RunPart
from decod.daemon.stage_memory import require_memory
from decod.daemon.succession import RECORD_TTL_S, publish_leader, seek_leader
from decod.errors import DecodError, NetworkError, PeerError, RejectedError
from decod.membership.certificates import peer_name
from decod.membership.identity import HostKey, kept_identity, new_identity
from decod.membership.papers import Membership
from decod.net.address import split_address
from decod.net.ask import HelloRequest, hello
from decod.net.dht_record import PEER
from decod.net.enrolment import Enrollee, visit
from decod.net.interfaces import PortMapper
from decod.net.join_string import JoinString
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.view import Duty, Reach, Role
from decod.run.run_config import Organisation, RunConfig
from decod.tasks import beside, until_first
from decod.texts import base32, size_text

_HELD_TIMEOUT_S = 15.0
"""How long the leader may take to know of the call that a node keeps open."""


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


def run_join(options: JoinOptions, say: Say) -> int:
    """Train until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't be found, does not take this node, or goes on without it.
    """
    return run_until_left(_run(options, say), say)


async def _run(options: JoinOptions, say: Say) -> int:
    desk, join = Desk(options.node, volunteers=True), JoinString.parse(options.join_string)
    store_of(options.node)  # One that can't be used is told before anything is fetched.
    with Leaving(say) as leaving, Host(desk.config, leaving, desk) as host:
        search = _Search(options, join, host.identity)
        contact = await leaving.unless_asked(patiently(search.seek, say, join=join))
        _tell(contact.manifest.run, options.stage_index, desk.config, say)
        say = host.terminal.above(say)
        lives = Rejoining[Contact](host, say, rejoins=options.node.rejoins)
        async with host.tended(), page_served(desk.config, host, say):
            return await lives.run(
                contact,
                lambda found: _live(replace(options, node=desk.config), host, search, found, lives),
            )


def _tell(run: RunConfig, stage_index: int | None, config: NodeConfig, say: Say) -> None:
    """Tell the operator what the run takes of this host, before it takes anything."""
    # The leader may choose any stage. The first relay stage is the largest, if they differ.
    stage = stage_index or 1
    say(f"joining {about(run)}; Ctrl-C leaves it")
    for line in short_lines(run, stage, config):
        say(line)


class _Search:
    """The search for the run, by this node as its member."""

    def __init__(self, options: JoinOptions, join: JoinString, identity: HostKey) -> None:
        self._options, self._join, self._identity = options, join, identity
        self._membership: Membership | None = None

    @property
    def membership(self) -> Membership:
        assert self._membership is not None, "the run was found"
        return self._membership

    async def seek(self) -> Contact:
        """Become a member if need be, find the run, and check that it has the stage demanded."""
        state_dir, join = self._options.node.state_dir, self._join
        self._membership = await enter(join, Role.RELAY, state_dir, self._identity)
        addresses = KnownPeers(state_dir).addresses_of(join)
        contact = await find_run(addresses, self._membership, avoid_own=True)
        require_stage(self._options, contact.manifest.run)
        return contact


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


async def _live(
    options: JoinOptions,
    host: Host,
    search: _Search,
    contact: Contact,
    lives: Rejoining[Contact],
) -> Stop:
    """Live one life in the run; return how it ended."""
    part = RunPart(
        membership=search.membership,
        run_id=contact.run_id,
        manifest=contact.manifest,
        charter=contact.charter,
        leader=contact.leader,
        leader_address=contact.leader_address,
        observed_address=contact.observed_address,
        stage_index=options.stage_index,
        serves=options.serves,
        duty=options.duty,
    )
    manifest = contact.manifest
    async with PipelineNode(options.node, part, host, lives.say, again=lives.again) as node:
        lives.begins(node)
        node.say(f"{node.name} joins run {manifest.run.name} as {node.address}")
        core = node.core
        fetched = show_transfer(
            lambda: core.driver.transfer if core.started else None, host.terminal
        )
        async with beside(fetched):
            stop = await take_part(node, contact.addresses)
        # It outlives the node, and so must not hold it.
        await lives.ended(node, stop, search.seek)
    return stop


Lead = Callable[[], Awaitable[Stop]]
"""The work of a node that has been elected, until it stops."""


async def take_part(
    node: PipelineNode, contacts: tuple[str, ...], lead: Lead | None = None
) -> Stop:
    """Train in a run that another node leads, until the run ends or this node leaves.

    Args:
        node: This node.
        contacts: Addresses of nodes of the run.
        lead: Called if this node is elected; None if it can't be elected.
    """

    async def begin() -> None:
        await find_reach(node, mapper)
        await node.prepare()

    # Not awaited: after much churn, the DHT names many nodes that no longer answer.
    async with PortMapper() as mapper, beside(announce(node, contacts, leads=False)):
        if not await node.unless_drained(begin()):
            return Stop(StopReason.DRAINED, "it had not begun to train")
        return await run_until_stopped(node, lead)


async def find_reach(node: PipelineNode, mapper: PortMapper) -> None:
    """Find out how others reach this node. A volunteer that nobody can dial keeps calls open.

    Args:
        node: This node.
        mapper: Asks the router to let others through, if they don't get through.

    Raises:
        NetworkError: Nobody can dial this data node, or the leader takes no open call (E-NET-013).
        RejectedError: Another host has this node's identity (E-REJ-022).
    """
    part, passes_on = node.part, node.config.passes_on
    asked = (part.membership, part.run_id, part.leader_address, node.address)
    unreached = await why_unreached(*asked)
    if unreached and await _maps_port(node, mapper):
        unreached = await why_unreached(*asked)
    if part.role is Role.DATA:
        if unreached:
            raise not_reached(part.leader_address, node.address, unreached)
        node.use_reach(reach_of_data_node(node.config))
        return
    if not unreached:
        node.use_reach(Reach.PASSES_ON if passes_on else Reach.DIALLED)
        return
    node.use_reach(Reach.OUTBOUND)
    node.note("node.outbound", address=node.address, reason=unreached)
    dialling = node.gateway.dialling
    dialling.set_address(part.leader, part.leader_address)
    if not await dialling.await_held(part.leader, _HELD_TIMEOUT_S):
        raise not_reached(part.leader_address, node.address, unreached)
    node.say(
        f"nobody can dial this node at {node.address}, so it keeps its connections open itself"
    )
    advice = reach_advice(node.address, part.leader_address)
    node.say(f"it trains all the same; to be dialled, {advice}")


async def _maps_port(node: PipelineNode, mapper: PortMapper) -> bool:
    """Have the router pass the port on, if that is wanted; return whether it does."""
    port = split_address(node.address)[1]
    if not node.config.maps_port or node.config.advertise is not None:
        return False
    reason = await mapper.map(port)
    if reason:
        node.note("port.unmapped", port=port, reason=reason)
        return False
    node.note("port.mapped", port=port)
    return True


def reach_of_data_node(config: NodeConfig) -> Reach:
    """Return how others reach a data node: they dial it, and it passes on unless told otherwise."""
    return Reach.DIALLED if config.passes_on is False else Reach.PASSES_ON


async def announce(node: PipelineNode, contacts: tuple[str, ...], *, leads: bool) -> None:
    """Introduce this node to the leader, enter the DHT, and publish this node's address there."""
    dht = node.dht
    if not leads:
        await _introduce(node)
    dialling = node.gateway.dialling
    await dialling.known.wait()
    if contacts:
        await dht.bootstrap(contacts)
    if dialling.reach is not Reach.OUTBOUND:
        await dht.publish(PEER, {"address": node.address}, ttl_s=RECORD_TTL_S)
    if leads:
        await publish_leader(dht, node.contacts)


async def _introduce(node: PipelineNode) -> None:
    """Tell the leader that this node is getting ready, to be told if the run ends meanwhile."""
    part = node.part
    request = HelloRequest(run_id=part.run_id, sender=node.node_id, sender_address=node.address)
    with suppress(DecodError):
        # Others may have another clock, or lie about it.
        name = peer_name(part.leader)
        info = await hello(part.leader_address, request, part.membership, name=name)
        node.note("node.introduced", address=part.leader_address)
        if off_s := part.clock.compare(info.clock_s):
            way = "ahead of" if off_s > 0 else "behind"
            node.note("clock.differs", seconds=round(abs(off_s)), way=way)


async def run_until_stopped(node: PipelineNode, lead: Lead | None = None) -> Stop:
    """Wait until the core has stopped. If the daemon is asked to leave, tell the core to leave."""
    core, requests, gateway = node.core, node.requests, node.gateway
    display = ProgressDisplay(node.progress, node.say, node.name)
    try:
        seeking = seek_leader(node.dht, core, gateway.client.set_address)
        async with beside(seeking, requests.count_down(node.say)):
            stopped, elected = core.driver.stopped, node.elected
            await until_first(requests.wait_leaving(), stopped, elected.wait())
            if elected.is_set() and lead is not None and core.runs:
                display.stop()
                return await lead()
            if core.runs:
                requests.tell_core()
            stop = await node.wait_stopped()
    finally:
        display.show_last()
    if stop.reason is StopReason.DRAINED:
        node.say(f"left the run: {stop.detail}")
    elif stop.reason is StopReason.FINISHED:
        node.say(f"the run has ended: {stop.detail}")
    return stop


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
