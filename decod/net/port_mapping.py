"""Asks a router to pass connections on to this host, by UPnP.

Many routers of homes do, and take that back by themselves after a while. The request is therefore
repeated, and withdrawn at the end. The library `miniupnpc` speaks with the router. It blocks, so it
is called in threads. It is optional: a volunteer can do without being dialled.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, Self

from decod.tasks import cancelled, in_thread
from decod.texts import clean_text

LEASE_S = 3600
"""How long a router keeps a mapping that is not renewed."""

_DISCOVERY_MS = 2000
_PROTOCOLS = ("TCP", "UDP")
_REASON_MAX_CHARACTERS = 100
_ANSWER_S = 15.0
"""How long a router may take for one thing. The library itself may wait without end."""


class Router(Protocol):
    """A router of the home network, as `miniupnpc.UPnP` shows it. Its methods raise `Exception`."""

    lanaddr: str
    """This host's address in the home network."""

    def addportmapping(self, *args: Any) -> bool:
        """Map a port: outer port, protocol, host, inner port, name, remote host, lease."""

    def deleteportmapping(self, *args: Any) -> bool:
        """Remove a mapping: outer port, protocol."""


def find_router() -> Router | str:
    """Return the router of this network, or why there is none. Blocks for some seconds."""
    try:
        import miniupnpc
    except ImportError:
        return "decod was installed without the extra `nat`, which asks routers"
    found = miniupnpc.UPnP()
    found.discoverdelay = _DISCOVERY_MS
    try:
        found.discover()
        found.selectigd()
    except Exception:  # noqa: BLE001 - the library raises nothing more specific.
        return "no router answers to UPnP"
    router: Router = found
    return router


class PortMapper:
    """One mapped port. Leaving the `async with` block removes the mapping.

    Args:
        find: Finds the router.
    """

    def __init__(self, find: Callable[[], Router | str] = find_router) -> None:
        self._find, self._port = find, 0
        self._router: Router | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._renewing is None:
            return
        await cancelled(self._renewing)
        with suppress(TimeoutError):  # The mapping ends by itself within the lease.
            async with asyncio.timeout(_ANSWER_S):
                await in_thread(self._remove)

    async def map(self, port: int) -> str:
        """Map a port, and keep it mapped; return why that can't be, or empty text.

        Args:
            port: Of this host and of the router, for TCP and UDP.
        """
        self._port = port
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await in_thread(self._find)
                if isinstance(found, str):
                    return found
                self._router = found
                refusal = await in_thread(self._request)
        except TimeoutError:
            return f"the router does not answer within {_ANSWER_S:.0f} s"
        if not refusal:
            self._renewing = asyncio.create_task(self._renew())
        return refusal

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 2)
            # A router that refuses now may have been restarted, and is asked again next time.
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await in_thread(self._request)

    def _request(self) -> str:
        """Ask the router for the mapping; return why it refuses, or empty text."""
        router, port = self._router, self._port
        assert router is not None
        try:
            for protocol in _PROTOCOLS:
                asked = (port, protocol, router.lanaddr, port, "decod", "", LEASE_S)
                if not router.addportmapping(*asked):
                    return f"the router refuses port {port}"
        except Exception as error:  # noqa: BLE001 - the library raises nothing more specific.
            return _reason(error)
        return ""

    def _remove(self) -> None:
        assert self._router is not None
        for protocol in _PROTOCOLS:
            with suppress(Exception):  # It ends by itself within the lease.
                self._router.deleteportmapping(self._port, protocol)


def _reason(error: Exception) -> str:
    text = clean_text(str(error), limit=_REASON_MAX_CHARACTERS)
    return f"the router says: {text}"
