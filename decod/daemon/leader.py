"""`decod leader`: starts a run, or joins one as a further data node, and keeps its result."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from decod.config.node import RESUME_AUTO
from decod.config.schema import Manifest
from decod.config.secret import write_join_string
from decod.daemon.checkpointing import Checkpoints
from decod.daemon.checks import check_shards, manifest_of
from decod.daemon.contact import patiently
from decod.daemon.data_supply import DataSupply
from decod.daemon.entry import EntryFinder, LeaderOptions, RunEntry, continued, founded
from decod.daemon.errors import not_begun, not_kept
from decod.daemon.export import export_model
from decod.daemon.host import Host, Node, Say
from decod.daemon.leader_search import tell_elsewhere
from decod.daemon.leaving import Leaving, run_until_left
from decod.daemon.peers import KnownPeers
from decod.daemon.progress_display import ProgressDisplay
from decod.daemon.rejoining import Rejoining
from decod.daemon.resume import find_resumed
from decod.daemon.succession import join_string_of, leader_of, publish_terms, seek_successor
from decod.daemon.threads import in_thread
from decod.daemon.volunteer import announce, full_status, take_part
from decod.data.corpus import corpus_folder
from decod.data.dataset import Dataset
from decod.driver.fetching import ServedState
from decod.errors import (
    ConfigError,
    DecodError,
    HardwareError,
    NetworkError,
)
from decod.ids import RunId
from decod.net.join_string import LABEL
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.events import CheckpointWritten, CommitsHeld, DrainRequested


def run_leader(options: LeaderOptions, say: Say) -> int:
    """Run until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't start or can't go on.
    """
    return run_until_left(_run(options, say), say)


async def _run(options: LeaderOptions, say: Say) -> int:
    with Leaving(say) as leaving, Host(options.node, leaving) as host:
        async with host.tended():
            return await _stay(options, host, say)


async def _stay(options: LeaderOptions, host: Host, say: Say) -> int:
    """Prepare this host's data and manifest, and take part in the run, maybe more than once."""
    unless_asked, own = host.leaving.unless_asked, host.identity.node_id
    if options.resume == RESUME_AUTO:
        options = await unless_asked(continued(options, own, say))
    data_dir = options.data_dir
    if data_dir is None:
        path = options.run_file.data.path
        data_dir = await unless_asked(in_thread(lambda: corpus_folder(path)))
    with Dataset.open(data_dir) as dataset:
        preparing = in_thread(lambda: _prepared(options, dataset, say))
        manifest, checkpoint_dir = await unless_asked(preparing)
        if checkpoint_dir is not None:
            run_id = RunId(checkpoint_dir.parent.parent.name)
            members = KnownPeers(options.node.state_dir).find(run_id)
            await unless_asked(tell_elsewhere(run_id, members, own, say))
        joining = EntryFinder(options, own, manifest, data_dir)
        if (join := options.join) is not None:
            place = await unless_asked(patiently(lambda: joining.seek(join), say))
        else:
            place = RunEntry(founded(options, own, manifest, data_dir, checkpoint_dir))
        lives = Rejoining[RunEntry](host, say, rejoins=options.node.rejoins)
        checked: asyncio.Future[str] | None = None

        async def live(place: RunEntry) -> Stop:
            nonlocal checked
            async with Node(options.node, place.part, host, say) as node, DataSupply(node, dataset):
                lives.begins(node)
                # Check the shards while torch loads.
                checked = checked or in_thread(lambda: check_shards(dataset))
                if place.part.leader == own:
                    stop = await _lead(node, options, checked)
                else:
                    stop = await _follow(node, options, place.contacts, checked)
                others = join_string_of(node, others=True)
                await lives.ended(node, stop, lambda: joining.seek(others, again=True))
            return stop

        return await lives.run(place, live)


async def _follow(
    node: Node, options: LeaderOptions, contacts: tuple[str, ...], checked: "asyncio.Future[str]"
) -> Stop:
    """Train as a further data node of a run, and lead it if elected."""

    async def lead() -> Stop:
        node.say(f"this node leads the run now, in term {leader_of(node).term}")
        leading = _Leading(node, options)
        try:
            _hand_out(node, options)
        except ConfigError as error:
            # A leader that is needed does not end because of an unwritten file.
            node.say(str(error))
        return await leading.run()

    node.commands["status"] = lambda _: full_status(node)
    if not await node.unless_drained(_say_checked(node, checked)):
        return Stop(StopReason.DRAINED, "it had not begun to train")
    return await take_part(node, contacts, lead)


def _prepared(options: LeaderOptions, dataset: Dataset, say: Say) -> tuple[Manifest, Path | None]:
    """Return the run's manifest, and the checkpoint to go on from if the options ask for one."""
    manifest = manifest_of(options.run_file.run, dataset, options.init_dir)
    if options.resume is None:
        return manifest, None
    folder, checkpoint = find_resumed(options.node.state_dir, manifest, options.resume, say)
    say(f"resuming after iteration {checkpoint.iteration}, loss {checkpoint.loss:.4f}: {folder}")
    resumed = dataclasses.replace(
        manifest, initial_weights=checkpoint.sha256, start_iteration=checkpoint.iteration
    )
    return resumed, folder


async def _say_checked(node: Node, checked: "asyncio.Future[str]") -> None:
    node.say(await checked)


def _hand_out(node: Node, options: LeaderOptions) -> None:
    """Tell the operator the join string, on the terminal and in a file.

    Raises:
        ConfigError: The file can't be written.
    """
    node.join_string = join_string_of(node)
    node.say(f"{LABEL} {node.join_string}")
    if options.join_path is not None:
        write_join_string(options.join_path, node.join_string)


async def _lead(node: Node, options: LeaderOptions, checked: "asyncio.Future[str]") -> Stop:
    leading = _Leading(node, options)

    async def begin() -> None:
        await _say_checked(node, checked)
        await node.prepare()
        await announce(node, (), leads=True)

    if not await node.unless_drained(begin()):
        return Stop(StopReason.DRAINED, "it had not begun to train")
    # Volunteers get the join string only once this node itself is able to train.
    _hand_out(node, options)
    last = node.part.manifest.run.stages.num_relay_stages
    node.say(f"waiting for volunteers: every stage from 1 to {last} needs some")
    return await leading.run()


def _no_device() -> HardwareError:
    return HardwareError(
        "this host's compute process has ended",
        why="only that can put the model together",
        fix="go on from the checkpoint, or export from there",
        code="E-HW-002",
    )


class _Leading:
    """The leader's work beside its core: shows progress, keeps the result, exports models."""

    def __init__(self, node: Node, options: LeaderOptions) -> None:
        self._node = node
        self._keep_dir = options.export_dir or (
            options.node.state_dir / "runs" / node.part.run_id / "model"
        )
        self._run_file = options.run_file.path
        self._exporting = asyncio.Lock()
        self._shown = ProgressDisplay(node)
        self._checkpoints = Checkpoints(node, options.run_file.checkpoint, self._exporting)
        self._checkpoints.on_written = self._checkpoint_written
        self._keeping: asyncio.Task[None] | None = None
        self._kept: int | None = None
        """Iteration of the kept model."""
        self._unkept: DecodError | None = None
        """Why the model of the last iteration is not kept."""
        self._cut_off = False
        """This node ends without a quorum. The others may have one."""
        manifest = node.part.manifest
        if node.part.init_dir is not None or node.part.checkpoint_dir is not None:
            node.gateway.initial_state = self._initial_state
            node.gateway.start_iteration = manifest.start_iteration
        node.commands["export"] = self._export
        self._complete = node.completed
        node.progress.on_stage_ending = self._keep_early
        node.progress.on_return.append(self._forget_kept)

    async def run(self) -> Stop:
        """Lead until the run ends or this node leaves, and keep the result; return the end."""
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
            # A leader that was replaced has nothing to resume: the run goes on.
            self._tell_end(stop)
        return stop

    def _tell_end(self, stop: Stop) -> None:
        """Tell the operator which result is not kept, and how to go on.

        Raises:
            DecodError: The run has ended, and its model could not be kept. No error is raised if
                the operator ended a run that had lost a stage and has a checkpoint.
        """
        last, error, told = self._checkpoints.last, self._unkept, self._node.wishes.unkept
        asked = not self._complete.is_set()
        if self._cut_off:
            others = join_string_of(self._node, others=True)
            self._node.say(
                "too few of the others could be reached: they may go on with another leader; "
                f"to take part: decod leader {self._where} --join {others}"
            )
        lost = error if isinstance(error, NetworkError) else None
        if lost is not None and asked and last is not None:
            # An operator who ends a run that waits for a stage knows that it is missing.
            self._node.say(told)
            error = None
        elif error is None and told:
            self._node.say(told)
        if asked or error is not None or stop.reason is StopReason.FAILED:
            self._tell_resume()
        if error is not None and stop.reason is StopReason.FINISHED:
            raise error if lost is None else not_kept(told, lost, last)

    @property
    def _where(self) -> str:
        """The arguments of `decod leader` that lead this run again."""
        return f"{self._run_file} --state-dir {self._node.config.state_dir}"

    def _tell_resume(self) -> None:
        """Tell the operator how to go on from the last checkpoint, if there is one."""
        last = self._checkpoints.last
        if last is not None:
            # Not "latest", which may be of another run that this one was not resumed from.
            self._node.say(
                f"go on from iteration {last} with: decod leader {self._where} --resume {last}"
            )

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
            if node.driver.broken:
                await self._keep_after_failure()
            return await node.wait_stopped()
        leader = node.driver.machine.leader
        self._cut_off = leader is not None and bool(leader.quorum.lacking)
        # Hold commits: iterations after the kept one would be lost.
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
            # Release the members even if the model could not be kept: they can't help with that.
            node.driver.post(DrainRequested(ends_run=True))
            stop = await node.wait_stopped()
        return stop

    async def _keep_after_failure(self) -> None:
        """After a failure of the core, write a checkpoint from the members' states.

        Only if there is no other data node: else the run goes on under another leader.
        """
        leader = self._node.driver.machine.leader if self._node.driver is not None else None
        if leader is None or len(leader.view.data_nodes) > 1:
            return
        self._node.ending = True
        await self._checkpoints.finish()
        self._tell_resume()

    async def _hand_over(self) -> bool:
        """Hand over to another data node, if there is one; return whether this node has left."""
        node, wishes = self._node, self._node.wishes
        assert node.driver is not None
        machine = node.driver.machine
        if wishes.ends_run or machine.leader is None:
            return False
        if not machine.leadership.handover.possible(machine.leader):
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
        """Write model and checkpoint before the members go, since their states go with them."""
        if not self._has_committed:
            return
        whole = True
        try:
            if self._node.device_gone:
                raise _no_device()
            async with self._exporting:
                # It may have been kept already, before a stage left.
                if self._kept != self._node.progress.iteration:
                    self._kept = await export_model(self._node, self._keep_dir)
                    self._node.say(f"model of iteration {self._kept}: {self._keep_dir}")
        except NetworkError:
            whole = False
            raise
        finally:
            await self._checkpoints.finish(writes=whole)

    def _forget_kept(self) -> None:
        """Forget the kept model after a rollback: its iteration will be trained anew."""
        self._kept = None

    def _keep_early(self) -> None:
        """Keep the model now, because a stage is about to leave with its last member."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._try_to_keep())

    async def _try_to_keep(self) -> None:
        try:
            await self._keep_result()
        except DecodError as error:
            self._node.say(f"the model could not be kept: {error}")

    def _checkpoint_written(self, iteration: int) -> None:
        """Tell the core of a checkpoint, from which it can rebuild a lost stage."""
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
        """Return the initial state of a stage, or why there is none."""
        driver = self._node.driver
        assert driver is not None
        if stage_index >= driver.machine.context.view.num_stages:
            return f"there is no stage {stage_index}"
        return await driver.run_copy("initial", {"stage_index": stage_index})
