"""A node that trains a stage of a model, from its compute process to its goodbye.

It is the composition root that leader and volunteer share.
"""

import asyncio
import dataclasses
import json
import logging
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from typing_extensions import override

from decod import __version__
from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.daemon.audit_feed import feed_of
from decod.daemon.base_supply import BaseSupply, FetchPart
from decod.daemon.checkpointing import store_of
from decod.daemon.data_supply import BlockSource, DataSupply, FolderSource, StoreSource
from decod.daemon.device_owner import HostDevice, MeasuredHost
from decod.daemon.disk_states import DiskStates, InitialStates, StoredChunks
from decod.daemon.gateway import Gateway, PeerAnswers
from decod.daemon.host import Host, LeftEarlyError, Say
from decod.daemon.hub_base import HubBase, hub_model_of
from decod.daemon.known_hosts import describe_hosts
from decod.daemon.members import Members
from decod.daemon.metrics import CreditCounter, NodeMetrics, WatchedParts, iteration_log
from decod.daemon.node import FLUSH_S, Node
from decod.daemon.node_errors import not_begun
from decod.daemon.node_folder import KnownPeers, VoteFile
from decod.daemon.open_files import RAISE, FileLimit, is_exhausted
from decod.daemon.operator_requests import OperatorRequests
from decod.daemon.reachability import own_server
from decod.daemon.recutting import Recutting
from decod.daemon.run_facts import (
    RunPart,
    base_of,
    facts_of,
    num_nodes_least,
    sizes_of,
    stage_names,
    tensor_sizes,
)
from decod.daemon.status import (
    RECONNECTING,
    WholeStatus,
    for_members,
    own_status,
    seen_members,
    status_of,
)
from decod.daemon.succession import RunContacts
from decod.daemon.work import WorkLedger
from decod.data.dataset import Dataset
from decod.driver.arena import StateCopies
from decod.driver.compute import Compute, PlanningProcess
from decod.driver.driver import CoreHandle, DriverPorts, NodeDriver
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.journal.history import Point, SeenMember
from decod.journal.iteration_file import FILE_NAME, read_curve
from decod.journal.journal import JournalEntry
from decod.journal.journal_file import FOLDER, kept_events
from decod.journal.logs import NodeLog
from decod.journal.run_progress import THIS_NODE, RecentEvents, RunProgress
from decod.membership.receipts import ReceiptAnswer
from decod.membership.statements import DecisionSeals, TensorProofs
from decod.net.ask import HelloInfo, HelloRequest, ask_receipt
from decod.net.donor import StateBlob, StateRequest
from decod.net.rate_caps import Lane
from decod.net.server import DataServices
from decod.net.storing import Sharing
from decod.process import keep_pauses_short
from decod.protocol.core.bans import BanList
from decod.protocol.core.context import Identity, Promise
from decod.protocol.core.effects import CountWork, Stop, StopReason
from decod.protocol.core.view import Member, Reach, Role, View
from decod.protocol.leadership.leader import LeaderState
from decod.protocol.node_machine import NodeMachine
from decod.tasks import beside, in_thread
from decod.train.checkpoint.base import BaseSource
from decod.train.checkpoint.shared import SharedCheckpoints
from decod.train.checkpoint.stage_states import StateStore
from decod.train.checkpoint.store import run_folder

_log = logging.getLogger("decod")

_OVERDUE_MAX_S = 30.0
"""How late a healthy core may be stepped. Its timers are usually due within a second."""

_RECEIPT_S = 5.0
"""Timeout of asking a data node for a receipt."""


class LeaderDuties(Protocol):
    """What a node does and shows beside its core while it leads."""

    unkept: str
    """Says which result was not kept at the end of the run, and why; empty if all was."""

    def describe_checkpoint(self) -> dict[str, Any]:
        """Return the checkpoint part of `decod status`."""

    def describe_texts(self) -> dict[str, Any]:
        """Return the part of `decod status` about what the model writes."""

    def describe_evaluation(self) -> dict[str, Any]:
        """Return the evaluation part of `decod status`."""

    def members_changed(self) -> None:
        """Take in that the run's members are others than before."""

    async def export(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the model, as `decod export` asks."""


class PipelineNode(Node):
    """A node that trains a stage of a model.

    Args:
        config: This host's choices.
        part: The node's part in the run.
        host: The host, which holds the folder's lock.
        say: Takes lines for the operator's terminal.
        dataset: A data node's data.
        again: This node was in the run before, and is on its way back.
    """

    part: RunPart
    gateway: Gateway
    contacts: RunContacts

    def __init__(
        self,
        config: NodeConfig,
        part: RunPart,
        host: Host,
        say: Say,
        dataset: Dataset | None = None,
        *,
        again: bool = False,
    ) -> None:
        super().__init__(config, part, host, say)
        self.dataset = dataset
        self.progress = RunProgress(part.manifest.start_iteration, part.run.num_iterations)
        self.recent, self.core = RecentEvents(host.log.named), CoreHandle()
        self.elected = asyncio.Event()
        """This node has been elected leader."""
        self.completed = asyncio.Event()
        """At the leader: the last iteration is committed."""
        self._leaving, self._files, self.disk_room = host.leaving, host.files, host.caps.disk
        self._entered_s: float | None = None
        self._view_version: object = 0
        self._duties: LeaderDuties | None = None
        self._reconnecting = again
        self._audit_feed = feed_of(part.membership, part.run.name, self.note)
        self._votes = VoteFile(config.state_dir, part.run_id)
        self.gateway = gateway = self._make_gateway()
        self.states = self._make_states()
        self.device = HostDevice(config, part, gateway.watch, self.note)
        address_of = gateway.client.address_of
        self.contacts = RunContacts(part, self.node_id, self.core, lambda: self.address, address_of)
        registrar = self._make_invitations()
        self.requests = OperatorRequests(
            self._leaving.asked,
            config.drain_timeout_s,
            self.core,
            note=self.note,
            leads=self.contacts.leads,
            unkept=lambda: "" if self._duties is None else self._duties.unkept,
        )
        self.work = WorkLedger(part, self.core, partial(_ask_receipt, part), self.note)
        self.supply = None if dataset is None else self._make_supply(dataset)
        """At a data node: the layer that gives the compute process its data."""
        self.base = self._make_base()
        """In a run with an adapter: the layer that gives the compute process the other weights."""
        services = None
        if registrar is not None and self.supply is not None:
            services = DataServices(registrar, self.supply.read_for_peer, self.work.receipt_of)
        self._make_sockets(services, self.contacts.admitting)
        self._server.parts.share(self._make_sharing())
        if self._audit_feed is not None:
            self._server.on_fault.append(self._audit_feed.take_fault)
        self.members = Members(
            part, self.contacts, self.core, self._use_bans, self._server.expiries, self.note
        )
        self.recutting = Recutting(part.run, self.core, self.note)
        self.credit = CreditCounter(host.credit, part, self.name, self.note)
        self.metrics = NodeMetrics(
            part,
            self.name,
            config,
            WatchedParts(self.core, self.device, gateway, self.note, self.credit.spent),
        )
        self.iterations = iteration_log(part, config, self.note)
        self._whole_status = WholeStatus(part.membership, rejoins=config.rejoins)
        self._commands = {
            "status": self._status,
            "export": self._export,
            "plan": self._plan,
            **self.requests.commands(),
            **self.invitations.commands(),
            **self.members.commands(),
            **self.recutting.commands(),
        }
        host.log.use_names(gateway.book.name_of)
        self._journal.follow(
            self.progress,
            host.history,
            self,
            self.requests,
            self.metrics,
            self.iterations,
            self.recent,
            NodeLog(),
            *(() if self._audit_feed is None else (self._audit_feed,)),
        )

    def _make_gateway(self) -> Gateway:
        part = self.part
        gives_initial = part.init_dir is not None or part.checkpoint_dir is not None
        answers = PeerAnswers(
            name=self.name,
            hello=self._hello,
            address=lambda: self.address,
            status=lambda: json.dumps(for_members(self.local_status())),
            find_kept=self._find_state,
            initial=InitialStates(part) if gives_initial else None,
        )
        return Gateway(
            part.run_id,
            part.membership,
            sizes=tensor_sizes(part.run),
            answers=answers,
            files=self._files,
            paces=self._host.caps.paces,
        )

    async def _find_state(self, request: StateRequest) -> StateBlob | str | None:
        """Return what this host's disk has, or why not. None: the device may have it."""
        if not request.base_hash:
            return await self.states.find(request)
        if self.base is None:
            return "the run trains all weights"
        return await self.base.find(request.base_hash)

    def _make_states(self) -> DiskStates:
        """Return what keeps states of stages on this host's disk."""
        folder = run_folder(self.config.state_dir, self.part.run_id)
        store, start = store_of(self.config), self.part.manifest.initial_weights
        return DiskStates(
            folder,
            post=self.core.post,
            note=self.note,
            fetch=self.gateway.fetch_state,
            store=StateStore(
                folder.with_name("states"),
                room=self.disk_room,
                names=partial(stage_names, self.part.run),
            ),
            stored=None if store is None or start == "seed" else StoredChunks(store, start),
        )

    def _make_supply(self, dataset: Dataset) -> DataSupply:
        """Return what gives the compute process its data."""
        run, note = self.part.run, self.note
        source: BlockSource = FolderSource(dataset)
        if dataset.is_stored:
            source = StoreSource(dataset, run.batch, run.seed, note=note, clock=time.monotonic)
        membership, leave = self.part.membership, partial(self.requests.leave, 0.0)
        return DataSupply(source, self.core, self.part.run_id, membership, note=note, leave=leave)

    def _make_base(self) -> BaseSupply | None:
        """Return what gets the weights that the run does not train, if there are any."""
        source = base_of(self.part, self.config)
        if source is None:
            return None
        source = dataclasses.replace(source, room=self.disk_room)
        return BaseSupply(
            source,
            self.part.run,
            self.core,
            fetch=self._fetch_base(source),
            note=self.note,
            waits=self.waits,
            leave=partial(self.requests.leave, 0.0),
        )

    def _fetch_base(self, source: BaseSource) -> FetchPart:
        """Return what fetches weights that the run does not train."""
        found = hub_model_of(self.part.manifest)
        if found is None:
            return self.gateway.fetch_base
        loop = asyncio.get_running_loop()

        def take(num_bytes: int) -> None:
            turn = self.gateway.intake.wait(num_bytes, Lane.STATES)
            asyncio.run_coroutine_threadsafe(turn, loop).result()

        hub = HubBase(*found, self.part.run.model, source, take)
        return hub.before(self.gateway.fetch_base, self.note)

    def _make_sharing(self) -> Sharing:
        """Return how this node writes its stage's part of a checkpoint when the leader asks."""
        shared = shared_of(self.part, self.config)

        def find(sender: NodeId) -> SharedCheckpoints | str | None:
            allowed = shared is None or sender == self.contacts.leader().id
            return shared if allowed else "only the leader of the run may ask for that"

        def written(stage: int, iteration: int, num_bytes: int) -> None:
            self.note("part.written", stage=stage, iteration=iteration, num_bytes=num_bytes)

        return Sharing(find, written)

    # --- start --------------------------------------------------------------------------------

    @override
    async def _start(self) -> None:
        """Start the parts. The compute process comes first: it loads torch meanwhile."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: _failed(context, self._files, self.note))
        self._stack.callback(loop.set_exception_handler, None)
        if self._audit_feed is not None:
            await self._stack.enter_async_context(self._audit_feed)
        self._stack.push_async_callback(self.device.close)
        await self.device.start()
        self._leaving.kills(self.device.compute.kill)
        await self._listen()
        await self._restore_history()
        await self._host.present(self)
        self._stack.enter_context(self._host.operates(self.requests, self.device))
        for layer in (self.supply, self.base):
            if layer is not None:
                await self._stack.enter_async_context(layer)
        await self._stack.enter_async_context(self.metrics)
        await self._stack.enter_async_context(self.iterations)
        await self._stack.enter_async_context(self.credit)
        lasting = beside(
            self._keep_renewed(self.gateway.dialling.redial),
            self.invitations.keep_level(),
            self.members.keep_current(),
            self.work.keep_collecting(),
            self.credit.keep_saving(),
            self.recutting.keep_looking(),
        )
        await self._stack.enter_async_context(lasting)
        keep_pauses_short()
        self.note("node.started", node_id=self.node_id, address=self.address)
        self._doubts.begin(self.address, filter(None, (self.part.leader_address,)))
        self._note_run(self.part.beginning)
        self._files.tell_if_few(num_nodes_least(self.part.run) - 1, self.note)

    async def _restore_history(self) -> None:
        """Show the curves of the run that an earlier daemon of this folder has recorded."""
        folder, run_id = self.config.state_dir, self.part.run_id
        table = run_folder(folder, run_id).with_name(FILE_NAME)
        steps: list[Point] = []
        with suppress(OSError):
            steps = await in_thread(lambda: read_curve(table))
        with suppress(OSError):
            kept = await in_thread(lambda: list(kept_events(folder / FOLDER, run_id)))
            self._host.history.restore(kept, steps)

    @override
    async def _listen(self) -> int:
        found = await super()._listen()
        self.gateway.dialling.listen(self._server.reverse, own_server(self.config, found))
        return found

    def use_reach(self, reach: Reach) -> None:
        """Connect as befits how others reach this node."""
        if reach is Reach.OUTBOUND:
            self.dht.answer_nobody()
        self.gateway.dialling.use(reach)

    async def prepare(self) -> None:
        """Measure the device, and start the core."""
        self._start_core(await self.device.measure(self.say, self.waits))

    def _start_core(self, measured: MeasuredHost) -> None:
        part, device, gateway = self.part, self.device, self.gateway
        bans = part.membership.bans
        identity = Identity(
            node_id=self.node_id,
            address=self.address,
            role=part.role,
            capacity=measured.capacity,
            compute_s=measured.compute_s,
            stage_index=part.stage_index,
            duty=part.duty,
            reach=gateway.dialling.reach,
            name=self.name,
            device=device.text,
            memory_bytes=measured.memory_bytes,
            decod_version=__version__,
            seals=DecisionSeals(part.membership, part.run_id, wall_clock),
            bans=bans.present,
            read_bans=bans.read,
            proofs=TensorProofs(part.membership.host, part.run_id),
        )
        run = part.run
        compute: Compute = device.compute
        if self.supply is not None:
            compute = self.supply.before(compute, device.arena)
        if self.base is not None:
            compute = self.base.before(compute)
        machine = NodeMachine(
            identity,
            run,
            dataclasses.replace(facts_of(part.manifest), promise=self._votes.load()),
            leader=part.leader,
            rng=random.SystemRandom(),  # Nobody may foresee whose work is audited.
        )
        planning = PlanningProcess(run.protocol, self.config.state_dir / "planning.log")
        self._stack.push_async_callback(planning.close)
        driver = NodeDriver(
            machine,
            self.metrics.timed(compute),
            device.arena,
            sizes_of(run),
            DriverPorts(
                transport=gateway,
                planning=planning,
                disk=self.states,
                copies=StateCopies(self.config.state_dir, self.disk_room),
                keep_vote=self._keep_vote,
                on_bans=self.members.carry_out,
                on_note=lambda note: self.note(note.event, **dict(note.fields)),
                on_work=self._count,
                on_run_complete=lambda _: self.completed.set(),
            ),
        )
        self.core.attach(driver)
        self._stack.push_async_callback(driver.close)
        self._stack.push_async_callback(self.states.close)
        if part.leader_address:
            gateway.client.set_address(part.leader, part.leader_address)
        gateway.attach(driver)
        driver.start()
        self.states.start()

    def take_lead(self, duties: LeaderDuties) -> None:
        """Show what this node does as the leader, and export as it says, from now on."""
        self._duties = duties

    # --- end ----------------------------------------------------------------------------------

    async def wait_stopped(self) -> Stop:
        """Wait until the core has stopped and its last messages are sent; return how it ended."""
        gateway, stop = self.gateway, await self.core.driver.stopped
        leading = self.core.leading
        # Without a quorum, the others may go on under another leader.
        if leading is not None and not leading.lacking and leading.state is LeaderState.FINISHED:
            gateway.say_farewell(leading.view.term, stop.detail)
        await self.work.settle(stop.reason)
        await gateway.client.flush(timeout_s=FLUSH_S)
        if stop.reason is StopReason.FINISHED:
            self._note_run("run.finished")
            KnownPeers(self.config.state_dir).end(self.part.membership.root)
        self.note("node.stopped", reason=f"{stop.reason.value}: {stop.detail}")
        return stop

    async def unless_drained(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do some work. If this node is asked to leave first, cancel the work and return False."""
        try:
            await self._leaving.unless_asked(work)
        except LeftEarlyError:
            self.device.abandon()
            return False
        return True

    @property
    def in_run_s(self) -> float:
        """Seconds since this node entered the run; 0 if it has not."""
        return 0.0 if self._entered_s is None else time.monotonic() - self._entered_s

    def contributors(self) -> list[SeenMember]:
        """Return the nodes that have worked for the run, as far as this daemon has seen them."""
        return self._host.history.contributors()

    # --- what others see ----------------------------------------------------------------------

    def _hello(self, request: HelloRequest) -> HelloInfo | None:
        if not self.address:
            return None
        if request.sender is not None and request.sender_address:
            self.gateway.book.expect(request.sender, request.sender_address)
        leader, described = self.contacts.leader(), self.part.manifest.to_json()
        known = None if leader.electing else leader.id
        return self._info(request, described, known, leader.address)

    def local_status(self) -> dict[str, Any]:
        """Return the status of the run as this node knows it."""
        duties, core, leader = self._duties, self.core, self.contacts.leader()
        transfer = core.driver.transfer if core.started else None
        status = status_of(self.part, self.progress, core.facts, transfer)
        me = {
            "id": self.node_id,
            "name": self.name,
            "address": self.address,
            "role": self.part.role.value,
            "reach": self.gateway.dialling.reach,
            "device": self.device.name,
            "device_free": False,
            "in_run_s": round(self.in_run_s, 1),
            **own_status(core.facts),
        }
        if self._reconnecting:
            me["state"] = RECONNECTING
        return status | {
            "state": me["state"],
            "age_s": round(self.in_run_s, 1) if self._entered_s is not None else None,
            "leader": dataclasses.asdict(leader),
            "node": me,
            "checkpoint": None if duties is None else duties.describe_checkpoint(),
            "evaluation": None if duties is None else duties.describe_evaluation(),
            "texts": None if duties is None else duties.describe_texts(),
            "curve": None if duties is None else self._host.history.told(),
            "cut": self.recutting.describe(),
            "states": self.states.describe(),
            "contributed": self.work.describe(),
            "credit": self.credit.describe(),
            "join_string": self.invitations.current(Role.RELAY),
            "data_join_string": self.invitations.current(Role.DATA),
            "num_newcomers": self.invitations.num_newcomers(),
            "counters": self._server.counters.totals(),
            "timing": self.metrics.timing(),
            "connections": self.gateway.dialling.describe(),
            "message": status["message"].replace(THIS_NODE, self.name),
            "recent": self.recent.describe(time.monotonic(), name=self.name),
        }

    def describe(self) -> str:
        """Return one line on this node's state, stage, iteration and loss."""
        status = self.local_status()
        stage, known = status["node"]["stage_index"], status["loss"]
        where = "" if stage is None else f", stage {stage}"
        loss = "" if known is None else f", loss {known:.4f}"
        return f"{status['state']}{where}, iteration {status['iteration']}{loss}"

    @property
    def healthy(self) -> bool:
        """Whether the core is stepped in time."""
        facts, now_s = self.core.facts, asyncio.get_running_loop().time()
        if facts is None or not self.core.runs:
            return True
        deadline_s = facts.deadline_s
        return deadline_s is None or now_s - deadline_s < _OVERDUE_MAX_S

    async def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        return await self._whole_status.of(self.local_status(), self.core.facts)

    async def _plan(self, _: dict[str, Any]) -> dict[str, Any]:
        return describe_hosts(self.part.run, self.core.facts)

    async def _export(self, request: dict[str, Any]) -> dict[str, Any]:
        """Export if this node leads; else refuse, and say who can."""
        if self._duties is not None:
            return await self._duties.export(request)
        if self.part.leader == self.node_id:
            raise not_begun()
        raise ConfigError(
            "this node does not lead the run",
            why="only the leader can put all stages together",
            fix=f"run the command on the leader's host ({self.part.leader_address}), with its "
            "--state-dir",
            code="E-RUN-003",
        )

    async def _keep_vote(self, promise: Promise) -> bool:
        unkept = await in_thread(lambda: self._votes.keep(promise))
        if unkept:
            self.note("vote.failed", term=promise.term, reason=unkept)
        return not unkept

    def _use_bans(self, bans: BanList) -> None:
        book = self.part.membership.bans
        self.gateway.cut(book.use(bans))
        in_thread(book.keep).add_done_callback(self._bans_kept)

    def _bans_kept(self, kept: "asyncio.Future[None]") -> None:
        if not kept.cancelled() and (error := kept.exception()) is not None:
            self.note("bans.unkept", reason=str(error))

    # --- notes --------------------------------------------------------------------------------

    def take(self, entry: JournalEntry) -> None:
        """Follow the journal: who leads, and who the members are."""
        if entry.event == "leader.elected":
            self.elected.set()
        elif entry.event == "iteration.opened" and (facts := self.core.facts) is not None:
            self._host.history.see(seen_members(facts), time_s=entry.time_s)
            if entry.fields["view_version"] != self._view_version:
                self._view_version = entry.fields["view_version"]
                self._entered_s, self._reconnecting = self._entered_s or entry.now_s, False
                self._remember_members(facts.view)
                if self._duties is not None:
                    self._duties.members_changed()

    def _count(self, work: CountWork) -> None:
        self.work.count(work)
        self.iterations.count(work)
        self.credit.count(work)

    def _remember_members(self, view: View) -> None:
        self._files.tell_if_few(len(view.members) - 1, self.note)
        others = [m.address for m in view.members if not m.outbound and m.address != self.address]
        self._remember(self.part.run.name, others)

    def _note_run(self, event: str) -> None:
        part, iteration = self.part, self.progress.iteration
        self.note(event, run=part.run.name, run_id=part.run_id, iteration=iteration)


def shared_of(part: RunPart, config: NodeConfig) -> SharedCheckpoints | None:
    """Return the run's checkpoints in the store that this node shares; None if it shares none.

    Raises:
        ConfigError: This host has no package for the store (E-CFG-095).
    """
    store = store_of(config)
    return None if store is None else SharedCheckpoints(store, part.run_id)


def _failed(context: dict[str, Any], files: FileLimit, note: Callable[..., None]) -> None:
    """Log an error that no task or callback has caught. asyncio would print it."""
    error = context.get("exception")
    if is_exhausted(error):
        reason = str(context.get("message"))[:200]
        note("files.exhausted", limit=files.limit, reason=reason, fix=RAISE)
        return
    fields = {"reason": f"{context.get('message')}: {error!r}"[:500]}
    _log.error("task.failed", exc_info=error, extra={"event": "task.failed", "fields": fields})


async def _ask_receipt(part: RunPart, issuer: Member) -> ReceiptAnswer:
    return await ask_receipt(
        issuer.address, issuer.node_id, part.run_id, part.membership, timeout_s=_RECEIPT_S
    )
