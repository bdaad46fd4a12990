"""What the node on this host knows, and what another node of its run sees of this host.

The node on this host is asked through its control socket. Another node is asked as a member, if
this host is one, and else with the token of the join string, which is not used up. Only members are
dialled back.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decod.clocks import wall_clock
from decod.config.schema import Manifest
from decod.daemon.control import ask
from decod.daemon.member_admission import (
    known_membership,
    most_telling,
    token_for,
    usable_membership,
)
from decod.daemon.node_folder import KnownPeers
from decod.errors import DecodError
from decod.ids import RunId
from decod.insight.network_checks import RunningNode, RunSeen, TriedReach
from decod.membership.identity import kept_identity, new_identity
from decod.membership.papers import Membership
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.enrolment import Enrollee, visit
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from decod.texts import from_base32

_ANSWER_TIMEOUT_S = 5.0
"""Of the node on this host."""

ASKED_MAX = 6
"""Most nodes of the run that are asked, one after another. Each may take seconds to be silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """Whom to ask about a run, and as whom."""

    addresses: tuple[str, ...]
    """Nodes of the run, best first. This host's own is not among them."""
    asker: Membership | Enrollee

    @property
    def member(self) -> Membership | None:
        """This host's membership; None if it has no more than a token."""
        return self.asker if isinstance(self.asker, Membership) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a node of the run."""

    seen: RunSeen
    run_id: RunId
    run: RunConfig | None
    """None for the run of a training script."""
    ahead_s: float
    """By how many seconds this host's clock is ahead of that node's."""


# --- the node on this host ------------------------------------------------------------------------


def find_node(state_dir: Path) -> RunningNode | None:
    """Return the node that uses a state folder; None if none answers there."""
    try:
        status = ask(state_dir, {"command": "status"}, timeout_s=_ANSWER_TIMEOUT_S)
    except DecodError:
        return None
    return node_of(status)


def node_of(status: Mapping[str, Any]) -> RunningNode:
    """Return the node that gives this status, of `decod status` or of a training script's node.

    A node of another release may leave fields out.
    """
    own = status.get("node") or {}
    address = str(own.get("address") or status.get("address") or "")
    return RunningNode(
        name=str(own.get("name") or status.get("node_id") or "a node"),
        state=str(status.get("state") or "it serves a training script"),
        run_name=str(status.get("run_name") or status.get("run") or ""),
        run_id=str(status.get("run_id") or ""),
        address=address,
        device=str(own.get("device") or ""),
        release=status.get("decod_version"),
        message=str(status.get("message") or ""),
        others=tuple(each for each in _addresses_in(status) if each not in ("", address)),
        suspended=bool(own.get("device_free")),
    )


def _addresses_in(status: Mapping[str, Any]) -> dict[str, None]:
    """Return the addresses of the leader and of all members, in this order."""
    leader = (status.get("leader") or {}).get("address") or ""
    members = (
        str(node.get("address") or "")
        for stage in status.get("stages") or ()
        for node in stage.get("nodes") or ()
    )
    return dict.fromkeys((str(leader), *members))


# --- another node ---------------------------------------------------------------------------------


async def inquiry_by_string(join: JoinString, state_dir: Path, node: RunningNode | None) -> Inquiry:
    """Return whom to ask about the run of a join string.

    Args:
        join: The join string.
        state_dir: The state folder, which may hold papers of an earlier time in the run.
        node: The node that uses the folder, if one does.

    Raises:
        RejectedError: This host is no member, and the join string has no token (E-REJ-014).
        DecodError: What the folder holds can't be read, or papers can't be renewed.
    """
    host = kept_identity(state_dir) or new_identity()
    known = KnownPeers(state_dir).addresses_of(join)
    own = None if node is None else node.address
    addresses = tuple(address for address in known if address != own)
    for role in (Role.RELAY, Role.DATA):
        member = await usable_membership(join, role, state_dir, host, keeps=False)
        if member is not None:
            return Inquiry(addresses=addresses, asker=member)
    token = token_for(Role.RELAY, join) if join.token is None else join.token
    return Inquiry(addresses=addresses, asker=Enrollee.with_token(join.root, host, token))


def inquiry_by_node(node: RunningNode, state_dir: Path) -> Inquiry | None:
    """Return whom to ask about the run of the node on this host; None if nobody is known.

    Raises:
        ConfigError: The identity or the papers can't be read.
    """
    host = kept_identity(state_dir)
    if host is None or not node.others:
        return None
    found = list[Membership]()
    for folder in (state_dir / "memberships").glob("*"):
        with suppress(ValueError):
            member = known_membership(state_dir, host, from_base32(folder.name), keeps=False)
            found += [] if member is None else [member]
    if not found:
        return None
    # A running node renews its papers, so they are the newest.
    newest = max(found, key=lambda member: member.papers.issued_s)
    return Inquiry(addresses=node.others, asker=newest)


async def ask_run(inquiry: Inquiry) -> Answer:
    """Return the first answer of a node of the run.

    Raises:
        DecodError: Nobody has answered well. It is the error that says most.
    """
    assert inquiry.addresses
    errors = list[DecodError]()
    for address in inquiry.addresses[:ASKED_MAX]:
        begin_s, begin_wall_s = time.perf_counter(), wall_clock()
        try:
            info = await _greet(address, inquiry)
        except DecodError as error:
            errors.append(error)
            continue
        duration_s = time.perf_counter() - begin_s
        run = _run_of(info)
        seen = RunSeen(
            asked=address,
            name=info.run_id if run is None else run.name,
            duration_s=duration_s,
            observed=info.observed_address,
        )
        # The other's clock was read at some time in between.
        ahead_s = begin_wall_s + duration_s / 2 - info.clock_s
        return Answer(seen=seen, run_id=info.run_id, run=run, ahead_s=ahead_s)
    raise most_telling(errors)


async def _greet(address: str, inquiry: Inquiry) -> HelloInfo:
    if isinstance(inquiry.asker, Enrollee):
        return await visit(address, inquiry.asker)
    return await hello(address, HelloRequest(), inquiry.asker)


def _run_of(info: HelloInfo) -> RunConfig | None:
    with suppress(DecodError):
        return Manifest.from_json(info.manifest_json).run
    return None


async def ask_reach(answer: Answer, member: Membership | None, own_address: str) -> TriedReach:
    """Have the node that has answered dial this host.

    Args:
        answer: Its answer.
        member: This host's membership. Without it, nobody dials.
        own_address: `host:port` at which others are to reach this host.

    Raises:
        DecodError: The node does not answer again.
    """
    asked, unreached = answer.seen.asked, None
    if member is not None:
        request = HelloRequest(
            run_id=answer.run_id, sender=member.node_id, sender_address=own_address
        )
        unreached = (await hello(asked, request, member)).unreached
    return TriedReach(asked=asked, own=own_address, unreached=unreached)
