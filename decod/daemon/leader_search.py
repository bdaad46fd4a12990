"""A check that a run does not go on elsewhere, before a former member begins another run.

Another data node may lead the run by now, or the same node on the host that it was moved from.
Without this check, the operator would start a second run, and hand out its join string.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from decod.config.schema import Manifest
from decod.errors import DecodError
from decod.ids import RunId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.channel import UnansweredError
from decod.tasks import cancelled

TIMEOUT_S = 2.0
"""How long one look takes at most. Hosts that do not answer use up all of it."""

PATIENCE_S = 30.0
"""How long to wait for members to elect another leader. An election takes a few seconds."""

SILENCE_MAX_S = 8.0
"""How long to ask hosts of which none answers: they may be under load, or gone."""

PAUSE_S = 1.0

_NOT_YET = "E-NET-004"
"""Code of the error of a node that is starting."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A run that goes on without this host."""

    leader_address: str
    answers: bool
    """Whether the leader itself has answered. A member that names it may be wrong for a while."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """What one address has told about the leader."""

    found: Elsewhere | None = None
    may_change: bool = False
    """It may tell something else soon: its run may elect another leader."""


_SILENT = _Heard()
"""An address that has not answered: its host may be starting, under load, or gone."""


async def seek_elsewhere(
    addresses: tuple[str, ...],
    membership: Membership,
    *,
    several: bool,
    patience_s: float = PATIENCE_S,
    silence_max_s: float = SILENCE_MAX_S,
    pause_s: float = PAUSE_S,
) -> Elsewhere | None:
    """Return where a run goes on without this host, or None if it does not as far as is known.

    Args:
        addresses: The last known addresses of its members.
        membership: This node's. It may have led the run until a moment ago.
        several: The run may have several data nodes, so a silent host may lead it.
        patience_s: How long to wait for members that have no other leader yet.
        silence_max_s: How long to ask if nobody answers, and several may lead.
        pause_s: The wait before they are asked again.
    """
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    while True:
        heard = await _ask_all(addresses, membership, TIMEOUT_S)
        found = [each.found for each in heard if each.found is not None]
        sure = next((each for each in found if each.answers), None)
        if sure is not None:
            return sure
        waited_s = loop.time() - begun_s
        members_may_change = any(each.may_change for each in heard)
        silent_may_lead = several and any(each is _SILENT for each in heard)
        limit_s = patience_s if members_may_change else silence_max_s if silent_may_lead else 0.0
        if waited_s >= limit_s:
            return found[0] if found else None
        await asyncio.sleep(pause_s)


async def _ask_all(
    addresses: tuple[str, ...], membership: Membership, timeout_s: float
) -> Sequence[_Heard]:
    """Return what each address tells, or only that of the leader as soon as that has answered."""
    asked = [asyncio.create_task(_leader_by(address, membership)) for address in addresses]
    heard = list[_Heard]()
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(timeout_s):
                for answer in asyncio.as_completed(asked):
                    heard.append(await answer)
                    if heard[-1].found is not None and heard[-1].found.answers:
                        return heard[-1:]
        finally:
            await cancelled(*asked)
    return heard + [_SILENT] * (len(asked) - len(heard))


async def _leader_by(address: str, membership: Membership) -> _Heard:
    """Ask one member for the leader.

    Members go on naming a lost leader for a while, so the leader itself is asked too.
    """
    try:
        info = await hello(address, _request(membership), membership)
    except UnansweredError:
        return _SILENT
    except DecodError as error:
        return _SILENT if error.code == _NOT_YET else _Heard()
    may_change = _may_elect(info)
    if info.leader is None:
        return _Heard(may_change=may_change)
    if await _leads_there(info, membership):
        return _Heard(Elsewhere(info.leader_address, answers=True))
    # This node does not lead at present. What the others say of it is of the past.
    named = info.leader != membership.node_id
    return _Heard(Elsewhere(info.leader_address, answers=False) if named else None, may_change)


async def _leads_there(info: HelloInfo, membership: Membership) -> bool:
    """Return whether the leader that a member names answers as that."""
    leader, found = info.leader, info
    assert leader is not None
    if info.node_id != leader:
        try:
            request, name = _request(membership, info.run_id), peer_name(leader)
            found = await hello(info.leader_address, request, membership, name=name)
        except DecodError:
            return False
    return found.node_id == leader


def _request(membership: Membership, run_id: RunId | None = None) -> HelloRequest:
    """Return a request that also tells a node with this host's identity that there is another."""
    own = membership.host
    return HelloRequest(run_id=run_id, sender=own.node_id, start=own.start)


def _may_elect(info: HelloInfo) -> bool:
    """Return whether the run of a member can get another leader."""
    try:
        return Manifest.from_json(info.manifest_json).run.batch.num_data_nodes > 1
    except DecodError:
        return False
