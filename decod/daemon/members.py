"""The members of a run as the leader's operator sees them, and bans of them: `decod node`."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decod.clocks import wall_clock
from decod.daemon.frontend import Command
from decod.daemon.run_facts import RunPart
from decod.daemon.succession import RunContacts
from decod.driver.driver import CoreHandle
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.limits import NODE_ID
from decod.membership.ban_list import REASON_MAX_CHARACTERS, Ban
from decod.membership.identity import name_of
from decod.protocol.core.bans import BanList
from decod.protocol.core.effects import BanLiar, ContestBans, UseBans
from decod.protocol.core.events import BansMade
from decod.protocol.core.view import Reach, Role, View
from decod.tasks import in_thread

FIRST_BAN_S = 24 * 3600.0
BAN_MAX_S = 10 * 366 * 24 * 3600.0
EVIDENCE_MAX_CHARACTERS = 1000

_BEGINNING_LENGTH_MIN = 4
_RENEWAL_INTERVAL_S = 3.0
"""How often the leader looks for bans that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A node that the leader knows of."""

    id: NodeId
    name: str
    state: str
    """`leads`, `member`, `candidate` or `gone`."""
    role: Role | None = None
    stage_index: int | None = None
    address: str = ""
    reach: Reach | None = None


class Members:
    """The members of one run, at one of its nodes. Only the leader answers.

    Args:
        part: The node's part in the run.
        contacts: Who leads.
        core: The node's core.
        use: Goes by a list of bans if there is no core yet to do that.
        expiries: When members' certificates end, in seconds of the Unix epoch, as far as known.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self,
        part: RunPart,
        contacts: RunContacts,
        core: CoreHandle,
        use: Callable[[BanList], None],
        expiries: Mapping[NodeId, float],
        note: Callable[..., None],
    ) -> None:
        self._contacts, self._core = contacts, core
        self._use, self._expiries, self._note = use, expiries, note
        self._membership, author = part.membership, part.charter.credential
        self._founder = author.node_id
        self._bans, self._state = self._membership.bans, self._membership.state

    # --- bans ---------------------------------------------------------------------------------

    async def ban(
        self, node: NodeId, *, reason: str, life_s: float | None, evidence: str = ""
    ) -> Ban:
        """Ban a node from the run, or change its ban. This node must lead.

        Args:
            node: The node. It need not be a member.
            reason: Why, for people: the node and all members are told.
            life_s: How long; None for ever.
            evidence: What shows that, for this node's log only.

        Raises:
            ConfigError: This node does not lead (E-RUN-003), the node can't be banned (E-CFG-083,
                E-CFG-084), an argument is out of range (E-CFG-085), there are too many bans
                (E-CFG-082), or the list can't be written (E-CFG-081). It is used all the same then.
        """
        self._require_leader()
        self._require_bannable(node)
        if life_s is not None and not 1 <= life_s <= BAN_MAX_S:
            raise _out_of_range(
                f"a ban for {life_s:g} s", "it lasts from 1 s to 10 years, or for ever"
            )
        if len(reason) > REASON_MAX_CHARACTERS or not reason.isprintable():
            allowed = f"at most {REASON_MAX_CHARACTERS} printable characters"
            raise _out_of_range(f"a reason of {len(reason)} characters", f"it has {allowed}")
        ban, bans = self._made(node, reason, life_s, evidence)
        await self._publish(bans)
        return ban

    def carry_out(self, effect: UseBans | ContestBans | BanLiar) -> None:
        """Do what the core wants of the list of bans."""
        match effect:
            case UseBans(bans):
                self._use(bans)
            case ContestBans(bans):
                # It bans this node, which leads.
                own = self._contacts.own
                self._spread(self._bans.contested(bans, own, self._state, self._term))
            case BanLiar(node, reason) if node != self._founder:
                # The core has excluded it already.
                why = f"audits: {reason}"[:REASON_MAX_CHARACTERS]
                self._spread(self._made(node, why, FIRST_BAN_S, "")[1])

    def _made(
        self, node: NodeId, reason: str, life_s: float | None, evidence: str
    ) -> tuple[Ban, BanList]:
        """Return a new ban, and the list with it."""
        now_s = wall_clock()
        ban = Ban(
            node=node,
            reason=reason,
            made_s=int(now_s),
            until_s=None if life_s is None else int(now_s + life_s),
            by=self._contacts.own,
        )
        made = self._bans.ban(ban, self._state, self._term)
        self._note(
            "member.banned",
            peer=node,
            reason=reason,
            until_s=ban.until_s,
            evidence=evidence[:EVIDENCE_MAX_CHARACTERS],
        )
        return ban, made

    async def unban(self, node: NodeId) -> None:
        """Lift a ban. This node must lead.

        Raises:
            ConfigError: As in `ban`, or the node is not banned (E-CFG-086).
        """
        self._require_leader()
        if self._bans.allowed(node):
            raise ConfigError(
                f"{node} is not banned",
                why="there is nothing to lift",
                fix="see who is banned with: decod node list",
                code="E-CFG-086",
            )
        self._note("member.unbanned", peer=node)
        await self._publish(self._bans.unban(node, self._state, self._term))

    async def keep_current(self) -> None:
        """While this node leads, end bans in time and keep the list believable. Never returns."""
        membership = self._membership
        while True:
            await asyncio.sleep(_RENEWAL_INTERVAL_S)
            if self._contacts.leads() and membership.role is Role.DATA:
                own = membership.papers.credential
                renewed = self._bans.renewed(own, self._state, self._term)
                if renewed is not None:
                    self._spread(renewed)

    async def _publish(self, bans: BanList) -> None:
        self._spread(bans)
        await in_thread(self._bans.keep)

    def _spread(self, bans: BanList) -> None:
        if self._core.runs:
            self._core.post(BansMade(bans))
        else:
            self._use(bans)

    @property
    def _term(self) -> int:
        return self._contacts.leader().term

    def _require_leader(self) -> None:
        if self._contacts.leads():
            return
        leader = self._contacts.leader()
        where = f"{leader.name} at {leader.address}" if leader.address else "that is not known here"
        raise ConfigError(
            "this node does not lead the run",
            why="the leader knows all members, and decides who is banned",
            fix=f"run this command on the leader's host ({where}), with its --state-dir",
            code="E-RUN-003",
        )

    def _require_bannable(self, node: NodeId) -> None:
        if node in (self._contacts.own, self._founder):
            leads = node == self._contacts.own
            raise ConfigError(
                f"{name_of(node)} can't be banned",
                why="it leads the run"
                if leads
                else "its host has started the run, and has its root",
                fix="ban another node, or end the run",
                code="E-CFG-083",
            )
        leading = self._core.leading
        if leading is None:
            return
        if leading.lacking or (node in leading.view and not leading.can_do_without([node])):
            raise ConfigError(
                f"{name_of(node)} can't be banned now",
                why="too many members have gone in this iteration: there would be no quorum",
                fix="try again when `decod status` shows the next iteration",
                code="E-CFG-084",
            )

    # --- the operator's commands --------------------------------------------------------------

    def commands(self) -> dict[str, Command]:
        """Return the commands about nodes."""
        return {
            "node_list": self._list,
            "node_show": self._show,
            "node_ban": self._ban,
            "node_unban": self._unban,
        }

    async def _list(self, _: dict[str, Any]) -> dict[str, Any]:
        self._require_leader()
        return {"nodes": [self._described(known) for known in self._all()]}

    async def _show(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._require_leader()
        known = self._find(asked)
        more: dict[str, Any] = {"capacity": None, "since_iteration": None, "load": None}
        leading = self._core.leading
        members = {} if leading is None else leading.view.by_id
        if leading is not None and (member := members.get(known.id)) is not None:
            load = leading.loads.get(known.id)
            more |= {"capacity": member.capacity, "since_iteration": member.since_iteration}
            if load is not None:
                more["load"] = {"state": load.state, "flows": load.num_flows}
        return {"node": self._described(known) | more}

    async def _ban(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._require_leader()
        known = self._find(asked)
        life_s = asked.get("life_s", FIRST_BAN_S)
        reason = str(asked.get("reason", ""))
        life_s = None if life_s is None else float(life_s)
        ban = await self.ban(known.id, reason=reason, life_s=life_s)
        return {"id": known.id, "name": known.name, "banned": str(ban)}

    async def _unban(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._require_leader()
        known = self._find(asked)
        await self.unban(known.id)
        return {"id": known.id, "name": known.name}

    # --- who is there -------------------------------------------------------------------------

    def _all(self) -> list[_Known]:
        """Return members, candidates and banned nodes, each once."""
        leading = self._core.leading
        found = [] if leading is None else _members(leading.view)
        if leading is not None:
            found += [
                _Known(
                    id=node,
                    name=candidate.join.name or name_of(node),
                    state="candidate",
                    role=candidate.join.role,
                    stage_index=candidate.stage_index,
                    address=candidate.join.address,
                    reach=candidate.join.reach,
                )
                for node, candidate in sorted(leading.candidates.items())
            ]
        known = {each.id for each in found}
        gone = [ban.node for ban in self._bans.all() if ban.node not in known]
        return found + [_Known(id=node, name=name_of(node), state="gone") for node in gone]

    def _find(self, asked: dict[str, Any]) -> _Known:
        """Return the node that a request names.

        Raises:
            ConfigError: It names none, or several (E-CFG-087).
        """
        text = str(asked.get("node", ""))
        known = self._all()
        found = [each for each in known if text in (each.id, each.name)]
        if not found and NODE_ID.fits(text):
            # One that is not here may be banned too.
            found = [_Known(id=NodeId(text), name=name_of(NodeId(text)), state="gone")]
        if not found and len(text) >= _BEGINNING_LENGTH_MIN:
            found = [each for each in known if each.id.startswith(text)]
        if len(found) == 1:
            return found[0]
        ids = ", ".join(each.id[:12] for each in found[:8])
        raise ConfigError(
            f"{text[:60]!r} names {'several nodes' if found else 'no node'}",
            why=f"there are {ids}" if found else "no member, candidate or banned node is called so",
            fix="give the beginning of an id, 4 characters or more: decod node list",
            code="E-CFG-087",
        )

    def _described(self, known: _Known) -> dict[str, Any]:
        """Return a node as the operator is shown it."""
        bans = {ban.node: ban for ban in self._bans.all()}
        ban, until_s = bans.get(known.id), self._expiries.get(known.id)
        if known.id == self._contacts.own:
            until_s = self._membership.papers.expires_s
        role = None if known.role is None else "data" if known.role is Role.DATA else "volunteer"
        return {
            "id": known.id,
            "name": known.name,
            "role": role,
            "state": known.state,
            "stage_index": known.stage_index,
            "address": known.address or None,
            "reach": None if known.reach is None else known.reach.value,
            "papers_end_in_s": None if until_s is None else round(until_s - wall_clock()),
            "ban": None if ban is None else _ban_shown(ban),
        }


def _members(view: View) -> list[_Known]:
    return [
        _Known(
            id=member.node_id,
            name=member.label,
            state="leads" if member.node_id == view.leader else "member",
            role=member.role,
            stage_index=member.stage_index,
            address=member.address,
            reach=member.reach,
        )
        for member in view.members
    ]


def _ban_shown(ban: Ban) -> dict[str, Any]:
    ends_in_s = None if ban.until_s is None else round(ban.until_s - wall_clock())
    return {
        "text": str(ban),
        "reason": ban.reason,
        "ends_in_s": ends_in_s,
        "made_s": ban.made_s,
        "by": ban.by,
        "by_name": name_of(ban.by),
    }


def _out_of_range(what: str, why: str) -> ConfigError:
    return ConfigError(what, why=why, fix="see decod node ban --help", code="E-CFG-085")
