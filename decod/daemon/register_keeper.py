"""Join tokens at the data nodes of a run: all of them know the same, a moment after each change.

Whoever does not lead asks the leader every few seconds, and at once after a change of its own. The
leader tells the others of its changes. So an elected leader knows the tokens of its predecessor.
"""

import asyncio
from collections.abc import Callable

from decod.daemon.succession import Contacts
from decod.errors import DecodError
from decod.ids import RunId
from decod.membership.registrar import Registrar
from decod.net.enrolment import exchange_tokens

INTERVAL_S = 10.0
_PAUSE_S = 1.0
"""After a change, for others that follow: many nodes may join at once."""


class TokenRegister:
    """Keeps a data node's join tokens the same as those of the others.

    Args:
        registrar: Has the tokens.
        run_id: The run.
        contacts: Who leads, and where the other data nodes are.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self,
        registrar: Registrar,
        run_id: RunId,
        contacts: Contacts,
        note: Callable[..., None],
    ) -> None:
        self._registrar, self._tokens, self._run_id = registrar, registrar.tokens, run_id
        self._contacts, self._note = contacts, note
        self._changed = asyncio.Event()
        self._unreached: set[str] = set()
        """Data nodes that could not be told the last time."""

    async def keep_level(self) -> None:
        """Exchange tokens with others in time. Never returns."""
        told = self._changed.set
        self._tokens.on_changed.append(told)
        try:
            while True:
                changed = await self._wait()
                if changed or not self._contacts.leads():
                    await self.level()
                if changed:
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._tokens.on_changed.remove(told)

    async def _wait(self) -> bool:
        """Wait for a change, but not for long; return whether there was one."""
        try:
            async with asyncio.timeout(INTERVAL_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def level(self) -> str:
        """Exchange tokens with the leader, or as the leader with all others.

        Returns:
            Why somebody could not be told; empty if all were.
        """
        leader, addresses = self._contacts.leads_elsewhere(), self._contacts.admitting()
        if leader is not None:
            addresses = (leader,)
        problems = await asyncio.gather(*(self._level_with(address) for address in addresses))
        return next(filter(None, problems), "")

    async def _level_with(self, address: str) -> str:
        if not address:
            return "the leader's address is not known"
        try:
            await exchange_tokens(address, self._run_id, self._registrar)
        except DecodError as error:
            if address not in self._unreached:
                self._unreached.add(address)
                self._note("tokens.unshared", address=address, reason=error.what)
            return f"{error.what}: {error.why}"
        self._unreached.discard(address)
        return ""
