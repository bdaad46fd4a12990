"""The options of `decod leader`, and the place in a run that follows from them.

This host starts a new run, resumes one from a checkpoint, or becomes a further data node of a run
that another host leads.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decod.config.node_config import RESUME_AUTO, RESUME_LATEST, NodeConfig
from decod.config.run_file import RunFile
from decod.config.schema import Manifest
from decod.daemon.checkpointing import store_of
from decod.daemon.contact import find_run
from decod.daemon.host import Host, Say
from decod.daemon.member_admission import enter, known_membership, make_usable
from decod.daemon.node_errors import TemporaryError
from decod.daemon.node_folder import KnownPeers, LastRun
from decod.daemon.resume import Resumed, has_checkpoint
from decod.daemon.run_facts import RunPart, new_run_id
from decod.errors import ConfigError, DecodError, RejectedError
from decod.ids import RunId
from decod.membership.certificates import peer_name
from decod.membership.papers import Membership
from decod.membership.statements import new_charter
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.channel import UnansweredError
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.tasks import cancelled, in_thread

# --- whether the run goes on elsewhere -----------------------------------------------------------
# A check that a run does not go on elsewhere, before a former member begins another run.
#
# Another data node may lead the run by now, or the same node on the host that it was moved from.
# Without this check, the operator would start a second run, and hand out its join string.


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


# --- the way in ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderOptions:
    """The options of `decod leader`."""

    run_file: RunFile
    node: NodeConfig
    init_dir: Path | None = None
    """Folder of a model to start from."""
    resume: int | None = None
    """Iteration of the checkpoint to go on from, `RESUME_LATEST`, or `RESUME_AUTO`; None begins
    anew."""
    begins_anew: bool = False
    """A second run is wanted, even if the last one of this name goes on elsewhere."""
    join: str | None = None
    """Join string of a run to join as a further data node."""
    export_dir: Path | None = None
    """Folder for the final model; None for one under the state folder."""
    data: str | None = None
    """Absolute path or URL of a corpus, which overrides the run file's."""
    join_path: Path | None = None
    """File to which the join string is written when this node leads."""


async def continued(options: LeaderOptions, host: Host, say: Say) -> LeaderOptions:
    """Return options that are fit for what has become of the last run of this name, if any.

    If the run has further data nodes, another of them may lead it, and this host may only be cut
    off. Then `RESUME_AUTO` joins that run again, and never begins a second one. Otherwise it
    resumes from the latest checkpoint, or begins anew if there is none.

    Raises:
        TemporaryError: No leader of that run can be found (E-RUN-012).
        ConfigError: The run goes on, and other options would begin a second one (E-RUN-013). Or it
            is over, and this host has nothing of it to go on from (E-RUN-049).
    """
    if options.join is not None or options.begins_anew:
        return options
    state_dir, run = options.node.state_dir, options.run_file.run
    auto, several = options.resume == RESUME_AUTO, run.batch.num_data_nodes > 1
    known, ended = (_last_run(state_dir, run.name, host, over=over) for over in (False, True))
    if known is not None:
        elsewhere = await _look(known, options, host, say, several=several)
        if elsewhere is not None and not auto:
            raise _goes_on(known, elsewhere)
        if elsewhere is not None and elsewhere.answers:
            address = elsewhere.leader_address
            say(f"run {known.run_id} goes on at {address}: this node joins it again")
            join = JoinString(root=known.root, addresses=(address,))
            return dataclasses.replace(options, join=str(join), init_dir=None, resume=None)
        if auto and (several or elsewhere is not None):
            raise TemporaryError(
                f"nobody leads run {known.run_id} where this host knows of nodes",
                why="they are gone, or can't be reached, and others may go on with it",
                fix="try again later; if it is over, begin a second run with --resume latest, or "
                "with --new-run if this host has no checkpoint",
                code="E-RUN-012",
            )
    if not auto:
        return options
    store = store_of(options.node)
    if await in_thread(lambda: has_checkpoint(state_dir, run.name, store)):
        return dataclasses.replace(options, init_dir=None, resume=RESUME_LATEST)
    if known is None and ended is not None:
        raise ConfigError(
            f"run {ended.run_id} ({ended.name}) is over, and this host has no checkpoint of it",
            why="its last leader has that, on another host: here a second run would begin with "
            "iteration 1",
            fix="go on there with --resume auto, or begin a second run with --new-run instead of "
            "--resume",
            code="E-RUN-049",
        )
    return dataclasses.replace(options, resume=None)


async def _look(
    known: LastRun, options: LeaderOptions, host: Host, say: Say, *, several: bool
) -> Elsewhere | None:
    """Return where a run goes on without this host, as far as that can be told.

    Raises:
        DecodError: The run must not be begun a second time, and this host can't ask its members.
    """
    back = JoinString(root=known.root, addresses=known.addresses)
    try:
        membership = await enter(back, Role.DATA, options.node.state_dir, host.identity)
    except DecodError as error:
        if options.resume == RESUME_AUTO and several:
            raise
        say(f"warning: nobody can tell whether run {known.run_id} goes on: {error.what}")
        return None
    say(f"looking whether run {known.run_id} goes on elsewhere")
    return await seek_elsewhere(known.addresses, membership, several=several)


def _last_run(state_dir: Path, name: str, host: Host, *, over: bool) -> LastRun | None:
    """Return the last run of this name in which this host was a data node, if it can be told.

    Args:
        state_dir: This node's.
        name: Of the run.
        host: This one.
        over: A run that has ended is meant; otherwise, one that may go on.
    """
    for last in KnownPeers(state_dir).runs(name, over=over):
        known = known_membership(state_dir, host.identity, last.root)
        # A volunteer's run may have the same name. It is somebody else's.
        if known is None or known.role is Role.DATA:
            return last
    return None


def _goes_on(known: LastRun, elsewhere: Elsewhere) -> ConfigError:
    """Return the error for a command that would begin a second run while the first goes on."""
    where = elsewhere.leader_address
    return ConfigError(
        f"run {known.run_id} ({known.name}) goes on without this host, led from {where}",
        why="this command would begin a second run, which shares neither members nor progress",
        fix="take part again with --resume auto, or begin a second run all the same with --new-run",
        code="E-RUN-013",
    )


def founded(
    options: LeaderOptions,
    membership: Membership,
    manifest: Manifest,
    data_dir: Path,
    resumed: Resumed | None,
) -> RunPart:
    """Return this node's part in a new run: the leader's."""
    run_id = new_run_id(membership.root, manifest.sha256)
    return RunPart(
        membership=membership,
        run_id=run_id,
        manifest=manifest,
        charter=new_charter(membership, run_id, manifest.to_json()),
        leader=membership.node_id,
        data_dir=data_dir,
        init_dir=options.init_dir,
        checkpoint_dir=None if resumed is None else resumed.folder,
        checkpoint_chunks={} if resumed is None else resumed.chunks,
    )


@dataclass(frozen=True, slots=True)
class EntryFinder:
    """The search for this host's place in a run that another host leads."""

    options: LeaderOptions
    host: Host
    manifest: Manifest
    """The manifest that follows from this host's run file and data."""
    data_dir: Path

    async def join(self, text: str) -> RunPart:
        """Become a member with a join string, and return a data node's place in the run.

        Raises:
            NetworkError: The string is damaged, or nobody answers.
            RejectedError: This host is not admitted, or its manifest differs (E-REJ-004).
            DecodError: The run can't be found; see `find_run`.
        """
        join, state_dir = JoinString.parse(text), self.options.node.state_dir
        membership = await enter(join, Role.DATA, state_dir, self.host.identity)
        return await self.seek(KnownPeers(state_dir).addresses_of(join), membership)

    async def seek(
        self, addresses: tuple[str, ...], membership: Membership, *, again: bool = False
    ) -> RunPart:
        """Find the run, compare its manifest with this host's, and return a data node's place.

        Args:
            addresses: Nodes of the run.
            membership: This node's.
            again: This node was in the run before, and may have started it.

        Raises:
            RejectedError: The run's manifest differs from this host's (E-REJ-004).
            DecodError: The run can't be found; see `find_run`.
        """
        await make_usable(membership, addresses)
        contact = await find_run(addresses, membership, avoid_own=True)
        given = contact.manifest
        # What every export gets is the founder's, whatever lies in this host's folder of --init.
        manifest = dataclasses.replace(self.manifest, carried=given.carried)
        if again or self.options.init_dir is None:
            # This node's state comes from the leader, so its own initial weights don't matter.
            manifest = dataclasses.replace(
                manifest,
                initial_weights=given.initial_weights,
                start_iteration=given.start_iteration,
            )
        if self.options.node.base_dir is None:
            manifest = dataclasses.replace(manifest, base=given.base)
        if (difference := manifest.first_difference(given)) is not None:
            raise RejectedError(
                f"this run file describes another run: {difference}",
                why="all data nodes of a run must agree on it, to the last number",
                fix="copy the leader's run file and its prepared data",
                code="E-REJ-004",
            )
        part = contact.part_of(membership)
        return dataclasses.replace(part, manifest=manifest, data_dir=self.data_dir)
