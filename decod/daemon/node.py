"""What every node of a run is on its host: sockets, papers, journal, and its end.

    processes of its own -> listen (gRPC, DHT, local socket) -> join the run
    ... until the core stops, or a signal asks for it ...
    say goodbye -> stop listening -> end the processes

A `PipelineNode` trains a stage of a model. A `PeerNode` serves a training loop that runs elsewhere.
Each says which core it runs, in which processes of its own, and what it answers. A node holds no
protocol logic. Its parts take what they need, and none of them takes the node.
"""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

from decod.clocks import Stopwatch, wall_clock
from decod.config.node_config import NodeConfig
from decod.daemon.frontend import Command, unknown_request
from decod.daemon.host import Host, Say
from decod.daemon.invitations import Invitations
from decod.daemon.member_admission import keep_renewed
from decod.daemon.node_folder import KnownPeers, tell_unkept
from decod.daemon.reachability import AddressDoubts, advertised, listen
from decod.daemon.run_facts import NodePart
from decod.daemon.succession import Contacts
from decod.ids import NodeId
from decod.journal.journal import Journal
from decod.membership.papers import TERMS
from decod.membership.registrar import Registrar
from decod.membership.tokens import Tokens
from decod.net.ask import HelloInfo, HelloRequest
from decod.net.client import PeerClient
from decod.net.dht import Dht, DhtPorts
from decod.net.net_limits import LIMITS
from decod.net.server import DataServices, PeerHandler, PeerServer
from decod.protocol.core.view import Role
from decod.tasks import in_thread

FLUSH_S = 3.0
"""Timeout of sending the last messages to the peers."""


class NodeGateway(PeerHandler, Protocol):
    """The adapter between the sockets and the driver of the core."""

    client: PeerClient
    watch: Stopwatch

    def detach(self) -> None:
        """Stop handing messages on."""

    async def close(self) -> None:
        """Close all connections that this node has opened."""


class Node:
    """One node, from its first listening socket to its last goodbye. Use it in `async with`.

    A subclass makes `gateway` and `contacts`, then calls `_make_invitations` and `_make_sockets`.

    Args:
        config: This host's choices.
        part: The node's part in the run.
        host: The host, which holds the folder's lock.
        say: Takes lines for the operator's terminal.
    """

    part: NodePart
    gateway: NodeGateway
    contacts: Contacts

    def __init__(self, config: NodeConfig, part: NodePart, host: Host, say: Say) -> None:
        self.config, self.part, self.say = config, part, say
        self.node_id = host.identity.node_id
        self.name, self.address = config.name or host.identity.name, ""
        self._host, self._stack = host, AsyncExitStack()
        self.waits = host.waits
        self._journal = Journal()
        self.note = self._journal.note
        """Record an event: in the log, in the status if it is not routine, and for all others who
        follow the journal."""
        self._doubts = AddressDoubts(config, self.note)
        self._commands: dict[str, Command] = {}
        """Answer the operator's requests, by name."""

    def _make_invitations(self) -> Registrar | None:
        """Make what admits others, and return it; None at a volunteer."""
        part, registrar = self.part, None
        if part.membership.role is Role.DATA:
            tokens, elsewhere = Tokens(part.membership.folder), self.contacts.leads_elsewhere
            newcomers = self._host.newcomers
            registrar = Registrar(
                part.membership, tokens, wall_clock, elsewhere, self.note, newcomers
            )
        self.invitations = Invitations(registrar, self.contacts, part.run_id, self.note)
        return registrar

    def _make_sockets(
        self, services: DataServices | None, known: Callable[[], Iterable[str]]
    ) -> None:
        """Make the server of calls and this node's part of the DHT.

        Args:
            services: What a data node does for others.
            known: Returns addresses of nodes of the run.
        """
        part, bans = self.part, self.part.membership.bans
        self._server = PeerServer(
            part.membership,
            part.run_id,
            self.gateway,
            limits=replace(LIMITS, connections_max=self._host.files.connections_max),
            watch=self.gateway.watch,
            services=services,
        )
        counters = self._server.counters
        ports = DhtPorts(clock=part.clock, known=known, allowed=bans.allowed, counters=counters)
        self.dht = Dht(part.membership, part.run_id, ports)

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stack.__aexit__(*exc_info)

    async def _start(self) -> None:
        """Start the parts."""
        raise NotImplementedError

    async def _listen(self) -> int:
        """Listen for peers, and find out this node's address; return the port."""
        found = await listen(self._server, self.dht, self.config, self.say)
        self._stack.callback(self.gateway.detach)
        self._stack.push_async_callback(self._server.stop, 0.5)
        self._stack.push_async_callback(self.gateway.close)
        self._stack.push_async_callback(self.dht.close)
        self.address = advertised(self.config, found, self.part.observed_address)
        return found

    async def _keep_renewed(self, redial: Callable[[], None]) -> None:
        """Renew this node's papers in time, and show the new ones from then on. Never returns."""
        await keep_renewed(
            self.part.membership,
            self.contacts.admitting,
            TERMS,
            note=self.note,
            say=self.say,
            renewed=redial,
        )

    def _remember(self, run_name: str, others: Iterable[str]) -> None:
        """Keep the addresses of the run's other nodes, by which a later start finds it."""
        peers, part = KnownPeers(self.config.state_dir), self.part
        root, run_id = part.membership.root, part.run_id
        kept = in_thread(lambda: peers.keep(root, run_id, run_name, others))
        kept.add_done_callback(partial(tell_unkept, self.note))

    # --- what it answers ----------------------------------------------------------------------

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request.

        Raises:
            ConfigError: The request is of another release, or this node can't answer it
                (E-RUN-003).
        """
        command = str(request.get("command"))
        if command not in self._commands:
            raise unknown_request(command)
        return await self._commands[command](request)

    def _info(
        self, request: HelloRequest, description: str, leader: NodeId | None, address: str
    ) -> HelloInfo:
        """Return the answer to a stranger's hello.

        Args:
            request: The hello.
            description: Of the run, as JSON.
            leader: Who leads, as far as this node knows.
            address: The leader's.
        """
        self._doubts.asked(self.address, request.observed_address)
        return HelloInfo(
            run_id=self.part.run_id,
            manifest_json=description,
            charter=self.part.charter,
            node_id=self.node_id,
            leader=leader,
            leader_address=address,
        )
