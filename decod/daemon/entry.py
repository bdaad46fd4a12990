"""The options of `decod leader`, and the place in a run that follows from them.

This host starts a new run, resumes one from a checkpoint, or becomes a further data node of a run
that another host leads.
"""

import dataclasses
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from decod.base32 import base32
from decod.config.node import RESUME_LATEST, NodeConfig
from decod.config.run_file import RunFile
from decod.config.schema import Manifest
from decod.daemon.admission import enter, make_usable
from decod.daemon.contact import find_run
from decod.daemon.errors import TemporaryError
from decod.daemon.host import Host, Say
from decod.daemon.leader_search import await_leader
from decod.daemon.peers import KnownPeers
from decod.daemon.resume import Resumed, has_checkpoint
from decod.daemon.run_facts import RunPart
from decod.daemon.shared_parts import store_of
from decod.errors import RejectedError
from decod.ids import RunId
from decod.membership.charter import new_charter
from decod.membership.papers import Membership
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.tasks import in_thread


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
    join: str | None = None
    """Join string of a run to join as a further data node."""
    export_dir: Path | None = None
    """Folder for the final model; None for one under the state folder."""
    data: str | None = None
    """Absolute path or URL of a corpus, which overrides the run file's."""
    join_path: Path | None = None
    """File to which the join string is written when this node leads."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A place in a run: this node's part in it, and the addresses of nodes to ask."""

    part: RunPart
    contacts: tuple[str, ...] = ()


async def continued(options: LeaderOptions, host: Host, say: Say) -> LeaderOptions:
    """Resolve `RESUME_AUTO`: return options that continue the last run of this name, if any.

    If the run has further data nodes, another of them may lead it, and this host may only be cut
    off. Then the options join that run again, and never begin a second one. Else they resume from
    the latest checkpoint, or begin anew if there is none.

    Raises:
        TemporaryError: No leader of that run can be found (E-RUN-012).
    """
    state_dir, run = options.node.state_dir, options.run_file.run
    known = KnownPeers(state_dir).newest(run.name) if run.batch.num_data_nodes > 1 else None
    if known is not None:
        back = JoinString(root=known.root, addresses=known.addresses)
        membership = await enter(back, Role.DATA, state_dir, host.identity)
        leader_address = await await_leader(known.addresses, membership)
        if leader_address is None:
            raise TemporaryError(
                f"nobody leads run {known.run_id} where this host knows of nodes",
                why="they are gone, or can't be reached, and others may go on with it",
                fix="try again later; if it is over, begin a second run with --resume latest",
                code="E-RUN-012",
            )
        say(f"run {known.run_id} goes on at {leader_address}: this node joins it again")
        join = JoinString(root=known.root, addresses=(leader_address,))
        return dataclasses.replace(options, join=str(join), init_dir=None, resume=None)
    store = store_of(options.node)
    if await in_thread(lambda: has_checkpoint(state_dir, run.name, store)):
        return dataclasses.replace(options, init_dir=None, resume=RESUME_LATEST)
    return dataclasses.replace(options, resume=None)


def founded(
    options: LeaderOptions,
    membership: Membership,
    manifest: Manifest,
    data_dir: Path,
    resumed: Resumed | None,
) -> RunPart:
    """Return this node's part in a new run: the leader's."""
    run_id = _new_run_id(membership.root, manifest)
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

    async def join(self, text: str) -> RunEntry:
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
    ) -> RunEntry:
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
        if (difference := manifest.first_difference(given)) is not None:
            raise RejectedError(
                f"this run file describes another run: {difference}",
                why="all data nodes of a run must agree on it, to the last number",
                fix="copy the leader's run file and its prepared data",
                code="E-REJ-004",
            )
        part = RunPart(
            membership=membership,
            run_id=contact.run_id,
            manifest=manifest,
            charter=contact.charter,
            leader=contact.leader,
            leader_address=contact.leader_address,
            data_dir=self.data_dir,
        )
        return RunEntry(part, contact.addresses)


def _new_run_id(root: bytes, manifest: Manifest) -> RunId:
    parts = (root, manifest.sha256.encode(), secrets.token_bytes(16))
    return RunId(base32(hashlib.sha256(b"".join(parts)).digest())[:26])
