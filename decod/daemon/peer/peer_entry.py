"""A peer's way into a collaborative run: it begins one, goes on with one, or joins one."""

from dataclasses import dataclass
from pathlib import Path

from decod.config.node_config import default_state_dir
from decod.config.terms import RunTerms
from decod.daemon.contact import patiently
from decod.daemon.host import Host, Say
from decod.daemon.member_admission import enter, found, make_usable
from decod.daemon.node_folder import KnownPeers, is_in_use
from decod.daemon.reachability import useless_here
from decod.daemon.run_facts import NodePart, RunClock, new_run_id
from decod.errors import DecodError, NetworkError
from decod.ids import NodeId
from decod.membership.papers import TERMS, Membership
from decod.membership.statements import new_charter
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role

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
class PeerPart(NodePart):
    """A peer's part in a run."""

    terms: RunTerms
    known: tuple[tuple[NodeId, str], ...] = ()
    """Peers that have answered, and where."""


async def begin(terms: RunTerms, host: Host, say: Say) -> PeerPart:
    """Begin a run of this host's, or go on with the last one of its name.

    Args:
        terms: What this peer's script says of the run.
        host: This host.
        say: Takes lines for the user.

    Raises:
        DecodError: The root's key can't be used, or the run goes on under other terms.
    """
    terms.check()
    membership = found(host.state_dir, terms.run, host.identity, TERMS)
    known = KnownPeers(host.state_dir)
    last = known.newest(terms.run)
    contacts = known.find(membership.root)
    run_id = new_run_id(membership.root, terms.sha256)
    if last is not None and last.root == membership.root:
        try:
            return await _entered(terms, membership, contacts)
        except NetworkError:
            say("none of the hosts that were in this run answers: it begins anew")
    charter = new_charter(membership, run_id, terms.to_json())
    return PeerPart(membership=membership, run_id=run_id, terms=terms, charter=charter)


async def join_run(text: str, terms: RunTerms, host: Host, say: Say) -> PeerPart:
    """Join the run of a join string. For the other arguments see `begin`.

    Raises:
        NetworkError: The string is damaged, or nobody answers.
        RejectedError: This host is not admitted, or its script differs from the run's terms.
    """
    join, state_dir = JoinString.parse(text), host.state_dir
    # Whoever has a data node's token may admit others, and goes on to do so.
    role = Role.RELAY if join.token is None else join.token.role

    async def seek() -> PeerPart:
        membership = await enter(join, role, state_dir, host.identity)
        return await _entered(terms, membership, KnownPeers(state_dir).addresses_of(join))

    return await patiently(seek, say, join=join)


async def _entered(terms: RunTerms, membership: Membership, addresses: tuple[str, ...]) -> PeerPart:
    """Return this peer's part in the run of those who answer at some addresses."""
    await make_usable(membership, addresses)
    info, address = await _first_info(membership, addresses)
    theirs = RunTerms.from_json(info.manifest_json)
    terms.require_same(theirs)
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
