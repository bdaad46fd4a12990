"""`decod leader`: starts a run, or joins one as a further data node, and keeps its result."""

import asyncio
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from decod.clocks import wall_clock
from decod.config.schema import Manifest
from decod.config.secret import write_join_string
from decod.daemon.checkpointing import CheckpointPlan, Checkpoints, carried_in, store_of
from decod.daemon.checks import check_shards, chosen_model, manifest_of, read_at_start_bytes
from decod.daemon.contact import let_in
from decod.daemon.desk import Desk
from decod.daemon.entry import EntryFinder, LeaderOptions, continued, founded
from decod.daemon.evaluating import EvaluationPlan, Evaluations, ModelTexts, require_held_out
from decod.daemon.exporting import CardFacts, base_of_run, complete_folder, export_model
from decod.daemon.host import Host, Leaving, Say, run_until_left
from decod.daemon.life import Life, announce, reach_of_data_node, take_part
from decod.daemon.member_admission import found
from decod.daemon.node_errors import not_begun, not_kept
from decod.daemon.operator_requests import ends_with
from decod.daemon.page.page_server import page_served
from decod.daemon.pipeline_node import PipelineNode, shared_of
from decod.daemon.progress_display import ProgressDisplay
from decod.daemon.resume import Resumed, find_resumed, told_of
from decod.daemon.run_facts import RunPart, largest_state_bytes
from decod.daemon.run_snapshot import SnapshotSources
from decod.daemon.status import stage_keeper
from decod.daemon.succession import publish_terms, seek_successor
from decod.daemon.tracking.tracking import require_trackers
from decod.data.corpus import open_corpus
from decod.data.dataset import CacheConfig, Dataset
from decod.errors import (
    ConfigError,
    DecodError,
    HardwareError,
    NetworkError,
)
from decod.membership.papers import TERMS
from decod.net.join_string import DATA_LABEL, LABEL, JoinString
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.events import BlockCommits, CheckpointWritten, DrainRequested
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from decod.tasks import beside, in_thread, until_first
from decod.texts import counted
from decod.train.checkpoint.places import DiskRoom
from decod.train.checkpoint.store import CheckpointStore, run_folder


def run_leader(options: LeaderOptions, say: Say) -> int:
    """Run until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't start or can't go on.
    """
    return run_until_left(_run(options, say), say)


async def _run(options: LeaderOptions, say: Say) -> int:
    if options.join is not None:
        JoinString.parse(options.join)  # A damaged one is told before the data are read.
    require_trackers(options.node)
    store_of(options.node)  # One that can't be used is told before the data are read.
    desk = Desk(options.node, volunteers=False)
    with Leaving(say) as leaving, Host(desk.config, leaving, desk) as host:
        run_file = options.run_file
        if run_file.admission.ask:
            # Before any node of this host answers newcomers, whoever leads.
            host.newcomers.open()
        async with host.tended(), page_served(desk.config, host, say):
            return await _stay(options, host, desk, say)


async def _stay(options: LeaderOptions, host: Host, desk: Desk, say: Say) -> int:
    """Prepare this host's data and manifest, and take part in the run, maybe more than once."""
    unless_asked, own = host.leaving.unless_asked, host.identity.node_id
    options = await unless_asked(continued(options, host, say))
    async with host.waits.of("the data to be opened"):
        opened = await unless_asked(in_thread(lambda: _opened(options, host.caps.disk)))
    with opened as dataset:
        data_dir = dataset.folder
        assert data_dir is not None, "it has a cache"
        preparing = in_thread(lambda: _prepared(options, dataset, say))
        async with host.waits.of("model, data and checkpoint to be checked"):
            manifest, resumed = await unless_asked(preparing)
        joining = EntryFinder(options, host, manifest, data_dir)
        if (join := options.join) is not None:
            told = JoinString.parse(join)
            entering = let_in(lambda: joining.join(join), say, join=told, host=host)
            part = await unless_asked(entering)
        else:
            membership = found(options.node.state_dir, manifest.run.name, host.identity, TERMS)
            part = founded(options, membership, manifest, data_dir, resumed)
        life = Life(host, say, rejoins=options.node.rejoins)
        checked: asyncio.Future[str] | None = None

        async def live(part: RunPart) -> Stop:
            nonlocal checked
            again = life.again
            async with PipelineNode(desk.config, part, host, say, dataset, again=again) as node:
                life.begins(node)
                # Check the shards while torch loads.
                checked = checked or in_thread(
                    lambda: check_shards(dataset, read_at_start_bytes(dataset))
                )
                if part.leader == own:
                    stop = await _lead(node, options, checked)
                else:
                    stop = await _follow(node, options, checked)
                others, member = node.contacts.addresses(others=True), part.membership
                await life.ended(node, stop, lambda: joining.seek(others, member, again=True))
            return stop

        return await life.run(part, live)


async def _follow(
    node: PipelineNode, options: LeaderOptions, checked: "asyncio.Future[str]"
) -> Stop:
    """Train as a further data node of a run, and lead it if elected."""

    async def lead() -> Stop:
        node.say(f"this node leads the run now, in term {node.contacts.leader().term}")
        leading = _Leading(node, options)
        try:
            leading.hand_out()
        except ConfigError as error:
            # A leader that is needed does not end because of an unwritten file.
            node.say(str(error))
        return await leading.run()

    if not await node.unless_drained(_say_checked(node, checked)):
        return Stop(StopReason.DRAINED, "it had not begun to train")
    return await take_part(node, lead)


def cache_of(options: LeaderOptions, room: DiskRoom) -> CacheConfig:
    """Return where this host keeps what it fetches of data in a store, and how much of it."""
    data = options.run_file.data
    most_bytes = int(data.cache_max_gib * 2**30)

    def limit_bytes() -> int:
        cap = room.size_max_bytes
        # The other half is for states and checkpoints.
        return most_bytes if cap is None else min(most_bytes, cap // 2)

    folder = Path(data.cache) if data.cache else options.node.state_dir / "data"
    return CacheConfig(folder, limit_bytes)


def _opened(options: LeaderOptions, room: DiskRoom) -> Dataset:
    data = options.run_file.data
    return open_corpus(options.data or data.path, cache_of(options, room))


def _prepared(
    options: LeaderOptions, dataset: Dataset, say: Say
) -> tuple[Manifest, Resumed | None]:
    """Return the run's manifest, and the checkpoint to go on from if the options ask for one."""
    require_held_out(options.run_file, dataset)
    run = options.run_file.run
    init_dir, base_dir = options.init_dir, options.node.base_dir
    # A further data node gets what it has not from members.
    lacks = options.join is not None and init_dir is None and base_dir is None
    model_dir = None if lacks else chosen_model(run, init_dir, base_dir)
    manifest = manifest_of(run, dataset, model_dir, say)
    if options.resume is None:
        return manifest, None
    resumed = find_resumed(
        options.node.state_dir, manifest, options.resume, say, store_of(options.node)
    )
    for line in told_of(resumed, options.node.state_dir, wall_clock()):
        say(line)
    kept = resumed.manifest
    manifest = dataclasses.replace(
        manifest,
        initial_weights=kept.sha256,
        start_iteration=kept.iteration,
        carried=carried_in(kept),
    )
    return manifest, resumed


async def _say_checked(node: PipelineNode, checked: "asyncio.Future[str]") -> None:
    node.say(await checked)


async def _lead(node: PipelineNode, options: LeaderOptions, checked: "asyncio.Future[str]") -> Stop:
    leading = _Leading(node, options)

    async def begin() -> None:
        await _say_checked(node, checked)
        node.use_reach(reach_of_data_node(node.config))
        await node.prepare()
        await announce(node, leads=True)

    if not await node.unless_drained(begin()):
        return Stop(StopReason.DRAINED, "it had not begun to train")
    # Volunteers get the join string only once this node itself is able to train.
    leading.hand_out()
    node.say(_awaited(node.part.run))
    return await leading.run()


def _awaited(run: RunConfig) -> str:
    """Return the line on the members that the run needs before it begins."""
    last = run.stages.num_relay_stages
    stages = "stage 1" if last == 1 else f"every stage from 1 to {last}"
    who, command = stage_keeper(run)
    need = counted(run.protocol.min_nodes_per_stage, who)
    return f"waiting for volunteers: {stages} needs {need}{command}"


def _where(options: LeaderOptions) -> str:
    """Return the arguments of `decod leader` that start the same node again."""
    # A checkpoint stands for `--init`, and the caller adds `--resume` or `--join`.
    paths = {
        "--data": options.data,
        "--base": options.node.base_dir,
        "--export": options.export_dir,
        "--write-join": options.join_path,
    }
    words = [f"{option} {shlex.quote(str(path))}" for option, path in paths.items() if path]
    return " ".join((shlex.quote(str(options.run_file.path)), options.node.arguments, *words))


def _no_device() -> HardwareError:
    return HardwareError(
        "this host's compute process has ended",
        why="only that can put the model together",
        fix="go on from the checkpoint, or export from there",
        code="E-HW-002",
    )


class _Leading:
    """The leader's work beside its core: shows progress, keeps the result, exports models."""

    def __init__(self, node: PipelineNode, options: LeaderOptions) -> None:
        self._node, self._options = node, options
        self._say, self._progress, self._core = node.say, node.progress, node.core
        self._contacts, self._requests = node.contacts, node.requests
        part, run_file = node.part, options.run_file
        self._start_iteration = part.manifest.start_iteration
        folder = run_folder(options.node.state_dir, part.run_id)
        self._keep_dir = options.export_dir or folder.with_name("model")
        self._exporting = asyncio.Lock()
        self._shown = ProgressDisplay(node.progress, node.say, node.name)
        self._sources = SnapshotSources(
            core=node.core,
            progress=node.progress,
            fetch=node.gateway.fetch_state,
            write_part=node.gateway.write_part,
            load=node.states.load,
            state_bytes=largest_state_bytes(part.run),
            device_gone=lambda: node.device.gone,
            ending=lambda: self._ending,
        )
        self._checkpoints = Checkpoints(
            self._sources,
            CheckpointPlan(
                part=part,
                state_dir=options.node.state_dir,
                config=run_file.checkpoint,
                store=CheckpointStore(folder, room=node.disk_room),
                shared=shared_of(part, node.config),
                pace=node.gateway.pace,
                on_stored=node.states.use_stored,
            ),
            self._exporting,
            note=node.note,
            # The core can rebuild a lost stage from it.
            on_written=lambda iteration, cut: node.core.post(CheckpointWritten(iteration, cut)),
        )
        self.describe_checkpoint = self._checkpoints.describe
        plan = EvaluationPlan(
            config=run_file.evaluation,
            batch=part.run.batch,
            folder=folder.with_name("evaluated"),
            export=self._export_quietly,
        )
        self._evaluations = Evaluations(plan, node.progress, node.note)
        self.describe_evaluation = self._evaluations.describe
        continued = folder.with_name("continued")
        plan = dataclasses.replace(plan, folder=continued, export=self._export_with_tokenizer)
        self._texts = ModelTexts(plan, node.progress, node.note)
        self.describe_texts = self._texts.describe
        self._handed_out: set[str] = set()
        """The addresses in the join strings that the operator has been shown."""
        self._written: str | None = None
        """The join string in the operator's file."""
        self.unkept = ""
        """Says which result was not kept at the end of the run, and why."""
        self._ending = False
        """No more commits follow, so the state that is kept is final."""
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._kept: int | None = None
        """Iteration of the kept model."""
        self._unkept: DecodError | None = None
        """Why the model of the last iteration is not kept."""
        self._cut_off = False
        """This node ends without a quorum. The others may have one."""
        self._complete = node.completed
        self._progress.on_stage_ending.append(self._keep_early)
        self._progress.on_return.append(self._forget_kept)
        node.take_lead(self)

    def hand_out(self) -> None:
        """Tell the operator join strings with new tokens, on the terminal and in a file.

        Raises:
            ConfigError: A token or the file can't be written.
        """
        part, invitations = self._node.part, self._node.invitations
        batch = part.run.batch
        invitations.invite(Role.RELAY)
        if batch.num_data_nodes > 1 and part.membership.root_key is not None:
            invitations.invite(Role.DATA)
        self._show_join_strings()
        self._write_join_string()
        invitations.on_changed.append(self._keep_join_string)

    def _show_join_strings(self) -> None:
        for role, label in ((Role.DATA, DATA_LABEL), (Role.RELAY, LABEL)):
            if (join := self._node.invitations.current(role)) is not None:
                self._say(f"{label} {join}")
        self._handed_out = {*self._contacts.addresses()}

    def _write_join_string(self) -> None:
        path, join = self._options.join_path, self._node.invitations.current(Role.RELAY)
        if path is not None and join not in (None, self._written):
            write_join_string(path, join)
            self._written = join

    def _keep_join_string(self) -> None:
        """Keep the file with the join string up to date. If it can't be written, only say so."""
        try:
            self._write_join_string()
        except ConfigError as error:
            self._say(str(error))

    def members_changed(self) -> None:
        """Show the join strings again if a data node has entered: they hold its address, too."""
        facts, known = self._core.facts, self._handed_out
        if facts is None or not known:
            return
        entered = [each for each in facts.view.data_nodes if each.address not in known]
        if entered:
            names = ", ".join(member.label for member in entered)
            self._say(
                f"{names} has entered as a data node. Hand out the join strings below from now on:"
                " they hold its address too, and the earlier ones lead nowhere without this host"
            )
            self._show_join_strings()
        self._keep_join_string()

    async def run(self) -> Stop:
        """Lead until the run ends or this node leaves, and keep the result; return the end."""
        node = self._node
        publishing = publish_terms(node.dht, self._contacts, node.elected)
        try:
            async with beside(publishing, seek_successor(node.dht, self._core)):
                stop = await self._run()
        finally:
            await self._evaluations.close()
            await self._texts.close()
            await self._checkpoints.close()
        if stop.reason is StopReason.DRAINED:
            self._say(f"left the run: {stop.detail}")
            # The others go on.
            again = f"decod leader {_where(self._options)} --resume auto"
            self._say(f"next: {again} takes part again")
        elif stop.reason not in (StopReason.SUPERSEDED, StopReason.BANNED):
            # A leader that was replaced has nothing to resume: the run goes on.
            self._tell_end(stop)
        return stop

    def _tell_end(self, stop: Stop) -> None:
        """Tell the operator which result is not kept, and how to go on.

        Raises:
            DecodError: The run has ended, and its model could not be kept. No error is raised if
                the operator ended a run that had lost a stage and has a checkpoint.
        """
        last, error, told = self._checkpoints.last, self._unkept, self.unkept
        asked = not self._complete.is_set()
        if self._cut_off:
            others = self._contacts.member_string()
            self._say(
                "too few of the others could be reached: they may go on with another leader; "
                f"to take part: decod leader {_where(self._options)} --join {others}"
            )
        lost = error if isinstance(error, NetworkError) else None
        if lost is not None and asked and last is not None:
            # An operator who ends a run that waits for a stage knows that it is missing.
            self._say(told)
            error = None
        elif error is None and told:
            self._say(told)
        goes_on = asked or error is not None or stop.reason is StopReason.FAILED
        if goes_on and last is not None:
            self._tell_resume()
        elif self._kept is not None:
            folder = shlex.quote(str(self._keep_dir))
            base = "" if self._base is None else f" --base {shlex.quote(self._base)}"
            self._say(f'next: decod generate --model {folder}{base} "Once upon a time"')
        if error is not None and stop.reason is StopReason.FINISHED:
            raise error if lost is None else not_kept(told, lost, last)

    def _tell_resume(self) -> None:
        """Tell the operator how to go on from the last checkpoint, if there is one."""
        last = self._checkpoints.last
        if last is not None:
            # Not "latest", which may be of another run that this one was not resumed from.
            self._say(
                f"go on from iteration {last} with: decod leader {_where(self._options)} "
                f"--resume {last}"
            )

    async def _run(self) -> Stop:
        node, core, requests = self._node, self._core, self._requests
        driver = core.driver
        await until_first(driver.stopped, self._complete.wait(), requests.wait_leaving())
        self._shown.show_last()
        if not core.runs or (not self._complete.is_set() and await self._hand_over()):
            if driver.broken:
                await self._keep_after_failure()
            return await node.wait_stopped()
        leading = core.leading
        self._cut_off = leading is not None and bool(leading.lacking)
        if not (self._complete.is_set() or requests.ends_run or self._cut_off):
            self._say(ends_with(node.name))
        if leading is not None and leading.learns_apart and not self._complete.is_set():
            await requests.average()
        # Hold commits: iterations after the kept one would be lost.
        self._ending = True
        driver.post(BlockCommits(blocked=True))
        if node.supply is not None:
            node.supply.give_up()
        try:
            await self._keep_result()
        except DecodError as error:
            self._unkept = error
            iteration = self._progress.iteration
            self.unkept = f"the model of iteration {iteration} is not kept: {error.what}"
        else:
            if problem := self._checkpoints.problem:
                text = f"the checkpoint of iteration {self._progress.iteration} is not kept"
                self.unkept = f"{text}: {problem}"
        finally:
            # Release the members even if the model could not be kept: they can't help with that.
            driver.post(DrainRequested(ends_run=True))
            stop = await node.wait_stopped()
        return stop

    async def _keep_after_failure(self) -> None:
        """After a failure of the core, write a checkpoint from the members' states.

        Only if there is no other data node: else the run goes on under another leader.
        """
        leading = self._core.leading
        if leading is None or len(leading.view.data_nodes) > 1:
            return
        self._ending = True
        await self._checkpoints.finish()
        self._tell_resume()

    async def _hand_over(self) -> bool:
        """Hand over to another data node, if there is one; return whether this node has left."""
        driver, leading, requests = self._core.driver, self._core.leading, self._requests
        if requests.ends_run or leading is None or not leading.can_hand_over:
            return False
        self._say("another data node is to lead; this node leaves when it does")
        requests.tell_core()
        await until_first(driver.stopped, requests.stays.wait())
        return not self._core.runs

    @property
    def _has_committed(self) -> bool:
        return self._progress.iteration > self._start_iteration

    async def _keep_result(self) -> None:
        """Write model and checkpoint before the members go, since their states go with them."""
        if not self._has_committed:
            return
        whole = True
        try:
            if self._sources.device_gone():
                raise _no_device()
            async with self._exporting:
                # It may have been kept already, before a stage left.
                if self._kept != self._progress.iteration:
                    self._kept, _ = await self._export_to(self._keep_dir)
                    self._say(f"model of iteration {self._kept}: {self._keep_dir}")
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
        leading = self._core.leading
        for stage in () if leading is None else leading.ending_stages:
            self._say(
                f"the last member of stage {stage} is leaving. Without another the run loses the "
                f"stage: have a host join it with decod join JOINSTRING --stage {stage}"
            )
        if self._checkpoint_task is None or self._checkpoint_task.done():
            self._checkpoint_task = asyncio.create_task(self._try_to_keep())

    async def _try_to_keep(self) -> None:
        try:
            await self._keep_result()
        except DecodError as error:
            self._say(f"the model could not be kept: {error}")

    @property
    def _base(self) -> str | None:
        """The folder of the model that the run adapts, if it does."""
        base = self._node.config.base_dir
        return None if base is None else str(base)

    async def _export_to(self, folder: Path) -> tuple[int, str]:
        """Write the model; return its iteration, and what its folder lacks."""
        node, run, base = self._node, self._node.part.run, self._base
        if not run.trains_all:
            card = self._options.run_file.card
            name, commit = base_of_run(card, node.part.manifest)
            base = f"{name}@{commit}" if commit else card.base_model or base
        iteration = await self._write_model(folder, base)
        node.note("model.exported", iteration=iteration, path=str(folder))
        if missing := await self._fill_folder(folder, iteration):
            node.note("model.incomplete", path=str(folder), reason=missing)
        return iteration, missing

    async def _write_model(self, folder: Path, base: str | None) -> int:
        async with self._node.waits.of("the weights of all stages, for the model's folder"):
            return await export_model(self._sources, self._node.part.run, folder, base)

    async def _fill_folder(self, folder: Path, iteration: int) -> str:
        """Write tokenizer and card beside a model; return what its folder lacks then."""
        if (dataset := self._node.dataset) is None:
            return ""
        facts = self._card_facts(dataset, iteration)
        return await in_thread(lambda: complete_folder(folder, dataset, facts))

    def _card_facts(self, dataset: Dataset, iteration: int) -> CardFacts:
        part, entry = self._node.part, dataset.index.tokenizer
        return CardFacts(
            manifest=part.manifest,
            run_id=part.run_id,
            card=self._options.run_file.card,
            iteration=iteration,
            loss=self._progress.loss_of(iteration),
            num_data_tokens=dataset.num_tokens,
            tokenizer=entry.kind,
            num_nodes=self._node.work.num_workers,
            contributors=[one for one in self._node.contributors() if one.stage_index],
        )

    async def _export_quietly(self, folder: Path) -> int:
        async with self._exporting:
            return await self._write_model(folder, self._base)

    async def _export_with_tokenizer(self, folder: Path) -> int:
        iteration = await self._export_quietly(folder)
        await self._fill_folder(folder, iteration)
        return iteration

    async def export(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the model, as `decod export` asks."""
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
        async with self._exporting:
            iteration, missing = await self._export_to(folder)
        part = self._node.part
        return {
            "iteration": iteration,
            "path": str(folder),
            "run": part.run.name,
            "base": self._base,
            "missing": missing,
        }
