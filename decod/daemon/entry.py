"""The options of `decod leader`, and the place in a run that follows from them.

This host starts a new run, resumes one from a checkpoint, or becomes a further data node of a run
that another host leads.
"""

import base64
import dataclasses
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from decod.config.node import RESUME_LATEST, NodeConfig
from decod.config.run_file import RunFile
from decod.config.schema import Manifest
from decod.daemon.contact import find_run
from decod.daemon.errors import TemporaryError
from decod.daemon.host import Say
from decod.daemon.leader_search import await_leader
from decod.daemon.manifests import KnownManifests
from decod.daemon.peers import KnownPeers
from decod.daemon.resume import has_checkpoint
from decod.daemon.run_facts import RunPart
from decod.errors import RejectedError
from decod.ids import NodeId, RunId
from decod.protocol.core.view import Role


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
    data_dir: Path | None = None
    """Overrides the run file's data."""
    join_path: Path | None = None
    """File to which the join string is written when this node leads."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A place in a run: this node's part in it, and the addresses of nodes to ask."""

    part: RunPart
    contacts: tuple[str, ...] = ()


async def continued(options: LeaderOptions, own: NodeId, say: Say) -> LeaderOptions:
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
        run_id, members = known
        join = await await_leader(run_id, members, own)
        if join is None:
            raise TemporaryError(
                f"nobody leads run {run_id} where this host knows of nodes",
                why="they are gone, or can't be reached, and others may go on with it",
                fix="try again later; if it is over, begin a second run with --resume latest",
                code="E-RUN-012",
            )
        say(f"run {run_id} goes on at {join.addresses[0]}: this node joins it again")
        return dataclasses.replace(options, join=str(join), init_dir=None, resume=None)
    if has_checkpoint(state_dir, run.name):
        return dataclasses.replace(options, init_dir=None, resume=RESUME_LATEST)
    return dataclasses.replace(options, resume=None)


def founded(
    options: LeaderOptions,
    own: NodeId,
    manifest: Manifest,
    data_dir: Path,
    checkpoint_dir: Path | None,
) -> RunPart:
    """Return this node's part in a new run: the leader's."""
    return RunPart(
        role=Role.DATA,
        run_id=_new_run_id(manifest),
        manifest=manifest,
        leader=own,
        data_dir=data_dir,
        init_dir=options.init_dir,
        checkpoint_dir=checkpoint_dir,
    )


@dataclass(frozen=True, slots=True)
class EntryFinder:
    """The search for this host's place in a run that another host leads."""

    options: LeaderOptions
    own: NodeId
    manifest: Manifest
    """The manifest that follows from this host's run file and data."""
    data_dir: Path

    async def seek(self, join: str, *, again: bool = False) -> RunEntry:
        """Find the run, compare its manifest with this host's, and return a data node's place.

        Args:
            join: The join string, which names nodes of the run.
            again: This node was in the run before, and may have started it.

        Raises:
            RejectedError: The run's manifest differs from this host's (E-REJ-004).
            DecodError: The run can't be found; see `find_run`.
        """
        state_dir = self.options.node.state_dir
        known, peers = KnownManifests(state_dir), KnownPeers(state_dir)
        contact = await find_run(join, known, peers, self.own)
        manifest, given = self.manifest, contact.manifest
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
        known.keep(manifest)
        part = RunPart(
            role=Role.DATA,
            run_id=contact.run_id,
            manifest=manifest,
            leader=contact.leader,
            leader_address=contact.leader_address,
            data_dir=self.data_dir,
        )
        return RunEntry(part, contact.addresses)


def _new_run_id(manifest: Manifest) -> RunId:
    digest = hashlib.sha256(manifest.sha256.encode() + secrets.token_bytes(16)).digest()
    return RunId(base64.b32encode(digest).decode().lower()[:26])
