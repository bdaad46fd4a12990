"""`decod join`: finds the run that a join string names, and gives this host to it."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from decod.config.node import NodeConfig
from decod.config.schema import Manifest
from decod.daemon.errors import exit_code_of
from decod.daemon.host import Node, Part, Say, close_host, prepare_host
from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import NodeId, RunId
from decod.net.ask import ask_status, hello
from decod.net.join_string import JoinString
from decod.net.server import HelloRequest
from decod.protocol.effects import Stop
from decod.protocol.view import Role

_STATUS_TIMEOUT_S = 0.3
"""How long the leader may take; after that the node tells what it knows itself."""

_RECORD_TTL_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What `decod join` was asked to do."""

    join_string: str
    node: NodeConfig
    stage_index: int | None = None
    """The relay stage that the operator insists on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """A run as its first peer described it, checked against the join string."""

    run_id: RunId
    manifest: Manifest
    leader: NodeId
    leader_address: str
    observed_address: str
    addresses: tuple[str, ...]


def run_join(options: JoinOptions, say: Say) -> int:
    """Train until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't be found, does not take this node, or goes on without it.
    """
    return asyncio.run(_run(options, say))


async def find_run(text: str) -> Contact:
    """Ask the nodes that a join string names, one after another, about their run.

    Raises:
        NetworkError: The string is damaged, or nobody answers.
        RejectedError: Who answers belongs to another run than the string says.
    """
    join = JoinString.parse(text)
    error: DecodError | None = None
    for address in join.addresses:
        try:
            info = await hello(address, HelloRequest(run_id=join.run_id))
        except NetworkError as caught:
            error = caught
            continue
        manifest = Manifest.from_json(info.manifest_json)
        if not manifest.sha256.startswith(join.manifest_prefix):
            raise RejectedError(
                f"{address} has a run with manifest {manifest.sha256[:16]}, "
                f"the join string names {join.manifest_prefix}",
                why="the run was changed, or somebody else answers there",
                fix="ask the run's organiser for a new join string",
                code="E-REJ-005",
            )
        if info.leader is None:
            error = NetworkError(
                f"{address} does not know the run's leader",
                why="it is starting or cut off",
                fix="try again in a minute",
                code="E-NET-023",
            )
            continue
        return Contact(
            run_id=join.run_id,
            manifest=manifest,
            leader=info.leader,
            leader_address=info.leader_address or address,
            observed_address=info.observed_address,
            addresses=join.addresses,
        )
    assert error is not None
    raise error


async def _run(options: JoinOptions, say: Say) -> int:
    contact = await find_run(options.join_string)
    stages = contact.manifest.run.stages.num_relay_stages
    if options.stage_index is not None and not 1 <= options.stage_index <= stages:
        raise RejectedError(
            f"--stage {options.stage_index} is not a stage of this run",
            why=f"its relay stages are 1 to {stages}",
            fix="choose one of them, or auto",
            code="E-REJ-006",
        )
    folder, identity = prepare_host(options.node)
    try:
        part = Part(
            role=Role.RELAY,
            run_id=contact.run_id,
            manifest=contact.manifest,
            leader=contact.leader,
            leader_address=contact.leader_address,
            stage_index=options.stage_index,
        )
        async with Node(options.node, part, identity, say) as node:
            node.commands["status"] = lambda _: full_status(node)
            _advertise_observed(node, contact)
            say(f"{identity.name} joins run {contact.manifest.run.name} as {node.address}")
            await announce(node, contact.addresses, leads=False)
            await node.prepare()
            return exit_code_of(await run_until_stopped(node))
    finally:
        close_host(folder)


def _advertise_observed(node: Node, contact: Contact) -> None:
    """Use the address that the first peer saw, where this host listens on all and was told none."""
    everywhere = node.config.listen_host in ("0.0.0.0", "::")  # noqa: S104
    if everywhere and node.config.advertise is None and contact.observed_address:
        host, port = contact.observed_address, node.address.rpartition(":")[2]
        node.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def announce(node: Node, contacts: tuple[str, ...], *, leads: bool) -> None:
    """Enter the DHT and publish where this node, and if it leads the leader, can be found."""
    dht = node.dht
    assert dht is not None
    if contacts:
        await dht.bootstrap(contacts)
    record = {"node_id": node.identity.node_id, "address": node.address}
    await dht.publish(f"peer:{node.identity.node_id}", record, ttl_s=_RECORD_TTL_S)
    if leads:
        await dht.publish("leader", {**record, "term": 1}, ttl_s=_RECORD_TTL_S)


async def run_until_stopped(node: Node) -> Stop:
    """Wait for the core to stop; a signal makes it leave first."""
    assert node.driver is not None
    drained = asyncio.create_task(node.wait_drained())
    ends: list[asyncio.Future[Any]] = [drained, node.driver.stopped]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not node.driver.stopped.done():
        node.drain()
    drained.cancel()
    return await node.wait_stopped()


async def full_status(node: Node) -> dict[str, Any]:
    """Return the leader's status with this node's own part, or what this node knows itself."""
    own = node.local_status()
    try:
        text = await ask_status(
            node.part.leader_address,
            node.part.run_id,
            node.identity.node_id,
            timeout_s=_STATUS_TIMEOUT_S,
        )
        status = json.loads(text)
    except (DecodError, ValueError, RecursionError):
        return own
    if not isinstance(status, dict) or status.get("schema_version") != own["schema_version"]:
        return own
    mine = ("node", "state", "counters", "timing", "join_string")
    return {**own, **status, **{key: own[key] for key in mine}}
