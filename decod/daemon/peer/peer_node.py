"""One peer on its host, between its training loop and the other peers.

hello of the loop -> join the run -> listen -> ready -> rounds ... -> bye -> leave
"""

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from decod import __version__
from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.daemon.gateway import TensorTraffic
from decod.daemon.host import Host, Say
from decod.daemon.node import FLUSH_S, Node
from decod.daemon.node_errors import run_job
from decod.daemon.peer.loop_link import LoopFacts, LoopLink, LoopMessage
from decod.daemon.peer.peer_entry import PeerPart
from decod.daemon.peer.peer_gateway import CopyNotes, PeerGateway, fetch_state
from decod.daemon.reachability import require_reachable
from decod.daemon.twins import Twins
from decod.driver.arena import ArenaAllocator
from decod.driver.compute import ComputeProcess
from decod.driver.peer_driver import PeerDriver, PeerPorts, StateCopy
from decod.errors import DecodError, NetworkError
from decod.ids import NodeId
from decod.journal.history import SeenMember
from decod.journal.journal import JournalEntry
from decod.journal.journal_file import FOLDER, KeptJournal
from decod.journal.logs import NodeLog
from decod.journal.records import Mode, RoundRow
from decod.membership.identity import name_of
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.join_string import ADDRESSES_MAX
from decod.net.rate_caps import Pace
from decod.net.server import DataServices
from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.company import Company
from decod.protocol.collaboration.peer import PeerMachine
from decod.protocol.core.effects import Note, Stop, StopReason
from decod.protocol.core.jobs import Configure
from decod.protocol.core.messages.round_messages import PeerEntry
from decod.protocol.core.view import Role
from decod.tasks import beside, until_first

# --- contacts ------------------------------------------------------------------------------------
# Where newcomers are sent, and who may admit them, as a peer of a collaborative run knows it.


class PeerContacts:
    """The addresses of a run's peers.

    Args:
        admits: Whether this node admits newcomers.
        company: Returns what this node's core knows of others; None before it has started.
        own_address: Returns this node's address.
        told: Addresses that this node was given.
    """

    def __init__(
        self,
        *,
        admits: bool,
        company: Callable[[], Company | None],
        own_address: Callable[[], str],
        told: tuple[str, ...],
    ) -> None:
        self._admits, self._company = admits, company
        self._own_address, self._told = own_address, told

    def leads(self) -> bool:
        """Whether this node counts the uses of tokens: each data node counts those of its own."""
        return self._admits

    def leads_elsewhere(self) -> str | None:
        """Return None if this node counts the uses of tokens, and else an empty address."""
        return None if self._admits else ""

    def others(self) -> tuple[str, ...]:
        """Return the addresses of the other peers, the coordinator's first."""
        company, own = self._company(), self._own_address()
        found = () if company is None else company.addresses
        return tuple(address for address in found if address != own)

    def addresses(self, *, others: bool = False) -> tuple[str, ...]:
        """Return addresses that newcomers can ask, this node's first."""
        own = () if others and self.others() else (self._own_address(),)
        return tuple(dict.fromkeys((*own, *self.others())))[:ADDRESSES_MAX]

    def admitting(self) -> tuple[str, ...]:
        """Return addresses of nodes that may renew this node's papers."""
        return tuple(dict.fromkeys((*self._told, *self.others())))


# --- measurements --------------------------------------------------------------------------------
# What a peer measures of its rounds and its host, for `decod analyse`.


class LoopMetrics:
    """Measures what one peer does.

    Args:
        loop: What its training loop has said.
        part: Its part in the run.
        name: Its name.
        kept: Gets a row on each round.
        traffic: Counts its tensors.
        compute_s: Returns how long the averaging process has worked so far, in seconds.
    """

    def __init__(
        self,
        loop: LoopFacts,
        part: PeerPart,
        name: str,
        kept: KeptJournal,
        traffic: TensorTraffic,
        compute_s: Callable[[], float],
    ) -> None:
        self._loop, self._part, self._name, self._kept = loop, part, name, kept
        self._traffic, self._events = traffic, asyncio.get_running_loop()
        self._ended_s: float | None = None
        """When the last round ended here, on the event loop's clock. None: none has."""
        self._compute_s, self._computed_s = compute_s, 0.0
        self._begin()

    def _begin(self) -> None:
        """Begin to count anew."""
        self._num_steps = self._num_samples = 0
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._waits_s: float | None = None
        """Since when the loop has been told to wait, or the batch is full."""
        self._begun_s: float | None = None
        """When the average began."""

    # --- the loop -----------------------------------------------------------------------------

    def stepped(self, num_samples: int, seconds: Mapping[str, float]) -> None:
        """Count a step of the loop."""
        self._num_steps += 1
        self._num_samples += num_samples
        for name, value in seconds.items():
            self._spent[name] += value

    def waits(self) -> None:
        """The loop has been told to wait."""
        self._waits_s = self._waits_s or self._events.time()

    # --- rounds -------------------------------------------------------------------------------

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry."""
        match entry.event:
            case "round.closing":
                self.waits()
            case "round.begun":
                self._begun_s = self._events.time()
            case "round.committed":
                compute_s = self._compute_s()
                self._spent["average"] = compute_s - self._computed_s
                self._computed_s = compute_s
                self._record(entry.fields)

    def _record(self, fields: Mapping[str, Any]) -> None:
        now_s, began_s = self._events.time(), self._ended_s
        self._ended_s = now_s
        _, averages = self._traffic.take(began_s or now_s)
        if began_s is not None:
            self._kept.add(self._row(fields, now_s, began_s, averages))
        self._begin()

    def _row(
        self, fields: Mapping[str, Any], now_s: float, began_s: float, averages: Any
    ) -> RoundRow:
        loop, spent = self._loop, self._spent
        begun_s = self._begun_s if self._begun_s is not None else now_s
        waits_s = self._waits_s if self._waits_s is not None else begun_s
        return RoundRow(
            mode=Mode.OPTIMIZER,
            time_s=wall_clock(),
            run=self._part.run_id,
            peer=self._part.membership.node_id,
            name=self._name,
            round=int(fields["round"]),
            round_s=now_s - began_s,
            steps=self._num_steps,
            samples=int(fields["own"]),
            round_samples=int(fields["samples"]),
            data_s=spent.get("data"),
            forward_s=spent.get("forward"),
            backward_s=spent.get("backward"),
            unsplit_s=spent.get("unsplit"),
            accumulate_s=spent["accumulate"],
            optimizer_s=spent["apply"],
            matchmaking_s=max(0.0, begun_s - waits_s),
            averaging_s=max(0.0, now_s - begun_s),
            averaging_compute_s=max(0.0, spent["average"]),
            wait_s=spent["wait"],
            average_sending_s=averages.sending_s,
            average_sent_bytes=averages.sent_bytes,
            average_received_bytes=averages.received_bytes,
            peers=int(fields["peers"]),
            target_batch_size=loop.terms.target_batch_size,
            batch_size_per_step=loop.batch_size_per_step,
            accumulation_steps=loop.accumulation_steps,
            local_updates=loop.terms.use_local_updates,
            overlap=loop.rounds.overlap,
            compression=loop.terms.compression,
            device=loop.device,
        )


_COMMAND = (sys.executable, "-P", "-m", "decod.worker.averaging")
_AVERAGES_MAX = 24
"""Models that the memory which loop, node and averaging process share has room for: a contribution
and the parts of an average, and averages that the loop has not applied."""

_MEET_S = 15.0
"""How long a newcomer waits for a word of the run's coordinator."""
_SEEK_S = 5.0
"""Time between two looks for other peers in the DHT."""
_TELL_S = 1.0
"""Time between two words on the run's progress to the loop."""


# --- the node ------------------------------------------------------------------------------------


class PeerNode(Node):
    """One peer.

    Args:
        loop: What its loop has said.
        part: Its part in the run.
        config: This host's choices.
        host: This host.
        link: To the loop.
        say: Takes lines for the user.
    """

    part: PeerPart
    gateway: PeerGateway
    contacts: PeerContacts

    def __init__(
        self,
        loop: LoopFacts,
        part: PeerPart,
        config: NodeConfig,
        host: Host,
        link: LoopLink,
        say: Say,
    ) -> None:
        super().__init__(config, part, host, say)
        self._loop, self._link = loop, link
        self._driver: PeerDriver | None = None
        self.contacts = PeerContacts(
            admits=part.membership.role is Role.DATA,
            company=lambda: self._company,
            own_address=lambda: self.address,
            told=part.contacts,
        )
        registrar = self._make_invitations()
        self.gateway = PeerGateway(
            part.membership,
            part.run_id,
            hello=self._hello,
            status=lambda: json.dumps(self.status()),
            twins=partial(Twins, part.membership, lambda: self.address, self.note),
            pace=Pace(config.upload_max_bytes_per_s),
        )
        services = None if registrar is None else DataServices(registrar, _no_block, _no_receipt)
        self._make_sockets(services, self.contacts.others)
        self._commands = {"status": self._status, **self.invitations.commands()}
        self._arena = ArenaAllocator(_AVERAGES_MAX * loop.model_bytes + (64 << 20))
        self._compute: ComputeProcess | None = None
        self._pids = [os.getpid()]
        folder = config.state_dir / FOLDER
        self._kept = KeptJournal(
            folder, part.run_id, self.node_id, self.name, lambda: self._pids, self.note
        )
        self._metrics = LoopMetrics(
            loop,
            part,
            self.name,
            self._kept,
            self.gateway.traffic,
            lambda: self.driver.compute_s,
        )
        self._journal.follow(self._metrics, host.history, self, NodeLog())
        self._copies = CopyNotes(self.note)
        self._met = asyncio.Event()
        """Another peer is there."""

    # --- life ---------------------------------------------------------------------------------

    @override
    async def _start(self) -> None:
        stack, part, gateway = self._stack, self.part, self.gateway
        stack.callback(self._arena.close)
        self._compute = compute = await ComputeProcess.start(
            self._arena, log_path=self.config.state_dir / "averaging.log", command=_COMMAND
        )
        stack.push_async_callback(compute.close)
        self._pids.append(compute.pid)
        await stack.enter_async_context(self._kept)
        await self._listen()
        await self._configure()
        # A checkpoint is a state of the run. What a newcomer's script has made itself is none.
        has_state = not part.known or self._loop.height.round > 0
        height, rounds = self._loop.height, self._loop.config()
        machine = PeerMachine(
            self.node_id, self.address, height, rounds, has_state=has_state, name=self.name
        )
        ports = PeerPorts(
            transport=gateway, tell_loop=self._tell_loop, fetch=self._fetch, on_note=self._noted
        )
        self._driver = driver = PeerDriver(machine, compute, self._arena, self._loop.sizes(), ports)
        stack.push_async_callback(driver.close)
        gateway.attach(driver)
        driver.start()
        self.note("node.started", node_id=self.node_id, address=self.address)
        self._doubts.begin(self.address, (each for _, each in part.known))
        if part.known:
            # Before others hear of this node: another host may have its identity.
            asked = part.known[0][1]
            await require_reachable(part.membership, part.run_id, asked, self.address)
        renewing = self._keep_renewed(gateway.client.redial)
        await stack.enter_async_context(beside(self._seek_others(), renewing))
        for node, address in part.known:
            self._meet(node, address)
        await self._wait_met()
        await stack.enter_async_context(beside(self._keep_telling()))

    async def _configure(self) -> None:
        loop = self._loop
        settings = {
            "shapes": [list(shape) for shape in loop.shapes],
            "wide": loop.terms.wide,
            "compression": asdict(loop.compression),
            "num_threads": self.config.num_threads,
            "audited": False,
        }
        assert self._compute is not None
        log = self.config.state_dir / "averaging.log"
        await run_job(self._compute, Configure(settings), "averaging", log)

    @property
    def _company(self) -> Company | None:
        return None if self._driver is None else self._driver.peer.company

    @property
    def driver(self) -> PeerDriver:
        assert self._driver is not None
        return self._driver

    # --- other peers --------------------------------------------------------------------------

    def _meet(self, node: NodeId, address: str) -> None:
        """Tell the core of another node of the run."""
        bans = self.part.membership.bans
        if node != self.node_id and bans.allowed(node):
            self.gateway.client.set_address(node, address)
            self.driver.post(lp.PeerFound(node, address))

    async def _wait_met(self) -> None:
        """Wait for a word of the run's coordinator, if there is another one.

        A node that has no state of the run stops if there is none.
        """
        if not self.part.known:
            return
        past = self.driver.peer.past
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEET_S if past.has_state else None):
                await until_first(self._met.wait(), self.driver.stopped)

    async def _seek_others(self) -> None:
        """Look for other peers in the DHT, now and then. Never returns."""
        if self.part.contacts:
            await self.dht.bootstrap(self.part.contacts)
        while True:
            known = {self.address, *self.contacts.others()}
            for address in self.dht.addresses():
                if address not in known:
                    await self._ask(address)
            await asyncio.sleep(_SEEK_S)

    async def _ask(self, address: str) -> None:
        part = self.part
        request = HelloRequest(run_id=part.run_id, sender=self.node_id, sender_address=self.address)
        with suppress(DecodError):
            info = await hello(address, request, part.membership)
            if info.run_id == part.run_id:
                self._meet(info.node_id, address)

    def _hello(self, request: HelloRequest) -> HelloInfo | None:
        company = self._company
        if company is None:
            return None
        coordinator, address = company.coordinator, self.address
        if coordinator != self.node_id:
            address = self.gateway.address_of(coordinator) or ""
        return self._info(request, self.part.terms.to_json(), coordinator, address)

    async def _fetch(self, wanted: lp.LoadState) -> StateCopy:
        part = self.part
        return await fetch_state(wanted, part.membership, part.run_id, self.gateway.address_of)

    # --- the loop -----------------------------------------------------------------------------

    async def serve(self, asked: asyncio.Event) -> Stop:
        """Welcome the loop, and serve it until it or this node leaves; return how it ended."""
        machine = self.driver.peer
        join_string = ""
        if self.part.membership.role is Role.DATA:
            join_string = self.invitations.invite(Role.RELAY)
        self._link.welcome(self._arena, join_string=join_string, fetching=not machine.company.level)
        reading = asyncio.ensure_future(self._read())
        try:
            await until_first(self.driver.stopped, reading, asked.wait())
            if reading.done():
                reading.result()
            self.driver.post(lp.LeaveRequested())
            stop = await self.driver.stopped
        finally:
            reading.cancel()
        lost = stop.reason is StopReason.STATE_LOST
        self._link.tell("stopped", reason=stop.detail, state_lost=lost)
        await self.gateway.client.flush(timeout_s=FLUSH_S)
        return stop

    async def _read(self) -> None:
        """Take the loop's messages until it says goodbye, or has ended."""
        while (message := await self._link.next()) is not None:
            if message.kind == "bye":
                return
            self._take(message)

    def _tell_loop(self, kind: str, **fields: Any) -> None:
        if kind == "wait":
            self._metrics.waits()
        self._link.tell(kind, **fields)

    def _take(self, message: LoopMessage) -> None:
        driver = self.driver
        match message.kind:
            case "step":
                samples = message.number("samples")
                self._metrics.stepped(samples, message.seconds("seconds"))
                driver.stepped(message.number("step"), samples)
            case "contributed":
                driver.contributed(
                    message.number("request"),
                    message.number("samples"),
                    message.number("base_round"),
                    num_dropped=message.number("dropped"),
                )
            case "read_back":
                driver.read_back()
            case "applied":
                driver.applied(message.number("round"))
            case "failed":
                driver.post(lp.LoopFailed(message.text("what")))
            case "waiting":
                self.note("loop.waited", seconds=self._loop.rounds.averaging_timeout_s)
            case _:
                self._take_of_states(message)

    def _take_of_states(self, message: LoopMessage) -> None:
        driver = self.driver
        match message.kind:
            case "state":
                path, text = Path(message.text("path")), message.text("description")
                self._copies.made(path)
                copy = StateCopy(path, text, message.number("round"))
                driver.copied(message.number("request"), copy)
            case "state_failed":
                self._copies.failed(message.text("what"))
                driver.copied(message.number("request"), message.text("what"))
            case "state_refused":
                driver.refused(message.text("what"))
            case "loaded":
                driver.loaded()

    def take(self, entry: JournalEntry) -> None:
        """Follow the journal: who is there when a round ends."""
        company = self._company
        if entry.event == "round.committed" and company is not None:
            peers = company.entries
            seen = [SeenMember(each.node_id, _name_of(each), 0) for each in peers]
            self._host.history.see(seen, time_s=entry.time_s)

    async def _keep_telling(self) -> None:
        """Tell the loop of the run's progress, and remember who is there. Never returns."""
        told: tuple[object, ...] = ()
        while True:
            facts = self.driver.peer.facts()
            if (facts.round, facts.num_peers) != told:
                told = facts.round, facts.num_peers
                self._remember(self.part.terms.run, self.contacts.others())
                self._link.tell(
                    "progress",
                    round=facts.round,
                    peers=facts.num_peers,
                    samples=facts.num_samples,
                    target=self.part.terms.target_batch_size,
                    samples_per_s=facts.samples_per_s,
                )
            await asyncio.sleep(_TELL_S)

    async def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.status()

    def describe(self) -> str:
        """Return one line on this node's state."""
        facts = self.driver.peer.facts()
        return f"round {facts.round}, {facts.num_peers} hosts"

    @property
    def healthy(self) -> bool:
        """Whether the core has not failed."""
        return not self.driver.broken

    # --- what others see ----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the status of the run as this node knows it."""
        peer = self.driver.peer
        facts, own, company = peer.facts(), peer.own, peer.company
        return {
            "collaboration": 1,
            "run": self.part.terms.run,
            "run_id": self.part.run_id,
            "node_id": self.node_id,
            "name": self.name,
            "decod_version": __version__,
            "device": self._loop.device,
            "address": self.address,
            **asdict(facts),
            "peers": [
                {
                    "id": each.node_id,
                    "name": _name_of(each),
                    "level": each.level,
                }
                for each in company.entries
            ],
            "target_batch_size": self.part.terms.target_batch_size,
            "samples": {
                "stepped": own.num_stepped,
                "applied": own.num_applied,
                "outstanding": own.num_outstanding,
                "dropped": own.num_dropped,
                "lost": company.num_lost,
            },
        }

    def _noted(self, note: Note) -> None:
        if note.event in ("coordinator.followed", "peer.admitted"):
            self._met.set()
        self.note(note.event, **dict(note.fields))


def _name_of(peer: PeerEntry) -> str:
    return peer.name or name_of(peer.node_id)


async def _no_block(*_: Any) -> Any:
    raise NetworkError(
        "this node has no prepared data",
        why="each host of a collaborative run reads its own",
        fix="nothing",
        code="E-NET-032",
    )


def _no_receipt(_: NodeId) -> Any:
    raise NetworkError(
        "this node writes no receipts",
        why="collaborative runs have none",
        fix="nothing",
        code="E-NET-032",
    )
