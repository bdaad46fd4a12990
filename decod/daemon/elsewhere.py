"""Whether a run goes on at other hosts while its leader is about to resume a checkpoint of it.

Another data node may lead it by now. Who does not know that would train on in a second run, and
hand out its join string.
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

TIMEOUT_S = 2.0
"""How long a start may be held up. Hosts that are gone without a word take all of it."""


async def tell_elsewhere(
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
        addresses: Where its members were.
        own: This node, which may have led it.
        say: Takes the warning, with the join string.
        timeout_s: For all answers together.
    """
    asked = [asyncio.create_task(_leader_by(address, run_id, own)) for address in addresses]
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(timeout_s):
                for answer in asyncio.as_completed(asked):
                    if (found := await answer) is not None:
                        say(
                            f"warning: run {run_id} goes on at {found.addresses[0]}, and this is a "
                            "second one, from its checkpoint; to take part in the first instead: "
                            f"decod leader RUN.toml --join {found}"
                        )
                        break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def _leader_by(address: str, run_id: RunId, own: NodeId) -> JoinString | None:
    """Return the leader's join string, if a member knows another than this node and that answers.

    Members that have lost theirs name it for a while.
    """
    with suppress(DecodError, MalformedMessageError):
        request = HelloRequest(run_id=run_id)
        info = await hello(address, request)
        if info.leader is None or info.leader == own:
            return None
        if info.node_id != info.leader:
            info = await hello(info.leader_address, request)
        if info.node_id == info.leader:
            prefix = Manifest.from_json(info.manifest_json).sha256[:16]
            there = (info.leader_address,)
            return JoinString(run_id=run_id, manifest_prefix=prefix, addresses=there)
    return None
