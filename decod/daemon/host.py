"""One node's life on its host: its parts are built here, and started and ended in order.

    lock the state folder -> compute process -> listen (gRPC, DHT, local socket) -> join the run
    ... until the core stops, or a signal asks for it ...
    say goodbye -> stop listening -> end the compute process -> unlock

`Node` is the composition root that leader and volunteer share. It holds no protocol logic.
"""

import asyncio
import dataclasses
import json
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decod.config.node import DEVICE_LABEL, NodeConfig
from decod.config.schema import Manifest, activation_size_bytes
from decod.daemon.control import ControlServer
from decod.daemon.data_supply import DataSupply
from decod.daemon.disk_states import DiskStates
from decod.daemon.errors import error_of, not_begun
from decod.daemon.files import RAISE, FileLimit, is_exhausted, raise_limit
from decod.daemon.folder import StateFolder
from decod.daemon.frontend import Frontend, NodeFrontend
from decod.daemon.gateway import Gateway
from decod.daemon.leaving import Leaving, LeftEarlyError
from decod.daemon.notify import Notifier
from decod.daemon.operator_requests import OperatorRequests
from decod.daemon.pauses import keep_pauses_short
from decod.daemon.peers import KnownPeers
from decod.daemon.reachability import advertised
from decod.daemon.recent_events import RecentEvents
from decod.daemon.run_facts import facts_of, num_nodes_least, sizes_of, tensor_sizes
from decod.daemon.status import RunProgress, status_of
from decod.daemon.succession import leader_of
from decod.daemon.threads import in_thread
from decod.daemon.votes import VoteFile
from decod.driver.arena import ArenaAllocator, ArenaRegion
from decod.driver.compute import ComputeDiedError, ComputeProcess, JobError, Reply
from decod.driver.driver import NodeDriver
from decod.errors import ConfigError, HardwareError, NetworkError
from decod.heap import keep_freed_memory
from decod.ids import NodeId, RunId
from decod.net.dht import Dht
from decod.net.identity import HostKey as KeyIdentity
from decod.net.identity import load_or_create_identity
from decod.net.limits import LIMITS
from decod.net.server import HelloInfo, HelloRequest, PeerServer
from decod.obs.logs import LogContext, close_logs, log_note, set_up_logs
from decod.obs.terminal import PatientTerminal
from decod.protocol.core.effects import Note, Stop, StopReason
from decod.protocol.core.identity import Identity, Promise
from decod.protocol.core.patience import Patience
from decod.protocol.core.view import Role
from decod.protocol.leadership.leader import LeaderState
from decod.protocol.node import NodeMachine
from decod.texts import why_of

_log = logging.getLogger("decod")

Say = Callable[[str], None]
Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

_CAPACITY_AUTO_MAX = 64
_MEMORY_SHARE = 0.5
"""Part of the free memory for microbatches if the operator has not set the capacity."""

_AVERAGES_MAX = 64
"""Averages that a candidate has room for until its stage's state arrives, unless `keep_max_bytes`
is less."""

_NUM_PORTS_TRIED = 16
"""Attempts if the system chooses the port, since it must be free for both TCP and UDP."""

_LAST_LINES_S = 1.0
"""Timeout of writing the last lines of the log to the terminal."""

_FLUSH_S = 3.0
"""Timeout of sending the last messages to the peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """This node's part in the run, as its command decided."""

    role: Role
    run_id: RunId
    manifest: Manifest
    leader: NodeId
    leader_address: str = ""
    """Empty at the leader itself."""
    stage_index: int | None = None
    data_dir: Path | None = None
    init_dir: Path | None = None
    checkpoint_dir: Path | None = None
    """The checkpoint from which the run goes on. Its hash is the manifest's `initial_weights`."""


class Host:
    """The parts of a daemon that outlive its nodes: folder, identity, log. Use it in `with`.

    Args:
        config: This host's choices.
        leaving: Says whether this daemon is to leave.

    Raises:
        ConfigError: The state folder is in use or can't be used.
        HardwareError: The log can't be written, or the limit on open files is too low.
    """

    def __init__(self, config: NodeConfig, leaving: Leaving) -> None:
        keep_freed_memory()
        self.leaving = leaving
        self._control = ControlServer(config.state_dir)
        self._notifier = Notifier()
        self._presence: Frontend | None = None
        self._folder = StateFolder(config.state_dir)
        self._folder.lock()
        try:
            self.identity = load_or_create_identity(config.state_dir)
            self.files = raise_limit()
            self.log = LogContext({"node_id": self.identity.node_id})
            self._terminal = PatientTerminal(2)
            log_path = config.state_dir / "node.log"
            set_up_logs(file=log_path, context=self.log, terminal=self._terminal)
        except BaseException:
            self._folder.unlock()
            raise

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Answer the operator and inform the service manager while the context lasts."""
        telling = asyncio.create_task(self._notifier.keep_telling(self))
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            await self._control.close()

    async def present(self, presence: Frontend) -> None:
        """Present the daemon as `presence` from now on, to operator and service manager."""
        self._presence = presence
        await self._control.answer_with(presence.answer)
        self._notifier.ready()

    def describe(self) -> str:
        """Return one line on the daemon's state."""
        return "starting" if self._presence is None else self._presence.describe()

    @property
    def healthy(self) -> bool:
        """Whether the daemon does its due work in time."""
        return self._presence is None or self._presence.healthy

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            close_logs()
            self._terminal.finish(_LAST_LINES_S)
        finally:
            self._folder.unlock()


class Node:
    """One node, from its first listening socket to its last goodbye. Use it in `async with`.

    Args:
        config: This host's choices.
        part: The node's part in the run.
        host: The host, which holds the folder's lock.
        say: Takes lines for the operator's terminal.
    """

    def __init__(self, config: NodeConfig, part: RunPart, host: Host, say: Say) -> None:
        self.config, self.part, self.say = config, part, say
        self.identity: KeyIdentity = host.identity
        self.files: FileLimit = host.files
        self.host, self.leaving = host, host.leaving
        self.address, self.device = "", config.device
        """The device is what the operator asked for, such as `auto`, until the compute process has
        tried it. Then it is the device in use."""
        self.progress = RunProgress(iteration=part.manifest.start_iteration)
        self.happenings = RecentEvents()
        self.driver: NodeDriver | None = None
        self.compute: ComputeProcess | None = None
        self.arena: ArenaAllocator | None = None
        self.dht: Dht | None = None
        self.supply: DataSupply | None = None
        """At a data node: the layer that gives the compute process its data."""
        self.join_string: str | None = None
        self.ending = False
        """At the leader: no more commits follow, so the state that is kept is final."""
        self.elected = asyncio.Event()
        """This node has been elected leader."""
        self.reconnecting = False
        """This node was in the run before, and is on its way back."""
        self._entered_s: float | None = None
        self.completed = asyncio.Event()
        """At the leader: the last iteration is committed."""
        self.on_run_complete: Callable[[int], None] = lambda _: None
        self.describe_checkpoint: Callable[[], dict[str, Any] | None] = lambda: None
        """At the leader: returns the checkpoint part of `decod status`."""
        self.commands: dict[str, Command] = {"status": self._status, "export": self._export}
        """The commands that the local socket answers."""
        self.wishes = OperatorRequests(self)
        self.kept = DiskStates(self)
        run = part.manifest.run
        self.gateway = Gateway(
            part.run_id,
            self.identity.node_id,
            name=config.name or self.identity.name,
            sizes=tensor_sizes(run),
            hello=self._hello,
            status=lambda: json.dumps(self.local_status()),
        )
        self.gateway.files = self.files
        self.server = PeerServer(
            self.identity.node_id,
            part.run_id,
            self.gateway,
            limits=dataclasses.replace(LIMITS, connections_max=self.files.connections_max),
            watch=self.gateway.watch,
        )
        host.log.name_of = self.gateway.name_of
        self._named = host.log.named
        self._stack = AsyncExitStack()
        self._view_version: object = 0
        self._votes = VoteFile(config.state_dir, part.run_id)

    # --- start --------------------------------------------------------------------------------

    async def __aenter__(self) -> "Node":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        loop.set_exception_handler(self._task_failed)
        self._stack.callback(loop.set_exception_handler, None)
        await self._start_compute()
        port = await self._listen()
        self.address = advertised(config, port)
        await self.host.present(NodeFrontend(self))
        keep_pauses_short()
        self.note("node.started", node_id=self.identity.node_id, address=self.address)
        self.files.tell_if_few(num_nodes_least(self.part.manifest.run) - 1, self.note)

    async def _start_compute(self) -> None:
        """Start the compute process. This comes first, since it loads torch while the rest
        starts."""
        try:
            self.arena = self._make_arena()
            self._stack.callback(self.arena.close)
            log_path = self.config.state_dir / "compute.log"
            self.compute = await ComputeProcess.start(
                self.arena, log_path=log_path, watch=self.gateway.watch
            )
        except (OSError, OverflowError, ValueError) as error:
            raise HardwareError(
                "can't start the compute process",
                why=why_of(error),
                fix="free memory and disk space, or lower --capacity",
                code="E-HW-005",
            ) from error
        self._stack.push_async_callback(self.compute.close)
        self.leaving.at_once = self.compute.kill
        patience = Patience(self.part.manifest.run.protocol)
        self.compute.watch_over(patience, self._compute_hung)
        ended = self.compute.ended
        ended.add_done_callback(self._compute_ended)
        self._stack.callback(ended.remove_done_callback, self._compute_ended)

    async def _listen(self) -> int:
        """Listen for peers on TCP, and for the DHT on UDP of the same port; return the port."""
        config = self.config
        num_tries = _NUM_PORTS_TRIED if config.listen_port == 0 else 1
        while True:
            port = await self.server.start(config.listen_host, config.listen_port)
            self.dht = Dht(
                self.identity.node_id,
                self.part.run_id,
                wall_clock=time.time,  # noqa: TID251 - records end at instants that hosts share.
                counters=self.server.counters,
            )
            try:
                await self.dht.start(config.listen_host, port)
            except NetworkError:
                await self.server.stop(0)
                num_tries -= 1
                if num_tries == 0:
                    raise
            else:
                break
        self._stack.callback(self.gateway.detach)
        self._stack.push_async_callback(self.server.stop, 0.5)
        self._stack.push_async_callback(self.gateway.close)
        self._stack.push_async_callback(self.dht.close)
        return port

    def _compute_hung(self, kind: str, waited_s: float) -> None:
        self.note("worker.hung", job=kind, waited_s=round(waited_s))

    def _compute_ended(self, ended: "asyncio.Future[str]") -> None:
        if not ended.cancelled():
            self.note("worker.died", reason=ended.result())

    def _task_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that no task or callback has caught. asyncio would print it."""
        error = context.get("exception")
        if is_exhausted(error):
            reason = str(context.get("message"))[:200]
            self.note("files.exhausted", limit=self.files.limit, reason=reason, fix=RAISE)
            return
        fields = {"reason": f"{context.get('message')}: {error!r}"[:500]}
        extra = {"event": "task.failed", "fields": fields}
        _log.error("task.failed", exc_info=error, extra=extra)

    def _make_arena(self) -> ArenaAllocator:
        """Return an arena with room for all tensors that this node may have to hold."""
        run = self.part.manifest.run
        sizes = sizes_of(run)
        model_bytes = tensor_sizes(run).model_bytes
        capacity = self.config.capacity or _CAPACITY_AUTO_MAX
        batch = run.batch.num_microbatches * run.batch.num_data_nodes
        # Members keep tensors for others, and candidates keep averages. No node needs both.
        kept = max(2 * batch * sizes.activation_bytes, _AVERAGES_MAX * model_bytes)
        kept = min(run.protocol.keep_max_bytes, kept)
        return ArenaAllocator(
            (64 << 20) + 8 * capacity * sizes.activation_bytes + kept + 8 * model_bytes
        )

    async def prepare(self) -> None:
        """Configure the compute process, measure it, and start the core."""
        run, part, compute = self.part.manifest.run, self.part, self.compute
        assert compute is not None
        facts = await self.ask(
            "configure",
            {
                "model": dataclasses.asdict(run.model),
                "stages": dataclasses.asdict(run.stages),
                "batch": dataclasses.asdict(run.batch),
                "optimizer": dataclasses.asdict(run.optimizer),
                "reduction": dataclasses.asdict(run.reduction),
                "seed": run.seed,
                "device": self.config.device,
                "num_threads": self.config.num_threads,
                "data_dir": str(part.data_dir) if part.data_dir else None,
                "init_dir": str(part.init_dir) if part.init_dir else None,
                "checkpoint_dir": str(part.checkpoint_dir) if part.checkpoint_dir else None,
                "checkpoint_sha256": part.manifest.initial_weights,
            },
        )
        self.device = facts["device"]
        self.say(f"{DEVICE_LABEL} {facts['device_text']}")
        self.note("worker.started", device=facts["device_text"])
        # Any relay stage will do: the stages differ by one block at most.
        stage = 0 if part.role is Role.DATA else (part.stage_index or 1)
        await self.ask("build", {"stage_index": stage})
        measured = await self.ask("measure", {"num_repeats": 1})
        capacity = self.config.capacity or self._capacity(facts, measured)
        self._start_core(capacity, (measured["forward_s"] + measured["backward_s"]) / 2)

    def _capacity(self, facts: dict[str, Any], measured: dict[str, Any]) -> int:
        run = self.part.manifest.run
        if self.part.role is Role.DATA:
            return min(run.batch.num_microbatches, _CAPACITY_AUTO_MAX)
        each_bytes = measured["microbatch_memory_bytes"] + 4 * activation_size_bytes(run)
        fits = int(_MEMORY_SHARE * facts["memory_bytes"] / max(1, each_bytes))
        if fits < 1:
            raise HardwareError(
                f"{facts['memory_bytes'] / 2**30:.1f} GiB are free on {self.device}",
                why=f"one microbatch of this run takes {each_bytes / 2**30:.1f} GiB there",
                fix="free memory, use a larger device, or set --capacity 1 to try anyway",
                code="E-HW-003",
            )
        return min(fits, _CAPACITY_AUTO_MAX)

    def _start_core(self, capacity: int, compute_s: float) -> None:
        part, run = self.part, self.part.manifest.run
        assert self.compute is not None
        assert self.arena is not None
        identity = Identity(
            node_id=self.identity.node_id,
            address=self.address,
            role=part.role,
            capacity=capacity,
            stage_index=part.stage_index,
            name=self.config.name or self.identity.name,
        )
        machine = NodeMachine(
            identity,
            run.protocol,
            dataclasses.replace(facts_of(part.manifest), promise=self._votes.load()),
            leader=part.leader,
            compute_s=compute_s,
            rng=random.Random(secrets.randbits(64)),  # noqa: S311 - the core's only source.
        )
        self.driver = NodeDriver(
            machine,
            self.compute if self.supply is None else self.supply.before(self.compute),
            self.arena,
            sizes_of(run),
            on_note=self._noted,
            on_run_complete=self._run_completed,
        )
        self.driver.keep_vote = self._keep_vote
        self._stack.push_async_callback(self.driver.close)
        self.driver.disk, self.gateway.kept = self.kept, self.kept.find
        self._stack.push_async_callback(self.kept.close)
        if part.leader_address:
            self.gateway.client.set_address(part.leader, part.leader_address)
        self.gateway.attach(self.driver)
        self.driver.start(self.gateway)
        self.kept.start()

    async def ask(
        self, kind: str, fields: dict[str, Any], *, inputs: tuple[ArenaRegion, ...] = ()
    ) -> dict[str, Any]:
        """Run a job outside the core. Its errors are such that the operator can act on them."""
        assert self.compute is not None
        try:
            reply: Reply = await self.compute.submit(kind, fields, inputs=inputs)
        except JobError as error:
            raise error_of(error) from error
        except ComputeDiedError as error:
            raise HardwareError(
                f"the compute process failed at {kind}",
                why=str(error),
                fix=f"read {self.config.state_dir / 'compute.log'}",
                code="E-HW-002",
            ) from error
        return reply.result

    # --- end ----------------------------------------------------------------------------------

    async def wait_stopped(self) -> Stop:
        """Wait until the core has stopped and its last messages are sent; return how it ended."""
        assert self.driver is not None
        stop = await self.driver.stopped
        leader = self.driver.machine.leader
        # Without a quorum, the others may go on under another leader.
        decides = leader is not None and not leader.quorum.lacking
        if leader is not None and decides and leader.state is LeaderState.FINISHED:
            self.gateway.say_farewell(leader.view.term, stop.detail)
        await self.gateway.client.flush(timeout_s=_FLUSH_S)
        if stop.reason is StopReason.FINISHED:
            KnownPeers(self.config.state_dir).forget(self.part.run_id)
        self.note("node.stopped", reason=f"{stop.reason.value}: {stop.detail}")
        return stop

    async def unless_drained(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do some work. If this node is asked to leave first, cancel the work and return False."""
        try:
            await self.leaving.unless_asked(work)
        except LeftEarlyError:
            if self.compute is not None:
                # It may still be loading torch, in vain.
                self.compute.ended.remove_done_callback(self._compute_ended)
                self.compute.kill()
            return False
        return True

    @property
    def in_run_s(self) -> float:
        """Seconds since this node entered the run; 0 if it has not."""
        return 0.0 if self._entered_s is None else time.monotonic() - self._entered_s

    @property
    def device_gone(self) -> bool:
        """Whether the compute process has ended, and the state on the device is lost."""
        return self.compute is not None and self.compute.ended.done()

    # --- what others see ----------------------------------------------------------------------

    def _hello(self, request: HelloRequest) -> HelloInfo | None:
        if not self.address:
            return None
        if request.sender is not None and request.sender_address:
            self.gateway.expect(request.sender, request.sender_address)
        leader = leader_of(self)
        return HelloInfo(
            run_id=self.part.run_id,
            manifest_json=self.part.manifest.to_json(),
            node_id=self.identity.node_id,
            leader=None if leader.electing else leader.node_id,
            leader_address=leader.address,
        )

    def local_status(self) -> dict[str, Any]:
        """Return the status of the run as this node knows it."""
        return status_of(self)

    async def _export(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Refuse, and say who can export. Once a node leads, it registers another method."""
        if self.part.leader == self.identity.node_id:
            raise not_begun()
        raise ConfigError(
            "this node does not lead the run",
            why="only the leader can put all stages together",
            fix=f"`decod export` on the leader's host ({self.part.leader_address}), "
            "with its --state-dir",
            code="E-RUN-003",
        )

    async def _status(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return self.local_status()

    def timing(self) -> dict[str, float]:
        """Return how this node has spent its time since its core started, in seconds."""
        if self.driver is None:
            return {}
        spent = self.gateway.watch.seconds
        return {
            **self.driver.timing(),
            "node_copy_s": spent["copy"],
            "node_serialize_s": spent["serialize"],
            "node_cpu_s": time.process_time(),
        }

    async def _keep_vote(self, promise: Promise) -> bool:
        kept = await in_thread(lambda: self._votes.keep(promise))
        if not kept:
            self.note("vote.failed", term=promise.term)
        return kept

    def _run_completed(self, iteration: int) -> None:
        self.completed.set()
        self.on_run_complete(iteration)

    # --- notes --------------------------------------------------------------------------------

    def _noted(self, note: Note) -> None:
        fields = dict(note.fields)
        self.progress.take(note.event, fields, now_s=time.monotonic())
        if note.event == "leader.elected":
            self.elected.set()
        elif note.event == "iteration.opened" and fields["view_version"] != self._view_version:
            self._view_version = fields["view_version"]
            self._entered_s, self.reconnecting = self._entered_s or time.monotonic(), False
            self._remember_members()
        self.wishes.noted(note.event, fields)
        self.note(note.event, **fields)

    def _remember_members(self) -> None:
        assert self.driver is not None
        view, peers = self.driver.machine.context.view, KnownPeers(self.config.state_dir)
        self.files.tell_if_few(len(view.members) - 1, self.note)
        run_id, name = self.part.run_id, self.part.manifest.run.name
        in_thread(lambda: peers.keep(run_id, name, view, own=self.address))

    def note(self, event: str, **fields: object) -> None:
        """Log an event, and show it in the status if it is not routine."""
        self.happenings.take(event, self._named(fields), now_s=time.monotonic())
        log_note(_log, event, fields)
