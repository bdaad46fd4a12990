"""A check that a run does not go on elsewhere, before a former member begins another run.

Another data node may lead the run by now. Without this check, the operator would start a second
run, and hand out its join string.
"""

import asyncio
from contextlib import suppress

from decod.daemon.host import Say
from decod.errors import DecodError, MalformedMessageError
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.net.ask import hello
from decod.net.join_string import JoinString
from decod.net.server import HelloInfo, HelloRequest
from decod.tasks import cancelled

TIMEOUT_S = 2.0
"""How long the check may delay a start. Hosts that do not answer use up all of it."""

PATIENCE_S = 30.0
"""How long to wait for members to elect another leader. An election takes a few seconds."""

PAUSE_S = 1.0


async def warn_of_leader(
    addresses: tuple[str, ...], membership: Membership, say: Say, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Warn if a run has a leader elsewhere.

    Args:
        addresses: The last known addresses of its members.
        membership: This node's. It may have led the run.
        say: Takes the warning, with the join string.
        timeout_s: Timeout for all answers together.
    """
    found, _ = await _ask_all(addresses, membership, timeout_s)
    if found is not None:
        join = JoinString(root=membership.root, addresses=(found.leader_address,))
        say(
            f"warning: run {found.run_id} goes on at {found.leader_address}, and this is a "
            "second one, from its checkpoint; to take part in the first instead: "
            f"decod leader RUN.toml --join {join}"
        )


async def await_leader(
    addresses: tuple[str, ...],
    membership: Membership,
    *,
    patience_s: float = PATIENCE_S,
    pause_s: float = PAUSE_S,
) -> str | None:
    """Return the address of the leader of a run that goes on elsewhere, or None if it does not.

    Args:
        addresses: The last known addresses of its members.
        membership: This node's. It may have led the run until a moment ago.
        patience_s: How long to wait for members that have no other leader yet.
        pause_s: The wait before they are asked again.
    """
    until_s = asyncio.get_running_loop().time() + patience_s
    while True:
        found, any_there = await _ask_all(addresses, membership, TIMEOUT_S)
        if found is not None:
            return found.leader_address
        if not any_there or asyncio.get_running_loop().time() > until_s:
            return None
        await asyncio.sleep(pause_s)


async def _ask_all(
    addresses: tuple[str, ...], membership: Membership, timeout_s: float
) -> tuple[HelloInfo | None, bool]:
    """Return the leader's own answer, if it was found, and whether any member answered."""
    asked = [asyncio.create_task(_leader_by(address, membership)) for address in addresses]
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


async def _leader_by(address: str, membership: Membership) -> tuple[HelloInfo | None, bool]:
    """Ask one member for the leader.

    Members go on naming a lost leader for a while, so the leader itself must answer too.

    Returns:
        The leader's own answer, or None if the leader is this node, is unknown or does not answer.
        And whether a member of the run answered.
    """
    is_there = False
    with suppress(DecodError, MalformedMessageError):
        info = await hello(address, HelloRequest(), membership)
        is_there = True
        if info.leader is None or info.leader == membership.node_id:
            return None, True
        if info.node_id != info.leader:
            request = HelloRequest(run_id=info.run_id)
            name = peer_name(info.leader)
            info = await hello(info.leader_address, request, membership, name=name)
        if info.node_id == info.leader:
            return info, True
    return None, is_there
