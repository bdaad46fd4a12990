"""`decod leader`: makes a run, or joins one as a further data node, and keeps its result."""

import asyncio
import base64
import dataclasses
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decod.config.node import NodeConfig
from decod.config.run_file import RunFile
from decod.config.schema import Manifest
from decod.daemon.checkpointing import Checkpoints
from decod.daemon.checks import check_shards, manifest_of
from decod.daemon.contact import find_run, patiently
from decod.daemon.data_supply import DataSupply
from decod.daemon.elsewhere import tell_elsewhere
from decod.daemon.errors import exit_code_of, not_begun, not_kept
from decod.daemon.export import export_model
from decod.daemon.host import Host, Node, Part, Say
from decod.daemon.manifests import KnownManifests
from decod.daemon.peers import KnownPeers
from decod.daemon.resume import find_resumed
from decod.daemon.shown import ShownProgress
from decod.daemon.succession import join_string_of, leader_of, publish_terms, seek_successor
from decod.daemon.threads import in_thread
from decod.daemon.volunteer import announce, full_status, take_part
from decod.data.corpus import corpus_folder
from decod.data.dataset import Dataset
from decod.driver.fetching import ServedState
from decod.errors import ConfigError, DecodError, NetworkError, RejectedError
from decod.ids import RunId
from decod.net.identity import Identity
from decod.protocol.effects import Stop, StopReason
from decod.protocol.events import CheckpointWritten, CommitsHeld, DrainRequested
from decod.protocol.view import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderOptions:
    """What `decod leader` was asked to do."""

    run_file: RunFile
    node: NodeConfig
    init_dir: Path | None = None
    """Folder of a model to start from."""
    resume: int | None = None
    """Iteration of the checkpoint to go on from, or `resume.LATEST`; None begins anew."""
    join: str | None = None
    """Join string of a run that this host becomes a further data node of."""
    export_dir: Path | None = None
    """Where the final model goes; None: under the state folder."""
    data_dir: Path | None = None
    """Overrides the run file's data."""


def run_leader(options: LeaderOptions, say: Say) -> int:
    """Run until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't start or can't go on.
    """
    return asyncio.run(_run(options, say))


async def _run(options: LeaderOptions, say: Say) -> int:
    with Host(options.node) as host:
        while True:
            life = await _run_once(options, host, say)
            if life.stop.reason is not StopReason.SUPERSEDED:
                return exit_code_of(life.stop)
            # The others did not hear from this node for a while and go on with another leader.
            if life.leaving:
                say(f"left the run: {life.stop.detail}")
                return exit_code_of(Stop(StopReason.DRAINED, life.stop.detail))
            say(f"{life.stop.detail}: this node joins it again as a data node")
            # It may look for them for a minute.
            host.heed_signals()
            joins = life.join_string
            options = dataclasses.replace(options, join=joins, init_dir=None, resume=None)


@dataclass(frozen=True, slots=True)
class _Life:
    """How one life of a node ended."""

    stop: Stop
    join_string: str
    """Where the others of its run are."""
    leaving: bool
    """Its operator wants it to leave, maybe only since it has stopped."""


async def _run_once(options: LeaderOptions, host: Host, say: Say) -> _Life:
    data_dir = options.data_dir or corpus_folder(options.run_file.data.path)
    with Dataset.open(data_dir) as dataset:
        manifest = manifest_of(options.run_file.run, dataset, options.init_dir)
        checkpoint_dir = None
        if options.resume is not None:
            checkpoint_dir, manifest = _resumed(options, manifest, options.resume, say)
            run_id = RunId(checkpoint_dir.parent.parent.name)
            members = KnownPeers(options.node.state_dir).find(run_id)
            await tell_elsewhere(run_id, members, host.identity.node_id, say)
        part, contacts = await _part(options, host.identity, manifest, data_dir, say)
        part = dataclasses.replace(part, checkpoint_dir=checkpoint_dir)
        async with Node(options.node, part, host, say) as node, DataSupply(node, dataset):
            # While torch loads.
            checked = in_thread(lambda: check_shards(dataset))
            if part.leader == host.identity.node_id:
                stop = await _lead(node, options, checked)
            else:
                stop = await _follow(node, options, contacts, checked)
            join_string = join_string_of(node, others=True)
        return _Life(stop, join_string, node.wishes.leaving)


async def _follow(
    node: Node, options: LeaderOptions, contacts: tuple[str, ...], checked: "asyncio.Future[str]"
) -> Stop:
    """Train as a further data node of a run, and lead it if elected."""

    async def lead() -> Stop:
        node.say(f"this node leads the run now, in term {leader_of(node).term}")
        leading = _Leading(node, options)
        node.join_string = join_string_of(node)
        node.say(f"join string: {node.join_string}")
        return await leading.run()

    node.commands["status"] = lambda _: full_status(node)
    if not await node.unless_drained(_say_checked(node, checked)):
        return Stop(StopReason.DRAINED, "it had not begun to train")
    return await take_part(node, contacts, lead)


def _resumed(
    options: LeaderOptions, manifest: Manifest, wanted: int, say: Say
) -> tuple[Path, Manifest]:
    """Return the checkpoint to go on from, and the manifest of the run that does."""
    folder, checkpoint = find_resumed(options.node.state_dir, manifest, wanted, say)
    say(f"resuming after iteration {checkpoint.iteration}, loss {checkpoint.loss:.4f}: {folder}")
    resumed = dataclasses.replace(
        manifest, initial_weights=checkpoint.sha256, start_iteration=checkpoint.iteration
    )
    return folder, resumed


async def _say_checked(node: Node, checked: "asyncio.Future[str]") -> None:
    node.say(await checked)


async def _part(
    options: LeaderOptions, identity: Identity, manifest: Manifest, data_dir: Path, say: Say
) -> tuple[Part, tuple[str, ...]]:
    """Return what this node is, the leader of a new run or a data node of another's; and peers."""
    if options.join is None:
        part = Part(
            role=Role.DATA,
            run_id=_new_run_id(manifest),
            manifest=manifest,
            leader=identity.node_id,
            data_dir=data_dir,
            init_dir=options.init_dir,
        )
        return part, ()
    known, peers = KnownManifests(options.node.state_dir), KnownPeers(options.node.state_dir)
    join, own = options.join, identity.node_id
    contact = await patiently(lambda: find_run(join, known, peers, own), say)
    if options.init_dir is None:
        # Its part of the state comes from the leader.
        given = contact.manifest
        manifest = dataclasses.replace(
            manifest,
            initial_weights=given.initial_weights,
            start_iteration=given.start_iteration,
        )
    if (difference := manifest.first_difference(contact.manifest)) is not None:
        raise RejectedError(
            f"this run file describes another run: {difference}",
            why="all data nodes of a run must agree on it, to the last number",
            fix="copy the leader's run file and its prepared data",
            code="E-REJ-004",
        )
    known.keep(manifest)
    part = Part(
        role=Role.DATA,
        run_id=contact.run_id,
        manifest=manifest,
        leader=contact.leader,
        leader_address=contact.leader_address,
        data_dir=data_dir,
    )
    return part, contact.addresses


def _new_run_id(manifest: Manifest) -> RunId:
    digest = hashlib.sha256(manifest.sha256.encode() + secrets.token_bytes(16)).digest()
    return RunId(base64.b32encode(digest).decode().lower()[:26])


async def _lead(node: Node, options: LeaderOptions, checked: "asyncio.Future[str]") -> Stop:
    leading = _Leading(node, options)

    async def begin() -> None:
        await _say_checked(node, checked)
        await node.prepare()
        await announce(node, (), leads=True)

    if not await node.unless_drained(begin()):
        return Stop(StopReason.DRAINED, "it had not begun to train")
    # Nobody is asked to join before this node could train itself.
    node.join_string = join_string_of(node)
    node.say(f"join string: {node.join_string}")
    last = node.part.manifest.run.stages.num_relay_stages
    node.say(f"waiting for volunteers: every stage from 1 to {last} needs some")
    return await leading.run()


class _Leading:
    """What the leader's daemon does beside its core: shows progress, keeps and exports states."""

    def __init__(self, node: Node, options: LeaderOptions) -> None:
        self._node = node
        self._keep_dir = options.export_dir or (
            options.node.state_dir / "runs" / node.part.run_id / "model"
        )
        self._run_file = options.run_file.path
        self._exporting = asyncio.Lock()
        self._shown = ShownProgress(node)
        self._checkpoints = Checkpoints(node, options.run_file.checkpoint, self._exporting)
        self._checkpoints.on_written = self._checkpoint_written
        self._keeping: asyncio.Task[None] | None = None
        self._kept: int | None = None
        """Iteration of the model that is kept."""
        self._unkept: DecodError | None = None
        """Why the last iteration's is not."""
        self._cut_off = False
        """It ends without a quorum: the others may have one."""
        manifest = node.part.manifest
        if node.part.init_dir is not None or node.part.checkpoint_dir is not None:
            node.gateway.initial_state = self._initial_state
            node.gateway.start_iteration = manifest.start_iteration
        node.commands["export"] = self._export
        self._complete = node.completed
        node.progress.on_stage_ending = self._keep_early
        node.progress.on_return.append(self._forget_kept)

    async def run(self) -> Stop:
        """Wait for the end of the run, whatever it is, and keep what there is to keep."""
        tasks = [
            asyncio.create_task(work)
            for work in (publish_terms(self._node), seek_successor(self._node))
        ]
        try:
            stop = await self._run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._checkpoints.close()
        if stop.reason is StopReason.DRAINED:
            self._node.say(f"left the run: {stop.detail}")
        elif stop.reason is not StopReason.SUPERSEDED:
            # The run of a leader that was replaced goes on: nothing is to be resumed.
            self._tell_end(stop)
        return stop

    def _tell_end(self, stop: Stop) -> None:
        """Say what is not kept, and how to go on.

        Raises:
            DecodError: What could be kept is not, or nothing is, or nobody asked for the end.
        """
        last, error, told = self._checkpoints.last, self._unkept, self._node.wishes.unkept
        asked = not self._complete.is_set()
        where = f"{self._run_file} --state-dir {self._node.config.state_dir}"
        if self._cut_off:
            others = join_string_of(self._node, others=True)
            self._node.say(
                "too few of the others could be reached: they may go on with another leader; "
                f"to take part: decod leader {where} --join {others}"
            )
        lost = error if isinstance(error, NetworkError) else None
        if lost is not None and asked and last is not None:
            # Whoever ends a run that waits for a stage knows that it is missing.
            self._node.say(told)
            error = None
        elif error is None and told:
            self._node.say(told)
        if last is not None and (asked or error is not None):
            # Not "latest": that may be of another attempt, which this one was not resumed from.
            self._node.say(
                f"go on from iteration {last} with: decod leader {where} --resume {last}"
            )
        if error is not None and stop.reason is StopReason.FINISHED:
            raise error if lost is None else not_kept(told, lost, last)

    async def _run(self) -> Stop:
        node = self._node
        assert node.driver is not None
        complete = asyncio.create_task(self._complete.wait())
        drained = asyncio.create_task(node.wishes.wait_leaving())
        ends: list[asyncio.Future[Any]] = [node.driver.stopped, complete, drained]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        drained.cancel()
        self._shown.show_last()
        if node.driver.stopped.done() or (not self._complete.is_set() and await self._hand_over()):
            return await node.wait_stopped()
        leader = node.driver.machine.leader
        self._cut_off = leader is not None and bool(leader.electorate.lacking)
        # What is learnt while the result is being kept would be lost.
        node.ending = True
        node.driver.post(CommitsHeld(held=True))
        if node.supply is not None:
            node.supply.give_up()
        try:
            await self._keep_result()
        except DecodError as error:
            self._unkept = error
            iteration = node.progress.iteration
            node.wishes.unkept = f"the model of iteration {iteration} is not kept: {error.what}"
        else:
            if problem := self._checkpoints.problem:
                text = f"the checkpoint of iteration {node.progress.iteration} is not kept"
                node.wishes.unkept = f"{text}: {problem}"
        finally:
            # Members are let go even if the model could not be kept: they can't help with that.
            node.driver.post(DrainRequested(ends_run=True))
            stop = await node.wait_stopped()
        return stop

    async def _hand_over(self) -> bool:
        """Let another data node lead, if there is one; return whether this node has left."""
        node, wishes = self._node, self._node.wishes
        assert node.driver is not None
        machine = node.driver.machine
        if wishes.ends_run or machine.leader is None:
            return False
        if not machine.office.handover.possible(machine.leader):
            return False
        node.say("another data node is to lead; this node leaves when it does")
        wishes.tell_core()
        stays = asyncio.create_task(wishes.stays.wait())
        ends: list[asyncio.Future[Any]] = [node.driver.stopped, stays]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stays.cancel()
        return node.driver.stopped.done()

    @property
    def _has_committed(self) -> bool:
        return self._node.progress.iteration > self._node.part.manifest.start_iteration

    async def _keep_result(self) -> None:
        """Write model and state before the members go: nobody else keeps them."""
        if not self._has_committed:
            return
        whole = True
        try:
            async with self._exporting:
                # It may have been kept before its stage left.
                if self._kept != self._node.progress.iteration:
                    self._kept = await export_model(self._node, self._keep_dir)
                    self._node.say(f"model of iteration {self._kept}: {self._keep_dir}")
        except NetworkError:
            whole = False
            raise
        finally:
            await self._checkpoints.finish(writes=whole)

    def _forget_kept(self) -> None:
        """The run has gone back: the model of an iteration may become another one."""
        self._kept = None

    def _keep_early(self) -> None:
        """A stage is about to leave with its last member: keep the model while it can be had."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._try_to_keep())

    async def _try_to_keep(self) -> None:
        try:
            await self._keep_result()
        except DecodError as error:
            self._node.say(f"the model could not be kept: {error}")

    def _checkpoint_written(self, iteration: int) -> None:
        """Let the core know: a stage that is lost can be rebuilt from it."""
        driver = self._node.driver
        if driver is not None and not driver.stopped.done():
            driver.post(CheckpointWritten(iteration))

    async def _write(self, folder: Path) -> int:
        async with self._exporting:
            return await export_model(self._node, folder)

    async def _export(self, request: dict[str, Any]) -> dict[str, Any]:
        folder = Path(str(request.get("path", "")))
        if not folder.is_absolute():
            raise ConfigError(
                f"{folder} is not an absolute path",
                why="the daemon has another working directory",
                fix="give the whole path",
                code="E-CFG-044",
            )
        if not self._has_committed:
            raise not_begun()
        return {"iteration": await self._write(folder), "path": str(folder)}

    async def _initial_state(self, stage_index: int) -> ServedState | str:
        """Return the state of a stage from which the run started."""
        driver = self._node.driver
        assert driver is not None
        if stage_index >= driver.machine.context.view.num_stages:
            return f"there is no stage {stage_index}"
        return await driver.run_copy("initial", {"stage_index": stage_index})
