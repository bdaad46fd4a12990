"""A check that a run does not go on elsewhere, before a former member begins another run.

Another data node may lead the run by now. Without this check, the operator would start a second
run, and hand out its join string.
"""

import asyncio
from contextlib import suppress

from decod.config.schema import Manifest
from decod.daemon.host import Say
from decod.errors import DecodError, MalformedMessageError
from decod.ids import NodeId, RunId
from decod.net.ask import hello
from decod.net.join_string import JoinString
from decod.net.server import HelloRequest
from decod.tasks import cancelled

TIMEOUT_S = 2.0
"""How long the check may delay a start. Hosts that do not answer use up all of it."""

PATIENCE_S = 30.0
"""How long to wait for members to elect another leader. An election takes a few seconds."""

PAUSE_S = 1.0


async def warn_of_leader(
    run_id: RunId,
    addresses: tuple[str, ...],
    own: NodeId,
    say: Say,
    *,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Warn if a run has a leader elsewhere.

    Args:
        run_id: The run that wrote the checkpoint.
        addresses: The last known addresses of its members.
        own: This node, which may have led it.
        say: Takes the warning, with the join string.
        timeout_s: Timeout for all answers together.
    """
    found, _ = await _ask_all(run_id, addresses, own, timeout_s)
    if found is not None:
        say(
            f"warning: run {run_id} goes on at {found.addresses[0]}, and this is a "
            "second one, from its checkpoint; to take part in the first instead: "
            f"decod leader RUN.toml --join {found}"
        )


async def await_leader(
    run_id: RunId,
    addresses: tuple[str, ...],
    own: NodeId,
    *,
    patience_s: float = PATIENCE_S,
    pause_s: float = PAUSE_S,
) -> JoinString | None:
    """Return the join string of a run that goes on elsewhere, or None if it does not.

    Args:
        run_id: The run.
        addresses: The last known addresses of its members.
        own: This node, which may have led it until a moment ago.
        patience_s: How long to wait for members that have no other leader yet.
        pause_s: The wait before they are asked again.
    """
    until_s = asyncio.get_running_loop().time() + patience_s
    while True:
        found, any_there = await _ask_all(run_id, addresses, own, TIMEOUT_S)
        if found is not None or not any_there or asyncio.get_running_loop().time() > until_s:
            return found
        await asyncio.sleep(pause_s)


async def _ask_all(
    run_id: RunId, addresses: tuple[str, ...], own: NodeId, timeout_s: float
) -> tuple[JoinString | None, bool]:
    """Return a join string that names the leader, if found, and whether any member answered."""
    asked = [asyncio.create_task(_leader_by(address, run_id, own)) for address in addresses]
    any_there = False
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(timeout_s):
                for answer in asyncio.as_completed(asked):
                    found, is_there = await answer
                    any_there |= is_there
                    if found is not None:
                        return found, True
        finally:
            await cancelled(*asked)
    return None, any_there


async def _leader_by(address: str, run_id: RunId, own: NodeId) -> tuple[JoinString | None, bool]:
    """Ask one member for the leader.

    Members go on naming a lost leader for a while, so the leader itself must answer too.

    Returns:
        A join string that names the leader, or None if the leader is this node, is unknown or does
        not answer. And whether a member of the run answered.
    """
    is_there = False
    with suppress(DecodError, MalformedMessageError):
        request = HelloRequest(run_id=run_id)
        info = await hello(address, request)
        is_there = True
        if info.leader is None or info.leader == own:
            return None, True
        if info.node_id != info.leader:
            info = await hello(info.leader_address, request)
        if info.node_id == info.leader:
            prefix = Manifest.from_json(info.manifest_json).sha256[:16]
            there = (info.leader_address,)
            return JoinString(run_id=run_id, manifest_prefix=prefix, addresses=there), True
    return None, is_there
