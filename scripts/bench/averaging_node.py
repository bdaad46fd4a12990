"""One member that only averages: decod's network, arena, compute process, driver and averager.

    python -m bench.averaging_node --member 0 --members 2 --compression int4 --threads 1

It is a node without a run around it: no leader, no data, no flows, no vote. The core is a machine
that begins an average when it is told to, and hands the parts to the device when all are there.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.averaging import NUM_ELEMENTS, done, now_s, own_cpu_s, say
from bench.averaging_jobs import Check, Fill
from bench.plaintext import take_off_tls
from decod.clocks import wall_clock
from decod.compression.plan import Method
from decod.daemon.gateway import Gateway, PeerAnswers
from decod.daemon.open_files import raise_limit
from decod.daemon.run_facts import sizes_of, tensor_sizes
from decod.driver.arena import ArenaAllocator
from decod.driver.compute import ComputeProcess, PlanningProcess
from decod.driver.driver import DriverPorts, NodeDriver
from decod.driver.event_loop import run_loop
from decod.ids import AveragingId, Iteration, MicrobatchId, NodeId, RunId
from decod.membership.identity import HostKey, identity_of
from decod.membership.papers import TERMS, Membership
from decod.membership.registrar import founder_papers
from decod.net.server import PeerServer
from decod.process import keep_pauses_short
from decod.protocol.averaging.averager import Averager, Averaging, Weight, port_of
from decod.protocol.core import events as ev
from decod.protocol.core.context import Context, RunFacts
from decod.protocol.core.effects import Effect, SendTensor
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import Build, Configure, Job, Propose
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.averaging_messages import ReducedPart, ReducePart
from decod.protocol.core.view import Member, Opening, Role, View
from decod.protocol.node_machine import NodeMachine
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, SyncConfig, SyncMethod
from decod.system import keep_freed_memory

RUN_ID = RunId("a" * 26)
STAGE = 1
MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=800,
    intermediate_size=4141,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
)
"""Its two blocks, the stage that is averaged, have exactly `NUM_ELEMENTS` parameters."""


def _key(name: str) -> HostKey:
    """Return a key that is the same in every process."""
    return identity_of(Ed25519PrivateKey.from_private_bytes(sha256(name.encode()).digest()))


def node_id(member: int) -> NodeId:
    """Return the id of a member."""
    return _key(f"member {member}").node_id


def membership_of(member: int) -> Membership:
    """Return the membership of a member. All are of one root."""
    root, host = _key("root"), _key(f"member {member}")
    papers = founder_papers(root, host, TERMS, wall_clock())
    return Membership(root.public, host, papers, root_key=root)


def run_of(compression: Method) -> RunConfig:
    """Return the run whose second stage is averaged."""
    return RunConfig(
        model=MODEL,
        stages=StagesConfig(num_relay_stages=STAGE),
        batch=BatchConfig(sequence_length=8, microbatch_size=1, num_microbatches=1),
        sync=SyncConfig(method=SyncMethod.DILOCO, every=2, overlap=True, compression=compression),
    )


@dataclass(frozen=True, slots=True)
class Begin:
    """Average now."""


class AveragingMachine:
    """A core that averages, and does nothing else.

    Args:
        run: Says how averages travel.
        member: This member's index.
        num_members: All of them take part, and each stands for one microbatch.
        averaged: Called when the average is on the device.
    """

    def __init__(
        self, run: RunConfig, member: int, num_members: int, averaged: Callable[[], None]
    ) -> None:
        nodes = tuple(node_id(each) for each in range(num_members))
        members = [Member(node, "", Role.RELAY, STAGE, capacity=1) for node in nodes]
        view = View.of(members, version=1, leader=nodes[0], term=1, num_stages=STAGE + 1)
        self.context = Context(
            nodes[member],
            run,
            RunFacts(manifest_sha256="", activation_size_bytes=1),
            LinkTable(activation_size_bytes=1, compute_s=1.0),
            Opening(Iteration(0, 1), Iteration(0, 0), view),
        )
        self.strategy = SimpleNamespace(facts=None)
        self.leadership = SimpleNamespace(election=None)
        self.deadline_s = None
        self._nodes, self._averaged = nodes, averaged
        self._own = Weight(1, digest_of([MicrobatchId(1, 0, member)]))
        self._averager: Averager | None = None
        self._early: list[ev.Received] = []

    def start(self, _: float) -> list[Effect]:
        """Build the stage."""
        self.context.compute.submit(Build(STAGE), self)
        return self.context.out.taken()

    def begin(self) -> None:
        """Begin the next average."""
        context = self.context
        iteration = Iteration(context.iteration.number + 1, 1)
        context.opening = replace(context.opening, iteration=iteration)
        key = AveragingId(context.iteration, context.view.version)
        averaging = Averaging(key, self._nodes, context.owners(self._nodes), overlapped=True)
        self._averager = Averager(context.node_id, averaging, port_of(context), cast("Any", self))
        self._averager.begin(self._own, None)
        early, self._early = self._early, []
        for each in early:
            self._received(each)

    def step(self, now_s: float, event: ev.Event | Begin) -> list[Effect]:
        """Take in an event."""
        context = self.context
        match event:
            case Begin():
                self.begin()
            case ev.Received():
                self._received(event)
            case ev.JobFinished():
                context.compute.finished(now_s, event)
            case ev.TensorSent(_, tensor):
                context.tensors.release(tensor)
            case ev.SendFailed(to, message, _, tensor) if tensor is not None:
                print(f"sent again: {event.reason}", file=sys.stderr)
                context.out.put(SendTensor(to, message, tensor))
            case ev.LinkMeasured():
                pass
            case _:
                raise AssertionError(f"unexpected: {event}")
        return context.out.taken()

    def _received(self, received: ev.Received) -> None:
        message = received.message
        assert isinstance(message, ReducePart | ReducedPart)
        if message.averaging.iteration > self.context.iteration or self._averager is None:
            self._early.append(received)
            return
        assert received.tensor is not None
        if isinstance(message, ReducePart):
            self._averager.part(received.sender, message, received.tensor)
        else:
            self._averager.average(received.sender, message, received.tensor)

    # --- the averager's user, and the owner of jobs -------------------------------------------

    def averaged(self) -> None:
        """All parts are here: the device makes the average."""
        assert self._averager is not None
        parts = self._averager.take()
        job = Propose(self.context.iteration.number, 0, 0, num_ahead=len(parts))
        self.context.compute.submit(job, self, parts)

    def averaging_failed(self, reason: str) -> None:
        """Nothing is to fail here."""
        raise AssertionError(reason)

    def job_done(self, now_s: float, job: Job, event: ev.JobFinished) -> None:  # noqa: ARG002
        """The stage is built, or the average is here."""
        self._averaged()

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """Nothing is to fail here."""
        raise AssertionError(f"{job}: {reason}")


@dataclass(frozen=True, slots=True)
class Options:
    """One member's part."""

    member: int
    members: int
    compression: Method
    threads: int


class AveragingNode:
    """A member, from its first socket to its end. Use it in `async with`."""

    def __init__(self, options: Options) -> None:
        self._options, self._run = options, run_of(options.compression)
        self._stack = AsyncExitStack()
        self._finished = asyncio.Event()

    async def __aenter__(self) -> "AveragingNode":
        options, run = self._options, self._run
        own = membership_of(options.member)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="decod-bench-")))
        sizes = sizes_of(run)
        self._arena = ArenaAllocator(64 * NUM_ELEMENTS)
        command = (sys.executable, "-m", "bench.averaging_worker")
        self.compute = await ComputeProcess.start(self._arena, command=command)
        self._stack.push_async_callback(self.compute.close)
        answers = PeerAnswers(
            name=own.node_id[:4],
            hello=lambda _: None,
            address=lambda: "",
            status=lambda: "{}",
            find_kept=_nothing_kept,
        )
        self.gateway = Gateway(
            RUN_ID, own, sizes=tensor_sizes(run), answers=answers, files=raise_limit()
        )
        self._server = PeerServer(own, RUN_ID, self.gateway, watch=self.gateway.watch)
        self.port = await self._server.start("0.0.0.0", 0)  # noqa: S104 - in a network of its own.
        self._stack.push_async_callback(self._server.stop, 0)
        self._stack.push_async_callback(self.gateway.close)
        self._stack.callback(self.gateway.detach)
        await self._configure()
        machine = AveragingMachine(run, options.member, options.members, self._finished.set)
        planning = PlanningProcess(run.protocol, folder / "planning.log")
        self._stack.push_async_callback(planning.close)
        ports = DriverPorts(
            transport=self.gateway,
            planning=planning,
            on_note=lambda note: print(note, file=sys.stderr),
            on_run_complete=lambda _: None,
        )
        core = cast("NodeMachine", machine)
        self._driver = NodeDriver(core, self.compute, self._arena, sizes, ports)
        self._stack.push_async_callback(self._driver.close)
        self.gateway.attach(self._driver)
        self._driver.start()
        await self._end_of_job()
        await self.compute.submit(Fill(options.member))
        keep_pauses_short()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stack.__aexit__(*exc_info)

    async def _configure(self) -> None:
        host = {"device": "cpu", "num_threads": self._options.threads}
        await self.compute.submit(Configure(asdict(self._run) | host))

    async def _end_of_job(self) -> None:
        """Wait until the machine says that it has ended, or the driver breaks."""
        finished = asyncio.ensure_future(self._finished.wait())
        either: set[asyncio.Future[Any]] = {finished, self._driver.stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._driver.stopped.done():
            self._driver.stopped.result()
        self._finished.clear()

    def use_peers(self, addresses: list[str]) -> None:
        """Dial the other members at these addresses, which are in the order of the members."""
        for member, address in enumerate(addresses):
            if member != self._options.member:
                self.gateway.client.set_address(node_id(member), address)

    async def average(self) -> None:
        """Average once, and report it."""
        cpu_s, start_s = self._cpu_s(), now_s()
        self._driver.post(cast("ev.Event", Begin()))
        await self._end_of_job()
        end_s, cpu_s = now_s(), self._cpu_s() - cpu_s
        reply = await self.compute.submit(Check(self._options.members))
        done(start_s, end_s, cpu_s, reply.result.error)

    def _cpu_s(self) -> float:
        times = psutil.Process(self.compute.pid).cpu_times()
        return own_cpu_s() + float(times.user + times.system)


async def _nothing_kept(_: object) -> None:
    return None


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def serve(options: Options) -> None:
    """Average as often as the standard input says."""
    lines = await _lines()
    async with AveragingNode(options) as node:
        say("LISTENS", node.port)
        while words := (await lines.readline()).decode().split():
            if words[0] == "PEERS":
                node.use_peers(words[1:])
                say("READY")
            else:
                await node.average()


def main() -> None:
    """Run one member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--member", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--compression", type=Method, default=Method.NONE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plaintext", action="store_true")
    keep_freed_memory()
    words = vars(parser.parse_args())
    if words.pop("plaintext"):
        take_off_tls()
    run_loop(serve(Options(**words)))


if __name__ == "__main__":
    main()
