"""A peer's way into a collaborative run: it begins one, goes on with one, or joins one."""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from decod.config.node_config import default_state_dir
from decod.config.terms import RunTerms
from decod.daemon.contact import patiently
from decod.daemon.host import Host, Say
from decod.daemon.member_admission import enter, found, make_usable
from decod.daemon.node_folder import KnownPeers, is_in_use
from decod.daemon.reachability import useless_here
from decod.daemon.run_facts import RunClock
from decod.errors import DecodError, NetworkError
from decod.ids import NodeId, RunId
from decod.membership.credential import Statement
from decod.membership.papers import TERMS, Membership
from decod.membership.statements import new_charter
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.texts import base32

# --- state folders -------------------------------------------------------------------------------
# The state folders of training loops that have chosen none.


_FOLDERS_MAX = 64
"""Loops on one host that have no state folder of their own choice."""


def _folders() -> list[Path]:
    return [default_state_dir() / "loops" / str(number + 1) for number in range(_FOLDERS_MAX)]


def free_folders() -> list[Path]:
    """Return state folders that no other loop on this host uses, the one to prefer first."""
    return [folder for folder in _folders() if not is_in_use(folder)]


def folders_in_use() -> list[Path]:
    """Return the state folders of the loops that run on this host."""
    return [folder for folder in _folders() if is_in_use(folder)]


# --- the way in ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPart:
    """A peer's part in a run."""

    membership: Membership
    run_id: RunId
    terms: RunTerms
    charter: Statement
    """A data node's word that the two belong together."""
    contacts: tuple[str, ...] = ()
    """Addresses of peers that may be there."""
    known: tuple[tuple[NodeId, str], ...] = ()
    """Peers that have answered, and where."""
    observed_address: str = ""
    """This host's IP address as the first peer saw it."""
    clock: RunClock


class EntryWay:
    """The way of one peer into its run.

    Args:
        terms: What this peer's script says of the run.
        host: This host.
        say: Takes lines for the user.
    """

    def __init__(self, terms: RunTerms, host: Host, say: Say) -> None:
        self._terms, self._host, self._say = terms, host, say
        self._state_dir = host.state_dir

    async def begin(self) -> PeerPart:
        """Begin a run of this host's, or go on with the last one of its name.

        Raises:
            DecodError: The root's key can't be used, or the run goes on under other terms.
        """
        terms = self._terms
        terms.check()
        membership = found(self._state_dir, terms.run, self._host.identity, TERMS)
        known = KnownPeers(self._state_dir)
        last = known.newest(terms.run)
        contacts = known.find(membership.root)
        run_id = _new_run_id(membership.root, terms)
        if last is not None and last.root == membership.root:
            try:
                return await self._enter(membership, contacts)
            except NetworkError:
                self._say("none of the hosts that were in this run answers: it begins anew")
        charter = new_charter(membership, run_id, terms.to_json())
        return PeerPart(
            membership=membership, run_id=run_id, terms=terms, charter=charter, clock=RunClock()
        )

    async def join(self, text: str) -> PeerPart:
        """Join the run of a join string.

        Raises:
            NetworkError: The string is damaged, or nobody answers.
            RejectedError: This host is not admitted, or its script differs from the run's terms.
        """
        join, state_dir = JoinString.parse(text), self._state_dir
        # Whoever has a data node's token may admit others, and goes on to do so.
        role = Role.RELAY if join.token is None else join.token.role

        async def seek() -> PeerPart:
            membership = await enter(join, role, state_dir, self._host.identity)
            return await self._enter(membership, KnownPeers(state_dir).addresses_of(join))

        return await patiently(seek, self._say, join=join)

    async def _enter(self, membership: Membership, addresses: tuple[str, ...]) -> PeerPart:
        """Return this peer's part in the run of those who answer at some addresses."""
        await make_usable(membership, addresses)
        info, address = await _first_info(membership, addresses)
        theirs = RunTerms.from_json(info.manifest_json)
        self._terms.require_same(theirs)
        clock = RunClock()
        clock.compare(info.clock_s)
        known = [(info.node_id, address)]
        if info.leader is not None and info.leader_address:
            if unfit := await useless_here(info.leader_address, address):
                raise unfit
            known.append((info.leader, info.leader_address))
        return PeerPart(
            membership=membership,
            run_id=info.run_id,
            terms=theirs,
            charter=info.charter,
            contacts=addresses,
            known=tuple(each for each in dict.fromkeys(known) if each[0] != membership.node_id),
            observed_address=info.observed_address,
            clock=clock,
        )


async def _first_info(membership: Membership, addresses: tuple[str, ...]) -> tuple[HelloInfo, str]:
    """Return the first answer of other members, and where it came from.

    Raises:
        DecodError: Nobody answers.
    """
    first: DecodError | None = None
    for address in addresses:
        try:
            request = HelloRequest(bans=membership.bans.version)
            info = await hello(address, request, membership)
        except DecodError as error:
            first = first or error
            continue
        if info.node_id != membership.node_id:
            return info, address
    raise first or NetworkError(
        "no address of the run is known",
        why="the join string holds none, and this host has not been in the run",
        fix="copy the join string anew",
        code="E-NET-031",
    )


def _new_run_id(root: bytes, terms: RunTerms) -> RunId:
    parts = (root, terms.sha256.encode(), secrets.token_bytes(16))
    return RunId(base32(hashlib.sha256(b"".join(parts)).digest())[:26])
