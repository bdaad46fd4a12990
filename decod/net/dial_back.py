"""Dial a node at the address that it gives for itself, before it is let in.

A node behind a firewall can reach others, so it looks fine from its own side. Before a node is let
in, another dials it back, and describes any failure in words for its operator.
"""

import asyncio
import socket
from collections import OrderedDict
from contextlib import suppress

from decod.errors import DecodError, RejectedError
from decod.ids import NodeId, RunId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.net.address import split_address
from decod.net.ask import hello
from decod.net.failure import UNPROVEN
from decod.net.limits import LIMITS, Limits
from decod.net.server import HelloRequest

_FOUND_MAX = 1024


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
        self._dials: dict[tuple[NodeId, str], asyncio.Task[str]] = {}
        self._found: OrderedDict[tuple[NodeId, str], float] = OrderedDict()
        """When each node was last reached at its address, on the loop's clock."""

    async def dial(self, node: NodeId, address: str) -> str | None:
        """Dial `node` at `address`, unless it was reached there within `dial_again_s`.

        Returns:
            Why the node can't be reached; empty if it can. None if the dial was cancelled, because
            too many others came after it.
        """
        key, loop = (node, address), asyncio.get_running_loop()
        if key in self._found and loop.time() - self._found[key] < self._limits.dial_again_s:
            return ""
        if key not in self._dials:
            if len(self._dials) >= self._limits.dials_max:
                # A reachable node answers long before its dial is the oldest.
                next(iter(self._dials.values())).cancel()
            self._dials[key] = loop.create_task(self._dial(node, address))
            self._dials[key].add_done_callback(lambda _: self._dials.pop(key))
        dial = self._dials[key]
        # Others may wait for the same dial, so a cancelled caller must not cancel it.
        await asyncio.wait({dial})
        if dial.cancelled():
            return None
        if not dial.result():
            self._found.pop(key, None)
            self._found[key] = loop.time()
            if len(self._found) > _FOUND_MAX:
                self._found.popitem(last=False)
        return dial.result()

    async def close(self) -> None:
        """Cancel all dials and wait until they have ended."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)

    async def _dial(self, node: NodeId, address: str) -> str:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                await _connect(address)
                answered = await hello(
                    address,
                    self._request,
                    self._membership,
                    name=peer_name(node),
                    limits=self._limits,
                )
        except TimeoutError:
            seconds = f"{self._limits.dial_timeout_s:g} s"
            return f"no answer within {seconds}, so a firewall or router may be in the way"
        except ConnectionRefusedError:
            return "nobody listens there"
        except socket.gaierror:
            return "that name is unknown"
        except OSError as error:
            return f"the system says: {error.strerror or error}"
        except RejectedError as error:
            if error.code == UNPROVEN:
                return "another node answers there"
            return "a node of another run, or another release, answers there"
        except DecodError:
            return "somebody listens there, but does not answer as a node does"
        # Its certificate has proven who it is: what it says must agree with that.
        return "" if answered.node_id == node else "another node answers there"


async def _connect(address: str) -> None:
    """Open a connection and close it. The system's errors say more than gRPC's."""
    _, writer = await asyncio.open_connection(*split_address(address))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
