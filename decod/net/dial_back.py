"""Dial a node at the address that it gives for itself, before it is let in.

A node behind a firewall can reach others, so it looks fine from its own side. Before a node is let
in, another dials it back, and describes any failure in words for its operator.
"""

import asyncio
import math
import socket
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace

from decod.errors import DecodError, RejectedError
from decod.ids import NodeId, RunId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.net.address import LOCAL, split_address
from decod.net.ask import HelloRequest, hello
from decod.net.failure import UNPROVEN
from decod.net.net_limits import LIMITS, Limits

_FOUND_MAX = 1024

_ANOTHER = "another node answers there"


@dataclass(frozen=True, slots=True)
class Dialled:
    """What a dial has found."""

    unreached: str = ""
    """Why the node can't be reached, for its operator; empty if it can."""
    start: int = 0
    """The number of its daemon's start; 0 if it can't be reached."""


class DialBack:
    """Dials to nodes, one at a time for each node and address.

    Args:
        run_id: The run that the dialled nodes must be in.
        membership: That of the node that dials.
        limits: Timeouts, and the number of dials at a time.
    """

    def __init__(self, run_id: RunId, membership: Membership, limits: Limits = LIMITS) -> None:
        self._request = HelloRequest(run_id=run_id, sender=membership.node_id)
        self._membership = membership
        self._limits = limits
        self._dials: dict[tuple[NodeId, str, str], asyncio.Task[Dialled]] = {}
        """By node, address, and what the node is told of a twin."""
        self._found: OrderedDict[tuple[NodeId, str], tuple[float, Dialled]] = OrderedDict()
        """When each node was last reached at its address, on the loop's clock."""

    async def dial(self, node: NodeId, address: str, start: int = 0) -> Dialled | None:
        """Dial `node` at `address`, unless it was reached there within `dial_again_s`.

        Args:
            node: The node.
            address: Where it says that it is.
            start: The start of its daemon that it must have been. 0: any.

        Returns:
            What was found. None if the dial was cancelled, because too many others came after it.
        """
        key, now_s = (node, address), asyncio.get_running_loop().time()
        at_s, known = self._found.get(key, (-math.inf, Dialled()))
        if now_s - at_s < self._limits.dial_again_s and start in (0, known.start):
            return known
        dialled = await self.dial_anew(node, address)
        if dialled is not None and not dialled.unreached:
            self._found.pop(key, None)
            self._found[key] = (asyncio.get_running_loop().time(), dialled)
            if len(self._found) > _FOUND_MAX:
                self._found.popitem(last=False)
        return dialled

    async def dial_anew(self, node: NodeId, address: str, twin_address: str = "") -> Dialled | None:
        """Dial `node` at `address`, even if it was reached there a moment ago; else as `dial`.

        Args:
            node: The node.
            address: Where it was last; or the local socket that leads to it.
            twin_address: It is told that another host has its identity there. Empty: it is not.
        """
        key = (node, address, twin_address)
        if key not in self._dials:
            if len(self._dials) >= self._limits.dials_max:
                # A reachable node answers long before its dial is the oldest.
                next(iter(self._dials.values())).cancel()
            self._dials[key] = asyncio.create_task(self._dial(*key))
            self._dials[key].add_done_callback(lambda _: self._dials.pop(key))
        dial = self._dials[key]
        # Others may wait for the same dial, so a cancelled caller must not cancel it.
        await asyncio.wait({dial})
        return None if dial.cancelled() else dial.result()

    async def close(self) -> None:
        """Cancel all dials and wait until they have ended."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)

    async def _dial(self, node: NodeId, address: str, twin_address: str) -> Dialled:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                if not address.startswith(LOCAL):
                    await _connect(address)
                answered = await hello(
                    address,
                    replace(self._request, twin_address=twin_address),
                    self._membership,
                    name=peer_name(node),
                    limits=self._limits,
                )
        except (OSError, DecodError) as error:
            return Dialled(self._reason_of(error))
        # Its certificate has proven who it is: what it says must agree with that.
        return Dialled(start=answered.start) if answered.node_id == node else Dialled(_ANOTHER)

    def _reason_of(self, error: OSError | DecodError) -> str:
        match error:
            case TimeoutError():
                seconds = f"{self._limits.dial_timeout_s:g} s"
                return f"no answer within {seconds}, so a firewall or router may be in the way"
            case ConnectionRefusedError():
                return "nobody listens there"
            case socket.gaierror():
                return "that name is unknown"
            case OSError():
                return f"the system says: {error.strerror or error}"
            case RejectedError():
                if error.code == UNPROVEN:
                    return _ANOTHER
                return "a node of another run, or another release, answers there"
        return "somebody listens there, but does not answer as a node does"


async def _connect(address: str) -> None:
    """Open a connection and close it. The system's errors say more than gRPC's."""
    _, writer = await asyncio.open_connection(*split_address(address))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
