"""Invitations to a run: join strings with tokens, which a data node makes for its operator."""

import asyncio
import shlex
from collections.abc import Callable
from typing import Any

from decod.clocks import wall_clock
from decod.daemon.audit_feed import OPERATOR
from decod.daemon.frontend import Command
from decod.daemon.succession import Contacts
from decod.errors import ConfigError, DecodError
from decod.ids import NodeId, RunId
from decod.membership.identity import name_of
from decod.membership.registrar import Registrar
from decod.membership.tokens import USES_MAX, Token, TokenRecord
from decod.membership.waiting_list import ID_CHARACTERS
from decod.net.enrolment import exchange_tokens
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.wire import validate

# --- join tokens at several data nodes -----------------------------------------------------------
# Join tokens at the data nodes of a run: all of them know the same, a moment after each change.
#
# Whoever does not lead asks the leader every few seconds, and at once after a change of its own.
# The leader tells the others of its changes. So an elected leader knows the tokens of its
# predecessor.


INTERVAL_S = 10.0
_PAUSE_S = 1.0
"""After a change, for others that follow: many nodes may join at once."""


class TokenRegister:
    """Keeps a data node's join tokens the same as those of the others.

    Args:
        registrar: Has the tokens.
        run_id: The run.
        contacts: Knows the leader, and the addresses of the other data nodes.
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


# --- invitations ---------------------------------------------------------------------------------


FIRST_LIFE_S = 24 * 3600.0
FIRST_USES = 20
"""How many nodes may join with a join string that the leader prints by itself."""

LIFE_MAX_S = 30 * 24 * 3600.0


class Invitations:
    """The join tokens of one node, and the operator's commands about them.

    Args:
        registrar: Admits nodes; None at a volunteer, which can't.
        contacts: The addresses of data nodes.
        run_id: The run.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self,
        registrar: Registrar | None,
        contacts: Contacts,
        run_id: RunId,
        note: Callable[..., None],
    ) -> None:
        self._registrar, self._contacts = registrar, contacts
        self._made: list[Token] = []
        """The tokens that this daemon has made, the latest last. Only here are their secrets."""
        self.on_changed: list[Callable[[], None]] = []
        """Called when the operator has made or revoked a token."""
        self._register: TokenRegister | None = None
        if registrar is not None:
            self._register = TokenRegister(registrar, run_id, contacts, note)

    async def keep_level(self) -> None:
        """At a data node, keep its tokens the same as those of the others. Never returns there."""
        if self._register is not None:
            await self._register.keep_level()

    def invite(
        self,
        role: Role,
        *,
        life_s: float = FIRST_LIFE_S,
        uses: int = FIRST_USES,
        note: str = "",
        asked: bool = False,
    ) -> str:
        """Return a join string with a new token, for nodes of some role.

        Args:
            role: Theirs.
            life_s: How long the token lets nodes in.
            uses: How many.
            note: The operator's own words about it.
            asked: The operator has asked for it.

        Raises:
            ConfigError: This node can't admit nodes of that role (E-CFG-056), or the token can't be
                kept (E-CFG-039, E-CFG-043).
        """
        registrar = self._require(role)
        token = registrar.tokens.create(
            role, now_s=wall_clock(), life_s=life_s, uses=uses, note=note
        )
        who = {"actor": OPERATOR} if asked else {}
        made = {"token": token.id, "role": role.value, "uses": uses, "life_s": life_s}
        registrar.note("token.created", **who, **made, remark=note)
        self._made.append(token)
        return self._string(registrar, token)

    def current(self, role: Role) -> str | None:
        """Return the join string to hand out, with the addresses of all data nodes there are now.

        It is the newest of those that this daemon has made and that still let nodes in, unless an
        earlier one lets more of them in. None if there is none.

        Args:
            role: The role of those who use it.
        """
        if self._registrar is None:
            return None
        now_s, best, most = wall_clock(), None, 0
        for token in self._made:
            record = self._registrar.tokens.find(token.id)
            if token.role is role and record is not None and record.is_live(now_s):
                num_left = record.uses - len(record.used_by)
                if num_left >= max(1, most):
                    best, most = token, num_left
        return None if best is None else self._string(self._registrar, best)

    def _string(self, registrar: Registrar, token: Token) -> str:
        root, addresses = registrar.membership.root, self._contacts.addresses()
        return str(JoinString(root=root, addresses=addresses, token=token))

    def _require(self, role: Role) -> Registrar:
        """Return the registrar, if it can admit nodes of that role."""
        registrar = self._registrar
        if registrar is None:
            raise ConfigError(
                "this node is a volunteer's",
                why="only data nodes admit others",
                fix="run this command on the organiser's host, with the --state-dir of its node",
                code="E-CFG-056",
            )
        if role is Role.DATA and registrar.membership.root_key is None:
            raise ConfigError(
                "this host can't admit data nodes",
                why="only the host that has started the run can",
                fix="run this command there",
                code="E-CFG-056",
            )
        return registrar

    # --- the operator's commands --------------------------------------------------------------

    def commands(self) -> dict[str, Command]:
        """Return the commands about tokens."""
        return {
            "token_create": self._create,
            "token_list": self._list,
            "token_revoke": self._revoke,
            "newcomer_list": self._newcomers,
            "newcomer_decide": self._decide,
        }

    def num_newcomers(self) -> int:
        """Return how many hosts wait to be let in."""
        return 0 if self._registrar is None else len(self._registrar.newcomers.all())

    async def _newcomers(self, _: dict[str, Any]) -> dict[str, Any]:
        waiting = self._require(Role.RELAY).newcomers
        return {
            "newcomers": [
                {
                    "id": each.node_id,
                    "name": name_of(each.node_id),
                    "address": each.address,
                    "token": each.token,
                    "age_s": round(waiting.age_s(each), 1),
                }
                for each in waiting.all()
            ]
        }

    async def _decide(self, asked: dict[str, Any]) -> dict[str, Any]:
        registrar, text = self._require(Role.RELAY), str(asked.get("node", ""))
        may_enter, found = asked.get("may_enter") is True, list[NodeId]()
        if len(text) >= ID_CHARACTERS:
            found = registrar.newcomers.find(text, may_enter=may_enter)
        if len(found) != 1:
            raise ConfigError(
                f"{text[:60]!r} names {'several newcomers' if found else 'no newcomer'}",
                why="a newcomer is gone if it has not asked for a minute, or has come in",
                fix=f"give at least {ID_CHARACTERS} characters of an id (decod node list); "
                "decod node ban removes a member",
                code="E-CFG-087",
            )
        registrar.newcomers.decide(found[0], may_enter=may_enter)
        decided = "member.accepted" if may_enter else "member.rejected"
        registrar.note(decided, actor=OPERATOR, peer=found[0])
        return {"id": found[0], "name": name_of(found[0]), "may_enter": may_enter}

    async def _create(self, asked: dict[str, Any]) -> dict[str, Any]:
        role = Role.DATA if asked.get("role") == "data" else Role.RELAY
        life_s, uses = float(asked.get("ttl_s", FIRST_LIFE_S)), int(asked.get("uses", FIRST_USES))
        if not 0 < life_s <= LIFE_MAX_S or not 1 <= uses <= USES_MAX:
            raise ConfigError(
                f"a token for {uses} nodes and {life_s:g} s",
                why=f"it is for 1 to {USES_MAX} nodes and at most 30 days",
                fix="make several, or renew it later",
                code="E-CFG-057",
            )
        note = validate.clip_reason(str(asked.get("note", "")))
        join = self.invite(role, life_s=life_s, uses=uses, note=note, asked=True)
        self._tell_changed()
        how = "decod join" if role is Role.RELAY else "decod leader RUN.toml --join"
        answer = {"join_string": join, "command": f"{how} {shlex.quote(join)}"}
        return answer | await self._shared()

    def _tell_changed(self) -> None:
        for told in self.on_changed:
            told()

    async def _shared(self) -> dict[str, Any]:
        """Tell the leader of a change, if this node does not lead; return why it does not know."""
        if self._register is None or self._contacts.leads():
            return {"unshared": ""}
        return {"unshared": await self._register.level()}

    async def _list(self, _: dict[str, Any]) -> dict[str, Any]:
        now_s, tokens = wall_clock(), self._require(Role.RELAY).tokens
        return {"tokens": [_described(record, now_s) for record in tokens.all()]}

    async def _revoke(self, asked: dict[str, Any]) -> dict[str, Any]:
        token_id, registrar = str(asked.get("id", "")), self._require(Role.RELAY)
        if not registrar.tokens.revoke(token_id):
            raise ConfigError(
                f"no token {token_id[:40]!r} is known",
                why="another node may have made it, or it was forgotten after its end",
                fix="see the ids with: decod token list",
                code="E-CFG-058",
            )
        registrar.note("token.revoked", token=token_id)
        self._tell_changed()
        return {"revoked": token_id} | await self._shared()


def _described(record: TokenRecord, now_s: float) -> dict[str, Any]:
    """Return a token as the operator is shown it."""
    state = "live" if record.is_live(now_s) else "revoked" if record.revoked else "expired"
    if state == "live" and len(record.used_by) >= record.uses:
        state = "used up"
    return {
        "id": record.id,
        "role": "data" if record.role is Role.DATA else "volunteer",
        "state": state,
        "uses": record.uses,
        "used": len(record.used_by),
        "expires_in_s": round(record.expires_s - now_s),
        "note": record.note,
    }
