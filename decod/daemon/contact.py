"""Finding a run: from the addresses of some nodes to its manifest and its leader."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from decod.config.schema import Manifest
from decod.daemon.node_errors import TemporaryError
from decod.daemon.reachability import useless_here
from decod.daemon.run_facts import RunClock, RunPart
from decod.errors import (
    ConfigError,
    DecodError,
    MalformedMessageError,
    NetworkError,
    PeerError,
    RejectedError,
)
from decod.ids import NodeId, RunId
from decod.membership.credential import Statement
from decod.membership.identity import name_of
from decod.membership.papers import Membership
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.channel import UNANSWERED, ClosedError, UnansweredError
from decod.net.dht import Dht, DhtPorts
from decod.net.dht_record import LEADER
from decod.net.enrolment import WaitingError
from decod.net.join_string import JoinString
from decod.tasks import in_thread

if TYPE_CHECKING:
    from decod.daemon.host import Host

T = TypeVar("T")

_ANY_HOST = "0.0.0.0"  # noqa: S104 - answers come from other hosts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """A run as its first peer described it. Its charter has been checked."""

    run_id: RunId
    manifest: Manifest
    charter: Statement
    leader: NodeId
    leader_address: str
    observed_address: str
    addresses: tuple[str, ...]

    def part_of(self, membership: Membership) -> RunPart:
        """Return a member's part in this run."""
        return RunPart(
            membership=membership,
            run_id=self.run_id,
            manifest=self.manifest,
            charter=self.charter,
            leader=self.leader,
            leader_address=self.leader_address,
            contacts=self.addresses,
        )


_NOT_YET = ("E-NET-004", "E-NET-023")
"""Codes of errors that mean that a node is starting or has lost its leader."""

PATIENCE_S = 60.0
"""How long to keep looking for a run whose nodes exist, but are slow or don't know the leader
yet."""

_PAUSE_S = 1.0
"""First wait before asking again. It doubles each time."""

_ASK_AGAIN_S = 5.0
"""Between two questions whether this host may come in."""


async def patiently(
    find: Callable[[], Awaitable[T]],
    say: Callable[[str], None],
    *,
    join: JoinString | None = None,
    patience_s: float = PATIENCE_S,
    pause_s: float = _PAUSE_S,
) -> T:
    """Return the result of `find`, which is called again while that may help.

    A host that is under load, or stalls, may look absent for a while.

    Args:
        find: Looks once.
        say: Takes lines for the operator's terminal.
        join: The join string that the operator has given: if nobody answers, the error is about it.
        patience_s: How long to look.
        pause_s: The first wait.

    Raises:
        DecodError: The last error of `find`. Errors that waiting can't mend are raised at once:
            that nobody listens there, or that another run does.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_s
    while True:
        try:
            return await find()
        except (NetworkError, TemporaryError) as error:
            if not _is_hopeful(error) or loop.time() + pause_s > until_s:
                raise error if join is None else about_join_string(error, join) from None
            say(f"{error.what} ({error.why}): asking again in {pause_s:.0f} s")
        await asyncio.sleep(pause_s)
        pause_s *= 2


async def let_in(
    find: Callable[[], Awaitable[T]],
    say: Callable[[str], None],
    *,
    join: JoinString,
    host: "Host",
) -> T:
    """Return the result of `find` as `patiently` does, however long the organiser takes to decide.

    Once the organiser is known to decide, a leader that is gone for a while is waited for, too.

    Args:
        find: Asks once to be let in.
        say: Takes lines for the operator's terminal.
        join: The join string that the operator has given.
        host: Tells what is waited for.
    """
    try:
        async with host.waits.of("an answer from the run"):
            return await patiently(find, say, join=join)
    except WaitingError as error:
        say(f"{error.why[0].upper()}{error.why[1:]}: this host asks again every few seconds")
    host.ready()
    is_gone = False
    async with host.waits.of("the organiser to let this host in"):
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            try:
                return await find()
            except WaitingError:
                is_gone = False
            except (NetworkError, TemporaryError) as error:
                if not is_gone:
                    say(f"{error.what} ({error.why}): this host asks again every few seconds")
                is_gone = True


def about_join_string(error: DecodError, join: JoinString) -> DecodError:
    """Return the error for a join string at whose addresses nobody answers; others as they are."""
    if error.code != UNANSWERED or isinstance(error, ClosedError):
        return error
    num, first = len(join.addresses), join.addresses[0]
    if num == 1:
        what, who = f"nobody answers at {first}, the only address in this join string", "that host"
    else:
        what = f"nobody answers at the {num} addresses in this join string: {first} and others"
        who = "each of those hosts"
    return type(error)(
        what,
        why=f"{error.why}, so {who} is gone or can't be reached from here. The run may go on at "
        "other hosts, which the string does not name",
        fix="ask the organiser for a newer join string; if it names the same addresses, a node must"
        " run there, with its TCP port open",
        code=error.code,
    )


def _is_hopeful(error: DecodError) -> bool:
    return isinstance(error, (UnansweredError, TemporaryError)) or error.code in _NOT_YET


async def find_run(
    addresses: tuple[str, ...], membership: Membership, *, avoid_own: bool = False
) -> Contact:
    """Ask the nodes at some addresses, one after another, about their run.

    If a node knows the run but not its leader's address, the DHT is asked for that.

    Args:
        addresses: The nodes to ask, best first.
        membership: This node's. The run must be one of its root.
        avoid_own: The leader must be another node than this one, which may have led the run until a
            moment ago.

    Raises:
        ConfigError: Another process leads the run with this node's identity (E-CFG-045), or a list
            of bans can't be kept (E-CFG-081).
        TemporaryError: Its nodes still name this node as their leader (E-RUN-011).
        NetworkError: Nobody answers, or the leader's address is useless here (E-NET-037).
        RejectedError: The node that answers belongs to another root, or speaks another version; or
            the leader is banned, as far as this node knows (E-REJ-021).
        PeerError: An answer breaks the protocol.
    """
    error: DecodError | None = None
    refusal: DecodError | None = None
    for address in addresses:
        try:
            request = HelloRequest(bans=membership.bans.version)
            info = await hello(address, request, membership)
            # Of a model that transformers builds, that takes seconds.
            manifest = await asyncio.to_thread(Manifest.from_json, info.manifest_json)
        except NetworkError as caught:
            # Keep the first error: the operator's addresses come first.
            error = error or caught
            continue
        except (RejectedError, PeerError) as caught:
            refusal = refusal or caught
            continue
        await _take_bans(membership, info)
        leader = await _leader_of(address, info, addresses, membership)
        if leader is None:
            error = NetworkError(
                f"{address} does not know the run's leader",
                why="it is starting or cut off",
                fix="try again in a minute",
                code="E-NET-023",
            )
            continue
        if banned := membership.bans.refusal(leader[0]):
            refusal = refusal or _led_by_banned(leader[0], banned)
            continue
        if avoid_own and leader[0] == membership.node_id:
            error = await _succeeding(membership, leader[1], info.run_id)
            continue
        if unfit := await useless_here(leader[1], address):
            error = error or unfit
            continue
        return Contact(
            run_id=info.run_id,
            manifest=manifest,
            charter=info.charter,
            leader=leader[0],
            leader_address=leader[1],
            observed_address=info.observed_address,
            addresses=addresses,
        )
    # A remembered address may belong to somebody else by now: another's silence is more hopeful.
    if refusal is not None and (error is None or not _is_hopeful(error)):
        raise refusal
    assert error is not None
    raise error


async def _take_bans(membership: Membership, info: HelloInfo) -> None:
    """Go by a later list of bans that a node has told, if it is believed.

    A list that this host has from an earlier time may ban whoever leads by now.
    """
    found = membership.bans.read(info.bans) if info.bans else ""
    if not isinstance(found, str) and info.leader not in found.banned:
        membership.bans.use(found)
        await in_thread(membership.bans.keep)


def _led_by_banned(leader: NodeId, banned: str) -> RejectedError:
    """Return the error for a run whose leader this node must not talk to."""
    return RejectedError(
        f"the run is led by {name_of(leader)}, which is {banned}",
        why="the others have not heard of that ban, and this node talks to no banned one",
        fix="ask the organiser; a ban that should not be can be waited for, or its file "
        "bans.json moved away",
        code="E-REJ-021",
    )


async def _succeeding(membership: Membership, address: str, run_id: RunId) -> TemporaryError:
    """Return the error for a run whose nodes still name this node as their leader.

    Args:
        membership: This node's.
        address: The address at which it led, as they say.
        run_id: The run.

    Raises:
        ConfigError: A process with this node's identity answers there (E-CFG-045).
    """
    with suppress(NetworkError, RejectedError, MalformedMessageError):
        own, start = membership.node_id, membership.host.start
        info = await hello(
            address, HelloRequest(run_id=run_id, sender=own, start=start), membership
        )
        if info.node_id == membership.node_id:
            raise ConfigError(
                f"the run's leader at {address} has this node's identity",
                why="the state folder was copied or moved, and two nodes can't have one identity",
                fix="give a new --state-dir",
                code="E-CFG-045",
            )
    return TemporaryError(
        "the others still take this node for their leader",
        why=f"it led them from {address}, where nobody leads now",
        fix="run the same command again when another leads; if no data node is left, go on with"
        " --resume latest",
        code="E-RUN-011",
    )


async def _leader_of(
    address: str, info: HelloInfo, addresses: tuple[str, ...], membership: Membership
) -> tuple[NodeId, str] | None:
    """Return the leader's id and address from a node's answer, else from the DHT."""
    if info.leader is not None and info.leader_address:
        return info.leader, info.leader_address
    if info.leader == info.node_id:
        return info.node_id, address
    found = await find_leader(membership, info.run_id, addresses, now_s=info.clock_s)
    # Another's record may be older, so the node's own answer comes first.
    return found if found is not None and info.leader in (None, found[0]) else None


async def find_leader(
    membership: Membership,
    run_id: RunId,
    addresses: tuple[str, ...],
    *,
    now_s: float,
    listen_host: str = _ANY_HOST,
) -> tuple[NodeId, str] | None:
    """Look up id and address of a run's leader in its DHT; return None if they are not found.

    Args:
        membership: This node's.
        run_id: The run.
        addresses: Some nodes of the run.
        now_s: The wall clock of one of them.
        listen_host: The local address at which answers can arrive.
    """
    clock = RunClock()
    clock.compare(now_s)
    dht = Dht(membership, run_id, DhtPorts(clock=clock, allowed=membership.bans.allowed))
    try:
        await dht.start(listen_host, 0)
    except NetworkError:
        return None
    try:
        await dht.bootstrap(addresses)
        record = await dht.lookup(LEADER)
    finally:
        await dht.close()
    return None if record is None else (record.owner, record.value["address"])
